//! `strata quantise`: a model's file in other types. Which type each tensor gets is llama.cpp's rule for the name of the
//! mixture (`gguf::Mixture`); the blocks are those of candle's quantisers, to the bit.
//!
//! - `conversion`: the index of the new file, and what there is to say about it before anything is written
//! - `chunks`: pieces of tensors, converted by all threads and given back in the order of the file
//!
//! A few chunks for each thread are in memory, whatever the size of the model or of a tensor: `THREAD_BYTES_MAX` for each,
//! and the file's index and metadata. A run that fails or is interrupted leaves nothing (`gguf::NewFile`).
//!
//! Called by `commands` on the main thread, which writes; the chunks are converted on a pool of this module's own.

mod chunks;
mod conversion;

#[cfg(test)]
mod tests;

pub use chunks::THREAD_BYTES_MAX;
pub use conversion::Conversion;

use crate::gguf::{Destination, GgufError, NewFile, NewFileError, TensorType};
use std::io::{self, BufWriter, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum QuantiseError {
    #[error(transparent)]
    Model(#[from] GgufError),

    #[error("cannot lay out the file: {0}")]
    Layout(GgufError),

    #[error(transparent)]
    File(#[from] NewFileError),

    #[error("cannot read {}: {error}", path.display())]
    Read { path: PathBuf, error: io::Error },

    /// The input's bytes.
    #[error("{}: {error}", path.display())]
    Tensor { path: PathBuf, error: GgufError },

    #[error("the system gives no threads: {0}; give a smaller --threads")]
    Threads(String),

    #[error("interrupted: nothing was written")]
    Interrupted,
}

/// Writes what `conversion` says to `output`, from the files that it was made for. `progress` is called with the weights
/// that are written so far and in all, each as the four bytes of an f32, and says whether to go on.
pub fn quantise(
    conversion: &Conversion,
    output: Destination<'_>,
    threads: NonZeroUsize,
    mut progress: impl FnMut(u64, u64) -> bool,
) -> Result<(), QuantiseError> {
    let header = conversion.header();
    let source = chunks::Source::open(conversion.input())?;
    let new = NewFile::create(output, header.index().file_bytes)?;
    let total = conversion.float_bytes();
    let mut failure = None;
    let written = chunks::convert(conversion, &source, threads, |converted| {
        let mut done = 0;
        let mut writer = BufWriter::with_capacity(1 << 20, new.file());
        header
            .write(&mut writer, |_, tensor, sink| {
                let mut left = tensor.bytes;
                while left > 0 {
                    let chunk = match converted.next() {
                        Ok(chunk) => chunk,
                        Err(error) => {
                            failure = Some(error);
                            return Err(io::Error::other("a chunk failed"));
                        }
                    };
                    sink.write_all(&chunk.bytes)?;
                    left -= chunk.bytes.len() as u64;
                    done += chunk.elements * FLOAT_BYTES;
                    if !progress(done, total) {
                        failure = Some(QuantiseError::Interrupted);
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                }
                Ok(())
            })
            .and_then(|()| writer.flush())
    })?;
    // Where a chunk failed, what the writer says is the consequence.
    if let Some(error) = failure {
        // Weights of two versions look like damage.
        if matches!(error, QuantiseError::Tensor { .. }) {
            source.check_unchanged()?;
        }
        return Err(error);
    }
    written.map_err(|error| new.error(error))?;
    source.check_unchanged()?;
    new.finish()?;
    Ok(())
}

const FLOAT_BYTES: u64 = TensorType::F32.block_bytes() as u64;
