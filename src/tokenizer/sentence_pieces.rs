//! SentencePiece-style merging of `llama` vocabularies: neighbours become one piece, the best score first; what is
//! no piece becomes bytes. Texts reach this module with spaces as they are: pieces are kept that way too.

use super::vocabulary::Vocabulary;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

pub(super) struct SentencePieces {
    /// One per token; higher merges first.
    scores: Vec<f32>,
    /// The token of each byte, for characters that are no piece.
    bytes: Box<[Option<u32>; 256]>,
    /// Stands for a byte that has no token.
    unknown: Option<u32>,
}

#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Candidate>,
    /// Pushes to the queue so far: the work, which tests hold against a bound.
    pub(super) pushes: u64,
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

#[derive(Clone, Copy)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    /// Of both together: another sum means that one of them has changed since.
    bytes: u32,
}

impl Ord for Candidate {
    /// The best candidate is the greatest: highest score, then leftmost.
    fn cmp(&self, other: &Candidate) -> Ordering {
        self.score
            .total_cmp(&other.score)
            .then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl SentencePieces {
    /// `scores`: one per token. `bytes`: from a byte to its token.
    pub(super) fn new(
        scores: Vec<f32>,
        bytes: [Option<u32>; 256],
        unknown: Option<u32>,
    ) -> SentencePieces {
        // Adding zero makes -0 and 0 equal, as they are to `<`.
        let scores = scores.into_iter().map(|score| score + 0.0).collect();
        SentencePieces {
            scores,
            bytes: Box::new(bytes),
            unknown,
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
            self.consider(vocabulary, text, right - 1, right, scratch);
        }
        while let Some(candidate) = scratch.queue.pop() {
            let left = scratch.symbols[candidate.left as usize];
            let right = scratch.symbols[candidate.right as usize];
            if left.bytes == 0 || right.bytes == 0 || left.bytes + right.bytes != candidate.bytes {
                continue;
            }
            scratch.symbols[candidate.right as usize].bytes = 0;
            scratch.symbols[candidate.left as usize].bytes = candidate.bytes;
            scratch.symbols[candidate.left as usize].next = right.next;
            if right.next != NONE {
                scratch.symbols[right.next as usize].previous = candidate.left;
                self.consider(vocabulary, text, candidate.left, right.next, scratch);
            }
            if left.previous != NONE {
                self.consider(vocabulary, text, left.previous, candidate.left, scratch);
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

    fn consider(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        left: u32,
        right: u32,
        scratch: &mut Scratch,
    ) {
        let (a, b) = (
            scratch.symbols[left as usize],
            scratch.symbols[right as usize],
        );
        let bytes = a.bytes + b.bytes;
        let piece = &text.as_bytes()[a.start as usize..][..bytes as usize];
        if let Some(id) = vocabulary.find(piece) {
            scratch.pushes += 1;
            scratch.queue.push(Candidate {
                score: self.scores.get(id as usize).copied().unwrap_or(0.0),
                left,
                right,
                bytes,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::{Spelling, byte_of};
    use super::*;

    fn check(pieces: &[(&str, f32)], text: &str, expected: &[&str]) {
        let texts: Vec<String> = pieces.iter().map(|p| p.0.to_string()).collect();
        let scores = pieces.iter().map(|p| p.1).collect();
        let vocabulary = Vocabulary::new(&texts, None, Spelling::SentencePiece).unwrap();
        let mut bytes = [None; 256];
        for (id, text) in texts.iter().enumerate() {
            if let Some(byte) = byte_of(text) {
                bytes[usize::from(byte)] = Some(id as u32);
            }
        }
        let spm = SentencePieces::new(scores, bytes, Some(0));
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
    fn a_long_run_takes_linear_work() {
        let pieces: Vec<String> = (0..10).map(|n| "a".repeat(1 << n)).collect();
        let vocabulary = Vocabulary::new(&pieces, None, Spelling::SentencePiece).unwrap();
        let spm = SentencePieces::new(vec![f32::NAN; 10], [None; 256], None);
        let text = "a".repeat(3 << 20);
        let (mut scratch, mut tokens) = (Scratch::default(), Vec::new());
        spm.encode(&vocabulary, &text, &mut scratch, &mut tokens);
        let printed: usize = tokens.iter().map(|&t| vocabulary.piece(t).len()).sum();
        assert_eq!(printed, text.len());
        assert!(
            scratch.pushes <= 3 * text.len() as u64,
            "{} pushes",
            scratch.pushes
        );
    }
}
