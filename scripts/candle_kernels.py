#!/usr/bin/env python3
"""Compile candle's kernels for quantised products to PTX, for `make gpu-check` to race with.

The source is `quantized.cu` of the crate `candle-kernels`, of the version that Cargo.lock has of candle-core. cargo brings
it and checks it against the registry's checksum: a package that depends on it is resolved, and nothing of it is built.
nvcc is that of fetch_cuda_compiler.py; the one header that its packages lack is taken from NVIDIA's, with the sha256
below. Of the result, the products with few tokens are kept, as the compiler wrote them: a driver would take minutes to
compile all. It lies in target/candle, and is made anew when candle's version or the compiler is another.

    candle_kernels.py        prints the PTX's path

Standard library only.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

from fetch_cuda_compiler import find_nvcc
from wheels import ROOT, TARGET, Problem, download, locked, say, sha256_of

FOLDER = os.path.join(TARGET, "candle")
# As build.rs compiles strata's, and as candle's build script compiles this.
ARGUMENTS = ("-ptx", "-arch=compute_75", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-w")
# The kernels that are kept: see benches/gpu/candle.rs.
KERNELS = re.compile(r"\.visible \.entry (quantize_q8_1|mul_mat_vec_\w+_q8_1_cuda[1-8])\(")
# `nv/target`, which cuda_fp16.h includes.
HEADERS = ("nvidia-cuda-cccl", "13.0.85", "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649")
HEADERS_PREFIX = "nvidia/cu13/include/"
MANIFEST = """[package]
name = "candle-kernels-source"
version = "0.0.0"
edition = "2021"

[lib]
path = "lib.rs"

[dependencies]
candle-kernels = "={version}"

[workspace]
"""


def ptx():
    """The path of the PTX, compiled unless it is there."""
    nvcc, version = find_nvcc(), candle_version()
    about = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, check=True).stdout
    name = f"quantized-{version}-{hashlib.sha256(about).hexdigest()[:8]}.ptx"
    path = os.path.join(FOLDER, name)
    with locked(FOLDER):
        if not os.path.exists(path):
            source_path, headers_folder = source(version), headers(nvcc)
            say(f"compiling candle's kernels, version {version}: a minute or two")
            includes = ["-isystem", headers_folder] if headers_folder else []
            command = [nvcc, *ARGUMENTS, *includes, "-o", path + ".whole", source_path]
            if subprocess.run(command).returncode != 0:
                raise Problem(f"{nvcc} could not compile {source_path} (its message stands above)")
            keep_kernels(path + ".whole", path + ".partial")
            os.remove(path + ".whole")
            os.rename(path + ".partial", path)
    return path


def keep_kernels(whole, destination):
    """Writes a PTX text without the kernels that are not launched."""
    with open(whole) as file:
        head, *kernels = re.split(r"(?m)^(?=\.visible \.entry )", file.read())
    kept = [kernel for kernel in kernels if KERNELS.match(kernel)]
    if not kept:
        raise Problem(f"{os.path.basename(whole)} has none of the kernels that are looked for: candle names them otherwise now")
    with open(destination, "w") as file:
        file.write(head + "".join(kept))


def candle_version():
    with open(os.path.join(ROOT, "Cargo.lock")) as file:
        found = re.search(r'^name = "candle-core"\nversion = "(.*)"$', file.read(), re.MULTILINE)
    if not found:
        raise Problem("Cargo.lock names no candle-core")
    return found.group(1)


def source(version):
    """The path of `quantized.cu` in cargo's registry."""
    package = os.path.join(FOLDER, "source")
    os.makedirs(package, exist_ok=True)
    with open(os.path.join(package, "lib.rs"), "w"):
        pass
    manifest = os.path.join(package, "Cargo.toml")
    with open(manifest, "w") as file:
        file.write(MANIFEST.format(version=version))
    rustc = subprocess.run(["rustc", "-vV"], stdout=subprocess.PIPE, text=True, check=True).stdout
    host = re.search(r"^host: (.*)$", rustc, re.MULTILINE).group(1)
    command = ["cargo", "metadata", "--format-version", "1", "--filter-platform", host, "--manifest-path", manifest]
    resolved = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=package)
    if resolved.returncode != 0:
        raise Problem(f"cargo could not bring candle-kernels {version} (its message stands above): try again")
    packages = json.loads(resolved.stdout)["packages"]
    crate = next(package for package in packages if package["name"] == "candle-kernels")
    return os.path.join(os.path.dirname(crate["manifest_path"]), "src", "quantized.cu")


def headers(nvcc):
    """A folder with `nv/target`; None where the compiler has it beside itself."""
    # NVCC may be a name on the PATH.
    compiler = os.path.realpath(shutil.which(nvcc) or nvcc)
    beside = os.path.join(os.path.dirname(os.path.dirname(compiler)), "include")
    if any(os.path.exists(os.path.join(beside, folder, "nv", "target")) for folder in ("", "cccl")):
        return None
    name, version, sha256 = HEADERS
    folder = os.path.join(FOLDER, f"{name}-{version}")
    if not os.path.isdir(folder):
        wheel = download(name, version, FOLDER)
        found = sha256_of(wheel)
        if found != sha256:
            os.remove(wheel)
            raise Problem(f"{os.path.basename(wheel)} has sha256 {found}, not {sha256}: it was not kept; try again")
        partial = folder + ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                inside = member[len(HEADERS_PREFIX) :]
                # The archive is a package's, but a path that leads out of the folder is refused all the same.
                if member.startswith(HEADERS_PREFIX + "nv/") and ".." not in inside.split("/"):
                    path = os.path.join(partial, inside)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with archive.open(member) as content, open(path, "wb") as out:
                        shutil.copyfileobj(content, out)
        os.rename(partial, folder)
        os.remove(wheel)
    return folder


def main():
    try:
        say(ptx())
    except Problem as problem:
        sys.exit(f"candle_kernels: {problem}")
    except (OSError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        sys.exit(f"candle_kernels: {error}")
    except KeyboardInterrupt:
        sys.exit("candle_kernels: interrupted; start it again to go on")


if __name__ == "__main__":
    main()
