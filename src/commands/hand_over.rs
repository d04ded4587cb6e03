//! Two programs lie side by side: `strata`, which computes on the CPU, and `strata-cuda`, which has the kernels of a GPU as
//! well. Users start the first; where a GPU is asked for, and nothing speaks against it, the second takes its place: the
//! same process, with the same arguments. `program` asks for that, before a command begins.

use super::Usage;
use anyhow::bail;
use rustix::fs::Access;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt};
use strata::config::{Config, DeviceSetting};
use strata::memory::find_cuda_driver;
use strata::model::{Gpu, GpuError};

const SUCCESSOR: &str = "strata-cuda";

/// Of an ELF file: what it is, and for which machine (`e_ident`, `e_type`, `e_machine`; System V ABI, "ELF Header").
const HEADER_BYTES: usize = 20;

/// Opens the GPU with this number: what the root of a program that does so names as `OPEN_GPU`.
pub(crate) type OpenGpu = fn(usize) -> Result<Gpu, GpuError>;

/// Goes on as `strata-cuda` where the settings ask for a GPU and there is what it needs to start. Returns where this
/// program is the one that goes on. To be called while there is one thread, and before a model is opened.
///
/// # Errors
/// The system does not start it.
pub(super) fn hand_over(config: &Config) -> anyhow::Result<()> {
    let wants_gpu = match config.device {
        DeviceSetting::Auto | DeviceSetting::Cuda(_) => true,
        DeviceSetting::Cpu | DeviceSetting::Emulated => false,
    };
    if crate::OPEN_GPU.is_some() || !wants_gpu {
        return Ok(());
    }
    // Where there is none, `open_gpu` says why, should it come to that.
    let Ok(path) = successor() else {
        return Ok(());
    };
    let error = Command::new(&path).args(env::args_os().skip(1)).exec();
    bail!(Usage(format!(
        "start {}: {error}; give --device cpu to do without a GPU",
        path.display()
    )))
}

/// The GPU with this number, or in words why there is none.
pub(super) fn open_gpu(ordinal: u32) -> Result<Gpu, String> {
    if let Some(open) = crate::OPEN_GPU {
        return open(ordinal as usize).map_err(|error| error.to_string());
    }
    Err(match successor() {
        Err(why) => why,
        Ok(path) => format!(
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
    // What is no program a shell would be given.
    let headers = header(&found).and_then(|its| Ok(its == header(&program)?));
    match headers {
        Ok(true) => Ok(path),
        Ok(false) => Err(unfit(&"it is no program for this machine")),
        Err(error) => Err(unfit(&error)),
    }
}

fn header(program: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    File::open(program)?
        .take(HEADER_BYTES as u64)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}
