//! The step simulator: a discrete-event simulation of steady-state steps.
//!
//! Four servers, each of which takes its jobs in plan order: storage reads, link copies, and computation on either
//! executor. A read waits for a free entry of the host ring, a copy for its bytes and for a free entry of the device
//! ring, a computation for its weights and for the stage before it: layers are a chain. A host entry is free again when
//! its copy or its computation is over, a device entry when its computation is.
//!
//! What is under way at the same time shares two things. RAM: when more is asked of it than it gives, all get the same
//! share of what they ask for. Processors: reading and the copies of the emulated device take theirs from the
//! computation. Between two events all rates are constant, so that the next event is the nearest end of a job.
//!
//! Several steps run one after the other, prefetch runs across the border between them, and the last is timed.

use super::Executor;

/// Steps simulated: the rings fill in the first, so the last is steady.
const STEPS: usize = 3;

/// However much of the processors is taken, the computation goes on at this share of its rate.
const COMPUTING_SHARE_MIN: f64 = 0.05;

/// What one group asks of each server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Bytes that pass through the host ring; 0: it rests in memory.
    pub(super) read_bytes: f64,
    /// Bytes that pass through the device ring; 0: it rests with its executor.
    pub(super) copy_bytes: f64,
    /// Of a computation that nothing disturbs.
    pub(super) compute_seconds: f64,
    /// Bytes of RAM that the computation reads.
    pub(super) compute_bytes: f64,
    pub(super) executor: Executor,
    /// Ascending. Computations of one stage need nothing of each other, those of the next need all of them. Within a stage
    /// the device computes beside the host what comes before the host's part, and after it what comes later.
    pub(super) stage: u32,
}

/// Rates in bytes per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) storage: f64,
    pub(super) link: f64,
    /// What RAM gives to all who read and write it.
    pub(super) ram: f64,
    /// That compute; infinite where it is not known.
    pub(super) processors: f64,
    /// How many of them a read, or a copy, at its full rate keeps busy.
    pub(super) reading_processors: f64,
    pub(super) copying_processors: f64,
    /// Bytes of RAM that a copied byte reads and writes.
    pub(super) copying_ram: f64,
    /// Entries of the rings.
    pub(super) host_entries: u32,
    pub(super) device_entries: u32,
}

/// A steady step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepTimes {
    pub(super) seconds: f64,
    /// How long each server is busy within the step.
    pub(super) storage: f64,
    pub(super) link: f64,
    pub(super) device: f64,
    pub(super) host: f64,
}

/// Times a steady step over `jobs`, which are in plan order.
pub(super) fn steady_step(jobs: &[Job], machine: &Machine) -> StepTimes {
    let mut simulation = Simulation::new(jobs, machine, STEPS);
    simulation.run();
    let ends = &simulation.step_ends;
    let mut times = simulation.busy;
    times.seconds = match ends.as_slice() {
        [.., before, last] => last - before,
        _ => 0.0,
    };
    times
}

/// A server's job under way: its number, counted on from step to step, and what is left of it.
#[derive(Clone, Copy, Debug)]
struct Running {
    job: usize,
    left: f64,
}

struct Simulation<'a> {
    jobs: &'a [Job],
    machine: &'a Machine,
    steps: usize,
    now: f64,
    /// How many jobs ahead of the oldest that is not computed yet fetching may run: no group is fetched again before it
    /// has been used, except where a step streams fewer than three.
    window: usize,
    host_free: u32,
    device_free: u32,
    reading: Option<Running>,
    copying: Option<Running>,
    /// By executor.
    computing: [Option<Running>; 2],
    /// The next job of each server, counted on from step to step.
    next_read: usize,
    next_copy: usize,
    next_compute: [usize; 2],
    /// Everything before it has been read (or needs no reading), or copied.
    read_until: usize,
    copied_until: usize,
    step_ends: Vec<f64>,
    /// Within the last step.
    busy: StepTimes,
}

/// The rates at which what is under way goes on: bytes, or seconds of undisturbed computation, per second.
struct Pace {
    reading: f64,
    copying: f64,
    computing: [f64; 2],
}

impl<'a> Simulation<'a> {
    fn new(jobs: &'a [Job], machine: &'a Machine, steps: usize) -> Simulation<'a> {
        let streams = |job: &&Job| job.read_bytes > 0.0 || job.copy_bytes > 0.0;
        let window = match jobs.iter().filter(streams).count() {
            0..3 => jobs.len() * 3,
            _ => jobs.len(),
        };
        let mut simulation = Simulation {
            jobs,
            machine,
            steps,
            now: 0.0,
            window,
            // A ring that nothing passes through has no entries and is never asked.
            host_free: machine.host_entries.max(1),
            device_free: machine.device_entries.max(1),
            reading: None,
            copying: None,
            computing: [None, None],
            next_read: 0,
            next_copy: 0,
            next_compute: [0, 0],
            read_until: 0,
            copied_until: 0,
            step_ends: Vec::with_capacity(steps),
            busy: StepTimes::default(),
        };
        simulation.next_read = simulation.following(0, |job| job.read_bytes > 0.0);
        simulation.next_copy = simulation.following(0, |job| job.copy_bytes > 0.0);
        simulation.read_until = simulation.next_read;
        simulation.copied_until = simulation.next_copy;
        simulation.next_compute = [Executor::Device, Executor::Host]
            .map(|executor| simulation.following(0, |job| job.executor == executor));
        simulation
    }

    fn job(&self, number: usize) -> &'a Job {
        &self.jobs[number % self.jobs.len()]
    }

    /// The number from `from` on whose job is of a kind; `usize::MAX`: there is none in any step.
    fn following(&self, from: usize, is_meant: impl Fn(&Job) -> bool) -> usize {
        (from..from + self.jobs.len())
            .find(|&number| is_meant(self.job(number)))
            .unwrap_or(usize::MAX)
    }

    fn run(&mut self) {
        if self.jobs.is_empty() {
            self.step_ends = vec![0.0; self.steps];
            return;
        }
        while self.step_ends.len() < self.steps {
            self.start();
            let pace = self.pace();
            let Some(seconds) = self.next_end(&pace) else {
                unreachable!("a step waits for nothing: {:?}", self.step_ends);
            };
            assert!(seconds.is_finite(), "nothing moves: {:?}", self.machine);
            self.advance(seconds, &pace);
        }
    }

    /// Starts what can start.
    fn start(&mut self) {
        if self.reading.is_none() && self.host_free > 0 && self.may_fetch(self.next_read) {
            self.host_free -= 1;
            let job = self.next_read;
            let left = self.job(job).read_bytes;
            self.reading = Some(Running { job, left });
            self.next_read = self.following(job + 1, |job| job.read_bytes > 0.0);
        }
        let copy = self.next_copy;
        if self.copying.is_none()
            && self.device_free > 0
            && copy < self.read_until
            && self.may_fetch(copy)
        {
            self.device_free -= 1;
            let left = self.job(copy).copy_bytes;
            self.copying = Some(Running { job: copy, left });
            self.next_copy = self.following(copy + 1, |job| job.copy_bytes > 0.0);
        }
        let stage = self.stage_under_way();
        for executor in [Executor::Device, Executor::Host] {
            let job = self.next_compute[executor as usize];
            let may_start = self.computing[executor as usize].is_none()
                && job != usize::MAX
                && self.stage_of(job) == stage
                && !(executor == Executor::Device && self.host_comes_before(job))
                && job < self.read_until
                && job < self.copied_until;
            if may_start {
                let left = self.job(job).compute_seconds;
                self.computing[executor as usize] = Some(Running { job, left });
            }
        }
    }

    fn may_fetch(&self, number: usize) -> bool {
        number < self.oldest().saturating_add(self.window)
    }

    /// The oldest job that is not computed yet.
    fn oldest(&self) -> usize {
        self.next_compute.iter().copied().min().unwrap_or(0)
    }

    /// Counted on from step to step.
    fn stage_of(&self, number: usize) -> (usize, u32) {
        (number / self.jobs.len(), self.job(number).stage)
    }

    fn stage_under_way(&self) -> (usize, u32) {
        self.stage_of(self.oldest())
    }

    /// Whether the host has computing to do that comes before a job of the device: the one thread that gives the device its
    /// work computes itself meanwhile.
    fn host_comes_before(&self, job: usize) -> bool {
        self.next_compute[Executor::Host as usize] < job
    }

    fn pace(&self) -> Pace {
        let machine = self.machine;
        let active = |running: &Option<Running>| f64::from(u8::from(running.is_some()));
        let (reading, copying) = (active(&self.reading), active(&self.copying));
        let taken = reading * machine.reading_processors + copying * machine.copying_processors;
        let share = (1.0 - taken / machine.processors).max(COMPUTING_SHARE_MIN);
        let computing = [Executor::Device, Executor::Host].map(|executor| {
            let running = self.computing[executor as usize]?;
            let job = self.job(running.job);
            // What reads RAM shares the processors too: a GPU's computation does neither.
            let pace = if job.compute_bytes > 0.0 { share } else { 1.0 };
            let asks = match job.compute_seconds > 0.0 {
                true => pace * job.compute_bytes / job.compute_seconds,
                false => 0.0,
            };
            Some((pace, asks))
        });
        let asked = reading * machine.storage
            + copying * machine.link * machine.copying_ram
            + computing
                .iter()
                .flatten()
                .map(|(_, asks)| asks)
                .sum::<f64>();
        let given = (machine.ram / asked).min(1.0);
        let slowed = |asks: f64| if asks > 0.0 { given } else { 1.0 };
        Pace {
            reading: machine.storage * given,
            copying: machine.link * slowed(machine.copying_ram),
            computing: computing
                .map(|computing| computing.map_or(1.0, |(pace, asks)| pace * slowed(asks))),
        }
    }

    /// Seconds to the nearest end.
    fn next_end(&self, pace: &Pace) -> Option<f64> {
        let transfers = [(self.reading, pace.reading), (self.copying, pace.copying)];
        let computations = self.computing.into_iter().zip(pace.computing);
        transfers
            .into_iter()
            .chain(computations)
            .filter_map(|(running, pace)| Some(running?.left / pace))
            .min_by(f64::total_cmp)
    }

    /// Lets `seconds` pass, which is no more than to the nearest end, and ends what is over.
    fn advance(&mut self, seconds: f64, pace: &Pace) {
        self.now += seconds;
        if self.step_ends.len() + 1 == self.steps {
            let busy = |running: &Option<Running>| match running {
                Some(_) => seconds,
                None => 0.0,
            };
            self.busy.storage += busy(&self.reading);
            self.busy.link += busy(&self.copying);
            self.busy.device += busy(&self.computing[Executor::Device as usize]);
            self.busy.host += busy(&self.computing[Executor::Host as usize]);
        }
        if let Some(job) = passed(&mut self.reading, pace.reading, seconds) {
            self.read_until = self.following(job + 1, |job| job.read_bytes > 0.0);
        }
        if let Some(number) = passed(&mut self.copying, pace.copying, seconds) {
            self.copied_until = self.following(number + 1, |job| job.copy_bytes > 0.0);
            if self.job(number).read_bytes > 0.0 {
                self.host_free += 1;
            }
        }
        for executor in [Executor::Device, Executor::Host] {
            let pace = pace.computing[executor as usize];
            let ended = passed(&mut self.computing[executor as usize], pace, seconds);
            if let Some(number) = ended {
                self.computed(number, executor);
            }
        }
    }

    fn computed(&mut self, number: usize, executor: Executor) {
        let job = self.job(number);
        if job.copy_bytes > 0.0 {
            self.device_free += 1;
        } else if job.read_bytes > 0.0 {
            self.host_free += 1;
        }
        self.next_compute[executor as usize] =
            self.following(number + 1, |job| job.executor == executor);
        while self.oldest() / self.jobs.len() > self.step_ends.len() {
            self.step_ends.push(self.now);
        }
    }
}

/// What is left after `seconds`; the job that is over.
fn passed(running: &mut Option<Running>, pace: f64, seconds: f64) -> Option<usize> {
    /// Of what was left: sums of many small times do not end at 0 exactly.
    const ROUNDING: f64 = 1e-12;
    let now = running.as_mut()?;
    let done = pace * seconds;
    if done >= now.left * (1.0 - ROUNDING) {
        let job = now.job;
        *running = None;
        return Some(job);
    }
    now.left -= done;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: f64 = 1e-9;

    /// A machine that does one of everything a second, and shares nothing.
    fn machine(host_entries: u32, device_entries: u32) -> Machine {
        Machine {
            storage: 1.0,
            link: 1.0,
            ram: f64::INFINITY,
            processors: f64::INFINITY,
            reading_processors: 0.0,
            copying_processors: 0.0,
            copying_ram: 1.0,
            host_entries,
            device_entries,
        }
    }

    fn job(read: f64, copy: f64, compute: f64) -> Job {
        Job {
            read_bytes: read,
            copy_bytes: copy,
            compute_seconds: compute,
            compute_bytes: compute,
            executor: Executor::Host,
            stage: 0,
        }
    }

    /// Every computation needs the one before.
    fn chain(jobs: impl IntoIterator<Item = Job>) -> Vec<Job> {
        let numbered = (0..).zip(jobs);
        numbered.map(|(stage, job)| Job { stage, ..job }).collect()
    }

    /// Seconds of one group: (read, copy, compute).
    type Seconds = (f64, f64, f64);

    /// Groups; entries of the host's and the device's ring; the steady step worked out by hand.
    #[test]
    fn steps_take_what_they_take_by_hand() {
        let cases: &[(&str, &[Seconds], u32, u32, f64)] = &[
            ("nothing", &[], 0, 0, 0.0),
            ("resident", &[(0.0, 0.0, 2.0), (0.0, 0.0, 3.0)], 0, 0, 5.0),
            (
                "reads and computation overlap",
                &[(1.0, 0.0, 1.0); 4],
                2,
                0,
                4.0,
            ),
            ("storage binds", &[(3.0, 0.0, 1.0); 4], 2, 0, 12.0),
            ("computation binds", &[(1.0, 0.0, 3.0); 4], 2, 0, 12.0),
            (
                "one entry: nothing overlaps",
                &[(1.0, 0.0, 1.0); 4],
                1,
                0,
                8.0,
            ),
            ("the link binds", &[(0.0, 2.0, 1.0); 3], 0, 2, 6.0),
            ("three stages overlap", &[(1.0, 1.0, 1.0); 5], 2, 2, 5.0),
            // With one entry on the device, the copy waits for the computation before it.
            ("one device entry", &[(1.0, 1.0, 1.0); 5], 2, 1, 10.0),
            // With one entry on the host, the read waits for the copy before it.
            ("one host entry", &[(1.0, 1.0, 1.0); 5], 1, 2, 10.0),
            // 4 s of reading hide behind 4 s of resident computation only when there is room to read ahead: with two
            // entries of 1 s each, two reads hide and two do not.
            (
                "a contiguous tail does not hide in a short ring",
                &[
                    (0.0, 0.0, 4.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                ],
                2,
                0,
                6.0,
            ),
            (
                "the same spread evenly hides",
                &[
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                ],
                2,
                0,
                4.0,
            ),
        ];
        for (name, jobs, host_entries, device_entries, expected) in cases {
            let jobs = chain(jobs.iter().map(|&(r, c, x)| job(r, c, x)));
            let times = steady_step(&jobs, &machine(*host_entries, *device_entries));
            assert!(
                (times.seconds - expected).abs() < TOLERANCE,
                "{name}: {}, by hand {expected}",
                times.seconds
            );
        }
    }

    #[test]
    fn the_first_step_takes_at_most_one_delay_for_each_group_and_entry() {
        for groups in 1..20 {
            for entries in 2..6 {
                let jobs = chain(vec![job(1.0, 0.0, 1.0); groups]);
                let machine = machine(entries, 0);
                let mut simulation = Simulation::new(&jobs, &machine, 1);
                simulation.run();
                let first = simulation.step_ends[0];
                let bound = groups as f64 + f64::from(entries);
                assert!(
                    first <= bound + TOLERANCE,
                    "{groups} groups, {entries} entries: {first}"
                );
            }
        }
    }

    #[test]
    fn more_entries_are_never_slower() {
        // Any mix will do; this one has every combination of stages.
        let jobs = chain((0..60).map(|index| {
            let read = if index % 3 == 0 { 1.5 } else { 0.0 };
            let copy = if index % 2 == 0 { 0.5 } else { 0.0 };
            job(read, copy, 0.25 + f64::from(index % 7) / 8.0)
        }));
        for host in 1..6 {
            for device in 1..6 {
                let end = |host, device| {
                    let machine = machine(host, device);
                    let mut simulation = Simulation::new(&jobs, &machine, STEPS);
                    simulation.run();
                    simulation.step_ends[STEPS - 1]
                };
                let here = end(host, device);
                assert!(end(host + 1, device) <= here + TOLERANCE);
                assert!(end(host, device + 1) <= here + TOLERANCE);
            }
        }
    }

    /// 4 s of computation, on two processors, beside 4 s of copying that keeps one of them busy: until the copies end the
    /// computation goes at half its rate. In a steady step the link is busy all the time then, and so it is 8 s where the
    /// link moves 8 bytes, and 4 + 2 where it moves 4: 2 of computation are done beside the copies.
    #[test]
    fn copies_take_processors_from_the_computation() {
        let mut shared = machine(0, 2);
        shared.processors = 2.0;
        shared.copying_processors = 1.0;
        for (copy, expected) in [(2.0, 8.0), (1.0, 6.0)] {
            let jobs = chain(vec![job(0.0, copy, 1.0); 4]);
            let times = steady_step(&jobs, &shared);
            assert!(
                (times.seconds - expected).abs() < TOLERANCE,
                "copies of {copy}: {times:?}"
            );
        }
    }

    /// RAM gives 1 byte a second, the computation of one group asks for 1 and so does the copy of another: together they
    /// take as long as one after the other.
    #[test]
    fn what_reads_ram_at_the_same_time_shares_it() {
        let mut shared = machine(0, 2);
        shared.ram = 1.0;
        let on_host = Job {
            executor: Executor::Host,
            ..job(0.0, 0.0, 1.0)
        };
        let copied = Job {
            executor: Executor::Device,
            compute_bytes: 0.0,
            ..job(0.0, 1.0, 0.0)
        };
        let jobs = chain([on_host, copied, on_host, copied]);
        let times = steady_step(&jobs, &shared);
        assert!((times.seconds - 4.0).abs() < TOLERANCE, "{times:?}");
        shared.ram = 2.0;
        let times = steady_step(&jobs, &shared);
        assert!((times.seconds - 2.0).abs() < TOLERANCE, "{times:?}");
    }

    /// A device computes beside the host what comes before the host's part of a stage, and not what comes after it.
    #[test]
    fn within_a_stage_the_device_waits_for_what_the_host_computes_first() {
        let of = |executor| Job {
            executor,
            ..job(0.0, 0.0, 1.0)
        };
        let (device, host) = (of(Executor::Device), of(Executor::Host));
        for (jobs, expected) in [([device, host], 1.0), ([host, device], 2.0)] {
            let times = steady_step(&jobs, &machine(0, 0));
            assert!((times.seconds - expected).abs() < TOLERANCE, "{times:?}");
        }
    }

    /// The table of schedules for a 70B model on a card of 24 GiB: 22.0 GB of weights on the device, 19.9 GB that are
    /// not, a device that reads 750 GB/s, a link of 25 GB/s, RAM of 80 GB/s and kernels of the host that reach C of it.
    mod schedules {
        use super::*;

        const LAYERS: usize = 80;
        const ON_DEVICE: f64 = 22.0;
        const MISSING: f64 = 19.9;
        const DEVICE: f64 = 750.0;
        /// Pieces of a layer's missing weights.
        const SLICES: usize = 4;
        /// Of each figure in the table, which has two digits.
        const TOLERANCE: f64 = 0.05;

        fn machine() -> Machine {
            Machine {
                storage: 7.0,
                link: 25.0,
                ram: 80.0,
                ..super::machine(4, 3)
            }
        }

        fn on_device(bytes: f64, copied: bool) -> Job {
            Job {
                read_bytes: 0.0,
                copy_bytes: if copied { bytes } else { 0.0 },
                compute_seconds: bytes / DEVICE,
                compute_bytes: 0.0,
                executor: Executor::Device,
                stage: 0,
            }
        }

        fn on_host(bytes: f64, kernels: f64, read: bool) -> Job {
            Job {
                read_bytes: if read { bytes } else { 0.0 },
                copy_bytes: 0.0,
                compute_seconds: bytes / kernels,
                compute_bytes: bytes,
                executor: Executor::Host,
                stage: 0,
            }
        }

        /// Whether the next of a sequence belongs to the share that is spread evenly over it.
        fn chosen(index: usize, share: f64) -> bool {
            let passed = |index: usize| (index as f64 * share + 1e-9).floor();
            passed(index + 1) > passed(index)
        }

        fn tokens_per_second(jobs: Vec<Job>) -> f64 {
            1.0 / steady_step(&jobs, &machine()).seconds
        }

        /// A layer's resident weights and its missing ones in slices, one after another.
        fn in_turn(missing: impl Fn(usize, f64) -> Job) -> f64 {
            let slice = MISSING / (LAYERS * SLICES) as f64;
            let layer = |layer: usize| {
                let slices =
                    (layer * SLICES..(layer + 1) * SLICES).map(|index| missing(index, slice));
                std::iter::once(on_device(ON_DEVICE / LAYERS as f64, false))
                    .chain(slices)
                    .collect::<Vec<_>>()
            };
            tokens_per_second(chain((0..LAYERS).flat_map(layer)))
        }

        /// The best share of the missing weights to stream.
        fn best(of_share: impl Fn(f64) -> f64) -> f64 {
            let shares = (0..=40).map(|share| f64::from(share) / 40.0);
            shares.map(of_share).fold(0.0, f64::max)
        }

        fn group_chain(kernels: f64) -> f64 {
            best(|share| {
                in_turn(|index, bytes| match chosen(index, share) {
                    true => on_device(bytes, true),
                    false => on_host(bytes, kernels, false),
                })
            })
        }

        fn row_split(kernels: f64) -> f64 {
            best(|share| {
                let missing = MISSING / LAYERS as f64;
                let layer = |layer: usize| {
                    [
                        on_device(ON_DEVICE / LAYERS as f64, false),
                        on_device(missing * share, true),
                        on_host(missing * (1.0 - share), kernels, false),
                    ]
                    .map(|job| Job {
                        stage: layer as u32,
                        ..job
                    })
                };
                tokens_per_second((0..LAYERS).flat_map(layer).collect())
            })
        }

        #[track_caller]
        fn check(what: &str, simulated: f64, table: f64) {
            assert!(
                (simulated / table - 1.0).abs() <= TOLERANCE,
                "{what}: {simulated:.3} tokens/s, the table says {table}"
            );
        }

        #[test]
        fn the_table_of_the_design_is_reproduced() {
            let table = [
                (80.0, 3.6, 3.7, 4.0),
                (64.0, 2.9, 3.7, 4.0),
                (50.0, 2.3, 3.4, 3.8),
            ];
            for (kernels, host, chain, split) in table {
                let what = |schedule: &str| format!("{schedule}, kernels of {kernels} GB/s");
                check(
                    &what("stream everything"),
                    in_turn(|_, bytes| on_device(bytes, true)),
                    1.26,
                );
                check(
                    &what("the CPU computes everything"),
                    in_turn(|_, bytes| on_host(bytes, kernels, false)),
                    host,
                );
                check(&what("group chain"), group_chain(kernels), chain);
                check(&what("row split"), row_split(kernels), split);
            }
        }

        #[test]
        fn storage_binds_as_soon_as_ram_lacks() {
            for (in_ram, table) in [(20.0, 3.6), (10.0, 0.71), (5.0, 0.47), (0.0, 0.35)] {
                let share = f64::min(in_ram / MISSING, 1.0);
                let simulated = in_turn(|index, bytes| on_host(bytes, 80.0, !chosen(index, share)));
                check(&format!("RAM for {in_ram} GB"), simulated, table);
            }
        }
    }
}
