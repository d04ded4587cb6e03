//! Brings the resident groups home, once, at start.

use super::device_times::DeviceTimes;
use super::file_watch::FileWatch;
use super::load_order::{InFlight, Move, READS_MAX, Staged};
use super::pipeline::{Lookahead, Pipeline};
use super::rows::EmbeddingSlice;
use super::shared::{FIRST_WIDTH, Links, Shared, streamed};
use super::verify::{QUEUED_READS_MAX, ReadChecks, Verifier};
use super::verify_share::VerifyShare;
use super::{Counters, Home, RETRY_REASONS, Weights, group_name};
use crate::gguf::Gguf;
use crate::memory::{
    Arena, BlockReader, CudaDevice, FilePlace, MappedFiles, MemoryError, PlacedFile, ReadError,
    ReaderChoice, Region, RegionCopies, RegionRead, RegionReader,
};
use crate::metrics::Metrics;
use crate::placement::{DeviceKind, Forecast, GroupId, GroupKind, Plan, Ring, Tier};
use crate::trace::Trace;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Weak};

/// The memory of each tier, as large as the plan says.
#[derive(Clone)]
pub struct Arenas {
    pub host: Arc<Arena>,
    /// On a CUDA device, or what stands for one.
    pub device: Option<Arc<Arena>>,
}

impl Arenas {
    /// Allocates what the plan split; on `cuda` where the plan is for a CUDA device. The whole process allocates weights,
    /// pages and I/O buffers here and nowhere else.
    pub fn allocate(plan: &Plan, cuda: Option<&Arc<CudaDevice>>) -> Result<Arenas, MemoryError> {
        let mut host = Arena::new("host", plan.arena_bytes(Tier::Host) as usize)?;
        let device_bytes = plan.arena_bytes(Tier::Device) as usize;
        let device = match (plan.device, cuda) {
            (DeviceKind::Cpu, _) => None,
            (DeviceKind::Emulated, _) => Some(Arena::new("device", device_bytes)?),
            (DeviceKind::Cuda, Some(cuda)) => {
                // Locking waits for each page that is not there yet.
                host.populate(&AtomicBool::new(false));
                lock_pages(&mut host, cuda);
                Some(Arena::on_cuda("device", device_bytes, cuda)?)
            }
            (DeviceKind::Cuda, None) => unreachable!("a plan for a device that was not opened"),
        };
        Ok(Arenas {
            host: Arc::new(host),
            device: device.map(Arc::new),
        })
    }

    fn of(&self, tier: Tier) -> &Arc<Arena> {
        match (tier, &self.device) {
            (Tier::Device, Some(device)) => device,
            (Tier::Device, None) => unreachable!("the plan has no device"),
            (Tier::Host | Tier::Storage, _) => &self.host,
        }
    }

    /// Scratch that the plan puts into a tier's arena.
    pub fn scratch_region(&self, tier: Tier, bytes: u64) -> Result<Region, MemoryError> {
        Region::allocate_low(self.of(tier), bytes as usize)
    }

    /// A region for KV pages, from the end that weights do not grow from.
    pub fn kv_region(&self, plan: &Plan) -> Result<Region, MemoryError> {
        Region::allocate_high(self.of(plan.kv.tier), plan.kv.bytes() as usize)
    }
}

/// Locks the host arena to its pages as far as the system lets.
fn lock_pages(host: &mut Arena, cuda: &Arc<CudaDevice>) {
    let (locked, refusal) = host.lock_pages(cuda);
    if let Some(refusal) = refusal {
        tracing::warn!(
            "{refusal}: {locked} of the {} bytes of the host arena are locked to their pages, and copies from the rest hold \
             up the computation; raise the limit on locked memory (`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd \
             unit, --ulimit memlock=-1 for docker) or give a smaller --host-memory",
            host.bytes_total()
        );
    }
}

/// How weights are moved; what they are is the plan's.
#[derive(Clone, Debug)]
pub struct WeightsSettings {
    pub reader: ReaderChoice,
    /// Bytes per second of the emulated link; `None`: as fast as memory copies.
    pub link_rate: Option<f64>,
    pub lookahead: Lookahead,
    /// Fill ring entries with NaN patterns when they are released, so that a use after release shows.
    pub poison_released: bool,
    /// Of the reads that are held against the checksum of the first one.
    pub verify_share: VerifyShare,
    /// The directory that keeps checksums for later runs.
    pub checksums: Option<PathBuf>,
}

/// The files of the model.
pub enum ModelFile<'a> {
    At(&'a [FilePlace]),
    /// Read through an implementation of the caller's: tests inject faults here. They are never mapped.
    Through(Box<dyn BlockReader>),
}

/// How loading goes and who hears of it.
#[derive(Clone)]
pub struct Loading<'a> {
    pub settings: WeightsSettings,
    pub metrics: &'a Metrics,
    /// Hears how far it is, before the first byte and after each group; loading ends with an error when it answers false.
    pub progress: &'a dyn Fn(LoadProgress) -> bool,
}

/// Of the groups that rest in memory. Where the file is mapped nothing is loaded, and both are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    pub loaded_bytes: u64,
    pub total_bytes: u64,
}

impl LoadProgress {
    /// 0 to 1.
    pub fn ratio(self) -> f64 {
        match self.total_bytes {
            0 => 1.0,
            total => self.loaded_bytes as f64 / total as f64,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("allocate memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("{0}")]
    Reader(ReadError),
    #[error(
        "{} had {header} bytes when its header was read and has {now} now: it is being written; start again when it is complete",
        file.display()
    )]
    Changed {
        file: PathBuf,
        header: u64,
        now: u64,
    },
    #[error("loading was cancelled")]
    Cancelled,
    #[error("load {group}: {source}")]
    Read {
        group: String,
        #[source]
        source: ReadError,
    },
}

impl Weights {
    /// Opens the files, allocates homes and rings and loads every resident group.
    pub fn load(
        file: ModelFile<'_>,
        gguf: &Gguf,
        plan: Arc<Plan>,
        arenas: Arenas,
        loading: &Loading<'_>,
    ) -> Result<Weights, LoadError> {
        let &Loading {
            ref settings,
            metrics,
            progress,
        } = loading;
        for reason in RETRY_REASONS {
            metrics.read_retries_total.with_label_values(&[reason]);
        }
        let names: Vec<String> = (0..plan.groups.len())
            .map(|index| group_name(gguf, &plan, index))
            .collect();
        let entries = |ring: &Ring, tier| -> Result<Vec<Region>, MemoryError> {
            (0..ring.entries)
                .map(|_| Region::allocate_low(arenas.of(tier), ring.entry_bytes as usize))
                .collect()
        };
        let pipeline = Pipeline::new(
            streamed(&plan, FIRST_WIDTH),
            plan.host_ring.entries as usize,
            plan.device_ring.entries as usize,
            settings.lookahead,
        );
        let shared = Arc::new(Shared::new(
            Arc::clone(&plan),
            pipeline,
            entries(&plan.host_ring, Tier::Host)?,
            entries(&plan.device_ring, Tier::Device)?,
        ));
        let gather_bytes = u64::from(plan.gather.rows) * plan.gather.row_bytes;
        let gather = match gather_bytes {
            0 => None,
            bytes => Some(Region::allocate_low(&arenas.host, bytes as usize)?),
        };
        let (mut mapped, mut checks, mut watch) = (None, None, None);
        if let (true, ModelFile::At(places)) = (plan.mapped, &file) {
            let maps = MappedFiles::map(places)?;
            check_sizes(gguf, maps.files())?;
            mapped = Some(maps);
            shared.set_homes(vec![Home::Mapped; plan.groups.len()]);
            progress(LoadProgress::default());
        } else {
            assert!(!plan.mapped, "a plan for a mapped file needs its path");
            let (links, read_checks) = links(file, &plan, &arenas, settings, &shared, metrics)?;
            let files = links.reader.files();
            check_sizes(gguf, files)?;
            checks = read_checks;
            watch = Some(RefCell::new(FileWatch::new(files)));
            shared.connect(links);
            match load_while_populating(&plan, &arenas, &shared, &names, progress) {
                Ok(homes) => shared.set_homes(homes),
                Err(error) => {
                    shared.disconnect();
                    return Err(error);
                }
            }
        }
        let embedding_slices = embedding_slices(gguf, &plan);
        let Some((_, embedding)) = gguf.tensor("token_embd.weight") else {
            unreachable!("the plan was made for a model with a token embedding");
        };
        let weights = Weights {
            names,
            mapped,
            arenas,
            shared,
            checks,
            watch,
            embedding: embedding.clone(),
            embedding_slices,
            gather: RefCell::new(gather),
            poison_released: settings.poison_released,
            metrics: metrics.clone(),
            counters: Arc::new(Counters::default()),
            forecast: Forecast::of(&plan),
            trace: Trace::off(),
            device_times: DeviceTimes::default(),
            plan,
        };
        weights.shared.publish(&weights.metrics);
        if let Some(checks) = &weights.checks {
            checks.save(false);
        }
        Ok(weights)
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        self.shared.disconnect();
        if let Some(checks) = &self.checks {
            checks.save_last();
        }
    }
}

/// The tensors were found to lie inside the files when their headers were read.
fn check_sizes(gguf: &Gguf, files: &[PlacedFile]) -> Result<(), LoadError> {
    assert_eq!(gguf.files.len(), files.len(), "the files of the index");
    for (indexed, PlacedFile { identity, base }) in gguf.files.iter().zip(files) {
        assert_eq!(indexed.base, *base, "{}", identity.path.display());
        if identity.bytes != indexed.bytes {
            return Err(LoadError::Changed {
                file: identity.path.clone(),
                header: indexed.bytes,
                now: identity.bytes,
            });
        }
    }
    Ok(())
}

/// Starts the threads that move bytes, and the one that verifies them, with what they are held against.
fn links(
    file: ModelFile<'_>,
    plan: &Plan,
    arenas: &Arenas,
    settings: &WeightsSettings,
    shared: &Arc<Shared>,
    metrics: &Metrics,
) -> Result<(Links, Option<Arc<ReadChecks>>), LoadError> {
    let no_thread = |source| LoadError::Reader(ReadError::Thread { source });
    // The threads hold weak references: they live inside what they report to. This one is started first: where it cannot
    // be had, a verifier that is there already would wait for the reader, which goes after it.
    let stream = arenas.device.as_ref().map(|device| -> io::Result<_> {
        let host = Arc::clone(&arenas.host);
        let target = Arc::downgrade(shared);
        let on_copy = move |done| {
            if let Some(shared) = Weak::upgrade(&target) {
                shared.copy_done(done);
            }
        };
        RegionCopies::start(
            host,
            Arc::clone(device),
            settings.link_rate,
            Box::new(on_copy),
        )
    });
    let stream = stream.transpose().map_err(no_thread)?;
    let target = Arc::downgrade(shared);
    let host = Arc::clone(&arenas.host);
    // An I/O thread that waited for room here would wait for the verifier, which may wait for it to read again.
    let ring_entries = plan.host_ring.entries as usize;
    let reads_max = ring_entries + READS_MAX + 2;
    assert!(
        reads_max <= QUEUED_READS_MAX,
        "{reads_max} reads, with {ring_entries} ring entries, may end before one is verified"
    );
    let (to_verify, reads) = sync_channel(QUEUED_READS_MAX);
    let verifies = settings.verify_share.is_on();
    let on_read: Box<dyn Fn(RegionRead) + Send> = if verifies {
        // An error would mean that the verifier has ended, which it does after the I/O thread.
        Box::new(move |done| drop(to_verify.send(done)))
    } else {
        Box::new(move |done| {
            if let Some(shared) = Weak::upgrade(&target) {
                shared.read_done(done);
            }
        })
    };
    let reader = match file {
        ModelFile::At(places) => RegionReader::start(places, host, settings.reader, on_read),
        ModelFile::Through(reader) => RegionReader::with_block_reader(reader, host, on_read),
    }
    .map_err(LoadError::Reader)?;
    let (mut checks, mut verifier) = (None, None);
    if verifies {
        let directory = settings.checksums.as_deref();
        let files = reader.files();
        let against = ReadChecks::new(settings.verify_share, directory, files, metrics);
        let against = Arc::new(against);
        let started = Verifier::start(reads, shared, Arc::clone(&against));
        verifier = Some(started.map_err(no_thread)?);
        checks = Some(against);
    }
    let links = Links {
        reader,
        _verifier: verifier,
        stream,
    };
    Ok((links, checks))
}

/// Loads while the kernel still gives the pages of the host arena: what is read into is registered piece by piece, mostly
/// behind the threads that populate it. All pages are there before the first step.
fn load_while_populating(
    plan: &Plan,
    arenas: &Arenas,
    shared: &Shared,
    names: &[String],
    progress: &dyn Fn(LoadProgress) -> bool,
) -> Result<Vec<Home>, LoadError> {
    let load = || load_homes(plan, arenas, shared, names, progress);
    if plan.device == DeviceKind::Cuda {
        return load();
    }
    let populate = |stop: &AtomicBool| {
        arenas.host.populate(stop);
    };
    with_thread_beside("populate", populate, load)
}

/// Does `work` while a thread does what is `beside` it, which is waited for, and told to stop where `work` fails or panics.
/// A thread that the system refuses is done without.
fn with_thread_beside<T, E>(
    name: &str,
    beside: impl FnOnce(&AtomicBool) + Send,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    struct StopOnDrop<'a>(&'a AtomicBool);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn_scoped(scope, || beside(&stop));
        let stops = StopOnDrop(&stop);
        let done = work()?;
        // Nothing has to stop it now.
        if let Ok(thread) = spawned
            && let Err(panic) = thread.join()
        {
            std::panic::resume_unwind(panic);
        }
        drop(stops);
        Ok(done)
    })
}

/// Allocates and loads every resident group. Groups for the device pass through the host ring, like the streamed ones.
fn load_homes(
    plan: &Plan,
    arenas: &Arenas,
    shared: &Shared,
    names: &[String],
    progress: &dyn Fn(LoadProgress) -> bool,
) -> Result<Vec<Home>, LoadError> {
    let resident_bytes: u64 = plan
        .groups
        .iter()
        .zip(&plan.residences)
        .filter(|(_, residence)| residence.home != Tier::Storage)
        .map(|(group, _)| group.entry_bytes)
        .sum();
    let mut loaded_bytes = 0;
    let mut advance = |bytes: u64| {
        loaded_bytes += bytes;
        let total_bytes = resident_bytes;
        let goes_on = progress(LoadProgress {
            loaded_bytes,
            total_bytes,
        });
        goes_on.then_some(()).ok_or(LoadError::Cancelled)
    };
    advance(0)?;
    let mut homes: Vec<Home> = plan
        .groups
        .iter()
        .map(|group| match group.kind {
            GroupKind::Embedding => Home::Rows,
            _ => Home::Streamed,
        })
        .collect();
    let with_home = |tier| {
        let residences = plan.residences.iter().enumerate();
        residences.filter(move |(_, residence)| residence.home == tier)
    };
    let at_home = |destination: Option<Region>| match destination {
        Some(region) => Home::Resident(Arc::new(region)),
        None => unreachable!("a copy that is waited for brings its destination back"),
    };
    let failed = |group: usize, source| LoadError::Read {
        group: names[group].clone(),
        source,
    };

    // The plan counts the small group on the host too: its copy there is what the device's is loaded from. The ring and
    // the staging are made for groups that stream; they may be smaller, or not be there.
    let is_small = |&index: &usize| plan.groups[index].kind == GroupKind::Small;
    for index in with_home(Tier::Device)
        .map(|(index, _)| index)
        .filter(is_small)
    {
        let group = &plan.groups[index];
        let bytes = group.entry_bytes as usize;
        let copy = Region::allocate_low(&arenas.host, bytes)?;
        let done = shared.wait_read(shared.begin_group_read(copy, GroupId(index as u32)));
        done.result.map_err(|source| failed(index, source))?;
        homes[index] = if plan.device == DeviceKind::Cuda {
            // The model takes them from here to the device as f32.
            Home::Resident(Arc::new(done.region))
        } else {
            let home = Region::allocate_low(arenas.of(Tier::Device), bytes)?;
            let done = shared.wait_copy(shared.begin_copy(done.region, home, bytes));
            at_home(done.destination)
        };
        advance(group.entry_bytes)?;
    }

    // Regions that device homes are loaded through, each with the group whose home it is to be.
    let ring = shared.borrow_host_entries();
    let ring_entries = ring.len();
    let mut staging: Vec<(Option<usize>, Region)> = Vec::new();
    staging.extend(ring.into_iter().map(|entry| (None, entry)));
    if plan.staging_bytes > 0 {
        let region = Region::allocate_low(&arenas.host, plan.staging_bytes as usize)?;
        staging.push((None, region));
    }
    // With one alone the drive would wait for each copy, and with few small ones it is never busy. Homes on the host are
    // loaded last: until then those that are large enough serve too.
    let mut regions = InFlight::default();
    for (_, region) in &staging {
        regions.add(region.bytes_total() as u64);
    }
    let mut waiting = with_home(Tier::Device)
        .map(|(index, _)| index)
        .filter(|index| !is_small(index))
        .collect::<VecDeque<usize>>();
    let entry_bytes = |index: usize| plan.groups[index].entry_bytes;
    let largest = waiting.iter().map(|&index| entry_bytes(index)).max();
    let mut host_homes: Vec<Option<Region>> = plan.groups.iter().map(|_| None).collect();
    for (index, _) in with_home(Tier::Host) {
        let bytes = entry_bytes(index);
        let region = Region::allocate_low(&arenas.host, bytes as usize)?;
        let serves = largest.is_some_and(|largest| bytes >= largest);
        if serves && regions.wants_more() {
            regions.add(bytes);
            staging.insert(0, (Some(index), region));
        } else {
            host_homes[index] = Some(region);
        }
    }
    let mut reads: VecDeque<(usize, Option<usize>, u64)> = VecDeque::new();
    let mut copies: VecDeque<(usize, Option<usize>, u64)> = VecDeque::new();
    loop {
        let staged = Staged {
            waiting: waiting.len(),
            free_regions: staging.len(),
            reads: reads.len(),
            copies: copies.len(),
        };
        match staged.next_move() {
            Some(Move::Read) => {
                if let (Some(index), Some((lender, region))) = (waiting.pop_front(), staging.pop())
                {
                    let ticket = shared.begin_group_read(region, GroupId(index as u32));
                    reads.push_back((index, lender, ticket));
                }
            }
            Some(Move::AwaitRead) => {
                if let Some((index, lender, ticket)) = reads.pop_front() {
                    let done = shared.wait_read(ticket);
                    done.result.map_err(|source| failed(index, source))?;
                    let bytes = entry_bytes(index) as usize;
                    let home = Region::allocate_low(arenas.of(Tier::Device), bytes)?;
                    let ticket = shared.begin_copy(done.region, home, bytes);
                    copies.push_back((index, lender, ticket));
                }
            }
            Some(Move::AwaitCopy) => {
                if let Some((index, lender, ticket)) = copies.pop_front() {
                    let done = shared.wait_copy(ticket);
                    staging.extend(Arc::into_inner(done.source).map(|region| (lender, region)));
                    homes[index] = at_home(done.destination);
                    advance(entry_bytes(index))?;
                }
            }
            None => break,
        }
    }
    assert!(
        waiting.is_empty(),
        "the plan has a host ring or staging wherever groups rest on a device"
    );
    let mut ring = Vec::new();
    for (lender, region) in staging {
        match lender {
            Some(index) => host_homes[index] = Some(region),
            None => ring.push(region),
        }
    }
    // Entries are alike; a staging region is not part of the ring, and there is one only where there is no ring.
    ring.truncate(ring_entries);
    assert_eq!(ring.len(), ring_entries, "every ring entry came back");
    shared.return_host_entries(ring);

    let mut in_flight = InFlight::default();
    let mut reads: VecDeque<(usize, u64)> = VecDeque::new();
    let mut waiting = with_home(Tier::Host).map(|(index, _)| index).peekable();
    while waiting.peek().is_some() || !reads.is_empty() {
        if in_flight.wants_more()
            && let Some(index) = waiting.next()
        {
            let Some(home) = host_homes[index].take() else {
                unreachable!("a home that was lent came back");
            };
            in_flight.add(entry_bytes(index));
            reads.push_back((index, shared.begin_group_read(home, GroupId(index as u32))));
        } else if let Some((index, ticket)) = reads.pop_front() {
            let done = shared.wait_read(ticket);
            done.result.map_err(|source| failed(index, source))?;
            homes[index] = Home::Resident(Arc::new(done.region));
            in_flight.remove(entry_bytes(index));
            advance(entry_bytes(index))?;
        }
    }
    Ok(homes)
}

/// Where the rows of the token embedding are: in embedding groups, or in head groups where the head is tied.
fn embedding_slices(gguf: &Gguf, plan: &Plan) -> Vec<EmbeddingSlice> {
    let Some((tensor, _)) = gguf.tensor("token_embd.weight") else {
        return Vec::new();
    };
    let mut slices: Vec<EmbeddingSlice> = Vec::new();
    for (index, group) in plan.groups.iter().enumerate() {
        for (part_index, part) in group.parts.iter().enumerate() {
            if part.tensor == tensor {
                slices.push(EmbeddingSlice {
                    rows: part.rows.clone(),
                    group: GroupId(index as u32),
                    part: part_index,
                });
            }
        }
    }
    slices.sort_by_key(|slice| slice.rows.start);
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::{Duration, Instant};

    /// Runs `work` beside a thread that ends when it is told to, or after `patience`. Whether it was told.
    fn is_told(patience: Duration, work: impl FnOnce() -> Result<(), ()>) -> bool {
        let told = AtomicBool::new(false);
        let until = Instant::now() + patience;
        let beside = |stop: &AtomicBool| {
            while !stop.load(Ordering::Relaxed) && Instant::now() < until {
                std::thread::yield_now();
            }
            told.store(stop.load(Ordering::Relaxed), Ordering::Relaxed);
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            with_thread_beside("beside", beside, work)
        }));
        drop(outcome);
        told.load(Ordering::Relaxed)
    }

    #[test]
    fn what_runs_beside_the_loading_is_stopped_by_an_error_and_by_a_panic_and_otherwise_ends() {
        let forever = Duration::from_secs(60);
        assert!(is_told(forever, || Err(())));
        assert!(is_told(forever, || panic!("as a test")));
        assert!(!is_told(Duration::from_millis(10), || Ok(())));
    }
}
