//! A hash for short keys that are looked up at every character of a prompt: one multiplication for eight bytes, whose
//! halves are folded together. It is seeded, so that no file can be made to collide.

use std::hash::{BuildHasher, Hasher, RandomState};

#[derive(Clone, Copy)]
pub(super) struct FoldedHash {
    seed: u64,
    factor: u64,
}

impl FoldedHash {
    pub(super) fn new() -> FoldedHash {
        let state = RandomState::new();
        FoldedHash {
            seed: state.hash_one(0),
            factor: state.hash_one(1) | 1,
        }
    }

    /// The hash of a string of bytes.
    pub(super) fn of_bytes(&self, bytes: &[u8]) -> u64 {
        let mut hash = self.fold(self.seed, bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            hash = self.fold(hash, u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            hash = self.fold(hash, u64::from_le_bytes(word));
        }
        hash
    }

    fn fold(&self, hash: u64, word: u64) -> u64 {
        let product = u128::from(hash ^ word) * u128::from(self.factor);
        (product >> 64) as u64 ^ product as u64
    }
}

impl BuildHasher for FoldedHash {
    type Hasher = FoldedHasher;

    fn build_hasher(&self) -> FoldedHasher {
        FoldedHasher {
            hash: *self,
            value: self.seed,
        }
    }
}

/// For maps whose keys are numbers.
pub(super) struct FoldedHasher {
    hash: FoldedHash,
    value: u64,
}

impl Hasher for FoldedHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.value = self.hash.fold(self.value, word);
    }

    fn finish(&self) -> u64 {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn short_strings_have_hashes_of_their_own() {
        let hash = FoldedHash::new();
        let mut strings: Vec<Vec<u8>> = (0..40).map(|n| vec![0; n]).collect();
        strings.extend((0..=u16::MAX).map(|n| n.to_le_bytes().to_vec()));
        strings.extend((1..=255).map(|n| [vec![b'a'; 11], vec![n]].concat()));
        strings.sort();
        strings.dedup();
        let low: HashSet<u64> = strings.iter().map(|s| hash.of_bytes(s) >> 20).collect();
        assert_eq!(low.len(), strings.len());
    }
}
