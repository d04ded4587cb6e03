"""Run programs and take figures from what they print. Used by peer_race.py, offload.py and seventy_billion.py."""

import json
import os
import subprocess

from wheels import Problem

# The longest single measurement and the slowest load are minutes on a slow machine.
LIMIT_SECONDS = 1200


class Programs:
    """How programs are run: alone, for a bounded time. All that they say goes to the log."""

    def __init__(self, strata, log):
        self.strata = strata
        self.log = log
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "w"):
            pass

    def run(self, *arguments, limit_seconds=LIMIT_SECONDS):
        """Let strata do something that is not measured."""
        self.output([self.strata, *arguments], limit_seconds)

    def figures(self, command, rate, opening="{"):
        """The object, or the last of the list, that a program prints; its `rate` is a positive number."""
        printed = self.printed(command, opening)
        try:
            figures = printed[-1] if opening == "[" else printed
            if figures[rate] > 0:
                return figures
        except (LookupError, TypeError):
            pass
        raise Problem(f"{_shown(command)} printed no rate: see {self.log}")

    def printed(self, command, opening="{", limit_seconds=LIMIT_SECONDS):
        """The JSON that a program prints, which begins with `opening`."""
        output = self.output(command, limit_seconds)
        # Some print other lines before it.
        start = 0 if output.startswith(opening) else output.find("\n" + opening) + 1
        try:
            return json.JSONDecoder().raw_decode(output[start:])[0]
        except ValueError:
            raise Problem(f"{_shown(command)} printed no JSON: see {self.log}") from None

    def output(self, command, limit_seconds=LIMIT_SECONDS):
        try:
            # On a time-out or an interrupt this ends the process and waits for it.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=limit_seconds,
            )
        except FileNotFoundError:
            raise Problem(f"{command[0]} is missing") from None
        except subprocess.TimeoutExpired:
            raise Problem(f"{_shown(command)} took more than {limit_seconds} s") from None
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise Problem(f"{_shown(command)} ended with code {done.returncode} ({said[:200]}): see {self.log}")
        return done.stdout


def _shown(command):
    # A shell that becomes a program: its script, and what that is told.
    if command[:2] == ["/bin/sh", "-c"]:
        command = command[4:]
    return " ".join([os.path.basename(command[0]), *command[1:3]])


def available_bytes():
    """Memory that is free or can be freed, of the whole machine."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise Problem("/proc/meminfo does not say how much memory is free")
