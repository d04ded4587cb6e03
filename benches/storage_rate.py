"""How fast fio reads a file: the limit of what can be streamed from it. Used by offload.py and seventy_billion.py.

Direct reads through io_uring with registered buffers and files, the fastest way that fio has; it only reads. Which size
and depth is the fastest differs between drives, so some are tried, and the best counts.
"""

import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass

from wheels import Problem, say

SIZES = ("256k", "1m", "4m")
DEPTHS = (4, 8, 16, 32)
SECONDS = 3
# Of each setting, before the best is chosen.
TRIES = 3


@dataclass(frozen=True)
class Setting:
    size: str
    depth: int

    def __str__(self):
        return f"{self.size} x {self.depth}"


SETTINGS = tuple(Setting(size, depth) for size in SIZES for depth in DEPTHS)


def find_fio():
    """The path of fio; as root on a Debian-like machine it is installed where it is missing."""
    program = shutil.which("fio")
    if program:
        return program
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("fio is missing: installing the package fio")
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "fio"]):
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        program = shutil.which("fio")
    if not program:
        raise Problem("fio is missing: install it (on Debian or Ubuntu: sudo apt-get install fio) and try again")
    return program


class Fio:
    """Measures one file. `rates` holds what was measured: bytes per second, by setting."""

    def __init__(self, programs, path, settings=SETTINGS, seconds=SECONDS):
        self.program = find_fio()
        self.programs = programs
        self.path = path
        self.seconds = seconds
        self.rates = {setting: [] for setting in settings}
        self._best = None

    def version(self):
        return self.programs.output([self.program, "--version"]).strip()

    def best(self):
        """The setting that had the best median when this was first asked: all of them are tried then."""
        if not self._best:
            say(f"  fio tries {len(self.rates)} settings")
            for _ in range(TRIES):
                for setting in self.rates:
                    self._measure(setting)
            self._best = max(self.rates, key=lambda setting: statistics.median(self.rates[setting]))
        return self._best

    def measure(self):
        """Bytes per second, with the best setting."""
        return self._measure(self.best())

    def _measure(self, setting):
        command = [self.program, "--name=read", f"--filename={self.path}", "--readonly", "--allow_file_create=0"]
        command += ["--rw=read", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1"]
        command += [f"--bs={setting.size}", f"--iodepth={setting.depth}"]
        command += ["--time_based", f"--runtime={self.seconds}", "--output-format=json"]
        printed = self.programs.printed(command)
        try:
            job = printed["jobs"][0]
            rate = job["read"]["bw_bytes"]
            if job["error"] == 0 and rate > 0:
                self.rates[setting].append(rate)
                return rate
        except (LookupError, TypeError):
            pass
        raise Problem(f"fio could not read {self.path}: see {self.programs.log}")
