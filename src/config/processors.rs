//! Which CPUs compute: those that this process may use, one of each core before a second one of any. Two hardware
//! threads of one core share its arithmetic and its path to memory, so that a second thread gains little and every
//! step waits for it.

use super::Config;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::path::Path;

/// Why compute threads cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    #[error(
        "--pin-threads gives each of {threads} threads a CPU of its own, and this process may use {cpus}; give --threads \
         {cpus} or less, or leave --pin-threads out"
    )]
    TooFew { threads: usize, cpus: usize },
    #[error("the system does not say which CPUs this process may use; leave --pin-threads out")]
    Unknown,
}

/// The threads that compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeThreads {
    /// How many, the engine's own included.
    pub count: usize,
    /// The CPU of each, the engine's first, where they are pinned; otherwise none.
    pub cpus: Vec<usize>,
}

/// The threads that `config` means on this machine.
///
/// # Errors
/// They are to be pinned and are more than the CPUs, or these are not known.
pub fn compute_threads(config: &Config) -> Result<ComputeThreads, PinError> {
    threads_on(config, &Processors::of_this_process())
}

/// The processor as it calls itself; its architecture where it does not.
pub fn processor_name() -> String {
    processor_name_under(Path::new("/"))
}

fn processor_name_under(root: &Path) -> String {
    let cpuinfo = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    // Arm has numbers only: who made it, and which part it is.
    let of_key = |wanted: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == wanted && !value.trim().is_empty()).then(|| value.trim().to_owned())
        })
    };
    of_key("model name")
        .or_else(|| {
            let (maker, part) = (of_key("CPU implementer")?, of_key("CPU part")?);
            Some(format!(
                "{}, implementer {maker}, part {part}",
                std::env::consts::ARCH
            ))
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn threads_on(config: &Config, processors: &Processors) -> Result<ComputeThreads, PinError> {
    let count = config.threads.unwrap_or_else(|| processors.threads());
    let mut cpus = Vec::new();
    if config.pin_threads {
        let allowed = processors.cpus.len();
        if allowed == 0 {
            return Err(PinError::Unknown);
        }
        if count > allowed {
            return Err(PinError::TooFew {
                threads: count,
                cpus: allowed,
            });
        }
        cpus = processors.cpus[..count].to_vec();
    }
    Ok(ComputeThreads { count, cpus })
}

/// What this process may compute on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Processors {
    /// Numbers of CPUs: the first of each core in ascending order, then the second of each, and so on. Empty where the
    /// system does not say.
    cpus: Vec<usize>,
    cores: usize,
    /// CPUs whose time this process may take together: a control group may grant less than it shows.
    quota: usize,
}

impl Processors {
    fn of_this_process() -> Processors {
        let allowed = sched_getaffinity(None).map_or_else(
            |_| Vec::new(),
            |set| {
                (0..CpuSet::MAX_CPU)
                    .filter(|&cpu| set.is_set(cpu))
                    .collect()
            },
        );
        let quota = std::thread::available_parallelism().map_or(1, usize::from);
        Processors::under(Path::new("/"), &allowed, quota)
    }

    /// `allowed` in ascending order.
    fn under(root: &Path, allowed: &[usize], quota: usize) -> Processors {
        let mut cores: Vec<(String, Vec<usize>)> = Vec::new();
        for &cpu in allowed {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            // A CPU of which nothing is said is a core of its own.
            let core =
                std::fs::read_to_string(root.join(file)).unwrap_or_else(|_| format!("only {cpu}"));
            match cores.iter_mut().find(|(name, _)| *name == core) {
                Some((_, cpus)) => cpus.push(cpu),
                None => cores.push((core, vec![cpu])),
            }
        }
        let most = cores.iter().map(|(_, cpus)| cpus.len()).max().unwrap_or(0);
        let nth = |n: usize| {
            cores
                .iter()
                .filter_map(move |(_, cpus)| cpus.get(n).copied())
        };
        Processors {
            cpus: (0..most).flat_map(nth).collect(),
            cores: cores.len(),
            quota,
        }
    }

    /// How many threads compute where nothing else is asked for.
    fn threads(&self) -> usize {
        match self.cores {
            0 => self.quota,
            cores => cores.min(self.quota),
        }
        .max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose CPUs have these siblings.
    fn machine(siblings: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (cpu, list) in siblings.iter().enumerate() {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            let folder = root.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("thread_siblings_list"), format!("{list}\n")).unwrap();
        }
        root
    }

    #[track_caller]
    fn check(siblings: &[&str], allowed: &[usize], quota: usize, cpus: &[usize], threads: usize) {
        let root = machine(siblings);
        let processors = Processors::under(root.path(), allowed, quota);
        assert_eq!(processors.cpus, cpus);
        assert_eq!(processors.threads(), threads);
    }

    #[test]
    fn a_core_with_two_hardware_threads_gets_one_thread() {
        let none: &[&str] = &[];
        check(&["0", "1"], &[0, 1], 2, &[0, 1], 2);
        // Siblings side by side, and half the machine apart.
        check(
            &["0-1", "0-1", "2-3", "2-3"],
            &[0, 1, 2, 3],
            4,
            &[0, 2, 1, 3],
            2,
        );
        check(
            &["0,2", "1,3", "0,2", "1,3"],
            &[0, 1, 2, 3],
            4,
            &[0, 1, 2, 3],
            2,
        );
        // Some cores have two and others one.
        check(
            &["0-1", "0-1", "2", "3"],
            &[0, 1, 2, 3],
            4,
            &[0, 2, 3, 1],
            3,
        );
        // What this process may not use does not count.
        check(&["0,2", "1,3", "0,2", "1,3"], &[1, 2], 2, &[1, 2], 2);
        check(&["0,2", "1,3", "0,2", "1,3"], &[1, 3], 2, &[1, 3], 1);
        // A control group that grants the time of one CPU.
        check(&["0", "1", "2"], &[0, 1, 2], 1, &[0, 1, 2], 1);
        // Nothing is known.
        check(none, &[4, 5], 2, &[4, 5], 2);
        check(none, &[], 3, &[], 3);
        check(none, &[], 0, &[], 1);
    }

    #[test]
    fn a_processor_is_named_as_well_as_the_system_can() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(processor_name_under(root.path()), std::env::consts::ARCH);
        std::fs::create_dir(root.path().join("proc")).unwrap();
        for (cpuinfo, name) in [
            (
                "processor\t: 0\nmodel\t\t: 207\nmodel name\t: A CPU @ 2 GHz\n\nmodel name\t: another\n",
                "A CPU @ 2 GHz".to_owned(),
            ),
            (
                "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
                format!("{}, implementer 0x41, part 0xd40", std::env::consts::ARCH),
            ),
        ] {
            std::fs::write(root.path().join("proc/cpuinfo"), cpuinfo).unwrap();
            assert_eq!(processor_name_under(root.path()), name);
        }
    }

    #[test]
    fn pinned_threads_have_a_cpu_each_or_are_refused() {
        let root = machine(&["0-1", "0-1", "2-3", "2-3"]);
        let processors = Processors::under(root.path(), &[0, 1, 2, 3], 4);
        let threads = |threads, pin_threads| {
            let config = Config {
                threads,
                pin_threads,
                ..Config::default()
            };
            threads_on(&config, &processors).map(|threads| (threads.count, threads.cpus))
        };
        let pinned = Config {
            pin_threads: true,
            ..Config::default()
        };
        let unknown = Processors::under(Path::new("/"), &[], 4);
        assert_eq!(threads_on(&pinned, &unknown), Err(PinError::Unknown));
        assert_eq!(threads(None, false), Ok((2, vec![])));
        assert_eq!(threads(Some(9), false), Ok((9, vec![])));
        assert_eq!(threads(None, true), Ok((2, vec![0, 2])));
        assert_eq!(threads(Some(3), true), Ok((3, vec![0, 2, 1])));
        let refused = threads(Some(5), true).unwrap_err();
        assert_eq!(
            refused,
            PinError::TooFew {
                threads: 5,
                cpus: 4
            }
        );
        assert!(refused.to_string().contains("--threads 4"), "{refused}");
    }
}
