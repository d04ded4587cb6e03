//! How fast the parts of a machine are: assumed, from a card in config/hardware, or measured.

use serde::{Deserialize, Serialize};

/// Rates in bytes or floating-point operations per second. All are finite and above zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Direct reads of the model file.
    pub storage_bytes_per_second: f64,
    /// Copies from page-locked RAM to the device.
    pub link_bytes_per_second: f64,
    /// VRAM reads, as the device's kernels reach them.
    pub device_memory_bytes_per_second: f64,
    /// RAM reads by all cores.
    pub host_memory_bytes_per_second: f64,
    /// Weight bytes that the host's quantised kernels get through at width 1.
    pub host_kernel_bytes_per_second: f64,
    /// At large widths.
    pub host_flops_per_second: f64,
    pub device_flops_per_second: f64,
}

impl Default for Rates {
    /// An unknown machine without a GPU: two channels of DDR4, a few cores and an NVMe drive, on the modest side. What
    /// stands for the device is the host's RAM and kernels, behind a link at the default `--link-rate`. Predictions
    /// made from these are called assumed.
    fn default() -> Rates {
        Rates {
            storage_bytes_per_second: 1.5e9,
            link_bytes_per_second: 4.0e9,
            device_memory_bytes_per_second: 12.0e9,
            host_memory_bytes_per_second: 30.0e9,
            host_kernel_bytes_per_second: 12.0e9,
            host_flops_per_second: 2.0e11,
            device_flops_per_second: 2.0e11,
        }
    }
}

impl Rates {
    /// An unknown machine with a GPU: a card of the middle (GDDR6, PCIe 4 x8) in a desktop. Predictions made from these are
    /// called assumed too.
    pub fn with_gpu() -> Rates {
        Rates {
            link_bytes_per_second: 12.0e9,
            device_memory_bytes_per_second: 300.0e9,
            device_flops_per_second: 1.0e13,
            ..Rates::default()
        }
    }
}

/// A card of config/hardware: a known machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareCard {
    pub name: String,
    /// VRAM; absent without a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
    pub host_memory_bytes: u64,
    pub rates: Rates,
}

/// Why a hardware card is not used.
#[derive(Debug, thiserror::Error)]
pub enum RatesError {
    /// One line.
    #[error("line {line}: {message}")]
    Parse { line: usize, message: String },
    #[error("`{name}` is {value}: a rate is a number above zero")]
    NotARate { name: &'static str, value: f64 },
}

impl Rates {
    fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("storage_bytes_per_second", self.storage_bytes_per_second),
            ("link_bytes_per_second", self.link_bytes_per_second),
            (
                "device_memory_bytes_per_second",
                self.device_memory_bytes_per_second,
            ),
            (
                "host_memory_bytes_per_second",
                self.host_memory_bytes_per_second,
            ),
            (
                "host_kernel_bytes_per_second",
                self.host_kernel_bytes_per_second,
            ),
            ("host_flops_per_second", self.host_flops_per_second),
            ("device_flops_per_second", self.device_flops_per_second),
        ]
    }

    /// Refuses rates that are not finite numbers above zero.
    pub fn check(&self) -> Result<(), RatesError> {
        for (name, value) in self.named() {
            if !(value.is_finite() && value > 0.0) {
                return Err(RatesError::NotARate { name, value });
            }
        }
        Ok(())
    }
}

impl HardwareCard {
    pub fn parse(text: &str) -> Result<HardwareCard, RatesError> {
        let card: HardwareCard = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            RatesError::Parse {
                line: before.map_or(1, |before| before.matches('\n').count() + 1),
                message: error.message().replace('\n', ": "),
            }
        })?;
        card.rates.check()?;
        Ok(card)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_cards_that_ship_parse() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/hardware");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let card = HardwareCard::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
            assert!(!card.name.is_empty(), "{}", path.display());
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
        assert!(
            names.contains(&"two-core-vm.toml".to_owned()),
            "found {names:?}"
        );
        assert!(
            names.contains(&"rtx-4090-desktop.toml".to_owned()),
            "found {names:?}"
        );
    }

    #[test]
    fn a_card_with_a_bad_rate_or_an_unknown_key_is_refused_by_name() {
        let card = HardwareCard {
            name: "x".into(),
            device_memory_bytes: None,
            host_memory_bytes: 1 << 30,
            rates: Rates::default(),
        };
        let good = toml::to_string(&card).unwrap();
        assert_eq!(HardwareCard::parse(&good).unwrap(), card);

        let mut bad = card.clone();
        bad.rates.link_bytes_per_second = 0.0;
        let error = HardwareCard::parse(&toml::to_string(&bad).unwrap()).unwrap_err();
        assert!(
            error.to_string().contains("link_bytes_per_second"),
            "{error}"
        );

        let error = HardwareCard::parse(&format!("{good}\nlinkrate = 3\n")).unwrap_err();
        assert!(error.to_string().contains("linkrate"), "{error}");
    }
}
