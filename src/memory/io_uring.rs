//! Reads through io_uring, with the arena and the files registered where the kernel permits it.
//!
//! Registration pins the arena's pages once instead of once per read, which on the machines measured is worth a
//! quarter to a half of the read rate. It counts against the limit on locked memory of every user but root. The arena is
//! registered piece by piece: first what is taken of it when the reader starts, which is the ring that every step reads
//! into, so that the limit is spent where it counts; the rest when it is first read into, for pinning makes the kernel
//! give the pages, and loading does not have to wait for all of them before it reads.
//!
//! The I/O thread sleeps in `io_uring_enter`. To end that sleep early, a poll of an eventfd stands in the ring beside
//! the reads; the waker writes to the eventfd.

#![expect(
    unsafe_code,
    reason = "gives the kernel addresses to write to while operations are in flight"
)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ::io_uring::{IoUring, Probe, opcode, squeue, types};

use super::arena::{Arena, Span, memory_lock_limit};
use super::block_reader::{
    BlockRead, BlockReadDone, BlockReader, Buffer, FileIdentity, Limits, Waker, open_expected,
};
use super::files::PlacedFile;

/// The completion of the eventfd's poll; slots are small numbers.
const WAKE: u64 = u64::MAX;

/// Between two tries of a submission that the kernel has no memory for.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Between two looks for completions on kernels that cannot wait for a given time (before 5.11), while there is one.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// What the ring has of a piece of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// Nothing has been read into it.
    Unknown,
    Registered,
    /// It was refused: reads into it are plain ones.
    Refused,
}

pub(super) struct IoUringReader {
    ring: IoUring,
    /// The open file of each place.
    files: Vec<File>,
    placed: Vec<PlacedFile>,
    limits: Limits,
    /// Whether what was read through the page cache is dropped from it: the file refuses direct reads.
    buffered: bool,
    /// Whether the ring has the file, and pieces of the arena.
    registered: bool,
    /// By piece of `limits.border_bytes` of the arena, where the file is registered.
    pieces: Vec<Piece>,
    /// Why a piece was refused after others had been taken.
    refused_later: Arc<OnceLock<String>>,
    /// Whether the kernel can end a wait after a given time.
    waits_for_a_time: bool,
    wake: Arc<File>,
    /// Whether the poll of `wake` is in the ring.
    wake_armed: bool,
    /// By slot: the reads, with their buffers, that the ring knows of.
    reads: Vec<Option<BlockRead>>,
}

impl IoUringReader {
    /// A ring for plain reads of `files`, which are those of `placed`; `register` is the step up.
    pub(super) fn new(
        files: Vec<File>,
        placed: Vec<PlacedFile>,
        limits: Limits,
        buffered: bool,
    ) -> io::Result<IoUringReader> {
        // Every slot and the poll have at most one entry in the submission queue, so it is never full.
        let ring = IoUring::new((limits.in_flight_max + 1).next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        for code in [
            opcode::Read::CODE,
            opcode::ReadFixed::CODE,
            opcode::PollAdd::CODE,
        ] {
            if !probe.is_supported(code) {
                return Err(io::Error::from(io::ErrorKind::Unsupported));
            }
        }
        Ok(IoUringReader {
            waits_for_a_time: ring.params().is_feature_ext_arg(),
            ring,
            files,
            placed,
            limits,
            buffered,
            registered: false,
            pieces: Vec::new(),
            refused_later: Arc::default(),
            wake: Arc::new(event_file()?),
            wake_armed: false,
            reads: (0..limits.in_flight_max).map(|_| None).collect(),
        })
    }

    /// Registers the files, and of the arena, in pieces of `limits.border_bytes`, what is taken from its low end, the first
    /// piece at least; the others follow when they are read into. All later reads must be into this arena. The error says
    /// what was refused; the reader then works as before.
    pub(super) fn register(&mut self, arena: &Arena) -> Result<(), String> {
        let total = arena.bytes_total();
        let count = total.div_ceil(self.limits.border_bytes);
        if count == 0 {
            return Err("the arena is empty".to_owned());
        }
        let submitter = self.ring.submitter();
        // The count of pieces is that of an arena in memory: far below 4 billion.
        let mut pieces = vec![Piece::Unknown; count];
        match submitter.register_buffers_sparse(count as u32) {
            Ok(()) => {
                if let Err(error) = register_piece(&self.ring, arena, &self.limits, 0) {
                    // Best effort, here and below: buffers that stay registered cost memory accounting only.
                    drop(submitter.unregister_buffers());
                    return Err(refusal(total, &error));
                }
                pieces[0] = Piece::Registered;
            }
            // Before 5.19 a ring has all its buffers from the start.
            Err(_) => {
                let vectors: Vec<libc::iovec> = (0..count)
                    .map(|piece| piece_of(arena, &self.limits, piece))
                    .collect();
                // SAFETY: as in `register_piece`.
                let registered = unsafe { submitter.register_buffers(&vectors) };
                registered.map_err(|error| refusal(total, &error))?;
                pieces.fill(Piece::Registered);
            }
        }
        let descriptors: Vec<i32> = self.files.iter().map(AsRawFd::as_raw_fd).collect();
        if let Err(error) = submitter.register_files(&descriptors) {
            drop(submitter.unregister_buffers());
            return Err(format!("registering {} files: {error}", descriptors.len()));
        }
        self.registered = true;
        self.pieces = pieces;
        for piece in 0..arena.low_bytes().div_ceil(self.limits.border_bytes) {
            self.is_registered(arena, piece);
        }
        Ok(())
    }

    /// The piece of the arena that a read is into, where it is registered.
    fn registered_piece(&mut self, buffer: &Buffer) -> Option<u16> {
        let piece = buffer.span().offset / self.limits.border_bytes;
        // As many pieces as fit u16 are 4 TiB of arena.
        self.is_registered(buffer.arena(), piece)
            .then_some(piece as u16)
    }

    /// Whether a piece of the arena is registered: it is now, if it was not asked for before.
    fn is_registered(&mut self, arena: &Arena, piece: usize) -> bool {
        if self.pieces.get(piece) == Some(&Piece::Unknown) {
            self.pieces[piece] = match register_piece(&self.ring, arena, &self.limits, piece) {
                Ok(()) => Piece::Registered,
                Err(error) => {
                    let refusal = refusal(arena.bytes_total(), &error);
                    tracing::warn!("reads into a part of memory are slower: {refusal}");
                    // Nor will the kernel register what follows: this is the first refusal and the last.
                    self.refused_later.get_or_init(|| refusal);
                    let unknown = |piece: &&mut Piece| **piece == Piece::Unknown;
                    for piece in self.pieces.iter_mut().filter(unknown) {
                        *piece = Piece::Refused;
                    }
                    Piece::Refused
                }
            };
        }
        self.pieces.get(piece) == Some(&Piece::Registered)
    }

    fn entry(&mut self, read: &BlockRead) -> squeue::Entry {
        let piece = self.registered_piece(&read.buffer);
        let span = read.buffer.span();
        let pointer = read.buffer.pointer();
        // Requests are at most `limits.request_bytes_max` long (asserted in `submit`), far below 4 GiB.
        let bytes = span.bytes as u32;
        let entry = match piece {
            Some(piece) => {
                opcode::ReadFixed::new(types::Fixed(read.file as u32), pointer, bytes, piece)
                    .offset(read.file_offset)
                    .build()
            }
            None => opcode::Read::new(types::Fd(self.files[read.file].as_raw_fd()), pointer, bytes)
                .offset(read.file_offset)
                .build(),
        };
        entry.user_data(u64::from(read.slot))
    }

    fn arm_wake(&mut self) {
        let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), libc::POLLIN as u32)
            .build()
            .user_data(WAKE);
        // SAFETY: a poll has no buffer, and the eventfd is open for as long as this reader, hence the ring, lives.
        let pushed = unsafe { self.ring.submission().push(&poll) };
        assert!(
            pushed.is_ok(),
            "the submission queue has an entry for the poll"
        );
        self.wake_armed = true;
    }

    /// Takes what has completed. True when the waker was called.
    fn reap(&mut self, ended: &mut Vec<BlockReadDone>) -> bool {
        let mut woken = false;
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.wake_armed = false;
                woken = true;
                // Sets the counter back; an error means that it is 0 already.
                let mut counter = [0u8; 8];
                drop((&*self.wake).read(&mut counter));
                continue;
            }
            let slot = completion.user_data() as usize;
            let Some(read) = self.reads.get_mut(slot).and_then(Option::take) else {
                panic!("completion of slot {slot}, which is not in flight");
            };
            let result = match completion.result() {
                code if code < 0 => Err(io::Error::from_raw_os_error(-code)),
                bytes => Ok(bytes as usize),
            };
            if self.buffered {
                let file = &self.files[read.file];
                forget_cached(file, read.file_offset, read.buffer.span().bytes);
            }
            ended.push(BlockReadDone {
                slot: read.slot,
                buffer: read.buffer,
                result,
            });
        }
        woken
    }

    /// Submits what is queued and sleeps until something has completed, or the time has passed, or for a while.
    fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let entered = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) if self.waits_for_a_time => {
                let time = types::Timespec::from(timeout);
                let arguments = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
            Some(timeout) => {
                let submitted = self.ring.submit();
                std::thread::sleep(timeout.min(LOOK_PAUSE));
                submitted
            }
        };
        match entered {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            // The kernel lacks memory for a request, or wants completions taken first. Both pass.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                std::thread::sleep(RETRY_PAUSE);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

impl BlockReader for IoUringReader {
    fn files(&self) -> &[PlacedFile] {
        &self.placed
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn waker(&self) -> Waker {
        let wake = Arc::clone(&self.wake);
        // An error means that the counter is full, so the poll fires anyway.
        Arc::new(move || drop((&*wake).write(&1u64.to_ne_bytes())))
    }

    fn refused_later(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.refused_later)
    }

    fn submit(&mut self, read: BlockRead) {
        let span = read.buffer.span();
        let border = self.limits.border_bytes;
        assert!(
            span.bytes <= self.limits.request_bytes_max
                && (span.bytes == 0 || span.offset / border == (span.end() - 1) / border),
            "{span:?} is one request within a piece of {border} bytes"
        );
        let entry = self.entry(&read);
        let slot = read.slot as usize;
        assert!(self.reads[slot].is_none(), "slot {slot} is free");
        // SAFETY: the entry names a range of the buffer's span, inside its arena. The buffer, and with it the mapping,
        // is kept in `reads` from here to the completion (also on drop, see below), and nobody else accesses the
        // span meanwhile: it belongs to this operation. Offset and address are aligned by the I/O thread's checks; a
        // misaligned one would only be refused by the kernel. In registered mode the range lies in one registered
        // piece, asserted above, and the kernel checks it again.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the submission queue has an entry per slot");
        self.reads[slot] = Some(read);
    }

    fn wait(&mut self, timeout: Option<Duration>, ended: &mut Vec<BlockReadDone>) {
        let before = ended.len();
        if !self.wake_armed {
            self.arm_wake();
        }
        loop {
            if let Err(error) = self.enter(timeout) {
                panic!("io_uring_enter fails: {error}");
            }
            let woken = self.reap(ended);
            // With a time, one look is enough: the caller comes back for what is left of it.
            if woken || ended.len() > before || timeout.is_some() {
                break;
            }
        }
    }

    fn reopen(&mut self, index: usize, expected: &FileIdentity) -> io::Result<()> {
        let file = open_expected(expected, !self.buffered)?;
        if self.registered {
            let updated = self
                .ring
                .submitter()
                .register_files_update(index as u32, &[file.as_raw_fd()])?;
            if updated != 1 {
                return Err(io::Error::other("the ring did not take the file"));
            }
        }
        self.files[index] = file;
        self.placed[index].identity = expected.clone();
        Ok(())
    }
}

impl Drop for IoUringReader {
    fn drop(&mut self) {
        // The kernel writes into buffers until their completions: none may be released before.
        let mut ended = Vec::new();
        while self.reads.iter().any(Option::is_some) {
            if self.enter(None).is_err() {
                // No way to learn when the kernel is done: the arena must stay mapped for the rest of the process.
                self.reads.drain(..).for_each(std::mem::forget);
                break;
            }
            self.reap(&mut ended);
        }
    }
}

/// A piece of the arena as the kernel takes it.
fn piece_of(arena: &Arena, limits: &Limits, piece: usize) -> libc::iovec {
    let offset = piece * limits.border_bytes;
    let bytes = limits.border_bytes.min(arena.bytes_total() - offset);
    libc::iovec {
        iov_base: arena.pointer(Span { offset, bytes }).cast(),
        iov_len: bytes,
    }
}

fn register_piece(ring: &IoUring, arena: &Arena, limits: &Limits, piece: usize) -> io::Result<()> {
    let vector = [piece_of(arena, limits, piece)];
    // SAFETY: the piece is a range of a live mapping (`pointer` checked it). The kernel pins its pages until the ring
    // goes and writes to them only for a submitted read, whose Buffer keeps the arena mapped.
    unsafe {
        ring.submitter()
            .register_buffers_update(piece as u32, &vector, None)
    }
}

fn refusal(bytes: usize, error: &io::Error) -> String {
    format!(
        "registering {bytes} bytes of memory: {error} (the limit `ulimit -l` is {})",
        memory_lock_limit()
    )
}

/// Tells the kernel that a range of the file (0 bytes: all of it) is not worth its place in the page cache.
pub(super) fn forget_cached(file: &File, offset: u64, bytes: usize) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else {
        return;
    };
    // SAFETY: advice about an open descriptor; no memory of ours is involved. It may be refused without harm.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED) };
}

fn event_file() -> io::Result<File> {
    // SAFETY: creates a descriptor; no memory is involved.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, is open, and belongs to nothing else.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}
