#!/usr/bin/env python3
"""Check strata on a real GPU, in under eight minutes and without a network: what it reaches beside what bounds it and
beside candle's kernels, and the tests of the CUDA device. Prints a table, and writes target/gpu-check/report.json.

    gpu_check.py --collect     build, and collect the programs and files that the check needs in target/gpu-check: to start
                               with glibc 2.35, or it says that they do not, and with a driver of CUDA 13.0
    gpu_check.py               run the check from there: no compiler and no cargo are needed any more
    gpu_check.py --small       with a small model and little memory: shows that the check works, and judges nothing

Weights are random ones of a known shape, written by `strata synth` to --folder: Llama 3.3 70B (40 GB) where disk and
memory allow and the disk takes it in a minute and a half, otherwise Llama 3.1 8B. What there is no time left for is
named in the table. Ends with 1 where a test or a measurement failed, and still prints what the others gave; a bar that
is not met is a line of the table. Standard library only.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from candle_kernels import candle_version, ptx
from wheels import ROOT, TARGET, Problem

FOLDER = os.path.join(TARGET, "gpu-check")
MIB, GIB = 1 << 20, 1 << 30
# Shape, bytes that it takes, and what the device gets of it, where it has as much.
LARGE = ("models/llama-3.3-70b.toml", 44 * GIB, 24 * GIB)
MIDDLE = ("models/llama-3.1-8b.toml", 6 * GIB, 3 * GIB)
SMALL = ("models/smollm2-135m.toml", GIB // 4, 80 * MIB)
WIDTHS = (1, 8, 64)
# What is asked of the measurements: at least these shares of the link's rate and of the memory's, and of candle's
# seconds over ours more than the last. No driver says which memory a card has: a bus of more bits than GDDR's is HBM's.
LINK_BAR = 0.9
MEMORY_BARS = {"GDDR": 0.7, "HBM": 0.5}
GDDR_BUS_BITS_MAX = 512
CANDLE_BAR = 1.0
# Of all, and of it what is kept for the tests, which come last and have what the measurements leave too.
LIMIT_SECONDS = 8 * 60 - 15
TESTS_SECONDS = 130
# At most: of products and candle's, and of writing a model.
BENCH_SECONDS = 120
SYNTH_SECONDS = 90
# What `strata bench rates` is told to take; it begins and ends beside that.
MACHINE_SECONDS = 20
# Interpreted kernels take as long as they take; what hangs ends all the same.
SMALL_SECONDS = 600
# The C library that the programs are to start with: 2.35, which Ubuntu 22.04 has.
GLIBC_MINOR_MAX = 35
# Who multiplies by the weights that do not rest on the device: it alone, or the host too, which is the default.
DEVICE_ALONE, HOST_TOO = "device", "auto"
# Lanes of a trace.
DEVICE_LANE, LINK_LANE = "device", "link"


class OutOfTime(Problem):
    """A program was ended because the check's time, or its own share of it, was over."""


# What leaves out a part of the check, and not the rest; a KeyError is an answer that lacks something.
FAILURES = (Problem, OSError, ValueError, KeyError)


def collect():
    """Build everything with cargo, and copy what it says it has made."""
    os.makedirs(FOLDER, exist_ok=True)
    shutil.copy(ptx(), os.path.join(FOLDER, "candle.ptx"))
    command = ["cargo", "test", "--release", "--locked", "--features", "cuda", "--no-run", "--message-format=json"]
    command += ["--lib", "--test", "cuda", "--bench", "gpu"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        raise Problem("the build failed")
    subprocess.run(["cargo", "build", "--release", "--locked", "--features", "cuda"], cwd=ROOT, check=True)
    names = {"lib": "kernel-tests", "test": "device-tests", "bench": "bench"}
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message.get("executable"):
            continue
        name = names.get(message["target"]["kind"][0])
        if name:
            copy_program(message["executable"], name)
    # The one hands over to the other, which lies beside it.
    for name in ("strata", "strata-cuda"):
        copy_program(os.path.join(TARGET, "release", name), name)
    print(f"collected in {FOLDER}")


def copy_program(source, name):
    """Copy a program into the folder, and where there is a `strip`, without its symbols."""
    with open(source, "rb") as file:
        needed = max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", file.read())), default=0)
    if needed > GLIBC_MINOR_MAX:
        # It runs here all the same.
        print(
            f"{name} starts with glibc 2.{needed} and later only: to take the folder to a machine with 2.{GLIBC_MINOR_MAX}, "
            "collect on a system that has no later one, such as Ubuntu 22.04"
        )
    path = os.path.join(FOLDER, name)
    shutil.copy(source, path)
    strip = shutil.which("strip")
    if strip:
        # One that fails leaves the file as it is, which will do.
        subprocess.run([strip, path])


def collected(name):
    path = os.path.join(FOLDER, name)
    if not os.path.exists(path):
        raise Problem(f"{path} is missing: run `gpu_check.py --collect` where there is a compiler")
    return path


class Check:
    """One run: its time, where its files lie, and whether figures are judged."""

    def __init__(self, folder, small):
        self.began = time.monotonic()
        # When what is done now must have ended, in seconds from then.
        self.until = LIMIT_SECONDS - TESTS_SECONDS
        self.folder = folder
        self.small = small
        self.rates = {}
        # What the plan's predictions are made from, and its file.
        self.machine = {}
        self.profile = None
        self.decoded = []
        self.tested = {}
        # Why a part gave nothing, by its name.
        self.failures = {}

    def part(self, name, of_it):
        """Do a part of the check; where it fails, note why and go on."""
        try:
            of_it()
        except FAILURES as failure:
            self.failures[name] = str(failure) or repr(failure)
            print(f"{name} failed: {self.failures[name]}", flush=True)

    def left(self):
        return self.until - (time.monotonic() - self.began)

    def run(self, arguments, seconds, environment):
        """What a program wrote, and its code. It gets so many seconds of those that are left."""
        print("$ " + " ".join(arguments), flush=True)
        name = os.path.basename(arguments[0])
        limit = SMALL_SECONDS if self.small else max(1.0, min(seconds, self.left()))
        # In a session of its own, it is ended together with the servers that it has started: they would keep the device.
        program = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            text, _ = program.communicate(timeout=limit)
        except BaseException as ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            if isinstance(ended, subprocess.TimeoutExpired):
                raise OutOfTime(f"{name} was ended after {limit:.0f} s") from ended
            raise
        return text, program.returncode

    def output(self, arguments, seconds=LIMIT_SECONDS, environment=None):
        text, code = self.run(arguments, seconds, environment or of_flags_alone())
        if code != 0:
            raise Problem(f"{os.path.basename(arguments[0])} ended with code {code}:\n{text[-2000:]}")
        return text

    def judged(self, is_met):
        """Whether a bar is met; None where nothing is judged."""
        is_real = not self.small and not self.rates["device"].startswith("software GPU")
        return is_met if is_real else None

    def tests(self):
        """The tests that the software GPU runs in CI, by program: a line, and the names of those that failed. Only the
        list of opcodes, which is the compiler's, is not looked at here: the build folder may be on another machine."""
        if self.small:
            self.tested["tests"] = {"result": "left out with --small", "failed": []}
            return
        self.until = LIMIT_SECONDS
        environment = dict(requiring_a_device(), CARGO_MANIFEST_DIR=ROOT, CARGO_BIN_EXE_strata=collected("strata"))
        programs = (("kernel-tests", ["kernels::cuda"]), ("device-tests", ["--skip", "opcodes::"]))
        for done, (name, only) in enumerate(programs):
            model = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
            skipped = [] if os.path.exists(model) else ["--skip", "smollm2", "--skip", "little_memory"]
            try:
                # Each has an equal part of the time, and the last what is left of it.
                seconds = self.left() / (len(programs) - done)
                text, _ = self.run([collected(name), *only, *skipped], seconds, environment)
            except OutOfTime as late:
                self.tested[name] = {"result": str(late), "failed": [str(late)]}
                continue
            lines = text.splitlines()
            result = next((line for line in reversed(lines) if line.startswith("test result: ")), "no result")
            failed = [line.split()[1] for line in lines if line.startswith("test ") and line.endswith("... FAILED")]
            # A filter that fits nothing would pass.
            if not result.startswith("test result: ok. ") or " 0 passed" in result:
                failed = failed or [result]
                print(text[-4000:], flush=True)
            self.tested[name] = {"result": result, "failed": failed}

    def measure_rates(self):
        """The link, the memory, and the products with few tokens, beside candle's."""
        command = [collected("bench"), "--candle", collected("candle.ptx")]
        command += [] if self.small else ["--bench"]
        text, code = self.run(command, BENCH_SECONDS, requiring_a_device())
        try:
            # It ends with 1 where a product is wrong, and still gives the others.
            rates = json.loads(text)
        except ValueError as error:
            raise Problem(f"bench ended with code {code}, and gave no report:\n{text[-2000:]}") from error
        memory = "HBM" if rates["memory_bus_bits"] > GDDR_BUS_BITS_MAX else "GDDR"
        rates.update(memory_kind=memory, memory_bar=MEMORY_BARS[memory])
        self.rates = rates
        for product in rates["products"]:
            # candle has no products of floats.
            is_fast = True
            if "candle" in product:
                beside = product["candle"]
                least = min(beside["its_seconds_over_ours"], beside["its_seconds_over_ours_with_input"])
                is_fast = least > CANDLE_BAR
                beside["met"] = self.judged(is_fast)
            if product["tokens"] == 1:
                is_met = product["share_of_memory"] >= rates["memory_bar"]
                # With HBM less of the memory's rate is asked for, and more than candle's.
                is_right = "wrong" not in product
                product["met"] = self.judged(is_met and is_right and (memory == "GDDR" or is_fast))
        if code != 0:
            wrong = [product["wrong"] for product in self.rates["products"] if "wrong" in product]
            raise Problem("\n".join(wrong) or f"bench ended with code {code}")

    def measure_machine(self, model):
        """What the parts of this machine reach, by `strata bench rates`: what the plan's predictions are made from."""
        path = os.path.join(self.folder, "rates.toml")
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        seconds = 1 if self.small else MACHINE_SECONDS
        command = [collected("strata"), "bench", "rates", model, "--device", "cuda:0", "--seconds", str(seconds)]
        try:
            found = json.loads(self.output([*command, "--out", path, "--json"], 2 * MACHINE_SECONDS + 10))
        except OutOfTime as late:
            # Then predictions are from assumed rates, and say so.
            self.machine = {"left_out": str(late)}
            return
        self.machine = {"rates": found["rates"], "notes": found["notes"]}
        self.profile = path

    def model(self):
        """The path of the model, written unless it is there, and what the device gets of it."""
        large = self.model_path(LARGE)
        has_room = os.path.exists(large) or shutil.disk_usage(self.folder).free > LARGE[1]
        if self.small:
            shapes = [SMALL]
        elif has_room and host_memory() > 56 * GIB:
            shapes = [LARGE, MIDDLE]
        else:
            shapes = [MIDDLE]
        last = None
        for shape in shapes:
            path = self.model_path(shape)
            try:
                if not os.path.exists(path):
                    vocabulary = os.path.join(ROOT, "tests", "data", "tiny", "llama.gguf")
                    command = [collected("strata"), "synth", os.path.join(ROOT, shape[0]), path]
                    self.output([*command, "--vocabulary", vocabulary], SYNTH_SECONDS)
                return path, shape[2]
            except Problem as failure:
                # No time for it, or no space after all. A program that is killed leaves what it has written.
                if os.path.exists(path + ".partial"):
                    os.remove(path + ".partial")
                print(f"{failure}: {os.path.basename(path)} is not used", flush=True)
                last = failure
        raise last

    def model_path(self, shape):
        return os.path.join(self.folder, os.path.basename(shape[0]).replace(".toml", ".gguf"))

    def decode(self):
        """Decoding a model of which most streams, at each width, beside the plan's prediction and the link's limit; and
        of one sequence with the host's help."""
        if not self.rates:
            raise Problem("nothing is known of the device and its link")
        widths = (1, 2) if self.small else WIDTHS
        rows = [(width, DEVICE_ALONE) for width in widths] + [(1, HOST_TOO)]
        try:
            model, memory = self.model()
        except OutOfTime as late:
            self.decoded = [left_out(width, executor, str(late)) for width, executor in rows]
            return
        self.part("rates of the machine", lambda: self.measure_machine(model))
        # The driver keeps some of a card that has as much as is asked for.
        memory = min(memory, int(self.rates["memory_free_bytes"] * 0.95))
        flags = ["--device", "cuda:0", "--device-memory", f"{memory // MIB}MiB", "--rates", self.profile or "none"]
        for width, executor in rows:
            self.part(decoding(width, executor), lambda: self.decode_row(model, width, executor, flags))

    def decode_row(self, model, width, executor, flags):
        try:
            self.decoded.append(self.decoded_at(model, width, executor, flags))
        except OutOfTime as late:
            self.decoded.append(left_out(width, executor, str(late)))
        except FAILURES:
            self.decoded.append(left_out(width, executor, "it failed, see below"))
            raise

    def decoded_at(self, model, width, executor, flags):
        flags = [*flags, "--executor", executor]
        trace = os.path.join(self.folder, f"decode-{width}-{executor}.json")
        command = [collected("strata"), "bench", "decode", model, "--sequences", str(width), "--trace", trace]
        command += ["--tokens", "1" if self.small else "4", "--rounds", "1" if self.small else "3", "--json"]
        measured = json.loads(self.output(command + flags))
        row = {
            "model": os.path.basename(model),
            "width": width,
            "executor": executor,
            "tokens_per_second": measured["tokens_per_second"],
            "step_seconds": measured["step_seconds"],
            "predicted_step_seconds": measured["predicted_step_seconds"],
            "predicted_from": measured["predicted_from"],
            "moved_per_step": measured["moved_per_step"],
            "overlap": overlap(trace),
            "met": None,
        }
        if executor == DEVICE_ALONE:
            row.update(self.beside_the_link(model, width, measured, flags))
        else:
            row["not_judged"] = "the host computes a part"
        # Then the link waits for the drive.
        if measured["moved_per_step"]["storage_bytes"] > 0:
            row.update(met=None, not_judged="reads from storage")
        return row

    def beside_the_link(self, model, width, measured, flags):
        """How long the link takes for what the plan moves in a step, and whether the step is nearly as fast."""
        settings = ["--context", str(measured["depth"] + measured["tokens"] + 1), "--parallel", str(width)]
        plan = json.loads(self.output([collected("strata"), "plan", model, "--json", *settings, *flags]))
        least = plan["link_bytes_per_step"] / self.rates["link_bytes_per_second"]
        share = least / measured["step_seconds"]
        return {
            "link_bytes": plan["link_bytes_per_step"],
            "link_seconds": least,
            "of_the_link": share,
            "met": self.judged(share >= LINK_BAR),
        }


def left_out(width, executor, why):
    return {"width": width, "executor": executor, "left_out": why}


def requiring_a_device():
    """The environment of tests and benches, which otherwise skip where they find no device."""
    return dict(os.environ, STRATA_REQUIRE_GPU="1")


def of_flags_alone():
    """The environment of strata, which reads settings from it and refuses those that it does not know."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}


def host_memory():
    """Bytes of RAM that this machine has, or a control group of this process may take."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *group_limits()])


def group_limits():
    """Limits of memory, in bytes, of this process's control groups of both versions and of those above them."""
    limits = []
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.split(":", 2) for line in file.read().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        if controllers == "":
            mount, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the group's path is often the host's and not there; then the mount itself is its group.
        above = group.strip("/").split("/")
        for depth in range(len(above) + 1):
            # `max` is no number, and no limit.
            with contextlib.suppress(OSError, ValueError):
                with open(os.path.join(mount, *above[:depth], name)) as file:
                    limits.append(int(file.read()))
    return limits


def overlap(trace):
    """How long, in a traced run, the device computed and its link copied, and both at once; seconds, by the device's own
    clock."""
    with open(trace) as file:
        events = json.load(file)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes = {DEVICE_LANE: [], LINK_LANE: []}
    for event in events:
        lane = lanes.get(names.get(event.get("tid")))
        # The device's waits for a copy lie in its lane too.
        if event["ph"] == "X" and event["cat"] in ("computation", "copy") and lane is not None:
            lane.append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    computed, copied = (union(lanes[name]) for name in (DEVICE_LANE, LINK_LANE))
    either = union(lanes[DEVICE_LANE] + lanes[LINK_LANE])
    both = computed + copied - either
    shorter = min(computed, copied)
    return {
        "computed_seconds": computed,
        "copied_seconds": copied,
        "both_seconds": both,
        "share_of_the_shorter": both / shorter if shorter > 0 else None,
    }


def union(spans):
    """Seconds that lie in at least one of the spans."""
    total, end = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def sequences(width):
    return f"{width} sequence{'s' if width > 1 else ''}"


def decoding(width, executor):
    return f"decode, {sequences(width)}" + (", the host computes too" if executor == HOST_TOO else "")


def word(met):
    return {True: "yes", False: "no", None: "not judged"}[met]


def table(report):
    if report["rates"]:
        rates_table(report)
    for name, result in report["tests"].items():
        print(f"\n{name}: {result['result']}" + "".join(f"\n    {failed}" for failed in result["failed"]))
    for name, failure in report["failures"].items():
        print(f"\n{name} failed: {failure}")
    print(f"\n{report['seconds']:.0f} s in all")


def rates_table(report):
    rates = report["rates"]
    print(f"\n{rates['device']}, strata {report['version']}, {report['date']}\n")
    print("| what | figure | beside | share | bar | met |")
    print("|---|--:|---|--:|--:|---|")
    copy, kind = rates["memory_copy_bytes_per_second"], rates["memory_kind"]
    print(f"| link, page-locked | {rates['link_bytes_per_second'] / 1e9:.1f} GB/s | | | | |")
    bus = f"a bus of {rates['memory_bus_bits']} bits: taken for {kind}"
    print(f"| device memory, a copy | {copy / 1e9:.0f} GB/s | {bus} | | | |")
    for product in rates["products"]:
        if product["tokens"] == 1:
            share, rate = product["share_of_memory"], product["bytes_per_second"] / 1e9
            name = f"{product['type']}, one token"
            beside_candle = kind == "HBM" and "candle" in product
            bar = f"{rates['memory_bar']}" + (", and more than candle" if beside_candle else "")
            print(f"| {name} | {rate:.0f} GB/s | the copy | {share:.2f} | {bar} | {word(product['met'])} |")
    if report["machine"]:
        machine_row(report["machine"])
    for row in report["decode"]:
        decode_rows(row)
    candle_table(report)


def machine_row(machine):
    name = "rates that the plan predicts from, measured"
    if "left_out" in machine:
        print(f"| {name} | | left out: {machine['left_out']} | | | |")
        return
    rates = machine["rates"]
    figures = (
        f"link {rates['link_bytes_per_second'] / 1e9:.1f} GB/s",
        f"device memory {rates['device_memory_bytes_per_second'] / 1e9:.0f} GB/s",
        f"device {rates['device_flops_per_second'] / 1e12:.3g} TFLOP/s",
        f"RAM {rates['host_memory_bytes_per_second'] / 1e9:.0f} GB/s",
        f"storage {rates['storage_bytes_per_second'] / 1e9:.1f} GB/s",
    )
    print(f"| {name} | {', '.join(figures)} | | | | |")


def decode_rows(row):
    name = decoding(row["width"], row["executor"])
    bar = LINK_BAR if row["executor"] == DEVICE_ALONE else ""
    if "left_out" in row:
        print(f"| {name} | | left out: {row['left_out']} | | {bar} | {'no' if bar else word(None)} |")
        return
    figure = f"{row['tokens_per_second']:.2f} tokens/s"
    beside, share = ("the link", f"{row['of_the_link']:.2f}") if "of_the_link" in row else ("", "")
    met = f"{row['not_judged']}: not judged" if "not_judged" in row else word(row["met"])
    print(f"| {name}, {row['model']} | {figure} | {beside} | {share} | {bar} | {met} |")
    share = row["predicted_step_seconds"] / row["step_seconds"]
    prediction = "the plan's prediction" + (f", {row['predicted_from']}" if "assumed" in row["predicted_from"] else "")
    print(f"| | {row['step_seconds']:.3f} s a step | {prediction} | {share:.2f} | | |")
    at_once = row["overlap"]
    shorter = min(at_once["computed_seconds"], at_once["copied_seconds"])
    share = "" if at_once["share_of_the_shorter"] is None else f"{at_once['share_of_the_shorter']:.2f}"
    figure = f"{at_once['both_seconds']:.3f} s of copies and kernels at once"
    print(f"| | {figure} | the shorter of them, {shorter:.3f} s | {share} | | |")


def candle_table(report):
    raced = [product for product in report["rates"]["products"] if "candle" in product]
    if not raced:
        return
    difference = max(product["candle"]["largest_difference"] for product in raced)
    print(f"\nProducts beside candle's ({report['candle']}, quantized.cu), over the same weights and in turn: alone,")
    print("and with the input quantised each time. Ratios are candle's time over ours, and both are to be more than")
    print(f"{CANDLE_BAR}. No output is further from ours than {difference:.3f} of the outputs' root mean square.\n")
    print("| weights | tokens | strata | candle | ratio | strata, with input | candle, with input | ratio | met |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|---|")
    for product in raced:
        beside = product["candle"]
        cells = [product["type"], str(product["tokens"])]
        for side in (product, beside):
            cells.append(f"{side['seconds'] * 1e6:.1f} us, {side['bytes_per_second'] / 1e9:.0f} GB/s")
        cells.append(f"{beside['its_seconds_over_ours']:.2f}")
        cells += [f"{side['seconds_with_input'] * 1e6:.1f} us" for side in (product, beside)]
        cells += [f"{beside['its_seconds_over_ours_with_input']:.2f}", word(beside["met"])]
        print("| " + " | ".join(cells) + " |")


def check(folder, small):
    """Whether all tests passed, and all was measured."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(FOLDER, "report.json")
    # That of an earlier run would pass for this one's.
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    for name in ("strata", "strata-cuda", "bench"):
        collected(name)
    run = Check(folder, small)
    version = run.output([collected("strata"), "--version"]).split()[-1]
    try:
        run.part("rates", run.measure_rates)
        run.part("decode", run.decode)
        run.part("tests", run.tests)
    finally:
        report = {
            "device": run.rates.get("device"),
            "date": time.strftime("%Y-%m-%d"),
            "version": version,
            "candle": candle_version(),
            "bars": {"link": LINK_BAR, "memory": run.rates.get("memory_bar"), "candle": CANDLE_BAR},
            "tests": run.tested,
            "rates": run.rates,
            "machine": run.machine,
            "decode": run.decoded,
            "failures": run.failures,
            "seconds": time.monotonic() - run.began,
        }
        # The table first: the disk may be full.
        try:
            table(report)
        finally:
            with open(path, "w") as file:
                json.dump(report, file, indent=1)
        print(f"wrote {path}")
    return not run.failures and not any(result["failed"] for result in run.tested.values())


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="build, and collect what the check needs")
    parser.add_argument("--small", action="store_true", help="show that the check works")
    parser.add_argument("--folder", default=FOLDER, help="where the weights are written (40 GB of them)")
    arguments = parser.parse_args()
    # What it has started is in sessions of its own, and must not outlive it.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        if arguments.collect:
            collect()
        elif not check(arguments.folder, arguments.small):
            sys.exit("gpu_check: tests or measurements failed")
    except (Problem, OSError, ValueError, subprocess.CalledProcessError) as problem:
        sys.exit(f"gpu_check: {problem}")
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted")


if __name__ == "__main__":
    main()
