//! How much memory `auto` is: what is free, by `MemAvailable` and by every control group above this process, less a
//! reserve.

use super::control_groups::{self, EarlierKills};
use super::{Config, MemorySetting, format_bytes};
use std::path::Path;

/// Left to the rest of the process and the machine: code, stacks, HTTP buffers, the page cache of other programs. On
/// small machines a quarter of what is free, if that is less.
pub const HOST_RESERVE_BYTES: u64 = 1 << 30;

/// The same under a control group's limit, which nobody else's programs count against: what strata itself holds outside its
/// budgets, or this share where that is more.
const CONTROL_GROUP_RESERVE_BYTES: u64 = 128 << 20;
const CONTROL_GROUP_RESERVE_SHARE: u64 = 32;

/// The share of the host budget that stands for VRAM when an emulated device is given no size.
const EMULATED_SHARE: u64 = 4;

/// Budgets in bytes, all known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// `None`: there is no device tier.
    pub device: Option<u64>,
    pub host: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum MemoryBudgetError {
    #[error("find out how much memory is free: {0}; give --host-memory a size")]
    Unknown(#[from] std::io::Error),
    #[error(
        "device-memory of {} leaves nothing of the {} that are free; give --device-memory and --host-memory smaller sizes",
        format_bytes(*device),
        format_bytes(*free)
    )]
    NothingLeft { device: u64, free: u64 },
    #[error(
        "device-memory of {} is more than the {} that are free on the device; give a smaller --device-memory, or auto",
        format_bytes(*wanted),
        format_bytes(*free)
    )]
    DeviceHasLess { wanted: u64, free: u64 },
    #[error(
        "the device is not here to say how much of its memory is free; give --device-memory a size"
    )]
    DeviceUnknown,
}

/// What is free, and what says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    pub bytes: u64,
    /// Of how many: the control group's limit, or all the memory of the machine.
    pub limit: u64,
    pub limited_by: &'static str,
}

/// The device tier that budgets are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceTier {
    None,
    /// It lives in RAM, so `auto` for the host is what it leaves.
    Emulated,
    /// A GPU. `None`: it was not asked how many bytes of its memory are free.
    Gpu {
        free: Option<FreeDeviceMemory>,
    },
}

/// What is free on a GPU, and what `auto` leaves of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeDeviceMemory {
    pub bytes: u64,
    pub reserve: u64,
}

/// The budgets that `config` means on this machine.
pub fn budgets(config: &Config, device: DeviceTier) -> Result<Budgets, MemoryBudgetError> {
    budgets_under(config, device, Path::new("/"))
}

/// A GPU's budget: no more than is free there.
fn gpu_budget(
    setting: MemorySetting,
    free: Option<FreeDeviceMemory>,
) -> Result<u64, MemoryBudgetError> {
    match (setting, free) {
        (MemorySetting::Bytes(wanted), Some(free)) if wanted > free.bytes => {
            Err(MemoryBudgetError::DeviceHasLess {
                wanted,
                free: free.bytes,
            })
        }
        (MemorySetting::Bytes(wanted), _) => Ok(wanted),
        (MemorySetting::Auto, Some(free)) => Ok(free.bytes - free.reserve.min(free.bytes / 4)),
        (MemorySetting::Auto, None) => Err(MemoryBudgetError::DeviceUnknown),
    }
}

fn budgets_under(
    config: &Config,
    tier: DeviceTier,
    root: &Path,
) -> Result<Budgets, MemoryBudgetError> {
    let usable = || -> Result<u64, MemoryBudgetError> {
        // Of the machine's memory and of the group's each its own reserve is left, whichever is the tighter.
        let of_machine = memory_of_machine(root)?.bytes;
        let of_machine = of_machine - HOST_RESERVE_BYTES.min(of_machine / 4);
        let of_group = control_groups::free(root).map_or(u64::MAX, |free| {
            let reserve = CONTROL_GROUP_RESERVE_BYTES.max(free.bytes / CONTROL_GROUP_RESERVE_SHARE);
            free.bytes - reserve.min(free.bytes / 4)
        });
        Ok(of_machine.min(of_group))
    };
    let device = match (tier, config.device_memory) {
        (DeviceTier::None, _) => None,
        (DeviceTier::Gpu { free }, setting) => Some(gpu_budget(setting, free)?),
        (DeviceTier::Emulated, MemorySetting::Bytes(bytes)) => Some(bytes),
        (DeviceTier::Emulated, MemorySetting::Auto) => Some(match config.host_memory {
            MemorySetting::Bytes(host) => host / EMULATED_SHARE,
            MemorySetting::Auto => usable()? / EMULATED_SHARE,
        }),
    };
    let host = match config.host_memory {
        MemorySetting::Bytes(bytes) => bytes,
        MemorySetting::Auto => {
            let free = usable()?;
            let device = match tier {
                DeviceTier::Emulated => device.unwrap_or(0),
                DeviceTier::None | DeviceTier::Gpu { .. } => 0,
            };
            free.checked_sub(device)
                .filter(|host| *host > 0)
                .ok_or(MemoryBudgetError::NothingLeft { device, free })?
        }
    };
    Ok(Budgets { device, host })
}

/// What this process could still take.
pub fn free_host_memory() -> std::io::Result<FreeMemory> {
    free_memory_under(Path::new("/"))
}

/// What the kernel has had to end in this process's control group before.
pub fn earlier_kills() -> Option<EarlierKills> {
    control_groups::earlier_kills(Path::new("/"))
}

/// All the memory and swap that this machine has: more can never be had.
pub fn machine_memory_bytes() -> std::io::Result<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let total = kibibytes(&meminfo, "MemTotal:")
        .ok_or_else(|| std::io::Error::other("/proc/meminfo has no MemTotal"))?;
    let swap = kibibytes(&meminfo, "SwapTotal:").unwrap_or(0);
    Ok(total.saturating_add(swap).saturating_mul(1024))
}

fn kibibytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

fn free_memory_under(root: &Path) -> std::io::Result<FreeMemory> {
    let of_machine = memory_of_machine(root)?;
    let of_group = control_groups::free(root);
    Ok(of_group
        .filter(|free| free.bytes < of_machine.bytes)
        .unwrap_or(of_machine))
}

fn memory_of_machine(root: &Path) -> std::io::Result<FreeMemory> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo"))?;
    let available = kibibytes(&meminfo, "MemAvailable:")
        .ok_or_else(|| std::io::Error::other("/proc/meminfo has no MemAvailable"))?;
    let total = kibibytes(&meminfo, "MemTotal:").unwrap_or(available);
    Ok(FreeMemory {
        bytes: available.saturating_mul(1024),
        limit: total.saturating_mul(1024),
        limited_by: "MemAvailable",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n",
    );

    #[test]
    fn without_control_groups_it_is_mem_available() {
        let root = machine(&[MEMINFO]);
        let free = free_memory_under(root.path()).unwrap();
        let expected = FreeMemory {
            bytes: 16 * GIB,
            limit: 32 * GIB,
            limited_by: "MemAvailable",
        };
        assert_eq!(free, expected);
        assert_eq!(control_groups::earlier_kills(root.path()), None);
    }

    #[test]
    fn the_tightest_group_above_the_process_counts() {
        let root = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/a/memory.current", "3221225472\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 1\ninactive_file 1073741824\n",
            ),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "100\n"),
        ]);
        let free = free_memory_under(root.path()).unwrap();
        let expected = FreeMemory {
            bytes: 6 * GIB,
            limit: 8 * GIB,
            limited_by: "cgroup v2 limit",
        };
        assert_eq!(free, expected);
    }

    /// A model that was served from the page cache is still there, in the same group and in active use: the next start
    /// has that memory.
    #[test]
    fn cache_of_files_is_as_good_as_free() {
        let limit = 8 * GIB;
        let used = 6 * GIB;
        for (group, folder, names, keys) in [
            (
                "0::/x\n",
                "sys/fs/cgroup/x",
                ["memory.max", "memory.current"],
                ["inactive_file", "active_file"],
            ),
            (
                "4:memory:/x\n",
                "sys/fs/cgroup/memory/x",
                ["memory.limit_in_bytes", "memory.usage_in_bytes"],
                ["total_inactive_file", "total_active_file"],
            ),
        ] {
            let statistics = format!("anon 1\n{} {GIB}\n{} {}\n", keys[0], keys[1], 4 * GIB);
            let root = machine(&[
                MEMINFO,
                ("proc/self/cgroup", group),
                (&format!("{folder}/{}", names[0]), &limit.to_string()),
                (&format!("{folder}/{}", names[1]), &used.to_string()),
                (&format!("{folder}/memory.stat"), &statistics),
            ]);
            assert_eq!(free_memory_under(root.path()).unwrap().bytes, 7 * GIB);
        }
    }

    #[test]
    fn processes_that_were_ended_are_those_of_the_own_group() {
        let check = |files: &[(&str, &str)], expected: Option<(u64, &str)>| {
            let root = machine(files);
            let found = control_groups::earlier_kills(root.path());
            let found = found.as_ref().map(|kills| {
                let file = kills.file.strip_prefix(root.path()).unwrap();
                (kills.count, file.to_str().unwrap())
            });
            assert_eq!(found, expected);
        };
        let v2 = ("proc/self/cgroup", "0::/a/b\n");
        let above = ("sys/fs/cgroup/a/memory.events", "oom 9\noom_kill 9\n");
        let own = |text| ("sys/fs/cgroup/a/b/memory.events", text);
        let none = "low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\noom_group_kill 0\n";
        check(&[v2, above, own(none)], None);
        let some = "low 0\nhigh 0\nmax 70\noom 4\noom_kill 3\noom_group_kill 0\n";
        let file = "sys/fs/cgroup/a/b/memory.events";
        check(&[v2, above, own(some)], Some((3, file)));
        check(&[v2, own("oom_kill what\n")], None);
        // In a container: the path is the host's.
        let v1 = ("proc/self/cgroup", "3:cpu:/x\n4:memory:/docker/abc\n");
        let file = "sys/fs/cgroup/memory/memory.oom_control";
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        check(&[v1, (file, text)], Some((2, file)));
        check(&[v1], None);
    }

    #[test]
    fn in_a_container_the_mount_itself_is_the_group() {
        let root = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "3:cpu:/x\n4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824"),
        ]);
        let free = free_memory_under(root.path()).unwrap();
        assert_eq!((free.bytes, free.limited_by), (3 * GIB, "cgroup v1 limit"));
    }

    #[test]
    fn auto_leaves_a_reserve_and_the_emulated_device_is_taken_from_ram() {
        let root = machine(&[MEMINFO]);
        let check_tier = |config: &Config, tier, device, host| {
            let budgets = budgets_under(config, tier, root.path()).unwrap();
            assert_eq!(budgets, Budgets { device, host });
        };
        let check = |config: &Config, device, host| {
            check_tier(config, DeviceTier::Emulated, device, host);
        };
        check_tier(&Config::default(), DeviceTier::None, None, 15 * GIB);
        let mut config = Config {
            device_memory: MemorySetting::Bytes(5 * GIB),
            ..Config::default()
        };
        check(&config, Some(5 * GIB), 10 * GIB);
        config.device_memory = MemorySetting::Auto;
        check(&config, Some(15 * GIB / 4), 15 * GIB - 15 * GIB / 4);
        config.host_memory = MemorySetting::Bytes(8 * GIB);
        check(&config, Some(2 * GIB), 8 * GIB);
        config.device_memory = MemorySetting::Bytes(64 * GIB);
        config.host_memory = MemorySetting::Auto;
        let error = budgets_under(&config, DeviceTier::Emulated, root.path());
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("64.00 GiB") && error.contains("--device-memory"),
            "{error}"
        );
    }

    #[test]
    fn in_a_control_group_auto_leaves_what_the_process_itself_needs() {
        let of_limit = |limit: u64| {
            let limit = limit.to_string();
            let root = machine(&[
                MEMINFO,
                ("proc/self/cgroup", "4:memory:/a\n"),
                ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", &limit),
                ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "0"),
            ]);
            let budgets = budgets_under(&Config::default(), DeviceTier::None, root.path());
            budgets.unwrap().host
        };
        const MIB: u64 = 1 << 20;
        assert_eq!(of_limit(2560 * MIB), (2560 - 128) * MIB);
        assert_eq!(of_limit(8192 * MIB), (8192 - 256) * MIB);
        assert_eq!(of_limit(400 * MIB), 300 * MIB);
        // A group's limit near what the machine has: the machine's reserve is left all the same.
        assert_eq!(of_limit(16 * GIB - MIB), 15 * GIB);
    }

    #[test]
    fn a_gpu_has_memory_of_its_own_and_no_budget_exceeds_what_is_free_there() {
        let root = machine(&[MEMINFO]);
        let free = Some(FreeDeviceMemory {
            bytes: 23 * GIB,
            reserve: GIB / 2,
        });
        let of = |device_memory, free| {
            let config = Config {
                device_memory,
                ..Config::default()
            };
            budgets_under(&config, DeviceTier::Gpu { free }, root.path())
        };
        let check = |device_memory, free, device| {
            let host = 15 * GIB;
            let device = Some(device);
            assert_eq!(of(device_memory, free).unwrap(), Budgets { device, host });
        };
        check(MemorySetting::Auto, free, 23 * GIB - GIB / 2);
        check(MemorySetting::Bytes(23 * GIB), free, 23 * GIB);
        check(MemorySetting::Bytes(24 * GIB), None, 24 * GIB);
        for (setting, free, parts) in [
            (
                MemorySetting::Bytes(24 * GIB),
                free,
                ["24.00 GiB", "23.00 GiB"],
            ),
            (MemorySetting::Auto, None, ["--device-memory", "size"]),
        ] {
            let error = of(setting, free).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn explicit_budgets_do_not_ask_the_machine() {
        let config = Config {
            host_memory: MemorySetting::Bytes(GIB),
            ..Config::default()
        };
        let nowhere = Path::new("/nonexistent");
        assert_eq!(
            budgets_under(&config, DeviceTier::None, nowhere).unwrap(),
            Budgets {
                device: None,
                host: GIB
            }
        );
    }
}
