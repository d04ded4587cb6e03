//! Which bytes the model file gave where: a checksum for each stretch of it that was read, and the form in which they
//! outlive the process. Pure: no file, no clock.
//!
//! A stretch is what is used as one: a part of a group, or a row of the token embedding. Alignment and what lies past the
//! end of the file are in none, so a checksum is that of the weights, however they were read. Another plan cuts other
//! parts; what it does not find here it records anew.

use crate::memory::FileIdentity;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// Bytes of the file that have one checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Stretch {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// XXH3, 64 bits: it tells accidents, and does not stand up to somebody who makes bytes for a checksum.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The same of bytes that come in pieces.
#[derive(Default)]
pub(super) struct RunningChecksum(XxHash3_64);

impl RunningChecksum {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(super) fn finish(self) -> u64 {
        self.0.finish()
    }
}

/// Who has seen the bytes that a checksum is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeenBy {
    /// An earlier run only.
    EarlierRun,
    ThisRun,
}

/// What a checksum says of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// There was none: now there is.
    First,
    Agrees,
    Differs(SeenBy),
}

/// Why a list of checksums is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotUsable {
    /// It is of a file of another size, time or inode.
    OtherFile,
    Damaged(&'static str),
}

/// The checksums of one file. It grows with what is read: by the parts of the plan and, at most, the vocabulary.
#[derive(Debug, Default)]
pub(super) struct ChecksumTable {
    known: HashMap<Stretch, Known>,
    /// Reads of this run gave other bytes than its first one, again and again, and none gave the same. That may have been
    /// the wrong one, so a later run starts afresh with these; this run, which has computed with it, does not.
    disputed: HashSet<Stretch>,
    /// There are checksums that `encode` has not written.
    is_unsaved: bool,
}

/// What is known of a stretch.
#[derive(Clone, Copy, Debug)]
struct Known {
    checksum: u64,
    seen_by: SeenBy,
    /// A later read gave the same.
    is_confirmed: bool,
}

/// The most checksums that are kept for a later run; those of this one come first. 6 MiB.
const SAVED_MAX: usize = 1 << 18;

const MAGIC: u64 = u64::from_le_bytes(*b"stratsum");
const VERSION: u64 = 1;
/// Before the checksums: magic, version, their number, and the file's size, inode and time (seconds, nanoseconds).
const HEADER_WORDS: usize = 7;
/// Offset, bytes, checksum.
const ENTRY_WORDS: usize = 3;
/// No list that `encode` makes is longer.
pub(super) const ENCODED_BYTES_MAX: usize = 8 * (HEADER_WORDS + ENTRY_WORDS * SAVED_MAX + 1);

impl ChecksumTable {
    /// Holds what was read now against what was read first.
    pub(super) fn judge(&mut self, stretch: Stretch, checksum: u64) -> Verdict {
        match self.known.entry(stretch) {
            Entry::Vacant(place) => {
                place.insert(Known {
                    checksum,
                    seen_by: SeenBy::ThisRun,
                    is_confirmed: false,
                });
                self.is_unsaved = true;
                Verdict::First
            }
            Entry::Occupied(mut place) => {
                let known = place.get_mut();
                if known.checksum != checksum {
                    return Verdict::Differs(known.seen_by);
                }
                known.seen_by = SeenBy::ThisRun;
                known.is_confirmed = true;
                self.is_unsaved |= self.disputed.remove(&stretch);
                Verdict::Agrees
            }
        }
    }

    /// Reads of this run gave other bytes, again and again.
    pub(super) fn dispute(&mut self, stretch: Stretch) {
        let known = self.known.get(&stretch);
        if known.is_some_and(|known| !known.is_confirmed) {
            self.is_unsaved |= self.disputed.insert(stretch);
        }
    }

    pub(super) fn was_seen_by_this_run(&self, stretch: Stretch) -> bool {
        let known = self.known.get(&stretch);
        known.is_some_and(|known| known.seen_by == SeenBy::ThisRun)
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn is_unsaved(&self) -> bool {
        self.is_unsaved
    }

    /// The file is another from now on, in which everything was found again: what `encode` has written names the former.
    pub(super) fn take_over(&mut self) {
        self.is_unsaved = true;
    }

    /// Whatever is known, in the order of the file.
    pub(super) fn all(&self) -> Vec<(Stretch, u64)> {
        let known = self.known.iter();
        let mut all: Vec<_> = known
            .map(|(&stretch, known)| (stretch, known.checksum))
            .collect();
        all.sort_unstable();
        all
    }

    /// For a later run: words of 64 bits, little-endian, the last of which is the checksum of the others.
    pub(super) fn encode(&mut self, file: &FileIdentity) -> Vec<u8> {
        let mut kept: Vec<_> = self
            .known
            .iter()
            .filter(|(stretch, _)| !self.disputed.contains(stretch))
            .map(|(&stretch, known)| {
                let is_of_earlier = known.seen_by == SeenBy::EarlierRun;
                (is_of_earlier, stretch, known.checksum)
            })
            .collect();
        kept.sort_unstable();
        kept.truncate(SAVED_MAX);
        kept.sort_unstable_by_key(|&(_, stretch, _)| stretch);
        let mut bytes = Vec::with_capacity(8 * (HEADER_WORDS + ENTRY_WORDS * kept.len() + 1));
        let mut put = |word: u64| bytes.extend_from_slice(&word.to_le_bytes());
        put(MAGIC);
        put(VERSION);
        put(kept.len() as u64);
        identity_words(file).into_iter().for_each(&mut put);
        for (_, stretch, sum) in kept {
            [stretch.offset, stretch.bytes, sum]
                .into_iter()
                .for_each(&mut put);
        }
        let own = checksum(&bytes);
        bytes.extend_from_slice(&own.to_le_bytes());
        self.is_unsaved = false;
        bytes
    }

    /// What an earlier run wrote, if it is of this file. The bytes may be anything.
    pub(super) fn decode(bytes: &[u8], file: &FileIdentity) -> Result<ChecksumTable, NotUsable> {
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
        let (
            &[
                magic,
                version,
                count,
                size,
                inode,
                seconds,
                nanoseconds,
                ref entries @ ..,
                own,
            ],
            [],
        ) = (&words[..], rest)
        else {
            return Err(NotUsable::Damaged("its length is wrong"));
        };
        if magic != MAGIC {
            return Err(NotUsable::Damaged("it is some other file"));
        }
        if version != VERSION {
            return Err(NotUsable::Damaged("its version is another"));
        }
        if own != checksum(&bytes[..bytes.len() - 8]) {
            return Err(NotUsable::Damaged("its own checksum is wrong"));
        }
        if [size, inode, seconds, nanoseconds] != identity_words(file) {
            return Err(NotUsable::OtherFile);
        }
        let (entries, rest) = entries.as_chunks::<ENTRY_WORDS>();
        if !rest.is_empty() || entries.len() as u64 != count || entries.len() > SAVED_MAX {
            return Err(NotUsable::Damaged("its length is wrong"));
        }
        let mut known = HashMap::with_capacity(entries.len());
        let mut last = None;
        for &[offset, bytes, sum] in entries {
            let stretch = Stretch { offset, bytes };
            let end = offset.checked_add(bytes);
            if bytes == 0 || end.is_none_or(|end| end > size) || last >= Some(stretch) {
                return Err(NotUsable::Damaged(
                    "its entries are not in order inside the file",
                ));
            }
            last = Some(stretch);
            let seen = Known {
                checksum: sum,
                seen_by: SeenBy::EarlierRun,
                is_confirmed: true,
            };
            known.insert(stretch, seen);
        }
        Ok(ChecksumTable {
            known,
            ..ChecksumTable::default()
        })
    }
}

/// What tells a file from what it was; not the number of its device, which another start of the machine may change.
fn identity_words(file: &FileIdentity) -> [u64; 4] {
    let (seconds, nanoseconds) = file.modified;
    [
        file.bytes,
        file.inode,
        seconds.cast_unsigned(),
        nanoseconds.cast_unsigned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileIdentity {
        FileIdentity {
            path: "model.gguf".into(),
            bytes: 10_000,
            device: 1,
            inode: 2,
            modified: (-3, 4),
        }
    }

    fn stretch(offset: u64, bytes: u64) -> Stretch {
        Stretch { offset, bytes }
    }

    #[test]
    fn what_was_read_first_is_what_later_reads_must_be() {
        let mut table = ChecksumTable::default();
        assert_eq!(table.judge(stretch(0, 10), 7), Verdict::First);
        assert_eq!(table.judge(stretch(0, 10), 7), Verdict::Agrees);
        assert_eq!(
            table.judge(stretch(0, 10), 8),
            Verdict::Differs(SeenBy::ThisRun)
        );
        // Another plan's part begins there.
        assert_eq!(table.judge(stretch(0, 20), 8), Verdict::First);
        assert_eq!(table.judge(stretch(0, 10), 7), Verdict::Agrees);
    }

    #[test]
    fn a_checksum_in_pieces_is_that_of_the_whole() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i * i % 251) as u8).collect();
        for size in [1, 100, 4096, 99_999] {
            let mut running = RunningChecksum::default();
            bytes.chunks(size).for_each(|piece| running.add(piece));
            assert_eq!(running.finish(), checksum(&bytes), "{size}");
        }
        // Of the specification's reference implementation.
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    }

    #[test]
    fn checksums_outlive_the_run() {
        let mut table = ChecksumTable::default();
        table.judge(stretch(4096, 100), u64::MAX);
        table.judge(stretch(0, 4096), 5);
        table.judge(stretch(0, 10_000), 6);
        assert!(table.is_unsaved());
        let bytes = table.encode(&file());
        assert!(!table.is_unsaved());
        let mut later = ChecksumTable::decode(&bytes, &file()).unwrap();
        assert_eq!(later.len(), 3);
        let all = [
            (stretch(0, 4096), 5),
            (stretch(0, 10_000), 6),
            (stretch(4096, 100), u64::MAX),
        ];
        assert_eq!(later.all(), all);
        assert_eq!(
            later.judge(stretch(0, 4096), 4),
            Verdict::Differs(SeenBy::EarlierRun)
        );
        assert!(!later.was_seen_by_this_run(stretch(0, 4096)));
        assert!(!later.was_seen_by_this_run(stretch(4096, 100)));
        assert_eq!(later.judge(stretch(4096, 100), u64::MAX), Verdict::Agrees);
        assert!(later.was_seen_by_this_run(stretch(4096, 100)));
        assert!(!later.was_seen_by_this_run(stretch(4096, 99)));
        // Another file that agrees in all of it is as well known.
        later.take_over();
        assert!(later.is_unsaved());
        assert_eq!(later.all(), all);
        assert_eq!(
            later.judge(stretch(4096, 100), 0),
            Verdict::Differs(SeenBy::ThisRun)
        );
        // What was not read again is kept.
        let again = ChecksumTable::decode(&later.encode(&file()), &file()).unwrap();
        assert_eq!(again.len(), 3);
    }

    #[test]
    fn a_first_read_that_no_later_one_agreed_with_is_not_handed_on() {
        let mut table = ChecksumTable::default();
        table.judge(stretch(0, 10), 1);
        table.judge(stretch(10, 10), 2);
        let _ = table.encode(&file());
        table.dispute(stretch(0, 10));
        assert!(table.is_unsaved());
        let later = ChecksumTable::decode(&table.encode(&file()), &file()).unwrap();
        assert_eq!(later.all(), [(stretch(10, 10), 2)]);
        // This run goes on refusing what differs from what it has computed with.
        assert_eq!(
            table.judge(stretch(0, 10), 3),
            Verdict::Differs(SeenBy::ThisRun)
        );
        table.dispute(stretch(0, 10));
        assert!(!table.is_unsaved());
        // Until a read gives the same bytes after all.
        assert_eq!(table.judge(stretch(0, 10), 1), Verdict::Agrees);
        assert!(table.is_unsaved());
        let later = ChecksumTable::decode(&table.encode(&file()), &file()).unwrap();
        assert_eq!(later.len(), 2);
    }

    /// A drive that has become bad does not make a run forget what it was.
    #[test]
    fn what_a_later_read_agreed_with_is_handed_on_whatever_comes() {
        let mut table = ChecksumTable::default();
        table.judge(stretch(0, 10), 1);
        table.judge(stretch(0, 10), 1);
        table.dispute(stretch(0, 10));
        let mut later = ChecksumTable::decode(&table.encode(&file()), &file()).unwrap();
        assert_eq!(later.len(), 1);
        assert_eq!(later.judge(stretch(0, 10), 1), Verdict::Agrees);
        later.dispute(stretch(0, 10));
        let last = ChecksumTable::decode(&later.encode(&file()), &file()).unwrap();
        assert_eq!(last.len(), 1);
    }

    #[test]
    fn another_file_is_told_from_this_one() {
        let bytes = ChecksumTable::default().encode(&file());
        let other = |change: fn(&mut FileIdentity)| {
            let mut file = file();
            change(&mut file);
            ChecksumTable::decode(&bytes, &file).map(|table| table.len())
        };
        assert_eq!(other(|_| {}), Ok(0));
        assert_eq!(other(|file| file.device = 9), Ok(0));
        let not = Err(NotUsable::OtherFile);
        assert_eq!(other(|file| file.bytes += 1), not);
        assert_eq!(other(|file| file.inode += 1), not);
        assert_eq!(other(|file| file.modified.0 += 1), not);
        assert_eq!(other(|file| file.modified.1 += 1), not);
    }

    /// Bytes with a right checksum of their own, whatever they say.
    fn sealed(words: &[u64]) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let mut table = ChecksumTable::default();
        table.judge(stretch(0, 4096), 5);
        table.judge(stretch(4096, 4096), 6);
        let good = table.encode(&file());
        for length in 0..good.len() {
            assert!(ChecksumTable::decode(&good[..length], &file()).is_err());
        }
        for bit in 0..8 * good.len() {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(ChecksumTable::decode(&bad, &file()).is_err(), "bit {bit}");
        }
        let header = |count| [MAGIC, VERSION, count, 10_000, 2, (-3i64).cast_unsigned(), 4];
        let of = |count, entries: &[u64]| {
            let bytes = sealed(&[&header(count), entries].concat());
            ChecksumTable::decode(&bytes, &file()).map(|table| table.len())
        };
        assert_eq!(of(1, &[0, 10_000, 1]), Ok(1));
        for (count, entries) in [
            (0, &[0, 10, 1][..]),
            (2, &[0, 10, 1]),
            (u64::MAX, &[0, 10, 1]),
            (1, &[0, 10]),
            // Past the end, nothing, not in order, twice.
            (1, &[1, 10_000, 1]),
            (1, &[u64::MAX, 2, 1]),
            (1, &[0, 0, 1]),
            (2, &[10, 10, 1, 0, 10, 1]),
            (2, &[0, 10, 1, 0, 10, 1]),
        ] {
            assert!(
                matches!(of(count, entries), Err(NotUsable::Damaged(_))),
                "{count} {entries:?}"
            );
        }
    }

    #[test]
    fn a_list_has_a_greatest_length() {
        let mut table = ChecksumTable::default();
        let big = FileIdentity {
            bytes: u64::MAX,
            ..file()
        };
        for offset in 0..SAVED_MAX as u64 {
            table.judge(stretch(offset, 1), 1);
        }
        let bytes = table.encode(&big);
        assert_eq!(bytes.len(), ENCODED_BYTES_MAX);
        let mut later = ChecksumTable::decode(&bytes, &big).unwrap();
        // What this run has seen is kept before what an earlier one had.
        later.judge(stretch(1 << 40, 1), 2);
        let bytes = later.encode(&big);
        assert_eq!(bytes.len(), ENCODED_BYTES_MAX);
        let mut last = ChecksumTable::decode(&bytes, &big).unwrap();
        assert_eq!(last.len(), SAVED_MAX);
        assert_eq!(last.judge(stretch(1 << 40, 1), 2), Verdict::Agrees);
    }
}
