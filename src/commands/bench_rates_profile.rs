//! The profile that `strata bench rates` makes of what it found, and where it goes.

use super::Usage;
use super::bench_rates_report::{Findings, LinkFindings, TypeFindings};
use super::rates::{ThisMachine, assumed_rates, is_missing, read_card, stored_profile};
use anyhow::{Context, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use strata::cli::BenchRatesArguments;
use strata::config::{Config, machine_memory_bytes};
use strata::gguf::folder_of;
use strata::placement::{AttentionRates, DeviceKind, HardwareCard, Measured, Rates};

/// Where the profile goes.
pub(super) enum Destination {
    Stdout,
    File(PathBuf),
}

impl Destination {
    /// What cannot be written is refused before anything is measured.
    pub(super) fn of(arguments: &BenchRatesArguments) -> anyhow::Result<Destination> {
        let path = match &arguments.out {
            Some(path) if path.as_os_str() == "-" => {
                if arguments.json {
                    bail!(Usage(
                        "--json and --out - would both write to stdout; give --out a file"
                            .to_owned()
                    ));
                }
                return Ok(Destination::Stdout);
            }
            Some(path) => path.clone(),
            None => {
                let Some(path) = stored_profile() else {
                    bail!(Usage(
                        "there is no folder to store rates in: neither XDG_CACHE_HOME nor HOME is set; give --out".to_owned()
                    ));
                };
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder)
                        .with_context(|| format!("make the folder {}", folder.display()))?;
                }
                path
            }
        };
        if path.file_name().is_none() || path.is_dir() {
            bail!(Usage(format!(
                "--out {}: it is a folder; give a file",
                path.display()
            )));
        }
        if folder_of(&path).is_dir() {
            return Ok(Destination::File(path));
        }
        bail!(Usage(format!(
            "--out {}: its folder is not there",
            path.display()
        )))
    }

    /// The profile that is replaced, if it is of this machine.
    pub(super) fn previous(&self, machine: &ThisMachine) -> anyhow::Result<Option<HardwareCard>> {
        let Destination::File(path) = self else {
            return Ok(None);
        };
        match read_card(path) {
            Ok(card) if card.measured.is_none() && Some(path) != stored_profile().as_ref() => {
                bail!(Usage(format!(
                    "--out {}: there is a hardware card that was not measured; choose another name",
                    path.display()
                )))
            }
            Ok(card) => Ok(card
                .measured
                .as_ref()
                .is_some_and(|measured| machine.agrees_with(measured).is_ok())
                .then_some(card)),
            Err(error) if is_missing(&error) => Ok(None),
            // One that an earlier version or a fault left is of no use; any other file may be.
            Err(_) if Some(path) == stored_profile().as_ref() => Ok(None),
            Err(error) => bail!(Usage(format!(
                "--out {}: there is a file that is no profile ({error:#}); choose another name",
                path.display()
            ))),
        }
    }
}

/// Replaces the file by another one, so that nobody ever sees a part of it.
pub(super) fn store(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", std::process::id()));
    let beside = folder_of(path).join(name);
    let write = || {
        let mut file = std::fs::File::create(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

/// The profile: what was found, over what was known before.
pub(super) fn card(
    config: &Config,
    machine: &ThisMachine,
    previous: Option<HardwareCard>,
    findings: &Findings,
) -> HardwareCard {
    let (mut rates, before, mut device_memory_bytes) = match previous {
        Some(card) => (card.rates, card.measured, card.device_memory_bytes),
        None => (assumed_rates(config, DeviceKind::Cpu), None, None),
    };
    let mut measured = Measured {
        date: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        processor: machine.processor.clone(),
        threads: machine.threads,
        instruction_set: machine.instruction_set.to_owned(),
        gpu: before.as_ref().and_then(|before| before.gpu.clone()),
        storage_file: before
            .as_ref()
            .and_then(|before| before.storage_file.clone()),
        storage_device: before.as_ref().and_then(|before| before.storage_device),
        strata: env!("CARGO_PKG_VERSION").to_owned(),
    };
    rates.processors = Some(machine.threads);
    if let Some(storage) = &findings.storage {
        rates.storage_bytes_per_second = rounded(storage.engine_rate.bytes_per_second);
        rates.reading_bytes_per_processor_second =
            storage.engine_rate.bytes_per_processor_second.map(rounded);
        measured.storage_file = Some(storage.file.display().to_string());
        measured.storage_device = storage.device;
    }
    if let Some(memory) = &findings.memory {
        rates.host_memory_bytes_per_second = rounded(memory.all);
        rates.verifying_bytes_per_processor_second = Some(rounded(memory.checksums));
    }
    if let Some(attention) = findings.attention {
        rates.host_attention = Some(AttentionRates {
            bytes_per_second: rounded(attention.bytes_per_second),
            flops_per_second: rounded(attention.flops_per_second),
        });
    }
    for found in &findings.products {
        let name = found.kind.name().to_owned();
        rates.host_products.insert(name, found.rates.clone());
    }
    // For types that were not measured: what most are like.
    if let Some((few, many)) = TypeFindings::typical(&findings.products) {
        rates.host_kernel_bytes_per_second = rounded(few);
        rates.host_flops_per_second = rounded(many);
    }
    match &findings.link {
        Some(LinkFindings::Emulated {
            copy_rate,
            link_rate,
        }) => {
            rates.copy_bytes_per_second = Some(rounded(*copy_rate));
            rates.link_bytes_per_second = rounded(*link_rate);
            measured.gpu = None;
            device_memory_bytes = None;
        }
        Some(LinkFindings::Gpu {
            name,
            memory_bytes,
            rates: of_gpu,
        }) => {
            rates.copy_bytes_per_second = None;
            rates.link_bytes_per_second = rounded(of_gpu.link_bytes_per_second);
            rates.device_memory_bytes_per_second = rounded(of_gpu.memory_bytes_per_second);
            rates.device_flops_per_second = rounded(of_gpu.flops_per_second);
            measured.gpu = Some(name.clone());
            device_memory_bytes = Some(*memory_bytes);
        }
        None => {}
    }
    set_emulated_device(&mut rates, measured.gpu.is_some());
    HardwareCard {
        name: machine.processor.clone(),
        device_memory_bytes,
        host_memory_bytes: machine_memory_bytes().unwrap_or_default(),
        measured: Some(measured),
        rates,
    }
}

/// The emulated device is RAM that the host's kernels read.
fn set_emulated_device(rates: &mut Rates, has_gpu: bool) {
    if !has_gpu {
        rates.device_memory_bytes_per_second = rates.host_kernel_bytes_per_second;
        rates.device_flops_per_second = rates.host_flops_per_second;
    }
}

/// To four digits: more would be read as if they meant something.
pub(super) fn rounded(rate: f64) -> f64 {
    format!("{rate:.3e}").parse().unwrap_or(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_four_digits() {
        assert_eq!(rounded(12_345_678_901.0), 12_350_000_000.0);
        assert_eq!(rounded(0.000_123_449), 0.000_123_4);
        assert_eq!(rounded(1.5e9), 1.5e9);
    }

    #[test]
    fn a_profile_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.toml");
        store(&path, "one").unwrap();
        store(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(store(&folder.path().join("none/rates.toml"), "x").is_err());
        // A folder cannot be replaced by a file; what was written beside it goes.
        std::fs::create_dir(folder.path().join("full")).unwrap();
        std::fs::write(folder.path().join("full/x"), "x").unwrap();
        assert!(store(&folder.path().join("full"), "x").is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
