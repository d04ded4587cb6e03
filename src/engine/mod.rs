//! The step loop: schedule, forward, sample. One thread owns all mutable state; the rest of the process talks to it
//! through a bounded queue of requests and one bounded channel per request.

pub use crate::sampler::SamplingParameters;

use std::sync::Arc;
use tokio::sync::mpsc;

/// One sequence to generate.
#[derive(Debug)]
pub struct Request {
    /// At least one token; prompt and generated tokens together are at most the context.
    pub prompt: Arc<[u32]>,
    pub sampling: SamplingParameters,
    /// Upper bound of generated tokens; the context bounds it too.
    pub max_tokens: usize,
    /// How many alternatives to report with each token; `None`: no log-probabilities.
    pub top_logprobs: Option<usize>,
    /// Where events go. The engine only ever does `try_send`; a full channel parks the sequence, a closed one
    /// cancels it.
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
    /// The last event of a request that failed: a sentence for the client.
    Failed(String),
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
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine has stopped after an internal error; restart the server")]
    EngineStopped,
}
