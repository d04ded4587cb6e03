//! Where each group of weights is now; fetches ahead; lends groups to computation.
//!
//! `Pass` is the only place where computation may wait for weights, for a group (`lease`) or for embedding rows
//! (`gather_rows`), and the wait is measured. The engine
//! thread leases and releases; the I/O thread and the copy thread report landings; all three then ask the pure state
//! machine in `pipeline` what can start next and start it, under one mutex that is never held across I/O. Memory is
//! moved, not shared: a ring entry's `Region` is owned by the read that fills it, then by the copy that empties it,
//! then by the lease that lends it, and comes back to the table in between.
//!
//! What comes from the file is verified before anyone uses it (`verify`), by the checksums of its first read, which
//! outlive the process (`checksums`, `side_file`); `file_watch` asks whether the file is still the same.

mod checksums;
mod device_times;
mod file_watch;
mod lease;
mod load;
mod load_order;
mod pipeline;
mod rows;
mod shared;
mod side_file;
mod spans;
mod verify;
mod verify_share;

pub use checksums::checksum;
pub use lease::{Lease, LeaseError, Pass};
pub use load::{Arenas, LoadError, LoadProgress, Loading, ModelFile, WeightsSettings};
pub use pipeline::Lookahead;
pub use rows::GatheredRows;
pub use spans::HostComputation;
pub use verify_share::VerifyShare;

use crate::gguf::{Gguf, TensorInfo};
use crate::memory::{MappedFiles, Region, Rung};
use crate::metrics::Metrics;
use crate::placement::{Executor, Forecast, Group, GroupId, GroupKind, Plan, Residence, Tier};
use crate::trace::Trace;
use device_times::DeviceTimes;
use file_watch::FileWatch;
use rows::EmbeddingSlice;
use shared::Shared;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use verify::ReadChecks;

/// Where a group's bytes are between uses, as far as a lease needs to know.
#[derive(Clone, Debug)]
enum Home {
    /// In the mapped files of the model.
    Mapped,
    /// In the arena of its executor's tier.
    Resident(Arc<Region>),
    /// Fetched on every step.
    Streamed,
    /// On storage, read row by row (an untied embedding).
    Rows,
}

/// Uses of groups by their home, and the time that computation waited for them: the host, or the compute stream of a CUDA
/// device by its own clock.
#[derive(Debug, Default)]
struct Counters {
    leases: [AtomicU64; 3],
    stall_nanoseconds: [AtomicU64; 3],
    steps: AtomicU64,
}

/// What `/memory` tells about the traffic so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    pub steps: u64,
    /// Leases by home, in the order of `Tier`.
    pub leases: [u64; 3],
    pub stall_seconds: [f64; 3],
    pub reads: ReadsSoFar,
}

/// How reads from the model file went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadsSoFar {
    /// The share of later reads that is verified; 0 where none is, or the file is mapped.
    pub verified_share: f64,
    pub verified_groups: u64,
    /// Embedding rows included.
    pub verified_bytes: u64,
    /// Tried again after an error, for the rest of a short read, and because the bytes differed.
    pub retries: [u64; 3],
}

/// The values of the label `reason` of the retries, in the order of `ReadsSoFar::retries`.
const RETRY_REASONS: [&str; 3] = ["error", "short", "checksum"];

/// All weights of one model.
pub struct Weights {
    plan: Arc<Plan>,
    /// For error messages: what each group is.
    names: Vec<String>,
    mapped: Option<MappedFiles>,
    arenas: Arenas,
    shared: Arc<Shared>,
    /// What reads are held against; `None` where they are not.
    checks: Option<Arc<ReadChecks>>,
    /// `None` where the files are mapped.
    watch: Option<RefCell<FileWatch>>,
    embedding: TensorInfo,
    embedding_slices: Vec<EmbeddingSlice>,
    /// Where embedding rows that rest on storage land; taken while a read owns it.
    gather: RefCell<Option<Region>>,
    poison_released: bool,
    metrics: Metrics,
    counters: Arc<Counters>,
    forecast: Forecast,
    trace: Trace,
    device_times: DeviceTimes,
}

impl Weights {
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// A handle on the traffic counters that outlives the engine thread's borrow.
    pub fn traffic(&self) -> impl Fn() -> Traffic + Send + Sync + 'static {
        let counters = Arc::clone(&self.counters);
        let checks = self.checks.clone();
        let metrics = self.metrics.clone();
        move || Traffic {
            reads: ReadsSoFar {
                verified_share: checks.as_ref().map_or(0.0, |checks| checks.share()),
                verified_groups: checks.as_ref().map_or(0, |checks| checks.verified_groups()),
                verified_bytes: metrics.reads_verified_bytes_total.get(),
                retries: RETRY_REASONS.map(|reason| {
                    let retries = &metrics.read_retries_total;
                    retries.with_label_values(&[reason]).get()
                }),
            },
            steps: counters.steps.load(Ordering::Relaxed),
            leases: [0, 1, 2].map(|tier| counters.leases[tier].load(Ordering::Relaxed)),
            stall_seconds: [0, 1, 2]
                .map(|tier| counters.stall_nanoseconds[tier].load(Ordering::Relaxed) as f64 / 1e9),
        }
    }

    /// The rung of the reader's ladder and the reason for it; `None` where the file is mapped.
    pub fn reader_rung(&self) -> Option<(Rung, String)> {
        self.shared.reader_rung()
    }

    /// Begins a step of `width` tokens. Its groups must be leased in plan order, all of them; dropping the pass before `Pass::finish`
    /// abandons the step: reads in flight land before their memory is used again, and the next step starts afresh.
    pub fn pass<'w>(&'w self, width: usize, cancelled: &'w dyn Fn() -> bool) -> Pass<'w> {
        let width = u32::try_from(width).unwrap_or(u32::MAX);
        self.look_at_file(cancelled);
        self.adjust_clock();
        if let Some(waited) = self.shared.resume(width) {
            // What was on its way came from storage, if anything does.
            let from = match self.plan.host_ring.entries {
                0 => Tier::Host,
                _ => Tier::Storage,
            };
            self.count_stall(from, waited);
            self.trace().waited(None, from.name(), waited);
        }
        if let Some(checks) = &self.checks {
            checks.step_begins();
        }
        Pass::new(self, width, cancelled)
    }

    /// Lends the norms, biases and rope factors to the host, where they rest always.
    pub fn lease_small(&self) -> Option<Lease<'_>> {
        let small = |group: &crate::placement::Group| group.kind == GroupKind::Small;
        let index = self.plan.groups.iter().position(small)?;
        let group = GroupId(index as u32);
        match &self.shared.homes()[index] {
            Home::Mapped => Some(Lease::mapped(self, group)),
            Home::Resident(region) => Some(Lease::resident(self, group, Arc::clone(region))),
            Home::Streamed | Home::Rows => unreachable!("the small group rests in memory"),
        }
    }

    /// Whether a step of `width` tokens uses a group where it rests.
    fn rests(&self, group: GroupId, width: u32) -> bool {
        match &self.shared.homes()[group.0 as usize] {
            Home::Mapped => true,
            Home::Resident(_) => !streams(self.plan.residence_at(group, width)),
            Home::Streamed | Home::Rows => false,
        }
    }

    /// Lends a group to a step of `width` tokens, waiting for it where it is on its way.
    fn lease(
        &self,
        group: GroupId,
        width: u32,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Lease<'_>, LeaseError> {
        let residence = self.plan.residence_at(group, width);
        let home = &self.shared.homes()[group.0 as usize];
        let (lease, waited) = match home {
            Home::Mapped => (Lease::mapped(self, group), None),
            Home::Resident(region) if !streams(residence) => {
                (Lease::resident(self, group, Arc::clone(region)), None)
            }
            Home::Resident(_) | Home::Streamed => {
                self.take_device_times();
                let device_waits = self.begin_device_wait(residence.executor);
                let taken = self.shared.take(group, cancelled);
                let taken = taken
                    .map_err(|source| self.read_error(group, source))?
                    .ok_or(LeaseError::Cancelled)?;
                if let Some(device) = taken.region.cuda() {
                    device.compute_waits_for(&taken.ready);
                }
                match (device_waits, taken.waited) {
                    (Some(began), _) => self.end_device_wait(group, residence.home, began),
                    (None, Some(waited)) => self.count_stall(residence.home, waited),
                    (None, None) => {}
                }
                let lease = Lease::streamed(
                    self,
                    group,
                    taken.position,
                    taken.region,
                    residence.executor,
                );
                (lease, taken.waited)
            }
            Home::Rows => unreachable!("{} is gathered by row", self.names[group.0 as usize]),
        };
        self.assert_executor_reaches(&lease, residence.executor);
        let tier = residence.home as usize;
        self.counters.leases[tier].fetch_add(1, Ordering::Relaxed);
        let outcome = if waited.is_some() { "waited" } else { "ready" };
        self.metrics
            .leases_total
            .with_label_values(&[outcome])
            .inc();
        if let Some(waited) = waited {
            self.trace()
                .waited(Some(group.0), residence.home.name(), waited);
        }
        Ok(lease.begun(residence.executor))
    }

    /// An executor reads only from its own arena: a lease that points elsewhere is a bug, on the emulated device the
    /// same as on a real one.
    fn assert_executor_reaches(&self, lease: &Lease<'_>, executor: Executor) {
        let Some((address, bytes)) = lease.addresses() else {
            assert_eq!(
                executor,
                Executor::Host,
                "only the host reads what is mapped"
            );
            return;
        };
        let arena = match executor {
            Executor::Host => Some(&self.arenas.host),
            Executor::Device => self.arenas.device.as_ref(),
        };
        assert!(
            arena.is_some_and(|arena| arena.contains(address, bytes)),
            "a lease of {} for {executor:?} lies outside its arena: {address:#x}, {bytes} bytes",
            self.names[lease.group().0 as usize],
        );
    }

    fn read_error(&self, group: GroupId, source: crate::memory::ReadError) -> LeaseError {
        if let Some(watch) = &self.watch {
            watch.borrow_mut().note_failure(&source);
        }
        LeaseError::Read {
            group: self.names[group.0 as usize].clone(),
            source,
        }
    }

    /// Computation waited for weights of this home.
    fn count_stall(&self, home: Tier, waited: Duration) {
        let nanoseconds = waited.as_nanos() as u64;
        self.counters.stall_nanoseconds[home as usize].fetch_add(nanoseconds, Ordering::Relaxed);
        self.metrics
            .weight_stall_seconds_total
            .with_label_values(&[home.name()])
            .inc_by(waited.as_secs_f64());
    }

    /// Seconds that computation has waited for weights so far.
    fn stalled(&self) -> Duration {
        let stalls = self.counters.stall_nanoseconds.iter();
        let nanoseconds = stalls.map(|stall| stall.load(Ordering::Relaxed)).sum();
        Duration::from_nanos(nanoseconds)
    }

    /// `began` and `stalled` are of the step's beginning.
    fn step_finished(&self, width: u32, depth: u32, began: Instant, stalled: Duration) {
        self.metrics
            .steps_predicted_seconds_total
            .inc_by(self.forecast.step_seconds(width, depth));
        let steps = self.counters.steps.fetch_add(1, Ordering::Relaxed);
        if let Some(watch) = &self.watch {
            watch.borrow_mut().note_success();
        }
        if let Some(checks) = &self.checks {
            checks.step_ended(began.elapsed(), self.stalled().saturating_sub(stalled));
            // The first step has seen every group that streams.
            checks.save(steps > 0);
        }
        self.shared.publish(&self.metrics);
    }
}

/// Whether a group moves on every step: its home is not where its executor reads.
fn streams(residence: Residence) -> bool {
    match (residence.home, residence.executor) {
        (Tier::Storage, _) | (Tier::Host, Executor::Device) => true,
        (Tier::Host, Executor::Host) | (Tier::Device, _) => false,
    }
}

/// What a group is, for people: "layer 3 feed-forward (blk.3.ffn_down.weight)".
fn group_name(gguf: &Gguf, plan: &Plan, index: usize) -> String {
    let group = &plan.groups[index];
    let tensor = group.parts.first().map(|part| {
        let name = &gguf.tensors[part.tensor].name;
        format!(" ({name}, rows {} to {})", part.rows.start, part.rows.end)
    });
    format!("{}{}", group_title(group), tensor.unwrap_or_default())
}

/// "layer 3 feed-forward"
fn group_title(group: &Group) -> String {
    let half = match group.kind {
        GroupKind::Small => "norms and biases",
        GroupKind::Embedding => "token embedding",
        GroupKind::Attention => "attention",
        GroupKind::FeedForward => "feed-forward",
        GroupKind::Head => "output head",
    };
    let layer = group
        .layer
        .map(|layer| format!("layer {layer} "))
        .unwrap_or_default();
    format!("{layer}{half}")
}
