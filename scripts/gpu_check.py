#!/usr/bin/env python3
"""Check strata on a real GPU, in under eight minutes and without a network: the tests of the CUDA device, then what it
reaches beside what bounds it. Prints a table, and writes target/gpu-check/report.json.

    gpu_check.py --collect     build, and collect the programs and files that the check needs in target/gpu-check
    gpu_check.py               run the check from there: no compiler and no cargo are needed any more
    gpu_check.py --small       with a small model and little memory: shows that the check itself works

Weights are random ones of a known shape, written by `strata synth` to --folder: Llama 3.3 70B (40 GB) where disk and
memory allow, otherwise Llama 3.1 8B. Standard library only.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
FOLDER = os.path.join(TARGET, "gpu-check")
GIB = 1 << 30
# Shape, bytes that it takes, and what the device gets of it.
LARGE = ("models/llama-3.3-70b.toml", 44 * GIB, "24GiB")
MIDDLE = ("models/llama-3.1-8b.toml", 6 * GIB, "3GiB")
SMALL = ("models/smollm2-135m.toml", GIB // 4, "80MiB")
WIDTHS = (1, 8, 64)
# What is asked of the measurements.
LINK_BAR = 0.9
MEMORY_BAR = 0.5


class Problem(Exception):
    pass


def collect():
    """Build everything with cargo, and copy what it says it has made."""
    os.makedirs(FOLDER, exist_ok=True)
    command = ["cargo", "test", "--release", "--locked", "--features", "cuda", "--no-run", "--message-format=json"]
    command += ["--lib", "--bin", "strata", "--test", "cuda", "--bench", "gpu"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        raise Problem("the build failed")
    subprocess.run(["cargo", "build", "--release", "--locked", "--features", "cuda"], cwd=ROOT, check=True)
    names = {("lib", True): "kernel-tests", ("test", True): "device-tests", ("bench", True): "bench"}
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message.get("executable"):
            continue
        name = names.get((message["target"]["kind"][0], message["profile"]["test"]))
        if message["target"]["name"] == "gpu":
            name = "bench"
        if name:
            shutil.copy(message["executable"], os.path.join(FOLDER, name))
    shutil.copy(os.path.join(TARGET, "release", "strata"), FOLDER)
    print(f"collected in {FOLDER}")


def program(name):
    path = os.path.join(FOLDER, name)
    if not os.path.exists(path):
        raise Problem(f"{path} is missing: run `gpu_check.py --collect` where there is a compiler")
    return path


def run(arguments, **more):
    print("$ " + " ".join(arguments), flush=True)
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, **more)
    if done.returncode != 0:
        raise Problem(f"{os.path.basename(arguments[0])} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def run_tests():
    """The tests that the software GPU runs in CI."""
    environment = dict(os.environ, STRATA_REQUIRE_GPU="1", CARGO_MANIFEST_DIR=ROOT)
    environment["CARGO_BIN_EXE_strata"] = program("strata")
    counts = {}
    for name, only in (("kernel-tests", ["kernels::cuda"]), ("device-tests", [])):
        model = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
        skipped = [] if os.path.exists(model) else ["--skip", "smollm2", "--skip", "little_memory"]
        output = run([program(name), *only, *skipped], env=environment)
        passed = [line for line in output.splitlines() if line.startswith("test result: ok.")]
        counts[name] = passed[-1] if passed else "no test ran"
    return counts


def card(rates, folder):
    """A hardware card of this machine: what was measured of the device, and for the rest what is usual."""
    path = os.path.join(folder, "measured.toml")
    memory = max(product["bytes_per_second"] for product in rates["products_of_one_token"])
    lines = (
        'name = "this machine, measured by gpu-check"',
        f"device_memory_bytes = {rates['memory_total_bytes']}",
        f"host_memory_bytes = {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')}",
        "[rates]",
        "storage_bytes_per_second = 1.5e9",
        f"link_bytes_per_second = {rates['link_bytes_per_second']:.0f}.0",
        f"device_memory_bytes_per_second = {memory:.0f}.0",
        "host_memory_bytes_per_second = 100.0e9",
        "host_kernel_bytes_per_second = 60.0e9",
        "host_flops_per_second = 1.0e12",
        "device_flops_per_second = 2.0e13",
    )
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def decode(shape, rates, folder, small):
    """Decoding a model of which most streams, at each width, beside the plan's prediction and the link's limit."""
    model = os.path.join(folder, os.path.basename(shape[0]).replace(".toml", ".gguf"))
    if not os.path.exists(model):
        vocabulary = os.path.join(ROOT, "tests", "data", "tiny", "llama.gguf")
        run([program("strata"), "synth", os.path.join(ROOT, shape[0]), model, "--vocabulary", vocabulary])
    flags = ["--device", "cuda:0", "--device-memory", shape[2], "--executor", "device"]
    flags += ["--hardware", card(rates, folder)]
    rows = []
    for width in (1, 2) if small else WIDTHS:
        common = [program("strata"), "bench", "decode", model, "--sequences", str(width)]
        tokens = "1" if small else "4"
        text = run([*common, "--tokens", tokens, "--rounds", "1" if small else "3", "--json", *flags])
        measured = json.loads(text)
        settings = ["--context", str(measured["depth"] + measured["tokens"] + 1), "--parallel", str(width)]
        plan = json.loads(run([program("strata"), "plan", model, "--json", *settings, *flags]))
        step = width / measured["tokens_per_second"]
        predicted = next(p for p in plan["predictions"] if p["width"] >= width)
        least = plan["link_bytes_per_step"] / rates["link_bytes_per_second"]
        rows.append(
            {
                "width": width,
                "tokens_per_second": measured["tokens_per_second"],
                "step_seconds": step,
                "predicted_step_seconds": predicted["step_seconds"],
                "link_seconds": least,
                "of_the_link": least / step,
            }
        )
    return rows


def shape_for(folder, small):
    if small:
        return SMALL
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = shutil.disk_usage(folder).free
    return LARGE if memory > 56 * GIB and free > LARGE[1] else MIDDLE


def table(report):
    print(f"\n{report['device']}, strata {report['version']}, {report['date']}\n")
    print("| what | figure | beside | share | bar | met |")
    print("|---|--:|---|--:|--:|---|")
    rates = report["rates"]
    copy = rates["memory_copy_bytes_per_second"]
    print(f"| link, page-locked | {rates['link_bytes_per_second'] / 1e9:.1f} GB/s | | | | |")
    print(f"| device memory, a copy | {copy / 1e9:.0f} GB/s | | | | |")
    for product in rates["products_of_one_token"]:
        share = product["share_of_memory"]
        met = "yes" if share >= MEMORY_BAR else "no"
        rate = product["bytes_per_second"] / 1e9
        print(f"| {product['type']}, one token | {rate:.0f} GB/s | the copy | {share:.2f} | {MEMORY_BAR} | {met} |")
    for row in report["decode"]:
        share = row["of_the_link"]
        met = "yes" if share >= LINK_BAR else "no"
        figure = f"{row['tokens_per_second']:.2f} tokens/s"
        print(f"| decode, {row['width']} sequences | {figure} | the link | {share:.2f} | {LINK_BAR} | {met} |")
        share = row["predicted_step_seconds"] / row["step_seconds"]
        print(f"| | {row['step_seconds']:.3f} s a step | the plan's prediction | {share:.2f} | | |")
    print(f"\n{report['tests']}\n{report['seconds']:.0f} s in all")


def check(folder, small):
    began = time.time()
    os.makedirs(folder, exist_ok=True)
    tests = {"left out": "--small"} if small else run_tests()
    rates = json.loads(run([program("bench")] + ([] if small else ["--bench"])))
    report = {
        "device": rates["device"],
        "date": time.strftime("%Y-%m-%d"),
        "version": run([program("strata"), "--version"]).split()[-1],
        "tests": tests,
        "rates": rates,
        "decode": decode(shape_for(folder, small), rates, folder, small),
    }
    report["seconds"] = time.time() - began
    path = os.path.join(FOLDER, "report.json")
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
    table(report)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="build, and collect what the check needs")
    parser.add_argument("--small", action="store_true", help="show that the check works")
    parser.add_argument("--folder", default=FOLDER, help="where the weights are written (40 GB of them)")
    arguments = parser.parse_args()
    try:
        if arguments.collect:
            collect()
        else:
            check(arguments.folder, arguments.small)
    except (Problem, OSError, ValueError, subprocess.CalledProcessError) as problem:
        sys.exit(f"gpu_check: {problem}")


if __name__ == "__main__":
    main()
