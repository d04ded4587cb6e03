//! One admitted request: how far it is, what it holds, what its client has not taken yet.

use super::schedule::{Candidate, Work};
use super::{EngineSettings, Event, Failure, FinishReason, GeneratedToken, Request};
use crate::kv_cache::{BlockTable, PagePool};
use crate::metrics::Metrics;
use crate::model::Run;
use crate::sampler::{SampleError, Sampler, Scratch, log_probabilities};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{OwnedPermit, Sender};

pub(super) struct Sequence {
    request: Request,
    arrived: Instant,
    sampler: Sampler,
    table: BlockTable,
    /// Pages that it may come to need, and that admission has set aside for it.
    promised_pages: u32,
    /// Its number among the sequences that compute: no two have the same.
    slot: u32,
    /// Tokens whose keys and values are in the pages.
    computed: usize,
    /// The token chosen last; it goes in next. Nothing before the prompt is done.
    next: u32,
    generated: usize,
    last_turn: Option<u64>,
    last_token: Option<Instant>,
    /// What the channel had no room for: at most a token and the last event. While there is something, the sequence
    /// sits out.
    pending: VecDeque<Event>,
    /// Since when the channel takes nothing.
    parked: Option<Instant>,
    /// Nothing more will be computed; the pages are back already.
    ending: bool,
}

/// What surrounds a sequence in a step.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) now: Instant,
    pub(super) settings: &'a EngineSettings,
    pub(super) metrics: &'a Metrics,
}

/// How far the client is.
pub(super) enum Delivery {
    /// It has everything.
    UpToDate,
    Parked,
    /// Only the last event is left, and there is room for it.
    Goodbye(OwnedPermit<Event>, Event),
    Closed,
    /// It has taken nothing for too long.
    Stalled,
}

/// Positions that a request may come to fill. The last token is never computed, only sent.
fn positions_max(request: &Request, context: u32) -> u32 {
    let longest = request.prompt.len().saturating_add(request.max_tokens);
    longest.min(context as usize).saturating_sub(1) as u32
}

/// Pages that a request may come to need.
pub(super) fn pages_max(request: &Request, context: u32, pool: &PagePool) -> u32 {
    pool.pages_for(positions_max(request, context))
}

/// The answer to a request that is over before it starts.
pub(super) fn answer_at_once(
    request: &Request,
    settings: &EngineSettings,
    vocabulary: usize,
    pool: &PagePool,
) -> Option<Event> {
    let refused = |sentence: String| Some(Event::Failed(Failure::Refused(sentence)));
    let tokens = request.prompt.len();
    let context = settings.context;
    if tokens == 0 {
        return refused("the prompt is empty".into());
    }
    if tokens >= context as usize {
        return refused(format!(
            "the prompt has {tokens} tokens, and the context of {context} leaves room for a prompt of at most {}",
            context.saturating_sub(1)
        ));
    }
    if let Some(id) = request.prompt.iter().find(|id| **id as usize >= vocabulary) {
        return refused(format!(
            "the prompt has token {id}, and the vocabulary ends before {vocabulary}"
        ));
    }
    if let Err(sentence) = request.sampling.validate() {
        return refused(sentence);
    }
    if request.max_tokens == 0 {
        return Some(Event::Finished(FinishReason::Length));
    }
    if pages_max(request, context, pool) > pool.pages() {
        return refused(format!(
            "prompt and answer may have {} tokens, and the KV cache has room for {}",
            tokens.saturating_add(request.max_tokens),
            u64::from(pool.pages()) * u64::from(pool.page_tokens())
        ));
    }
    None
}

impl Sequence {
    pub(super) fn new(
        request: Request,
        arrived: Instant,
        promised_pages: u32,
        slot: u32,
    ) -> Sequence {
        Sequence {
            sampler: Sampler::new(&request.sampling),
            request,
            arrived,
            table: BlockTable::new(),
            promised_pages,
            slot,
            computed: 0,
            next: 0,
            generated: 0,
            last_turn: None,
            last_token: None,
            pending: VecDeque::new(),
            parked: None,
            ending: false,
        }
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending
    }

    /// `None` where nothing more is computed: another may have it.
    pub(super) fn slot(&self) -> Option<u32> {
        (!self.ending).then_some(self.slot)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.request.events.is_closed()
    }

    pub(super) fn promised_pages(&self) -> u32 {
        if self.ending { 0 } else { self.promised_pages }
    }

    fn prompt_left(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.computed)
    }

    pub(super) fn candidate(&self) -> Candidate {
        let work = if self.ending || !self.pending.is_empty() {
            Work::Sit
        } else if self.prompt_left() > 0 {
            Work::Prompt {
                remaining: self.prompt_left(),
            }
        } else {
            Work::Decode
        };
        Candidate {
            work,
            last_turn: self.last_turn.unwrap_or(0),
        }
    }

    /// Prepares for `tokens` tokens in a step. `turn` counts shares of steps.
    pub(super) fn begin_step(
        &mut self,
        tokens: usize,
        turn: u64,
        around: Surroundings<'_>,
        pool: &mut PagePool,
    ) {
        if self.last_turn.is_none() {
            let waited = around.now.saturating_duration_since(self.arrived);
            around.metrics.queue_seconds.observe(waited.as_secs_f64());
        }
        self.last_turn = Some(turn);
        let grown = self.table.grow((self.computed + tokens) as u32, pool);
        assert!(
            grown.is_ok() && self.table.pages().len() <= self.promised_pages as usize,
            "{grown:?} at {} tokens of a sequence that was promised {} pages",
            self.computed + tokens,
            self.promised_pages
        );
    }

    /// Its part of a step's batch.
    pub(super) fn run(&self, tokens: usize) -> Run<'_> {
        let left = self.prompt_left();
        Run {
            tokens: if left > 0 {
                &self.request.prompt[self.computed..self.computed + tokens]
            } else {
                std::slice::from_ref(&self.next)
            },
            position: self.computed as u32,
            pages: self.table.pages(),
            slot: self.slot,
            wants_logits: tokens >= left,
        }
    }

    /// A step has computed `tokens` tokens. `row` has the logits if the run wanted them. Returns the last event when
    /// nothing more is to be computed.
    pub(super) fn advance(
        &mut self,
        tokens: usize,
        row: Option<&[f32]>,
        around: Surroundings<'_>,
        scratch: &mut Scratch,
    ) -> Option<Event> {
        let was_prompt = self.prompt_left() > 0;
        self.computed += tokens;
        if was_prompt {
            around.metrics.prompt_tokens_total.inc_by(tokens as u64);
            // Progress may be lost, so it must not take the place of what may not.
            if self.request.events.capacity() > 1 {
                let computed = self.computed;
                let _ = self.request.events.try_send(Event::Prompt { computed });
            }
        }
        match self.choose(row?, scratch) {
            Ok(token) => self.accept(token, around),
            Err(error) => {
                tracing::error!(%error, position = self.computed, "choose a token");
                Some(Event::Failed(Failure::NotNumbers))
            }
        }
    }

    fn choose(
        &mut self,
        row: &[f32],
        scratch: &mut Scratch,
    ) -> Result<GeneratedToken, SampleError> {
        let id = self.sampler.sample(row, scratch)?;
        let mut token = GeneratedToken {
            id,
            logprob: None,
            top: Vec::new(),
        };
        if let Some(top) = self.request.top_logprobs {
            let found = log_probabilities(row, id, top, scratch)?;
            token.logprob = Some(found.chosen);
            token.top = found.top;
        }
        Ok(token)
    }

    /// Queues the token for the client; returns the last event when there will be no other token.
    fn accept(&mut self, token: GeneratedToken, around: Surroundings<'_>) -> Option<Event> {
        let Surroundings {
            now,
            settings,
            metrics,
        } = around;
        metrics.generated_tokens_total.inc();
        let (since, histogram) = match self.last_token {
            None => (self.arrived, &metrics.time_to_first_token_seconds),
            Some(last) => (last, &metrics.time_per_output_token_seconds),
        };
        histogram.observe(now.saturating_duration_since(since).as_secs_f64());
        self.last_token = Some(now);
        self.generated += 1;
        self.next = token.id;
        if settings.end_of_generation.contains(&token.id) {
            return Some(Event::Finished(FinishReason::Stop));
        }
        self.pending.push_back(Event::Token(token));
        let length = self.request.prompt.len() + self.generated;
        let full = self.generated >= self.request.max_tokens || length >= settings.context as usize;
        full.then_some(Event::Finished(FinishReason::Length))
    }

    /// Nothing more will be computed: the pages go back now, the client hears `last` when it has taken the rest.
    pub(super) fn end(&mut self, last: Event, pool: &mut PagePool) {
        self.pending.push_back(last);
        self.ending = true;
        self.release(pool);
    }

    pub(super) fn release(&mut self, pool: &mut PagePool) {
        self.table.release(pool);
    }

    /// Hands over what is pending, as far as there is room.
    pub(super) fn deliver(&mut self, now: Instant, timeout: Duration) -> Delivery {
        if self.is_closed() {
            return Delivery::Closed;
        }
        while let Some(event) = self.pending.pop_front() {
            let refused = match event {
                Event::Finished(_) | Event::Failed(_) => {
                    match self.request.events.clone().try_reserve_owned() {
                        Ok(permit) => return Delivery::Goodbye(permit, event),
                        Err(TrySendError::Full(_)) => Some(event),
                        Err(TrySendError::Closed(_)) => return Delivery::Closed,
                    }
                }
                Event::Token(_) | Event::Prompt { .. } => {
                    match self.request.events.try_send(event) {
                        Ok(()) => None,
                        Err(TrySendError::Full(event)) => Some(event),
                        Err(TrySendError::Closed(_)) => return Delivery::Closed,
                    }
                }
            };
            let Some(event) = refused else {
                self.unpark(now);
                continue;
            };
            self.pending.push_front(event);
            let since = *self.parked.get_or_insert(now);
            return if now.saturating_duration_since(since) >= timeout {
                Delivery::Stalled
            } else {
                Delivery::Parked
            };
        }
        Delivery::UpToDate
    }

    /// The time that a client took is not the time of a token.
    fn unpark(&mut self, now: Instant) {
        if self.parked.take().is_some() {
            self.last_token = self.last_token.map(|_| now);
        }
    }

    /// The channel, when the sequence is given up.
    pub(super) fn into_events(self) -> Sender<Event> {
        self.request.events
    }
}
