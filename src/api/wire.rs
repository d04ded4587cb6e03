//! What chat and completion requests have in common: OpenAI's fields, checked, and those that llama.cpp and vLLM add.
//!
//! Unknown fields are ignored. Fields of OpenAI's that would change the answer and are not supported are refused, so
//! that nobody takes an answer for what they asked for.

use super::bounded::{Outline, Strings};
use super::error::ApiError;
use crate::engine::SamplingParameters;
use serde::Deserialize;
use serde_json::Value;

/// OpenAI allows 4 stop strings; this is the named maximum here.
const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one stop string: text is held back while it could still become one.
const STOP_STRING_BYTES_MAX: usize = 1024;
/// Alternatives per token.
const TOP_LOGPROBS_MAX: u8 = 20;
/// Sequences of one request: prompts times `n`.
pub(super) const CHOICES_MAX: usize = 16;

/// The body, less `messages` or `prompt`, which are read apart.
#[derive(Debug, Default, Deserialize)]
pub(super) struct CommonFields {
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    seed: Option<serde_json::Number>,
    stop: Option<Strings<STOP_STRINGS_MAX>>,
    n: Option<u64>,
    pub(super) stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    // Refused where they ask for something.
    tools: Option<Outline>,
    functions: Option<Outline>,
    tool_choice: Option<Outline>,
    function_call: Option<Outline>,
    response_format: Option<Outline>,
    logit_bias: Option<Outline>,
    frequency_penalty: Option<Outline>,
    presence_penalty: Option<Outline>,
    suffix: Option<Outline>,
    best_of: Option<Outline>,
    audio: Option<Outline>,
    modalities: Option<Outline>,
    web_search_options: Option<Outline>,
    grammar: Option<Outline>,
    json_schema: Option<Outline>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// What to generate, less the prompts.
#[derive(Clone, Debug)]
pub(super) struct Parameters {
    pub(super) sampling: SamplingParameters,
    /// `None`: as many as the context has room for.
    pub(super) max_tokens: Option<usize>,
    /// None of them empty.
    pub(super) stop: Vec<String>,
    /// Choices for each prompt.
    pub(super) choices: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl CommonFields {
    /// Checks everything. `random` is the seed if none is given.
    pub(super) fn parameters(self, random: u64) -> Result<Parameters, ApiError> {
        self.refuse_unsupported()?;
        let stream = self.stream.unwrap_or(false);
        Ok(Parameters {
            sampling: self.sampling(random)?,
            max_tokens: match (self.max_completion_tokens, self.max_tokens) {
                (Some(tokens), _) => max_tokens("max_completion_tokens", tokens)?,
                (None, Some(tokens)) => max_tokens("max_tokens", tokens)?,
                (None, None) => None,
            },
            choices: match self.n {
                None => 1,
                Some(n @ 1..) if n <= CHOICES_MAX as u64 => n as usize,
                Some(n) => {
                    return Err(ApiError::invalid(
                        "n",
                        format!("`n` is {n}; it may be 1 to {CHOICES_MAX}"),
                    ));
                }
            },
            stream,
            include_usage: stream
                && self
                    .stream_options
                    .is_some_and(|options| options.include_usage == Some(true)),
            stop: stop_strings(self.stop)?,
        })
    }

    fn sampling(&self, random: u64) -> Result<SamplingParameters, ApiError> {
        let sampling = SamplingParameters {
            temperature: self.temperature.unwrap_or(1.0) as f32,
            top_p: match self.top_p {
                // OpenAI takes 0; the most probable token is always kept.
                Some(0.0) => f32::MIN_POSITIVE,
                other => other.unwrap_or(1.0) as f32,
            },
            min_p: self.min_p.unwrap_or(0.0) as f32,
            top_k: match self.top_k {
                // -1 keeps all in vLLM, 0 in llama.cpp.
                None | Some(-1) => 0,
                Some(k) => usize::try_from(k).map_err(|_| {
                    ApiError::invalid(
                        "top_k",
                        format!("`top_k` is {k}; it may be 0 (all) or more"),
                    )
                })?,
            },
            seed: match &self.seed {
                None => random,
                Some(number) => number
                    .as_u64()
                    // Only the bits matter.
                    .or_else(|| number.as_i64().map(|seed| seed as u64))
                    .ok_or_else(|| {
                        ApiError::invalid(
                            "seed",
                            format!("`seed` is {number}; it must be a whole number"),
                        )
                    })?,
            },
        };
        sampling.validate().map_err(|sentence| {
            let named = |name: &&str| sentence.trim_start_matches('`').starts_with(*name);
            match ["temperature", "top_p", "min_p"].into_iter().find(named) {
                Some(param) => ApiError::invalid(param, sentence),
                None => ApiError::bad_request(sentence),
            }
        })?;
        Ok(sampling)
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let empty = |value: &Value| match value {
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            Value::String(text) => text.is_empty(),
            Value::Bool(value) => !value,
            _ => false,
        };
        let zero = |value: &Value| value.as_f64() == Some(0.0);
        let chosen = |value: &Value| matches!(value.as_str(), Some("none" | "auto"));
        let text_only = |value: &Value| *value == Value::from(vec!["text"]);
        let text_format = |value: &Value| value.get("type").and_then(Value::as_str) == Some("text");
        let one = |value: &Value| value.as_u64() == Some(1);
        type Harmless<'c> = &'c dyn Fn(&Value) -> bool;
        let fields: [(&'static str, &Option<Outline>, Harmless<'_>); 15] = [
            ("tools", &self.tools, &empty),
            ("functions", &self.functions, &empty),
            ("tool_choice", &self.tool_choice, &chosen),
            ("function_call", &self.function_call, &chosen),
            ("response_format", &self.response_format, &text_format),
            ("logit_bias", &self.logit_bias, &empty),
            ("frequency_penalty", &self.frequency_penalty, &zero),
            ("presence_penalty", &self.presence_penalty, &zero),
            ("suffix", &self.suffix, &empty),
            ("best_of", &self.best_of, &one),
            ("audio", &self.audio, &empty),
            ("modalities", &self.modalities, &text_only),
            ("web_search_options", &self.web_search_options, &|_| false),
            ("grammar", &self.grammar, &empty),
            ("json_schema", &self.json_schema, &empty),
        ];
        for (name, value, harmless) in fields {
            if value
                .as_ref()
                .is_some_and(|Outline(value)| !harmless(value))
            {
                return Err(ApiError::unsupported(
                    name,
                    format!("`{name}` is not supported by this server; leave it out"),
                ));
            }
        }
        Ok(())
    }
}

/// -1 is llama.cpp's word for no bound.
fn max_tokens(name: &'static str, tokens: i64) -> Result<Option<usize>, ApiError> {
    match tokens {
        -1 => Ok(None),
        1.. => Ok(Some(tokens as usize)),
        _ => Err(ApiError::invalid(
            name,
            format!("`{name}` is {tokens}; it must be at least 1"),
        )),
    }
}

/// Empty strings are ignored: they would end every answer before it begins.
fn stop_strings(stop: Option<Strings<STOP_STRINGS_MAX>>) -> Result<Vec<String>, ApiError> {
    let Strings { mut strings, count } = stop.unwrap_or_default();
    strings.retain(|string| !string.is_empty());
    if count > STOP_STRINGS_MAX {
        return Err(ApiError::invalid(
            "stop",
            format!("`stop` has {count} strings; at most {STOP_STRINGS_MAX} are taken"),
        ));
    }
    if strings
        .iter()
        .any(|string| string.len() > STOP_STRING_BYTES_MAX)
    {
        return Err(ApiError::invalid(
            "stop",
            format!("a string of `stop` is longer than {STOP_STRING_BYTES_MAX} bytes"),
        ));
    }
    Ok(strings)
}

/// Alternatives per token, in range.
pub(super) fn alternatives(name: &'static str, count: u64) -> Result<usize, ApiError> {
    if count > u64::from(TOP_LOGPROBS_MAX) {
        return Err(ApiError::invalid(
            name,
            format!("`{name}` is {count}; it may be 0 to {TOP_LOGPROBS_MAX}"),
        ));
    }
    Ok(count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(body: Value) -> Result<Parameters, String> {
        let fields: CommonFields =
            serde_json::from_value(body).map_err(|error| error.to_string())?;
        fields
            .parameters(7)
            .map_err(|error| error.body()["error"]["param"].to_string())
    }

    #[test]
    fn an_empty_body_samples_plainly_with_a_random_seed() {
        let parameters = parse(json!({})).unwrap();
        assert_eq!(
            parameters.sampling,
            SamplingParameters {
                temperature: 1.0,
                top_p: 1.0,
                top_k: 0,
                min_p: 0.0,
                seed: 7
            }
        );
        assert_eq!((parameters.max_tokens, parameters.choices), (None, 1));
        assert!(!parameters.stream && !parameters.include_usage && parameters.stop.is_empty());
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (name, value) in [
            ("temperature", json!(-1)),
            ("temperature", json!(101)),
            ("temperature", json!(1e39)),
            ("top_p", json!(1.1)),
            ("top_p", json!(-0.1)),
            ("min_p", json!(2)),
            ("top_k", json!(-2)),
            ("max_tokens", json!(0)),
            ("max_completion_tokens", json!(-2)),
            ("n", json!(0)),
            ("n", json!(17)),
            ("seed", json!(1.5)),
            (
                "stop",
                json!([
                    "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p",
                    "q"
                ]),
            ),
            ("stop", json!("x".repeat(2000))),
            ("frequency_penalty", json!(0.5)),
            ("presence_penalty", json!(-2.1)),
            ("logit_bias", json!({"5": 100})),
            ("tools", json!([{"type": "function"}])),
            ("tool_choice", json!("required")),
            ("response_format", json!({"type": "json_object"})),
            ("suffix", json!("x")),
            ("best_of", json!(2)),
            ("modalities", json!(["text", "audio"])),
            ("grammar", json!("root ::= \"a\"")),
        ] {
            let mut body = serde_json::Map::new();
            body.insert(name.to_owned(), value.clone());
            assert_eq!(
                parse(body.into()).unwrap_err(),
                format!("\"{name}\""),
                "{value}"
            );
        }
        assert!(parse(json!({"temperature": "1"})).is_err());
        assert!(
            parse(json!({"stop": 5}))
                .unwrap_err()
                .contains("expected a string or an array of strings")
        );
    }

    #[test]
    fn what_asks_for_nothing_is_taken() {
        let body = json!({
            "temperature": null, "top_p": 0, "top_k": -1, "seed": -1, "stop": ["", "x"], "max_tokens": -1,
            "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "auto",
            "response_format": {"type": "text"}, "suffix": "", "best_of": 1, "modalities": ["text"], "n": 1,
            "stream_options": null, "user": "me", "made_up": {"a": [1]},
        });
        let parameters = parse(body).unwrap();
        assert_eq!(parameters.stop, ["x"]);
        assert_eq!(parameters.max_tokens, None);
        assert!(parameters.sampling.top_p > 0.0);
        assert_eq!(parameters.sampling.seed, u64::MAX);
        assert_eq!(
            parse(json!({"temperature": 1e-30}))
                .unwrap()
                .sampling
                .temperature,
            1e-30
        );
        assert_eq!(
            parse(json!({"top_k": 1_000_000_000}))
                .unwrap()
                .sampling
                .top_k,
            1_000_000_000
        );
    }

    #[test]
    fn the_newer_name_of_max_tokens_wins() {
        let body = json!({"max_tokens": 5, "max_completion_tokens": 6});
        assert_eq!(parse(body).unwrap().max_tokens, Some(6));
    }
}
