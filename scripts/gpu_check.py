#!/usr/bin/env python3
"""Check strata on a real GPU, in under eight minutes and without a network: the tests of the CUDA device, then what it
reaches beside what bounds it and beside candle's kernels. Prints a table, and writes target/gpu-check/report.json.

    gpu_check.py --collect     build, and collect the programs and files that the check needs in target/gpu-check
    gpu_check.py               run the check from there: no compiler and no cargo are needed any more
    gpu_check.py --small       with a small model and little memory: shows that the check itself works, and judges nothing

Weights are random ones of a known shape, written by `strata synth` to --folder: Llama 3.3 70B (40 GB) where disk and
memory allow and the disk takes it in two minutes, otherwise Llama 3.1 8B. What there is no time left for is named in the
table. Ends with 1 where a test or a measurement failed, and still prints what the others gave; a bar that is not met is a
line of the table. Standard library only.
"""

import argparse
import contextlib
import json
import os
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
# What is asked of the measurements: shares of the link's rate and of the memory's, and candle's seconds over ours.
LINK_BAR = 0.9
MEMORY_BAR = 0.5
CANDLE_BAR = 1.0
LIMIT_SECONDS = 8 * 60 - 15
TESTS_SECONDS = 150
SYNTH_SECONDS = 120
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
    command += ["--lib", "--bin", "strata", "--test", "cuda", "--bench", "gpu"]
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
            shutil.copy(message["executable"], os.path.join(FOLDER, name))
    shutil.copy(os.path.join(TARGET, "release", "strata"), FOLDER)
    print(f"collected in {FOLDER}")


def collected(name):
    path = os.path.join(FOLDER, name)
    if not os.path.exists(path):
        raise Problem(f"{path} is missing: run `gpu_check.py --collect` where there is a compiler")
    return path


class Check:
    """One run: its time, where its files lie, and whether figures are judged."""

    def __init__(self, folder, small):
        self.began = time.monotonic()
        self.folder = folder
        self.small = small
        self.rates = {}
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

    def run(self, arguments, seconds, environment):
        """What a program wrote, and its code. It gets so many seconds of those that the check has left."""
        print("$ " + " ".join(arguments), flush=True)
        name = os.path.basename(arguments[0])
        left = LIMIT_SECONDS - (time.monotonic() - self.began)
        # Interpreted kernels take as long as they take.
        limit = None if self.small else max(1.0, min(seconds, left))
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

    def met(self, share, bar):
        """Whether a bar is met; None where nothing is judged."""
        is_real = not self.small and not self.rates["device"].startswith("software GPU")
        return share >= bar if is_real else None

    def tests(self):
        """The tests that the software GPU runs in CI, by program: a line, and the names of those that failed. Only the
        list of opcodes, which is the compiler's, is not looked at here: the build folder may be on another machine."""
        if self.small:
            self.tested["tests"] = {"result": "left out with --small", "failed": []}
            return
        environment = dict(requiring_a_device(), CARGO_MANIFEST_DIR=ROOT, CARGO_BIN_EXE_strata=collected("strata"))
        for name, only in (("kernel-tests", ["kernels::cuda"]), ("device-tests", ["--skip", "opcodes::"])):
            model = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
            skipped = [] if os.path.exists(model) else ["--skip", "smollm2", "--skip", "little_memory"]
            try:
                text, _ = self.run([collected(name), *only, *skipped], TESTS_SECONDS, environment)
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
        text, code = self.run(command, LIMIT_SECONDS, requiring_a_device())
        try:
            # It ends with 1 where a product is wrong, and still gives the others.
            self.rates = json.loads(text)
        except ValueError as error:
            raise Problem(f"bench ended with code {code}, and gave no report:\n{text[-2000:]}") from error
        for product in self.rates["products"]:
            if product["tokens"] == 1:
                product["met"] = self.met(product["share_of_memory"], MEMORY_BAR)
            if "candle" in product:
                beside = product["candle"]
                least = min(beside["its_seconds_over_ours"], beside["its_seconds_over_ours_with_input"])
                beside["met"] = self.met(least, CANDLE_BAR)
        if code != 0:
            wrong = [product["wrong"] for product in self.rates["products"] if "wrong" in product]
            raise Problem("\n".join(wrong) or f"bench ended with code {code}")

    def card(self):
        """A hardware card of this machine: what was measured of the device, and for the rest what is usual."""
        path = os.path.join(self.folder, "measured.toml")
        memory = max(product["bytes_per_second"] for product in self.rates["products"] if product["tokens"] == 1)
        lines = (
            'name = "this machine, measured by gpu-check"',
            f"device_memory_bytes = {self.rates['memory_total_bytes']}",
            f"host_memory_bytes = {host_memory()}",
            "[rates]",
            "storage_bytes_per_second = 1.5e9",
            f"link_bytes_per_second = {self.rates['link_bytes_per_second']:.0f}.0",
            f"device_memory_bytes_per_second = {memory:.0f}.0",
            "host_memory_bytes_per_second = 100.0e9",
            "host_kernel_bytes_per_second = 60.0e9",
            "host_flops_per_second = 1.0e12",
            "device_flops_per_second = 2.0e13",
        )
        with open(path, "w") as file:
            file.write("\n".join(lines) + "\n")
        return path

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
        """Decoding a model of which most streams, at each width, beside the plan's prediction and the link's limit."""
        if not self.rates:
            raise Problem("nothing is known of the device and its link")
        widths = (1, 2) if self.small else WIDTHS
        try:
            model, memory = self.model()
        except OutOfTime as late:
            self.decoded = [{"width": width, "left_out": str(late)} for width in widths]
            return
        # The driver keeps some of a card that has as much as is asked for.
        memory = min(memory, int(self.rates["memory_free_bytes"] * 0.95))
        flags = ["--device", "cuda:0", "--device-memory", f"{memory // MIB}MiB", "--executor", "device"]
        flags += ["--hardware", self.card()]
        for width in widths:
            self.part(f"decode, {sequences(width)}", lambda: self.decode_width(model, width, flags))

    def decode_width(self, model, width, flags):
        try:
            self.decoded.append(self.decoded_at(model, width, flags))
        except OutOfTime as late:
            self.decoded.append({"width": width, "left_out": str(late)})
        except FAILURES:
            self.decoded.append({"width": width, "left_out": "it failed, see below"})
            raise

    def decoded_at(self, model, width, flags):
        trace = os.path.join(self.folder, f"decode-{width}.json")
        command = [collected("strata"), "bench", "decode", model, "--sequences", str(width), "--trace", trace]
        command += ["--tokens", "1" if self.small else "4", "--rounds", "1" if self.small else "3", "--json"]
        measured = json.loads(self.output(command + flags))
        settings = ["--context", str(measured["depth"] + measured["tokens"] + 1), "--parallel", str(width)]
        plan = json.loads(self.output([collected("strata"), "plan", model, "--json", *settings, *flags]))
        step = measured["step_seconds"]
        least = plan["link_bytes_per_step"] / self.rates["link_bytes_per_second"]
        return {
            "model": os.path.basename(model),
            "width": width,
            "tokens_per_second": measured["tokens_per_second"],
            "step_seconds": step,
            "predicted_step_seconds": measured["predicted_step_seconds"],
            "link_bytes": plan["link_bytes_per_step"],
            "link_seconds": least,
            "of_the_link": least / step,
            "met": self.met(least / step, LINK_BAR),
            "overlap": overlap(trace),
        }


def requiring_a_device():
    """The environment of tests and benches, which otherwise skip where they find no device."""
    return dict(os.environ, STRATA_REQUIRE_GPU="1")


def of_flags_alone():
    """The environment of strata, which reads settings from it and refuses those that it does not know."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}


def host_memory():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    copy = rates["memory_copy_bytes_per_second"]
    print(f"| link, page-locked | {rates['link_bytes_per_second'] / 1e9:.1f} GB/s | | | | |")
    print(f"| device memory, a copy | {copy / 1e9:.0f} GB/s | | | | |")
    for product in rates["products"]:
        if product["tokens"] == 1:
            share, rate = product["share_of_memory"], product["bytes_per_second"] / 1e9
            name = f"{product['type']}, one token"
            print(f"| {name} | {rate:.0f} GB/s | the copy | {share:.2f} | {MEMORY_BAR} | {word(product['met'])} |")
    for row in report["decode"]:
        name = f"decode, {sequences(row['width'])}"
        if "left_out" in row:
            print(f"| {name} | | left out: {row['left_out']} | | {LINK_BAR} | no |")
            continue
        figure = f"{row['tokens_per_second']:.2f} tokens/s"
        share, met = row["of_the_link"], word(row["met"])
        print(f"| {name}, {row['model']} | {figure} | the link | {share:.2f} | {LINK_BAR} | {met} |")
        share = row["predicted_step_seconds"] / row["step_seconds"]
        print(f"| | {row['step_seconds']:.3f} s a step | the plan's prediction | {share:.2f} | | |")
        at_once = row["overlap"]
        shorter = min(at_once["computed_seconds"], at_once["copied_seconds"])
        share = "" if at_once["share_of_the_shorter"] is None else f"{at_once['share_of_the_shorter']:.2f}"
        figure = f"{at_once['both_seconds']:.3f} s of copies and kernels at once"
        print(f"| | {figure} | the shorter of them, {shorter:.3f} s | {share} | | |")
    candle_table(report)


def candle_table(report):
    raced = [product for product in report["rates"]["products"] if "candle" in product]
    if not raced:
        return
    difference = max(product["candle"]["largest_difference"] for product in raced)
    print(f"\nProducts beside candle's ({report['candle']}, quantized.cu), over the same weights, in turn: a product alone, and")
    print(f"with its input quantised each time. Ratios are candle's time over ours, and the bar of both is {CANDLE_BAR}.")
    print(f"No output of candle's is further from ours than {difference:.3f} of the outputs' root mean square.\n")
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
    run = Check(folder, small)
    version = run.output([collected("strata"), "--version"]).split()[-1]
    try:
        run.part("tests", run.tests)
        run.part("rates", run.measure_rates)
        run.part("decode", run.decode)
    finally:
        report = {
            "device": run.rates.get("device"),
            "date": time.strftime("%Y-%m-%d"),
            "version": version,
            "candle": candle_version(),
            "bars": {"link": LINK_BAR, "memory": MEMORY_BAR, "candle": CANDLE_BAR},
            "tests": run.tested,
            "rates": run.rates,
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
