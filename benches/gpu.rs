//! How fast are a GPU's link, its memory, and the products that read weights from it?
//!
//! `cargo bench --features cuda --bench gpu` prints, as JSON, bytes per second: copies from page-locked memory, a copy
//! inside device memory (bytes read and written), and for weights of several types a product with one token's input over
//! more matrices than a cache holds, with its share of the copy's rate. Medians of several rounds. Under `cargo test`, and
//! without a device, it shows that it runs, or says that it skips.

#![expect(
    unsafe_code,
    reason = "times copies and kernels over device memory that it has allocated itself"
)]

use cudarc::driver::{CudaContext, CudaStream, result};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use strata::gguf::TensorType;
use strata::kernels::cuda::{
    CudaKernels, DeviceMatrix, InputForm, MatrixProduct, QuantiseRows, quantised_input_bytes,
};
use strata::memory::{Arena, CudaDevice, DeviceAddress, Event, Region, RegionCopies};

/// A layer of an 8B model: feed-forward.
const ROWS: usize = 14336;
const COLUMNS: usize = 4096;

const KINDS: [TensorType; 7] = [
    TensorType::Q4_0,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
    TensorType::F16,
    TensorType::F32,
];

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
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
            weights: 1 << 18,
            rows: 64,
            columns: 256,
            rounds: 1,
        }
    };
    let device = match CudaDevice::open(0) {
        Ok(device) if CudaKernels::ARE_COMPILED_IN => device,
        Ok(_) => return println!("skipped: this build has no CUDA kernels"),
        Err(error) => return println!("skipped: {error}"),
    };
    match measure(&device, &sizes) {
        Ok(report) => println!("{report:#}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

struct Sizes {
    /// Bytes of a copy.
    copied: usize,
    /// Bytes of all matrices of a type together, at least.
    weights: usize,
    rows: usize,
    columns: usize,
    rounds: usize,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn measure(device: &Arc<CudaDevice>, sizes: &Sizes) -> Outcome<Value> {
    let (free, total) = device.memory_bytes()?;
    let link = link_rate(device, sizes)?;
    let memory = memory_rate(device.compute_stream(), sizes)?;
    let kernels = CudaKernels::load(device.context())?;
    let mut products = Vec::new();
    for kind in KINDS {
        let rate = product_rate(
            device.context(),
            device.compute_stream(),
            &kernels,
            kind,
            sizes,
        )?;
        products.push(json!({
            "type": kind.name(),
            "bytes_per_second": rate,
            "share_of_memory": rate / memory,
        }));
    }
    device.synchronise()?;
    Ok(json!({
        "device": device.name(),
        "memory_free_bytes": free,
        "memory_total_bytes": total,
        "link_bytes_per_second": link,
        "memory_copy_bytes_per_second": memory,
        "products_of_one_token": products,
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
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Outcome<Memory> {
        context.bind_to_thread()?;
        // SAFETY: the context is current; the address is freed once, in drop.
        let address = unsafe { result::malloc_sync(bytes)? };
        // SAFETY: the allocation is as long. The bytes are numbers of moderate size in every type.
        unsafe { result::memset_d8_sync(address, 0x11, bytes)? };
        // It is ordered by the null stream, for which the others do not wait.
        context.synchronize()?;
        Ok(Memory {
            address,
            context: Arc::clone(context),
        })
    }
}

impl Memory {
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
        Memory::new(stream.context(), bytes)?,
        Memory::new(stream.context(), bytes)?,
    );
    rate(sizes.rounds, || {
        stream.context().bind_to_thread()?;
        // SAFETY: both allocations are as long, and live until the stream is waited for.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream.cu_stream())? };
        stream.synchronize()?;
        Ok(2 * bytes)
    })
}

fn product_rate(
    context: &Arc<CudaContext>,
    stream: &CudaStream,
    kernels: &CudaKernels,
    kind: TensorType,
    sizes: &Sizes,
) -> Outcome<f64> {
    let (rows, columns) = (sizes.rows, sizes.columns);
    let row_bytes = kind
        .row_bytes(columns as u64)
        .ok_or("rows of whole blocks")? as usize;
    let matrix_bytes = rows * row_bytes;
    let count = sizes.weights.div_ceil(matrix_bytes);
    let weights = Memory::new(context, count * matrix_bytes)?;
    let input = Memory::new(context, 4 * columns)?;
    let output = Memory::new(context, 4 * rows)?;
    let form = InputForm::of(kind);
    let quantised = Memory::new(
        context,
        quantised_input_bytes(form, columns, 1).max(256) as usize,
    )?;
    let read = match form {
        InputForm::Floats => &input,
        InputForm::Blocks32 | InputForm::Blocks256 => {
            let rows = QuantiseRows {
                form,
                input: input.at(0),
                output: quantised.at(0),
                columns,
                tokens: 1,
            };
            kernels.quantise_rows(stream, &rows)?;
            &quantised
        }
    };
    rate(sizes.rounds, || {
        for index in 0..count {
            let product = MatrixProduct {
                weight: DeviceMatrix {
                    kind,
                    rows,
                    columns,
                    address: weights.at(index * matrix_bytes),
                },
                input: read.at(0),
                tokens: 1,
                output: output.at(0),
                stride: rows,
                first_column: 0,
            };
            kernels.matmul(stream, &product)?;
        }
        stream.synchronize()?;
        Ok(count * matrix_bytes)
    })
}
