//! Chat prompts: from messages to text, by the file's template, and to tokens.
//!
//! Where a file has no template, or an empty one, ChatML is used if the vocabulary has `<|im_start|>`, else
//! [`PLAIN`]. A template that does not compile is replaced in the same way, with a warning, when the file is loaded:
//! raw completions need no template. Messages that a template refuses are refused here with its words.
//!
//! What clients write never becomes a control token; see `provenance`.

use super::chat_messages::{bytes_of, prepare, replace_texts};
use super::provenance::{self, Control};
use super::template_environment::{RenderError, Template, now};
use super::{Tokenizer, TokenizerError};
use crate::gguf::{Array, Metadata, Value as GgufValue};
use minijinja::Value;
use minijinja::value::Serde;
use serde_json::Value as Json;

const KEY: &str = "tokenizer.chat_template";
/// The names of further templates, which stand at `tokenizer.chat_template.NAME`.
const NAMES: &str = "tokenizer.chat_templates";

/// Turns of `<|im_start|>role\ncontent<|im_end|>`.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Paragraphs of `Role: content`; the model answers after `Assistant:`.
const PLAIN: &str = "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// Where a template comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateSource {
    /// This key of the file.
    File(String),
    /// Built in; the vocabulary has `<|im_start|>`.
    ChatMl,
    /// Built in: `User: ...`, `Assistant: ...` in paragraphs.
    Plain,
}

/// Why a chat has no prompt. All are the request's fault or the template's word, and can be shown to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    #[error("{0}")]
    Invalid(String),
    /// The template called `raise_exception`: its words.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    #[error("the chat template cannot render these messages: {0}")]
    Failed(String),
}

/// What else a template is given.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// Whether the prompt ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Tools in OpenAI's form.
    pub tools: Option<Vec<Json>>,
    /// Further variables for the template (`chat_template_kwargs`), which cannot replace those of the server.
    pub variables: serde_json::Map<String, Json>,
}

impl Default for ChatOptions {
    fn default() -> ChatOptions {
        ChatOptions {
            add_generation_prompt: true,
            tools: None,
            variables: serde_json::Map::new(),
        }
    }
}

/// A chat, ready for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    /// What the template printed.
    pub text: String,
    /// Its tokens, with the beginning-of-sequence token once if the template prints it or the model wants it.
    pub tokens: Vec<u32>,
}

/// The chat templates of one model.
pub struct ChatTemplate {
    default: Chosen,
    /// Used where a request has tools.
    tool_use: Option<Chosen>,
    bos_token: String,
    eos_token: String,
    controls: Vec<Control>,
}

struct Chosen {
    template: Template,
    text: String,
    literals: Vec<String>,
    source: TemplateSource,
}

impl Chosen {
    fn new(text: &str, source: TemplateSource) -> Result<Chosen, String> {
        Ok(Chosen {
            template: Template::compile(text)?,
            text: text.to_string(),
            literals: provenance::literals(text),
            source,
        })
    }
}

impl ChatTemplate {
    /// Finds and compiles the templates of a file. Errors only where a key has a type that no template has.
    pub fn from_gguf(
        metadata: &Metadata,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate, TokenizerError> {
        let mut default = None;
        let mut tool_use = None;
        for (key, name, text) in candidates(metadata)? {
            let slot = match name.as_str() {
                "default" => &mut default,
                "tool_use" => &mut tool_use,
                _ => continue,
            };
            if slot.is_some() || text.trim().is_empty() {
                continue;
            }
            match Chosen::new(text, TemplateSource::File(key.clone())) {
                Ok(chosen) => *slot = Some(chosen),
                Err(error) => tracing::warn!(key, error, "the chat template cannot be used"),
            }
        }
        let default = match default {
            Some(chosen) => chosen,
            None => {
                let (text, source) = match tokenizer.control_token("<|im_start|>") {
                    Some(_) => (CHATML, TemplateSource::ChatMl),
                    None => (PLAIN, TemplateSource::Plain),
                };
                tracing::warn!(key = KEY, fallback = ?source, "no usable chat template in the file; a built-in one is used");
                Chosen::new(text, source).map_err(|error| TokenizerError::invalid(KEY, error))?
            }
        };
        let controls = tokenizer
            .specials
            .controls(&tokenizer.vocabulary)
            .map(|id| (id, tokenizer.text_of(Some(id))))
            .collect();
        Ok(ChatTemplate {
            default,
            tool_use,
            bos_token: tokenizer.text_of(tokenizer.bos),
            eos_token: tokenizer.text_of(tokenizer.eos),
            controls,
        })
    }

    /// Where the template for requests without tools comes from.
    pub fn source(&self) -> &TemplateSource {
        &self.default.source
    }

    /// The text of that template.
    pub fn text(&self) -> &str {
        &self.default.text
    }

    /// Renders and encodes a chat. `messages` are objects in OpenAI's form.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Json],
        options: &ChatOptions,
    ) -> Result<ChatPrompt, ChatError> {
        let messages = prepare(messages)?;
        let tools = options
            .tools
            .as_ref()
            .map(|tools| Json::Array(tools.clone()));
        let chosen = match &self.tool_use {
            Some(tool_use) if tools.is_some() => tool_use,
            _ => &self.default,
        };
        let time = now();
        let render = |replace: &mut dyn FnMut(&str) -> String| {
            let mut variables =
                match replace_texts(&Json::Object(options.variables.clone()), replace) {
                    Json::Object(variables) => variables,
                    _ => serde_json::Map::new(),
                };
            let messages = replace_texts(&messages, replace);
            let tools = tools.as_ref().map(|tools| replace_texts(tools, replace));
            for (name, value) in [
                ("messages", messages),
                ("tools", tools.unwrap_or(Json::Null)),
                ("bos_token", Json::from(self.bos_token.as_str())),
                ("eos_token", Json::from(self.eos_token.as_str())),
                (
                    "add_generation_prompt",
                    Json::from(options.add_generation_prompt),
                ),
            ] {
                variables.insert(name.to_string(), value);
            }
            let variables = Json::Object(variables);
            let bytes = bytes_of(&variables);
            chosen
                .template
                .render(Value::from(Serde(&variables)), bytes, time)
        };
        let mut texts = Vec::new();
        let text = render(&mut |text| {
            texts.push(text.to_string());
            text.to_string()
        })
        .map_err(|error| match error {
            RenderError::Raised(words) => ChatError::Refused(words),
            RenderError::Failed(problem) => ChatError::Failed(problem),
        })?;
        let trust =
            provenance::establish(&text, &self.controls, &texts, &chosen.literals, |replace| {
                render(&mut |text| replace(text)).ok()
            });
        let tokens = tokenizer.encode_where(&text, |id, range| trust.allows(id, range));
        Ok(ChatPrompt {
            text,
            tokens: tokenizer.with_bos(tokens),
        })
    }
}

/// Every template of the file: its key, name and text, the most telling first. `tokenizer.chat_template` is a string,
/// or an array of strings named by `tokenizer.chat_templates`; without names its first is the default.
fn candidates(metadata: &Metadata) -> Result<Vec<(String, String, &str)>, TokenizerError> {
    let mut found: Vec<(String, String, &str)> = Vec::new();
    match metadata.get(KEY) {
        Some(GgufValue::Array(Array::String(texts))) => {
            let names = metadata.strings(NAMES)?.unwrap_or_default();
            let named = names.len() == texts.len();
            for (i, text) in texts.iter().enumerate() {
                let name = match (named, i) {
                    (true, _) => names[i].clone(),
                    (false, 0) => "default".to_string(),
                    (false, _) => continue,
                };
                found.push((KEY.to_string(), name, text));
            }
        }
        _ => {
            if let Some(text) = metadata.string(KEY)? {
                found.push((KEY.to_string(), "default".to_string(), text));
            }
        }
    }
    for name in ["default", "tool_use"] {
        let key = format!("{KEY}.{name}");
        if let Some(text) = metadata.string(&key)? {
            found.push((key, name.to_string(), text));
        }
    }
    Ok(found)
}
