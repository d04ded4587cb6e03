//! Which rates predictions are made from: a hardware card, a profile that was measured, or assumed ones; and where the
//! profile of this machine is kept.

use super::Usage;
use super::device::Device;
use anyhow::Context;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use strata::config::{
    Config, DeviceSetting, HOST_RESERVE_BYTES, MemorySetting, RatesSetting, compute_threads,
    processor_name, read_text_file,
};
use strata::kernels::InstructionSet;
use strata::memory::DEVICE_RESERVE_BYTES;
use strata::placement::{DeviceKind, HardwareCard, Measured, Rates};

/// The part of a machine's RAM that its system and other programs have, where all that is known is how much there is.
const SYSTEM_SHARE: u64 = 16;

/// What is said of this machine that a profile must agree with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThisMachine {
    pub(super) processor: String,
    pub(super) threads: u32,
    pub(super) instruction_set: &'static str,
}

impl ThisMachine {
    /// With the threads that the settings ask for.
    pub(super) fn of(config: &Config) -> anyhow::Result<ThisMachine> {
        let threads = compute_threads(config).map_err(|error| Usage(error.to_string()))?;
        Ok(ThisMachine {
            processor: processor_name(),
            threads: u32::try_from(threads.count).unwrap_or(u32::MAX),
            instruction_set: InstructionSet::detect().name(),
        })
    }

    /// Whether what was measured holds here; otherwise why not.
    pub(super) fn agrees_with(&self, measured: &Measured) -> Result<(), String> {
        // What a file says ends up on a terminal.
        let quoted = |text: &str| text.escape_debug().to_string();
        if measured.processor != self.processor {
            return Err(format!(
                "the processor was `{}` and is `{}`",
                quoted(&measured.processor),
                quoted(&self.processor)
            ));
        }
        if measured.threads != self.threads {
            return Err(format!(
                "{} threads computed and now {} do",
                measured.threads, self.threads
            ));
        }
        if measured.instruction_set != self.instruction_set {
            return Err(format!(
                "the kernels used {} and now use {}",
                quoted(&measured.instruction_set),
                self.instruction_set
            ));
        }
        Ok(())
    }
}

/// Where `strata bench rates` stores the profile of this machine and `--rates auto` looks for it. `None`: this user has
/// no folder for such things.
pub(super) fn stored_profile() -> Option<PathBuf> {
    Some(cache_directory()?.join("strata/rates.toml"))
}

/// Where this user's programs keep what they can do without; `None` for a user without a home.
pub(super) fn cache_directory() -> Option<PathBuf> {
    cache_in(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
}

/// Relative folders do not count: <https://specifications.freedesktop.org/basedir/latest/>.
fn cache_in(cache: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |folder: OsString| {
        let folder = PathBuf::from(folder);
        folder.is_absolute().then_some(folder)
    };
    cache
        .and_then(absolute)
        .or_else(|| Some(home.and_then(absolute)?.join(".cache")))
}

/// The rates that are known before a device is chosen.
#[derive(Clone, Debug)]
pub(super) enum KnownRates {
    None,
    /// Of a machine that may be another.
    Card(Box<Machine>),
    Profile(Box<Profile>),
}

/// What a hardware card says.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    rates: Rates,
    /// The card's name and file.
    from: String,
    device_memory: Option<u64>,
    host_memory: u64,
}

/// What was measured on this machine.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    rates: Rates,
    measured: Measured,
    path: PathBuf,
    /// The file system that the model lies on; `None` where there is no file.
    model_device: Option<u64>,
}

impl KnownRates {
    /// `model`: the file that is planned for, if it is one.
    ///
    /// # Errors
    /// A file that was asked for by name is not to be had. A stored profile that is not used is said in the log.
    pub(super) fn of(config: &Config, model: Option<&Path>) -> anyhow::Result<KnownRates> {
        let profile = |card: HardwareCard, measured: Measured, path: &Path| {
            KnownRates::Profile(Box::new(Profile {
                rates: card.rates,
                measured,
                path: path.to_owned(),
                model_device: model.and_then(device_of),
            }))
        };
        if let Some(path) = &config.hardware {
            let card = read_card(path)
                .with_context(|| format!("read the hardware card {}", path.display()))?;
            return Ok(KnownRates::card(card, path));
        }
        match &config.rates {
            RatesSetting::None => Ok(KnownRates::None),
            RatesSetting::File(path) => {
                let mut card = read_card(path)
                    .with_context(|| format!("read the rates {}", path.display()))?;
                let Some(measured) = card.measured.take() else {
                    return Ok(KnownRates::card(card, path));
                };
                if let Err(why) = ThisMachine::of(config)?.agrees_with(&measured) {
                    tracing::warn!(
                        "the rates of {} were measured otherwise: {why}",
                        path.display()
                    );
                }
                Ok(profile(card, measured, path))
            }
            RatesSetting::Auto => {
                let Some(path) = stored_profile() else {
                    return Ok(KnownRates::None);
                };
                let usable = match read_card(&path) {
                    Ok(mut card) => match card.measured.take() {
                        Some(measured) => ThisMachine::of(config)?
                            .agrees_with(&measured)
                            .map(|()| (card, measured)),
                        None => Err("it does not say what was measured".to_owned()),
                    },
                    Err(error) if is_missing(&error) => return Ok(KnownRates::None),
                    Err(error) => Err(format!("{error:#}")),
                };
                Ok(match usable {
                    Ok((card, measured)) => profile(card, measured, &path),
                    Err(why) => {
                        tracing::info!(
                            "the stored rates ({}) are not used: {why}; `strata bench rates` measures anew",
                            path.display()
                        );
                        KnownRates::None
                    }
                })
            }
        }
    }

    fn card(card: HardwareCard, path: &Path) -> KnownRates {
        // Names come from outside and end up on a terminal.
        let name = card.name.escape_debug();
        KnownRates::Card(Box::new(Machine {
            from: format!("{name} ({})", path.display()),
            rates: card.rates,
            device_memory: card.device_memory_bytes,
            host_memory: card.host_memory_bytes,
        }))
    }

    /// The settings for a plan alone, which need not be for this machine: where a hardware card is given, what would be
    /// found out here is taken from it.
    pub(super) fn config_for_machine(&self, config: &Config) -> Config {
        let mut config = config.clone();
        let KnownRates::Card(machine) = self else {
            return config;
        };
        if config.device == DeviceSetting::Auto {
            config.device = match machine.device_memory {
                Some(_) => DeviceSetting::Cuda(0),
                None => DeviceSetting::Cpu,
            };
        }
        if let (DeviceSetting::Cuda(_), MemorySetting::Auto, Some(bytes)) =
            (config.device, config.device_memory, machine.device_memory)
        {
            config.device_memory = MemorySetting::Bytes(bytes.saturating_sub(DEVICE_RESERVE_BYTES));
        }
        if config.host_memory == MemorySetting::Auto {
            let reserve = HOST_RESERVE_BYTES.max(machine.host_memory / SYSTEM_SHARE);
            config.host_memory = MemorySetting::Bytes(machine.host_memory.saturating_sub(reserve));
        }
        config
    }

    /// What predictions for a device are made from, and where that is from, for the report; `None`: it is assumed.
    pub(super) fn for_device(&self, config: &Config, device: &Device) -> (Rates, Option<String>) {
        let assumed = assumed_rates(config, device.kind());
        match self {
            KnownRates::None => (assumed, None),
            KnownRates::Card(machine) => (machine.rates.clone(), Some(machine.from.clone())),
            KnownRates::Profile(profile) => {
                let gpu = match device {
                    Device::Cuda(gpu) => Some(gpu.device.name()),
                    Device::Cpu
                    | Device::CpuBecause(_)
                    | Device::Emulated
                    | Device::CudaElsewhere => None,
                };
                profile.for_device(device.kind(), gpu, config.link_rate, &assumed)
            }
        }
    }
}

impl Profile {
    /// `gpu`: the name of the one that computes, where it was opened.
    fn for_device(
        &self,
        device: DeviceKind,
        gpu: Option<&str>,
        link_rate: f64,
        assumed: &Rates,
    ) -> (Rates, Option<String>) {
        let mut rates = self.rates.clone();
        let mut from = format!(
            "a measurement of {} ({})",
            minutes_of(&self.measured.date),
            self.path.display()
        );
        let elsewhere = match (self.measured.storage_device, self.model_device) {
            (None, _) => Some("it was not measured"),
            (Some(measured), Some(model)) if measured != model => {
                Some("the model lies on another file system than the one that was measured")
            }
            (Some(_), _) => None,
        };
        if let Some(why) = elsewhere {
            rates.storage_bytes_per_second = assumed.storage_bytes_per_second;
            from.push_str(&format!("; storage assumed: {why}"));
        }
        match device {
            DeviceKind::Cpu | DeviceKind::Emulated => {
                let copies = rates.copy_bytes_per_second.unwrap_or(f64::INFINITY);
                rates.link_bytes_per_second = link_rate.min(copies);
                if self.measured.gpu.is_some() {
                    // The device is RAM that the host's kernels read.
                    rates.device_memory_bytes_per_second = rates.host_kernel_bytes_per_second;
                    rates.device_flops_per_second = rates.host_flops_per_second;
                }
            }
            DeviceKind::Cuda => {
                rates.copy_bytes_per_second = None;
                let is_measured = match (&self.measured.gpu, gpu) {
                    (Some(measured), Some(gpu)) => measured == gpu,
                    // A plan for a GPU that is not here now.
                    (Some(_), None) => true,
                    (None, _) => false,
                };
                if !is_measured {
                    rates.link_bytes_per_second = assumed.link_bytes_per_second;
                    rates.device_memory_bytes_per_second = assumed.device_memory_bytes_per_second;
                    rates.device_flops_per_second = assumed.device_flops_per_second;
                    from.push_str("; the GPU's assumed: it was not measured");
                }
            }
        }
        (rates, Some(from))
    }
}

/// For the emulated device behind its link.
pub(super) fn assumed_rates(config: &Config, device: DeviceKind) -> Rates {
    match device {
        DeviceKind::Cuda => Rates::with_gpu(),
        DeviceKind::Cpu | DeviceKind::Emulated => Rates {
            link_bytes_per_second: config.link_rate,
            ..Rates::default()
        },
    }
}

/// A card or a profile.
pub(super) fn read_card(path: &Path) -> anyhow::Result<HardwareCard> {
    Ok(HardwareCard::parse(&read_text_file(path)?)?)
}

/// Whether a file could not be read because there is none.
pub(super) fn is_missing(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

/// The number of the file system that a file lies on.
pub(super) fn device_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|file| file.dev())
}

/// A date as people read it; one that is none, as it is written.
fn minutes_of(date: &str) -> String {
    match chrono::DateTime::parse_from_rfc3339(date) {
        Ok(date) => date.to_utc().format("%Y-%m-%d %H:%M UTC").to_string(),
        Err(_) => date.escape_debug().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
            date: "2026-11-30T10:20:30Z".to_owned(),
            processor: "A CPU".to_owned(),
            threads: 2,
            instruction_set: "avx2".to_owned(),
            gpu: None,
            storage_file: Some("/models/a.gguf".to_owned()),
            storage_device: Some(7),
            strata: "0.1.0".to_owned(),
        }
    }

    fn profile(measured: Measured, model_device: Option<u64>) -> Profile {
        Profile {
            rates: Rates {
                storage_bytes_per_second: 3e9,
                link_bytes_per_second: 2e9,
                device_memory_bytes_per_second: 5e11,
                host_kernel_bytes_per_second: 9e9,
                copy_bytes_per_second: Some(8e9),
                ..Rates::default()
            },
            measured,
            path: PathBuf::from("/cache/rates.toml"),
            model_device,
        }
    }

    #[test]
    fn caches_lie_where_the_user_keeps_them() {
        let check = |cache: Option<&str>, home: Option<&str>, path: Option<&str>| {
            let os = |text: Option<&str>| text.map(OsString::from);
            assert_eq!(cache_in(os(cache), os(home)), path.map(PathBuf::from));
        };
        check(Some("/c"), Some("/h"), Some("/c"));
        check(None, Some("/h"), Some("/h/.cache"));
        check(Some(""), Some("/h"), Some("/h/.cache"));
        check(Some("c"), Some("/h"), Some("/h/.cache"));
        check(None, Some(""), None);
        check(None, None, None);
    }

    #[test]
    fn a_profile_of_another_machine_is_told_by_what_differs() {
        let here = ThisMachine {
            processor: "A CPU".to_owned(),
            threads: 2,
            instruction_set: "avx2",
        };
        assert_eq!(here.agrees_with(&measured()), Ok(()));
        let check = |change: fn(&mut Measured), parts: &[&str]| {
            let mut other = measured();
            change(&mut other);
            let why = here.agrees_with(&other).unwrap_err();
            for part in parts {
                assert!(why.contains(part), "{why}");
            }
        };
        check(
            |m| m.processor = "B\u{1b}".to_owned(),
            &["A CPU", "B\\u{1b}"],
        );
        check(|m| m.threads = 1, &["1 threads", "now 2"]);
        check(
            |m| m.instruction_set = "avx512".to_owned(),
            &["avx512", "avx2"],
        );
    }

    #[test]
    fn what_was_not_measured_for_a_plan_is_assumed_and_said() {
        let assumed = Rates::default();
        let with_gpu = Rates::with_gpu();
        let emulated = |profile: &Profile, link| {
            profile.for_device(DeviceKind::Emulated, None, link, &assumed)
        };

        let (rates, from) = emulated(&profile(measured(), Some(7)), 4e9);
        assert_eq!(
            from.unwrap(),
            "a measurement of 2026-11-30 10:20 UTC (/cache/rates.toml)"
        );
        assert_eq!(rates.storage_bytes_per_second, 3e9);
        // The flag's, and no more than a thread copies.
        assert_eq!(rates.link_bytes_per_second, 4e9);
        assert_eq!(
            emulated(&profile(measured(), Some(7)), 1e12)
                .0
                .link_bytes_per_second,
            8e9
        );
        assert_eq!(rates.device_memory_bytes_per_second, 5e11);

        let (rates, from) = emulated(&profile(measured(), Some(8)), 4e9);
        assert_eq!(
            rates.storage_bytes_per_second,
            assumed.storage_bytes_per_second
        );
        assert!(
            from.unwrap()
                .contains("; storage assumed: the model lies on another")
        );
        // A shape card has no file: it is planned as if it lay where was measured.
        assert_eq!(
            emulated(&profile(measured(), None), 4e9)
                .0
                .storage_bytes_per_second,
            3e9
        );
        let mut without = measured();
        without.storage_device = None;
        let (rates, from) = emulated(&profile(without, Some(7)), 4e9);
        assert_eq!(
            rates.storage_bytes_per_second,
            assumed.storage_bytes_per_second
        );
        assert!(
            from.unwrap()
                .contains("storage assumed: it was not measured")
        );

        let cuda =
            |profile: &Profile, gpu| profile.for_device(DeviceKind::Cuda, gpu, 4e9, &with_gpu);
        let (rates, from) = cuda(&profile(measured(), Some(7)), Some("A GPU"));
        assert_eq!(
            rates.device_memory_bytes_per_second,
            with_gpu.device_memory_bytes_per_second
        );
        assert_eq!(rates.link_bytes_per_second, with_gpu.link_bytes_per_second);
        assert_eq!(rates.copy_bytes_per_second, None);
        assert!(from.unwrap().contains("the GPU's assumed"));
        let mut of_gpu = measured();
        of_gpu.gpu = Some("A GPU".to_owned());
        for (gpu, memory) in [(Some("A GPU"), 5e11), (None, 5e11), (Some("B"), 3e11)] {
            let (rates, _) = cuda(&profile(of_gpu.clone(), Some(7)), gpu);
            assert_eq!(rates.device_memory_bytes_per_second, memory, "{gpu:?}");
        }
        // The emulated device of a machine whose GPU was measured.
        assert_eq!(
            emulated(&profile(of_gpu, Some(7)), 4e9)
                .0
                .device_memory_bytes_per_second,
            9e9
        );
    }
}
