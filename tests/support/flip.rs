//! A file that is damaged without a trace in its size and time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Changes a bit of the byte at `offset` and leaves the file's time as it was.
pub(crate) fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    file.set_modified(modified).unwrap();
    file.sync_all().unwrap();
}
