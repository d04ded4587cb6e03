//! SHA-256 (FIPS 180-4): of what is fetched, and as people and servers write it.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

/// 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sha256([u8; 32]);

impl Sha256 {
    /// 64 hexadecimal digits of either case; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Sha256> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            for &digit in pair {
                *byte = *byte << 4 | char::from(digit).to_digit(16)? as u8;
            }
        }
        Some(Sha256(bytes))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The sum of bytes that come piece by piece.
#[derive(Clone)]
pub(super) struct Hasher(ring::digest::Context);

impl Hasher {
    pub(super) fn new() -> Hasher {
        Hasher(ring::digest::Context::new(&ring::digest::SHA256))
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> Sha256 {
        let mut bytes = [0; 32];
        // Both have 32 bytes.
        bytes.copy_from_slice(self.0.finish().as_ref());
        Sha256(bytes)
    }
}

const CHUNK_BYTES: usize = 1 << 20;

/// Takes in the next `bytes` of a file. `progress` is told how many there were so far.
///
/// # Errors
///
/// The file cannot be read, or ends before.
pub(super) fn hash_file(
    hasher: &mut Hasher,
    file: &mut File,
    bytes: u64,
    mut progress: impl FnMut(u64),
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut done = 0;
    while done < bytes {
        let want = (bytes - done).min(CHUNK_BYTES as u64) as usize;
        let read = file.read(&mut chunk[..want])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hasher.update(&chunk[..read]);
        done += read as u64;
        progress(done);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_sums() {
        let check = |text: &str, sum: &str| {
            let mut hasher = Hasher::new();
            hasher.update(text.as_bytes());
            assert_eq!(hasher.finish().to_string(), sum);
        };
        // FIPS 180-4's examples.
        check(
            "",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        );
        check(
            "abc",
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        );
    }

    #[test]
    fn a_sum_is_64_digits() {
        let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let read = |text: &str| Sha256::from_hex(text).map(|sum| sum.to_string());
        assert_eq!(read(sum).as_deref(), Some(sum));
        assert_eq!(read(&sum.to_uppercase()).as_deref(), Some(sum));
        for wrong in ["", &sum[1..], &format!("{sum}0"), &sum.replace('b', "g")] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        let not_ascii = "é".repeat(32);
        assert_eq!(read(&not_ascii), None);
    }
}
