//! Compiles the kernels of the CUDA device to PTX where the feature `cuda` asks for them; does nothing otherwise.
//!
//! PTX is the portable form: the driver compiles it for whichever card it finds, from Turing (compute capability 7.5) on.
//! nvcc is looked for in `NVCC`, in `CUDA_HOME/bin`, in `target/cuda`, where `scripts/fetch_cuda_compiler.py` puts it, and
//! on the path.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const SOURCES: &str = "src/kernels/cuda";
const ARGUMENTS: [&str; 4] = ["-ptx", "-arch=compute_75", "-O3", "-std=c++17"];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile_kernels() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            println!("cargo::error={problem}");
            ExitCode::FAILURE
        }
    }
}

fn compile_kernels() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    // New headers count as changes too.
    println!("cargo::rerun-if-changed={SOURCES}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    let nvcc = find_nvcc(&out)?;
    println!("cargo::rerun-if-changed={}", nvcc.display());
    let entries = Path::new(SOURCES)
        .read_dir()
        .map_err(|error| format!("read {SOURCES}: {error}"))?;
    for entry in entries {
        let source = entry
            .map_err(|error| format!("read {SOURCES}: {error}"))?
            .path();
        match source.extension().and_then(|extension| extension.to_str()) {
            Some("cu") => compile(&nvcc, &source, &out)?,
            Some("cuh") => println!("cargo::rerun-if-changed={}", source.display()),
            _ => {}
        }
    }
    Ok(())
}

/// Compiles `NAME.cu` to `NAME.ptx` in `out`.
fn compile(nvcc: &Path, source: &Path, out: &Path) -> Result<(), String> {
    println!("cargo::rerun-if-changed={}", source.display());
    let name = source.file_stem().unwrap_or_default();
    let result = Command::new(nvcc)
        .args(ARGUMENTS)
        .arg("-o")
        .arg(out.join(name).with_extension("ptx"))
        .arg(source)
        .output()
        .map_err(|error| format!("run {}: {error}", nvcc.display()))?;
    let messages = String::from_utf8_lossy(&result.stderr);
    if !result.status.success() {
        // cargo shows one line of an error; the compiler's own stand above it.
        eprintln!("{messages}");
        return Err(format!(
            "{} could not compile {}: {}",
            nvcc.display(),
            source.display(),
            messages
                .lines()
                .find(|line| line.contains("error"))
                .unwrap_or("no message")
        ));
    }
    for line in messages.lines().filter(|line| !line.trim().is_empty()) {
        println!("cargo::warning={line}");
    }
    Ok(())
}

fn find_nvcc(out: &Path) -> Result<PathBuf, String> {
    if let Some(nvcc) = env::var_os("NVCC") {
        return Ok(PathBuf::from(nvcc));
    }
    if let Some(home) = env::var_os("CUDA_HOME") {
        let nvcc = Path::new(&home).join("bin/nvcc");
        return match nvcc.exists() {
            true => Ok(nvcc),
            false => Err(format!(
                "CUDA_HOME is set, and {} is not there",
                nvcc.display()
            )),
        };
    }
    // The build folder is somewhere above OUT_DIR, wherever CARGO_TARGET_DIR has it.
    let above = out.ancestors().map(|folder| folder.join("cuda/bin/nvcc"));
    let in_checkout = PathBuf::from("target/cuda/bin/nvcc");
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    above
        .chain([in_checkout])
        .chain(on_path)
        .find(|nvcc| nvcc.is_file())
        .ok_or_else(|| {
            "the feature `cuda` needs nvcc: fetch it with `python3 scripts/fetch_cuda_compiler.py`, \
             or set CUDA_HOME to a CUDA toolkit"
                .to_owned()
        })
}
