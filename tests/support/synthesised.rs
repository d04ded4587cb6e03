//! The file of 640 MiB that tests share: TinyLlama-1.1B's shape with random weights, made once in the target folder.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use std::fs::{File, create_dir_all};
use std::path::{Path, PathBuf};
use strata::gguf::card::ShapeCard;
use strata::gguf::{Destination, Gguf};
use strata::synth::synthesise;

/// Changes when the file would.
const NAME: &str = "tinyllama-1.1b-seed-1.gguf";

pub(crate) fn tinyllama() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    create_dir_all(folder).unwrap();
    // Held until the file is there: tests of several processes may want it at once.
    let lock = File::create(folder.join("synthesise.lock")).unwrap();
    lock.lock().unwrap();
    let path = folder.join(NAME);
    if !path.is_file() {
        let card = ShapeCard::open(&root.join("models/tinyllama-1.1b.toml")).unwrap();
        let vocabulary = Gguf::open(&root.join("tests/data/tiny/llama.gguf")).unwrap();
        synthesise(&card, &vocabulary, Destination::new(&path), 1, |_, _| true).unwrap();
    }
    path
}
