//! One sequence as a client sees it: the engine's tokens become text, end at stop strings, and are counted.

use crate::engine::{Event, Failure, FinishReason, GeneratedToken};
use crate::tokenizer::{Ended, SequenceText};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Events that wait for a client that reads slowly; then the engine parks the sequence.
pub(super) const EVENTS_MAX: usize = 256;

/// What came of a sequence.
#[derive(Debug, PartialEq)]
pub(super) enum Update {
    Delta(Delta),
    /// Nothing follows.
    Failed(Failure),
    /// The engine has left without a last event; nothing follows.
    GivenUp,
}

/// Text that may be sent, and the tokens that it and the text before it came from.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Delta {
    pub(super) text: String,
    /// Only where log-probabilities are wanted.
    pub(super) tokens: Vec<GeneratedToken>,
    /// Set in the last delta of the sequence.
    pub(super) finish: Option<FinishReason>,
}

/// Drop it to cancel the sequence in the engine.
pub(super) struct Sequence {
    events: mpsc::Receiver<Event>,
    text: SequenceText,
    wants_tokens: bool,
    /// Tokens whose text is not complete, or may still become a stop string.
    held: Vec<GeneratedToken>,
    completion_tokens: usize,
    ended: bool,
}

impl Sequence {
    pub(super) fn new(
        events: mpsc::Receiver<Event>,
        text: SequenceText,
        wants_tokens: bool,
    ) -> Sequence {
        Sequence {
            events,
            text,
            wants_tokens,
            held: Vec::new(),
            completion_tokens: 0,
            ended: false,
        }
    }

    /// Tokens generated so far. An end token counts, as it took a step; so do the tokens of a stop string.
    pub(super) fn completion_tokens(&self) -> usize {
        self.completion_tokens
    }

    /// The next update that says something; `None` after the last.
    pub(super) fn poll_update(&mut self, context: &mut Context<'_>) -> Poll<Option<Update>> {
        while !self.ended {
            let event = std::task::ready!(self.events.poll_recv(context));
            let update = match event {
                Some(Event::Prompt { .. }) => continue,
                Some(Event::Token(token)) => self.take(token),
                Some(Event::Finished(reason)) => {
                    self.completion_tokens += usize::from(reason == FinishReason::Stop);
                    Some(self.end(reason))
                }
                Some(Event::Failed(failure)) => {
                    self.close();
                    Some(Update::Failed(failure))
                }
                None => {
                    self.close();
                    Some(Update::GivenUp)
                }
            };
            if update.is_some() {
                return Poll::Ready(update);
            }
        }
        Poll::Ready(None)
    }

    fn take(&mut self, token: GeneratedToken) -> Option<Update> {
        self.completion_tokens += 1;
        let piece = self.text.push(token.id);
        let at_token = piece.ended == Some(Ended::AtToken);
        if self.wants_tokens && !at_token {
            self.held.push(token);
        }
        let finish = piece.ended.map(|_| {
            self.close();
            FinishReason::Stop
        });
        if piece.text.is_empty() && finish.is_none() {
            return None;
        }
        let tokens = if piece.text.is_empty() && !at_token {
            Vec::new()
        } else {
            std::mem::take(&mut self.held)
        };
        Some(Update::Delta(Delta {
            text: piece.text,
            tokens,
            finish,
        }))
    }

    /// The model ended.
    fn end(&mut self, reason: FinishReason) -> Update {
        self.close();
        let piece = self.text.finish();
        Update::Delta(Delta {
            text: piece.text,
            tokens: std::mem::take(&mut self.held),
            finish: Some(piece.ended.map_or(reason, |_| FinishReason::Stop)),
        })
    }

    /// From here on the engine's sends fail, which ends the sequence there within a step.
    fn close(&mut self) {
        self.ended = true;
        self.events.close();
    }
}
