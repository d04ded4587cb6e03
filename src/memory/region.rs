//! Regions: spans with an owner. The rest of the program moves memory by handing regions on: a read owns the region
//! that it fills, a copy owns the region that it writes and shares the one that it reads, and both come back with the
//! result. Bytes that are being written therefore cannot be seen by anyone, and no caller needs `unsafe`.

#![expect(
    unsafe_code,
    reason = "turns the exclusive ownership of a region into slices of its arena"
)]

use super::arena::{Arena, MemoryError, Span};
use super::block_reader::BlockReader;
use super::cuda::CudaDevice;
use super::cuda_copies::CudaCopies;
use super::device_address::DeviceAddress;
use super::event::Event;
use super::files::{FilePlace, PlacedFile};
use super::io_thread::{ReadDone, ReadError, ReadPiece};
use super::ladder::{ReaderChoice, Requests, Rung};
use super::reader::Reader;
use super::stream::{CopyStream, CopyTimes};
use super::{FileIdentity, ReadRetries, TransferTotals};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// A span of an arena that belongs to this value alone: arenas hand every byte out once, and regions are not cloned.
#[derive(Debug)]
pub struct Region {
    arena: Arc<Arena>,
    span: Span,
}

impl Region {
    /// Takes memory from the low end of the arena: weights, rings, scratch.
    pub fn allocate_low(arena: &Arc<Arena>, bytes: usize) -> Result<Region, MemoryError> {
        let span = arena.allocate_low(bytes)?;
        Ok(Region {
            arena: Arc::clone(arena),
            span,
        })
    }

    /// Takes memory from the high end of the arena: the KV cache.
    pub fn allocate_high(arena: &Arc<Arena>, bytes: usize) -> Result<Region, MemoryError> {
        let span = arena.allocate_high(bytes)?;
        Ok(Region {
            arena: Arc::clone(arena),
            span,
        })
    }

    pub fn bytes_total(&self) -> usize {
        self.span.bytes
    }

    /// Where the region is, for who can use it: this process or a device.
    pub fn address(&self) -> u64 {
        self.arena.address(self.span)
    }

    /// The address of `bytes` bytes at `offset`, for kernels of the device that the region is on.
    ///
    /// # Panics
    /// When they do not lie inside the region, or it is the host's.
    pub fn device_address(&self, offset: usize, bytes: usize) -> DeviceAddress {
        assert!(self.cuda().is_some(), "{self:?} is not on a device");
        DeviceAddress::inside(self.arena.address(self.span.part(offset, bytes)))
    }

    /// The device that the region is on: then the host can use its address only.
    pub fn cuda(&self) -> Option<&Arc<CudaDevice>> {
        self.arena.cuda()
    }

    /// # Panics
    /// When the region is on a device.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the span was allocated to this region alone, and only holders of `&mut self` (or of the region
        // itself, which `&self` excludes) write it.
        unsafe { self.arena.bytes(self.span) }
    }

    /// # Panics
    /// When the region is on a device.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the span was allocated to this region alone, and `&mut self` excludes every other borrow of it.
        unsafe { self.arena.bytes_mut(self.span) }
    }

    /// The region as 16-bit elements.
    pub fn u16s(&self) -> &[u16] {
        let bytes = self.bytes();
        // SAFETY: every bit pattern is a u16. `align_to` keeps what is not aligned apart; spans are aligned to 4096
        // bytes, so nothing is.
        unsafe { bytes.align_to::<u16>() }.1
    }

    pub fn u16s_mut(&mut self) -> &mut [u16] {
        let bytes = self.bytes_mut();
        // SAFETY: as in `u16s`, and every u16 is valid bytes.
        unsafe { bytes.align_to_mut::<u16>() }.1
    }

    /// The region as f32.
    pub fn f32s(&self) -> &[f32] {
        let bytes = self.bytes();
        // SAFETY: every bit pattern is an f32; nothing is unaligned, as in `u16s`.
        unsafe { bytes.align_to::<f32>() }.1
    }

    pub fn f32s_mut(&mut self) -> &mut [f32] {
        let bytes = self.bytes_mut();
        // SAFETY: as in `f32s`, and every f32 is valid bytes.
        unsafe { bytes.align_to_mut::<f32>() }.1
    }

    /// A span means another place in another arena, and what owns that place does not know of this region.
    fn assert_of(&self, arena: &Arc<Arena>) {
        assert!(
            Arc::ptr_eq(&self.arena, arena),
            "a region of the {} arena where one of the {} arena belongs",
            self.arena.name(),
            arena.name()
        );
    }

    /// Fills the region with 0xFF: a NaN in every float format, so that a use after release shows in the result. On a
    /// device that happens after what its compute stream was given before.
    pub fn poison(&mut self) {
        // SAFETY: the span was allocated to this region alone, and `&mut self` excludes every other borrow of it; copies
        // to a device's region wait for the event that is recorded after this.
        unsafe { self.arena.fill(self.span, 0xFF) };
    }

    /// Fills the region with zeros; on a device, as `poison` does.
    pub fn clear(&mut self) {
        // SAFETY: as in `poison`.
        unsafe { self.arena.fill(self.span, 0) };
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }
}

/// A contiguous read of one file into a region. Offsets and lengths are multiples of the reader's block; bytes past the end of the
/// file (as it was when opened) need not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPiece {
    /// Among the offsets of all files (`FilePlace`).
    pub file_offset: u64,
    /// From the start of the region.
    pub offset: usize,
    pub bytes: usize,
}

/// A read that ended: the region is the caller's again. After a failure its bytes are unspecified.
#[derive(Debug)]
pub struct RegionRead {
    pub ticket: u64,
    pub region: Region,
    /// Bytes read, alignment included.
    pub result: Result<u64, ReadError>,
}

type InFlight<T> = Arc<Mutex<HashMap<u64, T>>>;

fn insert<T>(in_flight: &InFlight<T>, ticket: u64, value: T) {
    let mut in_flight = in_flight.lock().unwrap_or_else(PoisonError::into_inner);
    let former = in_flight.insert(ticket, value);
    assert!(former.is_none(), "ticket {ticket} is in flight already");
}

fn remove<T>(in_flight: &InFlight<T>, ticket: u64) -> T {
    let mut in_flight = in_flight.lock().unwrap_or_else(PoisonError::into_inner);
    match in_flight.remove(&ticket) {
        Some(value) => value,
        None => unreachable!("ticket {ticket} ends once"),
    }
}

/// A `Reader` that is given regions and gives them back.
pub struct RegionReader {
    // Dropped first: what is in flight is reported before the table goes.
    reader: Reader,
    arena: Arc<Arena>,
    in_flight: InFlight<Region>,
}

impl RegionReader {
    /// See `Reader::start`.
    pub fn start(
        files: &[FilePlace],
        arena: Arc<Arena>,
        choice: ReaderChoice,
        on_done: Box<dyn Fn(RegionRead) + Send>,
    ) -> Result<RegionReader, ReadError> {
        RegionReader::new(&arena, on_done, |on_done| {
            Reader::start(files, Arc::clone(&arena), choice, on_done)
        })
    }

    /// See `Reader::start_on`.
    pub fn start_on(
        files: &[FilePlace],
        arena: Arc<Arena>,
        rung: Rung,
        requests: Requests,
        on_done: Box<dyn Fn(RegionRead) + Send>,
    ) -> Result<RegionReader, ReadError> {
        RegionReader::new(&arena, on_done, |on_done| {
            Reader::start_on(files, Arc::clone(&arena), rung, requests, on_done)
        })
    }

    /// Over an implementation of the caller's, for tests.
    pub fn with_block_reader(
        block_reader: Box<dyn BlockReader>,
        arena: Arc<Arena>,
        on_done: Box<dyn Fn(RegionRead) + Send>,
    ) -> Result<RegionReader, ReadError> {
        RegionReader::new(&arena, on_done, |on_done| {
            Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done)
        })
    }

    fn new(
        arena: &Arc<Arena>,
        on_done: Box<dyn Fn(RegionRead) + Send>,
        start: impl FnOnce(Box<dyn Fn(ReadDone) + Send>) -> Result<Reader, ReadError>,
    ) -> Result<RegionReader, ReadError> {
        let in_flight = InFlight::default();
        let table = Arc::clone(&in_flight);
        let reader = start(Box::new(move |done| {
            on_done(RegionRead {
                ticket: done.ticket,
                region: remove(&table, done.ticket),
                result: done.result,
            });
        }))?;
        Ok(RegionReader {
            reader,
            arena: Arc::clone(arena),
            in_flight,
        })
    }

    /// Queues a read under a number of the caller's choice and returns. `on_done` is called on the I/O thread.
    ///
    /// # Panics
    /// When a piece is not aligned to the block or lies outside the region, or the region is another arena's.
    pub fn read(&self, ticket: u64, region: Region, pieces: &[RegionPiece]) {
        region.assert_of(&self.arena);
        let pieces = pieces
            .iter()
            .map(|piece| ReadPiece {
                file_offset: piece.file_offset,
                span: region.span.part(piece.offset, piece.bytes),
            })
            .collect();
        insert(&self.in_flight, ticket, region);
        self.reader.read(ticket, pieces);
    }

    /// Nobody wants what was asked for so far: it is reported, with an error, as soon as nothing of it is in flight.
    pub fn give_up(&self) {
        self.reader.give_up();
    }

    pub fn rung(&self) -> Rung {
        self.reader.rung()
    }

    /// Why this rung and no better one, in words for the log.
    pub fn rung_reason(&self) -> &str {
        self.reader.rung_reason()
    }

    /// The files as they were when they were opened first.
    pub fn files(&self) -> &[PlacedFile] {
        self.reader.files()
    }

    /// Opens the file at the path of one of the files again, which must be `expected`, of the same size. Nothing may be in flight; after
    /// an error, reads go on from the file that was open.
    pub fn reopen(&self, file: usize, expected: FileIdentity) -> Result<(), ReadError> {
        self.reader.reopen(file, expected)
    }

    pub fn retries(&self) -> ReadRetries {
        self.reader.retries()
    }

    pub fn totals(&self) -> TransferTotals {
        self.reader.totals()
    }
}

/// A copy that ended.
#[derive(Debug)]
pub struct RegionCopied {
    pub ticket: u64,
    pub times: CopyTimes,
    pub source: Arc<Region>,
    /// `None` where it was handed back in `Ordered` already.
    pub destination: Option<Region>,
}

/// The destination of a copy that a device orders before its users: it may be lent at once to computation that waits
/// for `ready` on the device.
#[derive(Debug)]
pub struct Ordered {
    pub destination: Region,
    pub ready: Event,
}

/// A copy stream that is given regions and gives them back.
pub struct RegionCopies {
    stream: Stream,
    /// Where copies come from and go to.
    arenas: [Arc<Arena>; 2],
    in_flight: InFlight<(Arc<Region>, Option<Region>)>,
}

enum Stream {
    Emulated(CopyStream),
    Cuda(CudaCopies),
}

impl RegionCopies {
    /// To a device arena that is on a CUDA device: its copy stream. To one that stands for a device's: a thread that
    /// copies at the given rate, in bytes per second (`None`: as fast as memory goes). `on_done` is called on a thread of
    /// the stream's and may start copies.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(
        source: Arc<Arena>,
        destination: Arc<Arena>,
        bytes_per_second: Option<f64>,
        on_done: Box<dyn Fn(RegionCopied) + Send>,
    ) -> io::Result<RegionCopies> {
        let in_flight = InFlight::default();
        let table = Arc::clone(&in_flight);
        let on_done = Box::new(move |ticket, times| {
            let (source, destination) = remove(&table, ticket);
            on_done(RegionCopied {
                ticket,
                times,
                source,
                destination,
            });
        });
        let arenas = [Arc::clone(&source), Arc::clone(&destination)];
        let stream = match destination.cuda() {
            Some(device) => Stream::Cuda(CudaCopies::start(Arc::clone(device), on_done)?),
            None => Stream::Emulated(CopyStream::start(
                source,
                destination,
                bytes_per_second,
                on_done,
            )?),
        };
        Ok(RegionCopies {
            stream,
            arenas,
            in_flight,
        })
    }

    /// Queues a copy of the first `bytes` bytes. It starts after `after`, the last use of the destination, which comes
    /// back with `on_done`.
    ///
    /// # Panics
    /// When a region is shorter than that or is another arena's.
    pub fn copy(
        &self,
        ticket: u64,
        source: Arc<Region>,
        destination: Region,
        bytes: usize,
        after: Event,
    ) {
        let spans = self.checked(&source, &destination, bytes);
        insert(&self.in_flight, ticket, (source, Some(destination)));
        self.queue(ticket, spans, after);
    }

    /// The same where the device itself orders the copy before its users: the destination comes back at once. `None`
    /// where it comes with `on_done`.
    pub fn copy_in_order(
        &self,
        ticket: u64,
        source: Arc<Region>,
        destination: Region,
        bytes: usize,
        after: Event,
    ) -> Option<Ordered> {
        if let Stream::Emulated(_) = self.stream {
            self.copy(ticket, source, destination, bytes, after);
            return None;
        }
        let spans = self.checked(&source, &destination, bytes);
        insert(&self.in_flight, ticket, (source, None));
        let ready = self.queue(ticket, spans, after);
        Some(Ordered { destination, ready })
    }

    fn checked(&self, source: &Region, destination: &Region, bytes: usize) -> (Span, Span) {
        source.assert_of(&self.arenas[0]);
        destination.assert_of(&self.arenas[1]);
        (source.span.part(0, bytes), destination.span.part(0, bytes))
    }

    fn queue(&self, ticket: u64, (from, to): (Span, Span), after: Event) -> Event {
        match &self.stream {
            Stream::Emulated(stream) => stream.copy(ticket, from, to, after),
            Stream::Cuda(stream) => stream.copy(
                ticket,
                (&self.arenas[0], from),
                (&self.arenas[1], to),
                &after,
            ),
        }
    }

    pub fn totals(&self) -> TransferTotals {
        match &self.stream {
            Stream::Emulated(stream) => stream.totals(),
            Stream::Cuda(stream) => stream.totals(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_region_travels_through_a_read_and_a_copy() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let contents: Vec<u8> = (0..20_000_u32).map(|i| (i % 251) as u8).collect();
        std::io::Write::write_all(&mut file, &contents).unwrap();
        let host = Arc::new(Arena::new("host", 1 << 20).unwrap());
        let device = Arc::new(Arena::new("device", 1 << 20).unwrap());
        let (read_sender, reads) = mpsc::channel();
        let reader = RegionReader::start(
            &FilePlace::alone(file.path()),
            Arc::clone(&host),
            ReaderChoice::Auto,
            Box::new(move |done| read_sender.send(done).unwrap()),
        )
        .unwrap();
        let region = Region::allocate_low(&host, 8192).unwrap();
        let piece = RegionPiece {
            file_offset: 4096,
            offset: 4096,
            bytes: 4096,
        };
        reader.read(7, region, &[piece]);
        let done = reads.recv().unwrap();
        assert_eq!((done.ticket, done.result.unwrap()), (7, 4096));
        assert_eq!(done.region.bytes()[4096..8192], contents[4096..8192]);

        let (copy_sender, copies) = mpsc::channel();
        let stream = RegionCopies::start(
            host,
            Arc::clone(&device),
            None,
            Box::new(move |done| copy_sender.send(done).unwrap()),
        )
        .unwrap();
        let destination = Region::allocate_low(&device, 8192).unwrap();
        let source = Arc::new(done.region);
        stream.copy(8, Arc::clone(&source), destination, 8192, Event::recorded());
        let done = copies.recv().unwrap();
        assert_eq!(done.ticket, 8);
        let destination = done.destination.unwrap();
        assert_eq!(destination.bytes(), source.bytes());
        assert!(device.contains(destination.address(), 8192));
    }

    #[test]
    #[should_panic(expected = "a region of the device arena where one of the host arena belongs")]
    fn a_region_of_another_arena_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let host = Arc::new(Arena::new("host", 8192).unwrap());
        let device = Arc::new(Arena::new("device", 8192).unwrap());
        let on_done = Box::new(|_| {});
        let reader = RegionReader::start(
            &FilePlace::alone(file.path()),
            host,
            ReaderChoice::Auto,
            on_done,
        )
        .unwrap();
        reader.read(1, Region::allocate_low(&device, 4096).unwrap(), &[]);
    }

    #[test]
    fn poison_is_nan() {
        let arena = Arc::new(Arena::new("host", 4096).unwrap());
        let mut region = Region::allocate_high(&arena, 4096).unwrap();
        region.poison();
        assert!(region.u16s().iter().all(|&bits| bits == 0xFFFF));
        assert_eq!(region.u16s_mut().len(), 2048);
    }
}
