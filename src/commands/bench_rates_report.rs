//! What `strata bench rates` found, as people and programs read it.

use super::rates::{ThisMachine, stored_profile};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use strata::bench::{ATTENTION_DEPTH, GpuRates, ReadWay, ReadingRate, median};
use strata::config::format_bytes;
use strata::gguf::TensorType;
use strata::memory::Rung;
use strata::placement::{AttentionRates, HardwareCard, ProductRate};

/// What was measured.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) storage: Option<StorageFindings>,
    pub(super) memory: Option<MemoryFindings>,
    pub(super) link: Option<LinkFindings>,
    pub(super) attention: Option<AttentionRates>,
    pub(super) products: Vec<TypeFindings>,
    /// What to know of the figures.
    pub(super) notes: Vec<String>,
    /// Where the profile is now.
    pub(super) stored: Option<PathBuf>,
}

pub(super) struct StorageFindings {
    pub(super) file: PathBuf,
    pub(super) file_bytes: u64,
    /// The file system's number.
    pub(super) device: Option<u64>,
    /// Bytes per second.
    pub(super) points: Vec<(ReadWay, f64)>,
    pub(super) refused: Vec<(Rung, String)>,
    /// How weights are read, what that reaches, and why no better rung is taken.
    pub(super) engine: ReadWay,
    pub(super) engine_rate: ReadingRate,
    pub(super) engine_reason: String,
    /// The fastest of `points`, and what it reached the second time.
    pub(super) best: ReadWay,
    pub(super) best_rate: f64,
}

/// Bytes per second.
pub(super) struct MemoryFindings {
    pub(super) all: f64,
    pub(super) one: f64,
    /// What one thread verifies.
    pub(super) checksums: f64,
}

pub(super) enum LinkFindings {
    /// What one thread copies, and what the link moves in a plan: no more than its rate.
    Emulated { copy_rate: f64, link_rate: f64 },
    Gpu {
        name: String,
        memory_bytes: u64,
        rates: GpuRates,
    },
}

/// Products with weights of one type.
pub(super) struct TypeFindings {
    pub(super) kind: TensorType,
    pub(super) rates: Vec<ProductRate>,
}

impl TypeFindings {
    /// Operations per second at a width.
    fn flops(&self, rate: &ProductRate) -> f64 {
        let elements = self.kind.block_elements() as f64 / self.kind.block_bytes() as f64;
        2.0 * elements * f64::from(rate.width) * rate.bytes_per_second
    }

    /// Bytes per second at width 1, and operations per second at the widest: the medians of all types.
    pub(super) fn typical(all: &[TypeFindings]) -> Option<(f64, f64)> {
        let few: Vec<f64> = all
            .iter()
            .filter_map(|of| Some(of.rates.first()?.bytes_per_second))
            .collect();
        let many: Vec<f64> = all
            .iter()
            .filter_map(|of| Some(of.flops(of.rates.last()?)))
            .collect();
        (!few.is_empty()).then(|| (median(&few), median(&many)))
    }

    pub(super) fn in_words(&self) -> String {
        let (Some(first), Some(last)) = (self.rates.first(), self.rates.last()) else {
            return "nothing".to_owned();
        };
        format!(
            "{:.2} GB/s for one token, {:.0} GFLOP/s for {}",
            first.bytes_per_second / 1e9,
            self.flops(last) / 1e9,
            last.width
        )
    }
}

fn rung_in_words(rung: Rung) -> &'static str {
    match rung {
        Rung::IoUringRegistered => "io_uring, registered",
        Rung::IoUringPartlyRegistered => "io_uring, partly registered",
        Rung::IoUring => "io_uring, plain",
        Rung::PreadDirect => "pread, direct",
        Rung::PreadBuffered => "pread, buffered",
    }
}

fn kibibytes(bytes: usize) -> String {
    match bytes {
        1_048_576.. => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

/// `io_uring, registered, 32 of 1 MiB`.
pub(super) fn way_in_words(way: ReadWay) -> String {
    format!(
        "{}, {} of {}",
        rung_in_words(way.rung),
        way.requests.in_flight_max,
        kibibytes(way.requests.bytes_max)
    )
}

impl Findings {
    pub(super) fn text(&self, machine: &ThisMachine, card: &HardwareCard) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text, machine, card);
        text
    }

    fn write(
        &self,
        text: &mut String,
        machine: &ThisMachine,
        card: &HardwareCard,
    ) -> std::fmt::Result {
        let one = |count: u32| if count == 1 { "" } else { "s" };
        writeln!(
            text,
            "{}, {} thread{}, {}",
            machine.processor,
            machine.threads,
            one(machine.threads),
            machine.instruction_set
        )?;
        if let Some(storage) = &self.storage {
            storage.write(text)?;
        }
        if let Some(memory) = &self.memory {
            writeln!(
                text,
                "\nmemory: {:.2} GB/s by all threads, {:.2} by one; one verifies {:.2} GB/s",
                memory.all / 1e9,
                memory.one / 1e9,
                memory.checksums / 1e9
            )?;
        }
        match &self.link {
            Some(LinkFindings::Emulated {
                copy_rate,
                link_rate,
            }) => writeln!(
                text,
                "\nlink: one thread copies {:.2} GB/s; the emulated device's moves {:.2} GB/s of it",
                copy_rate / 1e9,
                link_rate / 1e9
            )?,
            Some(LinkFindings::Gpu { name, rates, .. }) => writeln!(
                text,
                "\nlink: {:.2} GB/s to {name}, whose kernels read {:.1} GB/s of weights and compute {:.1} TFLOP/s",
                rates.link_bytes_per_second / 1e9,
                rates.memory_bytes_per_second / 1e9,
                rates.flops_per_second / 1e12
            )?,
            None => {}
        }
        self.write_products(text)?;
        if let Some(attention) = &self.attention {
            writeln!(
                text,
                "\nattention, 32 heads of 128 over {ATTENTION_DEPTH} positions: {:.2} GB/s of keys and values for one token, \
                 {:.1} GFLOP/s for a prompt",
                attention.bytes_per_second / 1e9,
                attention.flops_per_second / 1e9
            )?;
        }
        if !self.notes.is_empty() {
            writeln!(text)?;
        }
        for note in &self.notes {
            writeln!(text, "note: {note}")?;
        }
        if let Some(path) = &self.stored {
            let measured = card.measured.as_ref();
            writeln!(
                text,
                "\nstored in {}: {} with it{}",
                path.display(),
                match Some(path) == stored_profile().as_ref() {
                    true => "`plan` and `serve` predict",
                    false => "`--rates` and this name predict",
                },
                match measured.is_some_and(|measured| measured.storage_device.is_none()) {
                    true => ", and with an assumed rate of storage",
                    false => "",
                }
            )?;
        }
        Ok(())
    }

    fn write_products(&self, text: &mut String) -> std::fmt::Result {
        let longest = self.products.iter().max_by_key(|of| of.rates.len());
        let Some(longest) = longest else {
            return Ok(());
        };
        write!(text, "\nproducts, GB/s of weights\n{:<8}", "tokens")?;
        for rate in &longest.rates {
            write!(text, "{:>8}", rate.width)?;
        }
        writeln!(text, "{:>18}", "GFLOP/s at most")?;
        for of in &self.products {
            write!(text, "{:<8}", of.kind.name())?;
            for index in 0..longest.rates.len() {
                match of.rates.get(index) {
                    Some(rate) => write!(text, "{:>8.2}", rate.bytes_per_second / 1e9)?,
                    None => write!(text, "{:>8}", "-")?,
                }
            }
            let most = of
                .rates
                .iter()
                .map(|rate| of.flops(rate))
                .fold(0.0, f64::max);
            writeln!(text, "{:>18.1}", most / 1e9)?;
        }
        Ok(())
    }

    pub(super) fn json(&self, machine: &ThisMachine, card: &HardwareCard) -> anyhow::Result<Value> {
        let memory = self.memory.as_ref().map(|memory| {
            json!({
                "bytes_per_second": memory.all,
                "one_thread_bytes_per_second": memory.one,
                "checksums_bytes_per_second": memory.checksums,
            })
        });
        let link = self.link.as_ref().map(|link| match link {
            LinkFindings::Emulated {
                copy_rate,
                link_rate,
            } => json!({
                "device": "emulated",
                "bytes_per_second": link_rate,
                "copy_bytes_per_second": copy_rate,
            }),
            LinkFindings::Gpu { name, rates, .. } => json!({
                "device": name,
                "bytes_per_second": rates.link_bytes_per_second,
                "memory_bytes_per_second": rates.memory_bytes_per_second,
                "flops_per_second": rates.flops_per_second,
            }),
        });
        let mut products = serde_json::Map::new();
        for of in &self.products {
            products.insert(of.kind.name().to_owned(), serde_json::to_value(&of.rates)?);
        }
        Ok(json!({
            "kind": "rates",
            "processor": machine.processor,
            "threads": machine.threads,
            "instruction_set": machine.instruction_set,
            "storage": self.storage.as_ref().map(StorageFindings::json),
            "memory": memory,
            "link": link,
            "products": products,
            "attention": serde_json::to_value(self.attention)?,
            "notes": self.notes,
            "profile": self.stored.as_ref().map(|path| path.display().to_string()),
            "rates": serde_json::to_value(&card.rates)?,
        }))
    }
}

impl StorageFindings {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "\nstorage, GB/s: {} ({})",
            self.file.display().to_string().escape_debug(),
            format_bytes(self.file_bytes)
        )?;
        let mut sizes: Vec<usize> = self
            .points
            .iter()
            .map(|(way, _)| way.requests.bytes_max)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        write!(text, "{:<22}{:>9}", "", "in flight")?;
        for &size in &sizes {
            write!(text, "{:>10}", kibibytes(size))?;
        }
        writeln!(text)?;
        let rungs = [
            Rung::IoUringRegistered,
            Rung::IoUringPartlyRegistered,
            Rung::IoUring,
            Rung::PreadDirect,
            Rung::PreadBuffered,
        ];
        for rung in rungs {
            let of_rung = || self.points.iter().filter(|(way, _)| way.rung == rung);
            let mut depths: Vec<u32> = of_rung()
                .map(|(way, _)| way.requests.in_flight_max)
                .collect();
            depths.sort_unstable();
            depths.dedup();
            for depth in depths {
                write!(text, "{:<22}{depth:>9}", rung_in_words(rung))?;
                for &size in &sizes {
                    let found = of_rung().find(|(way, _)| {
                        way.requests.in_flight_max == depth && way.requests.bytes_max == size
                    });
                    match found {
                        Some((_, rate)) => write!(text, "{:>10.2}", rate / 1e9)?,
                        None => write!(text, "{:>10}", "-")?,
                    }
                }
                writeln!(text)?;
            }
        }
        for (rung, why) in &self.refused {
            writeln!(text, "{}: not here: {why}", rung_in_words(*rung))?;
        }
        writeln!(
            text,
            "the engine reads with {}: {:.2} GB/s, {:.2} of the best ({})",
            way_in_words(self.engine),
            self.engine_rate.bytes_per_second / 1e9,
            self.engine_rate.bytes_per_second / self.best_rate.max(f64::MIN_POSITIVE),
            match self.best == self.engine {
                true => "which it is".to_owned(),
                false => way_in_words(self.best),
            },
        )?;
        if let Some(rate) = self.engine_rate.bytes_per_processor_second {
            writeln!(
                text,
                "reading takes a second of processor time for each {:.1} GB",
                rate / 1e9
            )?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let way = |way: ReadWay, rate: f64| {
            json!({
                "reader": way.rung.name(),
                "in_flight": way.requests.in_flight_max,
                "request_bytes": way.requests.bytes_max,
                "bytes_per_second": rate,
            })
        };
        let mut engine = way(self.engine, self.engine_rate.bytes_per_second);
        engine["bytes_per_processor_second"] = json!(self.engine_rate.bytes_per_processor_second);
        engine["reason"] = json!(self.engine_reason);
        json!({
            "file": self.file.display().to_string(),
            "file_bytes": self.file_bytes,
            "ways": self.points.iter().map(|(of, rate)| way(*of, *rate)).collect::<Vec<_>>(),
            "refused": self.refused.iter().map(|(rung, why)| json!({"reader": rung.name(), "reason": why})).collect::<Vec<_>>(),
            "engine": engine,
            "best": way(self.best, self.best_rate),
        })
    }
}
