#!/usr/bin/env python3
"""A model of 70 billion weights (40 GB) on a machine that has no room for it: does strata serve it, and how fast?

Writes a file of the shape of Llama 3.3 70B with random weights, unless it is there. Starts `strata serve` on the CPU,
asks for a few tokens, and looks at /health and /metrics every fifth of a second meanwhile; then interrupts an answer in
the middle of a step. The limit of a token is the time for which fio reads what memory does not hold.

    seventy_billion.py --strata target/release/strata --vocabulary models/SmolLM2-135M-Instruct.Q4_1.gguf

Takes some minutes, and 44 GB of disk under target/peers; the file is kept unless --remove. Standard library only.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

from build_peers import PEERS, end_on_sigterm  # noqa: E402
from demo import metric  # noqa: E402
from offload_table import LIMIT_BAR, Table, step_limit, write  # noqa: E402
from peer_table import figure, processor  # noqa: E402
from peers import synthesised  # noqa: E402
from programs import Programs  # noqa: E402
from server import HOST, Server, free_port  # noqa: E402
from storage_rate import Fio  # noqa: E402
from wheels import ROOT, Problem, mebibytes, say  # noqa: E402

CARD = "llama-3.3-70b"
CONTEXT = 512
PROMPT = "Once upon a time"
LOAD_SECONDS, EXIT_SECONDS = 1800, 120
# A token takes a quarter of a minute on a drive of 1.6 GB/s that has half of the model to bring.
TOKEN_SECONDS = 300
LOOK_SECONDS = 0.2
LATENCY_BAR_SECONDS = 0.1
# From the signal to the engine, and from the engine to the client.
HEARING_SECONDS = 0.1
# Into a step, before it is interrupted.
INTO_STEP_SECONDS = 1.0


class Looks:
    """Asks for /health and /metrics while the block runs, and remembers how long each answer took."""

    def __init__(self, server):
        self.server = server
        self.seconds = {"/health": [], "/metrics": []}
        self.failed = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self):
        try:
            while not self._over.wait(LOOK_SECONDS):
                for path, seconds in self.seconds.items():
                    began = time.monotonic()
                    self.server.text(path)
                    seconds.append(time.monotonic() - began)
        except Problem as problem:
            self.failed = problem


def ask(server, tokens):
    """The usage of one streamed completion."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    usage = None
    # The prompt is a step too.
    for event in server.events("/v1/completions", body, TOKEN_SECONDS * (tokens + 1)):
        usage = event.get("usage") or usage
    if not usage:
        raise server.problem("the completion told no usage")
    return usage


def answer(server, tokens):
    """Seconds of a token, and what the looks at the server took."""
    name = "strata_time_per_output_token_seconds"
    before = server.text("/metrics")
    with Looks(server) as looks:
        usage = ask(server, tokens)
    if looks.failed:
        raise looks.failed
    after = server.text("/metrics")
    count, total = (metric(after, name + part) - metric(before, name + part) for part in ("_count", "_sum"))
    if count < 1 or not all(looks.seconds.values()):
        raise server.problem(f"the completion ended after {usage['completion_tokens']} token(s)")
    say(f"  {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated")
    return total / count, looks.seconds


def interrupt(server):
    """Seconds from SIGINT in the middle of a step to the end of the answer, and to that of the process."""
    ended = []

    def ask_in_vain():
        try:
            # More than are generated before the signal.
            ask(server, CONTEXT // 2)
        except Problem:
            # It is told that the server shuts down.
            ended.append(time.monotonic())

    client = threading.Thread(target=ask_in_vain, daemon=True)
    client.start()
    deadline = time.monotonic() + TOKEN_SECONDS
    while metric(server.text("/metrics"), "strata_requests_active", state="running") < 1:
        if time.monotonic() > deadline:
            raise server.problem("the request to be interrupted did not begin")
        time.sleep(0.05)
    time.sleep(INTO_STEP_SECONDS)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    try:
        code = server.process.wait(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise server.problem(f"strata was still running {EXIT_SECONDS} s after SIGINT") from None
    exited = time.monotonic()
    client.join(timeout=10)
    if code != 0 or not ended:
        raise server.problem(f"strata ended with exit code {code} after SIGINT, {'' if ended else 'un'}heard by its client")
    return ended[0] - began, exited - began


def peak_bytes(server):
    """The most memory that the server has held so far."""
    with open(f"/proc/{server.process.pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    raise Problem("/proc does not say how much memory the server holds")


def measure(arguments, programs, path):
    """What is judged, as a dict."""
    fio = Fio(programs, path)
    rates = [fio.measure()]
    port = free_port()
    command = [programs.strata, "serve", path, "--device", "cpu", "--threads", str(arguments.threads)]
    command += ["--context", str(CONTEXT), "--parallel", "1", "--host-memory", arguments.host_memory]
    # An interrupted answer is not waited for.
    command += ["--grace", "0", "--listen", f"{HOST}:{port}"]
    say("$ " + " ".join(command))
    began = time.monotonic()
    with Server("strata", command, port, os.path.join(PEERS, "seventy-billion-server.log")) as server:
        server.wait_ready(LOAD_SECONDS)
        load_seconds = time.monotonic() - began
        plan = server.json("/memory")["plan"]
        say(f"  ready after {load_seconds:.0f} s; a completion of {arguments.tokens} tokens")
        token_seconds, looks = answer(server, arguments.tokens)
        # Nothing is computed or fetched now.
        rates.append(fio.measure())
        peak = peak_bytes(server)
        ended_seconds, exit_seconds = interrupt(server)
    rates.append(fio.measure())
    rate = statistics.median(rates)
    touched = sum(group["bytes"] for group in plan["groups"] if group["kind"] not in ("small", "embedding"))
    memory = plan["memory"]["host"]
    return {
        "name": os.path.basename(path),
        "file_bytes": os.path.getsize(path),
        "fio": fio.version(),
        "fio_setting": str(fio.best()),
        "fio_rates": rates,
        "memory": memory,
        "load_seconds": load_seconds,
        "token_seconds": token_seconds,
        # Computing with all weights in memory cannot be measured here; it is a small part of reading them.
        "limit_seconds": step_limit(touched, memory, rate, 0)[0],
        "worst_seconds": {name: max(seconds) for name, seconds in looks.items()},
        "looks": sum(map(len, looks.values())),
        "peak_rss_bytes": peak,
        "group_seconds": max(group["entry_bytes"] for group in plan["groups"]) / rate,
        "answer_ended_seconds": ended_seconds,
        "exit_seconds": exit_seconds,
    }


def table(result):
    def line(what, shown, bar="", met=None):
        return {"what": what, "figure": shown, "bar": bar, "met": {True: "yes", False: "no", None: ""}[met]}

    ratio = result["limit_seconds"] / result["token_seconds"]
    worst = max(result["worst_seconds"].values())
    held = result["group_seconds"] + HEARING_SECONDS
    lines = [
        line("decode", f"{figure(1 / result['token_seconds'])} tokens/s, {result['token_seconds']:.1f} s a token"),
        line("limit", f"{figure(1 / result['limit_seconds'])} tokens/s, {result['limit_seconds']:.1f} s a token"),
        line("limit / token", f"{ratio:.2f}", f"{LIMIT_BAR:.2f}", ratio >= LIMIT_BAR),
        line(
            f"slowest of {result['looks']} answers of /health and /metrics meanwhile",
            f"{1e3 * worst:.0f} ms",
            f"{1e3 * LATENCY_BAR_SECONDS:.0f} ms",
            worst <= LATENCY_BAR_SECONDS,
        ),
        line("budget", mebibytes(result["memory"]["budget_bytes"])),
        line("peak RSS", mebibytes(result["peak_rss_bytes"])),
        line("loading", f"{result['load_seconds']:.0f} s"),
        line(
            "SIGINT in a step, to the end of the answer",
            f"{result['answer_ended_seconds']:.2f} s",
            f"{held:.2f} s",
            result["answer_ended_seconds"] <= held,
        ),
        line("SIGINT in a step, to the end of the process", f"{result['exit_seconds']:.2f} s"),
    ]
    return Table(
        result["name"],
        tuple((name, lambda line, name=name: line[name]) for name in ("what", "figure", "bar", "met")),
        ("what", "met"),
        lines,
        [
            f"{datetime.date.today().isoformat()}; {processor()}; Linux {platform.release()}; {result['fio']}",
            f"a file of {result['file_bytes'] / 1e9:.1f} GB; fio, {result['fio_setting']}: "
            f"{min(result['fio_rates']) / 1e9:.2f} to {max(result['fio_rates']) / 1e9:.2f} GB/s",
            f"the bar of an interrupted answer: what reading the largest group takes, and {HEARING_SECONDS} s",
        ],
    )


def run(arguments):
    for path in (arguments.strata, arguments.vocabulary):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: `make build model` brings it")
    if arguments.tokens < 2 or arguments.threads < 1:
        raise Problem("--tokens is at least 2, --threads at least 1")
    programs = Programs(os.path.abspath(arguments.strata), os.path.join(PEERS, "seventy-billion.log"))
    card = os.path.abspath(arguments.card)
    planned = [programs.strata, "plan", card, "--json", "--device", "cpu", "--host-memory", "1TiB", "--context", "512"]
    bytes_expected = sum(group["bytes"] for group in programs.printed(planned)["groups"])
    with open(card) as file:
        text = file.read()
    name = os.path.splitext(os.path.basename(card))[0]
    path = synthesised(programs, os.path.abspath(arguments.vocabulary), name, text, bytes_expected)
    try:
        result = measure(arguments, programs, path)
    finally:
        if arguments.remove:
            for written in (path, os.path.splitext(path)[0] + ".toml"):
                os.remove(written)
    write(os.path.join(PEERS, "seventy-billion.json"), json.dumps(result, indent=2))
    say(table(result).text())
    if arguments.write_table:
        write(arguments.write_table, table(result).markdown() + "\n")


def main():
    parser = argparse.ArgumentParser(description="Serve a model of 40 GB from less memory.")
    parser.add_argument("--strata", required=True, help="the executable")
    parser.add_argument("--vocabulary", required=True, help="SmolLM2's GGUF file, which lends its vocabulary")
    parser.add_argument("--card", default=os.path.join(ROOT, "models", f"{CARD}.toml"), help="another shape, to try this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4, help="to generate")
    parser.add_argument("--host-memory", default="auto", metavar="SIZE", help="as of `strata serve`")
    parser.add_argument("--remove", action="store_true", help="remove the file at the end")
    parser.add_argument("--write-table", metavar="PATH", help="also write the table as Markdown")
    arguments = parser.parse_args()
    end_on_sigterm()
    try:
        run(arguments)
    except (Problem, OSError) as problem:
        sys.exit(f"\nseventy_billion: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nseventy_billion: interrupted")


if __name__ == "__main__":
    main()
