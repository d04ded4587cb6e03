//! Holds what is read against what was read first, so that a wrong bit that the drive, the bus or the memory made is an
//! error and never a token.
//!
//! Groups are verified on a thread between the I/O thread, which goes on issuing meanwhile, and everything that uses
//! them: neither a copy to a device nor a lease begins before. The engine thread verifies embedding rows itself: it waits
//! for them anyway. What differs is read again a few times; then the read has failed.

use super::checksums::{ChecksumTable, RunningChecksum, SeenBy, Stretch, Verdict, checksum};
use super::shared::Shared;
use super::side_file::{LAST_WRITES_PATIENCE, SideFile, SideFileWriter};
use super::verify_share::{StepCost, VerifyShare};
use crate::memory::{
    AbortOnPanic, FileIdentity, PlacedFile, ReadError, Region, RegionRead, file_at, open_expected,
};
use crate::metrics::Metrics;
use crate::placement::Group;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a read whose bytes differ is tried again: a bit that flipped on the way is right the next time.
pub(super) const CHECKSUM_RETRIES_MAX: u32 = 3;

/// More reads than are ever outstanding, so that the I/O thread does not wait here.
pub(super) const QUEUED_READS_MAX: usize = 1024;

/// Of the choice of what is verified. Which reads it falls on is of no interest, only that they differ from step to step.
const CHOICE_SEED: u64 = 1;

/// What a file is compared with its checksums in pieces of.
const COMPARED_BYTES: usize = 1 << 20;

/// What reads are held against, and how many of them.
pub(super) struct ReadChecks {
    setting: VerifyShare,
    /// The files of the model as they were when they were opened.
    files: Vec<PlacedFile>,
    state: Mutex<State>,
    /// One for each file, or none.
    side_files: Vec<Mutex<SideFile>>,
    /// Where there are any.
    writer: Option<SideFileWriter>,
    metrics: Metrics,
    verified_groups: AtomicU64,
    /// Processor time of the thread that verifies groups, since the last step began or ended.
    verifying_nanoseconds: AtomicU64,
    /// That this process may use. Asked for once: a pinned thread has one.
    processors: u32,
}

struct State {
    /// Of later reads: above 0, at most 1.
    share: f64,
    /// Of each file, at its own offsets.
    tables: Vec<ChecksumTable>,
    /// Chooses what is verified: reads taken in turn could be those of the same groups in each step.
    random: ChaCha8Rng,
}

/// A stretch whose bytes are not those of the first read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mismatch {
    file: usize,
    /// Within this file.
    stretch: Stretch,
    seen_by: SeenBy,
}

/// What a comparison of a whole file came to.
#[derive(Debug)]
pub(super) enum Compared {
    Agrees,
    /// At this byte.
    Differs(u64),
    /// There is nothing to compare with.
    Nothing,
    Unreadable(io::Error),
    Cancelled,
}

impl ReadChecks {
    /// `directory` is where checksums are kept for later runs, by a thread. Where the system gives none they are not kept.
    pub(super) fn new(
        setting: VerifyShare,
        directory: Option<&Path>,
        files: &[PlacedFile],
        metrics: &Metrics,
    ) -> ReadChecks {
        let side_file = |file: &PlacedFile| Some(SideFile::new(directory?, &file.identity));
        let side_files: Vec<SideFile> = files.iter().filter_map(side_file).collect();
        let mut tables: Vec<ChecksumTable> = side_files.iter().map(SideFile::read).collect();
        tables.resize_with(files.len(), ChecksumTable::default);
        metrics.verify_share.set(setting.at_first());
        let writer = match side_files.len() {
            0 => None,
            files => SideFileWriter::start(files)
                .inspect_err(|error| {
                    tracing::warn!(
                        "checksums are not kept for later runs: no thread writes them: {error}"
                    );
                })
                .ok(),
        };
        ReadChecks {
            setting,
            files: files.to_vec(),
            state: Mutex::new(State {
                share: setting.at_first(),
                tables,
                random: ChaCha8Rng::seed_from_u64(CHOICE_SEED),
            }),
            side_files: side_files.into_iter().map(Mutex::new).collect(),
            writer,
            metrics: metrics.clone(),
            verified_groups: AtomicU64::new(0),
            verifying_nanoseconds: AtomicU64::new(0),
            processors: available_processors(),
        }
    }

    /// Of later reads, that are verified.
    pub(super) fn share(&self) -> f64 {
        self.lock().share
    }

    /// A step begins: what was verified before is no part of it.
    pub(super) fn step_begins(&self) {
        self.take_verifying();
    }

    /// Processor time since the last call.
    fn take_verifying(&self) -> Duration {
        let nanoseconds = self.verifying_nanoseconds.swap(0, Ordering::Relaxed);
        let verifying = Duration::from_nanos(nanoseconds);
        let seconds = verifying.as_secs_f64();
        self.metrics.verify_seconds_total.inc_by(seconds);
        verifying
    }

    /// A step has ended, in which computation waited for weights for so long: chooses the share of the next one's reads.
    pub(super) fn step_ended(&self, step: Duration, waited: Duration) {
        let verifying = self.take_verifying();
        let cost = StepCost {
            step,
            waited,
            verifying,
            processors: self.processors,
        };
        let mut state = self.lock();
        state.share = self.setting.after(state.share, cost);
        self.metrics.verify_share.set(state.share);
    }

    pub(super) fn verified_groups(&self) -> u64 {
        self.verified_groups.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the next read is one of the share.
    pub(super) fn is_due(&self) -> bool {
        let mut state = self.lock();
        let share = state.share;
        state.random.random_bool(share)
    }

    /// Verifies what was read, and says how many bytes of it. Where that is not due, only what this run reads for the first
    /// time is looked at: it is recorded, or held against what an earlier run recorded.
    pub(super) fn check<'b>(
        &self,
        read: impl Iterator<Item = (Stretch, &'b [u8])>,
        is_due: bool,
    ) -> Result<u64, Mismatch> {
        let mut verified = 0;
        for (stretch, bytes) in read {
            // A stretch lies in one file.
            let file = file_at(&self.files, stretch.offset);
            let stretch = Stretch {
                offset: stretch.offset - self.files[file].base,
                ..stretch
            };
            if !is_due && self.lock().tables[file].was_seen_by_this_run(stretch) {
                continue;
            }
            let sum = checksum(bytes);
            let verdict = self.lock().tables[file].judge(stretch, sum);
            match verdict {
                Verdict::First => {}
                Verdict::Agrees => verified += stretch.bytes,
                Verdict::Differs(seen_by) => {
                    return Err(Mismatch {
                        file,
                        stretch,
                        seen_by,
                    });
                }
            }
        }
        self.metrics.reads_verified_bytes_total.inc_by(verified);
        Ok(verified)
    }

    fn check_group(&self, group: &Group, region: &Region, is_due: bool) -> Result<(), Mismatch> {
        let bytes = region.bytes();
        let parts = group.parts.iter().map(|part| {
            let stretch = Stretch {
                offset: part.file_offset,
                bytes: part.bytes,
            };
            let start = part.entry_offset as usize;
            (stretch, &bytes[start..start + part.bytes as usize])
        });
        let before = thread_time();
        let checked = self.check(parts, is_due);
        let nanoseconds = thread_time().saturating_sub(before).as_nanos() as u64;
        self.verifying_nanoseconds
            .fetch_add(nanoseconds, Ordering::Relaxed);
        if checked? > 0 {
            self.verified_groups.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A read is tried again because its bytes differ.
    pub(super) fn count_retry(&self, mismatch: Mismatch) {
        self.metrics
            .read_retries_total
            .with_label_values(&["checksum"])
            .inc();
        tracing::warn!(
            "read {} at byte {}: other bytes than at first; again",
            self.files[mismatch.file].identity.path.display(),
            mismatch.stretch.offset
        );
    }

    /// What a read has failed with after so many tries.
    pub(super) fn error(&self, mismatch: Mismatch, tries: u32) -> ReadError {
        if mismatch.seen_by == SeenBy::ThisRun {
            self.lock().tables[mismatch.file].dispute(mismatch.stretch);
        }
        let file = self.files[mismatch.file].identity.path.clone();
        let offset = mismatch.stretch.offset;
        match (mismatch.seen_by, self.side_files.get(mismatch.file)) {
            (SeenBy::EarlierRun, Some(side_file)) => ReadError::OtherBytesThanBefore {
                file,
                offset,
                tries,
                checksums: lock(side_file).path().to_owned(),
            },
            _ => ReadError::OtherBytes {
                file,
                offset,
                tries,
            },
        }
    }

    /// Has what is not written yet written, for a later run. With `if_due`, not if that was done a short time ago.
    pub(super) fn save(&self, if_due: bool) {
        let Some(writer) = &self.writer else { return };
        for (index, side_file) in self.side_files.iter().enumerate() {
            let mut side_file = lock(side_file);
            if writer.is_given_up(index) || (if_due && !side_file.is_due()) {
                continue;
            }
            let mut state = self.lock();
            if !state.tables[index].is_unsaved() {
                continue;
            }
            let bytes = side_file.encode(&mut state.tables[index]);
            // What reads add from here on is unsaved again.
            drop(state);
            writer.write(index, side_file.path(), bytes);
        }
    }

    /// The same at the end of a run, which waits for the disk, and not for ever.
    pub(super) fn save_last(&self) {
        self.save(false);
        if let Some(writer) = &self.writer {
            writer.finish(LAST_WRITES_PATIENCE);
        }
    }

    /// One of the files is this one from now on; `compare` found the same weights in it.
    pub(super) fn set_file(&self, index: usize, file: &FileIdentity) {
        if let Some(side_file) = self.side_files.get(index) {
            lock(side_file).set_file(file);
            self.lock().tables[index].take_over();
        }
    }

    /// Reads from what took the place of one of the files everything whose checksum is known, and compares: what an earlier
    /// run has seen was in a file of the same identity. Takes as long as the drive needs.
    pub(super) fn compare(
        &self,
        index: usize,
        file: &FileIdentity,
        cancelled: &dyn Fn() -> bool,
    ) -> Compared {
        let known = self.lock().tables[index].all();
        if known.is_empty() {
            return Compared::Nothing;
        }
        match differs(file, &known, cancelled) {
            Ok(None) => Compared::Agrees,
            Ok(Some(offset)) => Compared::Differs(offset),
            Err(_) if cancelled() => Compared::Cancelled,
            Err(error) => Compared::Unreadable(error),
        }
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn available_processors() -> u32 {
    let processors = std::thread::available_parallelism();
    processors.map_or(1, |processors| processors.get() as u32)
}

fn lock(side_file: &Mutex<SideFile>) -> MutexGuard<'_, SideFile> {
    side_file.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a file first differs from its checksums. Read through the page cache, and dropped from it.
fn differs(
    file: &FileIdentity,
    known: &[(Stretch, u64)],
    cancelled: &dyn Fn() -> bool,
) -> io::Result<Option<u64>> {
    let opened = open_expected(file, false)?;
    let mut buffer = vec![0; COMPARED_BYTES];
    for &(stretch, sum) in known {
        let mut running = RunningChecksum::default();
        let end = stretch.offset + stretch.bytes;
        let mut offset = stretch.offset;
        while offset < end {
            if cancelled() {
                return Err(io::Error::from(io::ErrorKind::Interrupted));
            }
            let piece = &mut buffer[..(end - offset).min(COMPARED_BYTES as u64) as usize];
            opened.read_exact_at(piece, offset)?;
            running.add(piece);
            // Advice, which may be refused without harm.
            let length = std::num::NonZeroU64::new(piece.len() as u64);
            let _ = rustix::fs::fadvise(&opened, offset, length, rustix::fs::Advice::DontNeed);
            offset += piece.len() as u64;
        }
        if running.finish() != sum {
            return Ok(Some(stretch.offset));
        }
    }
    Ok(None)
}

/// The thread that verifies groups. Dropping it waits for what it was given; the sender has to be gone before.
pub(super) struct Verifier(Option<JoinHandle<()>>);

impl Verifier {
    /// What ends in `reads` is reported to `shared` once it is verified.
    pub(super) fn start(
        reads: Receiver<RegionRead>,
        shared: &Arc<Shared>,
        checks: Arc<ReadChecks>,
    ) -> io::Result<Verifier> {
        // Weak: the thread lives inside what it reports to.
        let shared = Arc::downgrade(shared);
        let thread = std::thread::Builder::new()
            .name("strata-verify".to_owned())
            .spawn(move || verify(&reads, &shared, &checks))?;
        Ok(Verifier(Some(thread)))
    }
}

impl Drop for Verifier {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A thread that panicked has ended the process already.
            drop(thread.join());
        }
    }
}

/// The life of the thread.
fn verify(reads: &Receiver<RegionRead>, shared: &Weak<Shared>, checks: &ReadChecks) {
    let _guard = AbortOnPanic;
    // By ticket: reads that differed so far, of those that are being tried again.
    let mut tries: HashMap<u64, u32> = HashMap::new();
    for mut done in reads {
        let Some(shared) = shared.upgrade() else {
            continue;
        };
        let group = shared.arrived(&done);
        let before = tries.remove(&done.ticket);
        if let (Some(group), Ok(_)) = (group, &done.result) {
            let is_due = before.is_some() || checks.is_due();
            let checked = checks.check_group(shared.group(group), &done.region, is_due);
            if let Err(mismatch) = checked {
                let (ticket, before) = (done.ticket, before.unwrap_or(0));
                let again = match before {
                    CHECKSUM_RETRIES_MAX.. => Err(done),
                    _ => shared.read_again(done, group),
                };
                match again {
                    Ok(()) => {
                        checks.count_retry(mismatch);
                        tries.insert(ticket, before + 1);
                        continue;
                    }
                    Err(back) => done = back,
                }
                done.result = Err(match before {
                    CHECKSUM_RETRIES_MAX.. => checks.error(mismatch, before + 1),
                    // Nobody wants it any more: what it would have been says nothing of the file.
                    _ => ReadError::GivenUp,
                });
            }
        }
        shared.read_done(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(identity: &FileIdentity) -> [PlacedFile; 1] {
        [PlacedFile {
            identity: identity.clone(),
            base: 0,
        }]
    }

    fn checks(share: f64, file: &Path) -> (ReadChecks, FileIdentity, Metrics) {
        let (metrics, identity) = (Metrics::new(), FileIdentity::at(file).unwrap());
        let setting = VerifyShare::Fixed(share);
        let checks = ReadChecks::new(setting, None, &alone(&identity), &metrics);
        (checks, identity, metrics)
    }

    fn stretch(offset: usize, bytes: usize) -> Stretch {
        Stretch {
            offset: offset as u64,
            bytes: bytes as u64,
        }
    }

    #[test]
    fn a_share_is_chosen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (share, at_least, at_most) in [(1.0, 4000, 4000), (0.5, 1800, 2200), (0.25, 800, 1200)]
        {
            let (checks, ..) = checks(share, file.path());
            let due = (0..4000).filter(|_| checks.is_due()).count();
            assert!((at_least..=at_most).contains(&due), "{share}: {due}");
        }
    }

    /// A step has as many reads as the one before, so a choice in turn would leave some groups out for ever.
    #[test]
    fn every_read_of_a_step_has_its_turn() {
        const STEPS: u32 = 64;
        let file = tempfile::NamedTempFile::new().unwrap();
        let (checks, ..) = checks(0.5, file.path());
        let mut due = [0; 4];
        for _ in 0..STEPS {
            for times in &mut due {
                *times += u32::from(checks.is_due());
            }
        }
        assert!(
            due.iter().all(|times| (1..STEPS).contains(times)),
            "{due:?}"
        );
    }

    #[test]
    fn later_reads_are_held_against_the_first() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (checks, _, metrics) = checks(0.5, file.path());
        let check = |bytes: &[u8], is_due| {
            let read = [(stretch(0, 4), &bytes[..4]), (stretch(4, 4), &bytes[4..])];
            checks
                .check(read.into_iter(), is_due)
                .map_err(|m| m.stretch)
        };
        // The first read is recorded whether or not it is one of the share.
        assert_eq!(check(b"abcdefgh", false), Ok(0));
        assert_eq!(check(b"abcdefgh", true), Ok(8));
        assert_eq!(check(b"abcdefgx", true), Err(stretch(4, 4)));
        assert_eq!(check(b"abcdefgx", false), Ok(0));
        assert_eq!(metrics.reads_verified_bytes_total.get(), 8);
    }

    #[test]
    fn what_an_earlier_run_has_seen_is_held_against_first_reads_and_other_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, b"abcdefgh").unwrap();
        let (identity, metrics) = (FileIdentity::at(&path).unwrap(), Metrics::new());
        let kept = directory.path().join("checksums");
        // No read is one of the share.
        let run = || {
            ReadChecks::new(
                VerifyShare::Fixed(0.0),
                Some(kept.as_path()),
                &alone(&identity),
                &metrics,
            )
        };
        let check = |checks: &ReadChecks, bytes: &[u8]| {
            let read = [(stretch(0, 4), &bytes[..4]), (stretch(4, 4), &bytes[4..])];
            let checked = checks.check(read.into_iter(), false);
            checked.map_err(|m| (m.stretch, m.seen_by))
        };
        let first = run();
        assert_eq!(check(&first, b"abcdefgh"), Ok(0));
        first.save_last();

        let second = run();
        let other = Err((stretch(4, 4), SeenBy::EarlierRun));
        assert_eq!(check(&second, b"abcdefgx"), other);
        // Its first half was seen by then.
        assert_eq!(check(&second, b"abcdefgh"), Ok(4));
        assert_eq!(check(&second, b"abcdefgx"), Ok(0));

        let third = run();
        std::fs::write(&path, b"abcdefgx").unwrap();
        let now = FileIdentity::at(&path).unwrap();
        let compared = third.compare(0, &now, &|| false);
        assert!(matches!(compared, Compared::Differs(4)), "{compared:?}");
        std::fs::write(&path, b"abcdefgh").unwrap();
        let now = FileIdentity::at(&path).unwrap();
        let compared = third.compare(0, &now, &|| false);
        assert!(matches!(compared, Compared::Agrees), "{compared:?}");
        // What was known of the former is known of this one, in later runs too.
        third.set_file(0, &now);
        third.save_last();
        let fourth = ReadChecks::new(
            VerifyShare::Fixed(0.0),
            Some(kept.as_path()),
            &alone(&now),
            &metrics,
        );
        assert_eq!(check(&fourth, b"abcdefgx"), other);
    }

    /// The thread that writes does not come back from the disk.
    #[test]
    fn saving_holds_up_neither_the_next_step_nor_the_verifier() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let identity = FileIdentity::at(file.path()).unwrap();
        let (setting, metrics) = (VerifyShare::Fixed(1.0), Metrics::new());
        let kept = Some(Path::new("/nowhere"));
        let mut checks = ReadChecks::new(setting, kept, &alone(&identity), &metrics);
        let (_never, answers) = std::sync::mpsc::channel::<()>();
        let replace = move |_: &Path, _: &[u8]| answers.recv().map_err(io::Error::other);
        checks.writer = Some(SideFileWriter::through(1, Box::new(replace)).unwrap());
        for offset in 0..3 {
            let check = |bytes: &[u8]| {
                let read = [(stretch(offset, 4), bytes)];
                checks.check(read.into_iter(), true)
            };
            check(b"abcd").unwrap();
            checks.save(false);
            let mismatch = check(b"abcx").unwrap_err();
            let error = checks.error(mismatch, 1).to_string();
            assert!(error.contains("than at first"), "{error}");
        }
    }

    #[test]
    fn each_file_of_a_model_has_checksums_of_its_own() {
        const BASE: u64 = 1 << 20;
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let files = [(0, "one"), (BASE, "two")].map(|(base, name)| {
            std::fs::write(path(name), b"abcdefgh").unwrap();
            PlacedFile {
                identity: FileIdentity::at(&path(name)).unwrap(),
                base,
            }
        });
        let (kept, metrics) = (path("checksums"), Metrics::new());
        let run = |files: &[PlacedFile]| {
            ReadChecks::new(VerifyShare::Fixed(1.0), Some(&kept), files, &metrics)
        };
        let check = |checks: &ReadChecks, offset: u64, bytes: &[u8]| {
            let read = [(stretch(offset as usize, bytes.len()), bytes)];
            checks.check(read.into_iter(), true)
        };
        let first = run(&files);
        for base in [0, BASE] {
            check(&first, base, b"abcd").unwrap();
            check(&first, base + 4, b"efgh").unwrap();
        }
        first.save_last();
        assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 2);

        // In a later run the error names the file, and the offset in it.
        let second = run(&files);
        let mismatch = check(&second, BASE + 4, b"efgx").unwrap_err();
        let error = second.error(mismatch, 1).to_string();
        let two = format!("read {} at byte 4", path("two").display());
        assert!(error.starts_with(&two), "{error}");
        assert!(error.contains("than in an earlier run"), "{error}");
        check(&second, 4, b"efgh").unwrap();

        // Each is compared with what was read of it.
        std::fs::write(path("two"), b"abcdefgx").unwrap();
        let now = |name: &str| FileIdentity::at(&path(name)).unwrap();
        let compared = second.compare(0, &now("one"), &|| false);
        assert!(matches!(compared, Compared::Agrees), "{compared:?}");
        let compared = second.compare(1, &now("two"), &|| false);
        assert!(matches!(compared, Compared::Differs(4)), "{compared:?}");

        // A file that was changed is recorded anew, and the other is known.
        let [one, mut two] = files;
        two.identity = now("two");
        let third = run(&[one, two]);
        assert_eq!(check(&third, BASE + 4, b"efgx").unwrap(), 0);
        check(&third, 4, b"efgx").unwrap_err();
    }

    #[test]
    fn a_whole_file_is_compared_with_what_was_read_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        let mut bytes: Vec<u8> = (0..3 * COMPARED_BYTES + 77)
            .map(|i| (i % 251) as u8)
            .collect();
        std::fs::write(&path, &bytes).unwrap();
        let (checks, _, _) = checks(1.0, &path);
        let now = || FileIdentity::at(&path).unwrap();
        assert!(matches!(
            checks.compare(0, &now(), &|| false),
            Compared::Nothing
        ));
        for (offset, length) in [
            (0, 10),
            (100, 2 * COMPARED_BYTES + 5),
            (bytes.len() - 77, 77),
        ] {
            let read = [(stretch(offset, length), &bytes[offset..offset + length])];
            checks.check(read.into_iter(), true).unwrap();
        }
        let compared = checks.compare(0, &now(), &|| false);
        assert!(matches!(compared, Compared::Agrees), "{compared:?}");
        let compared = checks.compare(0, &now(), &|| true);
        assert!(matches!(compared, Compared::Cancelled), "{compared:?}");
        // What nobody has read may be anything.
        bytes[50] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let compared = checks.compare(0, &now(), &|| false);
        assert!(matches!(compared, Compared::Agrees), "{compared:?}");
        bytes[100 + 2 * COMPARED_BYTES] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let compared = checks.compare(0, &now(), &|| false);
        assert!(matches!(compared, Compared::Differs(100)), "{compared:?}");
        std::fs::write(&path, &bytes[..1000]).unwrap();
        let compared = checks.compare(0, &now(), &|| false);
        assert!(matches!(compared, Compared::Unreadable(_)), "{compared:?}");
        let other = FileIdentity { inode: 0, ..now() };
        let compared = checks.compare(0, &other, &|| false);
        assert!(matches!(compared, Compared::Unreadable(_)), "{compared:?}");
    }
}
