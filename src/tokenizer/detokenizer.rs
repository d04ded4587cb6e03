//! Tokens to text as they come, one stream each.

use super::Tokenizer;
use std::sync::Arc;

/// Decodes a stream of tokens. What [`Detokenizer::push`] and [`Detokenizer::finish`] return, joined, is exactly what
/// [`Tokenizer::decode`] makes of the whole; a character whose bytes come in several tokens is held until complete.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    utf8: IncrementalUtf8,
    /// The unwritten space before the text has still to be taken away.
    prefix: bool,
}

impl Detokenizer {
    /// For a text of its own: the answer of a chat.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        let prefix = tokenizer.add_space_prefix;
        Detokenizer {
            tokenizer,
            utf8: IncrementalUtf8::default(),
            prefix,
        }
    }

    /// For text that continues a prompt, whose beginning has the unwritten space: every space is kept.
    pub fn continuing(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer {
            prefix: false,
            ..Detokenizer::new(tokenizer)
        }
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The text that this token completes, possibly none.
    pub fn push(&mut self, id: u32) -> String {
        let piece = without_prefix(self.tokenizer.piece_bytes(id), &mut self.prefix);
        self.utf8.push(piece)
    }

    /// The end of the stream: U+FFFD where a character is incomplete, else nothing.
    pub fn finish(&mut self) -> String {
        self.utf8.finish()
    }
}

/// Takes the unwritten space off the first piece that prints anything.
pub(super) fn without_prefix<'p>(piece: &'p [u8], prefix: &mut bool) -> &'p [u8] {
    if piece.is_empty() || !std::mem::take(prefix) {
        return piece;
    }
    piece.strip_prefix(b" ").unwrap_or(piece)
}

/// `String::from_utf8_lossy`, piece by piece.
#[derive(Default)]
struct IncrementalUtf8 {
    /// The beginning of a character: at most three bytes.
    pending: Vec<u8>,
}

impl IncrementalUtf8 {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = &self.pending[..];
        loop {
            match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(invalid) = error.error_len() else {
                        rest = after;
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        }
        let keep = self.pending.len() - rest.len();
        self.pending.drain(..keep);
        text
    }

    fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, RngExt, SeedableRng};

    fn check(pieces: &[&[u8]], expected: &[&str]) {
        let mut utf8 = IncrementalUtf8::default();
        let mut deltas: Vec<String> = pieces.iter().map(|piece| utf8.push(piece)).collect();
        deltas.push(utf8.finish());
        assert_eq!(deltas, expected, "{pieces:?}");
    }

    #[test]
    fn characters_are_held_until_complete() {
        check(
            &[b"\xF0", b"\x9F", b"\x98", b"\x80"],
            &["", "", "", "😀", ""],
        );
        check(&[b"a\xF0\x9F", b"b"], &["a", "\u{FFFD}b", ""]);
        check(&[b"\xF0\x9F"], &["", "\u{FFFD}"]);
        check(
            &[b"\xFF", b"\xC0\x80", b"\xED\xA0\x80", b"z"],
            &[
                "\u{FFFD}",
                "\u{FFFD}\u{FFFD}",
                "\u{FFFD}\u{FFFD}\u{FFFD}",
                "z",
                "",
            ],
        );
        check(&[b"", b""], &["", "", ""]);
    }

    #[test]
    fn joined_deltas_are_the_lossy_whole_for_any_bytes() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        // Bytes that begin, continue and break characters, more often than chance would have them.
        let telling = [
            0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xA0, 0xED, 0xF0, 0x90, 0x9F, 0xF4, 0x8F, 0xFF,
        ];
        for _ in 0..2000 {
            let length = random.random_range(0..24);
            let bytes: Vec<u8> = (0..length)
                .map(|_| match random.random_range(0..3) {
                    0 => random.next_u32() as u8,
                    _ => telling[random.random_range(0..telling.len())],
                })
                .collect();
            let mut utf8 = IncrementalUtf8::default();
            let mut joined = String::new();
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(random.random_range(1..=rest.len().min(4)));
                joined.push_str(&utf8.push(piece));
                assert!(utf8.pending.len() <= 3);
                rest = after;
            }
            joined.push_str(&utf8.finish());
            assert_eq!(joined, String::from_utf8_lossy(&bytes), "{bytes:x?}");
        }
    }
}
