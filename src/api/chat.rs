//! `/v1/chat/completions`: messages to a prompt, and a sequence to OpenAI's chat objects.

use super::Api;
use super::answer::{Choice, Shape, finish_reason, logarithm, token_text};
use super::body::Received;
use super::bounded::{Fields, Values};
use super::error::ApiError;
use super::generate::{Job, Prompt};
use super::sequence::Delta;
use super::wire::{CommonFields, alternatives};
use crate::engine::GeneratedToken;
use crate::tokenizer::{ChatError, ChatOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct ChatFields {
    messages: Values,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    chat_template_kwargs: Option<Fields>,
}

/// Parses, renders and tokenises; runs on a blocking thread.
pub(super) fn prepare(api: &Api, body: &Received) -> Result<Job, ApiError> {
    let common: CommonFields = body.json()?;
    let parameters = common.parameters(api.random())?;
    let fields: ChatFields = body.json()?;
    let logprobs = fields.logprobs == Some(true);
    let top = alternatives("top_logprobs", fields.top_logprobs.unwrap_or(0))?;
    if top > 0 && !logprobs {
        return Err(ApiError::invalid(
            "top_logprobs",
            "`top_logprobs` needs `logprobs` to be true",
        ));
    }
    let Values(messages) = fields.messages;
    check_messages(&messages)?;
    // What a template leaves out of a conversation does not make one fit that is this long.
    api.check_text_fits("messages", messages.iter().map(content_bytes).sum())?;
    let options = ChatOptions {
        variables: fields.chat_template_kwargs.unwrap_or_default().0,
        ..ChatOptions::default()
    };
    let prompt = api
        .template
        .prompt(&api.tokenizer, &messages, &options)
        .map_err(refusal)?;
    Ok(Job {
        prompts: vec![Prompt {
            tokens: prompt.tokens.into(),
            echo: String::new(),
        }],
        prompt_field: "messages",
        parameters,
        top_logprobs: logprobs.then_some(top),
        continues: false,
        shape: Shape::Chat { logprobs },
    })
}

/// Bytes of a message's text, whole or in parts.
fn content_bytes(message: &Value) -> usize {
    let text = |value: &Value| value.as_str().map_or(0, str::len);
    match message.get("content") {
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text"));
            texts.map(text).sum()
        }
        Some(content) => text(content),
        None => 0,
    }
}

fn refusal(error: ChatError) -> ApiError {
    ApiError::invalid("messages", error.to_string())
}

/// Roles that OpenAI has. What the content may be is the template module's to say.
fn check_messages(messages: &[Value]) -> Result<(), ApiError> {
    for (i, message) in messages.iter().enumerate() {
        match message.get("role").and_then(Value::as_str) {
            Some("system" | "developer" | "user" | "assistant" | "tool") | None => {}
            Some(role) => {
                return Err(ApiError::invalid(
                    "messages",
                    format!(
                        "`messages[{i}].role` is `{role}`; it may be system, developer, user, assistant or tool"
                    ),
                ));
            }
        }
    }
    Ok(())
}

pub(super) fn chunk_choices(
    tokenizer: &Tokenizer,
    choice: &mut Choice,
    delta: &Delta,
    logprobs: bool,
) -> Vec<Value> {
    let mut choices = Vec::new();
    let mut add = |delta: Value, logprobs: Value, finish: Value| {
        choices.push(json!({
            "index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        }));
    };
    if !choice.started {
        choice.started = true;
        add(
            json!({"role": "assistant", "content": ""}),
            Value::Null,
            Value::Null,
        );
    }
    if !delta.text.is_empty() || !delta.tokens.is_empty() {
        let logprobs = logprobs_of(tokenizer, &delta.tokens, logprobs);
        add(json!({"content": delta.text}), logprobs, Value::Null);
    }
    if delta.finish.is_some() {
        add(json!({}), Value::Null, finish_reason(delta.finish));
    }
    choices
}

pub(super) fn whole_choice(
    tokenizer: &Tokenizer,
    choice: &Choice,
    whole: &Delta,
    logprobs: bool,
) -> Value {
    json!({
        "index": choice.index,
        "message": {"role": "assistant", "content": whole.text, "refusal": null},
        "logprobs": logprobs_of(tokenizer, &whole.tokens, logprobs),
        "finish_reason": finish_reason(whole.finish),
    })
}

fn logprobs_of(tokenizer: &Tokenizer, tokens: &[GeneratedToken], wanted: bool) -> Value {
    if !wanted {
        return Value::Null;
    }
    let one = |id: u32, logprob: Option<f32>| {
        let mut fields = Map::new();
        fields.insert("token".to_owned(), json!(token_text(tokenizer, id)));
        fields.insert("logprob".to_owned(), json!(logarithm(logprob)));
        fields.insert(
            "bytes".to_owned(),
            json!(tokenizer.piece_bytes_with_control(id)),
        );
        fields
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut fields = one(token.id, token.logprob);
            let top = token
                .top
                .iter()
                .map(|(id, logprob)| Value::Object(one(*id, Some(*logprob))))
                .collect();
            fields.insert("top_logprobs".to_owned(), Value::Array(top));
            Value::Object(fields)
        })
        .collect();
    json!({"content": content, "refusal": null})
}
