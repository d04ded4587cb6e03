//! A streamed answer as server-sent events: <https://html.spec.whatwg.org/multipage/server-sent-events.html>.
//!
//! The stream is pulled by the connection: it holds no task and no queue of its own, and dropping it drops the
//! receivers of its sequences, which cancels them.

use super::Api;
use super::answer::{Answer, Choice, usage};
use super::error::ApiError;
use super::generate::{Running, outcome_of};
use super::record::{Outcome, RequestRecord};
use super::sequence::{Sequence, Update};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::Value;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A client that is behind gets its events in pieces of about this size.
const PIECE_BYTES: usize = 16 << 10;

pub(super) struct EventStream {
    api: Arc<Api>,
    sequences: Vec<(Sequence, Choice)>,
    prompt_tokens: usize,
    answer: Answer,
    include_usage: bool,
    keep_alive: Option<KeepAlive>,
    record: RequestRecord,
    outcome: Outcome,
    /// Whole events that have not been handed over.
    buffer: String,
    ended: bool,
}

impl EventStream {
    pub(super) fn new(
        api: Arc<Api>,
        running: Running,
        include_usage: bool,
        record: RequestRecord,
    ) -> EventStream {
        EventStream {
            keep_alive: api.keep_alive.map(KeepAlive::new),
            api,
            sequences: running.sequences,
            prompt_tokens: running.prompt_tokens,
            answer: running.answer,
            include_usage,
            record,
            outcome: Outcome::Stop,
            buffer: String::new(),
            ended: false,
        }
    }

    /// Takes what the sequences have; whether any had something.
    fn advance(&mut self, context: &mut Context<'_>) -> Progress {
        let mut progress = Progress::Ended;
        let blank_usage = self.include_usage.then_some(Value::Null);
        for (sequence, choice) in &mut self.sequences {
            match sequence.poll_update(context) {
                Poll::Ready(None) => {}
                Poll::Pending => {
                    if matches!(progress, Progress::Ended) {
                        progress = Progress::Waits;
                    }
                }
                Poll::Ready(Some(Update::Delta(delta))) => {
                    progress = Progress::Moved;
                    self.outcome = outcome_of(self.outcome, delta.finish);
                    for choice in self.answer.chunk_choices(choice, &delta) {
                        let chunk = self.answer.chunk(vec![choice], blank_usage.clone());
                        push_event(&mut self.buffer, &chunk);
                    }
                }
                Poll::Ready(Some(Update::Failed(failure))) => {
                    return Progress::Failed(failure.into(), Outcome::Error);
                }
                Poll::Ready(Some(Update::GivenUp)) => {
                    let outcome = match self.api.check_ready() {
                        Ok(()) => Outcome::Cancelled,
                        Err(_) => Outcome::Error,
                    };
                    return Progress::Failed(self.api.given_up(), outcome);
                }
            }
        }
        progress
    }

    fn fail(&mut self, error: &ApiError, outcome: Outcome) {
        self.sequences.clear();
        self.buffer.push_str("event: error\n");
        push_event(&mut self.buffer, &error.body());
        self.end(outcome);
    }

    fn finish(&mut self) {
        if self.include_usage {
            let completion_tokens = self
                .sequences
                .iter()
                .map(|(sequence, _)| sequence.completion_tokens())
                .sum();
            let usage = usage(self.prompt_tokens, completion_tokens);
            push_event(
                &mut self.buffer,
                &self.answer.chunk(Vec::new(), Some(usage)),
            );
        }
        self.end(self.outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        self.buffer.push_str("data: [DONE]\n\n");
        self.record.set(outcome);
        self.ended = true;
    }
}

/// What became of a look at all sequences.
enum Progress {
    Ended,
    Waits,
    Moved,
    Failed(ApiError, Outcome),
}

impl Stream for EventStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        let this = &mut *self;
        loop {
            let waits = if this.ended || this.buffer.len() >= PIECE_BYTES {
                false
            } else {
                match this.advance(context) {
                    Progress::Moved => continue,
                    Progress::Waits => true,
                    Progress::Ended => {
                        this.finish();
                        false
                    }
                    Progress::Failed(error, outcome) => {
                        this.fail(&error, outcome);
                        false
                    }
                }
            };
            if !this.buffer.is_empty() {
                if let Some(keep_alive) = &mut this.keep_alive {
                    keep_alive.sent();
                }
                let piece = std::mem::take(&mut this.buffer);
                return Poll::Ready(Some(Ok(Bytes::from(piece))));
            }
            if !waits {
                return Poll::Ready(None);
            }
            match &mut this.keep_alive {
                Some(keep_alive) => {
                    std::task::ready!(keep_alive.poll_due(context));
                    this.buffer.push_str(": keep-alive\n\n");
                }
                None => return Poll::Pending,
            }
        }
    }
}

impl IntoResponse for EventStream {
    fn into_response(self) -> Response {
        let mut response = Body::from_stream(self).into_response();
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
            // nginx gathers responses unless told otherwise.
            (header::HeaderName::from_static("x-accel-buffering"), "no"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

/// JSON has no raw line ends, so an event is one line.
fn push_event(buffer: &mut String, data: &Value) {
    buffer.push_str("data: ");
    buffer.push_str(&data.to_string());
    buffer.push_str("\n\n");
}

/// Says when a stream has been silent for the interval.
struct KeepAlive {
    interval: Duration,
    last: Instant,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    fn new(interval: Duration) -> KeepAlive {
        KeepAlive {
            interval,
            last: Instant::now(),
            timer: Box::pin(tokio::time::sleep(interval)),
        }
    }

    fn sent(&mut self) {
        self.last = Instant::now();
    }

    fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // Moved only when it fires, and not with each event.
        while self.timer.as_mut().poll(context).is_ready() {
            let due = self.last + self.interval;
            if Instant::now() >= due {
                self.last = Instant::now();
                self.timer.as_mut().reset(self.last + self.interval);
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
        Poll::Pending
    }
}
