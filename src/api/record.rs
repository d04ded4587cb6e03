//! Counting requests: each one exactly once, whatever becomes of it.

use super::error::ApiError;
use crate::metrics::Metrics;
use std::time::Instant;

/// The value of the label `endpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Chat,
    Completions,
}

impl Endpoint {
    const fn name(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat_completions",
            Endpoint::Completions => "completions",
        }
    }
}

/// The value of the label `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Stop,
    Length,
    Cancelled,
    /// Not taken: the client's fault, or no room.
    Rejected,
    Error,
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Cancelled => "cancelled",
            Outcome::Rejected => "rejected",
            Outcome::Error => "error",
        }
    }

    pub(super) fn of(error: &ApiError) -> Outcome {
        match error.status().as_u16() {
            400..500 | 503 => Outcome::Rejected,
            _ => Outcome::Error,
        }
    }
}

/// One request, from its arrival. Dropping it counts it: as cancelled, unless an outcome was set. It lives in the
/// handler's future and then in the response's body, both of which are dropped when the client leaves.
pub(super) struct RequestRecord {
    metrics: Metrics,
    endpoint: Endpoint,
    started: Instant,
    outcome: Outcome,
}

impl RequestRecord {
    pub(super) fn start(metrics: &Metrics, endpoint: Endpoint) -> RequestRecord {
        RequestRecord {
            metrics: metrics.clone(),
            endpoint,
            started: Instant::now(),
            outcome: Outcome::Cancelled,
        }
    }

    pub(super) fn set(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let endpoint = self.endpoint.name();
        let outcome = self.outcome.name();
        let seconds = self.started.elapsed().as_secs_f64();
        self.metrics
            .requests_total
            .with_label_values(&[endpoint, outcome])
            .inc();
        self.metrics
            .request_seconds
            .with_label_values(&[endpoint])
            .observe(seconds);
        tracing::debug!(endpoint, outcome, seconds, "request ended");
    }
}
