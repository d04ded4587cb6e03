//! The control groups that bound this process's memory, of both versions.

use super::FreeMemory;
use std::path::{Path, PathBuf};

/// The least that any group above this process leaves; `None` where no group has a limit.
pub(super) fn free(root: &Path) -> Option<FreeMemory> {
    let mut least: Option<FreeMemory> = None;
    // Without this file there are no control groups.
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version = if controllers.is_empty() {
            &VERSION_2
        } else if controllers.split(',').any(|name| name == "memory") {
            &VERSION_1
        } else {
            continue;
        };
        if let Some(bytes) = version.free(root, path)
            && least.is_none_or(|least| bytes < least.bytes)
        {
            least = Some(FreeMemory {
                bytes,
                limited_by: version.name,
            });
        }
    }
    least
}

/// The files of one version of control groups.
struct ControlGroups {
    name: &'static str,
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Cache that the kernel gives back first; counted as used and as good as free.
    reclaimable: &'static str,
}

const VERSION_2: ControlGroups = ControlGroups {
    name: "cgroup v2 limit",
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file ",
};
const VERSION_1: ControlGroups = ControlGroups {
    name: "cgroup v1 limit",
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};

impl ControlGroups {
    /// The least that any group from `path` up to the root leaves. Inside a container the path is often the host's
    /// and does not exist; then the mount itself is this process's group.
    fn free(&self, root: &Path, path: &str) -> Option<u64> {
        let mount = root.join(self.mount);
        let mut directory: PathBuf = mount.join(path.trim_start_matches('/'));
        let mut least = None;
        loop {
            if let Some(free) = self.free_of(&directory) {
                least = Some(least.map_or(free, |least: u64| least.min(free)));
            }
            if directory == mount || !directory.pop() || !directory.starts_with(&mount) {
                return least;
            }
        }
    }

    fn free_of(&self, directory: &Path) -> Option<u64> {
        let number = |name: &str| -> Option<u64> {
            let text = std::fs::read_to_string(directory.join(name)).ok()?;
            // `max` is no limit.
            text.trim().parse().ok()
        };
        let limit = number(self.limit)?;
        let used = number(self.used)?;
        let statistics = std::fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let reclaimable = statistics
            .lines()
            .find_map(|line| line.strip_prefix(self.reclaimable))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
    }
}
