#!/usr/bin/env python3
"""How near is strata to what the drive allows, when a model does not fit into memory?

Everything runs on one file of the shape of Llama 3.1 8B with random weights, in rounds whose order is reversed every
other time, so that drift of the machine meets all. Figures are medians. Five sections:

    reading    strata's reads of the file beside those of fio
    loading    all weights into memory, from taking it to the last byte, beside the same
    steps      decode and prompts with memory for a part of the weights, beside the limit of such a step
    capped     decode in a control group with little memory, beside llama.cpp in the same
    predicted  the step times that strata predicted of its plans beside what they took

The limit of a step is the slower of two: the bytes that have to be read, at the rate that fio reaches in the same
rounds, and the computation of a step of that width when all weights are in memory. Read has to be what a step touches
and memory does not hold: of the budget the KV cache is taken off, and 64 MiB for rings and activations.

    offload.py --strata target/release/strata --vocabulary models/SmolLM2-135M-Instruct.Q4_1.gguf
    offload.py ... --only reading steps --rounds 3 --write-table FILE.md

fio is installed where it is missing and this runs as root; llama.cpp is built as for peers.py. Everything that is
written or fetched lies under target/peers. Standard library only.
"""

import argparse
import mmap
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

from build_peers import PEERS, end_on_sigterm, llama_cpp  # noqa: E402
from control_group import ControlGroup  # noqa: E402
from offload_table import about, report  # noqa: E402
from peers import LARGE, model_file  # noqa: E402
from programs import Programs, available_bytes  # noqa: E402
from storage_rate import SETTINGS, Fio, Setting  # noqa: E402
from wheels import Problem, mebibytes, say  # noqa: E402

SECTIONS = ("reading", "loading", "steps", "capped", "predicted")
MIB = 1 << 20
CONTEXT = 512
# Of the weights, in percent: what strata may use of memory.
BUDGETS = (25, 50, 75, 95)
# Of those, where computing binds: a step takes a fifth of a second, and one that waits for the drive ten times as long. So
# many times the steps are timed there, or a figure would be one second of a machine that is fast and slow by turns.
COMPUTING_BUDGET = BUDGETS[-1]
COMPUTING_STEPS = 4
# Where storage binds whatever else is slow.
READING_BUDGET = 25
CAPS = (2560 * MIB, 4096 * MIB)
# Rates that are older are measured anew before a bench that predicts from them; and for how long: less than `bench rates`
# takes of itself, or a tenth of a run would become a half.
RATES_AGE_SECONDS_MAX = 110
RATES_SECONDS = 20
# A turn of strata's reads: of a drive that others share, the next minute is another.
READING_SECONDS = 10
# One token of llama.cpp takes seconds here; strata's generate as many.
CAPPED_TOKENS = 8
# Of Linux 5.14; Python's module does not name it.
MADV_POPULATE_WRITE = 23
# Time for one process in a group: ten times what the slowest takes on a drive of 1.6 GB/s.
CAPPED_SECONDS = 600
# Beside the weights, for a run in which all of them are in memory.
BESIDE_WEIGHTS = 1536 * MIB
# Of the weights, in percent: memory of the emulated device and of the host; and the rates of its link in GB/s.
EMULATED = (((25, 90), (2, 4, 8)), ((25, 45), (4,)))


@dataclass(frozen=True)
class Work:
    """Steps that are timed: `tokens` of each sequence one after the other, or a prompt of that many."""

    name: str
    shown: str
    kind: str
    tokens: int
    sequences: int = 1

    def flags(self):
        flags = [self.kind, "--tokens", str(self.tokens), "--context", str(CONTEXT)]
        return flags + (["--sequences", str(self.sequences)] if self.kind == "decode" else [])

    def for_longer(self):
        """The same in more steps; a prompt is long enough."""
        return replace(self, tokens=self.tokens * COMPUTING_STEPS) if self.kind == "decode" else self

    def seconds(self, figures):
        """Of a step in which each sequence gets a token, or of the whole prompt."""
        tokens = self.sequences if self.kind == "decode" else self.tokens
        return tokens / figures["tokens_per_second"]


WORKS = (
    Work("decode-1", "decode, one sequence", "decode", 6),
    Work("decode-8", "decode, 8 sequences", "decode", 6, sequences=8),
    Work("prompt-512", "prompt of 512", "prompt", 512),
)


class Offload:
    """The file, the programs, and how they are asked."""

    def __init__(self, arguments, programs):
        self.arguments = arguments
        self.programs = programs
        self.threads = str(arguments.threads)
        self.works, self.budgets, self.caps = WORKS, BUDGETS, CAPS
        self.emulated, settings, seconds = EMULATED, SETTINGS, {}
        if arguments.quick:
            self.works, self.budgets, self.caps = WORKS[:1], BUDGETS[1::2], CAPS[:1]
            self.emulated = (((25, 90), (4,)),)
            settings, seconds = (Setting("1m", 8), Setting("4m", 16)), {"seconds": 1}
        self.model = model_file(programs, os.path.abspath(arguments.vocabulary), LARGE)
        inspected = programs.printed([programs.strata, "inspect", self.model, "--json"])
        self.weight_bytes = sum(tensor["bytes"] for tensor in inspected["tensors"])
        self.fio = Fio(programs, self.model, settings, **seconds)
        self.llama_folder = llama_cpp() if "capped" in arguments.only else None
        known = subprocess.run(
            [programs.strata, "bench", "rates", "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.measures_rates = known.returncode == 0
        # What plans predict from where predictions are judged, and when it was measured.
        self.profile, self.measured_at = os.path.join(PEERS, "rates.toml"), None

    def share(self, percent):
        """That much of the weights, in bytes: whole MiB."""
        return self.weight_bytes * percent // 100 // MIB * MIB

    def strata(self, work, *flags):
        """The command of a bench; `flags` say what it may use."""
        command = [self.programs.strata, "bench", *work.flags(), self.model, "--threads", self.threads]
        command += ["--rounds", "1", "--json", *self.arguments.strata_flags.split()]
        return command + ["--device", "cpu"] * ("--device" not in flags) + [*flags]

    def by_rates(self):
        """Flags of a bench whose prediction is judged. A machine that others share drifts: where its rates are old, they
        are measured anew."""
        if not self.measures_rates:
            return []
        if not self.measured_at or time.monotonic() - self.measured_at > RATES_AGE_SECONDS_MAX:
            rates = ["rates", self.model, "--threads", self.threads, "--seconds", str(RATES_SECONDS)]
            self.programs.output([self.programs.strata, "bench", *rates, "--out", self.profile])
            self.measured_at = time.monotonic()
        return ["--rates", self.profile]

    def bench(self, work, *flags):
        figures = self.programs.figures(self.strata(work, *flags), "tokens_per_second")
        if "moved_per_step" not in figures:
            raise Problem(f"{self.programs.strata} does not say what a step moves: build it anew")
        return figures

    def within(self, work, percent, *flags):
        """With memory for a part of the weights."""
        return self.bench(work, "--host-memory", size(self.share(percent)), *flags)

    def require_memory(self):
        """The bytes for all weights and what is beside them."""
        needed = self.weight_bytes + BESIDE_WEIGHTS
        if available_bytes() < needed:
            raise Problem(
                f"{mebibytes(needed)} of memory are needed to hold all weights and {mebibytes(available_bytes())} are "
                "free: end other programs"
            )
        return needed

    def resident(self, work, *flags):
        """With all weights in memory, in huge pages."""
        return self.bench(work, "--copy", "--host-memory", size(self.require_memory()), *flags)

    def in_turns(self, what, asked):
        """{name: [answer of each round]}; `asked` is {name: (function, how an answer is shown)}."""
        answers = {name: [] for name in asked}
        for number in range(self.arguments.rounds):
            shown = []
            for name in list(asked) if number % 2 == 0 else list(asked)[::-1]:
                ask, show = asked[name]
                answers[name].append(ask())
                shown.append(f"{name} {show(answers[name][-1])}")
            say(f"  {what}, round {number + 1}: {'; '.join(shown)}")
        return answers


def size(count):
    return f"{count // MIB}MiB"


def gigabytes(rate):
    return f"{rate / 1e9:.2f} GB/s"


def reading(offload):
    """{"tried": {setting: [rate]}, "best": .., "fio": [rate], "strata": [rate], "how": ..}"""

    def measured_alone():
        profile = os.path.join(PEERS, "reading.toml")
        rates = ["rates", offload.model, "--threads", offload.threads, "--only", "storage", "--seconds", str(READING_SECONDS)]
        printed = offload.programs.printed([offload.programs.strata, "bench", *rates, "--out", profile, "--json"])
        return printed["storage"]["engine"]["bytes_per_second"]

    def while_decoding():
        moved = offload.within(WORKS[0], READING_BUDGET)["moved_per_step"]
        return moved["storage_bytes"] / moved["storage_busy_seconds"]

    alone = offload.measures_rates
    # Chosen first, and compared by what it reaches afterwards: the best of many figures is the best by luck too.
    best = str(offload.fio.best())
    tried = {str(setting): list(rates) for setting, rates in offload.fio.rates.items()}
    answers = offload.in_turns(
        "reading",
        {
            "fio": (offload.fio.measure, gigabytes),
            "strata": (measured_alone if alone else while_decoding, gigabytes),
        },
    )
    return {"tried": tried, "best": best, **answers, "how": "alone" if alone else "while decoding"}


def loading(offload):
    """{"fio": [rate], "strata": [rate], "memory": [rate]}"""
    work = Work("load", "all weights into memory", "decode", 1)
    given = []

    def rate():
        offload.require_memory()
        # A virtual machine gets memory from its host when it is first touched, and gives back what is free for long.
        given.append(taken_and_given_back(offload.require_memory()))
        load = offload.resident(work)["load"]
        return load["bytes"] / load["seconds"]

    answers = offload.in_turns("loading", {"fio": (offload.fio.measure, gigabytes), "strata": (rate, gigabytes)})
    return {**answers, "memory": given}


def taken_and_given_back(count):
    """Bytes per second at which the system gave so much memory."""
    with mmap.mmap(-1, count) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        began = time.monotonic()
        memory.madvise(MADV_POPULATE_WRITE)
        return count / (time.monotonic() - began)


def steps(offload):
    """{work: {"fio": [rate], "resident": [figures], percent: [figures]}}"""
    results = {}
    for work in offload.works:

        def milliseconds(figures, work=work):
            return f"{1e3 * work.seconds(figures):.0f} ms"

        asked = {
            "fio": (offload.fio.measure, gigabytes),
            "resident": (lambda work=work: offload.resident(work.for_longer(), *offload.by_rates()), milliseconds),
        }
        for percent in offload.budgets:
            timed = work.for_longer() if percent == COMPUTING_BUDGET else work
            asked[f"{percent} %"] = (
                lambda timed=timed, percent=percent: offload.within(timed, percent, *offload.by_rates()),
                milliseconds,
            )
        results[work.name] = offload.in_turns(work.shown, asked)
    return results


def capped(offload):
    """{cap: {"fio": [rate], "resident": [figures], "strata": [figures], "llama.cpp": [figures]}}, the last two with
    what their groups held"""
    work = Work("capped", "decode in little memory", "decode", CAPPED_TOKENS)
    results = {}
    for cap in offload.caps:
        leave = offload.arguments.leave
        memory = "auto" if leave is None else size(cap - leave * MIB)
        strata = offload.strata(work, "--host-memory", memory)
        llama = [os.path.join(offload.llama_folder, "llama-batched-bench"), "-m", offload.model, "-ngl", "0"]
        llama += ["-t", offload.threads, "-tb", offload.threads, "-c", str(CONTEXT), "-npp", "4"]
        # The weights stay in the page cache: with any other way of loading it is killed for memory.
        llama += ["-ntg", str(CAPPED_TOKENS), "-npl", "1", "--output-format", "jsonl", "--no-repack"]

        def shown(answer):
            return f"{answer['tokens_per_second']:.2f} tokens/s in {mebibytes(answer['anonymous_peak_bytes'])}"

        results[str(cap)] = offload.in_turns(
            f"cap of {mebibytes(cap)}",
            {
                "fio": (offload.fio.measure, gigabytes),
                "resident": (
                    lambda: offload.resident(work),
                    lambda figures: f"{figures['tokens_per_second']:.2f} tokens/s",
                ),
                "strata": (lambda cap=cap, command=strata: in_group(offload, cap, command, "tokens_per_second"), shown),
                "llama.cpp": (lambda cap=cap, command=llama: in_group(offload, cap, command, "speed_tg"), shown),
            },
        )
    return results


def in_group(offload, cap, command, rate):
    """What a program prints that has so much memory, page cache included, and what it held of it."""
    forget(offload.model)
    with ControlGroup(cap) as group:
        figures = problem = None
        with group.watched():
            try:
                printed = offload.programs.printed(group.command(command), limit_seconds=CAPPED_SECONDS)
                if rate not in printed:
                    raise Problem(f"{os.path.basename(command[0])} printed no {rate}")
                figures = {**printed, "tokens_per_second": printed[rate]}
            except Problem as raised:
                problem = raised
        name, cap = os.path.basename(command[0]), mebibytes(cap)
        if group.kills():
            raise Problem(f"{name} was killed for memory in a group with {cap}")
        if problem:
            raise Problem(f"in a group with {cap}: {problem}")
        figures["anonymous_peak_bytes"] = group.anonymous_peak
        figures["charged_peak_bytes"] = group.peak()
        figures["group_version"] = group.version.name
    # What is left of it in the page cache would be charged to nobody.
    forget(offload.model)
    return figures


def forget(path):
    """Takes a file out of the page cache: pages that were charged to others would be read for nothing."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def predicted(offload):
    """{name: [figures]} on the emulated device; the steps of the CPU are those of `steps`."""
    first = offload.within(offload.works[0], offload.budgets[-1], *offload.by_rates())
    if "predicted_step_seconds" not in first:
        say("  this strata prints no predicted_step_seconds: nothing to compare")
        return {}
    results = {}
    works = [work for work in offload.works if work.kind == "decode"]
    for (device, host), rates in offload.emulated:
        for rate in rates:
            flags = ["--device", "emulated", "--device-memory", size(offload.share(device))]
            flags += ["--host-memory", size(offload.share(host)), "--link-rate", f"{rate}GB/s"]
            asked = {}
            for work in works:
                asked[work.name] = (
                    lambda work=work, flags=flags: offload.bench(work, *flags, *offload.by_rates()),
                    lambda figures, work=work: f"{1e3 * work.seconds(figures):.0f} ms",
                )
            answers = offload.in_turns(f"link of {rate} GB/s, device {device} %, host {host} %", asked)
            for work in works:
                results[f"{work.shown}; device {device} %, host {host} %, link {rate} GB/s"] = answers[work.name]
    return results


def run(arguments):
    for path in (arguments.strata, arguments.vocabulary):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: `make build model` brings it")
    if arguments.rounds < 1 or arguments.threads < 1:
        raise Problem("--rounds and --threads are at least 1")
    arguments.only = arguments.only or SECTIONS
    if "capped" in arguments.only:
        # Refused now, not after an hour.
        with ControlGroup(CAPS[0]):
            pass
    programs = Programs(os.path.abspath(arguments.strata), os.path.abspath(arguments.log))
    offload = Offload(arguments, programs)
    facts = {
        "strata": programs.output([programs.strata, "--version"]).strip(),
        "fio": offload.fio.version(),
        "weight_bytes": offload.weight_bytes,
    }
    say(f"{os.path.basename(offload.model)}, {offload.weight_bytes / 1e9:.2f} GB of weights; {facts['fio']}")
    results = {}
    sections = {"reading": reading, "loading": loading, "steps": steps, "capped": capped, "predicted": predicted}
    for name in SECTIONS:
        if name not in arguments.only:
            continue
        results[name] = sections[name](offload)
        # After each section, so that an interrupted run leaves what it has.
        report(arguments, offload, facts, results, os.path.join(PEERS, "offload.json"))
    say("\n".join(about(arguments, offload, facts)))


def main():
    parser = argparse.ArgumentParser(description="Speed of strata with little memory, beside what the drive allows.")
    parser.add_argument("--strata", required=True, help="the executable")
    parser.add_argument("--vocabulary", required=True, help="SmolLM2's GGUF file, which lends its vocabulary")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a few rows, to see that all of it works")
    parser.add_argument(
        "--leave", type=int, metavar="MIB", help="under a cap give strata all but this, in place of what it chooses"
    )
    parser.add_argument("--strata-flags", default="", metavar="FLAGS", help="more flags of every `strata bench`")
    parser.add_argument("--write-table", metavar="PATH", help="also write the tables as Markdown")
    parser.add_argument("--log", default=os.path.join(PEERS, "offload.log"), help="where what the programs say goes")
    arguments = parser.parse_args()
    end_on_sigterm()
    try:
        run(arguments)
    except (Problem, OSError) as problem:
        sys.exit(f"\noffload: {problem}")
    except KeyboardInterrupt:
        sys.exit("\noffload: interrupted")


if __name__ == "__main__":
    main()
