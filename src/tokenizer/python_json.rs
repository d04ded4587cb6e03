//! `tojson` for chat templates, as transformers replaces the filter: the text of Python's
//! `json.dumps(x, ensure_ascii=False)`, keys in their order, with its keyword arguments. Models were trained on tool
//! descriptions in exactly this form.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// Values nest less than this; JSON from requests stops at 128.
const DEPTH_MAX: usize = 200;

/// `x | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
pub(super) fn tojson(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let (positional, kwargs): (&[Value], Kwargs) = from_args(&arguments)?;
    let mut positional = positional.iter();
    let mut argument = |name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.next() {
            Some(value) => Some(value.clone()),
            None => kwargs.get(name)?,
        };
        Ok(value.filter(|v: &Value| !v.is_none() && !v.is_undefined()))
    };
    let ascii = argument("ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = argument("indent")?.map(|v| indentation(&v)).transpose()?;
    let separators = argument("separators")?.map(|v| pair(&v)).transpose()?;
    let sorted = argument("sort_keys")?.is_some_and(|v| v.is_true());
    if positional.next().is_some() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    kwargs.assert_all_used()?;

    let (item, colon) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_string(), ": ".to_string())
    });
    let mut writer = Writer {
        out: String::new(),
        ascii,
        indent,
        item,
        colon,
        sorted,
    };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn indentation(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_string());
    }
    let count = i64::try_from(value.clone())?.clamp(0, 64);
    Ok(" ".repeat(count as usize))
}

fn pair(value: &Value) -> Result<(String, String), Error> {
    let mut items = value.try_iter()?;
    match (items.next(), items.next(), items.next()) {
        (Some(a), Some(b), None) => Ok((a.to_string(), b.to_string())),
        _ => Err(invalid("tojson: separators are a pair of strings")),
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

struct Writer {
    out: String,
    ascii: bool,
    indent: Option<String>,
    item: String,
    colon: String,
    sorted: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("tojson: the value nests too deeply"));
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(&mut self.out, value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()?.checked() {
                    items.push((None, item?));
                }
                self.container(['[', ']'], items, depth)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    let entry = value.get_item(&key)?;
                    items.push((Some(key_text(&key)?), entry));
                }
                if self.sorted {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(['{', '}'], items, depth)?;
            }
            kind => {
                return Err(invalid(format!(
                    "tojson: a value of type {kind} has no JSON form"
                )));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(open);
        let empty = items.is_empty();
        for (i, (key, item)) in items.into_iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.line_break(depth + 1);
            if let Some(key) = key {
                self.string(&key);
                self.out.push_str(&self.colon);
            }
            self.value(&item, depth + 1)?;
        }
        if !empty {
            self.line_break(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python turns keys into strings this way.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_string(),
        ValueKind::None => "null".to_string(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_string(),
        ValueKind::Number => {
            let mut text = String::new();
            number(&mut text, key)?;
            text
        }
        kind => {
            return Err(invalid(format!(
                "tojson: a key of type {kind} has no JSON form"
            )));
        }
    })
}

fn number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        let _ = write!(out, "{value}");
    } else {
        out.push_str(&float_text(f64::try_from(value.clone())?));
    }
    Ok(())
}

/// Python's `repr` of a float: the shortest digits that give the value back, with an exponent below 1e-4 and from 1e16.
fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_string();
    }
    if value.is_infinite() {
        return if value < 0.0 { "-Infinity" } else { "Infinity" }.to_string();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let text = format!("{value}");
        return if text.contains('.') {
            text
        } else {
            text + ".0"
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, arguments: &str, expected: &str) {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let source = format!("{{{{ x | tojson{arguments} }}}}");
        let text = environment
            .render_str(
                &source,
                minijinja::context! { x => minijinja::value::Serde(value) },
            )
            .unwrap();
        assert_eq!(text, expected, "{json} {arguments}");
    }

    /// The expected texts are those of CPython's `json.dumps`.
    #[test]
    fn the_text_is_that_of_json_dumps() {
        let tool = r#"{"name":"f","description":"a < b & c > 'd' é/ü","parameters":{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}}}}"#;
        let spaced = r#"{"name": "f", "description": "a < b & c > 'd' é/ü", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}}"#;
        check(tool, "", spaced);
        check(tool, "(ensure_ascii=False)", spaced);
        check(
            tool,
            r#"(sort_keys=true, separators=(",", ":"))"#,
            r#"{"description":"a < b & c > 'd' é/ü","name":"f","parameters":{"properties":{"a":{"type":"integer"},"z":{"type":"string"}},"type":"object"}}"#,
        );
        check(
            r#"{"a":[1,{"b":[]}],"c":{}}"#,
            "(indent=4)",
            "{\n    \"a\": [\n        1,\n        {\n            \"b\": []\n        }\n    ],\n    \"c\": {}\n}",
        );
        check("[1,2]", "(indent=0)", "[\n1,\n2\n]");
        check("[1]", "(false, 2)", "[\n  1\n]");
        check(
            r#"["é🙂\u007f\u0001\t\\\""]"#,
            "(ensure_ascii=true)",
            r#"["\u00e9\ud83d\ude42\u007f\u0001\t\\\""]"#,
        );
        check(
            r#"["\u007f\b\f\n\r\u2028"]"#,
            "",
            "[\"\u{7f}\\b\\f\\n\\r\u{2028}\"]",
        );
        check(
            "[null,true,false,0,-7,18446744073709551615]",
            "",
            "[null, true, false, 0, -7, 18446744073709551615]",
        );
        check(
            "[1.0,0.1,1e15,1e16,1.5e300,0.0001,0.00001,-0.0,123456789.125,1e22]",
            "",
            "[1.0, 0.1, 1000000000000000.0, 1e+16, 1.5e+300, 0.0001, 1e-05, -0.0, 123456789.125, 1e+22]",
        );
        check("[]", "", "[]");
        check("\"x\"", "", "\"x\"");
    }

    #[test]
    fn what_json_cannot_say_is_an_error() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        for source in [
            "{{ 1 | tojson(no_such=1) }}",
            "{{ 1 | tojson(separators=('a',)) }}",
            "{{ 1 | tojson(1, 1, (',', ':'), 1, 1) }}",
        ] {
            assert!(environment.render_str(source, ()).is_err(), "{source}");
        }
        assert_eq!(
            (float_text(f64::NAN), float_text(f64::NEG_INFINITY)),
            ("NaN".into(), "-Infinity".into())
        );
    }
}
