//! The byte alphabet of GPT-2: each of the 256 bytes is written as one printable character, so that a vocabulary of
//! text pieces can hold any bytes. See `bytes_to_unicode` in <https://github.com/openai/gpt-2/blob/master/src/encoder.py>.

/// Bytes that stand for themselves: printable Latin-1.
fn is_its_own_character(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character for a byte: itself where it is printable, else the next free one from U+0100 on.
#[cfg(test)]
pub(super) fn character_of(byte: u8) -> char {
    if is_its_own_character(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !is_its_own_character(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("U+0100..U+0143 are characters")
}

/// From a character's code point (below U+0144) to its byte.
pub(super) struct ByteAlphabet {
    bytes: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    pub(super) fn new() -> ByteAlphabet {
        let mut bytes = [None; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            if is_its_own_character(byte) {
                bytes[usize::from(byte)] = Some(byte);
            } else {
                bytes[next] = Some(byte);
                next += 1;
            }
        }
        ByteAlphabet { bytes }
    }

    /// Appends the bytes that `text` stands for and returns true; false, with nothing appended, where `text` holds a
    /// character outside the alphabet.
    pub(super) fn decode_into(&self, text: &str, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        for character in text.chars() {
            match self.bytes.get(character as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => {
                    out.truncate(start);
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character_and_comes_back() {
        let alphabet = ByteAlphabet::new();
        let text: String = (0..=255).map(character_of).collect();
        let mut bytes = Vec::new();
        assert!(alphabet.decode_into(&text, &mut bytes));
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!((character_of(b' '), character_of(b'\n')), ('Ġ', 'Ċ'));
    }

    #[test]
    fn a_character_outside_the_alphabet_leaves_the_output_alone() {
        let mut bytes = vec![7];
        assert!(!ByteAlphabet::new().decode_into("ab c", &mut bytes));
        assert_eq!(bytes, [7]);
    }
}
