//! A model whose logits are a hash of the whole sequence, read back from the pages that the engine named. A wrong
//! page, a skipped position, a page of somebody else: all of them change the tokens.

use super::PAGE_TOKENS;
use crate::kv_cache::PageId;
use crate::model::{Batch, Model, StepError};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

pub(super) const VOCABULARY: usize = 50;
/// A sequence that begins with this token gets logits that are not numbers.
pub(super) const SPOILT: u32 = VOCABULARY as u32 - 1;

/// One run of a step: `(position, tokens, wants_logits)`.
pub(super) type Seen = (u32, usize, bool);

type OnStep = Box<dyn FnMut(&dyn Fn() -> bool) -> Result<(), StepError> + Send>;

/// The test's hand on the model.
#[derive(Clone, Default)]
pub(super) struct Control(Arc<Mutex<Script>>);

#[derive(Default)]
pub(super) struct Script {
    /// Every step so far.
    pub(super) steps: Vec<Vec<Seen>>,
    /// Runs in each step from now on; its error is the step's, its panic the model's.
    pub(super) on_step: Option<OnStep>,
}

impl Control {
    pub(super) fn model(&self) -> Box<dyn Model> {
        Box::new(Scripted {
            control: self.clone(),
            stored: HashMap::new(),
            of_slot: HashMap::new(),
        })
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }

    pub(super) fn on_step(
        &self,
        hook: impl FnMut(&dyn Fn() -> bool) -> Result<(), StepError> + Send + 'static,
    ) {
        self.script().on_step = Some(Box::new(hook));
    }
}

struct Scripted {
    control: Control,
    /// The token at each place of each page.
    stored: HashMap<(PageId, u32), u32>,
    /// The tokens of the sequence that has a slot.
    of_slot: HashMap<u32, Vec<u32>>,
}

fn hash(state: u64, value: u64) -> u64 {
    let mixed = (state ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (mixed >> 32)
}

/// The logits of the token after `history`.
pub(super) fn logits_after(history: &[u32]) -> Vec<f32> {
    let seed = history
        .iter()
        .fold(1, |state, token| hash(state, u64::from(*token)));
    (0..VOCABULARY as u64)
        .map(|id| (hash(seed, id) >> 40) as f32 / (1 << 24) as f32 * 6.0)
        .collect()
}

impl Model for Scripted {
    fn vocabulary_size(&self) -> usize {
        VOCABULARY
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let seen = batch
            .runs
            .iter()
            .map(|run| (run.position, run.tokens.len(), run.wants_logits))
            .collect();
        let hook = {
            let mut script = self.control.script();
            script.steps.push(seen);
            script.on_step.take()
        };
        if let Some(mut hook) = hook {
            // Not under the lock: it may panic, and the test goes on looking.
            let outcome = hook(cancelled);
            self.control.script().on_step.get_or_insert(hook);
            outcome?;
        }
        let mut taken = HashSet::new();
        let mut rows = Vec::new();
        for run in &batch.runs {
            assert!(!run.tokens.is_empty(), "an empty run");
            let end = run.position + run.tokens.len() as u32;
            assert_eq!(
                run.pages.len() as u32,
                end.div_ceil(PAGE_TOKENS),
                "pages for {end} tokens"
            );
            for page in run.pages {
                assert!(taken.insert(*page), "{page:?} stands in two places");
            }
            let place = |position: u32| {
                (
                    run.pages[(position / PAGE_TOKENS) as usize],
                    position % PAGE_TOKENS,
                )
            };
            // A sequence keeps its slot from its first token on, and nobody else comes there meanwhile.
            let of_slot = self.of_slot.entry(run.slot).or_default();
            of_slot.truncate(if run.position == 0 { 0 } else { usize::MAX });
            assert_eq!(of_slot.len(), run.position as usize, "slot {}", run.slot);
            of_slot.extend_from_slice(run.tokens);
            for (position, token) in (run.position..).zip(run.tokens) {
                self.stored.insert(place(position), *token);
            }
            if run.wants_logits {
                let history: Vec<u32> = (0..end).map(|at| self.stored[&place(at)]).collect();
                assert_eq!(history, *of_slot, "slot {}", run.slot);
                rows.push(if history[0] == SPOILT {
                    vec![f32::NAN; VOCABULARY]
                } else {
                    logits_after(&history)
                });
            }
        }
        Ok(rows)
    }
}
