//! Byte-pair merges: of bytes, in vocabularies like GPT-2's, and of characters, in those that are written as
//! SentencePiece writes them.

use super::TokenizerError;
use super::boundaries::Boundaries;
use super::byte_level::ByteAlphabet;
use super::folded_hash::FoldedHash;
use super::merge_queue::{Candidate, MergeQueue};
use super::vocabulary::{Spelling, Vocabulary};
use std::collections::HashMap;

pub(super) const MERGES: &str = "tokenizer.ggml.merges";

/// The merge table. Symbols are ids: tokens keep theirs, strings that merges name but the vocabulary lacks get ids past
/// its end (they can be steps on the way to a token).
pub(super) struct BytePairs {
    merges: HashMap<u64, Merge, FoldedHash>,
    start: Start,
    /// Tokens are the ids below this.
    vocabulary: u32,
}

/// What a word consists of before anything is merged.
enum Start {
    /// The symbol of each byte.
    Bytes(Box<[u32; 256]>),
    Characters(Characters),
}

struct Characters {
    /// Symbols of the characters that merges name and the vocabulary lacks.
    extra: HashMap<char, u32>,
    /// The token of each byte, for what is no piece.
    bytes: Box<[Option<u32>; 256]>,
    boundaries: Boundaries,
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

/// Working memory of a run of words.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    pub(super) queue: MergeQueue,
}

impl Scratch {
    /// Takes a word as its symbols, each with the place of its first byte.
    fn begin(&mut self, symbols: impl Iterator<Item = (u32, u32)>) {
        self.queue.clear();
        self.symbols.clear();
        self.symbols
            .extend(symbols.zip(0..).map(|((id, start), place)| Symbol {
                id,
                start,
                previous: if place == 0 { NONE } else { place - 1 },
                next: place + 1,
            }));
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
    }
}

/// A node of the list of symbols that a word consists of.
#[derive(Clone, Copy)]
struct Symbol {
    /// `GONE` once merged into its left neighbour.
    id: u32,
    /// The place of its first byte in the word.
    start: u32,
    previous: u32,
    next: u32,
}

const GONE: u32 = u32::MAX;
/// A character that neither the vocabulary nor a merge has.
const UNKNOWN: u32 = u32::MAX - 1;
const NONE: u32 = u32::MAX;

impl BytePairs {
    /// `bytes`: from a byte to its token, where what is merged are characters.
    pub(super) fn new(
        lines: &[String],
        vocabulary: &Vocabulary,
        bytes: [Option<u32>; 256],
    ) -> Result<BytePairs, TokenizerError> {
        let spelling = vocabulary.spelling();
        let mut symbols = Symbols {
            vocabulary,
            extra: HashMap::new(),
        };
        let first_bytes = Box::new(std::array::from_fn(|byte| symbols.id_of(&[byte as u8])));
        let alphabet = ByteAlphabet::new();
        let spell = |part: &str, text: &mut Vec<u8>| match spelling {
            // A merge of what no text is written with can never apply: a character outside the alphabet, a plain space.
            Spelling::ByteLevel => alphabet.decode_into(part, text),
            Spelling::SentencePiece => {
                text.extend_from_slice(part.replace('\u{2581}', " ").as_bytes());
                !part.contains(' ')
            }
        };
        let mut merges = HashMap::with_capacity_and_hasher(lines.len(), FoldedHash::new());
        let mut boundaries = Boundaries::everywhere();
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
            if !spell(&line[..space], &mut text) {
                continue;
            }
            let middle = text.len();
            if !spell(&line[space + 1..], &mut text) || middle == 0 || middle == text.len() {
                continue;
            }
            let pair = pair(
                symbols.id_of(&text[..middle]),
                symbols.id_of(&text[middle..]),
            );
            let merged = symbols.id_of(&text);
            merges.entry(pair).or_insert(Merge { rank, merged });
            if spelling == Spelling::SentencePiece
                && let Ok(text) = str::from_utf8(&text)
            {
                boundaries.keep_whole(text);
            }
        }
        merges.shrink_to_fit();
        let start = match spelling {
            Spelling::ByteLevel => Start::Bytes(first_bytes),
            Spelling::SentencePiece => Start::Characters(Characters {
                extra: symbols.extra_characters(),
                bytes: Box::new(bytes),
                boundaries,
            }),
        };
        Ok(BytePairs {
            merges,
            start,
            vocabulary: vocabulary.len() as u32,
        })
    }

    /// Appends the tokens of one word. Merges apply by rank, and from left to right within one rank; the work is
    /// O(n log n) for a word of n bytes.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        word: &str,
        scratch: &mut Scratch,
        tokens: &mut Vec<u32>,
    ) {
        match &self.start {
            Start::Bytes(symbols) => {
                let bytes = word.bytes().zip(0..);
                scratch.begin(bytes.map(|(byte, start)| (symbols[usize::from(byte)], start)));
                self.merge(scratch);
                self.finish(word.as_bytes(), scratch, tokens, |byte| {
                    Some(symbols[usize::from(byte)]).filter(|&id| id < self.vocabulary)
                });
            }
            Start::Characters(characters) => characters.boundaries.split(word, |part| {
                scratch.begin(part.char_indices().map(|(start, character)| {
                    let bytes = &part.as_bytes()[start..][..character.len_utf8()];
                    let id = vocabulary.find(bytes);
                    let id = id.or_else(|| characters.extra.get(&character).copied());
                    (id.unwrap_or(UNKNOWN), start as u32)
                }));
                self.merge(scratch);
                self.finish(part.as_bytes(), scratch, tokens, |byte| {
                    characters.bytes[usize::from(byte)]
                });
            }),
        }
    }

    fn merge(&self, scratch: &mut Scratch) {
        for left in 0..(scratch.symbols.len() as u32).saturating_sub(1) {
            if let Some(candidate) = self.candidate(left, left + 1, &scratch.symbols) {
                scratch.queue.seed(candidate);
            }
        }
        scratch.queue.sort();
        while let Some(candidate) = scratch.queue.pop() {
            let left = scratch.symbols[candidate.left as usize];
            if left.id != candidate.pair[0] || left.next == NONE {
                continue;
            }
            let right = scratch.symbols[left.next as usize];
            if right.id != candidate.pair[1] {
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
            }
            for (left, right) in [
                (candidate.left, right.next),
                (left.previous, candidate.left),
            ] {
                if left != NONE
                    && right != NONE
                    && let Some(fresh) = self.candidate(left, right, &scratch.symbols)
                {
                    scratch.queue.push(fresh);
                }
            }
        }
    }

    /// Appends what the symbols have become: a symbol that is no token stands for the tokens of its bytes, as far as the
    /// vocabulary has them.
    fn finish(
        &self,
        word: &[u8],
        scratch: &Scratch,
        tokens: &mut Vec<u32>,
        token_of: impl Fn(u8) -> Option<u32>,
    ) {
        let mut place = if word.is_empty() { NONE } else { 0 };
        while place != NONE {
            let symbol = scratch.symbols[place as usize];
            place = symbol.next;
            if symbol.id < self.vocabulary {
                tokens.push(symbol.id);
                continue;
            }
            let next = scratch.symbols.get(symbol.next as usize);
            let end = next.map_or(word.len(), |next| next.start as usize);
            let bytes = &word[symbol.start as usize..end];
            tokens.extend(bytes.iter().filter_map(|&byte| token_of(byte)));
        }
    }

    /// Of the symbols at two places, if there is a merge of both.
    fn candidate(&self, left: u32, right: u32, symbols: &[Symbol]) -> Option<Candidate> {
        let ids = [symbols[left as usize].id, symbols[right as usize].id];
        let merge = self.merges.get(&pair(ids[0], ids[1]))?;
        Some(Candidate {
            key: merge.rank,
            left,
            pair: ids,
        })
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

    /// Those of one character, outside the vocabulary.
    fn extra_characters(&self) -> HashMap<char, u32> {
        let characters = self.extra.iter().filter_map(|(bytes, &id)| {
            let mut characters = str::from_utf8(bytes).ok()?.chars();
            let character = characters.next()?;
            characters.next().is_none().then_some((character, id))
        });
        characters.collect()
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
        let pairs = BytePairs::new(&merges, &vocabulary, [None; 256])?;
        Ok((vocabulary, pairs))
    }

    fn check(pieces: &[&str], merges: &[&str], word: &str, expected: &[&str]) {
        let (vocabulary, pairs) = table(pieces, merges).unwrap();
        let mut tokens = Vec::new();
        pairs.encode(&vocabulary, word, &mut Scratch::default(), &mut tokens);
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

    fn check_characters(pieces: &[&str], merges: &[&str], word: &str, expected: &[&str]) {
        let texts: Vec<String> = pieces.iter().map(|p| p.to_string()).collect();
        let vocabulary = Vocabulary::new(&texts, None, Spelling::SentencePiece).unwrap();
        let merges: Vec<String> = merges.iter().map(|m| m.to_string()).collect();
        let bytes = std::array::from_fn(|byte| {
            let text = format!("<0x{byte:02X}>");
            texts.iter().position(|t| *t == text).map(|id| id as u32)
        });
        let pairs = BytePairs::new(&merges, &vocabulary, bytes).unwrap();
        let mut tokens = Vec::new();
        pairs.encode(&vocabulary, word, &mut Scratch::default(), &mut tokens);
        let shown: Vec<&str> = tokens.iter().map(|&t| texts[t as usize].as_str()).collect();
        assert_eq!(shown, expected, "{word:?}");
    }

    #[test]
    fn characters_merge_where_pieces_are_written_as_sentencepiece_writes_them() {
        check_characters(
            &["é", "▁", "a", "▁é", "▁éa"],
            &["▁ é", "▁é a"],
            "é éa a",
            &["é", "▁éa", "▁", "a"],
        );
        check_characters(
            &["\n", "\n\n", "a"],
            &["\n \n"],
            "a\n\n\n",
            &["a", "\n\n", "\n"],
        );
        // A character that only a merge has is a step to a token, and bytes where it stays.
        let pieces = ["日本", "<0xE6>", "<0x97>", "<0xA5>", "a"];
        check_characters(&pieces, &["日 本"], "日本a", &["日本", "a"]);
        check_characters(
            &pieces,
            &["日 本"],
            "a日a",
            &["a", "<0xE6>", "<0x97>", "<0xA5>", "a"],
        );
        // And so is one that nothing has; bytes without a token are left out.
        check_characters(
            &pieces,
            &["a a"],
            "a\u{E000}日",
            &["a", "<0xE6>", "<0x97>", "<0xA5>"],
        );
        check_characters(&pieces, &[], "", &[]);
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
        let (vocabulary, pairs) = table(&pieces, &merges).unwrap();
        let word = "a".repeat(3 << 20);
        let (mut scratch, mut tokens) = (Scratch::default(), Vec::new());
        pairs.encode(&vocabulary, &word, &mut scratch, &mut tokens);
        assert_eq!(tokens.len(), (3 << 20) / 512);
        let pushes = scratch.queue.pushes;
        assert!(pushes <= 3 * word.len() as u64, "{pushes} pushes");
    }
}
