//! `strata synth`: a model file of a given shape with random weights and the vocabulary of another file. It has the
//! size and the layout of the real model, so that a machine can be measured before tens of gigabytes are fetched.
//!
//! A run that fails or is interrupted leaves nothing under the final name (`gguf::NewFile`). Runs on the caller's thread.

mod blocks;
mod vocabulary;

use std::io::{self, BufWriter, Write};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

pub use blocks::{fill_floats, fill_random};

use crate::gguf::card::ShapeCard;
use crate::gguf::{
    Destination, Gguf, GgufError, Header, NewFile, NewFileError, TensorInfo, TensorType,
};

#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// A key of the vocabulary file is missing or wrong.
    #[error("vocabulary file: {0}")]
    Vocabulary(GgufError),

    #[error(
        "the vocabulary file holds {tokens} tokens and the card has room for {rows}: take a smaller vocabulary or raise \
         `vocabulary_size` in the card"
    )]
    VocabularyTooLarge { tokens: u64, rows: u32 },

    #[error("cannot lay out the file: {0}")]
    Layout(GgufError),

    #[error(transparent)]
    File(#[from] NewFileError),

    #[error("interrupted: nothing was written")]
    Interrupted,
}

/// What was written.
#[derive(Clone, Debug)]
pub struct Synthesised {
    pub index: Gguf,
    /// Tokens that the vocabulary lacked; they are marked unused.
    pub filler_tokens: u32,
}

/// Writes the model that `card` describes to its destination. `progress` is called with the weight bytes written so far and in
/// all, and says whether to go on. Equal arguments give equal files.
pub fn synthesise(
    card: &ShapeCard,
    vocabulary: &Gguf,
    to: Destination<'_>,
    seed: u64,
    mut progress: impl FnMut(u64, u64) -> bool,
) -> Result<Synthesised, SynthError> {
    let mut metadata = card.metadata();
    let filler_tokens =
        vocabulary::copy(&vocabulary.metadata, card.vocabulary_size(), &mut metadata)?;
    let header = Header::new(3, &metadata, &card.tensors()).map_err(SynthError::Layout)?;
    let index = header.index();
    let weight_bytes = index.tensors.iter().map(|tensor| tensor.bytes).sum();

    let output = NewFile::create(to, index.file_bytes)?;
    let mut filler = Filler {
        rope_factors: card.rope_factors(),
        seed,
        chunk: Vec::new(),
        written: 0,
    };
    let mut writer = BufWriter::new(output.file());
    let mut interrupted = false;
    let written = header
        .write(&mut writer, |number, tensor, sink| {
            filler.fill(number, tensor, sink, &mut |done| {
                if progress(done, weight_bytes) {
                    return Ok(());
                }
                interrupted = true;
                Err(io::ErrorKind::Interrupted.into())
            })
        })
        .and_then(|()| writer.flush());
    if interrupted {
        return Err(SynthError::Interrupted);
    }
    written.map_err(|error| output.error(error))?;
    drop(writer);
    output.finish()?;
    Ok(Synthesised {
        index: index.clone(),
        filler_tokens,
    })
}

/// Writes the weights, about a mebibyte at a time.
struct Filler {
    rope_factors: Option<Vec<f32>>,
    seed: u64,
    chunk: Vec<u8>,
    written: u64,
}

const CHUNK_BYTES: usize = 1 << 20;

impl Filler {
    fn fill(
        &mut self,
        number: usize,
        tensor: &TensorInfo,
        sink: &mut dyn Write,
        progress: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        if tensor.name == "rope_freqs.weight" {
            let factors = self.rope_factors.iter().flatten();
            let bytes: Vec<u8> = factors.flat_map(|factor| factor.to_le_bytes()).collect();
            self.written += tensor.bytes;
            return sink.write_all(&bytes);
        }
        // A stream of its own for each tensor: its weights do not depend on what precedes it.
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(number as u64);
        let is_vector = tensor.kind == TensorType::F32 && tensor.dimensions.len() == 1;
        // A norm's weights are about 1, a bias's about 0.
        let mean = if tensor.name.ends_with(".bias") {
            0.0
        } else {
            1.0
        };
        let deviation = 1.0 / (tensor.columns() as f32).sqrt();
        let block_bytes = tensor.kind.block_bytes();
        let chunk_bytes = (CHUNK_BYTES / block_bytes * block_bytes) as u64;
        let mut left = tensor.bytes;
        while left > 0 {
            let bytes = left.min(chunk_bytes);
            self.chunk.resize(bytes as usize, 0);
            if is_vector {
                fill_floats(tensor.kind, mean, 0.05, &mut random, &mut self.chunk);
            } else {
                fill_random(tensor.kind, deviation, &mut random, &mut self.chunk);
            }
            sink.write_all(&self.chunk)?;
            left -= bytes;
            self.written += bytes;
            progress(self.written)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
