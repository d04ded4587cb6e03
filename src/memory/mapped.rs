//! A model's files mapped into memory: weights that rest in the page cache instead of in an arena.
//!
//! A file that shrinks while it is mapped, or a disk that fails, turns a plain load into a SIGBUS. No code can go on
//! from there (the load has no value), so the handler says which file it was, in one line, and ends the process. Any
//! other SIGBUS keeps its meaning.

#![expect(
    unsafe_code,
    reason = "maps files and installs a signal handler, which finds the mapping in statics"
)]

use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::arena::MemoryError;
use super::block_reader::{FileIdentity, open_file};
use super::files::{FilePlace, PlacedFile, check_places, file_at};

/// Mappings at once: one for each file of a split model and then some.
const MAPPINGS_MAX: usize = 512;

/// The exit code of a process whose mapped file failed: `EX_IOERR` of sysexits.h.
const EXIT_CODE: i32 = 74;

/// The files of a model, readable as bytes.
pub struct MappedFiles {
    files: Vec<PlacedFile>,
    /// Of each file.
    maps: Vec<MappedFile>,
}

impl MappedFiles {
    /// Maps each file as a whole. An empty one cannot be mapped.
    pub fn map(places: &[FilePlace]) -> Result<MappedFiles, MemoryError> {
        let mut files = Vec::with_capacity(places.len());
        let mut maps = Vec::with_capacity(places.len());
        for FilePlace { path, base } in places {
            let (map, identity) = MappedFile::map(path)?;
            files.push(PlacedFile {
                identity,
                base: *base,
            });
            maps.push(map);
        }
        check_places(&files, 1).map_err(|error| MemoryError::MapFile {
            file: places
                .first()
                .map(|place| place.path.clone())
                .unwrap_or_default(),
            source: std::io::Error::other(error),
        })?;
        Ok(MappedFiles { files, maps })
    }

    /// The files as they were when they were mapped.
    pub fn files(&self) -> &[PlacedFile] {
        &self.files
    }

    /// What begins at this offset among all files, and lies in one of them.
    ///
    /// # Panics
    /// When the file has less.
    pub fn bytes(&self, file_offset: u64, bytes: u64) -> &[u8] {
        let file = file_at(&self.files, file_offset);
        let start = (file_offset - self.files[file].base) as usize;
        &self.maps[file].bytes()[start..start + bytes as usize]
    }
}

/// A file, readable as bytes. Its pages come in when they are touched.
struct MappedFile {
    map: memmap2::Mmap,
    slot: &'static Slot,
}

impl MappedFile {
    /// Maps the whole file, and says which it is.
    fn map(path: &Path) -> Result<(MappedFile, FileIdentity), MemoryError> {
        let error = |source| MemoryError::MapFile {
            file: path.to_owned(),
            source,
        };
        install_handler().map_err(error)?;
        let file = open_file(path, false).map_err(error)?;
        let identity = FileIdentity::of(path, &file).map_err(error)?;
        if identity.bytes == 0 {
            return Err(error(io::Error::other("the file is empty")));
        }
        // SAFETY: the map is private to this value and never written. That no other process changes the file cannot be
        // had from the kernel: bytes of weights may then be any bytes, which no code relies on, and missing ones end
        // the process in the handler below.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(error)?;
        // MADV_HUGEPAGE: where the file system has large folios, what is now read ahead comes in them, and a step through
        // the weights misses fewer translations. What is already cached in small pages stays so.
        if let Err(refusal) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!("{}: no huge pages: {refusal}", path.display());
        }
        let message = format!(
            "strata: {} shrank, or could not be read, while it was mapped; restart with the complete file, or set a \
             smaller --host-memory to copy instead\n",
            path.display()
        );
        let slot = claim_slot(map.as_ptr().addr(), map.len(), message)
            .ok_or_else(|| error(io::Error::other("too many mapped files")))?;
        Ok((MappedFile { map, slot }, identity))
    }

    fn bytes(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        self.slot.end.store(0, Ordering::Release);
        self.slot.start.store(FREE, Ordering::Release);
    }
}

/// What the handler knows of a mapping. `end` is 0 while the slot is free or being filled, so no address lies in it.
struct Slot {
    /// `FREE`, `CLAIMED`, or the first address.
    start: AtomicUsize,
    end: AtomicUsize,
    message: AtomicPtr<u8>,
    message_bytes: AtomicUsize,
}

/// Above every address, so that no fault seems to lie in a slot without a mapping, whatever `end` was read before.
const FREE: usize = usize::MAX;
const CLAIMED: usize = usize::MAX - 1;

static SLOTS: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        message: AtomicPtr::new(std::ptr::null_mut()),
        message_bytes: AtomicUsize::new(0),
    }
}; MAPPINGS_MAX];

fn claim_slot(start: usize, bytes: usize, message: String) -> Option<&'static Slot> {
    let slot = SLOTS.iter().find(|slot| {
        slot.start
            .compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })?;
    // Left allocated for the life of the process, a line per mapped file: a handler that runs on another thread while
    // the mapping goes away may still be reading it.
    let message: &'static mut [u8] = message.into_bytes().leak();
    slot.message_bytes.store(message.len(), Ordering::Relaxed);
    slot.message.store(message.as_mut_ptr(), Ordering::Relaxed);
    slot.start.store(start, Ordering::Relaxed);
    slot.end.store(start + bytes, Ordering::Release);
    Some(slot)
}

/// The action on SIGBUS before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            // SAFETY: sigaction is a C struct of integers and a pointer-sized handler, for which all zeros is a valid
            // value (SIG_DFL, no flags, an empty mask); both are written by the kernel or here before they are read.
            let (mut action, mut previous): (libc::sigaction, libc::sigaction) =
                unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
            action.sa_sigaction = handler as usize;
            // On the alternate stack, which std gives every thread.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: reads the action in force into a local; the signal is a valid one.
            let read =
                unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) };
            if read != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
            }
            // Before ours is in force: the handler must find it.
            let _ = PREVIOUS.set(previous);
            // SAFETY: the action is fully initialised, and its handler has the signature that SA_SIGINFO asks for and calls
            // async-signal-safe functions only.
            let set =
                unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
            if set != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
            }
            Ok(())
        })
        .map_err(io::Error::from_raw_os_error)
}

/// Runs on the thread that faulted, in the middle of any code: only atomics, `write`, `_exit`, `sigaction`, `raise`.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo that is valid during the handler; for SIGBUS from a fault its
    // address field is set. From `kill` the same bytes hold the sender, which lies in no mapping: si_code tells.
    let (address, from_fault) = unsafe { ((*info).si_addr().addr(), (*info).si_code > 0) };
    for slot in &SLOTS {
        let end = slot.end.load(Ordering::Acquire);
        if from_fault && address < end && address >= slot.start.load(Ordering::Relaxed) {
            let message = slot.message.load(Ordering::Relaxed);
            let bytes = slot.message_bytes.load(Ordering::Relaxed);
            // SAFETY: `end` is stored after the other three fields, with release, and loaded with acquire, so pointer and
            // length are those of one leaked message, which nobody writes or frees. Both calls are async-signal-safe.
            unsafe {
                libc::write(libc::STDERR_FILENO, message.cast(), bytes);
                libc::_exit(EXIT_CODE);
            }
        }
    }
    // Not ours. A fault happens again on return and meets the former action: std's, which tells a stack overflow. A signal
    // that was sent does not come again by itself, and std's handler would swallow it: it gets the default action.
    // SAFETY: all zeros is SIG_DFL without flags; `previous` is the action that the kernel gave. Both calls are
    // async-signal-safe.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        let previous = PREVIOUS.get().filter(|_| from_fault);
        libc::sigaction(signal, previous.unwrap_or(&default), std::ptr::null_mut());
        if !from_fault {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    /// Names what a child process of this test binary is to do.
    const CHILD: &str = "STRATA_TEST_BUS_ERROR";

    #[test]
    fn a_mapped_file_reads_as_its_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"weights").unwrap();
        let map = |path: &Path| MappedFiles::map(&FilePlace::alone(path));
        assert_eq!(map(file.path()).unwrap().bytes(2, 3), b"igh");
        std::fs::write(file.path(), b"").unwrap();
        for path in [file.path(), Path::new("/none"), Path::new("/")] {
            let Err(error) = map(path) else {
                panic!("{} is mapped", path.display());
            };
            assert!(
                error.to_string().contains(path.to_str().unwrap()),
                "{error}"
            );
        }
    }

    #[test]
    fn several_files_read_as_one() {
        let directory = tempfile::tempdir().unwrap();
        let places = [(0, "one"), (16, "other"), (32, "third")].map(|(base, text)| {
            let path = directory.path().join(text);
            std::fs::write(&path, text).unwrap();
            FilePlace { path, base }
        });
        let mapped = MappedFiles::map(&places).unwrap();
        for (offset, bytes, text) in [
            (0, 3, "one"),
            (1, 2, "ne"),
            (16, 5, "other"),
            (18, 2, "he"),
            (34, 3, "ird"),
        ] {
            assert_eq!(mapped.bytes(offset, bytes), text.as_bytes());
        }
        let sizes = mapped.files().iter().map(|file| file.identity.bytes);
        assert!(sizes.eq([3, 5, 5]));
    }

    #[test]
    fn a_slot_is_free_again_when_its_mapping_goes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"weights").unwrap();
        for _ in 0..3 * MAPPINGS_MAX {
            MappedFile::map(file.path()).unwrap();
        }
    }

    /// Runs the test `child` below in a process of its own.
    fn run_child(task: &str) -> Output {
        let name = format!("{}::child", module_path!().split_once("::").unwrap().1);
        Command::new(std::env::current_exe().unwrap())
            .args([name.as_str(), "--exact", "--nocapture"])
            .env(CHILD, task)
            .output()
            .unwrap()
    }

    #[test]
    fn a_file_that_shrinks_ends_the_process_with_its_name() {
        let output = run_child("shrink");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_CODE), "{text}");
        let told = text
            .lines()
            .find(|line| line.starts_with("strata: "))
            .unwrap_or_else(|| panic!("{text}"));
        assert!(
            told.contains("shrinking.gguf") && told.contains("--host-memory"),
            "{told}"
        );
    }

    #[test]
    fn another_bus_error_keeps_its_meaning() {
        for task in ["kill", "other-mapping"] {
            let output = run_child(task);
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{task}: {text}");
            assert!(!text.contains("strata: "), "{text}");
        }
    }

    /// Does nothing unless it runs in the child process of one of the tests above.
    #[test]
    fn child() {
        let Ok(task) = std::env::var(CHILD) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shrinking.gguf");
        std::fs::write(&path, vec![1; 3 << 20]).unwrap();
        let (mapped, _) = MappedFile::map(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // SAFETY: never written; the bytes are only looked at.
        let other = unsafe { memmap2::Mmap::map(&File::open(&path).unwrap()) }.unwrap();
        file.set_len(4096).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mapped.bytes()[4095], 1);
        match task.as_str() {
            "shrink" => assert_ne!(std::hint::black_box(mapped.bytes())[2 << 20], 1),
            "other-mapping" => assert_ne!(std::hint::black_box(&other)[2 << 20], 1),
            // SAFETY: sends a signal to this process, which exists for it.
            "kill" => assert_ne!(unsafe { libc::kill(libc::getpid(), libc::SIGBUS) }, 0),
            other => panic!("{other}"),
        }
    }
}
