//! Every key, once: flag `--key`, `key = ...` in the file, `STRATA_KEY` in the environment.

use super::{
    ChecksumSetting, Config, DeviceSetting, ExecutorSetting, KvTypeSetting, LogLevel,
    MemorySetting, RatesSetting, ReaderSetting, Secret, VerifySetting, parse_rate, parse_size,
};
use std::path::PathBuf;
use std::time::Duration;

/// One setting.
pub struct Key {
    /// As in `--name` and in the file; `STRATA_NAME` with `_` for `-`.
    pub name: &'static str,
    /// What stands for the value in `--help`.
    pub value: &'static str,
    /// As it would be written in the file; `None`: unset.
    pub default: Option<&'static str>,
    /// Only `serve` takes the flag (the file and the environment may always have the key).
    pub server_only: bool,
    pub help: &'static str,
    /// Checks a value and stores it; the error says what to write instead.
    pub(super) set: fn(&mut Config, &str) -> Result<(), String>,
}

impl Key {
    pub fn find(name: &str) -> Option<&'static Key> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// `STRATA_DEVICE_MEMORY`.
    pub fn variable(&self) -> String {
        format!("STRATA_{}", self.name.replace('-', "_").to_uppercase())
    }
}

const SLICE_MIN: u64 = 64 << 10;
const SLICE_MAX: u64 = 4 << 30;
/// Below a page nothing can be allocated.
const MEMORY_MIN: u64 = 4096;
const SECONDS_MAX: f64 = 86_400.0;

/// In the order of config/strata.toml.
pub const KEYS: &[Key] = &[
    Key {
        name: "model",
        value: "FILE",
        default: None,
        server_only: false,
        help: "The GGUF file to serve; usually given as the argument MODEL, which wins",
        set: |config, text| {
            if text.is_empty() {
                return Err("the path is empty; give the path of a GGUF file".to_owned());
            }
            config.model = Some(PathBuf::from(text));
            Ok(())
        },
    },
    Key {
        name: "model-name",
        value: "NAME",
        default: None,
        server_only: true,
        help: "The name that /v1/models and responses give; by default the file's name without `.gguf`",
        set: |config, text| {
            config.model_name = Some(one_line(text, "a name")?);
            Ok(())
        },
    },
    Key {
        name: "device",
        value: "auto|cpu|cuda:N|emulated",
        default: Some("auto"),
        server_only: false,
        help: "What computes: `cuda:N` is a GPU by its number; `cpu` has no device tier; `emulated` puts an arena of \
               --device-memory behind a link of --link-rate in place of VRAM; `auto` is cuda:0 where it can be used, \
               otherwise cpu",
        set: |config, text| {
            config.device = match text {
                "auto" => DeviceSetting::Auto,
                "cpu" => DeviceSetting::Cpu,
                "emulated" => DeviceSetting::Emulated,
                _ => match text.strip_prefix("cuda:").map(str::parse) {
                    Some(Ok(ordinal)) => DeviceSetting::Cuda(ordinal),
                    _ => {
                        return Err(not_one_of(
                            text,
                            "auto, cpu, emulated or cuda:0, cuda:1 and so on",
                        ));
                    }
                },
            };
            Ok(())
        },
    },
    Key {
        name: "device-memory",
        value: "SIZE|auto",
        default: Some("auto"),
        server_only: false,
        help: "Budget of the device tier: everything that strata puts there. `auto`: what is free less a reserve of \
               512 MiB; on the emulated device a quarter of what the host budget would be",
        set: |config, text| {
            config.device_memory = memory(text)?;
            Ok(())
        },
    },
    Key {
        name: "host-memory",
        value: "SIZE|auto",
        default: Some("auto"),
        server_only: false,
        help: "Budget of RAM: weights, rings, KV cache and scratch. `auto`: what is free (MemAvailable and the limits \
               of the control groups) less a reserve",
        set: |config, text| {
            config.host_memory = memory(text)?;
            Ok(())
        },
    },
    Key {
        name: "link-rate",
        value: "RATE",
        default: Some("4GB/s"),
        server_only: false,
        help: "Rate of the emulated device's link",
        set: |config, text| {
            config.link_rate = parse_rate(text)?;
            Ok(())
        },
    },
    Key {
        name: "hardware",
        value: "FILE",
        default: None,
        server_only: false,
        help: "A card of config/hardware, whose rates predictions are made from, whatever was measured here",
        set: |config, text| {
            if text.is_empty() {
                return Err("the path is empty; give the path of a hardware card".to_owned());
            }
            config.hardware = Some(PathBuf::from(text));
            Ok(())
        },
    },
    Key {
        name: "rates",
        value: "FILE|auto|none",
        default: Some("auto"),
        server_only: false,
        help: "Measured rates that predictions are made from: a profile of `strata bench rates`. `auto`: the one that it \
               stored for this machine, if there is one; `none`: rates are assumed",
        set: |config, text| {
            config.rates = match text {
                "" => {
                    return Err(
                        "the path is empty; give the path of a profile, auto or none".to_owned(),
                    );
                }
                "auto" => RatesSetting::Auto,
                "none" => RatesSetting::None,
                path => RatesSetting::File(PathBuf::from(path)),
            };
            Ok(())
        },
    },
    Key {
        name: "context",
        value: "N|auto",
        default: Some("auto"),
        server_only: false,
        help: "Tokens per sequence, prompt and answer together. `auto`: the model's, at most 8192",
        set: |config, text| {
            config.context = auto_or(text, |text| integer(text, 2, 1 << 24))?;
            Ok(())
        },
    },
    Key {
        name: "parallel",
        value: "N",
        default: Some("4"),
        server_only: false,
        help: "Sequences computed at once; the KV cache is made for context * parallel tokens",
        set: |config, text| {
            config.parallel = integer(text, 1, 1024)?;
            Ok(())
        },
    },
    Key {
        name: "kv-type",
        value: "f16|f32",
        default: Some("f16"),
        server_only: false,
        help: "What keys and values are stored as; f32 takes twice the memory",
        set: |config, text| {
            config.kv_type = match text {
                "f16" => KvTypeSetting::F16,
                "f32" => KvTypeSetting::F32,
                _ => return Err(not_one_of(text, "f16 or f32")),
            };
            Ok(())
        },
    },
    Key {
        name: "reader",
        value: "auto|io-uring|pread",
        default: Some("auto"),
        server_only: false,
        help: "How weights are read from storage; one asked for by name and refused by the system is an error",
        set: |config, text| {
            config.reader = match text {
                "auto" => ReaderSetting::Auto,
                "io-uring" => ReaderSetting::IoUring,
                "pread" => ReaderSetting::Pread,
                _ => return Err(not_one_of(text, "auto, io-uring or pread")),
            };
            Ok(())
        },
    },
    Key {
        name: "verify-reads",
        value: "auto|SHARE",
        default: Some("auto"),
        server_only: false,
        help: "The share of reads whose bytes are held against those of the first read, from 0 (none) to 1 (all): a bit that \
               the drive or the memory flips is then an error and no token. `auto`: all, or as many as cost 3 % of a step",
        set: |config, text| {
            let share = text.parse::<f64>().ok();
            let share = share.filter(|share| (0.0..=1.0).contains(share));
            config.verify_reads = match (text, share) {
                ("auto", _) => VerifySetting::Auto,
                (_, Some(share)) => VerifySetting::Share(share),
                (_, None) => {
                    return Err(format!(
                        "`{text}` is out of range; give auto, or a share from 0 to 1, like 0.1"
                    ));
                }
            };
            Ok(())
        },
    },
    Key {
        name: "checksum-directory",
        value: "auto|none|DIR",
        default: Some("auto"),
        server_only: false,
        help: "Where the checksums of a model file are kept, so that the first reads of a later run are verified too: a \
               directory, or `auto`, which is strata/checksums in $XDG_CACHE_HOME or ~/.cache",
        set: |config, text| {
            config.checksum_directory = match text {
                "auto" => ChecksumSetting::Auto,
                "none" => ChecksumSetting::Nowhere,
                "" => return Err("the path is empty; give a directory, auto or none".to_owned()),
                directory => ChecksumSetting::Directory(PathBuf::from(directory)),
            };
            Ok(())
        },
    },
    Key {
        name: "threads",
        value: "N|auto",
        default: Some("auto"),
        server_only: false,
        help: "Threads that compute. `auto`: one per core that this process may use, however many hardware threads it has",
        set: |config, text| {
            config.threads = auto_or(text, |text| integer(text, 1, 1024).map(|n| n as usize))?;
            Ok(())
        },
    },
    Key {
        name: "pin-threads",
        value: "true|false",
        default: Some("false"),
        server_only: false,
        help: "Keep each compute thread on a CPU of its own; for machines on which nothing else computes",
        set: |config, text| {
            config.pin_threads = boolean(text)?;
            Ok(())
        },
    },
    Key {
        name: "slice",
        value: "SIZE|auto",
        default: Some("auto"),
        server_only: false,
        help: "The largest group of weights; larger tensors are cut by rows. `auto`: 128MiB, less under small budgets",
        set: |config, text| {
            config.slice = auto_or(text, |text| {
                let bytes = parse_size(text)?;
                if !(SLICE_MIN..=SLICE_MAX).contains(&bytes) {
                    return Err(format!(
                        "`{text}` is out of range; give 64KiB to 4GiB, or auto"
                    ));
                }
                Ok(bytes)
            })?;
            Ok(())
        },
    },
    Key {
        name: "ring-entries",
        value: "N|auto",
        default: Some("auto"),
        server_only: false,
        help: "Entries of each ring that streamed weights pass through",
        set: |config, text| {
            config.ring_entries = auto_or(text, |text| integer(text, 2, 256))?;
            Ok(())
        },
    },
    Key {
        name: "step-width",
        value: "N|auto",
        default: Some("auto"),
        server_only: false,
        help: "The most tokens in one step: prompt chunks and decoding sequences together",
        set: |config, text| {
            config.step_width = auto_or(text, |text| integer(text, 1, 8192))?;
            Ok(())
        },
    },
    Key {
        name: "executor",
        value: "auto|device|host|N",
        default: Some("auto"),
        server_only: false,
        help: "Who multiplies by weights that do not rest on the device: N is the host in steps of up to N tokens and the \
               device, to which they are copied, in wider ones; `auto` is the N from which copying is the faster on a \
               GPU, and `device` on the emulated one",
        set: |config, text| {
            config.executor = match text {
                "auto" => ExecutorSetting::Auto,
                "device" => ExecutorSetting::Device,
                "host" => ExecutorSetting::Host,
                _ => match integer(text, 1, 8192) {
                    Ok(width) => ExecutorSetting::HostUpTo(width),
                    Err(_) => {
                        return Err(not_one_of(
                            text,
                            "auto, device, host or a number of tokens from 1 to 8192",
                        ));
                    }
                },
            };
            Ok(())
        },
    },
    Key {
        name: "copy",
        value: "true|false",
        default: Some("false"),
        server_only: false,
        help: "Always copy weights into memory of our own, and never map the file",
        set: |config, text| {
            config.copy = boolean(text)?;
            Ok(())
        },
    },
    Key {
        name: "log",
        value: "LEVEL",
        default: Some("info"),
        server_only: false,
        help: "How much is logged to stderr: off, error, warn, info, debug or trace",
        set: |config, text| {
            config.log = match text {
                "off" => LogLevel::Off,
                "error" => LogLevel::Error,
                "warn" => LogLevel::Warn,
                "info" => LogLevel::Info,
                "debug" => LogLevel::Debug,
                "trace" => LogLevel::Trace,
                _ => return Err(not_one_of(text, "off, error, warn, info, debug or trace")),
            };
            Ok(())
        },
    },
    Key {
        name: "trace",
        value: "FILE",
        default: None,
        server_only: false,
        help: "Write what each step read, copied, computed and waited for to this file, which chrome://tracing and \
               Perfetto open; a trace that is there is replaced",
        set: |config, text| {
            if text.is_empty() {
                return Err("the path is empty; give the path of a file to write".to_owned());
            }
            config.trace = Some(PathBuf::from(text));
            Ok(())
        },
    },
    Key {
        name: "listen",
        value: "ADDR:PORT",
        default: Some("127.0.0.1:8080"),
        server_only: true,
        help: "HTTP address; port 0 takes a free one and logs it",
        set: |config, text| {
            let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            if port.is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
                return Err(format!(
                    "`{text}` is not an address with a port; write it like 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080"
                ));
            }
            config.listen = text.to_owned();
            Ok(())
        },
    },
    Key {
        name: "queue",
        value: "N",
        default: Some("64"),
        server_only: true,
        help: "Requests that may wait for a place; more are answered with 429 at once",
        set: |config, text| {
            config.queue = integer(text, 1, 65_536)? as usize;
            Ok(())
        },
    },
    Key {
        name: "grace",
        value: "SECONDS",
        default: Some("30"),
        server_only: true,
        help: "How long running requests may go on after SIGTERM or SIGINT; a second signal ends at once",
        set: |config, text| {
            config.grace = seconds(text, 0.0)?;
            Ok(())
        },
    },
    Key {
        name: "keep-alive",
        value: "SECONDS",
        default: Some("15"),
        server_only: true,
        help: "A stream that has been silent this long gets an SSE comment, so that proxies keep it open; 0: never",
        set: |config, text| {
            let interval = seconds(text, 0.0)?;
            config.keep_alive = (!interval.is_zero()).then_some(interval);
            Ok(())
        },
    },
    Key {
        name: "stall-timeout",
        value: "SECONDS",
        default: Some("60"),
        server_only: true,
        help: "A client that takes no bytes of a waiting answer for this long is cut off",
        set: |config, text| {
            config.stall_timeout = seconds(text, 0.001)?;
            Ok(())
        },
    },
    Key {
        name: "api-key",
        value: "KEY",
        default: None,
        server_only: true,
        help: "Clients must send `Authorization: Bearer KEY`; /health and /metrics stay open. Prefer STRATA_API_KEY: \
               flags are visible to other users of the machine",
        set: |config, text| {
            config.api_key = Some(Secret::new(one_line(text, "a key")?));
            Ok(())
        },
    },
];

fn not_one_of(text: &str, choices: &str) -> String {
    format!("`{text}` is not one of its values; use {choices}")
}

fn auto_or<T>(
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    if text == "auto" {
        return Ok(None);
    }
    parse(text).map(Some)
}

fn integer(text: &str, low: u32, high: u32) -> Result<u32, String> {
    text.parse::<u32>()
        .ok()
        .filter(|number| (low..=high).contains(number))
        .ok_or_else(|| {
            format!("`{text}` is out of range; give a whole number from {low} to {high}")
        })
}

fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err(not_one_of(text, "true or false")),
    }
}

fn seconds(text: &str, low: f64) -> Result<Duration, String> {
    text.parse::<f64>()
        .ok()
        .filter(|seconds| (low..=SECONDS_MAX).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            format!("`{text}` is out of range; give seconds from {low} to {SECONDS_MAX}")
        })
}

fn memory(text: &str) -> Result<MemorySetting, String> {
    if text == "auto" {
        return Ok(MemorySetting::Auto);
    }
    let bytes = parse_size(text)?;
    if bytes < MEMORY_MIN {
        return Err(format!(
            "`{text}` is {bytes} bytes, which is too little; write it like 24GiB or 48MiB"
        ));
    }
    Ok(MemorySetting::Bytes(bytes))
}

fn one_line(text: &str, what: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err(format!("it is empty; give {what}, or leave it out"));
    }
    if !text
        .chars()
        .all(|c| c.is_ascii_graphic() || (c == ' ') || (!c.is_ascii() && !c.is_control()))
    {
        return Err(format!(
            "it has control characters; give {what} of one line"
        ));
    }
    Ok(text.to_owned())
}
