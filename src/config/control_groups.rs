//! The control groups that bound this process's memory, of both versions: what they leave, and whom they have ended.

use super::FreeMemory;
use std::path::{Path, PathBuf};

/// Processes of this one's control group that the kernel has ended for lack of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierKills {
    pub count: u64,
    /// Where the kernel says so.
    pub file: PathBuf,
}

/// The least that any group above this process leaves; `None` where no group has a limit.
pub(super) fn free(root: &Path) -> Option<FreeMemory> {
    let mut least: Option<FreeMemory> = None;
    for (version, group) in groups(root) {
        for directory in version.directories(root, &group) {
            if let Some(free) = version.free_of(&directory)
                && least.is_none_or(|least| free.bytes < least.bytes)
            {
                least = Some(free);
            }
        }
    }
    least
}

/// What the group that this process is in tells of processes that were ended; `None` where it does not, or of none.
pub(super) fn earlier_kills(root: &Path) -> Option<EarlierKills> {
    groups(root)
        .into_iter()
        .find_map(|(version, group)| {
            // The nearest group that has the file is this process's. Those above count others' processes.
            version.directories(root, &group).find_map(|directory| {
                let file = directory.join(version.events);
                let text = std::fs::read_to_string(&file).ok()?;
                let count = figure(&text, "oom_kill")?;
                Some(EarlierKills { count, file })
            })
        })
        .filter(|kills| kills.count > 0)
}

/// The groups of this process that may bound its memory: one of each version at most.
fn groups(root: &Path) -> Vec<(&'static Version, String)> {
    // Without this file there are no control groups.
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = if controllers.is_empty() {
            &VERSION_2
        } else if controllers.split(',').any(|name| name == "memory") {
            &VERSION_1
        } else {
            return None;
        };
        Some((version, path.to_owned()))
    };
    text.lines().filter_map(group).collect()
}

/// The number behind a word at the start of a line.
fn figure(text: &str, key: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, number) = lines.find(|(word, _)| *word == key)?;
    number.trim().parse().ok()
}

/// The files of one version of control groups.
struct Version {
    name: &'static str,
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Cache of files, which the kernel gives back before it ends a process: counted as used and as good as free, as in
    /// `MemAvailable`. The model file itself may be there, from the last time that it was mapped.
    reclaimable: [&'static str; 2],
    /// Has the count of processes that were ended.
    events: &'static str,
}

const VERSION_2: Version = Version {
    name: "cgroup v2 limit",
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
    events: "memory.events",
};
const VERSION_1: Version = Version {
    name: "cgroup v1 limit",
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
    events: "memory.oom_control",
};

impl Version {
    /// The directories from a group up to the root. Inside a container the group's path is often the host's and does
    /// not exist; then the mount itself is this process's group.
    fn directories(&self, root: &Path, group: &str) -> impl Iterator<Item = PathBuf> + use<> {
        let mount = root.join(self.mount);
        let first = mount.join(group.trim_start_matches('/'));
        std::iter::successors(Some(first), move |directory| {
            let above = directory.parent().filter(|_| *directory != mount)?;
            above.starts_with(&mount).then(|| above.to_owned())
        })
    }

    fn free_of(&self, directory: &Path) -> Option<FreeMemory> {
        let number = |name: &str| -> Option<u64> {
            let text = std::fs::read_to_string(directory.join(name)).ok()?;
            // `max` is no limit.
            text.trim().parse().ok()
        };
        let limit = number(self.limit)?;
        let used = number(self.used)?;
        let statistics = std::fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let reclaimable: u64 = self
            .reclaimable
            .iter()
            .filter_map(|key| figure(&statistics, key))
            .fold(0, u64::saturating_add);
        Some(FreeMemory {
            bytes: limit.saturating_sub(used.saturating_sub(reclaimable)),
            limit,
            limited_by: self.name,
        })
    }
}
