//! The engine against a model that computes next to nothing and checks everything: `scripted` is that model, `turns`
//! drives the loop by hand, one turn at a time, `thread` runs the real thread.

mod scripted;
mod thread;
mod turns;

use super::*;
use crate::metrics::Metrics;
use crate::sampler::{Sampler, Scratch};
use scripted::{Control, VOCABULARY, logits_after};
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

const PAGE_TOKENS: u32 = 4;

fn settings() -> EngineSettings {
    EngineSettings {
        context: 64,
        parallel: 4,
        step_width: 16,
        queue_max: 8,
        page_tokens: PAGE_TOKENS,
        kv_pages: 4 * 64 / PAGE_TOKENS,
        kv_tier: "host",
        stalled_client_timeout: Duration::from_secs(30),
        tokens: VOCABULARY,
        end_of_generation: Arc::new(HashSet::new()),
    }
}

/// A request with room for all its events.
fn request(prompt: &[u32], max_tokens: usize) -> (Request, Receiver<Event>) {
    request_with_room(prompt, max_tokens, 1000)
}

fn request_with_room(prompt: &[u32], max_tokens: usize, room: usize) -> (Request, Receiver<Event>) {
    let (events, receiver) = mpsc::channel(room);
    let request = Request {
        prompt: prompt.into(),
        sampling: SamplingParameters::greedy(),
        max_tokens,
        top_logprobs: None,
        events,
    };
    (request, receiver)
}

/// A prompt of `length` tokens that no other `seed` gives.
fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (seed * 31 + i * 7 + seed * i) % (VOCABULARY as u32 - 1))
        .collect()
}

/// What the model and the sampler give without any engine.
fn expected_tokens(prompt: &[u32], sampling: &SamplingParameters, count: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(sampling);
    let mut scratch = Scratch::default();
    let mut history = prompt.to_vec();
    for _ in 0..count {
        let row = logits_after(&history);
        history.push(sampler.sample(&row, &mut scratch).unwrap());
    }
    history.split_off(prompt.len())
}

/// What has arrived and was not read.
#[derive(Debug, PartialEq)]
struct Heard {
    tokens: Vec<u32>,
    progress: Vec<usize>,
    last: Option<Event>,
    /// Nothing more can come.
    closed: bool,
}

impl Heard {
    fn failure(&self) -> String {
        match &self.last {
            Some(Event::Failed(failure)) => failure.to_string(),
            _ => panic!("no failure in {self:?}"),
        }
    }
}

fn hear(receiver: &mut Receiver<Event>) -> Heard {
    let mut heard = Heard {
        tokens: Vec::new(),
        progress: Vec::new(),
        last: None,
        closed: false,
    };
    loop {
        let event = match receiver.try_recv() {
            Ok(event) => event,
            Err(TryRecvError::Empty) => return heard,
            Err(TryRecvError::Disconnected) => {
                heard.closed = true;
                return heard;
            }
        };
        assert_eq!(heard.last, None, "{event:?} after the last event");
        match event {
            Event::Token(token) => heard.tokens.push(token.id),
            Event::Prompt { computed } => heard.progress.push(computed),
            last => heard.last = Some(last),
        }
    }
}

/// `(running, waiting, used pages)` as Prometheus would see them.
fn gauges(metrics: &Metrics) -> (i64, i64, i64) {
    let active = |state: &str| metrics.requests_active.with_label_values(&[state]).get();
    let pages = metrics.kv_pages.with_label_values(&["host", "used"]).get();
    (active("running"), active("waiting"), pages)
}
