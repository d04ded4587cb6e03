//! Chat messages in OpenAI's form, made ready for a template, and which of their strings a client wrote freely.

use super::chat_template::ChatError;
use serde_json::{Map, Value};

/// Checks messages and gives them the form that templates expect: `content` is one string, `arguments` an object.
pub(super) fn prepare(messages: &[Value]) -> Result<Value, ChatError> {
    if messages.is_empty() {
        return Err(invalid("`messages` is empty"));
    }
    messages
        .iter()
        .enumerate()
        .map(|(i, message)| prepare_one(i, message))
        .collect()
}

fn invalid(problem: impl Into<String>) -> ChatError {
    ChatError::Invalid(problem.into())
}

fn prepare_one(i: usize, message: &Value) -> Result<Value, ChatError> {
    let Some(fields) = message.as_object() else {
        return Err(invalid(format!("`messages[{i}]` is not an object")));
    };
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(invalid(format!("`messages[{i}].role` is not a string")));
    }
    let mut fields = fields.clone();
    let content = match fields.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => join(i, parts)?,
        Some(_) => {
            return Err(invalid(format!(
                "`messages[{i}].content` is neither a string nor an array of parts"
            )));
        }
    };
    fields.insert("content".to_string(), Value::String(content));
    if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(Value::Object(fields))
}

/// The text of content parts, one per line, as llama.cpp joins them.
fn join(i: usize, parts: &[Value]) -> Result<String, ChatError> {
    if parts.is_empty() {
        return Err(invalid(format!(
            "`messages[{i}].content` is an empty array"
        )));
    }
    let mut texts = Vec::with_capacity(parts.len());
    for (j, part) in parts.iter().enumerate() {
        let place = format!("messages[{i}].content[{j}]");
        let kind = part.get("type").and_then(Value::as_str);
        let field = match kind {
            Some("text" | "input_text" | "output_text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                return Err(invalid(format!(
                    "`{place}` has type `{other}`; this model takes text only"
                )));
            }
            None => return Err(invalid(format!("`{place}` has no `type`"))),
        };
        match part.get(field).and_then(Value::as_str) {
            Some(text) => texts.push(text),
            None => return Err(invalid(format!("`{place}.{field}` is not a string"))),
        }
    }
    Ok(texts.join("\n"))
}

/// OpenAI sends the arguments of a call as a string of JSON; templates print them with `tojson`, which would quote it.
fn parse_arguments(call: &mut Value) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else {
        return;
    };
    if let Value::String(text) = arguments
        && let Ok(object @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = object;
    }
}

/// Strings that templates compare with and that no client can use to write text.
const ROLES: [&str; 8] = [
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "function",
    "model",
    "ipython",
];
const TYPES: [&str; 9] = [
    "function", "text", "object", "string", "integer", "number", "boolean", "array", "null",
];

/// The same value with every string that a client wrote freely replaced by `replace` of it. Keys of objects count
/// where they hold more than an identifier does; templates look others up.
pub(super) fn replace_texts(value: &Value, replace: &mut dyn FnMut(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(replace(text)),
        Value::Array(items) => items
            .iter()
            .map(|item| replace_texts(item, replace))
            .collect(),
        Value::Object(fields) => {
            let mut replaced = Map::with_capacity(fields.len());
            for (key, field) in fields {
                let fixed = match (key.as_str(), field.as_str()) {
                    ("role", Some(role)) => ROLES.contains(&role),
                    ("type", Some(kind)) => TYPES.contains(&kind),
                    _ => false,
                };
                let field = if fixed {
                    field.clone()
                } else {
                    replace_texts(field, replace)
                };
                let key = if is_identifier(key) {
                    key.clone()
                } else {
                    replace(key)
                };
                replaced.insert(key, field);
            }
            Value::Object(replaced)
        }
        other => other.clone(),
    }
}

/// About the bytes of a value as JSON.
pub(super) fn bytes_of(value: &Value) -> usize {
    const PUNCTUATION: usize = 4;
    PUNCTUATION
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(bytes_of).sum(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, field)| key.len() + bytes_of(field))
                .sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

fn is_identifier(key: &str) -> bool {
    key.bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"_-.$/: ".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn content_becomes_one_string() {
        let check = |content: Value, expected: &str| {
            for role in ["system", "user", "assistant", "tool"] {
                let prepared = prepare(&[json!({"role": role, "content": content})]).unwrap();
                assert_eq!(prepared[0]["content"], expected);
            }
        };
        check(json!("a"), "a");
        check(Value::Null, "");
        check(
            json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            "a\nb",
        );
        check(json!([{"type": "refusal", "refusal": "no"}]), "no");
        assert_eq!(
            prepare(&[json!({"role": "assistant"})]).unwrap()[0]["content"],
            ""
        );
    }

    #[test]
    fn what_is_no_text_is_named() {
        for (message, words) in [
            (json!({"role": "user", "content": []}), "empty array"),
            (
                json!({"role": "user", "content": [{"type": "text"}]}),
                "messages[0].content[0].text",
            ),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
                "image_url",
            ),
            (
                json!({"role": "user", "content": [{"text": "x"}]}),
                "no `type`",
            ),
            (json!({"role": "user", "content": 7}), "messages[0].content"),
            (json!({"content": "x"}), "messages[0].role"),
            (json!("x"), "messages[0]"),
        ] {
            let ChatError::Invalid(text) = prepare(&[message]).unwrap_err() else {
                panic!("another error");
            };
            assert!(text.contains(words), "{text}");
        }
        assert!(prepare(&[]).is_err());
    }

    #[test]
    fn arguments_become_objects() {
        let call = |arguments: &str| {
            let message = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
            prepare(&[message]).unwrap()[0]["tool_calls"][0]["function"]["arguments"].clone()
        };
        assert_eq!(call(r#"{"b":1,"a":2}"#).to_string(), r#"{"b":1,"a":2}"#);
        assert_eq!(call("not json"), "not json");
        assert_eq!(call("3"), "3");
    }

    #[test]
    fn free_texts_are_replaced_and_structure_is_not() {
        let value = json!([
            {"role": "user", "content": "hi", "n": 1},
            {"role": "user<|x|>", "type": "string", "<|k|>": {"type": "<|t|>"}}
        ]);
        let replaced = replace_texts(&value, &mut |_| "#".to_string());
        let expected = json!([
            {"role": "user", "content": "#", "n": 1},
            {"role": "#", "type": "string", "#": {"type": "#"}}
        ]);
        assert_eq!(replaced, expected);
    }
}
