//! What the kernel says that this process holds in RAM, by what it is held for: one walk over `/proc/self/smaps`.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Resident bytes; they add up to `total`. All 0 where the kernel does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resident {
    pub(super) host_arena: u64,
    pub(super) device_arena: u64,
    /// The files of the model, where they are mapped.
    pub(super) model: u64,
    pub(super) program: u64,
    /// The stack of the first thread.
    pub(super) main_stack: u64,
    /// All other memory without a file: the allocator's, and the stacks of threads.
    pub(super) anonymous: u64,
    /// What the kernel maps for its own interfaces: queues of io_uring, vdso.
    pub(super) kernel: u64,
}

/// What the mappings are told apart by.
pub(super) struct Landmarks<'a> {
    pub(super) host_arena: Range<u64>,
    pub(super) device_arena: Range<u64>,
    pub(super) model: &'a [PathBuf],
}

impl Resident {
    pub(super) fn now(landmarks: &Landmarks<'_>) -> Resident {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        Resident::of(&smaps, landmarks)
    }

    /// See proc_pid_smaps(5): a line that names the mapping, then lines of figures.
    fn of(smaps: &str, landmarks: &Landmarks<'_>) -> Resident {
        let mut resident = Resident::default();
        let mut current = None;
        for line in smaps.lines() {
            if let Some(mapping) = mapping(line) {
                current = Some(mapping);
            } else if let Some(figure) = line.strip_prefix("Rss:")
                && let Some((start, name)) = current
            {
                *resident.of_mapping(start, name, landmarks) += kibibytes(figure);
            }
        }
        resident
    }

    fn of_mapping(&mut self, start: u64, name: &str, landmarks: &Landmarks<'_>) -> &mut u64 {
        if landmarks.host_arena.contains(&start) {
            &mut self.host_arena
        } else if landmarks.device_arena.contains(&start) {
            &mut self.device_arena
        } else if landmarks.model.iter().any(|path| path == Path::new(name)) {
            &mut self.model
        } else if name == "[stack]" {
            &mut self.main_stack
        } else if name.starts_with('/') && !name.starts_with("/dev/zero") {
            &mut self.program
        } else if name.is_empty() || name == "[heap]" || name.starts_with("[anon:") {
            &mut self.anonymous
        } else {
            &mut self.kernel
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.host_arena
            + self.device_arena
            + self.model
            + self.program
            + self.main_stack
            + self.anonymous
            + self.kernel
    }
}

/// Start and name of `7f9951400000-7f9953ea8000 rw-p 00000000 00:00 0          [heap]`. Names may hold spaces.
fn mapping(line: &str) -> Option<(u64, &str)> {
    let mut rest = line;
    let mut field = || {
        let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = after.trim_start_matches(' ');
        field
    };
    let (start, end) = field().split_once('-')?;
    u64::from_str_radix(end, 16).ok()?;
    let start = u64::from_str_radix(start, 16).ok()?;
    // Permissions, offset, device, inode.
    for _ in 0..4 {
        field();
    }
    Some((start, rest))
}

/// Of `     5248 kB`.
fn kibibytes(figure: &str) -> u64 {
    let number = figure.split_whitespace().next().unwrap_or_default();
    number.parse::<u64>().map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55b8d1b47000-55b8d217f000 r-xp 00269000 fe:00 5660726                    /opt/strata
Rss:                5600 kB
VmFlags: rd ex mr mw me
55b9037c9000-55b903d22000 rw-p 00000000 00:00 0                          [heap]
Size:               5476 kB
Rss:                5248 kB
7f9951400000-7f9953ea8000 rw-p 00000000 00:00 0
Rss:               34816 kB
Private_Dirty:     34816 kB
7f9953ea8000-7f9953eb8000 rw-p 00000000 00:00 0
Rss:                  16 kB
7f995a600000-7f995bd1f000 rw-p 00000000 00:00 0
Rss:               23676 kB
7f995bd1f000-7f995bd20000 r--s 00000000 fe:00 77     /models/with a space.gguf
Rss:                   4 kB
7f995c000000-7f995c001000 rw-s 00000000 00:0f 9      anon_inode:[io_uring]
Rss:                   8 kB
7ffd6a5f0000-7ffd6a611000 rw-p 00000000 00:00 0                          [stack]
Rss:                  40 kB
";

    #[test]
    fn every_mapping_counts_once() {
        let landmarks = Landmarks {
            host_arena: 0x7f99_5a60_0000..0x7f99_5bd1_f000,
            device_arena: 0x7f99_5140_0000..0x7f99_53ea_8000,
            model: &[
                "/models/none.gguf".into(),
                "/models/with a space.gguf".into(),
            ],
        };
        let resident = Resident::of(SMAPS, &landmarks);
        assert_eq!(
            resident,
            Resident {
                host_arena: 23676 << 10,
                device_arena: 34816 << 10,
                model: 4 << 10,
                program: 5600 << 10,
                main_stack: 40 << 10,
                anonymous: (5248 + 16) << 10,
                kernel: 8 << 10,
            }
        );
        assert_eq!(
            resident.total(),
            (5600 + 5248 + 34816 + 16 + 23676 + 4 + 8 + 40) << 10
        );
        assert_eq!(Resident::of("", &landmarks), Resident::default());
    }

    #[test]
    fn this_process_has_a_program_and_a_heap() {
        let landmarks = Landmarks {
            host_arena: 0..0,
            device_arena: 0..0,
            model: &["/nowhere".into()],
        };
        let resident = Resident::now(&landmarks);
        if resident.total() == 0 {
            eprintln!("skipped: the kernel has no /proc/self/smaps");
            return;
        }
        assert!(resident.program > 0 && resident.anonymous > 0);
    }
}
