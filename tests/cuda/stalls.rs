//! How long computation waited for weights is what the device's compute stream waited, by the device's own clock; nobody
//! waits for these times.

use crate::device::{Device, device};
use crate::placements::{KIB, Placement, on_device, plan, prompt};
use crate::run::{Sequence, all_resident, root, settings, smallest_budgets};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata::kernels::ComputePool;
use strata::memory::{
    Arena, Crossing, CudaDevice, Event, FaultControl, Faults, FaultyReader, Region, RegionCopies,
};
use strata::metrics::Metrics;
use strata::model::{LoadedModel, PlannedModel, places};
use strata::placement::{Executor, ExecutorChoice, GroupId, PlanRequest, Tier};
use strata::weights::{Loading, Lookahead, ModelFile, Traffic};

const STEPS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);

fn path() -> PathBuf {
    root().join("tests/data/tiny/llama.gguf")
}

/// The tiny model with as little on the device as it takes, the rest on the host, and on storage where `host` is little too.
fn streamed(homes: &'static [Tier]) -> Placement {
    let request = PlanRequest {
        context: 64,
        parallel: 1,
        step_width: Some(8),
        slice_bytes: Some(64 * KIB),
        executor: ExecutorChoice::Device,
        ..all_resident()
    };
    let (device, least) =
        smallest_budgets(&path(), |device, host| on_device(&request, device, host));
    let host = match homes.contains(&Tier::Storage) {
        true => least,
        false => 1 << 30,
    };
    Placement {
        name: "streamed",
        request: PlanRequest {
            ring_entries: Some(2),
            ..on_device(&request, device, host)
        },
        homes,
    }
}

fn all_on_the_device() -> Placement {
    let request = PlanRequest {
        context: 64,
        parallel: 1,
        step_width: Some(8),
        ..all_resident()
    };
    Placement {
        name: "all on the device",
        request: on_device(&request, 1 << 28, 1 << 28),
        homes: &[Tier::Device],
    }
}

/// Groups are fetched when they are asked for, and not before: nothing hides what that takes. `from` is where they come
/// from.
fn load(planned: &PlannedModel, from: ModelFile<'_>) -> LoadedModel {
    let mut settings = settings();
    settings.lookahead = Lookahead::None;
    let loading = Loading {
        settings,
        metrics: &Metrics::new(),
        progress: &|_| true,
    };
    planned
        .load_from(from, ComputePool::new(2), &loading)
        .unwrap()
}

/// Groups from this home that the device computes with in a narrow step.
fn come_from(planned: &PlannedModel, home: Tier) -> Vec<GroupId> {
    let groups = planned.plan.iter().filter(|(id, group, _)| {
        let residence = planned.plan.residence_at(*id, 1);
        let comes = residence.home == home && residence.executor == Executor::Device;
        comes && group.is_streamable()
    });
    groups.map(|(id, _, _)| id).collect()
}

/// Some steps of one token, and what they waited.
fn steps(device: &Device, loaded: &mut LoadedModel) -> Traffic {
    let mut sequence = Sequence::new(0, 1);
    for &token in &prompt(STEPS as u32, 256) {
        sequence.step(loaded, &[token]);
    }
    device.assert_nothing_reported("steps of one token");
    (loaded.traffic)()
}

#[test]
fn nothing_is_waited_for_where_all_rests_on_the_device() {
    let Some(device) = device() else { return };
    let planned = plan(&device, &path(), &all_on_the_device());
    let mut loaded = load(&planned, ModelFile::At(&places(&planned.gguf)));
    if let Some(software) = &device.software {
        software.set_link_rate(1 << 20);
    }
    let traffic = steps(&device, &mut loaded);
    assert!(traffic.leases[Tier::Device as usize] > 0);
    assert_eq!(traffic.stall_seconds, [0.0; 3]);
}

#[test]
fn a_wait_for_the_link_takes_what_the_copy_takes() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's link has the rate that it has");
        return;
    };
    let rate = 2 << 20;
    let planned = plan(&device, &path(), &streamed(&[Tier::Device, Tier::Host]));
    let mut loaded = load(&planned, ModelFile::At(&places(&planned.gguf)));
    software.set_link_rate(rate);
    let traffic = steps(&device, &mut loaded);
    let groups = come_from(&planned, Tier::Host);
    let mut bytes: Vec<u64> = groups
        .iter()
        .map(|group| planned.plan.groups[group.0 as usize].entry_bytes)
        .collect();
    bytes.sort_unstable();
    // What is asked for behind the first group comes to the entry that it had, so that its copy begins when the computation
    // with that one is over, and the stream is at the wait by then. The first copy of a step may begin, and end, while the
    // stream is given the tokens.
    let hidden = bytes.pop().unwrap_or(0);
    let least = STEPS as f64 * bytes.iter().sum::<u64>() as f64 / rate as f64;
    let stalls = traffic.stall_seconds;
    assert!(groups.len() > 2, "{groups:?}, {hidden}");
    assert!(
        stalls[Tier::Host as usize] > 0.999 * least,
        "{stalls:?}, and copies alone take {least}"
    );
    assert_eq!(stalls[Tier::Device as usize], 0.0);
    assert_eq!(stalls[Tier::Storage as usize], 0.0);
}

/// What has not been read cannot be copied: the host waits for it, and the device, which has nothing else to do.
#[test]
fn a_wait_for_the_drive_is_the_devices_too() {
    let Some(device) = device() else { return };
    let homes = &[Tier::Device, Tier::Host, Tier::Storage];
    let planned = plan(&device, &path(), &streamed(homes));
    let groups = come_from(&planned, Tier::Storage);
    assert!(groups.len() > 2, "{groups:?}");
    let extent = &planned.plan.groups[groups[1].0 as usize].extents[0];
    let held_at = extent.file_offset + extent.bytes / 2;
    let reader = FaultyReader::open(&places(&planned.gguf), 1, Faults::default()).unwrap();
    let control = reader.control();
    let mut loaded = load(&planned, ModelFile::Through(Box::new(reader)));
    let mut sequence = Sequence::new(0, 1);
    let mut least = Duration::ZERO;
    for &token in &prompt(STEPS as u32, 256) {
        control.change(|faults| faults.held_at = vec![held_at]);
        std::thread::scope(|scope| {
            let held = scope.spawn(|| hold_until_the_device_waits(&device, &control));
            sequence.step(&mut loaded, &[token]);
            least += held.join().unwrap();
        });
    }
    device.assert_nothing_reported("steps in which a read was held");
    let traffic = (loaded.traffic)();
    let stall = traffic.stall_seconds[Tier::Storage as usize];
    assert!(
        stall > 0.999 * least.as_secs_f64(),
        "{stall}, and reads were held for {least:?}"
    );
}

/// Lets a held read go some milliseconds after the device has come to the wait for it. Gives for how long at least the
/// device waited.
fn hold_until_the_device_waits(device: &Device, control: &FaultControl) -> Duration {
    /// However this ends, the step goes on.
    struct LetGo<'c>(&'c FaultControl);
    impl Drop for LetGo<'_> {
        fn drop(&mut self) {
            self.0.change(|faults| faults.held_at.clear());
        }
    }
    let held = LetGo(control);
    let gpu = &device.gpu.device;
    let before = gpu.compute_moment().unwrap();
    assert!(control.wait_until_held(PATIENCE), "no read was held");
    // Behind the moment at which the wait begins.
    let waits = gpu.compute_moment().unwrap();
    let began = Instant::now();
    while gpu.time_between(&before, &waits).is_none() {
        assert!(began.elapsed() < PATIENCE, "the device does not come to it");
        std::thread::yield_now();
    }
    let since = Instant::now();
    std::thread::sleep(Duration::from_millis(10));
    let waited = since.elapsed();
    drop(held);
    waited
}

#[test]
fn a_step_creates_no_timed_event_that_the_one_before_can_lend_it() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's driver does not count events");
        return;
    };
    let planned = plan(&device, &path(), &streamed(&[Tier::Device, Tier::Host]));
    let mut loaded = load(&planned, ModelFile::At(&places(&planned.gguf)));
    let before = software.timed_events();
    let traffic = steps(&device, &mut loaded);
    let created = software.timed_events() - before;
    let waits = traffic.leases[Tier::Host as usize] / STEPS as u64;
    // Two for each wait, and no more for the second step.
    assert!((2..=2 * waits).contains(&created), "{created} of {waits}");
}

/// What waits for copies waits all the time, and the cores are for those that compute.
#[test]
fn threads_that_wait_for_the_device_sleep() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's driver does not count waits");
        return;
    };
    let planned = plan(&device, &path(), &streamed(&[Tier::Device, Tier::Host]));
    let (waits_before, spins_before) = software.event_waits();
    let mut loaded = load(&planned, ModelFile::At(&places(&planned.gguf)));
    steps(&device, &mut loaded);
    drop(loaded);
    let (waits, spins) = software.event_waits();
    assert!(waits > waits_before);
    assert_eq!(spins, spins_before);
}

/// The way from locked memory to the device, and room of another 4 KiB on both sides.
struct Way {
    copies: RegionCopies,
    host: Arc<Arena>,
    on_gpu: Arc<Arena>,
    source: Arc<Region>,
    destination: Region,
}

const ROOM: usize = 4 << 10;

/// For so many bytes, which count up in words of 8.
fn way(gpu: &Arc<CudaDevice>, bytes: usize) -> Way {
    let mut host = Arena::new("host", bytes + ROOM).unwrap();
    // From memory that is not locked a copy is waited for.
    assert_eq!(host.lock_pages(gpu), (bytes + ROOM, None));
    let host = Arc::new(host);
    let on_gpu = Arc::new(Arena::on_cuda("device", bytes + ROOM, gpu).unwrap());
    let copies = RegionCopies::start(
        Arc::clone(&host),
        Arc::clone(&on_gpu),
        None,
        Box::new(|_| {}),
    );
    let mut source = Region::allocate_low(&host, bytes).unwrap();
    for (number, word) in source.bytes_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&number.to_le_bytes());
    }
    Way {
        copies: copies.unwrap(),
        source: Arc::new(source),
        destination: Region::allocate_low(&on_gpu, bytes).unwrap(),
        host,
        on_gpu,
    }
}

#[test]
fn a_time_that_is_yet_to_come_is_not_waited_for() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's link cannot be held");
        return;
    };
    let gpu = &device.gpu.device;
    let bytes = 64 << 10;
    let Way {
        copies,
        source,
        destination,
        ..
    } = way(gpu, bytes);
    // Half a minute.
    software.set_link_rate(2 << 10);
    let before = gpu.compute_moment().unwrap();
    let copy = copies.copy_in_order(1, source, destination, bytes, Event::recorded());
    let copy = copy.unwrap();
    gpu.compute_waits_for(&copy.ready);
    let behind = gpu.compute_moment().unwrap();
    assert_eq!(gpu.time_between(&before, &behind), None);
    assert!(!copy.ready.is_complete());
    software.set_link_rate(0);
    gpu.synchronise().unwrap();
    let waited = gpu.time_between(&before, &behind);
    assert!(
        waited.is_some_and(|waited| waited > Duration::ZERO),
        "{waited:?}"
    );
    drop(copies);
    device.assert_nothing_reported("a copy that was held");
}

/// What a step sends while a group crosses: a group crosses in pieces.
#[test]
fn what_is_sent_does_not_wait_for_a_whole_group() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's link cannot be held");
        return;
    };
    let gpu = &device.gpu.device;
    let (piece, bytes) = (8 << 20, 24 << 20);
    let way = way(gpu, bytes);
    let room = Region::allocate_low(&way.host, ROOM).unwrap();
    let mut place = Region::allocate_low(&way.on_gpu, ROOM).unwrap();
    let mut crossing = Crossing::new(room, Arc::clone(gpu));
    software.set_link_rate(1);
    let (source, expected) = (Arc::clone(&way.source), &way.source);
    let recorded = Event::recorded();
    let copy = way
        .copies
        .copy_in_order(1, source, way.destination, bytes, recorded);
    let copy = copy.unwrap();
    crossing.upload(&[7; 16], &mut place, 0);
    let sent = gpu.compute_moment().unwrap();
    gpu.compute_waits_for(&copy.ready);
    let copied = gpu.compute_moment().unwrap();
    // A piece takes half a second, from now on.
    software.set_link_rate(2 * piece as u64);
    gpu.synchronise().unwrap();
    let behind = gpu.time_between(&sent, &copied).unwrap();
    assert!(behind > Duration::from_millis(600), "{behind:?}");
    software.set_link_rate(0);
    assert_eq!(crossing.fetch(&place, 0, 16).unwrap(), [7; 16]);
    for start in (0..bytes).step_by(piece) {
        for start in [start, start + piece - ROOM] {
            let arrived = crossing.fetch(&copy.destination, start, ROOM).unwrap();
            let expected = &expected.bytes()[start..start + ROOM];
            assert!(arrived == expected, "from byte {start} on");
        }
    }
    device.assert_nothing_reported("a copy and what passed it");
}
