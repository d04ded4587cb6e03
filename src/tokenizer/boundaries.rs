//! Where a text can be cut before anything is merged: between two characters that stand side by side in no piece. No
//! piece can ever cover such a place, so both sides are encoded each by itself, with the same result. The parts of
//! ordinary text are words, and small ones stay in the processor's cache.

/// Bits for pairs that are not both ASCII. A pair that shares its bit with another is not cut, which costs time only.
const BITS: usize = 1 << 21;

pub(super) struct Boundaries {
    /// Bit `right` of entry `left`: both ASCII, and side by side in a piece.
    ascii: Box<[u128; 128]>,
    /// The same for all other pairs, by hash.
    others: Vec<u64>,
}

impl Boundaries {
    /// Between any two characters, as if no piece were longer than one.
    pub(super) fn everywhere() -> Boundaries {
        Boundaries {
            ascii: Box::new([0; 128]),
            others: vec![0; BITS / 64],
        }
    }

    /// Where none of these pieces is cut. They are written as text is.
    pub(super) fn of<'p>(pieces: impl IntoIterator<Item = &'p str>) -> Boundaries {
        let mut boundaries = Boundaries::everywhere();
        for piece in pieces {
            boundaries.keep_whole(piece);
        }
        boundaries
    }

    /// No cut goes through this piece.
    pub(super) fn keep_whole(&mut self, piece: &str) {
        let mut characters = piece.chars();
        let Some(mut left) = characters.next() else {
            return;
        };
        for right in characters {
            if left.is_ascii() && right.is_ascii() {
                self.ascii[left as usize] |= 1 << (right as u32);
            } else {
                let bit = bit_of(left, right);
                self.others[bit / 64] |= 1 << (bit % 64);
            }
            left = right;
        }
    }

    fn is_inside_piece(&self, left: char, right: char) -> bool {
        if left.is_ascii() && right.is_ascii() {
            return self.ascii[left as usize] >> (right as u32) & 1 == 1;
        }
        let bit = bit_of(left, right);
        self.others[bit / 64] >> (bit % 64) & 1 == 1
    }

    /// Calls `part` with each part of `text`, in order; together they are the text, and none is empty.
    pub(super) fn split<'t>(&self, text: &'t str, mut part: impl FnMut(&'t str)) {
        let mut start = 0;
        let mut left = None;
        for (place, right) in text.char_indices() {
            if left.is_some_and(|left| !self.is_inside_piece(left, right)) {
                part(&text[start..place]);
                start = place;
            }
            left = Some(right);
        }
        if start < text.len() {
            part(&text[start..]);
        }
    }
}

fn bit_of(left: char, right: char) -> usize {
    let pair = u64::from(left as u32) << 32 | u64::from(right as u32);
    // Fibonacci hashing: the high bits of a product with 2^64 divided by the golden ratio.
    (pair.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - BITS.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pieces: &[&str], text: &str, expected: &[&str]) {
        let boundaries = Boundaries::of(pieces.iter().copied());
        let mut parts = Vec::new();
        boundaries.split(text, |part| parts.push(part));
        assert_eq!(parts, expected, "{pieces:?}");
    }

    #[test]
    fn no_piece_is_cut_and_all_else_is() {
        check(&["ab", "c"], "abcab", &["ab", "c", "ab"]);
        check(&[" a", "ab"], " ab ab", &[" ab", " ab"]);
        check(&["日本", "é"], "日本日é", &["日本", "日", "é"]);
        check(&["xé", "éx", ""], "xéxyx", &["xéx", "y", "x"]);
        check(&["aa"], "aaaa", &["aaaa"]);
        check(&["aa"], "", &[]);
    }
}
