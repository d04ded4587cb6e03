//! How fast the parts of a machine are: assumed, from a card in config/hardware, or measured by `strata bench rates`.

use crate::gguf::TensorType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Rates in bytes or floating-point operations per second: all are numbers from 1 to 1e18.
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
    /// Weight bytes that the host's quantised kernels get through at width 1, for weight types that `host_products`
    /// lacks.
    pub host_kernel_bytes_per_second: f64,
    /// At large widths, likewise.
    pub host_flops_per_second: f64,
    pub device_flops_per_second: f64,
    /// The rate at which one processor alone copies to the emulated device: what a copy takes from the processors that
    /// compute. `None`: copies take none (a GPU's copy engine moves them).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_bytes_per_second: Option<f64>,
    /// Bytes read from storage for each second of processor time that reading takes. `None`: not known, taken as
    /// nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading_bytes_per_processor_second: Option<f64>,
    /// Bytes that are held against their checksums in each second of processor time, as all that is read from storage is.
    /// `None`: not known, taken as nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verifying_bytes_per_processor_second: Option<f64>,
    /// Processors that compute. `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<u32>,
    /// Attention over the KV cache by the host. `None`: assumed from the rates above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_attention: Option<AttentionRates>,
    /// Of the host's products with all compute threads, by weight type ("Q4_K"): weight bytes per second at some
    /// widths, ascending, the first of which is 1.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_products: BTreeMap<String, Vec<ProductRate>>,
}

/// Bytes or operations per second.
const RATES_OF_MACHINES: std::ops::RangeInclusive<f64> = 1.0..=1e18;

/// How fast products get through their weights at one width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// Tokens that the weights are multiplied by at once.
    pub width: u32,
    /// Of weights; each is read once, whatever the width.
    pub bytes_per_second: f64,
}

/// How fast attention is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Bytes of keys and values per second, for one token over a long context.
    pub bytes_per_second: f64,
    /// Floating-point operations per second for a prompt's chunk: 4 * heads * head length for each pair of a token and
    /// a position that it sees.
    pub flops_per_second: f64,
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
            copy_bytes_per_second: None,
            reading_bytes_per_processor_second: None,
            verifying_bytes_per_processor_second: None,
            processors: None,
            host_attention: None,
            host_products: BTreeMap::new(),
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

    /// Seconds in which the host multiplies `weight_bytes` of a type, `elements` weights, by `width` tokens (0 counts
    /// as 1). Between measured widths the time is a straight line; beyond the widest it grows in proportion to the
    /// width. A type that was not measured takes the longer of reading its weights and of its arithmetic.
    pub fn host_product_seconds(
        &self,
        weight_type: &str,
        weight_bytes: f64,
        elements: f64,
        width: u32,
    ) -> f64 {
        let width = width.max(1);
        let measured = self.host_products.get(weight_type).map(Vec::as_slice);
        let Some([first, rest @ ..]) = measured else {
            let arithmetic = 2.0 * elements * f64::from(width) / self.host_flops_per_second;
            return (weight_bytes / self.host_kernel_bytes_per_second).max(arithmetic);
        };
        let seconds = |rate: &ProductRate| weight_bytes / rate.bytes_per_second;
        let mut below = first;
        for above in rest {
            if width < above.width {
                let (from, to) = (f64::from(below.width), f64::from(above.width));
                let share = ((f64::from(width) - from) / (to - from)).max(0.0);
                return seconds(below) + share * (seconds(above) - seconds(below));
            }
            below = above;
        }
        seconds(below) * (f64::from(width) / f64::from(below.width)).max(1.0)
    }
}

/// A machine's rates with what they belong to: a card of config/hardware, or the profile that `strata bench rates`
/// stores, which has `measured`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareCard {
    pub name: String,
    /// VRAM; absent without a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
    pub host_memory_bytes: u64,
    /// Absent where the rates are from data sheets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    pub rates: Rates,
}

/// When rates were measured, and what they hold for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// When the last part was: RFC 3339, UTC.
    pub date: String,
    /// The processor as it calls itself.
    pub processor: String,
    /// Threads that computed.
    pub threads: u32,
    pub instruction_set: String,
    /// The GPU that link and device rates are of, as it calls itself. Absent: they are of the emulated device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The file that storage was measured with. Absent: the storage rate is assumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_file: Option<String>,
    /// The number of the file system that it lay on (`st_dev`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_device: Option<u64>,
    /// The version of strata that measured.
    pub strata: String,
}

/// Why a hardware card is not used.
#[derive(Debug, thiserror::Error)]
pub enum RatesError {
    /// One line.
    #[error("line {line}: {message}")]
    Parse { line: usize, message: String },
    #[error("`{name}` is {value}: a rate is a number from 1 to 1e18")]
    NotARate { name: String, value: f64 },
    #[error("`processors` is 0: at least one computes")]
    NoProcessors,
    #[error("`host_products.{name}`: there is no such weight type; types are written like Q4_K")]
    UnknownType { name: String },
    #[error("`host_products.{name}`: widths begin with 1 and ascend")]
    Widths { name: String },
}

impl Rates {
    fn named(&self) -> impl Iterator<Item = (String, f64)> {
        let of_machine = [
            (
                "storage_bytes_per_second",
                Some(self.storage_bytes_per_second),
            ),
            ("link_bytes_per_second", Some(self.link_bytes_per_second)),
            (
                "device_memory_bytes_per_second",
                Some(self.device_memory_bytes_per_second),
            ),
            (
                "host_memory_bytes_per_second",
                Some(self.host_memory_bytes_per_second),
            ),
            (
                "host_kernel_bytes_per_second",
                Some(self.host_kernel_bytes_per_second),
            ),
            ("host_flops_per_second", Some(self.host_flops_per_second)),
            (
                "device_flops_per_second",
                Some(self.device_flops_per_second),
            ),
            ("copy_bytes_per_second", self.copy_bytes_per_second),
            (
                "reading_bytes_per_processor_second",
                self.reading_bytes_per_processor_second,
            ),
            (
                "verifying_bytes_per_processor_second",
                self.verifying_bytes_per_processor_second,
            ),
            (
                "host_attention.bytes_per_second",
                self.host_attention.map(|rates| rates.bytes_per_second),
            ),
            (
                "host_attention.flops_per_second",
                self.host_attention.map(|rates| rates.flops_per_second),
            ),
        ];
        let of_products = self.host_products.iter().flat_map(|(name, rates)| {
            rates.iter().map(move |rate| {
                let key = format!("host_products.{name}, width {}", rate.width);
                (key, rate.bytes_per_second)
            })
        });
        of_machine
            .into_iter()
            .filter_map(|(name, rate)| Some((name.to_owned(), rate?)))
            .chain(of_products)
    }

    /// Refuses rates that no machine has, with which sums and quotients of them would leave what floats can tell apart,
    /// and widths out of order.
    pub fn check(&self) -> Result<(), RatesError> {
        for (name, value) in self.named() {
            if !RATES_OF_MACHINES.contains(&value) {
                return Err(RatesError::NotARate { name, value });
            }
        }
        if self.processors == Some(0) {
            return Err(RatesError::NoProcessors);
        }
        for (name, rates) in &self.host_products {
            if !TensorType::ALL.iter().any(|kind| kind.name() == name) {
                return Err(RatesError::UnknownType { name: name.clone() });
            }
            let begins_with_one = rates.first().is_some_and(|rate| rate.width == 1);
            let ascends = rates.is_sorted_by(|one, next| one.width < next.width);
            if !(begins_with_one && ascends) {
                return Err(RatesError::Widths { name: name.clone() });
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

    /// The card as `parse` reads it, for people to read too: a line for each key, and for each weight type and width.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    fn write_toml(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "name = {}", quoted(&self.name))?;
        if let Some(bytes) = self.device_memory_bytes {
            writeln!(text, "device_memory_bytes = {bytes}")?;
        }
        writeln!(text, "host_memory_bytes = {}", self.host_memory_bytes)?;
        if let Some(measured) = &self.measured {
            writeln!(text, "\n[measured]")?;
            for (key, value) in [
                ("date", Some(&measured.date)),
                ("processor", Some(&measured.processor)),
                ("instruction_set", Some(&measured.instruction_set)),
                ("gpu", measured.gpu.as_ref()),
                ("storage_file", measured.storage_file.as_ref()),
                ("strata", Some(&measured.strata)),
            ] {
                if let Some(value) = value {
                    writeln!(text, "{key} = {}", quoted(value))?;
                }
            }
            writeln!(text, "threads = {}", measured.threads)?;
            if let Some(device) = measured.storage_device {
                writeln!(text, "storage_device = {device}")?;
            }
        }
        writeln!(text, "\n[rates]")?;
        for (name, rate) in self.rates.named() {
            if !name.contains('.') {
                writeln!(text, "{name} = {rate:e}")?;
            }
        }
        if let Some(processors) = self.rates.processors {
            writeln!(text, "processors = {processors}")?;
        }
        if let Some(attention) = self.rates.host_attention {
            writeln!(text, "\n[rates.host_attention]")?;
            writeln!(text, "bytes_per_second = {:e}", attention.bytes_per_second)?;
            writeln!(text, "flops_per_second = {:e}", attention.flops_per_second)?;
        }
        if !self.rates.host_products.is_empty() {
            writeln!(text, "\n[rates.host_products]")?;
        }
        for (name, rates) in &self.rates.host_products {
            writeln!(text, "{} = [", quoted(name))?;
            for rate in rates {
                writeln!(
                    text,
                    "    {{ width = {}, bytes_per_second = {:e} }},",
                    rate.width, rate.bytes_per_second
                )?;
            }
            writeln!(text, "]")?;
        }
        Ok(())
    }
}

/// A string as TOML has it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn products(of: &[(&str, &[(u32, f64)])]) -> BTreeMap<String, Vec<ProductRate>> {
        let rates = |rates: &[(u32, f64)]| {
            let rate = |&(width, bytes_per_second)| ProductRate {
                width,
                bytes_per_second,
            };
            rates.iter().map(rate).collect()
        };
        of.iter()
            .map(|&(name, list)| (name.to_owned(), rates(list)))
            .collect()
    }

    fn measured_card() -> HardwareCard {
        HardwareCard {
            name: "a \"quoted\" name\\".into(),
            device_memory_bytes: Some(24 << 30),
            host_memory_bytes: 1 << 30,
            measured: Some(Measured {
                date: "2026-01-02T03:04:05Z".into(),
                processor: "Some CPU @ 2 GHz".into(),
                threads: 8,
                instruction_set: "avx2".into(),
                gpu: Some("Some GPU".into()),
                storage_file: Some("/models/a 'b'\n.gguf".into()),
                storage_device: Some(64_768),
                strata: "0.1.0".into(),
            }),
            rates: Rates {
                copy_bytes_per_second: Some(8.25e9),
                reading_bytes_per_processor_second: Some(1.25e10),
                verifying_bytes_per_processor_second: Some(8e9),
                processors: Some(8),
                host_attention: Some(AttentionRates {
                    bytes_per_second: 2.5e10,
                    flops_per_second: 1.5e11,
                }),
                host_products: products(&[
                    ("Q4_K", &[(1, 1.5e10), (512, 1.1e8)]),
                    ("F16", &[(1, 2e10)]),
                ]),
                ..Rates::default()
            },
        }
    }

    #[test]
    fn the_cards_that_ship_parse() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/hardware");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let card =
                HardwareCard::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(!card.name.is_empty(), "{}", path.display());
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
        for name in ["two-core-vm.toml", "rtx-4090-desktop.toml"] {
            assert!(names.contains(&name.to_owned()), "found {names:?}");
        }
    }

    #[test]
    fn a_card_is_written_as_it_is_read() {
        let mut plain = measured_card();
        plain.measured = None;
        plain.device_memory_bytes = None;
        plain.rates = Rates::default();
        let mut of_cpu = measured_card();
        if let Some(measured) = &mut of_cpu.measured {
            (measured.gpu, measured.storage_file) = (None, None);
            measured.storage_device = None;
        }
        for card in [measured_card(), plain, of_cpu] {
            let text = card.to_toml();
            assert_eq!(HardwareCard::parse(&text).unwrap(), card, "{text}");
            // Another way to write the same.
            let derived = toml::to_string(&card).unwrap();
            assert_eq!(HardwareCard::parse(&derived).unwrap(), card, "{derived}");
        }
        assert!(
            measured_card()
                .to_toml()
                .contains("storage_bytes_per_second = 1.5e9\n")
        );
    }

    #[test]
    fn a_card_with_a_bad_rate_or_an_unknown_key_is_refused_by_name() {
        #[track_caller]
        fn check(change: impl FnOnce(&mut Rates), part: &str) {
            let mut card = measured_card();
            change(&mut card.rates);
            let error = HardwareCard::parse(&card.to_toml()).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        check(|r| r.link_bytes_per_second = 0.0, "link_bytes_per_second");
        check(|r| r.host_flops_per_second = -1.0, "host_flops_per_second");
        // With these, sums and quotients of rates would be 0 or infinite, and a simulated step would never end.
        for rate in [1e-320, 0.5, 1e19, 1e308] {
            check(
                |r| r.host_memory_bytes_per_second = rate,
                "host_memory_bytes_per_second",
            );
        }
        check(
            |r| r.copy_bytes_per_second = Some(f64::INFINITY),
            "copy_bytes_per_second",
        );
        check(
            |r| r.host_products = products(&[("Q4_K", &[(1, 1.0), (2, f64::INFINITY)])]),
            "host_products.Q4_K, width 2",
        );
        check(
            |r| r.host_products = products(&[("Q4_K", &[(2, 1.0)])]),
            "begin with 1",
        );
        check(
            |r| r.host_products = products(&[("Q4_K", &[])]),
            "host_products.Q4_K",
        );
        check(
            |r| r.host_products = products(&[("Q6_K", &[(1, 1.0), (4, 1.0), (4, 1.0)])]),
            "ascend",
        );
        check(
            |r| r.host_products = products(&[("Q4_k", &[(1, 1.0)])]),
            "Q4_k",
        );
        check(|r| r.processors = Some(0), "processors");

        let good = measured_card().to_toml();
        let error = HardwareCard::parse(&format!("linkrate = 3\n{good}")).unwrap_err();
        assert!(error.to_string().contains("linkrate"), "{error}");
        let text = good.replace("threads = 8", "threads = 8\nthread = 9");
        let error = HardwareCard::parse(&text).unwrap_err().to_string();
        let line = 1 + text.lines().position(|line| line == "thread = 9").unwrap();
        assert!(error.contains("thread"), "{error}");
        assert!(error.contains(&format!("line {line}:")), "{error}");
    }

    #[test]
    fn products_take_what_they_take_by_hand() {
        let rates = Rates {
            host_kernel_bytes_per_second: 10.0,
            host_flops_per_second: 100.0,
            // 100 bytes take 10 s, 12.5 s and 50 s.
            host_products: products(&[("Q4_K", &[(1, 10.0), (4, 8.0), (16, 2.0)])]),
            ..Rates::default()
        };
        for (kind, elements, width, by_hand) in [
            ("Q4_K", 200.0, 0, 10.0),
            ("Q4_K", 200.0, 1, 10.0),
            // A third and two thirds of the way from 10 to 12.5.
            ("Q4_K", 200.0, 2, 10.0 + 2.5 / 3.0),
            ("Q4_K", 200.0, 3, 10.0 + 5.0 / 3.0),
            ("Q4_K", 200.0, 4, 12.5),
            // Half way from 12.5 to 50.
            ("Q4_K", 200.0, 10, 31.25),
            ("Q4_K", 200.0, 16, 50.0),
            ("Q4_K", 200.0, 64, 200.0),
            // Not measured: 100 bytes at 10 a second, or 2 * 200 * width operations at 100 a second.
            ("Q6_K", 200.0, 1, 10.0),
            ("Q6_K", 200.0, 2, 10.0),
            ("Q6_K", 200.0, 5, 20.0),
        ] {
            let seconds = rates.host_product_seconds(kind, 100.0, elements, width);
            assert!(
                (seconds - by_hand).abs() < 1e-9,
                "{kind} at {width}: {seconds}, by hand {by_hand}"
            );
        }
    }
}
