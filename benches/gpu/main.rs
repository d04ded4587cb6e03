//! How fast are a GPU's link, its memory, and the products that read weights from it?
//!
//! `cargo bench --features cuda --bench gpu` prints, as JSON, how wide the memory's bus is, and bytes per second:
//! copies from page-locked memory, a copy inside device memory (bytes read and written), and for weights of each type
//! products with the input of up to eight tokens over more matrices than a cache holds, with their share of the copy's
//! rate. With `--candle PTX`, which `scripts/candle_kernels.py` makes, candle's kernels compute the same products in
//! turn, and their results are held against ours; where they differ, it ends with 1 after the report. Medians of
//! several rounds. Under `cargo test`, and without a device, it shows that it runs, or says that it skips.

#![expect(
    unsafe_code,
    reason = "times copies and kernels over device memory that it has allocated itself"
)]

mod candle;
mod products;

use candle::CandleKernels;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use strata::kernels::cuda::CudaKernels;
use strata::memory::{Arena, CudaDevice, DeviceAddress, Event, Region, RegionCopies};

/// A layer of an 8B model: feed-forward.
const ROWS: usize = 14336;
const COLUMNS: usize = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let candle = arguments
        .iter()
        .position(|argument| argument == "--candle")
        .and_then(|at| arguments.get(at + 1))
        .map(PathBuf::from);
    let sizes = if is_bench {
        Sizes {
            copied: 1 << 30,
            weights: 1 << 30,
            rows: ROWS,
            columns: COLUMNS,
            rounds: 7,
        }
    } else {
        Sizes {
            copied: 1 << 20,
            weights: 1 << 14,
            rows: 64,
            columns: 256,
            rounds: 1,
        }
    };
    let device = match CudaDevice::open(0) {
        Ok(device) if CudaKernels::ARE_COMPILED_IN => device,
        Ok(_) => return skip("this build has no CUDA kernels"),
        Err(error) => return skip(&error.to_string()),
    };
    match measure(&device, &sizes, candle) {
        Ok(report) => {
            println!("{report:#}");
            let products = report["products"].as_array();
            let wrong = products
                .into_iter()
                .flatten()
                .filter_map(|product| product["wrong"].as_str());
            if wrong.inspect(|wrong| eprintln!("{wrong}")).count() > 0 {
                std::process::exit(1);
            }
        }
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// Says why nothing is measured; where a device is required, that is a failure.
fn skip(why: &str) {
    if std::env::var_os("STRATA_REQUIRE_GPU").is_some() {
        eprintln!("a device is required: {why}");
        std::process::exit(1);
    }
    println!("skipped: {why}");
}

struct Sizes {
    /// Bytes of a copy.
    copied: usize,
    /// Bytes of all matrices of a type together, at least.
    weights: usize,
    /// Even: candle's kernels compute two at once.
    rows: usize,
    columns: usize,
    rounds: usize,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn measure(device: &Arc<CudaDevice>, sizes: &Sizes, candle: Option<PathBuf>) -> Outcome<Value> {
    let (free, total) = device.memory_bytes()?;
    let bus_width = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH;
    let bus_bits = device.context().attribute(bus_width)?;
    let link = link_rate(device, sizes)?;
    let memory = memory_rate(device.compute_stream(), sizes)?;
    let kernels = CudaKernels::load(device.context())?;
    let candle = candle
        .map(|path| CandleKernels::load(device.context(), &path))
        .transpose()?;
    let products = products::measure(
        device.compute_stream(),
        sizes,
        memory,
        &kernels,
        candle.as_ref(),
    )?;
    device.synchronise()?;
    Ok(json!({
        "device": device.name(),
        "memory_free_bytes": free,
        "memory_total_bytes": total,
        "memory_bus_bits": bus_bits,
        "link_bytes_per_second": link,
        "memory_copy_bytes_per_second": memory,
        "products": products,
    }))
}

/// The median of several rounds' bytes per second. `round` gives the bytes that it moved and waits until that is done.
fn rate(rounds: usize, mut round: impl FnMut() -> Outcome<usize>) -> Outcome<f64> {
    round()?;
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        let bytes = round()?;
        rates.push(bytes as f64 / began.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

/// Copies to the device as weights are copied: by its copy stream, a few groups at a time.
fn link_rate(device: &Arc<CudaDevice>, sizes: &Sizes) -> Outcome<f64> {
    const GROUPS: usize = 8;
    let group = sizes.copied / GROUPS;
    let mut host = Arena::new("host", sizes.copied)?;
    let (locked, refusal) = host.lock_pages(device);
    if let Some(refusal) = refusal {
        eprintln!("{locked} bytes are locked to their pages: {refusal}");
    }
    let host = Arc::new(host);
    let arena = Arc::new(Arena::on_cuda("device", sizes.copied, device)?);
    let (done, copies) = std::sync::mpsc::channel();
    let stream = RegionCopies::start(
        Arc::clone(&host),
        Arc::clone(&arena),
        None,
        Box::new(move |copied| drop(done.send(copied))),
    )?;
    let mut pairs = Vec::new();
    for _ in 0..GROUPS {
        let mut source = Region::allocate_low(&host, group)?;
        source.bytes_mut().fill(1);
        pairs.push((Arc::new(source), Region::allocate_low(&arena, group)?));
    }
    let mut ticket = 0;
    rate(sizes.rounds, || {
        for (source, destination) in pairs.drain(..) {
            ticket += 1;
            stream.copy(ticket, source, destination, group, Event::recorded());
        }
        for _ in 0..GROUPS {
            let copied = copies.recv()?;
            let destination = copied.destination.ok_or("a copy without a destination")?;
            pairs.push((copied.source, destination));
        }
        Ok(GROUPS * group)
    })
}

/// Device memory that is given back.
struct Memory {
    address: u64,
    context: Arc<CudaContext>,
}

impl Memory {
    /// Every byte is `fill`.
    fn filled(context: &Arc<CudaContext>, bytes: usize, fill: u8) -> Outcome<Memory> {
        context.bind_to_thread()?;
        // SAFETY: the context is current; the address is freed once, in drop.
        let address = unsafe { result::malloc_sync(bytes)? };
        let memory = Memory {
            address,
            context: Arc::clone(context),
        };
        memory.fill(bytes, fill)?;
        Ok(memory)
    }

    /// Every one of its first `bytes`, which no stream may be using, becomes `fill`.
    fn fill(&self, bytes: usize, fill: u8) -> Outcome<()> {
        self.context.bind_to_thread()?;
        // SAFETY: what was allocated for as many bytes.
        unsafe { result::memset_d8_sync(self.address, fill, bytes)? };
        // It is ordered by the null stream, for which the others do not wait.
        Ok(self.context.synchronize()?)
    }

    /// `count` copies of `bytes`, one after another.
    fn repeating(context: &Arc<CudaContext>, bytes: &[u8], count: usize) -> Outcome<Memory> {
        let memory = Memory::filled(context, count * bytes.len(), 0)?;
        for index in 0..count {
            // SAFETY: the allocation is `count` times as long.
            unsafe {
                result::memcpy_htod_sync(memory.address + (index * bytes.len()) as u64, bytes)?
            };
        }
        context.synchronize()?;
        Ok(memory)
    }

    /// What lies at its start, when the streams that write it have been waited for.
    fn floats(&self, count: usize) -> Outcome<Vec<f32>> {
        let mut floats = vec![0.0; count];
        self.context.bind_to_thread()?;
        // SAFETY: what was allocated for as many floats.
        unsafe { result::memcpy_dtoh_sync(&mut floats, self.address)? };
        Ok(floats)
    }

    fn at(&self, offset: usize) -> DeviceAddress {
        // SAFETY: each product uses what was allocated for it, and every round waits for its stream.
        unsafe { DeviceAddress::new(self.address + offset as u64) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: every round waits for its stream, so nothing uses the memory.
        let _ = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::free_sync(self.address) });
    }
}

fn memory_rate(stream: &CudaStream, sizes: &Sizes) -> Outcome<f64> {
    let bytes = sizes.copied;
    let (from, to) = (
        Memory::filled(stream.context(), bytes, 1)?,
        Memory::filled(stream.context(), bytes, 1)?,
    );
    rate(sizes.rounds, || {
        stream.context().bind_to_thread()?;
        // SAFETY: both allocations are as long, and live until the stream is waited for.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream.cu_stream())? };
        stream.synchronize()?;
        Ok(2 * bytes)
    })
}
