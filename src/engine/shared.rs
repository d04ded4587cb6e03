//! What the engine thread and its callers both see: the queue of requests, the counts, the status.
//!
//! One mutex, held for a few operations at a time and never during a step. A request is in the queue, or with the
//! step loop and counted as running, or gone; every change between these publishes the gauges under the same lock.

use super::{EngineStatus, Event, Failure, Load, Request, SubmitError};
use crate::metrics::Metrics;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    state: Mutex<State>,
    /// Signalled at every change that somebody may wait for.
    changed: Condvar,
    /// Requests that run and wait, together, at most.
    capacity: usize,
    metrics: Metrics,
}

struct State {
    stage: Stage,
    waiting: VecDeque<Waiting>,
    running: usize,
    /// The thread has ended.
    ended: bool,
}

enum Stage {
    Loading {
        progress: f32,
    },
    Ready,
    /// Whatever still runs at `deadline` is cancelled.
    ShuttingDown {
        deadline: Instant,
    },
    Failed(String),
}

/// A request that nobody has looked at.
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) arrived: Instant,
}

impl Shared {
    pub(super) fn new(capacity: usize, metrics: Metrics) -> Shared {
        let shared = Shared {
            state: Mutex::new(State {
                stage: Stage::Loading { progress: 0.0 },
                waiting: VecDeque::new(),
                running: 0,
                ended: false,
            }),
            changed: Condvar::new(),
            capacity,
            metrics,
        };
        shared.publish(&shared.lock());
        shared
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// No code between lock and unlock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, state: &State) {
        let gauge = |name: &str, count: usize| {
            self.metrics
                .requests_active
                .with_label_values(&[name])
                .set(count as i64);
        };
        gauge("running", state.running);
        gauge("waiting", state.waiting.len());
    }

    pub(super) fn submit(&self, request: Request) -> Result<(), SubmitError> {
        let mut state = self.lock();
        match state.stage {
            Stage::Ready => {}
            Stage::Loading { .. } => return Err(SubmitError::Loading),
            Stage::ShuttingDown { .. } => return Err(SubmitError::ShuttingDown),
            Stage::Failed(_) => return Err(SubmitError::EngineStopped),
        }
        if state.running + state.waiting.len() >= self.capacity {
            // A step may take seconds, and the loop clears the queue only between steps.
            state.waiting.retain(|w| !w.request.events.is_closed());
            self.publish(&state);
        }
        if state.running + state.waiting.len() >= self.capacity {
            return Err(SubmitError::QueueFull {
                waiting: state.waiting.len(),
            });
        }
        state.waiting.push_back(Waiting {
            request,
            arrived: Instant::now(),
        });
        self.publish(&state);
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn load(&self) -> Load {
        let state = self.lock();
        Load {
            running: state.running,
            waiting: state.waiting.len(),
        }
    }

    pub(super) fn status(&self) -> EngineStatus {
        match &self.lock().stage {
            Stage::Loading { progress } => EngineStatus::Loading {
                progress: *progress,
            },
            Stage::Ready => EngineStatus::Ready,
            Stage::ShuttingDown { .. } => EngineStatus::ShuttingDown,
            Stage::Failed(sentence) => EngineStatus::Failed(sentence.clone()),
        }
    }

    pub(super) fn set_progress(&self, ratio: f32) {
        self.metrics.load_progress_ratio.set(f64::from(ratio));
        if let Stage::Loading { progress } = &mut self.lock().stage {
            *progress = ratio;
        }
    }

    /// The model is loaded. A shutdown or a failure that came before stays.
    pub(super) fn set_ready(&self) {
        let mut state = self.lock();
        if matches!(state.stage, Stage::Loading { .. }) {
            state.stage = Stage::Ready;
            self.changed.notify_all();
        }
    }

    /// From now on requests are refused. Those that wait hear it at once; those that run have until `deadline`. A
    /// second call can only bring the deadline forward.
    pub(super) fn shut_down(&self, deadline: Instant) {
        self.close(
            |stage| {
                let deadline = match stage {
                    Stage::Failed(_) => return,
                    Stage::ShuttingDown { deadline: before } => deadline.min(*before),
                    Stage::Loading { .. } | Stage::Ready => deadline,
                };
                *stage = Stage::ShuttingDown { deadline };
            },
            Failure::ShuttingDown,
        );
    }

    /// The engine is broken for good. The first cause stays.
    pub(super) fn fail(&self, cause: &str) {
        self.close(
            |stage| {
                if !matches!(stage, Stage::Failed(_)) {
                    *stage = Stage::Failed(cause.to_owned());
                }
            },
            Failure::Internal,
        );
    }

    fn close(&self, change: impl FnOnce(&mut Stage), failure: Failure) {
        let mut state = self.lock();
        change(&mut state.stage);
        let turned_away = std::mem::take(&mut state.waiting);
        self.publish(&state);
        self.changed.notify_all();
        drop(state);
        for waiting in turned_away {
            // A channel that nobody has sent to has room, or nobody listens.
            let _ = waiting
                .request
                .events
                .try_send(Event::Failed(failure.clone()));
        }
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        matches!(self.lock().stage, Stage::ShuttingDown { .. })
    }

    /// Whether the time for a graceful end is over.
    pub(super) fn is_past_deadline(&self, now: Instant) -> bool {
        matches!(self.lock().stage, Stage::ShuttingDown { deadline } if now >= deadline)
    }

    /// Forgets requests whose client is gone.
    pub(super) fn drop_closed(&self) {
        let mut state = self.lock();
        state.waiting.retain(|w| !w.request.events.is_closed());
        self.publish(&state);
    }

    /// Takes the request that waits longest if it may run now. It counts as running from here on.
    pub(super) fn take_first_if(&self, may_run: impl FnOnce(&Request) -> bool) -> Option<Waiting> {
        let mut state = self.lock();
        if !may_run(&state.waiting.front()?.request) {
            return None;
        }
        let taken = state.waiting.pop_front();
        state.running += 1;
        self.publish(&state);
        taken
    }

    /// So many requests run no longer.
    pub(super) fn leave(&self, count: usize) {
        if count == 0 {
            return;
        }
        let mut state = self.lock();
        assert!(
            count <= state.running,
            "{count} requests leave, and {} run",
            state.running
        );
        state.running -= count;
        self.publish(&state);
        self.changed.notify_all();
    }

    /// Sleeps until there is a request or the engine shuts down.
    pub(super) fn wait_for_work(&self) {
        let guard = self.lock();
        let idle = |state: &mut State| {
            state.waiting.is_empty() && !matches!(state.stage, Stage::ShuttingDown { .. })
        };
        drop(self.changed.wait_while(guard, idle));
    }

    /// Sleeps for `time`, less if something changes.
    pub(super) fn wait_for_change(&self, time: Duration) {
        drop(self.changed.wait_timeout(self.lock(), time));
    }

    /// Blocks the caller until the engine is no longer loading.
    pub(super) fn wait_until_loaded(&self) {
        let loading = |state: &mut State| matches!(state.stage, Stage::Loading { .. });
        drop(self.changed.wait_while(self.lock(), loading));
    }

    pub(super) fn set_ended(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Blocks the caller until the engine thread has ended.
    pub(super) fn wait_until_ended(&self) {
        let going_on = |state: &mut State| !state.ended;
        drop(self.changed.wait_while(self.lock(), going_on));
    }
}
