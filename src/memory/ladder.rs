//! The ladder of ways to read, best first: io_uring with registered memory and files, plain io_uring, `pread` past the
//! page cache, `pread` through it. The first that the kernel, the file system and the limits of the process permit is
//! taken, and the reason of each step down is kept for the log, the memory view and the metrics. A bench takes the rung
//! that it names, or none.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::arena::{Arena, Span};
use super::block_reader::{
    BlockRead, BlockReader, Buffer, FileIdentity, Limits, MAX_BLOCK_BYTES, direct_alignment,
    logical_block_bytes, open_file,
};
use super::files::{FilePlace, PlacedFile};
use super::io_thread::ReadError;
use super::io_uring::IoUringReader;
use super::pread::{PreadReader, read_at};

/// Memory is registered in pieces of this length, each when it is first read into, so it is small beside what a drive reads
/// in a second; and longer where the pieces would be more than the kernel takes.
const REGISTERED_BYTES: usize = 64 << 20;
/// 1024 before Linux 5.13, 16384 since, of up to a GiB each.
const REGISTERED_PIECES_MAX: usize = 1 << 10;
const REGISTERED_BYTES_MAX: usize = 1 << 30;

/// How what is to be read is cut into requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requests {
    /// Of the longest: a multiple of `MAX_BLOCK_BYTES`.
    pub bytes_max: usize,
    /// So many are in flight at once; on a `pread` rung no more than it has threads.
    pub in_flight_max: u32,
}

impl Requests {
    /// What weights are read with. Disks reach their rate with a few requests of a megabyte; so many more are in flight
    /// that the queue does not run dry between the I/O thread's turns.
    pub const OF_WEIGHTS: Requests = Requests {
        bytes_max: 1 << 20,
        in_flight_max: 32,
    };

    /// Of files that may lie on different drives.
    fn limits(self, files: &[FilePlace], arena: &Arena) -> Limits {
        let blocks = files.iter().map(|file| logical_block_bytes(&file.path));
        let pieces = arena.bytes_total().div_ceil(REGISTERED_BYTES);
        let longer = pieces.div_ceil(REGISTERED_PIECES_MAX).max(1);
        Limits {
            block_bytes: blocks.max().unwrap_or(MAX_BLOCK_BYTES),
            in_flight_max: self.in_flight_max,
            request_bytes_max: self.bytes_max,
            border_bytes: (REGISTERED_BYTES * longer).min(REGISTERED_BYTES_MAX),
        }
    }
}

/// The way to read that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderChoice {
    /// The best that works.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// `pread`, although io_uring may work.
    Pread,
}

/// The way to read that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    IoUringRegistered,
    /// Some of the memory was registered, then no more: where `IoUringRegistered` was taken, and its limit was met.
    IoUringPartlyRegistered,
    IoUring,
    PreadDirect,
    PreadBuffered,
}

impl Rung {
    /// The value of the label `reader` in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Rung::IoUringRegistered => "io_uring_registered",
            Rung::IoUringPartlyRegistered => "io_uring_partly_registered",
            Rung::IoUring => "io_uring",
            Rung::PreadDirect => "pread_direct",
            Rung::PreadBuffered => "pread_buffered",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Opens all files in one way, and says which they are.
fn open_all(
    places: &[FilePlace],
    open: impl Fn(&Path) -> io::Result<File>,
) -> Result<(Vec<File>, Vec<PlacedFile>), ReadError> {
    let mut files = Vec::with_capacity(places.len());
    let mut placed = Vec::with_capacity(places.len());
    for FilePlace { path, base } in places {
        let open_error = |source| ReadError::Open {
            file: path.clone(),
            source,
        };
        let file = open(path).map_err(open_error)?;
        let identity = FileIdentity::of(path, &file).map_err(open_error)?;
        files.push(file);
        placed.push(PlacedFile {
            identity,
            base: *base,
        });
    }
    Ok((files, placed))
}

/// Walks down the ladder. All files are read in the same way: past the page cache if all of them can be.
pub(super) fn open(
    places: &[FilePlace],
    arena: &Arena,
    choice: ReaderChoice,
) -> Result<(Box<dyn BlockReader>, Rung, String), ReadError> {
    let thread_error = |source| ReadError::Thread { source };
    let limits = Requests::OF_WEIGHTS.limits(places, arena);
    let (buffered, placed) = open_all(places, |path| open_file(path, false))?;
    let direct: Result<Vec<File>, String> = places
        .iter()
        .map(|place| open_direct(&place.path))
        .collect();
    let (files, refused) = match direct {
        Ok(direct) => {
            drop(buffered);
            (direct, None)
        }
        Err(reason) => (
            buffered,
            Some(format!("direct reads are refused: {reason}")),
        ),
    };
    let through_cache = refused.is_some();
    let mut reasons: Vec<String> = refused.into_iter().collect();

    // io_uring through the page cache gains nothing over `pread`: it is taken only when asked for by name.
    let try_io_uring = match choice {
        ReaderChoice::Auto => !through_cache,
        ReaderChoice::IoUring => true,
        ReaderChoice::Pread => {
            reasons.push("pread was asked for".to_owned());
            false
        }
    };
    if try_io_uring {
        let for_ring = files.iter().zip(places).map(|(file, place)| {
            file.try_clone().map_err(|source| ReadError::Open {
                file: place.path.clone(),
                source,
            })
        });
        let for_ring: Vec<File> = for_ring.collect::<Result<_, _>>()?;
        match IoUringReader::new(for_ring, placed.clone(), limits, through_cache) {
            Ok(mut ring) => {
                let rung = match ring.register(arena) {
                    Ok(()) => Rung::IoUringRegistered,
                    Err(reason) => {
                        reasons.push(reason);
                        Rung::IoUring
                    }
                };
                return Ok((Box::new(ring), rung, in_words(&reasons)));
            }
            Err(source) if choice == ReaderChoice::IoUring => {
                return Err(ReadError::IoUringRefused { source });
            }
            Err(error) => reasons.push(format!("io_uring is refused: {error}")),
        }
    }
    let rung = if through_cache {
        Rung::PreadBuffered
    } else {
        Rung::PreadDirect
    };
    let reader = PreadReader::new(files, placed, limits, through_cache).map_err(thread_error)?;
    Ok((Box::new(reader), rung, in_words(&reasons)))
}

/// This rung and no other, past the page cache unless it is `PreadBuffered`.
pub(super) fn open_rung(
    places: &[FilePlace],
    arena: &Arena,
    rung: Rung,
    requests: Requests,
) -> Result<Box<dyn BlockReader>, ReadError> {
    open_with_limits(places, arena, rung, requests.limits(places, arena))
}

pub(super) fn open_with_limits(
    places: &[FilePlace],
    arena: &Arena,
    rung: Rung,
    limits: Limits,
) -> Result<Box<dyn BlockReader>, ReadError> {
    let buffered = rung == Rung::PreadBuffered;
    let (files, placed) = open_all(places, |path| match buffered {
        true => open_file(path, false),
        false => open_direct(path)
            .map_err(|reason| io::Error::other(format!("direct reads are refused: {reason}"))),
    })?;
    if matches!(rung, Rung::PreadDirect | Rung::PreadBuffered) {
        return match PreadReader::new(files, placed, limits, buffered) {
            Ok(reader) => Ok(Box::new(reader)),
            Err(source) => Err(ReadError::Thread { source }),
        };
    }
    let refused = |source| ReadError::IoUringRefused { source };
    let mut ring = IoUringReader::new(files, placed, limits, buffered).map_err(refused)?;
    if rung != Rung::IoUring {
        ring.register(arena)
            .map_err(|reason| refused(io::Error::other(reason)))?;
    }
    Ok(Box::new(ring))
}

fn in_words(reasons: &[String]) -> String {
    if reasons.is_empty() {
        "the best there is".to_owned()
    } else {
        reasons.join("; ")
    }
}

/// Opens the file for reads past the page cache and tries one: some file systems refuse the flag at open, others the
/// first read. The error says why not, in words.
fn open_direct(path: &Path) -> Result<File, String> {
    if let Some(bytes) = direct_alignment(path).filter(|&bytes| bytes > MAX_BLOCK_BYTES) {
        return Err(format!("the file system wants blocks of {bytes} bytes"));
    }
    let file = open_file(path, true).map_err(|error| error.to_string())?;
    try_read(&file).map_err(|error| error.to_string())?;
    Ok(file)
}

/// Reads the first block of a file opened for direct reads.
fn try_read(file: &File) -> io::Result<()> {
    let bytes = MAX_BLOCK_BYTES as usize;
    let arena = Arena::new("trial", bytes).map_err(io::Error::other)?;
    let read = BlockRead {
        slot: 0,
        file: 0,
        file_offset: 0,
        buffer: Buffer::new(Arc::new(arena), Span { offset: 0, bytes }),
    };
    loop {
        match read_at(file, &read) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(drop),
        }
    }
}
