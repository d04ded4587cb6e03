//! Tensors in pieces, which all threads convert and one thread writes.
//!
//! A producer gives a batch of chunks to the pool, waits for it, and hands it on through a channel that holds one; so one
//! batch is converted, one waits and one is written at any time. Batches run across tensors, and small ones do not leave
//! threads idle.

use super::{Conversion, QuantiseError};
use crate::gguf::{Gguf, GgufError, IndexedFile, TensorInfo, TensorType};
use crate::kernels::dequantise_row;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::fs::{File, Metadata};
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Weights of a chunk: a whole number of blocks of every type, and a megabyte as f32.
const CHUNK_ELEMENTS: u64 = 1 << 18;
/// Chunks of a batch for each thread. Threads that are done early wait for the others, a part of one in so many.
const BATCH_CHUNKS: usize = 4;
/// The most that is in memory for each thread: three batches of converted chunks, and what converting one takes (stored
/// bytes, floats, blocks and their copy).
pub const THREAD_BYTES_MAX: usize = (3 * BATCH_CHUNKS + 4) << 20;
/// More than this the 16-bit floats that block scales are cannot hold.
const MAGNITUDE_MAX: f32 = 65_504.0;
/// More than this may become an infinity: the exponents of an f32, and the first 7 bits behind the point.
const BF16_MAX: f32 = f32::from_bits(0x7f7f_0000);

/// What is read: the file of a model, or its shards.
pub(super) struct Source<'a> {
    /// In the order of `index.files`, each with its metadata of before.
    files: Vec<(File, Metadata)>,
    index: &'a Gguf,
}

impl<'a> Source<'a> {
    pub(super) fn open(index: &'a Gguf) -> Result<Source<'a>, QuantiseError> {
        let open = |indexed: &IndexedFile| {
            let file = File::open(&indexed.path)?;
            let metadata = file.metadata()?;
            match metadata.len() == indexed.bytes {
                true => Ok((file, metadata)),
                false => Err(changed()),
            }
        };
        let files = index
            .files
            .iter()
            .map(|indexed| open(indexed).map_err(|error| unreadable(indexed, error)))
            .collect::<Result<_, _>>()?;
        Ok(Source { files, index })
    }

    /// That all that was read is of one version of each file. Who changes bytes changes the time of the last change too.
    pub(super) fn check_unchanged(&self) -> Result<(), QuantiseError> {
        let check = |(file, before): &(File, Metadata)| {
            let now = file.metadata()?;
            let same = now.len() == before.len() && now.modified()? == before.modified()?;
            if same { Ok(()) } else { Err(changed()) }
        };
        (self.index.files.iter().zip(&self.files))
            .try_for_each(|(indexed, file)| check(file).map_err(|error| unreadable(indexed, error)))
    }

    /// The file that a tensor lies in.
    fn place_of(&self, tensor: &TensorInfo) -> (&IndexedFile, &File) {
        let files = self.index.files.iter().zip(&self.files);
        // The last that begins before it: a tensor lies in one file.
        let place = files
            .rev()
            .find(|(indexed, _)| indexed.base <= tensor.file_offset);
        let Some((indexed, (file, _))) = place else {
            unreachable!("the first file begins at 0");
        };
        (indexed, file)
    }

    /// Bytes of a tensor from `offset` within it. All reading of weights is here.
    fn read(
        &self,
        tensor: &TensorInfo,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), QuantiseError> {
        let (indexed, file) = self.place_of(tensor);
        file.read_exact_at(bytes, tensor.file_offset - indexed.base + offset)
            .map_err(|error| match error.kind() {
                // It was as long as its tensors need when it was opened.
                io::ErrorKind::UnexpectedEof => unreadable(indexed, changed()),
                _ => unreadable(indexed, error),
            })
    }
}

fn changed() -> io::Error {
    io::Error::other(
        "it was changed meanwhile; run the same command again once nobody writes to it",
    )
}

fn unreadable(file: &IndexedFile, error: io::Error) -> QuantiseError {
    QuantiseError::Read {
        path: file.path.clone(),
        error,
    }
}

/// Consecutive weights of one tensor.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Index into the tensors of either file.
    tensor: usize,
    /// The first weight.
    start: u64,
    elements: u64,
}

/// A piece in the type of the new file.
pub(super) struct Converted {
    pub(super) bytes: Vec<u8>,
    pub(super) elements: u64,
}

type Batch = Result<Vec<Converted>, QuantiseError>;

/// Converted chunks in the order of the file.
pub(super) struct Chunks {
    batches: Receiver<Batch>,
    batch: std::vec::IntoIter<Converted>,
}

impl Chunks {
    /// The next chunk. Asked for no more of them than there are.
    pub(super) fn next(&mut self) -> Result<Converted, QuantiseError> {
        loop {
            if let Some(chunk) = self.batch.next() {
                return Ok(chunk);
            }
            self.batch = match self.batches.recv() {
                Ok(batch) => batch?.into_iter(),
                // The producer has panicked; the scope it runs in says so.
                Err(_) => return Err(QuantiseError::Interrupted),
            };
        }
    }
}

/// Runs `write`, which takes all chunks, beside the threads that convert them.
pub(super) fn convert<R>(
    conversion: &Conversion,
    source: &Source<'_>,
    threads: NonZeroUsize,
    write: impl FnOnce(&mut Chunks) -> R,
) -> Result<R, QuantiseError> {
    let no_threads = |error: &dyn std::fmt::Display| QuantiseError::Threads(error.to_string());
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.get())
        .thread_name(|number| format!("quantise-{number}"))
        .build()
        .map_err(|error| no_threads(&error))?;
    let (sender, batches) = sync_channel(1);
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("chunks".to_owned())
            .spawn_scoped(scope, || produce(conversion, source, &pool, sender))
            .map_err(|error| no_threads(&error))?;
        // Dropped before the scope waits for the producer, which ends when nobody takes its batches.
        let mut chunks = Chunks {
            batches,
            batch: Vec::new().into_iter(),
        };
        Ok(write(&mut chunks))
    })
}

/// Ends with the last piece, the first that fails, or when the receiver has gone.
fn produce(
    conversion: &Conversion,
    source: &Source<'_>,
    pool: &rayon::ThreadPool,
    sender: SyncSender<Batch>,
) {
    let mut pieces = pieces(source.index).peekable();
    let size = pool.current_num_threads() * BATCH_CHUNKS;
    while pieces.peek().is_some() {
        let batch: Vec<Piece> = pieces.by_ref().take(size).collect();
        let converted: Batch = pool.install(|| {
            let convert = |piece: &Piece| convert_piece(conversion, source, *piece);
            batch.par_iter().map(convert).collect()
        });
        let failed = converted.is_err();
        if sender.send(converted).is_err() || failed {
            return;
        }
    }
}

/// All weights of a file in its order.
fn pieces(index: &Gguf) -> impl Iterator<Item = Piece> {
    let of_tensor = |(number, tensor): (usize, &TensorInfo)| {
        // The bytes of a tensor are checked, so this is no more than four times a file.
        let elements = tensor.columns().saturating_mul(tensor.rows());
        (0..elements.div_ceil(CHUNK_ELEMENTS)).map(move |chunk| {
            let start = chunk * CHUNK_ELEMENTS;
            Piece {
                tensor: number,
                start,
                elements: CHUNK_ELEMENTS.min(elements - start),
            }
        })
    };
    index.tensors.iter().enumerate().flat_map(of_tensor)
}

fn convert_piece(
    conversion: &Conversion,
    source: &Source<'_>,
    piece: Piece,
) -> Result<Converted, QuantiseError> {
    let from = &source.index.tensors[piece.tensor];
    let to = conversion.header().index().tensors[piece.tensor].kind;
    // Rows are whole blocks of both types, and so are chunks and what the last of them leaves.
    let bytes_of = |elements: u64| {
        let blocks = elements / from.kind.block_elements() as u64;
        blocks * from.kind.block_bytes() as u64
    };
    let mut stored = vec![0; bytes_of(piece.elements) as usize];
    source.read(from, bytes_of(piece.start), &mut stored)?;
    let bytes = if from.kind == to {
        stored
    } else {
        let mut floats = vec![0.0; piece.elements as usize];
        dequantise_row(from.kind, &stored, &mut floats);
        drop(stored);
        check(&floats, to).map_err(|problem| QuantiseError::Tensor {
            path: source.place_of(from).0.path.clone(),
            error: GgufError::tensor(&from.name, problem),
        })?;
        encode(&floats, to)
    };
    Ok(Converted {
        bytes,
        elements: piece.elements,
    })
}

/// Whether blocks can hold these weights: infinities and numbers beyond F16's range would spoil a whole block.
fn check(floats: &[f32], to: TensorType) -> Result<(), String> {
    let (max, others) = match to {
        TensorType::F32 => (f32::MAX, ""),
        TensorType::BF16 => (BF16_MAX, "f32"),
        _ => (MAGNITUDE_MAX, "bf16 or f32"),
    };
    // NaN is no less than anything.
    let fits = |value: &f32| value.abs() <= max;
    match floats.iter().find(|value| !fits(value)) {
        None => Ok(()),
        Some(value) if value.is_finite() => Err(format!(
            "holds {value:?}, and {} holds no more than {max:?}; take {others}",
            to.name()
        )),
        Some(value) => Err(format!(
            "holds {value}, which is no weight; the file is damaged"
        )),
    }
}

/// Whole blocks of a type, by candle's quantisers.
fn encode(floats: &[f32], to: TensorType) -> Vec<u8> {
    let mut blocks = candle_type(to).cpu_zeros(floats.len());
    blocks.from_float(floats);
    let tensor = QTensor::new(QStorage::Cpu(blocks), floats.len());
    let bytes = tensor.and_then(|tensor| Ok(tensor.data()?.into_owned()));
    bytes.unwrap_or_else(|error| {
        panic!("{} weights as {}: {error}", floats.len(), to.name());
    })
}

pub(super) const fn candle_type(kind: TensorType) -> GgmlDType {
    match kind {
        TensorType::F32 => GgmlDType::F32,
        TensorType::F16 => GgmlDType::F16,
        TensorType::BF16 => GgmlDType::BF16,
        TensorType::Q4_0 => GgmlDType::Q4_0,
        TensorType::Q4_1 => GgmlDType::Q4_1,
        TensorType::Q5_0 => GgmlDType::Q5_0,
        TensorType::Q5_1 => GgmlDType::Q5_1,
        TensorType::Q8_0 => GgmlDType::Q8_0,
        TensorType::Q2K => GgmlDType::Q2K,
        TensorType::Q3K => GgmlDType::Q3K,
        TensorType::Q4K => GgmlDType::Q4K,
        TensorType::Q5K => GgmlDType::Q5K,
        TensorType::Q6K => GgmlDType::Q6K,
    }
}
