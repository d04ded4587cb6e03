//! `/v1/completions`: raw prompts, and sequences to OpenAI's older completion objects.

use super::Api;
use super::answer::{Choice, Shape, finish_reason, logarithm, token_text};
use super::body::Received;
use super::bounded::{TOKENS_MAX, TokenIds};
use super::error::ApiError;
use super::generate::{Job, Prompt};
use super::sequence::Delta;
use super::wire::{CHOICES_MAX, CommonFields, alternatives};
use crate::engine::GeneratedToken;
use crate::tokenizer::Tokenizer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, SeqAccess, Visitor,
};
use serde_json::{Map, Value, json};
use std::fmt::Formatter;

#[derive(serde::Deserialize)]
struct CompletionFields {
    prompt: Option<Prompts>,
    logprobs: Option<u64>,
    echo: Option<bool>,
}

/// Of lists of prompts the first `CHOICES_MAX` are kept, and the number is how many came.
#[derive(Debug, PartialEq)]
enum Prompts {
    Text(String),
    Tokens(TokenIds),
    Texts(Vec<String>, usize),
    TokenLists(Vec<TokenIds>, usize),
}

const PROMPT_FORMS: &str =
    "a string, an array of strings, an array of token ids or an array of such arrays";

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prompts, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "`prompt` to be {PROMPT_FORMS}")
    }

    fn visit_str<E>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Prompts, A::Error> {
        let left = &mut { TOKENS_MAX };
        let mut prompts = match sequence.next_element_seed(Element(left))? {
            None => return Ok(Prompts::Tokens(TokenIds::default())),
            Some(Prompts::Text(text)) => Prompts::Texts(vec![text], 1),
            Some(Prompts::Tokens(tokens)) => Prompts::TokenLists(vec![tokens], 1),
            Some(first) => first,
        };
        match &mut prompts {
            Prompts::TokenLists(lists, 0) => {
                // The elements are ids.
                let mut tokens = lists.pop().unwrap_or_default();
                tokens.take(sequence, left)?;
                return Ok(Prompts::Tokens(tokens));
            }
            Prompts::Texts(texts, count) => {
                while *count < CHOICES_MAX {
                    match sequence.next_element()? {
                        Some(text) => texts.push(text),
                        None => return Ok(prompts),
                    }
                    *count += 1;
                }
                while let Some(IgnoredAny) = sequence.next_element()? {
                    *count += 1;
                }
            }
            Prompts::TokenLists(lists, count) => {
                while *count < CHOICES_MAX {
                    match sequence.next_element_seed(Element(left))? {
                        Some(Prompts::Tokens(tokens)) => lists.push(tokens),
                        Some(_) => return Err(A::Error::custom("`prompt` mixes kinds of prompts")),
                        None => return Ok(prompts),
                    }
                    *count += 1;
                }
                while let Some(IgnoredAny) = sequence.next_element()? {
                    *count += 1;
                }
            }
            Prompts::Text(_) | Prompts::Tokens(_) => {}
        }
        Ok(prompts)
    }
}

/// An element of the array `prompt`, with what is left of `TOKENS_MAX`.
struct Element<'l>(&'l mut usize);

impl<'de> DeserializeSeed<'de> for Element<'_> {
    type Value = Prompts;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Prompts, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Element<'_> {
    type Value = Prompts;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "`prompt` to be {PROMPT_FORMS}")
    }

    fn visit_str<E>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts::Text(text.to_owned()))
    }

    fn visit_u64<E>(self, id: u64) -> Result<Prompts, E> {
        let mut tokens = TokenIds::default();
        tokens.push(id, self.0);
        Ok(Prompts::TokenLists(vec![tokens], 0))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, sequence: A) -> Result<Prompts, A::Error> {
        let mut tokens = TokenIds::default();
        tokens.take(sequence, self.0)?;
        Ok(Prompts::Tokens(tokens))
    }
}

/// Parses and tokenises; runs on a blocking thread.
pub(super) fn prepare(api: &Api, body: &Received) -> Result<Job, ApiError> {
    let common: CommonFields = body.json()?;
    let parameters = common.parameters(api.random())?;
    let fields: CompletionFields = body.json()?;
    let echo = fields.echo == Some(true);
    let top_logprobs = fields
        .logprobs
        .map(|count| alternatives("logprobs", count))
        .transpose()?;
    if echo && top_logprobs.is_some() {
        return Err(ApiError::unsupported(
            "echo",
            "`echo` with `logprobs` is not supported: there are no log-probabilities of prompts",
        ));
    }
    let text = |text: String| -> Result<Prompt, ApiError> {
        api.check_text_fits("prompt", text.len())?;
        Ok(Prompt {
            tokens: api.tokenizer.encode_prompt(&text).into(),
            echo: if echo { text } else { String::new() },
        })
    };
    let tokens = |ids: TokenIds| -> Result<Prompt, ApiError> {
        if ids.count >= api.context {
            return Err(ApiError::context_length_exceeded(
                "prompt",
                api.context,
                ids.count,
            ));
        }
        let ids = api.known_tokens("prompt", &ids)?;
        let echo = if echo {
            api.tokenizer.decode(&ids)
        } else {
            String::new()
        };
        Ok(Prompt {
            tokens: ids.into(),
            echo,
        })
    };
    let several = |count: usize| {
        let sequences = count * parameters.choices;
        if count > CHOICES_MAX || sequences > CHOICES_MAX {
            return Err(ApiError::invalid(
                "prompt",
                format!(
                    "{count} prompts with `n` {} are too many; a request may have {CHOICES_MAX} answers",
                    parameters.choices
                ),
            ));
        }
        Ok(())
    };
    let prompts: Vec<Prompt> = match fields.prompt {
        None => return Err(ApiError::invalid("prompt", "`prompt` is missing")),
        Some(Prompts::Text(one)) => vec![text(one)?],
        Some(Prompts::Tokens(one)) => vec![tokens(one)?],
        Some(Prompts::Texts(list, count)) => {
            several(count)?;
            list.into_iter().map(text).collect::<Result<_, _>>()?
        }
        Some(Prompts::TokenLists(list, count)) => {
            several(count)?;
            list.into_iter().map(tokens).collect::<Result<_, _>>()?
        }
    };
    Ok(Job {
        prompts,
        prompt_field: "prompt",
        parameters,
        top_logprobs,
        continues: true,
        shape: Shape::Completion {
            logprobs: top_logprobs.is_some(),
        },
    })
}

pub(super) fn chunk_choices(
    tokenizer: &Tokenizer,
    choice: &mut Choice,
    delta: &Delta,
    logprobs: bool,
) -> Vec<Value> {
    let mut choices = Vec::new();
    if !choice.started {
        choice.started = true;
        if !choice.echo.is_empty() {
            let echo = std::mem::take(&mut choice.echo);
            choices.push(choice_of(choice.index, &echo, Value::Null, Value::Null));
        }
    }
    if !delta.text.is_empty() || !delta.tokens.is_empty() {
        let logprobs = logprobs_of(tokenizer, choice, &delta.tokens, logprobs);
        choices.push(choice_of(choice.index, &delta.text, logprobs, Value::Null));
    }
    if delta.finish.is_some() {
        let finish = finish_reason(delta.finish);
        choices.push(choice_of(choice.index, "", Value::Null, finish));
    }
    choices
}

pub(super) fn whole_choice(
    tokenizer: &Tokenizer,
    choice: &mut Choice,
    whole: &Delta,
    logprobs: bool,
) -> Value {
    let text = format!("{}{}", choice.echo, whole.text);
    let logprobs = logprobs_of(tokenizer, choice, &whole.tokens, logprobs);
    choice_of(choice.index, &text, logprobs, finish_reason(whole.finish))
}

fn choice_of(index: usize, text: &str, logprobs: Value, finish: Value) -> Value {
    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
}

fn logprobs_of(
    tokenizer: &Tokenizer,
    choice: &mut Choice,
    tokens: &[GeneratedToken],
    wanted: bool,
) -> Value {
    if !wanted {
        return Value::Null;
    }
    let mut texts = Vec::new();
    let mut offsets = Vec::new();
    let mut tops = Vec::new();
    for token in tokens {
        let text = token_text(tokenizer, token.id);
        offsets.push(choice.characters);
        choice.characters += text.chars().count();
        texts.push(text);
        let top: Map<String, Value> = token
            .top
            .iter()
            .map(|(id, logprob)| (token_text(tokenizer, *id), json!(logarithm(Some(*logprob)))))
            .collect();
        tops.push(Value::Object(top));
    }
    let logprobs: Vec<f32> = tokens
        .iter()
        .map(|token| logarithm(token.logprob))
        .collect();
    json!({
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Prompts, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_have_four_forms() {
        let ids = |ids: &[u64]| TokenIds {
            ids: ids.to_vec(),
            count: ids.len(),
        };
        for (text, expected) in [
            (r#""a""#, Prompts::Text("a".to_owned())),
            ("[]", Prompts::Tokens(ids(&[]))),
            ("[5,6]", Prompts::Tokens(ids(&[5, 6]))),
            (r#"["a"]"#, Prompts::Texts(vec!["a".to_owned()], 1)),
            (
                "[[5],[]]",
                Prompts::TokenLists(vec![ids(&[5]), ids(&[])], 2),
            ),
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        for text in [
            "5",
            "{}",
            "[-1]",
            "[1.5]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1],2]",
            "[[1],\"a\"]",
            "[[[1]]]",
            "[{}]",
        ] {
            parse(text).unwrap_err();
        }
    }

    #[test]
    fn no_list_is_kept_past_its_maximum() {
        for element in ["0", "[]", "\"\"", "[0]"] {
            let many = TOKENS_MAX + 1;
            let text = format!("[{}{element}]", format!("{element},").repeat(many - 1));
            let (kept, count) = match parse(&text).unwrap() {
                Prompts::Tokens(tokens) => (tokens.ids.len(), tokens.count),
                Prompts::Texts(texts, count) => (texts.len(), count),
                Prompts::TokenLists(lists, count) => (lists.len(), count),
                Prompts::Text(_) => (0, 0),
            };
            let kept_max = if element == "0" {
                TOKENS_MAX
            } else {
                CHOICES_MAX
            };
            assert_eq!((kept, count), (kept_max, many), "{element}");
        }
    }
}
