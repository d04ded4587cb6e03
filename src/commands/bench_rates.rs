//! `strata bench rates`: measures what the parts of this machine reach, each through the code that serves, and stores
//! it as the profile that plans are predicted from.
//!
//! Parts share the time that was given. An interruption at any moment leaves the stored profile as it was: it is
//! replaced by another file, whole, at the end.

use super::Usage;
use super::bench_rates_profile::{Destination, card, rounded, store};
use super::bench_rates_report::{
    Findings, LinkFindings, MemoryFindings, StorageFindings, TypeFindings, way_in_words,
};
use super::contention::Contention;
use super::files::{print, print_json};
use super::hand_over::open_gpu;
use super::load::{compute_pool, pin_engine, weights_settings};
use super::rates::{ThisMachine, device_of};
use super::stderr::{Stderr, say};
use anyhow::{Context, bail};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use strata::bench::{
    ATTENTION_DEPTH, CopyRate, MemoryRate, OfType, ProductRates, ReadWay, StorageRate,
    StorageRateError, attention_rates, gpu_rates,
};
use strata::cli::{BenchRatesArguments, RatesPart};
use strata::config::{Config, DeviceSetting, compute_threads, free_host_memory};
use strata::gguf::{Gguf, TensorType};
use strata::kernels::ComputePool;
use strata::memory::{ReaderChoice, Requests, Rung, find_cuda_driver};
use strata::placement::{AttentionRates, ProductRate};

/// Where in the file reading begins is random; this seed gives the same in every run.
const SEED: u64 = 1;

/// What the parts take of the time, in this order.
const SHARES: [(RatesPart, f64); 4] = [
    (RatesPart::Storage, 15.0),
    (RatesPart::Memory, 2.0),
    (RatesPart::Link, 4.0),
    (RatesPart::Kernels, 24.0),
];
/// Attention's of the kernels' time.
const ATTENTION_SHARE: f64 = 0.15;

/// Memory that is read, copied or multiplied by: several times what the caches of large processors hold. Less where
/// less is free (measuring must not make the system swap) or little time is given (it is filled first).
const PLAIN_BYTES: u64 = 1 << 30;
const PLAIN_BYTES_MIN: u64 = 64 << 20;
const PLAIN_BYTES_PER_SECOND: u64 = 32 << 20;
/// What attention reads of keys and values, at most, and what is copied.
const PAGES_SHARE: u64 = 2;

/// A way of reading is measured for so long where there is time, and another one is left out rather than less.
const READ_SECONDS_MAX: f64 = 1.0;
const READ_SECONDS_MIN: f64 = 0.45;
/// What it takes beside that to start reading and to end it.
const READ_OVERHEAD_SECONDS: f64 = 0.25;
/// The engine's way and the best one are measured again at the end, so that what happened to be fastest does not win by
/// that alone; and the engine's is measured first.
const READS_AGAIN: usize = 2;
const READS_MIN: usize = 2;
/// Threads that waited for a processor for more than this share of their time were held up by others.
const WAITED_MAX: f64 = 0.05;
/// Below this share of the best, the engine's own way of reading is worth a warning.
const ENGINE_SHARE_MIN: f64 = 0.95;
/// Smaller files may lie in a cache of the drive, or of the host of a virtual one.
const FILE_BYTES_SMALL: u64 = 1 << 30;

/// Ways of reading: requests in flight and KiB of each, those first that tell most. A `pread` rung has four threads,
/// and requests beyond wait.
const WAYS: [(Rung, u32, usize); 27] = [
    (Rung::IoUringRegistered, 32, 1024),
    (Rung::IoUring, 32, 1024),
    (Rung::PreadDirect, 32, 1024),
    (Rung::IoUringRegistered, 8, 1024),
    (Rung::IoUringRegistered, 4, 1024),
    (Rung::IoUringRegistered, 32, 256),
    (Rung::IoUringRegistered, 8, 4096),
    (Rung::IoUringRegistered, 1, 1024),
    (Rung::IoUringRegistered, 32, 4096),
    (Rung::IoUring, 8, 1024),
    (Rung::PreadDirect, 4, 4096),
    (Rung::PreadDirect, 4, 256),
    (Rung::IoUring, 8, 4096),
    (Rung::IoUring, 32, 256),
    (Rung::IoUringRegistered, 16, 1024),
    (Rung::IoUringRegistered, 1, 4096),
    (Rung::IoUringRegistered, 8, 256),
    (Rung::PreadDirect, 1, 1024),
    (Rung::IoUring, 1, 1024),
    (Rung::IoUringRegistered, 4, 4096),
    (Rung::IoUring, 4, 1024),
    (Rung::IoUring, 32, 4096),
    (Rung::PreadDirect, 1, 4096),
    (Rung::IoUring, 1, 4096),
    (Rung::IoUring, 16, 1024),
    (Rung::IoUringRegistered, 16, 4096),
    (Rung::IoUringRegistered, 1, 256),
];

/// Tokens at once that products are measured with.
const WIDTHS: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
/// A type of the model has the time of so many others: it is what plans are made from.
const MODEL_TYPE_WEIGHT: f64 = 6.0;
/// Rounds over the widths: of a type of the model, in all of the time, for the machine is faster and slower by turns; and of
/// another.
const MODEL_TYPE_ROUNDS: u32 = 10;
const OTHER_TYPE_ROUNDS: u32 = 3;
const TYPE_SECONDS_MIN: f64 = 0.04;
/// Weight types after those of the model, those first that people use most.
const TYPES: [TensorType; 13] = [
    TensorType::Q4K,
    TensorType::Q6K,
    TensorType::Q5K,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::F16,
    TensorType::Q3K,
    TensorType::Q2K,
    TensorType::BF16,
    TensorType::Q5_0,
    TensorType::Q4_1,
    TensorType::Q5_1,
    TensorType::F32,
];

/// Measures, stores and prints.
pub(super) fn bench_rates(config: &Config, arguments: &BenchRatesArguments) -> anyhow::Result<()> {
    let machine = ThisMachine::of(config)?;
    let destination = Destination::of(arguments)?;
    let model = match &config.model {
        Some(path) => Some(measured_of(path)?),
        None if arguments.only == Some(RatesPart::Storage) => bail!(Usage(
            "storage is measured by reading a model; name one: `strata bench rates MODEL.gguf`"
                .to_owned()
        )),
        None => None,
    };
    let previous = destination.previous(&machine)?;

    let is_measured = |part: RatesPart| {
        let wanted = arguments.only.is_none_or(|only| only == part);
        wanted && (part != RatesPart::Storage || model.is_some())
    };
    let shares: f64 = SHARES
        .iter()
        .filter(|(part, _)| is_measured(*part))
        .map(|(_, share)| share)
        .sum();
    let time_of = |part: RatesPart| -> Option<Duration> {
        let (_, share) = SHARES.iter().find(|(of, _)| *of == part)?;
        let seconds = f64::from(arguments.seconds) * share / shares;
        is_measured(part).then(|| Duration::from_secs_f64(seconds))
    };

    let mut run = Run {
        config,
        bytes: plain_bytes(arguments.seconds),
        progress: Progress::new(),
        notes: Vec::new(),
    };
    let mut findings = Findings::default();
    if let (Some(time), Some((path, _))) = (time_of(RatesPart::Storage), &model) {
        // Nothing else of this process runs meanwhile: the processor time is that of reading.
        findings.storage = Some(run.storage(path, time)?);
    } else if arguments.only.is_none() {
        run.notes.push(
            "storage is not measured: name a model that lies on it, `strata bench rates MODEL.gguf`".to_owned(),
        );
    }
    let threads = compute_threads(config).map_err(|error| Usage(error.to_string()))?;
    let pool = compute_pool(&threads);
    if let Some(time) = time_of(RatesPart::Link) {
        findings.link = Some(run.link(time)?);
    }
    pin_engine(&pool);
    let contention = Contention::begin();
    if let Some(time) = time_of(RatesPart::Memory) {
        findings.memory = Some(run.memory(&pool, time)?);
    }
    if let Some(time) = time_of(RatesPart::Kernels) {
        let types = model.as_ref().map_or(&[][..], |(_, types)| types);
        findings.attention = Some(run.attention(&pool, time.mul_f64(ATTENTION_SHARE))?);
        findings.products = run.products(&pool, types, time.mul_f64(1.0 - ATTENTION_SHARE))?;
    }
    if let Some(waited) = contention.share().filter(|waited| *waited > WAITED_MAX) {
        run.notes.push(format!(
            "other programs had the processors for {:.0} % of the time in which this one would compute: the rates are too \
             low; measure again when nothing else runs",
            100.0 * waited
        ));
    }
    findings.notes = run.notes;

    let is_whole = arguments.only.is_none() || previous.is_some();
    let card = card(config, &machine, previous, &findings);
    card.rates.check()?;
    let mut stored = Ok(());
    findings.stored = match &destination {
        Destination::Stdout => {
            for note in &findings.notes {
                say(format_args!("note: {note}"));
            }
            return print(&card.to_toml());
        }
        Destination::File(path) if is_whole => {
            stored = store(path, &card.to_toml())
                .with_context(|| format!("write the rates to {}", path.display()));
            stored.is_ok().then(|| path.clone())
        }
        Destination::File(path) => {
            findings.notes.push(format!(
                "not stored: {} has no profile of this machine to put it into; `strata bench rates` without --only makes \
                 one",
                path.display()
            ));
            None
        }
    };
    match arguments.json {
        true => print_json(&findings.json(&machine, &card)?),
        false => print(&findings.text(&machine, &card)),
    }?;
    stored
}

/// What of a model is measured: its largest file, and the weight types of its matrices, those first that have most bytes.
fn measured_of(path: &Path) -> anyhow::Result<(PathBuf, Vec<TensorType>)> {
    let gguf = Gguf::open(path).with_context(|| path.display().to_string())?;
    let largest = gguf.files.iter().max_by_key(|file| file.bytes);
    let largest = largest.map_or_else(|| path.to_owned(), |file| file.path.clone());
    let bytes = |kind: TensorType| -> u64 {
        let matrices = gguf
            .tensors
            .iter()
            .filter(|tensor| tensor.dimensions.len() > 1);
        matrices
            .filter(|tensor| tensor.kind == kind)
            .map(|tensor| tensor.bytes)
            .sum()
    };
    let mut types: Vec<(u64, TensorType)> = TensorType::ALL
        .into_iter()
        .map(|kind| (bytes(kind), kind))
        .filter(|(bytes, _)| *bytes > 0)
        .collect();
    types.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let types = types.into_iter().map(|(_, kind)| kind).collect();
    Ok((largest, types))
}

fn plain_bytes(seconds: u32) -> u64 {
    let free = free_host_memory().map_or(PLAIN_BYTES_MIN, |free| free.bytes / 2);
    let in_time = u64::from(seconds) * PLAIN_BYTES_PER_SECOND;
    free.min(in_time).clamp(PLAIN_BYTES_MIN, PLAIN_BYTES)
}

/// The measurements under way.
struct Run<'a> {
    config: &'a Config,
    /// Of memory that each may take.
    bytes: u64,
    progress: Progress,
    notes: Vec<String>,
}

impl Run<'_> {
    fn storage(&mut self, path: &Path, time: Duration) -> anyhow::Result<StorageFindings> {
        let mut storage = StorageRate::new(path, SEED)?;
        let choice = weights_settings(self.config).reader;
        let (rung, reason) = storage.rung(choice)?;
        let engine = ReadWay {
            rung,
            requests: Requests::OF_WEIGHTS,
        };
        let ways = ways(choice, engine);
        let seconds = time.as_secs_f64() / (ways.len() + READS_AGAIN) as f64;
        let seconds = (seconds - READ_OVERHEAD_SECONDS).clamp(READ_SECONDS_MIN, READ_SECONDS_MAX);
        let fit = (time.as_secs_f64() / (seconds + READ_OVERHEAD_SECONDS)) as usize;
        let fit = fit.saturating_sub(READS_AGAIN).clamp(READS_MIN, ways.len());
        // Where not even these fit, less is better than nothing.
        let most = time.as_secs_f64() / (READS_MIN + READS_AGAIN) as f64;
        let window = Duration::from_secs_f64(seconds.min(most));

        self.progress.part("storage", fit + READS_AGAIN);
        let mut points: Vec<(ReadWay, f64)> = Vec::new();
        let mut refused: Vec<(Rung, String)> = Vec::new();
        for way in ways {
            if points.len() == fit {
                break;
            }
            if refused.iter().any(|(rung, _)| *rung == way.rung) {
                continue;
            }
            self.progress.begin(&way_in_words(way));
            match storage.measure(way, window) {
                Ok(rate) => {
                    self.progress.end(&gigabytes(rate.bytes_per_second));
                    points.push((way, rate.bytes_per_second));
                }
                // A rung that this machine lacks is no failure; the engine's own is there.
                Err(StorageRateError::Read(error)) if way.rung != engine.rung => {
                    self.progress.leave_out(&error.to_string());
                    refused.push((way.rung, error.to_string()));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let fastest = points.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let best = fastest.map_or(engine, |(way, _)| *way);
        let mut again = |way: ReadWay| -> anyhow::Result<_> {
            self.progress.begin(&format!("again {}", way_in_words(way)));
            let rate = storage.measure(way, window)?;
            self.progress.end(&gigabytes(rate.bytes_per_second));
            Ok(rate)
        };
        let mut engine_rate = again(engine)?;
        // It was the first of all ways, so two figures are there, and neither was chosen.
        if let Some((_, first)) = points.first() {
            engine_rate.bytes_per_second = (engine_rate.bytes_per_second + first) / 2.0;
        }
        let best_rate = match best == engine {
            true => engine_rate.bytes_per_second,
            false => again(best)?.bytes_per_second,
        };
        let file_bytes = storage.file_bytes();
        if file_bytes < FILE_BYTES_SMALL {
            self.notes.push(format!(
                "the file has {:.1} MiB only: a cache of the drive may have served it",
                file_bytes as f64 / (1 << 20) as f64
            ));
        }
        if engine_rate.bytes_per_second < ENGINE_SHARE_MIN * best_rate {
            self.notes.push(format!(
                "the engine reads with {} at {:.2} of the best, which is {}",
                way_in_words(engine),
                engine_rate.bytes_per_second / best_rate,
                way_in_words(best)
            ));
        }
        Ok(StorageFindings {
            file: path.canonicalize().unwrap_or_else(|_| path.to_owned()),
            file_bytes,
            device: device_of(path),
            points,
            refused,
            engine,
            engine_rate,
            engine_reason: reason,
            best,
            best_rate,
        })
    }

    fn memory(&mut self, pool: &ComputePool, time: Duration) -> anyhow::Result<MemoryFindings> {
        self.progress.part("memory", 3);
        let mut memory = MemoryRate::new(self.bytes as usize)?;
        let mut measure = |what: &str, pass: &mut dyn FnMut(&mut MemoryRate)| {
            self.progress.begin(what);
            memory.restart();
            let began = Instant::now();
            while memory.bytes_per_second() == 0.0 || began.elapsed() < time / 3 {
                pass(&mut memory);
            }
            self.progress.end(&gigabytes(memory.bytes_per_second()));
            memory.bytes_per_second()
        };
        let (threads, one_thread) = (pool.threads(), ComputePool::new(1));
        Ok(MemoryFindings {
            all: measure(&format!("{threads} threads"), &mut |memory| {
                memory.measure(pool);
            }),
            one: measure("one thread", &mut |memory| {
                memory.measure(&one_thread);
            }),
            checksums: measure("checksums", &mut MemoryRate::measure_checksums),
        })
    }

    fn link(&mut self, time: Duration) -> anyhow::Result<LinkFindings> {
        self.progress.part("link", 1);
        let gpu = match self.config.device {
            DeviceSetting::Cpu | DeviceSetting::Emulated => None,
            DeviceSetting::Auto => match open_gpu(0) {
                Ok(gpu) => Some(gpu),
                Err(why) => {
                    // Who has a driver expects more.
                    if find_cuda_driver().is_ok() {
                        self.notes.push(format!("no GPU was measured: {why}"));
                    }
                    None
                }
            },
            DeviceSetting::Cuda(ordinal) => match open_gpu(ordinal) {
                Ok(gpu) => Some(gpu),
                Err(why) => bail!(Usage(format!(
                    "--device cuda:{ordinal}: {why}; give --device cpu to do without"
                ))),
            },
        };
        let bytes = (self.bytes / PAGES_SHARE) as usize;
        if let Some(gpu) = gpu {
            let device = &gpu.device;
            self.progress.begin(&format!(
                "copies to, memory and kernels of {}",
                device.name()
            ));
            let (_, memory_bytes) = device.memory_bytes()?;
            let rates = gpu_rates(&gpu, bytes, time)?;
            self.progress.end(&format!(
                "{}, {}, {:.0} GFLOP/s",
                gigabytes(rates.link_bytes_per_second),
                gigabytes(rates.memory_bytes_per_second),
                rates.flops_per_second / 1e9
            ));
            return Ok(LinkFindings::Gpu {
                name: device.name().to_owned(),
                memory_bytes,
                rates,
            });
        }
        self.progress
            .begin("one thread that copies to the emulated device");
        let copy_rate = CopyRate::new(bytes, None)?.measure(time)?;
        self.progress.end(&gigabytes(copy_rate));
        if copy_rate < self.config.link_rate {
            self.notes.push(format!(
                "the emulated link copies {}, less than its --link-rate of {}",
                gigabytes(copy_rate),
                gigabytes(self.config.link_rate)
            ));
        }
        Ok(LinkFindings::Emulated {
            copy_rate,
            link_rate: self.config.link_rate.min(copy_rate),
        })
    }

    fn attention(&mut self, pool: &ComputePool, time: Duration) -> anyhow::Result<AttentionRates> {
        self.progress.part("attention", 1);
        self.progress
            .begin(&format!("over {ATTENTION_DEPTH} positions"));
        let rates = attention_rates(pool, (self.bytes / PAGES_SHARE) as usize, time)?;
        self.progress.end(&format!(
            "{} of keys and values, {:.0} GFLOP/s",
            gigabytes(rates.bytes_per_second),
            rates.flops_per_second / 1e9
        ));
        Ok(rates)
    }

    /// Of the model's types all the time, and of the others in between.
    fn products(
        &mut self,
        pool: &ComputePool,
        of_model: &[TensorType],
        time: Duration,
    ) -> anyhow::Result<Vec<TypeFindings>> {
        let others: Vec<TensorType> = TYPES
            .into_iter()
            .filter(|kind| !of_model.contains(kind))
            .collect();
        self.progress
            .part("products", of_model.len() + others.len());
        let began = Instant::now();
        let mut products = ProductRates::new(self.bytes as usize)?;
        if self.bytes < PLAIN_BYTES {
            self.notes.push(format!(
                "products walk {} MiB of weights: the processor's caches may have served a part",
                self.bytes >> 20
            ));
        }
        let weight_of_model = MODEL_TYPE_WEIGHT * of_model.len() as f64;
        let for_one = time.as_secs_f64() / (weight_of_model + others.len() as f64);
        let round = |seconds: f64, rounds: u32| {
            // The first products, before the rounds, take as long as two.
            Duration::from_secs_f64(seconds.max(TYPE_SECONDS_MIN) / f64::from(rounds + 2))
        };
        let begun = |products: &mut ProductRates, kind, seconds, rounds| {
            products.of(kind, &WIDTHS, pool, round(seconds, rounds))
        };
        const OF_MODEL: &str = "types of the model";
        if !of_model.is_empty() {
            self.progress.begin(OF_MODEL);
        }
        let mut of_model: Vec<(TensorType, OfType)> = of_model
            .iter()
            .map(|&kind| {
                let seconds = MODEL_TYPE_WEIGHT * for_one;
                let of_type = begun(&mut products, kind, seconds, MODEL_TYPE_ROUNDS);
                (kind, of_type)
            })
            .collect();
        let mut findings = Vec::new();
        let mut left_out = Vec::new();
        let parts = others.len().max(1);
        for part in 0..parts {
            if let Some(&kind) = others.get(part) {
                if began.elapsed() < time {
                    self.progress.begin(kind.name());
                    let mut of_type = begun(&mut products, kind, for_one, OTHER_TYPE_ROUNDS);
                    for _ in 0..OTHER_TYPE_ROUNDS {
                        products.round(&mut of_type, pool);
                    }
                    findings.push(self.found(kind, &of_type));
                } else {
                    left_out.push(kind.name());
                }
            }
            let until = time.mul_f64((part + 1) as f64 / parts as f64);
            let mut is_first = part == 0;
            while !of_model.is_empty() && (is_first || began.elapsed() < until) {
                self.progress.begin(OF_MODEL);
                for (_, of_type) in &mut of_model {
                    products.round(of_type, pool);
                }
                is_first = false;
            }
        }
        let of_model = of_model
            .iter()
            .map(|(kind, of_type)| self.found(*kind, of_type));
        let mut all: Vec<TypeFindings> = of_model.collect();
        all.append(&mut findings);
        if !left_out.is_empty() {
            self.notes.push(format!(
                "there was no time for products with {}; give more --seconds",
                left_out.join(", ")
            ));
        }
        Ok(all)
    }

    fn found(&mut self, kind: TensorType, of_type: &OfType) -> TypeFindings {
        let rates = WIDTHS.into_iter().zip(of_type.rates());
        let rates = rates.map(|(width, rate)| ProductRate {
            width,
            bytes_per_second: rounded(rate),
        });
        let found = TypeFindings {
            kind,
            rates: rates.collect(),
        };
        self.progress.begin(kind.name());
        self.progress.end(&found.in_words());
        found
    }
}

/// The engine's way first.
fn ways(choice: ReaderChoice, engine: ReadWay) -> Vec<ReadWay> {
    let is_wanted = |rung: Rung| match choice {
        ReaderChoice::Auto => true,
        ReaderChoice::IoUring => !matches!(rung, Rung::PreadDirect | Rung::PreadBuffered),
        ReaderChoice::Pread => matches!(rung, Rung::PreadDirect | Rung::PreadBuffered),
    };
    let others = WAYS
        .into_iter()
        .filter(|(rung, _, _)| is_wanted(*rung))
        .map(|(rung, in_flight_max, kibibytes)| ReadWay {
            rung,
            requests: Requests {
                bytes_max: kibibytes << 10,
                in_flight_max,
            },
        })
        .filter(|way| *way != engine);
    std::iter::once(engine).chain(others).collect()
}

fn gigabytes(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

/// What is being measured, on stderr: a line for each result, and on a terminal a bar below them.
struct Progress {
    terminal: bool,
    part: &'static str,
    expected: usize,
    done: usize,
    what: String,
}

impl Progress {
    const BAR: usize = 20;

    fn new() -> Progress {
        Progress {
            terminal: std::io::stderr().is_terminal(),
            part: "",
            expected: 0,
            done: 0,
            what: String::new(),
        }
    }

    /// Begins a part of which so many measurements are expected.
    fn part(&mut self, name: &'static str, expected: usize) {
        (self.part, self.expected, self.done) = (name, expected, 0);
    }

    fn begin(&mut self, what: &str) {
        what.clone_into(&mut self.what);
        if self.terminal {
            let full = Progress::BAR * self.done / self.expected.max(1);
            let full = full.min(Progress::BAR);
            let bar = format!("{}{}", "#".repeat(full), "-".repeat(Progress::BAR - full));
            let line = format!(
                "\r\u{1b}[K[{bar}] {} {}/{} {what}",
                self.part,
                self.done + 1,
                self.expected
            );
            drop(Stderr.write_all(line.as_bytes()));
        }
    }

    fn end(&mut self, result: &str) {
        self.done += 1;
        self.line(&format!("{}, {}: {result}", self.part, self.what));
    }

    fn leave_out(&mut self, why: &str) {
        self.line(&format!("{}, {}: left out: {why}", self.part, self.what));
    }

    fn line(&self, text: &str) {
        let start = if self.terminal { "\r\u{1b}[K" } else { "" };
        say(format_args!("{start}{text}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_distinct_and_begin_with_the_engines() {
        let engine = ReadWay {
            rung: Rung::IoUring,
            requests: Requests::OF_WEIGHTS,
        };
        for choice in [
            ReaderChoice::Auto,
            ReaderChoice::IoUring,
            ReaderChoice::Pread,
        ] {
            let ways = ways(choice, engine);
            assert_eq!(ways[0], engine);
            for (index, way) in ways.iter().enumerate() {
                assert!(!ways[..index].contains(way), "{way:?}");
            }
        }
    }

    #[test]
    fn every_type_is_measured() {
        for kind in TensorType::ALL {
            assert_eq!(
                TYPES.iter().filter(|of| **of == kind).count(),
                1,
                "{kind:?}"
            );
        }
    }
}
