//! The step loop: schedule, forward, sample. One thread owns all mutable state; the rest of the process talks to it
//! through a bounded queue of requests and one bounded channel per request.
//!
//! - `handle`: starting and stopping the thread, what it does when it is idle, and the life of the whole engine.
//! - `shared`: what both sides see: the queue, the counts, the status. One lock, never held during a step.
//! - `step_loop`: one turn of the loop. `schedule` shares a step's width out; `sequence` is one request's state.
//!
//! **How a request ends.** The last event is [`Event::Finished`] or [`Event::Failed`], and the channel closes after
//! it. By then its pages, its slot and its place in the gauges are free already. A channel that closes without a last
//! event while the engine is ready belongs to a client that did not read for
//! [`EngineSettings::stalled_client_timeout`]: the engine has given it up, and it counts as cancelled. When the engine
//! ends, a channel that is full closes without one too. A receiver that is dropped cancels: what the request held is free within one
//! step. Outcomes are counted once, by whoever made the request and sees how it ended (the engine counts tokens,
//! times and the active ones).

mod handle;
mod schedule;
mod sequence;
mod shared;
mod step_loop;

pub use crate::sampler::SamplingParameters;
pub use handle::{Engine, EngineHandle, Progress};

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// One sequence to generate.
#[derive(Debug)]
pub struct Request {
    /// At least one token, and fewer than the context; every id is below [`EngineSettings::tokens`].
    pub prompt: Arc<[u32]>,
    pub sampling: SamplingParameters,
    /// Upper bound of generated tokens; the context bounds it too.
    pub max_tokens: usize,
    /// How many alternatives to report with each token; `None`: no log-probabilities.
    pub top_logprobs: Option<usize>,
    /// Where events go. The engine only ever does `try_send`; a full channel parks the sequence, a closed one
    /// cancels it. Progress of the prompt is reported only while at least two places are free.
    pub events: mpsc::Sender<Event>,
}

/// What a request hears.
#[derive(Debug, PartialEq)]
pub enum Event {
    /// Tokens of the prompt computed so far.
    Prompt {
        computed: usize,
    },
    Token(GeneratedToken),
    /// The last event of a request that ended well.
    Finished(FinishReason),
    /// The last event of a request that failed.
    Failed(Failure),
}

/// Why a request failed. The text is for the client: no file names, no offsets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The request cannot run at all, and why.
    #[error("{0}")]
    Refused(String),
    #[error("the model's weights could not be read; the server's log has the details")]
    Weights,
    #[error("the model's computation failed; the server's log has the details")]
    Numeric,
    #[error("the model computed values that are not numbers; nothing can be generated from them")]
    NotNumbers,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine has stopped after an internal error")]
    Internal,
}

#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    pub id: u32,
    /// Natural logarithm of the model's probability (before temperature and filters); present when asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn (the end token is counted, and not sent).
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    #[error("the server is at capacity: {waiting} requests wait already; try again later")]
    QueueFull { waiting: usize },
    #[error("the model is still loading; try again later")]
    Loading,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine has stopped after an internal error; restart the server")]
    EngineStopped,
}

/// Where the engine stands.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineStatus {
    /// `progress` in 0..=1.
    Loading { progress: f32 },
    /// Takes requests.
    Ready,
    /// Takes no more requests; also after the last one has ended.
    ShuttingDown,
    /// Loading failed, or a step panicked. Stays so. The text is for the log and the operator.
    Failed(String),
}

/// Requests that the engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Admitted, and not ended: their last event is not delivered yet.
    pub running: usize,
    pub waiting: usize,
}

/// Limits of an engine, all from the configuration and the plan.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Prompt and generated tokens of a sequence, at most.
    pub context: u32,
    /// Sequences at once.
    pub parallel: usize,
    /// Tokens in a step, at most.
    pub step_width: usize,
    /// Requests that wait beyond the `parallel` ones that run.
    pub queue_max: usize,
    pub page_tokens: u32,
    /// Pages of the KV cache: the plan makes room for `parallel` sequences of `context` tokens. With fewer, a request
    /// waits until its longest possible sequence has room.
    pub kv_pages: u32,
    /// Where the pages are: a label of the metric.
    pub kv_tier: &'static str,
    /// A client that takes no event for so long is given up.
    pub stalled_client_timeout: Duration,
    /// Tokens of the vocabulary. The model's rows of logits may be longer: what is beyond stands for no token, and is
    /// neither chosen nor taken in a prompt.
    pub tokens: usize,
    /// Tokens that end a turn.
    pub end_of_generation: Arc<HashSet<u32>>,
}

#[cfg(test)]
mod tests;
