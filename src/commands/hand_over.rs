//! Two programs lie side by side: `strata`, which computes on the CPU, and `strata-cuda`, which has the kernels of a GPU as
//! well. Users start the first; where a GPU is asked for, and nothing speaks against it, the second takes its place: the
//! same process, with the same arguments. `program` asks for that, before a command begins.

use rustix::fs::Access;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fmt};
use strata::config::{Config, DeviceSetting};
use strata::memory::find_cuda_driver;
use strata::model::{Gpu, GpuError};

const SUCCESSOR: &str = "strata-cuda";

/// Of an ELF file of 64 bits.
const HEADER_BYTES: usize = 64;

/// Why the system did not start `strata-cuda`, where it did not and the CPU computes.
static NOT_STARTED: OnceLock<String> = OnceLock::new();

/// Opens the GPU with this number: what the root of a program that does so names as `OPEN_GPU`.
pub(crate) type OpenGpu = fn(usize) -> Result<Gpu, GpuError>;

/// Goes on as `strata-cuda` where the settings ask for a GPU and there is what it needs to start. Returns where this
/// program is the one that goes on; `open_gpu` says why, should it come to that. To be called while there is one thread, and
/// before a model is opened.
pub(super) fn hand_over(config: &Config) {
    let wants_gpu = match config.device {
        DeviceSetting::Auto | DeviceSetting::Cuda(_) => true,
        DeviceSetting::Cpu | DeviceSetting::Emulated => false,
    };
    if crate::OPEN_GPU.is_some() || !wants_gpu {
        return;
    }
    let Ok(path) = successor() else {
        return;
    };
    let error = Command::new(&path).args(env::args_os().skip(1)).exec();
    // Nobody has set it: there is one thread, and it comes here once.
    let _ = NOT_STARTED.set(format!("start {}: {error}", path.display()));
}

/// The GPU with this number, or in words why there is none.
pub(super) fn open_gpu(ordinal: u32) -> Result<Gpu, String> {
    if let Some(open) = crate::OPEN_GPU {
        return open(ordinal as usize).map_err(|error| error.to_string());
    }
    Err(match (NOT_STARTED.get(), successor()) {
        (Some(why), _) => why.clone(),
        (None, Err(why)) => why,
        (None, Ok(path)) => format!(
            "{} has come since this program started; start it again",
            path.display()
        ),
    })
}

/// The program to hand over to, or in words why there is none.
fn successor() -> Result<PathBuf, String> {
    find_cuda_driver().map_err(|error| error.to_string())?;
    let program = env::current_exe()
        .and_then(|program| program.canonicalize())
        .map_err(|error| format!("the folder of this program is not known: {error}"))?;
    let path = program.with_file_name(SUCCESSOR);
    let unfit = |why: &dyn fmt::Display| {
        format!(
            "{}, which has the kernels of a GPU, cannot be used: {why}; `make build-cuda` builds it anew",
            path.display()
        )
    };
    let found = match path.canonicalize() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!(
                "{SUCCESSOR}, which has the kernels of a GPU, is not in {}; `make build-cuda` builds it",
                program.parent().unwrap_or(&program).display()
            ));
        }
        Err(error) => return Err(unfit(&error)),
    };
    // Two that hand over to each other would never end.
    if found == program || found.file_name() == program.file_name() {
        return Err(unfit(&"it is this program again"));
    }
    rustix::fs::access(&found, Access::EXEC_OK).map_err(|error| unfit(&error))?;
    let headers = header(&program).and_then(|ours| Ok((ours, header(&found)?)));
    match headers.map_err(|error| unfit(&error))? {
        (Some(ours), Some(its)) if its.is_whole_beside(&ours) => Ok(path),
        _ => Err(unfit(&"it is no whole program for this machine")),
    }
}

/// The start of a program, an ELF file of 64 bits, and where that ends (System V ABI, "ELF Header").
struct Header {
    bytes: [u8; HEADER_BYTES],
    file_length: u64,
}

impl Header {
    /// Whether this is a program for the same machine as `ours`, to its last byte. What is not, a shell would be given; what
    /// was cut short would die without a word.
    fn is_whole_beside(&self, ours: &Header) -> bool {
        // Magic, class, byte order, version; `e_machine`.
        let is_same = [0..7, 18..20]
            .into_iter()
            .all(|range| self.bytes[range.clone()] == ours.bytes[range]);
        is_same && self.sections_end() <= self.file_length
    }

    /// Where the table of sections ends, which is the last of what a linker writes: `e_shoff`, `e_shentsize`, `e_shnum`.
    fn sections_end(&self) -> u64 {
        let at = |start: usize, bytes: usize| {
            let mut word = [0; 8];
            word[..bytes].copy_from_slice(&self.bytes[start..start + bytes]);
            u64::from_le_bytes(word)
        };
        at(40, 8).saturating_add(at(58, 2) * at(60, 2))
    }
}

/// `None`: the file is shorter than a header.
fn header(program: &Path) -> io::Result<Option<Header>> {
    let file = File::open(program)?;
    let file_length = file.metadata()?.len();
    let mut bytes = Vec::new();
    file.take(HEADER_BYTES as u64).read_to_end(&mut bytes)?;
    let bytes = bytes.try_into().ok();
    Ok(bytes.map(|bytes| Header { bytes, file_length }))
}
