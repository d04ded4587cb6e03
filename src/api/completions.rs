//! `/v1/completions`: raw prompts, and sequences to OpenAI's older completion objects.

use super::Api;
use super::answer::{Choice, Shape, finish_reason, logarithm, token_text};
use super::body::Received;
use super::error::ApiError;
use super::generate::{Job, Prompt};
use super::sequence::Delta;
use super::wire::{CHOICES_MAX, CommonFields, alternatives};
use crate::engine::GeneratedToken;
use crate::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct CompletionFields {
    prompt: Option<Prompts>,
    logprobs: Option<u64>,
    echo: Option<bool>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "`prompt` must be a string, an array of strings, an array of token ids or an array of such arrays"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<u64>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u64>>),
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
    let text = |text: String| Prompt {
        tokens: api.tokenizer.encode_prompt(&text).into(),
        echo: if echo { text } else { String::new() },
    };
    let tokens = |ids: Vec<u64>| -> Result<Prompt, ApiError> {
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
        Some(Prompts::Text(one)) => vec![text(one)],
        Some(Prompts::Tokens(one)) => vec![tokens(one)?],
        Some(Prompts::Texts(list)) => {
            several(list.len())?;
            list.into_iter().map(text).collect()
        }
        Some(Prompts::TokenLists(list)) => {
            several(list.len())?;
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
