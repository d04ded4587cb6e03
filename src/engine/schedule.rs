//! Who computes what in the next step. Pure.

/// What a sequence could do in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// So many tokens of the prompt are left.
    Prompt { remaining: usize },
    /// The last token goes in, the next comes out.
    Decode,
    /// Nothing: its client is behind, or it only waits to say goodbye.
    Sit,
}

/// One sequence, as the scheduler sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) work: Work,
    /// The number of its last turn; 0 before the first. Turns are counted one by one, in the order of the shares, so
    /// that no two sequences have the same and the order of turns is a ring.
    pub(super) last_turn: u64,
}

/// `tokens` tokens of the step belong to the candidate at `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) index: usize,
    pub(super) tokens: usize,
}

/// Shares out a step of at most `width` tokens among `candidates`, which stand in order of admission.
///
/// Every decoding sequence gets one token; prompts get the rest, first come first served, so that a long prompt is
/// cut into chunks and holds up nobody who is talking already. When the decoding sequences and one prompt token are
/// more than the width, those who had their last turn longest ago go first, the oldest prompt among them: nobody
/// starves, and nobody sits out twice before all others have.
pub(super) fn schedule(candidates: &[Candidate], width: usize) -> Vec<Share> {
    let indices = |wanted: fn(&Work) -> bool| {
        let all = candidates.iter().enumerate();
        all.filter(move |(_, c)| wanted(&c.work)).map(|(i, _)| i)
    };
    let mut contenders: Vec<usize> = indices(|work| *work == Work::Decode).collect();
    let decoding = contenders.len();
    contenders.extend(indices(|work| matches!(work, Work::Prompt { .. })).take(1));
    if contenders.len() > width {
        contenders.sort_by_key(|&index| (candidates[index].last_turn, index));
        contenders.truncate(width);
        return contenders
            .into_iter()
            .map(|index| Share { index, tokens: 1 })
            .collect();
    }
    let mut free = width - decoding;
    let mut shares = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        let tokens = match candidate.work {
            Work::Decode => 1,
            Work::Prompt { remaining } => {
                let chunk = remaining.min(free);
                free -= chunk;
                chunk
            }
            Work::Sit => 0,
        };
        if tokens > 0 {
            shares.push(Share { index, tokens });
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: Work = Work::Decode;
    const S: Work = Work::Sit;

    fn p(remaining: usize) -> Work {
        Work::Prompt { remaining }
    }

    fn check(work: &[Work], width: usize, expected: &[(usize, usize)]) {
        let candidates: Vec<Candidate> = work
            .iter()
            .map(|&work| Candidate { work, last_turn: 0 })
            .collect();
        let shares: Vec<(usize, usize)> = schedule(&candidates, width)
            .iter()
            .map(|share| (share.index, share.tokens))
            .collect();
        assert_eq!(shares, expected, "{work:?} in a step of {width}");
    }

    #[test]
    fn decoding_comes_first_and_prompts_fill_the_rest_in_order() {
        check(&[], 8, &[]);
        check(&[S, S], 8, &[]);
        check(&[D, D, D], 8, &[(0, 1), (1, 1), (2, 1)]);
        check(&[p(100)], 8, &[(0, 8)]);
        check(&[p(100), D], 8, &[(0, 7), (1, 1)]);
        check(&[p(3), p(100), D], 8, &[(0, 3), (1, 4), (2, 1)]);
        check(&[p(7), p(100), D], 8, &[(0, 7), (2, 1)]);
        check(&[p(2), S, p(2), S, p(2)], 8, &[(0, 2), (2, 2), (4, 2)]);
        check(&[D, D, D, p(9)], 4, &[(0, 1), (1, 1), (2, 1), (3, 1)]);
    }

    #[test]
    fn more_sequences_than_width_take_turns() {
        for (work, width) in [
            (vec![D; 7], 3),
            (vec![D; 5], 1),
            (vec![D, D, D, p(1000)], 3),
            (vec![p(1000), D], 1),
            (vec![D, S, D, p(1000), p(1000)], 2),
        ] {
            let mut candidates: Vec<Candidate> = work
                .iter()
                .map(|&work| Candidate { work, last_turn: 0 })
                .collect();
            let mut turns_of = vec![0_i64; work.len()];
            let mut turns = 0;
            for _ in 0..60 {
                let shares = schedule(&candidates, width);
                assert_eq!(shares.len(), width, "a step is left with room");
                for share in shares {
                    assert_eq!(share.tokens, 1);
                    turns += 1;
                    candidates[share.index].last_turn = turns;
                    turns_of[share.index] += 1;
                }
            }
            // Everybody but those who sit and the second prompt, which is behind the first.
            let firsts: Vec<i64> = turns_of.iter().copied().filter(|n| *n > 0).collect();
            let (least, most) = (firsts.iter().min(), firsts.iter().max());
            assert!(
                most.unwrap() - least.unwrap() <= 1,
                "{turns_of:?} turns of {work:?}"
            );
            let active = work.iter().filter(|w| **w == D).count() + 1;
            assert!(firsts.len() == active.min(work.len()), "{turns_of:?}");
        }
    }
}
