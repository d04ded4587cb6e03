#!/usr/bin/env python3
"""How fast, and how well, does `strata quantise` make files, beside llama.cpp on the same file?

Both write the same types in turns, in rounds whose order is reversed every other time, with the same threads; MB/s are of
weights as f32, medians over rounds, the whole process included. Then, of the last files: whether each tensor has the type that
llama.cpp gave it, whether llama.cpp loads ours, and how far the weights of either are from the input's, as a share of their
root mean square (of some thousand weights of each matrix).

    quantise.py --strata target/release/strata --model models/NAME.gguf
    quantise.py ... --types q4_k_m q8_0 --rounds 5 --peer native --write-table FILE.md

The peer is libllama of the prebuilt llama-server that compare_llama_server.py races with; its CPU code is generic. With
`--peer native` it is llama-quantize, built for this machine as for peers.py, and llama-bench loads the files. A model that is
quantised already is first written as f16 by strata, and both begin with that. Standard library only.
"""

import argparse
import array
import ctypes
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

from build_peers import LLAMA, PEERS, end_on_sigterm, llama_cpp  # noqa: E402
from compare_llama_server import fetch_peer  # noqa: E402
from offload_table import NOT_SHOWN, Table, write  # noqa: E402
from peer_table import processor  # noqa: E402
from programs import Programs  # noqa: E402
from wheels import Problem, mebibytes, require_free_space, say  # noqa: E402

# `enum llama_ftype`.
TYPES = {
    "q8_0": 7,
    "q6_k": 18,
    "q5_k_m": 17,
    "q5_0": 8,
    "q4_k_m": 15,
    "q4_1": 3,
    "q4_0": 2,
    "q3_k_m": 12,
    "q2_k": 10,
}
# Weights of each matrix that are compared.
SAMPLE = 4096


class Parameters(ctypes.Structure):
    """The beginning of `struct llama_model_quantize_params`, and room for what follows."""

    _fields_ = [
        ("threads", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("embedding_type", ctypes.c_int32),
        ("allow_requantize", ctypes.c_bool),
        ("rest", ctypes.c_uint8 * 495),
    ]


def library(path):
    """libllama, whose neighbours the loader finds by LD_LIBRARY_PATH."""
    llama = ctypes.CDLL(path)
    llama.llama_model_quantize_default_params.restype = Parameters
    llama.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Parameters)]
    llama.llama_model_quantize.restype = ctypes.c_uint32
    ctypes.CDLL(os.path.join(os.path.dirname(path), "libggml.so")).ggml_backend_load_all()
    llama.llama_backend_init()
    return llama


def quantise_as_peer(path, source, output, ftype, threads):
    """What a child process does in llama-quantize's place."""
    llama = library(path)
    parameters = llama.llama_model_quantize_default_params()
    parameters.threads, parameters.ftype, parameters.allow_requantize = int(threads), int(ftype), True
    sys.exit(llama.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(parameters)))


def tensors(programs, path):
    """{name: tensor} as `strata inspect` tells of them."""
    return {tensor["name"]: tensor for tensor in programs.printed([programs.strata, "inspect", path, "--json"])["tensors"]}


def is_loaded_by_bench(programs, path, threads):
    """Whether the llama-bench that was built here computes a token with the model."""
    bench = os.path.join(llama_cpp(), "llama-bench")
    try:
        programs.output([bench, "-m", path, "-p", "0", "-n", "1", "-r", "1", "-t", threads])
        return True
    except Problem:
        return False


def is_loaded_by_server(programs, server, path):
    """Whether llama-server comes so far as to listen with the model."""
    command = [server, "-m", path, "--host", "127.0.0.1", "--port", "0", "-c", "256", "-ngl", "0", "-dev", "none", "--no-warmup"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        with open(programs.log, "a") as log:
            for line in process.stdout:
                log.write(line)
                if "model loaded" in line or "server is listening" in line:
                    return True
        return False
    finally:
        process.kill()
        process.wait()


def weights(path, tensor):
    with open(path, "rb") as file:
        file.seek(tensor["file_offset"])
        values = array.array("f")
        values.frombytes(file.read(min(tensor["bytes"], 4 * SAMPLE)))
    return values


def distance(programs, before, path, scratch):
    """Of the weights from those of the input (in f32), as a share of their root mean square."""
    floats = os.path.join(scratch, "floats.gguf")
    programs.run("quantise", path, floats, "--type", "f32", "--force")
    original, after = tensors(programs, before), tensors(programs, floats)
    difference = square = 0.0
    for name, tensor in original.items():
        if len(tensor["dimensions"]) < 2:
            continue
        pairs = zip(weights(before, tensor), weights(floats, after[name]))
        for was, is_now in pairs:
            difference += (was - is_now) ** 2
            square += was * was
    os.remove(floats)
    return math.sqrt(difference / square)


def table(arguments, rows):
    """What was measured, as a table with the facts that belong to it."""
    peer = "built for this machine" if arguments.peer == "native" else "prebuilt, generic code"
    columns = (
        ("type", lambda row: row["type"]),
        ("strata", lambda row: f"{row['strata_mb_per_second']:.0f} MB/s"),
        ("llama.cpp", lambda row: f"{row['llama_mb_per_second']:.0f} MB/s"),
        ("ratio", lambda row: f"{row['strata_mb_per_second'] / row['llama_mb_per_second']:.2f}"),
        ("distance", lambda row: f"{row['strata_distance']:.5f}"),
        ("llama.cpp's", lambda row: f"{row['llama_distance']:.5f}"),
        ("tensors of another type", lambda row: str(len(row["tensors_of_another_type"]) or NOT_SHOWN)),
        ("loaded by llama.cpp", lambda row: "yes" if row["loaded"] else "no"),
    )
    notes = [
        f"{datetime.date.today()}; {processor()}; {platform.system()} {platform.release()}",
        f"{os.path.basename(arguments.model)} from f16; {arguments.threads} threads; medians of {arguments.rounds} rounds",
        f"llama.cpp: {peer}; the sources in {' '.join(LLAMA)}" if arguments.peer == "native" else f"llama.cpp: {peer}",
        "MB/s: weights as f32, the whole process included",
        "distance: from the weights of the input, as a share of their root mean square",
    ]
    return Table("strata quantise beside llama-quantize", columns, ("type",), rows, notes)


def run(arguments):
    for path in (arguments.strata, arguments.model):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: `make build model` brings it")
    scratch = os.path.join(PEERS, "quantise")
    os.makedirs(scratch, exist_ok=True)
    programs = Programs(arguments.strata, os.path.join(PEERS, "quantise.log"))
    is_native = arguments.peer == "native"
    if not is_native:
        server = fetch_peer()
        folder = os.path.dirname(server)
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH", "")]))
    described = programs.printed([arguments.strata, "inspect", arguments.model, "--json"])
    float_bytes = 4 * described["parameters"]
    # The input in f16 and f32, two outputs, and one of them in f32 again.
    require_free_space(scratch, 4 * float_bytes, "this bench")
    before, source = (os.path.join(scratch, name) for name in ("before.gguf", "source.gguf"))
    programs.run("quantise", arguments.model, source, "--type", "f16", "--force")
    programs.run("quantise", source, before, "--type", "f32", "--force")
    threads = str(arguments.threads)
    ours, theirs = (os.path.join(scratch, name) for name in ("strata.gguf", "llama.gguf"))

    def strata(name):
        return [arguments.strata, "quantise", source, ours, "--type", name, "--threads", threads, "--force"]

    def llama(name):
        if is_native:
            return [os.path.join(llama_cpp(), "llama-quantize"), source, theirs, name.upper(), threads]
        here = os.path.abspath(__file__)
        lib = os.path.join(folder, "libllama.so")
        return [sys.executable, here, "--as-peer", lib, source, theirs, str(TYPES[name]), threads]

    say(f"{os.path.basename(arguments.model)} as f16, {mebibytes(float_bytes)} as f32, {threads} threads, {arguments.rounds} rounds")
    say(f"{'':8}{'strata':>10}{'llama.cpp':>12}{'ratio':>8}   MB/s   {'distance':>10}{'theirs':>10}   types, loaded")
    rows = []
    for name in arguments.types:
        seconds = {"strata": [], "llama": []}
        for number in range(arguments.rounds):
            order = [("strata", strata(name)), ("llama", llama(name))]
            for who, command in order if number % 2 == 0 else order[::-1]:
                began = time.monotonic()
                programs.output(command)
                seconds[who].append(time.monotonic() - began)
        rates = {who: float_bytes / 1e6 / statistics.median(times) for who, times in seconds.items()}
        types = {who: tensors(programs, path) for who, path in (("strata", ours), ("llama", theirs))}
        other = [key for key, tensor in types["strata"].items() if types["llama"][key]["type"] != tensor["type"]]
        row = {
            "type": name,
            "strata_mb_per_second": rates["strata"],
            "llama_mb_per_second": rates["llama"],
            "strata_distance": distance(programs, before, ours, scratch),
            "llama_distance": distance(programs, before, theirs, scratch),
            "tensors_of_another_type": other,
            "loaded": is_loaded_by_bench(programs, ours, threads) if is_native else is_loaded_by_server(programs, server, ours),
        }
        rows.append(row)
        say(
            f"{name:8}{rates['strata']:10.0f}{rates['llama']:12.0f}{rates['strata'] / rates['llama']:8.2f}          "
            f"{row['strata_distance']:10.5f}{row['llama_distance']:10.5f}   "
            f"{'the same' if not other else f'{len(other)} others'}, {'yes' if row['loaded'] else 'NO'}"
        )
    with open(os.path.join(PEERS, "quantise.json"), "w") as out:
        json.dump({"model": os.path.basename(arguments.model), "threads": arguments.threads, "rows": rows}, out, indent=1)
    for path in (before, source, ours, theirs):
        os.remove(path)
    if arguments.write_table:
        text = f"# Quantising\n\nWritten by `benches/quantise.py`, which says how it measures.\n\n{table(arguments, rows).markdown()}\n"
        write(arguments.write_table, text)
    if not all(row["loaded"] and not row["tensors_of_another_type"] for row in rows):
        raise Problem(f"llama.cpp differs, or does not load a file: see {programs.log}")


def main():
    if sys.argv[1:2] == ["--as-peer"]:
        quantise_as_peer(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strata", required=True, help="the program")
    parser.add_argument("--model", required=True, help="a GGUF file of any type")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="by default all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", choices=("prebuilt", "native"), default="prebuilt")
    parser.add_argument("--write-table", metavar="PATH", help="also write the table as Markdown")
    arguments = parser.parse_args()
    end_on_sigterm()
    try:
        run(arguments)
    except (Problem, OSError) as problem:
        sys.exit(f"\nquantise: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nquantise: interrupted")


if __name__ == "__main__":
    main()
