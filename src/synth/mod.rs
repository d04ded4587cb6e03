//! `strata synth`: a model file of a given shape with random weights and the vocabulary of another file. It has the
//! size and the layout of the real model, so that a machine can be measured before tens of gigabytes are fetched.
//!
//! The file is written under a temporary name in the folder of its final one, synced, and renamed: a run that fails or
//! is interrupted leaves nothing under the final name. Runs on the caller's thread.

mod blocks;
mod vocabulary;

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

pub use blocks::{fill_floats, fill_random};

use crate::gguf::card::ShapeCard;
use crate::gguf::{Gguf, GgufError, Header, TensorInfo, TensorType};

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

    #[error(
        "not enough space for {}: the file takes {needed} bytes ({:.1} GiB) and {free} bytes ({:.1} GiB) are free",
        path.display(),
        *needed as f64 / GIB,
        *free as f64 / GIB
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: u64,
    },

    #[error("{} is being written by another process", path.display())]
    Busy { path: PathBuf },

    #[error("cannot write {}: {error}", path.display())]
    Write { path: PathBuf, error: io::Error },
}

const GIB: f64 = (1u64 << 30) as f64;

/// What was written.
#[derive(Clone, Debug)]
pub struct Synthesised {
    pub index: Gguf,
    /// Tokens that the vocabulary lacked; they are marked unused.
    pub filler_tokens: u32,
}

/// Writes the model that `card` describes to `path`. `progress` is called with the weight bytes written so far and in
/// all. Equal arguments give equal files.
pub fn synthesise(
    card: &ShapeCard,
    vocabulary: &Gguf,
    path: &Path,
    seed: u64,
    mut progress: impl FnMut(u64, u64),
) -> Result<Synthesised, SynthError> {
    let mut metadata = card.metadata();
    let filler_tokens =
        vocabulary::copy(&vocabulary.metadata, card.vocabulary_size(), &mut metadata)?;
    let header = Header::new(3, &metadata, &card.tensors()).map_err(SynthError::Layout)?;
    let index = header.index();
    let weight_bytes = index.tensors.iter().map(|tensor| tensor.bytes).sum();

    let output = Output::create(path, index.file_bytes)?;
    let mut filler = Filler {
        rope_factors: card.rope_factors(),
        seed,
        chunk: Vec::new(),
        written: 0,
    };
    let mut writer = BufWriter::new(&output.file);
    header
        .write(&mut writer, |number, tensor, sink| {
            filler.fill(number, tensor, sink, &mut |done| {
                progress(done, weight_bytes)
            })
        })
        .and_then(|()| writer.flush())
        .map_err(|error| output.error(error))?;
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
        progress: &mut dyn FnMut(u64),
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
            progress(self.written);
        }
        Ok(())
    }
}

/// A file under a temporary name beside its final one. Dropped before `finish`, it is removed.
struct Output {
    file: File,
    path: PathBuf,
    partial: PathBuf,
    finished: bool,
}

impl Output {
    fn create(path: &Path, bytes: u64) -> Result<Output, SynthError> {
        let error = |error| SynthError::Write {
            path: path.to_owned(),
            error,
        };
        let no_file = || {
            error(io::Error::other(
                "it is a directory or a device, not a file",
            ))
        };
        // A rename would put the file in the place of a device.
        if path.exists() && !path.is_file() {
            return Err(no_file());
        }
        let Some(name) = path.file_name() else {
            return Err(error(io::ErrorKind::InvalidFilename.into()));
        };
        let mut partial_name = name.to_owned();
        partial_name.push(".partial");
        let partial = path.with_file_name(partial_name);
        check_space(path, bytes)?;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            // What stands under the temporary name is ours to write over, but not what a link there points to, and a
            // pipe would block.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&partial)
            .map_err(error)?;
        if !file.metadata().map_err(error)?.is_file() {
            return Err(no_file());
        }
        // An interrupted run leaves its file behind, unlocked; the next one writes over it.
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(SynthError::Busy {
                    path: path.to_owned(),
                });
            }
            Err(std::fs::TryLockError::Error(other)) => return Err(error(other)),
        }
        file.set_len(0).map_err(error)?;
        Ok(Output {
            file,
            path: path.to_owned(),
            partial,
            finished: false,
        })
    }

    fn error(&self, error: io::Error) -> SynthError {
        SynthError::Write {
            path: self.path.clone(),
            error,
        }
    }

    fn finish(mut self) -> Result<(), SynthError> {
        let folder = folder_of(&self.path);
        self.file
            .sync_all()
            .and_then(|()| std::fs::rename(&self.partial, &self.path))
            // The new name is durable once the folder is.
            .and_then(|()| File::open(folder)?.sync_all())
            .map_err(|error| self.error(error))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing is lost where this fails: the temporary name says that the file is not whole.
            drop(std::fs::remove_file(&self.partial));
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn check_space(path: &Path, needed: u64) -> Result<(), SynthError> {
    let status = rustix::fs::statvfs(folder_of(path)).map_err(|error| SynthError::Write {
        path: path.to_owned(),
        error: error.into(),
    })?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    if needed > free {
        return Err(SynthError::NoSpace {
            path: path.to_owned(),
            needed,
            free,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
