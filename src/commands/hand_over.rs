//! Two programs lie side by side: `strata`, which computes on the CPU, and `strata-cuda`, which has the kernels of a GPU as
//! well. Users start the first; where a GPU is asked for, and nothing speaks against it, the second takes its place: the
//! same process, with the same arguments.

use anyhow::Context;
use std::convert::Infallible;
use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use strata::config::{Config, DeviceSetting};
use strata::memory::find_cuda_driver;
use strata::model::Gpu;

const SUCCESSOR: &str = "strata-cuda";

/// Goes on as `strata-cuda` where the settings ask for a GPU and there is what it needs to start. Returns where this
/// program is the one that goes on. To be called before anything is said, opened or started.
///
/// # Errors
/// The program beside this one cannot be started.
pub(super) fn hand_over(config: &Config) -> anyhow::Result<()> {
    let wants_gpu = match config.device {
        DeviceSetting::Auto | DeviceSetting::Cuda(_) => true,
        DeviceSetting::Cpu | DeviceSetting::Emulated => false,
    };
    if crate::OPENS_GPUS || !wants_gpu {
        return Ok(());
    }
    match successor() {
        // `open_gpu` says why, should it come to that.
        Err(_) => Ok(()),
        Ok(path) => match become_program(&path) {
            Err(error) => Err(error).with_context(|| {
                format!(
                    "start {}, which computes on a GPU (build it anew with `make build-cuda`, or give --device cpu)",
                    path.display()
                )
            }),
        },
    }
}

/// The GPU with this number, or in words why there is none.
pub(super) fn open_gpu(ordinal: u32) -> Result<Gpu, String> {
    if crate::OPENS_GPUS {
        return Gpu::open(ordinal as usize).map_err(|error| error.to_string());
    }
    let missing = successor().err();
    Err(missing.unwrap_or_else(|| "it was not there when this program started".to_owned()))
}

fn become_program(path: &Path) -> std::io::Result<Infallible> {
    Err(Command::new(path).args(env::args_os().skip(1)).exec())
}

/// The program to hand over to, or in words what is missing.
fn successor() -> Result<PathBuf, String> {
    find_cuda_driver().map_err(|error| error.to_string())?;
    let program = env::current_exe()
        .and_then(|program| program.canonicalize())
        .map_err(|error| format!("the folder of this program is not known: {error}"))?;
    let successor = program.with_file_name(SUCCESSOR);
    // One that is this program again would hand over for ever.
    let is_another = successor
        .canonicalize()
        .is_ok_and(|successor| successor != program);
    if !is_another {
        return Err(format!(
            "{SUCCESSOR}, which has the kernels of a GPU, is not in {}; `make build-cuda` builds both programs",
            program.parent().unwrap_or(&program).display()
        ));
    }
    Ok(successor)
}
