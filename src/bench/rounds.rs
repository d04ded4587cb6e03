//! The steps of a bench: the batches that a server's engine would make, and the greedy choice of the next tokens. And what
//! counts of several figures.

use super::Workload;
use crate::kv_cache::PageId;
use crate::model::{Batch, Model, Run, StepError};
use crate::placement::{PAGE_TOKENS, WindowPages};
use crate::sampler::{SampleError, Sampler, SamplingParameters, Scratch};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant};

/// Why a round ended early.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BenchError {
    #[error("compute a step: {0}")]
    Step(#[from] StepError),
    #[error("choose a token: {0}")]
    Sample(#[from] SampleError),
}

/// Rounds of one workload over one model.
pub struct Rounds<'a> {
    model: &'a mut dyn Model,
    workload: Workload,
    /// The most tokens of a prompt in one step.
    step_width: usize,
    /// Of each sequence.
    pages: Vec<Vec<PageId>>,
    /// Of each sequence: what fills the cache up to the depth.
    history: Vec<Vec<u32>>,
    /// Of each sequence: the prompt, or the token that a round begins with.
    first: Vec<Vec<u32>>,
    /// A round writes over some of the history that the next one sees.
    writes_over_history: bool,
    /// Not before the cache is filled, nor after a round that wrote over some of it.
    history_is_whole: bool,
    sampler: Sampler,
    scratch: Scratch,
}

impl<'a> Rounds<'a> {
    /// Rounds over pages `0..sequences * pages`, which belong to them alone. Tokens are pseudo-random; the same seed
    /// gives the same.
    ///
    /// # Panics
    /// When the step width is 0, or less than the sequences that decode.
    pub fn new(
        model: &'a mut dyn Model,
        workload: Workload,
        step_width: u32,
        seed: u64,
    ) -> Rounds<'a> {
        let sequences = workload.sequences();
        assert!(
            step_width > 0 && sequences <= step_width,
            "{sequences} sequences in steps of {step_width} tokens"
        );
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let vocabulary = model.vocabulary_size() as u32;
        let mut tokens = |count: u32| -> Vec<Vec<u32>> {
            let mut of_sequence = || {
                (0..count)
                    .map(|_| random.random_range(0..vocabulary))
                    .collect()
            };
            (0..sequences).map(|_| of_sequence()).collect()
        };
        let history = tokens(workload.depth());
        let first = tokens(match workload {
            Workload::Decode { .. } => 1,
            Workload::Prompt { tokens } => tokens,
        });
        let pages = workload.pages();
        let of_sequence = |sequence| (sequence * pages..(sequence + 1) * pages).map(PageId);
        Rounds {
            model,
            workload,
            step_width: step_width as usize,
            pages: (0..sequences)
                .map(|sequence| of_sequence(sequence).collect())
                .collect(),
            history,
            first,
            writes_over_history: false,
            history_is_whole: false,
            sampler: Sampler::new(&SamplingParameters::greedy()),
            scratch: Scratch::default(),
        }
    }

    /// Of a model with layers that see the last `window` positions and keep them in `pages`.
    pub fn with_window(mut self, window: u32, pages: WindowPages) -> Rounds<'a> {
        self.writes_over_history = self.workload.writes_over_history(window, pages);
        self
    }

    /// Fills the cache up to the depth: before the first round, and again where the last one wrote over what the next one
    /// sees. All of the history then, for what a layer keeps of a position follows from what the layers before it saw.
    ///
    /// # Errors
    /// A step failed.
    pub fn fill_cache(&mut self) -> Result<(), BenchError> {
        if self.history_is_whole {
            return Ok(());
        }
        for (tokens, pages) in self.history.iter().zip(&self.pages) {
            for (chunk, position) in chunks(tokens, self.step_width) {
                step(self.model, vec![run(chunk, position, pages, false)])?;
            }
        }
        self.history_is_whole = true;
        Ok(())
    }

    /// One round and how long it took, after `fill_cache`, whose time does not count. Every round computes the same.
    ///
    /// # Errors
    /// A step failed, or gave logits from which no token can be chosen.
    pub fn round(&mut self) -> Result<Duration, BenchError> {
        self.fill_cache()?;
        self.history_is_whole = !self.writes_over_history;
        let started = Instant::now();
        match self.workload {
            Workload::Decode { tokens, depth, .. } => self.decode(tokens, depth)?,
            Workload::Prompt { .. } => self.prompt()?,
        }
        Ok(started.elapsed())
    }

    fn decode(&mut self, tokens: u32, depth: u32) -> Result<(), BenchError> {
        let mut current = self.first.concat();
        for position in depth..depth + tokens {
            let runs = current
                .iter()
                .zip(&self.pages)
                .map(|(token, pages)| run(std::slice::from_ref(token), position, pages, true))
                .collect();
            let rows = step(self.model, runs)?;
            for (token, row) in current.iter_mut().zip(&rows) {
                *token = self.sampler.sample(row, &mut self.scratch)?;
            }
        }
        Ok(())
    }

    fn prompt(&mut self) -> Result<(), BenchError> {
        for (tokens, pages) in self.first.iter().zip(&self.pages) {
            for (chunk, position) in chunks(tokens, self.step_width) {
                let last = position as usize + chunk.len() == tokens.len();
                for row in step(self.model, vec![run(chunk, position, pages, last)])? {
                    self.sampler.sample(&row, &mut self.scratch)?;
                }
            }
        }
        Ok(())
    }
}

/// Pieces of at most `width` tokens, each with its position.
fn chunks(tokens: &[u32], width: usize) -> impl Iterator<Item = (&[u32], u32)> {
    tokens
        .chunks(width)
        .enumerate()
        .map(move |(index, chunk)| (chunk, (index * width) as u32))
}

/// A run of a sequence that has these pages, each as many.
fn run<'a>(tokens: &'a [u32], position: u32, pages: &'a [PageId], wants_logits: bool) -> Run<'a> {
    let end = position + tokens.len() as u32;
    Run {
        tokens,
        position,
        pages: &pages[..end.div_ceil(PAGE_TOKENS) as usize],
        // Sequences have their pages one after another.
        slot: pages
            .first()
            .map_or(0, |first| first.0 / pages.len() as u32),
        wants_logits,
    }
}

fn step(model: &mut dyn Model, runs: Vec<Run<'_>>) -> Result<Vec<Vec<f32>>, StepError> {
    model.forward(&Batch { runs }, &|| false)
}

/// The middle of some rates, the mean of the two middle ones of an even number; 0 of none.
pub fn median(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// What took so many times what is usual had lost its processor to something else.
const INTERRUPTED: f64 = 4.0;

/// What a step of many such parts takes of each: the mean, for a machine is faster and slower by turns; but for parts that
/// were interrupted, of which a few would stand for more than their time.
pub(super) fn usual_seconds(samples: &[f64]) -> f64 {
    let most = INTERRUPTED * median(samples);
    let usual: Vec<f64> = samples
        .iter()
        .copied()
        .filter(|seconds| *seconds <= most)
        .collect();
    usual.iter().sum::<f64>() / usual.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCABULARY: usize = 50;

    /// What a run was asked for.
    #[derive(Clone, Debug, PartialEq)]
    struct Asked {
        tokens: Vec<u32>,
        position: u32,
        pages: Vec<u32>,
        wants_logits: bool,
    }

    /// Remembers its batches; the successor of a token is the next number.
    #[derive(Default)]
    struct Recorder {
        batches: Vec<Vec<Asked>>,
        not_a_number: bool,
    }

    impl Model for Recorder {
        fn vocabulary_size(&self) -> usize {
            VOCABULARY
        }

        fn forward(
            &mut self,
            batch: &Batch<'_>,
            _cancelled: &dyn Fn() -> bool,
        ) -> Result<Vec<Vec<f32>>, StepError> {
            let asked = |run: &Run<'_>| Asked {
                tokens: run.tokens.to_vec(),
                position: run.position,
                pages: run.pages.iter().map(|page| page.0).collect(),
                wants_logits: run.wants_logits,
            };
            self.batches.push(batch.runs.iter().map(asked).collect());
            let wanted = batch.runs.iter().filter(|run| run.wants_logits);
            let row = |run: &Run<'_>| {
                let last = run.tokens[run.tokens.len() - 1] as usize;
                let mut row = vec![0.0; VOCABULARY];
                row[(last + 1) % VOCABULARY] = if self.not_a_number { f32::NAN } else { 1.0 };
                row
            };
            Ok(wanted.map(row).collect())
        }
    }

    fn batches(workload: Workload, step_width: u32, seed: u64) -> Vec<Vec<Asked>> {
        let mut model = Recorder::default();
        let mut rounds = Rounds::new(&mut model, workload, step_width, seed);
        rounds.fill_cache().unwrap();
        rounds.round().unwrap();
        model.batches
    }

    #[test]
    fn decoding_goes_on_from_the_depth_with_every_sequence_in_each_step() {
        let workload = Workload::Decode {
            sequences: 2,
            tokens: 3,
            depth: 40,
        };
        let batches = batches(workload, 32, 7);
        // The cache first: each sequence in chunks of the width, without logits.
        let filled: Vec<(u32, usize)> = batches[..4]
            .iter()
            .map(|runs| (runs[0].position, runs[0].tokens.len()))
            .collect();
        assert_eq!(filled, [(0, 32), (32, 8), (0, 32), (32, 8)]);
        assert!(batches[..4].iter().all(|runs| !runs[0].wants_logits));
        assert_eq!(batches[1][0].pages, [0, 1]);
        assert_eq!(batches[3][0].pages, [2, 3]);
        let steps = &batches[4..];
        assert_eq!(steps.len(), 3);
        for (index, runs) in steps.iter().enumerate() {
            assert_eq!(runs.len(), 2);
            for (sequence, asked) in runs.iter().enumerate() {
                assert_eq!(asked.position, 40 + index as u32);
                assert_eq!(asked.pages, [2 * sequence as u32, 2 * sequence as u32 + 1]);
                assert!(asked.wants_logits);
                // Greedy: the successor of the token before.
                let first = steps[0][sequence].tokens[0];
                let expected = (first + index as u32) % VOCABULARY as u32;
                assert_eq!(asked.tokens, [expected]);
            }
        }
    }

    #[test]
    fn a_prompt_is_cut_at_the_width_and_only_its_end_gives_logits() {
        let prompt = Workload::Prompt { tokens: 70 };
        let batches = batches(prompt, 32, 7);
        let asked: Vec<(u32, usize, usize, bool)> = batches
            .iter()
            .map(|runs| &runs[0])
            .map(|run| {
                let pages = run.pages.len();
                (run.position, run.tokens.len(), pages, run.wants_logits)
            })
            .collect();
        let expected = [(0, 32, 1, false), (32, 32, 2, false), (64, 6, 3, true)];
        assert_eq!(asked, expected);
        let tokens = batches.iter().flat_map(|runs| &runs[0].tokens);
        assert!(tokens.clone().all(|&token| (token as usize) < VOCABULARY));
        let distinct: std::collections::HashSet<&u32> = tokens.collect();
        assert!(distinct.len() > 20, "{distinct:?}");
    }

    #[test]
    fn the_seed_alone_decides() {
        let prompt = Workload::Prompt { tokens: 70 };
        assert_eq!(batches(prompt, 32, 7), batches(prompt, 32, 7));
        assert_ne!(batches(prompt, 32, 7), batches(prompt, 32, 8));
        let decode = Workload::Decode {
            sequences: 2,
            tokens: 5,
            depth: 0,
        };
        let mut model = Recorder::default();
        let mut rounds = Rounds::new(&mut model, decode, 2, 1);
        rounds.fill_cache().unwrap();
        rounds.round().unwrap();
        rounds.round().unwrap();
        assert_eq!(model.batches.len(), 10);
        assert_eq!(model.batches[..5], model.batches[5..]);
    }

    /// Keeps tokens as layers with a window keep positions; the successor of a token follows from all that it sees.
    struct Windowed {
        places: Vec<u32>,
        window: u32,
        chosen: Vec<u32>,
        steps_without_logits: usize,
    }

    impl Model for Windowed {
        fn vocabulary_size(&self) -> usize {
            VOCABULARY
        }

        fn forward(
            &mut self,
            batch: &Batch<'_>,
            _cancelled: &dyn Fn() -> bool,
        ) -> Result<Vec<Vec<f32>>, StepError> {
            let run = batch.runs[0];
            let places = self.places.len();
            for (position, &token) in (run.position as usize..).zip(run.tokens) {
                self.places[position % places] = token;
            }
            if !run.wants_logits {
                self.steps_without_logits += 1;
                return Ok(Vec::new());
            }
            let seen = (run.position + 1).saturating_sub(self.window)..=run.position;
            let sum: usize = seen
                .map(|position| position as usize)
                .map(|position| (position + 1) * self.places[position % places] as usize)
                .sum();
            let successor = sum % VOCABULARY;
            self.chosen.push(successor as u32);
            let mut row = vec![0.0; VOCABULARY];
            row[successor] = 1.0;
            Ok(vec![row])
        }
    }

    #[test]
    fn rounds_are_the_same_where_layers_with_a_window_wrote_over_the_history() {
        const PAGES: WindowPages = WindowPages {
            sequences: 1,
            pages_of_sequence: 2,
            page_bytes: 1,
        };
        // Steps of the history, eight tokens wide: five each time.
        for (tokens, of_history) in [(41, 5), (60, 15), (130, 15)] {
            let mut model = Windowed {
                places: vec![0; 64],
                window: 24,
                chosen: Vec::new(),
                steps_without_logits: 0,
            };
            let decode = Workload::Decode {
                sequences: 1,
                tokens,
                depth: 40,
            };
            let mut rounds = Rounds::new(&mut model, decode, 8, 3).with_window(24, PAGES);
            for _ in 0..3 {
                rounds.round().unwrap();
            }
            let (first, others) = model.chosen.split_at(tokens as usize);
            assert_eq!(others, [first, first].concat(), "{tokens} tokens");
            assert_eq!(model.steps_without_logits, of_history, "{tokens} tokens");
        }
    }

    #[test]
    fn logits_that_are_no_numbers_end_it() {
        let mut model = Recorder {
            not_a_number: true,
            ..Recorder::default()
        };
        let prompt = Workload::Prompt { tokens: 2 };
        let error = Rounds::new(&mut model, prompt, 32, 1).round().unwrap_err();
        assert!(error.to_string().contains("NaN"), "{error}");
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn slow_times_count_and_interruptions_do_not() {
        assert_eq!(usual_seconds(&[1.0, 1.0, 1.0, 2.0, 100.0]), 1.25);
        assert_eq!(usual_seconds(&[]), 0.0);
    }
}
