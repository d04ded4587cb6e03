//! The dialect of Jinja that chat templates are written in: what transformers sets up, on minijinja.
//!
//! Templates come from files and messages from clients, so every rendering has limits: fuel for its work, a thread
//! with a stack for what that much work can nest, and a time after which it is left to itself.

use super::python_json::tojson;
use super::python_methods;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::cell::Cell;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// A rendering's fuel, which pays for an instruction or for 64 bytes of data: this much for any messages, and
/// `FUEL_PER_BYTE` for each of their bytes, which is over a hundred passes through them.
const FUEL_BASE: u64 = 1_000_000;
const FUEL_PER_BYTE: u64 = 2;
const FUEL_MAX: u64 = 8_000_000;

/// Nested values are dropped recursively. The deepest nest that fuel buys (a chain of namespaces) takes about 60 bytes
/// of stack for each unit; pages that are never touched cost nothing.
const STACK_BYTES_PER_FUEL: u64 = 64;

/// Some of the engine's work costs no fuel (a slice of a slice of a slice). What takes longer than this is abandoned.
const SECONDS_MAX: u64 = 20;

/// Renderings that were abandoned and still run. At this number nothing is rendered until one ends.
const ABANDONED_MAX: usize = 2;

/// Larger sources are refused; published ones stay below 32 KiB.
const SOURCE_BYTES_MAX: usize = 1 << 20;

/// What `raise_exception` raised, found again in the chain of causes.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// A moment that several renderings of one prompt share.
pub(super) type Time = chrono::DateTime<chrono::Local>;

pub(super) fn now() -> Time {
    chrono::Local::now()
}

thread_local! {
    /// The time of the rendering that this thread is for.
    static TIME: Cell<Option<Time>> = const { Cell::new(None) };
}

/// A compiled template.
pub(super) struct Template {
    environment: Environment<'static>,
    time_limit: Duration,
    abandoned: Arc<AtomicUsize>,
}

const NAME: &str = "chat_template";

impl Template {
    /// Compiles a template; the error is a sentence.
    pub(super) fn compile(source: &str) -> Result<Template, String> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(format!(
                "{} bytes; at most {SOURCE_BYTES_MAX} are supported",
                source.len()
            ));
        }
        let mut environment = environment();
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| sentence(&error))?;
        Ok(Template {
            environment,
            time_limit: Duration::from_secs(SECONDS_MAX),
            abandoned: Arc::default(),
        })
    }

    /// Renders on a thread of its own. `context_bytes` is about the size of the context; `time` is what
    /// `strftime_now` prints.
    pub(super) fn render(
        &self,
        context: Value,
        context_bytes: usize,
        time: Time,
    ) -> Result<String, RenderError> {
        let failed = |problem: &str| Err(RenderError::Failed(problem.to_string()));
        if self.abandoned.load(Ordering::Relaxed) >= ABANDONED_MAX {
            return failed("it has exceeded the time limit before and is still running");
        }
        let fuel = FUEL_MAX.min(FUEL_BASE + FUEL_PER_BYTE * context_bytes as u64);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        // Without a buffer: sending waits until it is received, and fails where nobody waits any more.
        let (sender, receiver) = mpsc::sync_channel(0);
        let left = Arc::new(AtomicBool::new(false));
        let end = RenderingEnd {
            abandoned: self.abandoned.clone(),
            left: left.clone(),
        };
        let thread = thread::Builder::new()
            .name("chat template".to_string())
            .stack_size((fuel * STACK_BYTES_PER_FUEL) as usize)
            .spawn(move || {
                let _end = end;
                TIME.set(Some(time));
                let rendered = environment
                    .get_template(NAME)
                    .and_then(|template| template.render(context))
                    .map_err(|error| RenderError::from(&error));
                // An error means that nobody waits any more.
                let _ = sender.send(rendered);
            });
        if let Err(error) = thread {
            return failed(&format!("no thread to render on: {error}"));
        }
        match receiver.recv_timeout(self.time_limit) {
            Ok(rendered) => rendered,
            Err(RecvTimeoutError::Disconnected) => failed("the template engine failed"),
            Err(RecvTimeoutError::Timeout) => {
                self.abandoned.fetch_add(1, Ordering::Relaxed);
                if left.swap(true, Ordering::Relaxed) {
                    // It ended this moment.
                    self.abandoned.fetch_sub(1, Ordering::Relaxed);
                }
                drop(receiver);
                failed("it exceeded the time limit")
            }
        }
    }
}

/// The end of a rendering's thread, a panic included: if it was abandoned, its place is free again.
struct RenderingEnd {
    abandoned: Arc<AtomicUsize>,
    /// Set by whichever leaves first, the thread or the one who waits for it.
    left: Arc<AtomicBool>,
}

impl Drop for RenderingEnd {
    fn drop(&mut self) {
        if self.left.swap(true, Ordering::Relaxed) {
            self.abandoned.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Why nothing was rendered.
#[derive(Debug, PartialEq)]
pub(super) enum RenderError {
    /// The template called `raise_exception`: its words.
    Raised(String),
    Failed(String),
}

impl From<&Error> for RenderError {
    fn from(error: &Error) -> RenderError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(raised) = current.downcast_ref::<Raised>() {
                return RenderError::Raised(raised.0.clone());
            }
            cause = current.source();
        }
        RenderError::Failed(sentence(error))
    }
}

/// The error without its place in the engine.
fn sentence(error: &Error) -> String {
    let mut text = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line})");
    }
    text
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters are valid");
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(python_methods::call);
    environment.add_filter("tojson", tojson);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Raised(message)))
        },
    );
    environment.add_function("strftime_now", strftime_now);
    // Nothing can be done with Python's None, and its strings and dictionaries are sequences.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map
        )
    });
    environment
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    // A format that chrono does not know is a formatting error here; `to_string` would panic.
    write!(text, "{}", TIME.get().unwrap_or_else(now).format(format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: unknown format {format:?}"),
        )
    })?;
    Ok(text)
}

/// `{% generation %}` marks for training what a template's assistant says. Here it is a block that always runs, which
/// leaves the white space around the tags as the tags themselves would.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let inner = &rest[start + 2..start + length];
        let (open, inner) = sign(inner, str::strip_prefix::<char>);
        let (close, inner) = sign(inner, str::strip_suffix::<char>);
        let replacement = match inner.trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        text.push_str(&rest[..start]);
        match replacement {
            Some(tag) => {
                let _ = write!(text, "{{%{open} {tag} {close}%}}");
                rest = &rest[start + length + 2..];
            }
            // Only the opening is copied: what follows may be text with another tag.
            None => {
                text.push_str("{%");
                rest = &rest[start + 2..];
            }
        }
    }
    text.push_str(rest);
    text
}

/// The white-space sign at one end of a tag.
fn sign<'t>(
    inner: &'t str,
    strip: impl Fn(&'t str, char) -> Option<&'t str>,
) -> (&'static str, &'t str) {
    for (character, text) in [('-', "-"), ('+', "+")] {
        if let Some(rest) = strip(inner, character) {
            return (text, rest);
        }
    }
    ("", inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, RenderError> {
        let context = minijinja::context! {
            text => "  Hi</think>there\n",
            map => minijinja::context! { k => "v", l => 1 },
            list => [1, 2, 3],
            nothing => (),
        };
        Template::compile(source)
            .map_err(RenderError::Failed)?
            .render(context, 0, now())
    }

    #[test]
    fn the_dialect_of_published_templates_renders() {
        for (source, expected) in [
            (
                "{{ text.startswith('  H') and text.endswith('\\n') }}",
                "True",
            ),
            ("{{ text.split('</think>')[-1] }}", "there\n"),
            ("{{ text.split('</think>')[0].lstrip() }}", "Hi"),
            (
                "{{ '\n\nx\n'.lstrip('\\n') }}|{{ 'x\n\n'.rstrip('\\n') }}",
                "x\n|x",
            ),
            (
                "{{ text.strip() }}{{ text | trim | length }}",
                "Hi</think>there15",
            ),
            ("{{ 'aXb'.replace('X', '-') }}{{ 'a'.upper() }}", "a-bA"),
            ("{{ map.get('k', 'd') }}{{ map.get('x', 'd') }}", "vd"),
            (
                "{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}",
                "k=v;l=1;",
            ),
            ("{{ list[::-1] }}{{ list[1:] }}", "[3, 2, 1][2, 3]"),
            (
                "{% set ns = namespace(n=0) %}{% for i in list %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
                "6",
            ),
            (
                "{{ map is mapping }}{{ text is string }}{{ list is mapping }}{{ text is sequence }}",
                "TrueTrueFalseTrue",
            ),
            (
                "{{ nothing is none }}{{ missing is defined }}{{ list is iterable }}{{ nothing is iterable }}",
                "TrueFalseTrueFalse",
            ),
            (
                "{% for i in list %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "1",
            ),
            (
                "{% for i in list %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
                "13",
            ),
            ("{% generation %}a{% endgeneration %}", "a"),
            ("x\n  {%- generation -%}\n a {%- endgeneration %}\n", "xa"),
            ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),
            (
                "a\n    {% if true %}\n    b\n    {% endif %}\n",
                "a\n    b\n",
            ),
            (
                "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') + m('b') }}",
                "<a><b>",
            ),
            (
                "{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}{{ '%s!' | format('hi') }}",
                "a1bxxxhi!",
            ),
            (
                "{{ nothing }}{{ missing }}{{ 1.0 }}{{ false }}",
                "None1.0False",
            ),
            (
                "{{ list | map('string') | join(',') }}{{ list | selectattr('x', 'defined') | list | length }}",
                "1,2,30",
            ),
            (
                "{% for m in list %}{{ loop.index0 }}{{ loop.first }}{% if loop.last %}!{% endif %}{% endfor %}",
                "0True1False2False!",
            ),
            (
                "{{ 'yes' if list else 'no' }}{{ map['k'] }}{{ 'k' in map }}{{ '</think>' in text }}",
                "yesvTrueTrue",
            ),
            ("{{ {'a': [1, 'x']} | tojson }}", "{\"a\": [1, \"x\"]}"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
        }
        let year = render("{{ strftime_now('%Y') }}").unwrap();
        assert!(
            year.len() == 4 && year.bytes().all(|b| b.is_ascii_digit()),
            "{year}"
        );
    }

    #[test]
    fn raised_words_come_back_and_other_errors_do_not_panic() {
        assert_eq!(
            render("{{ raise_exception('x y') }}"),
            Err(RenderError::Raised("x y".into()))
        );
        assert_eq!(
            render(
                "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{% for i in list %}{{ m() }}{% endfor %}"
            ),
            Err(RenderError::Raised("deep".into()))
        );
        for source in [
            "{{",
            "{% if %}",
            "{{ missing.attribute }}",
            "{{ text.no_such_method() }}",
            "{{ strftime_now('%Q!%') }}",
            "{% include 'other' %}",
            "{{ 1 // 0 }}",
        ] {
            assert!(
                matches!(render(source), Err(RenderError::Failed(_))),
                "{source}"
            );
        }
    }

    #[test]
    fn hostile_templates_end_with_an_error() {
        let brackets = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
        for source in [
            "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
            "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}",
            "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "{{ 'x' * 100000000000 }}",
            &brackets,
        ] {
            assert!(
                matches!(render(source), Err(RenderError::Failed(_))),
                "{:.60}",
                source
            );
        }
        // Values nested as deeply as fuel allows are dropped without overflowing the stack.
        for value in ["[ns.x]", "{'a': ns.x}", "namespace(x=ns.x)"] {
            let nest = format!(
                "{{% set ns = namespace(x=[]) %}}{{% for a in range(10000) %}}{{% for b in range(10000) %}}\
                 {{% set ns.x = {value} %}}{{% endfor %}}{{% endfor %}}"
            );
            assert!(render(&nest).is_err());
        }
    }

    /// Work that costs no fuel: each slice walks through all before it.
    #[test]
    fn a_template_that_hangs_is_abandoned_and_then_refused() {
        let slices = "{% set ns = namespace(x=[1]) %}{% for a in range(10000) %}{% for b in range(10000) %}\
                      {% set ns.x = ns.x[:] %}{% endfor %}{% endfor %}";
        let mut template = Template::compile(slices).unwrap();
        template.time_limit = Duration::from_millis(20);
        let render = || match template.render(Value::from(()), 0, now()) {
            Err(RenderError::Failed(problem)) => problem,
            other => panic!("{other:?}"),
        };
        for _ in 0..ABANDONED_MAX {
            assert_eq!(render(), "it exceeded the time limit");
        }
        assert!(render().contains("before"));
    }

    #[test]
    fn an_abandoned_rendering_that_panics_gives_its_place_back() {
        let mut template = Template::compile("{{ linger() }}").unwrap();
        let (go, wait) = mpsc::sync_channel::<()>(ABANDONED_MAX);
        let wait = std::sync::Mutex::new(wait);
        template
            .environment
            .add_function("linger", move || -> String {
                let _ = wait
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
                    .recv();
                panic!("a bug of the template engine")
            });
        template.time_limit = Duration::from_millis(20);
        for _ in 0..ABANDONED_MAX {
            assert!(template.render(Value::from(()), 0, now()).is_err());
        }
        let abandoned = || template.abandoned.load(Ordering::Relaxed);
        assert_eq!(abandoned(), ABANDONED_MAX);
        for _ in 0..ABANDONED_MAX {
            go.send(()).unwrap();
        }
        for _ in 0..1000 {
            if abandoned() == 0 {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("{} places are still taken", abandoned());
    }
}
