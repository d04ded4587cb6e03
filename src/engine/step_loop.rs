//! The loop itself: one [`StepLoop::turn`] delivers, admits, schedules, computes, samples. It runs on the engine
//! thread and owns the model, the pages and all sequences; time comes in as an argument.

use super::schedule::{Share, schedule};
use super::sequence::{Delivery, Sequence, Surroundings, answer_at_once, pages_max};
use super::shared::Shared;
use super::{EngineSettings, Event, Failure};
use crate::kv_cache::PagePool;
use crate::model::{Batch, Model, StepError};
use crate::sampler::Scratch;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct StepLoop {
    model: Box<dyn Model>,
    settings: EngineSettings,
    shared: Arc<Shared>,
    pool: PagePool,
    /// In order of admission.
    sequences: Vec<Sequence>,
    scratch: Scratch,
    /// Shares of steps given out. The first is number 1.
    turns: u64,
    /// The model computes nothing any more.
    is_lost: bool,
}

/// However the loop ends, no client is left without a last event, and no page with an owner.
impl Drop for StepLoop {
    fn drop(&mut self) {
        self.give_up_all(&Failure::ShuttingDown);
    }
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A step was taken.
    Stepped,
    /// There are sequences, and every one waits for its client.
    AllParked,
    /// There is nothing to do.
    Idle,
    /// The device that computes is lost: nothing will be done.
    Lost,
}

impl StepLoop {
    pub(super) fn new(
        model: Box<dyn Model>,
        settings: EngineSettings,
        shared: Arc<Shared>,
    ) -> StepLoop {
        let step_loop = StepLoop {
            pool: PagePool::new(settings.kv_pages, settings.page_tokens),
            model,
            settings,
            shared,
            sequences: Vec::new(),
            scratch: Scratch::default(),
            turns: 0,
            is_lost: false,
        };
        step_loop.publish_pages();
        step_loop
    }

    /// One round of the loop: at most one step.
    pub(super) fn turn(&mut self, now: Instant) -> Turn {
        self.deliver(now);
        if self.shared.is_past_deadline(now) {
            self.give_up_all(&Failure::ShuttingDown);
        }
        self.admit();
        let candidates: Vec<_> = self.sequences.iter().map(Sequence::candidate).collect();
        let shares = schedule(&candidates, self.settings.step_width);
        if shares.is_empty() {
            return match self.sequences.len() {
                0 => Turn::Idle,
                _ => Turn::AllParked,
            };
        }
        let started = Instant::now();
        self.step(&shares, now, started);
        self.deliver(now + started.elapsed());
        if self.is_lost {
            self.give_up_all(&Failure::Internal);
            return Turn::Lost;
        }
        Turn::Stepped
    }

    /// Every sequence hears of the failure if its channel has room, and is gone.
    pub(super) fn give_up_all(&mut self, failure: &Failure) {
        let mut channels = Vec::new();
        for mut sequence in self.sequences.drain(..) {
            sequence.release(&mut self.pool);
            channels.push(sequence.into_events());
        }
        self.shared.leave(channels.len());
        self.publish_pages();
        for channel in channels {
            let _ = channel.try_send(Event::Failed(failure.clone()));
        }
    }

    /// Sends what is pending, and lets those go that have heard everything or do not listen. A client hears its last
    /// event only after its request has left the books.
    fn deliver(&mut self, now: Instant) {
        let timeout = self.settings.stalled_client_timeout;
        let pool = &mut self.pool;
        let mut goodbyes = Vec::new();
        let before = self.sequences.len();
        self.sequences.retain_mut(|sequence| {
            match sequence.deliver(now, timeout) {
                Delivery::UpToDate | Delivery::Parked => return true,
                Delivery::Goodbye(permit, event) => goodbyes.push((permit, event)),
                Delivery::Closed => {}
                Delivery::Stalled => {
                    tracing::info!(?timeout, "a client takes no events; its request is dropped");
                }
            }
            sequence.release(pool);
            false
        });
        self.shared.leave(before - self.sequences.len());
        self.publish_pages();
        for (permit, event) in goodbyes {
            permit.send(event);
        }
    }

    /// The lowest number that no sequence has which computes: less than `parallel` where fewer than that do.
    fn free_slot(&self) -> u32 {
        let is_free = |slot: &u32| self.sequences.iter().all(|s| s.slot() != Some(*slot));
        (0..).find(is_free).unwrap_or(0)
    }

    /// Takes requests from the queue, in order, while there are slots and pages for the first of them.
    fn admit(&mut self) {
        self.shared.drop_closed();
        let context = self.settings.context;
        loop {
            let going = self.sequences.iter().filter(|s| !s.is_ending());
            if going.count() >= self.settings.parallel {
                return;
            }
            let promised: u32 = self.sequences.iter().map(Sequence::promised_pages).sum();
            let pool = &self.pool;
            let Some(waiting) = self.shared.take_first_if(|request| {
                let needed = pages_max(request, context, pool);
                // What can never fit is answered at once.
                needed > pool.pages() || promised + needed <= pool.pages()
            }) else {
                return;
            };
            let request = waiting.request;
            let vocabulary = self.model.vocabulary_size().min(self.settings.tokens);
            if let Some(answer) = answer_at_once(&request, &self.settings, vocabulary, &self.pool) {
                self.shared.leave(1);
                let _ = request.events.try_send(answer);
            } else {
                let needed = pages_max(&request, context, &self.pool);
                let slot = self.free_slot();
                self.sequences
                    .push(Sequence::new(request, waiting.arrived, needed, slot));
            }
        }
    }

    fn step(&mut self, shares: &[Share], now: Instant, started: Instant) {
        let around = Surroundings {
            now,
            settings: &self.settings,
            metrics: self.shared.metrics(),
        };
        for share in shares {
            self.turns += 1;
            self.sequences[share.index].begin_step(
                share.tokens,
                self.turns,
                around,
                &mut self.pool,
            );
        }
        self.publish_pages();
        let sequences = &self.sequences;
        let batch = Batch {
            runs: shares
                .iter()
                .map(|share| sequences[share.index].run(share.tokens))
                .collect(),
        };
        let width = batch.width();
        let wants: Vec<bool> = batch.runs.iter().map(|run| run.wants_logits).collect();
        let shared = &self.shared;
        let cancelled = || {
            shared.is_past_deadline(Instant::now())
                || shares
                    .iter()
                    .all(|share| sequences[share.index].is_closed())
        };
        match self.model.forward(&batch, &cancelled) {
            Ok(rows) => {
                self.advance(shares, &wants, &rows, now + started.elapsed());
                let metrics = self.shared.metrics();
                metrics.step_width.observe(width as f64);
                metrics
                    .step_seconds
                    .observe(started.elapsed().as_secs_f64());
            }
            Err(error) => self.fail_step(shares, &error),
        }
    }

    /// `wants` and `rows` are what the runs asked for and what the model gave.
    fn advance(&mut self, shares: &[Share], wants: &[bool], rows: &[Vec<f32>], now: Instant) {
        let vocabulary = self.model.vocabulary_size();
        let wanted = wants.iter().filter(|wants| **wants).count();
        assert!(
            rows.len() == wanted && rows.iter().all(|row| row.len() == vocabulary),
            "{wanted} rows of {vocabulary} logits are wanted, and there are {:?}",
            rows.iter().map(Vec::len).collect::<Vec<usize>>()
        );
        let around = Surroundings {
            now,
            settings: &self.settings,
            metrics: self.shared.metrics(),
        };
        let mut rows = rows.iter();
        for (share, wants) in std::iter::zip(shares, wants) {
            let row = if *wants { rows.next() } else { None };
            let sequence = &mut self.sequences[share.index];
            let last = sequence.advance(
                share.tokens,
                row.map(|row| &row[..row.len().min(self.settings.tokens)]),
                around,
                &mut self.scratch,
            );
            if let Some(last) = last {
                sequence.end(last, &mut self.pool);
            }
        }
    }

    /// Those that took part in the step fail; the others do not notice.
    fn fail_step(&mut self, shares: &[Share], error: &StepError) {
        let failure = match error {
            // Or all clients have left, and nobody hears it.
            StepError::Cancelled => Failure::ShuttingDown,
            StepError::Weights(_) => Failure::Weights,
            StepError::Numeric(_) | StepError::DeviceLost(_) => Failure::Numeric,
        };
        if failure != Failure::ShuttingDown {
            tracing::error!(%error, sequences = shares.len(), "compute a step");
        }
        for share in shares {
            self.sequences[share.index].end(Event::Failed(failure.clone()), &mut self.pool);
        }
        if let StepError::DeviceLost(cause) = error {
            // Before anybody hears of it: whoever does finds the status changed already.
            self.shared.fail(cause);
            self.is_lost = true;
        }
    }

    fn publish_pages(&self) {
        let gauge = |state: &str, pages: u32| {
            self.shared
                .metrics()
                .kv_pages
                .with_label_values(&[self.settings.kv_tier, state])
                .set(i64::from(pages));
        };
        gauge("used", self.pool.used_pages());
        gauge("free", self.pool.free_pages());
    }
}
