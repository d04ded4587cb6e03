//! HTTP: OpenAI's API, and what operators ask. Turns bodies into requests for the engine and its events into answers.
//!
//! `main` builds one [`Served`] and runs [`serve`]; everything here runs on tokio's threads and shares one `Api` by
//! `Arc`. Parsing, templates and tokenisation go to blocking threads. Nothing here touches weights or devices.
//!
//! Bounds, each with its name: bodies (`body.rs`) and what they become in memory (`bounded.rs`), connections
//! (`server.rs`), events per sequence (`sequence.rs`), stop strings and choices (`wire.rs`); the queue of requests is the
//! engine's.

#![warn(clippy::indexing_slicing)]

mod answer;
mod body;
mod bounded;
mod chat;
mod completions;
mod error;
mod generate;
mod health;
mod models;
mod record;
mod security;
mod sequence;
mod server;
mod sse;
mod stall;
mod tokenize;
mod wire;

pub use body::BODY_BYTES_MAX;
pub use server::{HttpThreads, ListenError, Stop, listen, on_signal, run, watch_signals};

use crate::config::{Config, Secret};
use crate::engine::{EngineHandle, EngineStatus, SubmitError};
use crate::metrics::Metrics;
use crate::tokenizer::{ChatTemplate, Tokenizer};
use axum::Router;
use axum::extract::Request;
use axum::http::{Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bounded::{TOKENS_MAX, TokenIds};
use error::ApiError;
use std::any::Any;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tower_http::catch_panic::CatchPanicLayer;

/// What `/memory` answers.
pub type MemoryReport = Arc<dyn Fn() -> serde_json::Value + Send + Sync>;

/// What is served.
pub struct Served {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub metrics: Metrics,
    pub memory: MemoryReport,
    /// The name that answers give.
    pub model_name: String,
    /// Tokens of a sequence, prompt and answer together.
    pub context: usize,
    /// What the model was trained on.
    pub model_context: usize,
}

/// What all handlers share.
struct Api {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    metrics: Metrics,
    memory: MemoryReport,
    model_name: Arc<str>,
    context: usize,
    model_context: usize,
    /// Bytes of text that one token stands for at most.
    token_bytes_max: usize,
    /// Seconds since 1970.
    started: u64,
    api_key: Option<Secret>,
    keep_alive: Option<Duration>,
    /// Only programs of this machine, and the pages in its browsers, can ask.
    loopback_only: bool,
    intake: body::Intake,
    random: RandomState,
    asked: AtomicU64,
}

/// All routes. Every answer that is not a success is OpenAI's error envelope, but for `/health`.
pub fn router(served: Served, config: &Config) -> Router {
    let api = Arc::new(Api {
        token_bytes_max: served.tokenizer.longest_piece_bytes(),
        engine: served.engine,
        tokenizer: served.tokenizer,
        template: served.template,
        metrics: served.metrics,
        memory: served.memory,
        model_name: served.model_name.into(),
        context: served.context,
        model_context: served.model_context,
        started: generate::unix_seconds(),
        api_key: config.api_key.clone(),
        keep_alive: config.keep_alive,
        loopback_only: is_loopback(&config.listen),
        intake: body::Intake::new(),
        random: RandomState::new(),
        asked: AtomicU64::new(0),
    });
    Router::new()
        .route("/v1/chat/completions", post(generate::chat_completions))
        .route("/v1/completions", post(generate::text_completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{name}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(health::health))
        .route("/metrics", get(health::metrics))
        .route("/memory", get(health::memory))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(from_fn_with_state(Arc::clone(&api), security::guard))
        .layer(CatchPanicLayer::custom(panicked))
        .with_state(api)
}

impl Api {
    /// A number that no client can guess.
    fn random(&self) -> u64 {
        self.random
            .hash_one(self.asked.fetch_add(1, Ordering::Relaxed))
    }

    /// A sequence that the engine left without a last event: it ended itself, or the client did not read.
    fn given_up(&self) -> ApiError {
        self.check_ready().err().unwrap_or_else(|| {
            ApiError::internal("this answer was given up: the client did not read it in time")
        })
    }

    fn check_ready(&self) -> Result<(), ApiError> {
        match self.engine.status() {
            EngineStatus::Ready => Ok(()),
            EngineStatus::Loading { progress } => Err(ApiError::loading(progress)),
            EngineStatus::ShuttingDown => Err(SubmitError::ShuttingDown.into()),
            EngineStatus::Failed(_) => Err(SubmitError::EngineStopped.into()),
        }
    }

    /// Refuses a text that cannot fit before it is encoded: megabytes take seconds, and their answer is known.
    fn check_text_fits(&self, param: &'static str, bytes: usize) -> Result<(), ApiError> {
        let tokens_min = bytes.div_ceil(self.token_bytes_max);
        if tokens_min < self.context {
            return Ok(());
        }
        Err(ApiError::text_exceeds_context(
            param,
            self.context,
            bytes,
            tokens_min,
        ))
    }

    /// Ids that a client sent, if all are of this model.
    fn known_tokens(&self, param: &'static str, tokens: &TokenIds) -> Result<Vec<u32>, ApiError> {
        if !tokens.is_whole() {
            return Err(ApiError::invalid(
                param,
                format!(
                    "{} token ids are too many; a request may have {TOKENS_MAX}",
                    tokens.count
                ),
            ));
        }
        let known = self.tokenizer.vocabulary_size();
        let known_id = |&id: &u64| {
            u32::try_from(id)
                .ok()
                .filter(|id| (*id as usize) < known)
                .ok_or_else(|| {
                    ApiError::invalid(
                        param,
                        format!("token {id} is not in the vocabulary, which has {known} tokens"),
                    )
                })
        };
        tokens.ids.iter().map(known_id).collect()
    }
}

fn is_loopback(listen: &str) -> bool {
    let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::no_such_path(uri.path())
}

async fn method_not_allowed(method: Method, request: Request) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), request.uri().path())
}

/// A bug of ours costs one request.
fn panicked(payload: Box<dyn Any + Send + 'static>) -> Response {
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    tracing::error!(message, "a handler panicked");
    ApiError::internal("the server failed to answer this request").into_response()
}
