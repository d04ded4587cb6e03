//! The pieces of a vocabulary, kept compactly: one byte buffer, offsets, and an index from bytes to id. Built once
//! from GGUF metadata, then read by any thread.

use super::TokenizerError;
use super::byte_level::ByteAlphabet;
use super::folded_hash::FoldedHash;

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    /// Reserved, or of a type that GGUF does not define: can be met in text, prints nothing.
    Unused,
    Byte,
}

impl Kind {
    pub(super) fn from_code(code: i64) -> Kind {
        match code {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            6 => Kind::Byte,
            _ => Kind::Unused,
        }
    }
}

/// How the pieces of the file stand for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's byte alphabet.
    ByteLevel,
    /// SentencePiece: U+2581 stands for a space.
    SentencePiece,
}

pub(super) struct Vocabulary {
    /// All pieces, one after another, as the bytes that they print.
    bytes: Vec<u8>,
    /// Piece `id` is `bytes[offsets[id]..offsets[id + 1]]`.
    offsets: Vec<u32>,
    kinds: Vec<Kind>,
    spelling: Spelling,
    index: Index,
    /// Bytes of the longest piece that ordinary text can become.
    longest: usize,
}

pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";

/// More tokens than any model has; keeps ids and the index far from the limits of u32.
const TOKENS_MAX: usize = 1 << 24;

impl Vocabulary {
    /// `types`: one code per token, or `None` where the file has none.
    pub(super) fn new(
        texts: &[String],
        types: Option<&[i64]>,
        spelling: Spelling,
    ) -> Result<Vocabulary, TokenizerError> {
        if texts.is_empty() || texts.len() > TOKENS_MAX {
            return Err(TokenizerError::invalid(
                TOKENS,
                format!("{} tokens; 1 to {TOKENS_MAX} are supported", texts.len()),
            ));
        }
        if let Some(types) = types
            && types.len() < texts.len()
        {
            return Err(TokenizerError::invalid(
                TOKEN_TYPE,
                format!("{} types for {} tokens", types.len(), texts.len()),
            ));
        }
        let total: usize = texts.iter().map(String::len).sum();
        if u32::try_from(total).is_err() {
            return Err(TokenizerError::invalid(
                TOKENS,
                format!("{total} bytes of text; at most 4 GiB are supported"),
            ));
        }
        refuse_duplicates(texts)?;

        let alphabet = ByteAlphabet::new();
        let mut vocabulary = Vocabulary {
            bytes: Vec::with_capacity(total),
            offsets: Vec::with_capacity(texts.len() + 1),
            kinds: Vec::with_capacity(texts.len()),
            spelling,
            index: Index::with_room_for(texts.len()),
            longest: 0,
        };
        vocabulary.offsets.push(0);
        for (id, text) in texts.iter().enumerate() {
            let byte = byte_of(text);
            let kind = match types {
                Some(types) => Kind::from_code(types[id]),
                None if spelling == Spelling::SentencePiece && byte.is_some() => Kind::Byte,
                None => Kind::Normal,
            };
            let is_text = vocabulary.push_piece(text, kind, byte, spelling, &alphabet);
            vocabulary.offsets.push(vocabulary.bytes.len() as u32);
            vocabulary.kinds.push(kind);
            if is_text {
                vocabulary.enter(id as u32);
            }
        }
        Ok(vocabulary)
    }

    /// Appends the bytes of one piece; true where ordinary text may become this piece.
    fn push_piece(
        &mut self,
        text: &str,
        kind: Kind,
        byte: Option<u8>,
        spelling: Spelling,
        alphabet: &ByteAlphabet,
    ) -> bool {
        match kind {
            Kind::Control | Kind::Unknown | Kind::UserDefined => {
                self.bytes.extend_from_slice(text.as_bytes());
                false
            }
            Kind::Byte => {
                match byte {
                    Some(byte) => self.bytes.push(byte),
                    None => self.bytes.extend_from_slice(text.as_bytes()),
                }
                false
            }
            Kind::Normal | Kind::Unused => match spelling {
                Spelling::SentencePiece => {
                    for (i, part) in text.split('\u{2581}').enumerate() {
                        if i > 0 {
                            self.bytes.push(b' ');
                        }
                        self.bytes.extend_from_slice(part.as_bytes());
                    }
                    !text.is_empty() && !text.contains(' ')
                }
                // A piece that holds a character outside the alphabet can be generated, but no text spells it.
                Spelling::ByteLevel => {
                    let spelt = alphabet.decode_into(text, &mut self.bytes);
                    if !spelt {
                        self.bytes.extend_from_slice(text.as_bytes());
                    }
                    spelt && !text.is_empty()
                }
            },
        }
    }

    fn enter(&mut self, id: u32) {
        let piece = self.piece(id);
        let longest = self.longest.max(piece.len());
        let hash = self.index.hash(piece);
        let found = self.index.find(hash, |other| self.piece(other) == piece);
        if found.is_none() {
            self.index.insert(hash, id);
        }
        self.longest = longest;
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// The bytes that token `id` prints, special tokens as their text. Empty for an id outside the vocabulary.
    pub(super) fn piece(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.offsets.get(id), self.offsets.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// The pieces that ordinary text can become, those that are UTF-8.
    pub(super) fn text_pieces(&self) -> impl Iterator<Item = &str> {
        let ids = self.index.slots.iter().filter(|slot| **slot != EMPTY);
        ids.filter_map(|slot| str::from_utf8(self.piece(*slot as u32)).ok())
    }

    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Unused)
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: Kind) {
        if let Some(entry) = self.kinds.get_mut(id as usize) {
            *entry = kind;
        }
    }

    /// The token that ordinary text of these bytes may become. Control, unknown, byte and user-defined tokens are
    /// never found here: plain text must not turn into them by merging.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        self.index
            .find(self.index.hash(bytes), |id| self.piece(id) == bytes)
    }
}

/// The byte that a piece spelt `<0x41>` stands for.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Two tokens of one text cannot both be meant: the file is broken, and llama.cpp refuses it too. Empty texts are
/// place holders.
fn refuse_duplicates(texts: &[String]) -> Result<(), TokenizerError> {
    let mut seen = Index::with_room_for(texts.len());
    for (id, text) in texts.iter().enumerate() {
        if text.is_empty() {
            continue;
        }
        let hash = seen.hash(text.as_bytes());
        if let Some(first) = seen.find(hash, |other| texts[other as usize] == *text) {
            return Err(TokenizerError::invalid(
                TOKENS,
                format!("tokens {first} and {id} have the same text {text:?}"),
            ));
        }
        seen.insert(hash, id as u32);
    }
    Ok(())
}

/// Open addressing over ids: half the memory of a map that owns its keys. The hash is seeded, so that a hostile file
/// cannot make all its pieces collide.
struct Index {
    /// A power of two, at most half full; `EMPTY`, or the high half of a hash above an id. Most strings that are looked
    /// up are no pieces, and the hash tells so without a look at a piece.
    slots: Vec<u64>,
    hash: FoldedHash,
}

const EMPTY: u64 = u64::MAX;

/// The high half of the hash; what it selects a slot by is the low half.
fn tag_of(hash: u64) -> u64 {
    hash & !u64::from(u32::MAX)
}

impl Index {
    fn with_room_for(count: usize) -> Index {
        Index {
            slots: vec![EMPTY; (count.max(4) * 2).next_power_of_two()],
            hash: FoldedHash::new(),
        }
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        self.hash.of_bytes(bytes)
    }

    fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        while self.slots[slot] != EMPTY {
            let id = self.slots[slot] as u32;
            if tag_of(self.slots[slot]) == tag_of(hash) && is_it(id) {
                return Some(id);
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    /// `id` is below `u32::MAX`.
    fn insert(&mut self, hash: u64, id: u32) {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        while self.slots[slot] != EMPTY {
            slot = (slot + 1) & mask;
        }
        self.slots[slot] = tag_of(hash) | u64::from(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|t| t.to_string()).collect()
    }

    #[test]
    fn pieces_print_the_bytes_they_stand_for() {
        let types = [1, 1, 3, 6, 4, 5];
        let list = texts(&["\u{2581}Hi", "a", "<s>", "<0x41>", "  ", "gone"]);
        let v = Vocabulary::new(&list, Some(&types), Spelling::SentencePiece).unwrap();
        assert_eq!(v.piece(0), b" Hi");
        assert_eq!(v.piece(3), [0x41]);
        assert_eq!(
            (v.find(b" Hi"), v.find(b"<s>"), v.find(b"A"), v.find(b"  ")),
            (Some(0), None, None, None)
        );
        assert_eq!(v.piece(6), b"");

        let v = Vocabulary::new(&texts(&["Ġa", "ðŁ", "x y"]), None, Spelling::ByteLevel).unwrap();
        assert_eq!(
            (v.piece(0), v.piece(1), v.piece(2)),
            (&b" a"[..], &[0xF0, 0x9F][..], &b"x y"[..])
        );
        assert_eq!((v.find(&[0xF0, 0x9F]), v.find(b"x y")), (Some(1), None));
    }

    #[test]
    fn broken_lists_are_refused_by_key() {
        let check = |list: &[&str], types: Option<&[i64]>, key: &str| {
            let error = Vocabulary::new(&texts(list), types, Spelling::ByteLevel)
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(key), "{error}");
        };
        check(&[], None, TOKENS);
        check(&["a", "b", "a"], None, TOKENS);
        check(&["a", "b"], Some(&[1]), TOKEN_TYPE);
        // Empty texts are place holders, not duplicates; unknown types are unused tokens.
        assert!(
            Vocabulary::new(
                &texts(&["", ""]),
                Some(&[i64::MIN, 99]),
                Spelling::ByteLevel
            )
            .is_ok()
        );
    }

    #[test]
    fn only_six_characters_of_hexadecimal_are_a_byte() {
        assert_eq!(
            (byte_of("<0x0A>"), byte_of("<0xff>")),
            (Some(10), Some(255))
        );
        for text in [
            "<0x>", "<0x0>", "<0x+1>", "<0x0AB>", "0x0A", "<0x0A", "<0xé>",
        ] {
            assert_eq!(byte_of(text), None, "{text}");
        }
    }
}
