//! What a round computes, and how many bytes of weights its steps read.

use crate::gguf::Gguf;
use crate::placement::{GroupKind, PAGE_TOKENS, Plan, WindowPages};

/// What one round of a bench computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// `tokens` steps, in each of which every one of `sequences` sequences gets one more token. All of them begin
    /// with `depth` positions in the cache.
    Decode {
        sequences: u32,
        tokens: u32,
        depth: u32,
    },
    /// One prompt of `tokens` tokens, in chunks of the plan's step width, and the logits of its last token.
    Prompt { tokens: u32 },
}

impl Workload {
    /// As in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Workload::Decode { .. } => "decode",
            Workload::Prompt { .. } => "prompt",
        }
    }

    pub const fn sequences(self) -> u32 {
        match self {
            Workload::Decode { sequences, .. } => sequences,
            Workload::Prompt { .. } => 1,
        }
    }

    /// Of each sequence in a round.
    pub const fn tokens(self) -> u32 {
        match self {
            Workload::Decode { tokens, .. } | Workload::Prompt { tokens } => tokens,
        }
    }

    /// Positions that are in the cache when a round begins.
    pub const fn depth(self) -> u32 {
        match self {
            Workload::Decode { depth, .. } => depth,
            Workload::Prompt { .. } => 0,
        }
    }

    /// Positions of each sequence when a round ends: the context that it needs.
    pub const fn positions(self) -> u32 {
        self.depth().saturating_add(self.tokens())
    }

    /// Pages of each sequence.
    pub const fn pages(self) -> u32 {
        self.positions().div_ceil(PAGE_TOKENS)
    }

    /// Whether a round writes over positions that the next one sees, in layers that see the last `window` of them and
    /// keep them in `pages`.
    pub fn writes_over_history(self, window: u32, pages: WindowPages) -> bool {
        // Positions so far apart have one place.
        let places = u64::from(pages.pages_of_sequence) * u64::from(PAGE_TOKENS);
        let first_seen = u64::from((self.depth() + 1).saturating_sub(window));
        let end = u64::from(self.positions());
        self.depth() > 0 && end > first_seen + places
    }

    /// Steps of a round.
    pub const fn steps(self, step_width: u32) -> u32 {
        match self {
            Workload::Decode { tokens, .. } => tokens,
            Workload::Prompt { tokens } => tokens.div_ceil(step_width),
        }
    }
}

/// Bytes of weights that a step reads, whatever tier they rest on. Norms and biases, some KiB, are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBytes {
    /// All matrices of the layers.
    pub layers: u64,
    /// The head, read where a step gives logits.
    pub head: u64,
    /// One row of the token embedding, read for each token.
    pub embedding_row: u64,
}

impl StepBytes {
    pub fn of(gguf: &Gguf, plan: &Plan) -> StepBytes {
        let of_kinds = |kinds: &[GroupKind]| {
            let groups = plan.groups.iter();
            groups
                .filter(|group| kinds.contains(&group.kind))
                .map(|group| group.weight_bytes)
                .sum()
        };
        StepBytes {
            layers: of_kinds(&[GroupKind::Attention, GroupKind::FeedForward]),
            head: of_kinds(&[GroupKind::Head]),
            embedding_row: gguf
                .tensor("token_embd.weight")
                .map_or(0, |(_, tensor)| tensor.row_bytes()),
        }
    }

    /// Bytes of all steps of a round.
    pub fn of_round(self, workload: Workload, step_width: u32) -> u64 {
        let steps = u64::from(workload.steps(step_width));
        let rows = u64::from(workload.sequences()) * u64::from(workload.tokens());
        let heads = match workload {
            Workload::Decode { .. } => steps,
            // The chunks before the last give no logits.
            Workload::Prompt { .. } => 1,
        };
        steps * self.layers + heads * self.head + rows * self.embedding_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_reads_the_layers_in_each_step_and_the_head_where_logits_are_wanted() {
        let bytes = StepBytes {
            layers: 1_000_000,
            head: 10_000,
            embedding_row: 1,
        };
        let check = |workload: Workload, steps, expected| {
            assert_eq!(workload.steps(64), steps, "{workload:?}");
            assert_eq!(bytes.of_round(workload, 64), expected, "{workload:?}");
        };
        let decode = |sequences, tokens| Workload::Decode {
            sequences,
            tokens,
            depth: 100,
        };
        check(decode(1, 1), 1, 1_010_001);
        check(decode(3, 5), 5, 5_050_015);
        check(Workload::Prompt { tokens: 64 }, 1, 1_010_064);
        check(Workload::Prompt { tokens: 65 }, 2, 2_010_065);
    }

    #[test]
    fn history_is_written_over_where_a_round_wraps_into_what_it_saw_at_first() {
        let check = |depth, tokens, expected: bool| {
            let decode = Workload::Decode {
                sequences: 1,
                tokens,
                depth,
            };
            let pages = WindowPages {
                sequences: 1,
                pages_of_sequence: 2,
                page_bytes: 1,
            };
            let is_lost = decode.writes_over_history(24, pages);
            assert_eq!(is_lost, expected, "{decode:?}");
        };
        // The first token sees positions 17 to 40; 17 has the place of 81.
        check(40, 41, false);
        check(40, 42, true);
        // All of a short history.
        check(3, 61, false);
        check(3, 62, true);
        // There is none.
        check(0, 500, false);
    }

    #[test]
    fn pages_cover_the_depth_and_the_tokens() {
        let pages = |depth, tokens| {
            let sequences = 1;
            Workload::Decode {
                sequences,
                tokens,
                depth,
            }
            .pages()
        };
        assert_eq!((pages(0, 1), pages(0, 32), pages(1, 32)), (1, 1, 2));
        assert_eq!(Workload::Prompt { tokens: 33 }.pages(), 2);
    }
}
