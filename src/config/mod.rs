//! One validated `Config` from a file, the environment and flags. Imports nothing of ours; asks the machine only for
//! its memory (`memory.rs`) and its processors (`processors.rs`).
//!
//! Every key stands once, in `keys::KEYS`: its flag, its name in the file, its `STRATA_*` variable, its default and its
//! help all come from that line, so the three sources cannot drift apart. Flags win over the environment, which wins
//! over the file. An unknown key in the file or in `STRATA_*` is an error that names it.

mod control_groups;
mod keys;
mod memory;
mod processors;
mod size;
mod sources;

pub use control_groups::EarlierKills;
pub use keys::{KEYS, Key};
pub use memory::{
    Budgets, DeviceTier, FreeDeviceMemory, FreeMemory, HOST_RESERVE_BYTES, MemoryBudgetError,
    budgets, earlier_kills, free_host_memory, machine_memory_bytes,
};
pub use processors::{ComputeThreads, PinError, compute_threads, processor_name};
pub use size::{format_bytes, parse_rate, parse_size};
pub use sources::{ConfigError, Sources, read_text_file};

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where weights are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSetting {
    /// The first CUDA device, where there is one that can be used; otherwise `cpu`.
    Auto,
    Cpu,
    /// The CUDA device with this number, in the driver's order.
    Cuda(u32),
    /// A host arena stands for VRAM behind a link of a given rate.
    Emulated,
}

/// A budget: given, or what is free less a reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySetting {
    Auto,
    Bytes(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderSetting {
    Auto,
    IoUring,
    Pread,
}

/// Where measured rates are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RatesSetting {
    /// Where `strata bench rates` stores them, if they are of this machine.
    Auto,
    /// Nowhere.
    None,
    File(PathBuf),
}

/// Which share of later reads is held against the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VerifySetting {
    /// All, or as many as cost little.
    Auto,
    /// From 0 to 1.
    Share(f64),
}

/// Where the checksums of a model file are kept for later runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChecksumSetting {
    /// In the user's cache directory, where there is one.
    Auto,
    Nowhere,
    Directory(PathBuf),
}

/// What the KV cache is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvTypeSetting {
    F16,
    F32,
}

/// Who multiplies by groups that do not rest on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutorSetting {
    Auto,
    Device,
    Host,
    /// The host in steps of up to so many tokens, the device in wider ones.
    HostUpTo(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// As `tracing-subscriber` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            LogLevel::Off => "off",
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// A key that clients must send. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: String) -> Secret {
        Secret(value)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// Every setting, checked. What each key means and may be stands in `keys.rs`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub model: Option<PathBuf>,
    pub model_name: Option<String>,
    pub device: DeviceSetting,
    pub device_memory: MemorySetting,
    pub host_memory: MemorySetting,
    /// Bytes per second of the emulated link.
    pub link_rate: f64,
    /// The card whose rates predictions are made from; it wins over `rates`.
    pub hardware: Option<PathBuf>,
    pub rates: RatesSetting,
    /// Tokens of a sequence. `None`: the smaller of the model's and `CONTEXT_AUTO`.
    pub context: Option<u32>,
    pub parallel: u32,
    pub kv_type: KvTypeSetting,
    pub reader: ReaderSetting,
    pub verify_reads: VerifySetting,
    pub checksum_directory: ChecksumSetting,
    /// `None`: one per core that this process may use.
    pub threads: Option<usize>,
    /// Each compute thread stays on a CPU of its own.
    pub pin_threads: bool,
    /// Bytes of the largest group of weights. `None`: the plan chooses, as for the next two.
    pub slice: Option<u64>,
    /// Groups that each ring holds.
    pub ring_entries: Option<u32>,
    /// Tokens of the widest step.
    pub step_width: Option<u32>,
    pub executor: ExecutorSetting,
    pub copy: bool,
    pub log: LogLevel,
    /// The file that steps are traced to; `None`: nothing is traced.
    pub trace: Option<PathBuf>,
    pub listen: String,
    /// Requests that may wait.
    pub queue: usize,
    pub grace: Duration,
    /// `None`: no comments.
    pub keep_alive: Option<Duration>,
    pub stall_timeout: Duration,
    pub api_key: Option<Secret>,
}

/// What `context = "auto"` takes of models that could do more.
pub const CONTEXT_AUTO: u32 = 8192;

impl Default for Config {
    fn default() -> Config {
        Config {
            model: None,
            model_name: None,
            device: DeviceSetting::Auto,
            device_memory: MemorySetting::Auto,
            host_memory: MemorySetting::Auto,
            link_rate: 4e9,
            hardware: None,
            rates: RatesSetting::Auto,
            context: None,
            parallel: 4,
            kv_type: KvTypeSetting::F16,
            reader: ReaderSetting::Auto,
            verify_reads: VerifySetting::Auto,
            checksum_directory: ChecksumSetting::Auto,
            threads: None,
            pin_threads: false,
            slice: None,
            ring_entries: None,
            step_width: None,
            executor: ExecutorSetting::Auto,
            copy: false,
            log: LogLevel::Info,
            trace: None,
            listen: "127.0.0.1:8080".to_owned(),
            queue: 64,
            grace: Duration::from_secs(30),
            keep_alive: Some(Duration::from_secs(15)),
            stall_timeout: Duration::from_secs(60),
            api_key: None,
        }
    }
}

impl Config {
    /// The file, then `STRATA_*`, then flags, over the defaults.
    pub fn resolve(sources: &Sources) -> Result<Config, ConfigError> {
        sources.resolve()
    }

    /// The context of each sequence, for a model trained on `model_context` tokens.
    pub fn context_for(&self, model_context: u32) -> u32 {
        self.context
            .unwrap_or_else(|| model_context.min(CONTEXT_AUTO))
    }

    /// The name that answers give: `model-name`, or the file's without `.gguf`.
    pub fn served_name(&self, model: &Path) -> String {
        self.model_name.clone().unwrap_or_else(|| {
            model.file_stem().map_or_else(
                || "model".to_owned(),
                |stem| stem.to_string_lossy().into_owned(),
            )
        })
    }

    /// What is allowed and still worth a line in the log.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.device == DeviceSetting::Cpu && self.device_memory != MemorySetting::Auto {
            warnings.push(
                "device-memory has no effect: `cpu` has no device tier; give --device cuda:0, or emulated to try one"
                    .to_owned(),
            );
        }
        warnings
    }
}
