//! `strata generate`: one answer to stdout as it comes, and figures to stderr.

use super::load::{Loading, load};
use super::{Usage, say};
use anyhow::{Context, bail};
use serde_json::json;
use std::io::{ErrorKind, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata::cli::GenerateArguments;
use strata::config::Config;
use strata::engine::{EngineStatus, Event, FinishReason, Request, SamplingParameters};
use strata::tokenizer::{ChatOptions, Detokenizer, SequenceText};
use tokio::sync::mpsc;

/// Events that wait for a slow terminal.
const EVENTS_MAX: usize = 256;

pub(crate) fn generate(config: &Config, arguments: &GenerateArguments) -> anyhow::Result<()> {
    let given = &arguments.sampling;
    let sampling = SamplingParameters {
        temperature: given.temperature,
        top_p: given.top_p,
        top_k: given.top_k,
        min_p: given.min_p,
        seed: given.seed,
    };
    sampling.validate().map_err(Usage)?;
    if arguments.max_tokens == Some(0) {
        bail!(Usage(
            "`-n 0` would generate nothing; give at least 1".to_owned()
        ));
    }
    let loading = load(config)?;
    let generated = answer(&loading, arguments, sampling);
    loading.engine.shutdown(Duration::ZERO);
    loading.engine.join();
    generated
}

fn answer(
    loading: &Loading,
    arguments: &GenerateArguments,
    sampling: SamplingParameters,
) -> anyhow::Result<()> {
    let prompt = prompt(loading, arguments)?;
    if let EngineStatus::Failed(cause) = loading.engine.wait_until_loaded() {
        bail!("load the model: {cause}");
    }
    let room = loading.context - prompt.len();
    let (sender, events) = mpsc::channel(EVENTS_MAX);
    let mut figures = Figures::new(prompt.len());
    loading.engine.submit(Request {
        prompt,
        sampling,
        max_tokens: arguments.max_tokens.map_or(room, |tokens| tokens.min(room)),
        top_logprobs: None,
        events: sender,
    })?;
    let tokenizer = Arc::clone(&loading.tokenizer);
    let detokenizer = if arguments.chat {
        Detokenizer::new(tokenizer)
    } else {
        Detokenizer::continuing(tokenizer)
    };
    let text = SequenceText::new(detokenizer, arguments.sampling.stop.iter().cloned());
    match print(events, text, &mut figures) {
        // Nobody reads on.
        Err(error)
            if error
                .downcast_ref::<std::io::Error>()
                .is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) => {}
        result => result?,
    }
    say(format_args!("{}", figures.line()));
    Ok(())
}

fn prompt(loading: &Loading, arguments: &GenerateArguments) -> anyhow::Result<Arc<[u32]>> {
    let tokenizer = &loading.tokenizer;
    let tokens = if arguments.chat {
        let messages = [json!({"role": "user", "content": arguments.prompt})];
        let chat = loading
            .template
            .prompt(tokenizer, &messages, &ChatOptions::default())
            .context("apply the chat template")?;
        chat.tokens
    } else {
        tokenizer.encode_prompt(&arguments.prompt)
    };
    if tokens.is_empty() {
        bail!(Usage(
            "the prompt has no tokens; give some text with -p".to_owned()
        ));
    }
    if tokens.len() >= loading.context {
        bail!(Usage(format!(
            "the context holds {} tokens and the prompt has {}; shorten it, or give a larger --context",
            loading.context,
            tokens.len()
        )));
    }
    Ok(tokens.into())
}

fn print(
    mut events: mpsc::Receiver<Event>,
    mut text: SequenceText,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    loop {
        let (mut piece, last) = match events.blocking_recv() {
            Some(Event::Prompt { .. }) => continue,
            Some(Event::Token(token)) => {
                figures.token();
                (text.push(token.id), false)
            }
            Some(Event::Finished(reason)) => {
                figures.finished(reason);
                (text.finish(), true)
            }
            Some(Event::Failed(failure)) => bail!(failure),
            None => bail!("the engine stopped before the answer was complete"),
        };
        let ends = last || piece.ended.is_some();
        if ends {
            piece.text.push('\n');
        }
        stdout
            .write_all(piece.text.as_bytes())
            .and_then(|()| stdout.flush())
            .context("write to stdout")?;
        if ends {
            return Ok(());
        }
    }
}

/// What the run cost.
struct Figures {
    prompt_tokens: usize,
    generated_tokens: usize,
    started: Instant,
    first: Option<Instant>,
    last: Instant,
    finish: &'static str,
}

impl Figures {
    fn new(prompt_tokens: usize) -> Figures {
        let now = Instant::now();
        Figures {
            prompt_tokens,
            generated_tokens: 0,
            started: now,
            first: None,
            last: now,
            finish: "stop",
        }
    }

    fn token(&mut self) {
        self.last = Instant::now();
        self.first.get_or_insert(self.last);
        self.generated_tokens += 1;
    }

    fn finished(&mut self, reason: FinishReason) {
        // The end token took a step too.
        if reason == FinishReason::Stop {
            self.token();
        } else {
            self.finish = "length";
        }
    }

    fn line(&self) -> String {
        let first = self.first.unwrap_or(self.last);
        let prompt_seconds = (first - self.started).as_secs_f64();
        let decode_seconds = (self.last - first).as_secs_f64();
        // The first token came out of the prompt's last step.
        let decoded = self.generated_tokens.saturating_sub(1);
        let rate = |tokens: usize, seconds: f64| {
            if seconds > 0.0 {
                tokens as f64 / seconds
            } else {
                0.0
            }
        };
        format!(
            "prompt: {} tokens in {prompt_seconds:.3} s ({:.1}/s); generated: {} tokens ({}), {decoded} in {decode_seconds:.3} s ({:.2}/s)",
            self.prompt_tokens,
            rate(self.prompt_tokens, prompt_seconds),
            self.generated_tokens,
            self.finish,
            rate(decoded, decode_seconds),
        )
    }
}
