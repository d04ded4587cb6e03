//! Splits a model into shards, as `llama-gguf-split` does.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use strata::gguf::{Gguf, Header, Metadata, TensorInfo, TensorShape};

/// Which tensors a shard gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dealt {
    /// Neighbours stay together, as the tool does it.
    InRuns,
    /// One to each in turn: a layer's matrices lie in all files.
    InTurn,
    /// The first shard has the metadata alone, as with `--no-tensor-first-split`.
    NoneToTheFirst,
}

impl Dealt {
    pub const ALL: [Dealt; 3] = [Dealt::InRuns, Dealt::InTurn, Dealt::NoneToTheFirst];

    fn shard_of(self, tensor: usize, tensors: usize, shards: usize) -> usize {
        match self {
            Dealt::InRuns => tensor * shards / tensors,
            Dealt::InTurn => tensor % shards,
            Dealt::NoneToTheFirst => 1 + tensor * (shards - 1) / tensors,
        }
    }
}

/// Writes the model at `path` as so many shards beside it. Their paths, in order.
pub fn split(path: &Path, shards: usize, dealt: Dealt) -> Vec<PathBuf> {
    let model = Gguf::open(path).unwrap();
    let content = std::fs::read(path).unwrap();
    let stem = path.file_stem().unwrap().to_str().unwrap();
    (0..shards)
        .map(|number| {
            let mut metadata = Metadata::new();
            if number == 0 {
                for (key, value) in model.metadata.iter() {
                    metadata.insert(key, value.clone());
                }
            }
            metadata.insert("split.no", number as u16);
            metadata.insert("split.count", shards as u16);
            metadata.insert("split.tensors.count", model.tensors.len() as i32);
            let ours: Vec<&TensorInfo> = (0..model.tensors.len())
                .filter(|&tensor| dealt.shard_of(tensor, model.tensors.len(), shards) == number)
                .map(|tensor| &model.tensors[tensor])
                .collect();
            let name = format!("{stem}-{:05}-of-{shards:05}.gguf", number + 1);
            let path = path.with_file_name(name);
            write_shard(&path, &metadata, &ours, &content);
            path
        })
        .collect()
}

fn write_shard(path: &Path, metadata: &Metadata, tensors: &[&TensorInfo], content: &[u8]) {
    let shape = |tensor: &&TensorInfo| {
        TensorShape::new(&tensor.name, tensor.kind, tensor.dimensions.clone())
    };
    let shapes: Vec<TensorShape> = tensors.iter().map(shape).collect();
    let header = Header::new(3, metadata, &shapes).unwrap();
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    let written = header.write(&mut file, |index, _, output| {
        let tensor = tensors[index];
        output.write_all(&content[tensor.file_offset as usize..][..tensor.bytes as usize])
    });
    written.unwrap();
    file.flush().unwrap();
}
