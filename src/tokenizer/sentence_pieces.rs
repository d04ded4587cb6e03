//! SentencePiece-style merging of `llama` vocabularies: neighbours become one piece, the best score first; what is
//! no piece becomes bytes. Texts reach this module with spaces as they are: pieces are kept that way too.

use super::boundaries::Boundaries;
use super::merge_queue::{Candidate, MergeQueue};
use super::vocabulary::Vocabulary;

pub(super) struct SentencePieces {
    /// One per token: the order of merging, the highest score first.
    keys: Vec<u32>,
    /// The token of each byte, for characters that are no piece.
    bytes: Box<[Option<u32>; 256]>,
    /// Stands for a byte that has no token.
    unknown: Option<u32>,
    boundaries: Boundaries,
}

#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    pub(super) queue: MergeQueue,
}

#[derive(Clone, Copy)]
struct Symbol {
    start: u32,
    /// 0 once merged into its left neighbour.
    bytes: u32,
    previous: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

/// A number that is the lower the higher the score is; the order of NaN is that of [`f32::total_cmp`].
fn key_of(score: f32) -> u32 {
    // Adding zero makes -0 and 0 equal, as they are to `<`.
    let bits = (score + 0.0).to_bits();
    let negative = bits >> 31 == 1;
    if negative { bits } else { !bits & !(1 << 31) }
}

impl SentencePieces {
    /// `scores`: one per token. `bytes`: from a byte to its token.
    pub(super) fn new(
        scores: &[f32],
        bytes: [Option<u32>; 256],
        unknown: Option<u32>,
        vocabulary: &Vocabulary,
    ) -> SentencePieces {
        SentencePieces {
            keys: scores.iter().map(|&score| key_of(score)).collect(),
            bytes: Box::new(bytes),
            unknown,
            boundaries: Boundaries::of(vocabulary.text_pieces()),
        }
    }

    /// Appends the tokens of `text`; O(n log n) for n characters.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        scratch: &mut Scratch,
        tokens: &mut Vec<u32>,
    ) {
        self.boundaries
            .split(text, |part| self.merge(vocabulary, part, scratch, tokens));
    }

    fn merge(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        scratch: &mut Scratch,
        tokens: &mut Vec<u32>,
    ) {
        scratch.symbols.clear();
        scratch.queue.clear();
        for (i, (start, character)) in text.char_indices().enumerate() {
            let i = i as u32;
            let bytes = character.len_utf8();
            scratch.symbols.push(Symbol {
                start: start as u32,
                bytes: bytes as u32,
                previous: if i == 0 { NONE } else { i - 1 },
                next: if start + bytes == text.len() {
                    NONE
                } else {
                    i + 1
                },
            });
        }
        for right in 1..scratch.symbols.len() as u32 {
            if let Some(candidate) =
                self.candidate(vocabulary, text, right - 1, right, &scratch.symbols)
            {
                scratch.queue.seed(candidate);
            }
        }
        scratch.queue.sort();
        while let Some(candidate) = scratch.queue.pop() {
            let [right_place, bytes] = candidate.pair;
            let left = scratch.symbols[candidate.left as usize];
            let right = scratch.symbols[right_place as usize];
            // Another length of both together means that one of them has changed since.
            if left.bytes == 0 || right.bytes == 0 || left.bytes + right.bytes != bytes {
                continue;
            }
            scratch.symbols[right_place as usize].bytes = 0;
            scratch.symbols[candidate.left as usize].bytes = bytes;
            scratch.symbols[candidate.left as usize].next = right.next;
            if right.next != NONE {
                scratch.symbols[right.next as usize].previous = candidate.left;
            }
            for (left, right) in [
                (candidate.left, right.next),
                (left.previous, candidate.left),
            ] {
                if left != NONE
                    && right != NONE
                    && let Some(fresh) =
                        self.candidate(vocabulary, text, left, right, &scratch.symbols)
                {
                    scratch.queue.push(fresh);
                }
            }
        }
        let mut place = if text.is_empty() { NONE } else { 0 };
        while place != NONE {
            let symbol = scratch.symbols[place as usize];
            let piece = &text.as_bytes()[symbol.start as usize..][..symbol.bytes as usize];
            match vocabulary.find(piece) {
                Some(id) => tokens.push(id),
                None => self.push_bytes(piece, tokens),
            }
            place = symbol.next;
        }
    }

    fn push_bytes(&self, piece: &[u8], tokens: &mut Vec<u32>) {
        // A vocabulary without a piece for the space spells SentencePiece's sign for it.
        let piece = if piece == b" " {
            "\u{2581}".as_bytes()
        } else {
            piece
        };
        for &byte in piece {
            tokens.extend(self.bytes[usize::from(byte)].or(self.unknown));
        }
    }

    /// Of the symbols at two places, if both together are a piece.
    fn candidate(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        left: u32,
        right: u32,
        symbols: &[Symbol],
    ) -> Option<Candidate> {
        let (a, b) = (symbols[left as usize], symbols[right as usize]);
        let bytes = a.bytes + b.bytes;
        let id = vocabulary.find(&text.as_bytes()[a.start as usize..][..bytes as usize])?;
        Some(Candidate {
            key: self.keys.get(id as usize).copied().unwrap_or(key_of(0.0)),
            left,
            pair: [right, bytes],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::{Spelling, byte_of};
    use super::*;

    fn check(pieces: &[(&str, f32)], text: &str, expected: &[&str]) {
        let texts: Vec<String> = pieces.iter().map(|p| p.0.to_string()).collect();
        let scores: Vec<f32> = pieces.iter().map(|p| p.1).collect();
        let vocabulary = Vocabulary::new(&texts, None, Spelling::SentencePiece).unwrap();
        let mut bytes = [None; 256];
        for (id, text) in texts.iter().enumerate() {
            if let Some(byte) = byte_of(text) {
                bytes[usize::from(byte)] = Some(id as u32);
            }
        }
        let spm = SentencePieces::new(&scores, bytes, Some(0), &vocabulary);
        let mut tokens = Vec::new();
        spm.encode(&vocabulary, text, &mut Scratch::default(), &mut tokens);
        let shown: Vec<&str> = tokens.iter().map(|&t| texts[t as usize].as_str()).collect();
        assert_eq!(shown, expected, "{text:?}");
    }

    #[test]
    fn the_best_score_merges_first_then_the_leftmost() {
        let pieces = [
            ("?", 0.0),
            ("a", 0.0),
            ("b", 0.0),
            ("c", 0.0),
            ("ab", -2.0),
            ("bc", -1.0),
            ("abc", -9.0),
        ];
        check(&pieces, "abc", &["abc"]);
        check(&pieces[..6], "abc", &["a", "bc"]);
        check(&[("?", 0.0), ("a", 0.0), ("aa", -0.0)], "aaa", &["aa", "a"]);
        check(
            &[("?", 0.0), ("▁", 0.0), ("a", 0.0), ("▁a", 1.0)],
            "  a",
            &["▁", "▁a"],
        );
        check(&pieces, "", &[]);
    }

    #[test]
    fn what_is_no_piece_becomes_bytes_and_failing_that_unknown() {
        check(
            &[
                ("?", 0.0),
                ("a", 0.0),
                ("<0xF0>", 0.0),
                ("<0x9F>", 0.0),
                ("<0xA6>", 0.0),
                ("<0x99>", 0.0),
            ],
            "a🦙",
            &["a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"],
        );
        check(
            &[
                ("?", 0.0),
                ("<0xE2>", 0.0),
                ("<0x96>", 0.0),
                ("<0x81>", 0.0),
            ],
            " ",
            &["<0xE2>", "<0x96>", "<0x81>"],
        );
        check(&[("?", 0.0), ("a", 0.0)], "axa", &["a", "?", "a"]);
    }

    /// The text of a byte token is text like any other when a user writes it.
    #[test]
    fn the_text_of_a_byte_token_is_not_that_byte() {
        let mut pieces = vec![("?", 0.0), ("<0x41>", 0.0)];
        for part in ["<", "0", "x", "4", "1", ">", "<0", "<0x", "<0x4", "<0x41"] {
            pieces.push((part, 0.0));
        }
        check(&pieces, "<0x41>", &["<0x41", ">"]);
    }

    #[test]
    fn keys_have_the_order_of_the_scores_turned_round() {
        let scores = [
            f32::NAN,
            f32::INFINITY,
            3.5,
            f32::MIN_POSITIVE,
            0.0,
            -f32::MIN_POSITIVE,
            -1.0,
            f32::NEG_INFINITY,
            -f32::NAN,
        ];
        assert!(scores.is_sorted_by(|a, b| key_of(*a) < key_of(*b)));
        assert_eq!(key_of(0.0), key_of(-0.0));
    }

    #[test]
    fn a_long_run_takes_linear_work() {
        let pieces: Vec<String> = (0..10).map(|n| "a".repeat(1 << n)).collect();
        let vocabulary = Vocabulary::new(&pieces, None, Spelling::SentencePiece).unwrap();
        let spm = SentencePieces::new(&[f32::NAN; 10], [None; 256], None, &vocabulary);
        let text = "a".repeat(3 << 20);
        let (mut scratch, mut tokens) = (Scratch::default(), Vec::new());
        spm.encode(&vocabulary, &text, &mut scratch, &mut tokens);
        let printed: usize = tokens.iter().map(|&t| vocabulary.piece(t).len()).sum();
        assert_eq!(printed, text.len());
        let pushes = scratch.queue.pushes;
        assert!(pushes <= 3 * text.len() as u64, "{pushes} pushes");
    }
}
