//! Byte-pair merges of GPT-2-style vocabularies.

use super::TokenizerError;
use super::byte_level::ByteAlphabet;
use super::vocabulary::Vocabulary;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};

pub(super) const MERGES: &str = "tokenizer.ggml.merges";

/// The merge table. Symbols are ids: tokens keep theirs, byte strings that merges name but the vocabulary lacks get
/// ids past its end (they can be steps on the way to a token).
pub(super) struct BytePairs {
    merges: HashMap<u64, Merge, PairHash>,
    /// The symbol of each byte.
    bytes: Vec<u32>,
    /// Tokens are the ids below this.
    vocabulary: u32,
}

#[derive(Clone, Copy)]
struct Merge {
    /// The place in the file's list: lower ones merge first.
    rank: u32,
    merged: u32,
}

/// Two symbols as one key.
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Most of the time of encoding goes into looking up pairs, so the hash is one multiplication. It is seeded, so that
/// no file can be made to collide.
#[derive(Clone, Copy)]
struct PairHash {
    seed: u64,
    factor: u64,
}

impl PairHash {
    fn new() -> PairHash {
        let state = RandomState::new();
        PairHash {
            seed: state.hash_one(0),
            factor: state.hash_one(1) | 1,
        }
    }
}

impl BuildHasher for PairHash {
    type Hasher = PairHasher;

    fn build_hasher(&self) -> PairHasher {
        PairHasher {
            hash: *self,
            value: 0,
        }
    }
}

struct PairHasher {
    hash: PairHash,
    value: u64,
}

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        let product = u128::from(self.value ^ key ^ self.hash.seed) * u128::from(self.hash.factor);
        self.value = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.value
    }
}

/// Working memory of a run of words, and what it did.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
    /// Pushes to the queue so far: the work, which tests hold against a bound.
    pub(super) pushes: u64,
}

/// A node of the list of symbols that a word consists of. Its place is that of its first byte.
#[derive(Clone, Copy)]
struct Symbol {
    /// `GONE` once merged into its left neighbour.
    id: u32,
    previous: u32,
    next: u32,
}

const GONE: u32 = u32::MAX;
const NONE: u32 = u32::MAX;

/// Ordered by rank, then from left to right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    left_id: u32,
    right_id: u32,
}

impl BytePairs {
    pub(super) fn new(
        lines: &[String],
        vocabulary: &Vocabulary,
    ) -> Result<BytePairs, TokenizerError> {
        let alphabet = ByteAlphabet::new();
        let mut symbols = Symbols {
            vocabulary,
            extra: HashMap::new(),
        };
        let bytes = (0..=255u8).map(|byte| symbols.id_of(&[byte])).collect();
        let mut merges = HashMap::with_capacity_and_hasher(lines.len(), PairHash::new());
        let mut text = Vec::new();
        for (rank, line) in lines.iter().enumerate() {
            // A left part may itself begin with a space, so the one that separates is looked for after it.
            let second = line.char_indices().nth(1).map_or(line.len(), |(i, _)| i);
            let Some(space) = line[second..].find(' ').map(|i| second + i) else {
                return Err(TokenizerError::invalid(
                    MERGES,
                    format!("merge {rank} is {line:?}, without a space between its parts"),
                ));
            };
            let Ok(rank) = u32::try_from(rank) else { break };
            text.clear();
            // Text is spelt in the byte alphabet, so a merge of anything else can never apply.
            if !alphabet.decode_into(&line[..space], &mut text) {
                continue;
            }
            let middle = text.len();
            if !alphabet.decode_into(&line[space + 1..], &mut text)
                || middle == 0
                || middle == text.len()
            {
                continue;
            }
            let pair = pair(
                symbols.id_of(&text[..middle]),
                symbols.id_of(&text[middle..]),
            );
            let merged = symbols.id_of(&text);
            merges.entry(pair).or_insert(Merge { rank, merged });
        }
        merges.shrink_to_fit();
        Ok(BytePairs {
            merges,
            bytes,
            vocabulary: vocabulary.len() as u32,
        })
    }

    /// Appends the tokens of one word. Merges apply by rank, and from left to right within one rank; the work is
    /// O(n log n) for a word of n bytes.
    pub(super) fn encode(&self, word: &[u8], scratch: &mut Scratch, tokens: &mut Vec<u32>) {
        let count = word.len() as u32;
        scratch.symbols.clear();
        scratch.queue.clear();
        scratch
            .symbols
            .extend(word.iter().zip(0..count).map(|(&byte, i)| Symbol {
                id: self.bytes[usize::from(byte)],
                previous: if i == 0 { NONE } else { i - 1 },
                next: if i + 1 == count { NONE } else { i + 1 },
            }));
        for left in 0..count.saturating_sub(1) {
            self.consider(left, left + 1, scratch);
        }
        while let Some(Reverse(candidate)) = scratch.queue.pop() {
            let left = scratch.symbols[candidate.left as usize];
            if left.id != candidate.left_id || left.next == NONE {
                continue;
            }
            let right = scratch.symbols[left.next as usize];
            if right.id != candidate.right_id {
                continue;
            }
            let Some(merge) = self.merges.get(&pair(left.id, right.id)) else {
                continue;
            };
            scratch.symbols[left.next as usize].id = GONE;
            scratch.symbols[candidate.left as usize].id = merge.merged;
            scratch.symbols[candidate.left as usize].next = right.next;
            if right.next != NONE {
                scratch.symbols[right.next as usize].previous = candidate.left;
                self.consider(candidate.left, right.next, scratch);
            }
            if left.previous != NONE {
                self.consider(left.previous, candidate.left, scratch);
            }
        }
        let mut place = if count == 0 { NONE } else { 0 };
        while place != NONE {
            let symbol = scratch.symbols[place as usize];
            if symbol.id < self.vocabulary {
                tokens.push(symbol.id);
            } else {
                // Not a token: its bytes, as far as the vocabulary has them.
                let end = if symbol.next == NONE {
                    count
                } else {
                    symbol.next
                };
                for &byte in &word[place as usize..end as usize] {
                    let id = self.bytes[usize::from(byte)];
                    if id < self.vocabulary {
                        tokens.push(id);
                    }
                }
            }
            place = symbol.next;
        }
    }

    fn consider(&self, left: u32, right: u32, scratch: &mut Scratch) {
        let left_id = scratch.symbols[left as usize].id;
        let right_id = scratch.symbols[right as usize].id;
        if let Some(merge) = self.merges.get(&pair(left_id, right_id)) {
            scratch.pushes += 1;
            scratch.queue.push(Reverse(Candidate {
                rank: merge.rank,
                left,
                left_id,
                right_id,
            }));
        }
    }
}

/// Gives ids to byte strings while the merges are read.
struct Symbols<'a> {
    vocabulary: &'a Vocabulary,
    extra: HashMap<Vec<u8>, u32>,
}

impl Symbols<'_> {
    fn id_of(&mut self, bytes: &[u8]) -> u32 {
        if let Some(id) = self.vocabulary.find(bytes) {
            return id;
        }
        if let Some(&id) = self.extra.get(bytes) {
            return id;
        }
        let id = (self.vocabulary.len() + self.extra.len()) as u32;
        self.extra.insert(bytes.to_vec(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::super::byte_level::character_of;
    use super::super::vocabulary::Spelling;
    use super::*;

    fn table(pieces: &[&str], merges: &[&str]) -> Result<(Vocabulary, BytePairs), TokenizerError> {
        let mut texts: Vec<String> = (0..=255).map(|b| character_of(b).to_string()).collect();
        texts.extend(pieces.iter().map(|p| p.to_string()));
        let vocabulary = Vocabulary::new(&texts, None, Spelling::ByteLevel).unwrap();
        let merges: Vec<String> = merges.iter().map(|m| m.to_string()).collect();
        let pairs = BytePairs::new(&merges, &vocabulary)?;
        Ok((vocabulary, pairs))
    }

    fn check(pieces: &[&str], merges: &[&str], word: &str, expected: &[&str]) {
        let (vocabulary, pairs) = table(pieces, merges).unwrap();
        let mut tokens = Vec::new();
        pairs.encode(word.as_bytes(), &mut Scratch::default(), &mut tokens);
        let shown: Vec<String> = tokens
            .iter()
            .map(|&t| String::from_utf8_lossy(vocabulary.piece(t)).into_owned())
            .collect();
        assert_eq!(shown, expected, "{word:?}");
    }

    #[test]
    fn lower_ranks_merge_first_and_left_before_right() {
        check(&["bc", "ab"], &["b c", "a b"], "abc", &["a", "bc"]);
        check(&["bc", "ab"], &["a b", "b c"], "abc", &["ab", "c"]);
        check(&["aa"], &["a a"], "aaa", &["aa", "a"]);
        check(
            &["Ġt", "Ġthe", "he"],
            &["Ġ t", "h e", "Ġt he"],
            " the",
            &[" the"],
        );
        check(&[], &[], "", &[]);
    }

    #[test]
    fn pieces_that_the_vocabulary_lacks_are_steps_or_bytes() {
        check(&["abc"], &["a b", "ab c"], "abc", &["abc"]);
        check(&["abc"], &["a b", "ab c"], "abx", &["a", "b", "x"]);
        // The first of two equal merges counts; a merge outside the byte alphabet never applies.
        check(
            &["ab", "bc"],
            &["a b", "b c", "a b", "日 本"],
            "abc",
            &["ab", "c"],
        );
    }

    #[test]
    fn a_merge_without_a_space_is_refused_by_key() {
        for merge in ["ab", "", " ", "a", "é"] {
            let error = table(&[], &["a b", merge]).err().unwrap().to_string();
            assert!(
                error.contains(MERGES) && error.contains("merge 1"),
                "{error}"
            );
        }
    }

    #[test]
    fn three_mebibytes_of_one_letter_take_linear_work() {
        let pieces: Vec<String> = (1..10).map(|n| "a".repeat(1 << n)).collect();
        let merges: Vec<String> = (0..9)
            .map(|n| format!("{0} {0}", "a".repeat(1 << n)))
            .collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
        let (_, pairs) = table(&pieces, &merges).unwrap();
        let word = "a".repeat(3 << 20);
        let (mut scratch, mut tokens) = (Scratch::default(), Vec::new());
        pairs.encode(word.as_bytes(), &mut scratch, &mut tokens);
        assert_eq!(tokens.len(), (3 << 20) / 512);
        assert!(
            scratch.pushes <= 3 * word.len() as u64,
            "{} pushes",
            scratch.pushes
        );
    }
}
