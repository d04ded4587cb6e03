//! Methods of Python's strings that chat templates call and that minijinja's compatibility layer lacks.

use minijinja::value::from_args;
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// What a template's `value.method(arguments)` means where minijinja itself knows no such method.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, arguments)
    {
        return result;
    }
    pycompat::unknown_method_callback(state, value, method, arguments)
}

fn string_method(text: &str, method: &str, arguments: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "removeprefix" => {
            one(arguments).map(|prefix| text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            one(arguments).map(|suffix| text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "partition" => one(arguments).and_then(separator).map(|separator| {
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            parts(text, before, separator, after, [text, "", ""])
        }),
        "rpartition" => one(arguments).and_then(separator).map(|separator| {
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            parts(text, before, separator, after, ["", "", text])
        }),
        "rsplit" => rsplit(text, arguments),
        "index" => one(arguments).and_then(|part| match text.find(part) {
            Some(at) => Ok(Value::from(text[..at].chars().count())),
            None => Err(Error::new(
                ErrorKind::InvalidOperation,
                "substring not found",
            )),
        }),
        "swapcase" => from_args::<()>(arguments).map(|()| {
            let swapped: String = text
                .chars()
                .map(|c| match c.is_uppercase() {
                    true => c.to_lowercase().to_string(),
                    false => c.to_uppercase().to_string(),
                })
                .collect();
            swapped.into()
        }),
        _ => return None,
    })
}

fn one(arguments: &[Value]) -> Result<&str, Error> {
    from_args::<(&str,)>(arguments).map(|(argument,)| argument)
}

fn separator(text: &str) -> Result<&str, Error> {
    if text.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(text)
}

fn parts(text: &str, before: &str, separator: &str, after: &str, otherwise: [&str; 3]) -> Value {
    let found = text.contains(separator);
    let parts = if found {
        [before, separator, after]
    } else {
        otherwise
    };
    parts.into_iter().map(Value::from).collect()
}

fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (split, count): (Option<&str>, Option<i64>) = from_args(arguments)?;
    let count = count.filter(|&c| c >= 0).map_or(usize::MAX, |c| c as usize);
    let mut found: Vec<Value> = match split {
        Some(split) => {
            let split = separator(split)?;
            text.rsplitn(count.saturating_add(1), split)
                .map(Value::from)
                .collect()
        }
        None => {
            let mut words = Vec::new();
            let mut rest = text.trim_end();
            while !rest.is_empty() {
                let start = match rest.rfind(char::is_whitespace) {
                    Some(at) if words.len() < count => {
                        at + rest[at..].chars().next().map_or(1, char::len_utf8)
                    }
                    _ => 0,
                };
                words.push(Value::from(&rest[start..]));
                rest = rest[..start].trim_end();
            }
            words
        }
    };
    found.reverse();
    Ok(found.into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn methods_answer_as_pythons_do() {
        let mut environment = minijinja::Environment::new();
        environment.set_unknown_method_callback(super::call);
        for (source, expected) in [
            (
                "{{ 'abc'.removeprefix('ab') }}{{ 'abc'.removesuffix('x') }}",
                "cabc",
            ),
            (
                "{{ 'a=b=c'.partition('=')[2] }} {{ 'a=b=c'.rpartition('=')[0] }}",
                "b=c a=b",
            ),
            (
                "{{ 'abc'.partition('=') | length }}{{ 'abc'.rpartition('=')[2] }}",
                "3abc",
            ),
            (
                "{{ 'a,b,c'.rsplit(',', 1)[0] }} {{ 'a b  c '.rsplit(none, 1)[0] }}",
                "a,b a b",
            ),
            ("{{ 'a b  c'.rsplit() | join('|') }}", "a|b|c"),
            ("{{ 'héllo'.index('llo') }}{{ 'aB'.swapcase() }}", "2Ab"),
            (
                "{{ {'k': 1}.get('x', 'd') }}{{ 'ab'.startswith('a') }}",
                "dTrue",
            ),
        ] {
            assert_eq!(
                environment.render_str(source, ()).unwrap(),
                expected,
                "{source}"
            );
        }
        for source in [
            "{{ 'a'.index('b') }}",
            "{{ 'a'.partition('') }}",
            "{{ 'a'.nothing() }}",
            "{{ 'a'.rsplit('') }}",
        ] {
            assert!(environment.render_str(source, ()).is_err(), "{source}");
        }
    }
}
