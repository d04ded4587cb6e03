"""Cap the memory of a program, page cache included, and watch what it takes. Used by offload.py.

A container gets its limit the same way: from a control group of version 1 or 2. Making one takes root, and a hierarchy
in which memory is controlled.
"""

import contextlib
import os
import threading
import time

from wheels import Problem

# Anonymous memory grows over seconds, while a model is loaded.
SAMPLE_SECONDS = 0.1
# After the last process has ended, until the kernel has noticed.
REMOVAL_SECONDS = 10
ADVICE = "run as root, where the kernel controls memory, or leave `capped` out with --only"


class _Version1:
    name = "v1"
    limit, swap_limit = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    peak, anonymous = "memory.max_usage_in_bytes", "rss"
    events = "memory.oom_control"

    @staticmethod
    def swap_limit_of(limit):
        return limit


class _Version2:
    name = "v2"
    limit, swap_limit = "memory.max", "memory.swap.max"
    peak, anonymous = "memory.peak", "anon"
    events = "memory.events"

    @staticmethod
    def swap_limit_of(_limit):
        return 0


def _hierarchy():
    """The version, and the folder in which groups are made."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split()[1:4] for line in file]
    for folder, kind, options in mounts:
        if kind == "cgroup" and "memory" in options.split(","):
            return _Version1, folder
    for folder, kind, _ in mounts:
        if kind != "cgroup2" or "memory" not in _read(os.path.join(folder, "cgroup.controllers")).split():
            continue
        handed_down = os.path.join(folder, "cgroup.subtree_control")
        if "memory" not in _read(handed_down).split():
            _write(handed_down, "+memory", f"control memory below {folder}")
        return _Version2, folder
    raise Problem(f"no control group hierarchy of this machine caps memory: {ADVICE}")


class ControlGroup:
    """A group of processes that have `limit_bytes` of memory between them, without swap. As a context manager it is
    removed at the end of the block; its processes have to have ended."""

    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes
        self.version, parent = _hierarchy()
        self.folder = os.path.join(parent, f"strata-offload-{os.getpid()}")
        self.anonymous_peak = 0

    def __enter__(self):
        try:
            os.mkdir(self.folder)
        except OSError as error:
            raise Problem(f"cannot make the control group {self.folder} ({error.strerror}): {ADVICE}") from None
        try:
            _write(self._path(self.version.limit), self.limit_bytes, "cap the memory of a group")
            # Absent where swap is not accounted for.
            with contextlib.suppress(OSError), open(self._path(self.version.swap_limit), "w") as file:
                file.write(str(self.version.swap_limit_of(self.limit_bytes)))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_):
        self._remove()

    def command(self, command):
        """The command of a process that enters the group before it becomes the program."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, self._path("cgroup.procs"), *command]

    @contextlib.contextmanager
    def watched(self):
        """Samples what the group holds besides page cache while the block runs."""
        over = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(over,), daemon=True)
        sampler.start()
        try:
            yield
        finally:
            over.set()
            sampler.join()

    def _sample(self, over):
        while not over.wait(SAMPLE_SECONDS):
            held = _number(_read(self._path("memory.stat")), self.version.anonymous)
            self.anonymous_peak = max(self.anonymous_peak, held)

    def peak(self):
        """The most that was charged to the group, page cache included; 0 where the kernel does not tell."""
        text = _read(self._path(self.version.peak)).strip()
        return int(text) if text.isdigit() else 0

    def kills(self):
        """Processes that were killed because the group was full."""
        return _number(_read(self._path(self.version.events)), "oom_kill")

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _remove(self):
        end = time.monotonic() + REMOVAL_SECONDS
        while True:
            try:
                os.rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise Problem(f"cannot remove the control group {self.folder}: {error.strerror}") from None
            time.sleep(0.1)


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path, value, what):
    try:
        with open(path, "w") as file:
            file.write(str(value))
    except OSError as error:
        raise Problem(f"cannot {what} ({path}: {error.strerror}): {ADVICE}") from None


def _number(text, name):
    """The number in the line of a name; 0 where there is none."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return 0
