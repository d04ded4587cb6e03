#!/usr/bin/env python3
"""Serve a real model that does not fit into the device, ask it something, and hold what it did against its plan.

    demo.py --strata target/release/strata --model models/NAME.gguf -- [flags of strata serve]

Starts the server, streams one chat answer, prints the memory table and what was moved between the tiers, and fails
unless each tier is home to a tenth of the weights and took part in every step. Standard library only.
"""

import argparse
import os
import re
import signal
import sys
import time

from server import HOST, Server, free_port
from wheels import TARGET, Problem, mebibytes, say

QUESTION = "Explain in a few sentences why the sky is blue."
MAX_TOKENS = 64
LOAD_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 120, 300, 30
TIERS = ("device", "host", "storage")
# Prefetch runs across step borders, so a count taken between two steps may be off by part of one step.
TOLERANCE = 0.98


def metric(text, name, **labels):
    """The sum of the samples of one metric whose labels include the given ones."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name:
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= pairs.items():
                total += float(found[3])
    return total


def snapshot(server):
    """Counters at rest: read until nothing moves any more, because the ring is refilled after a step."""
    deadline = time.monotonic() + 10
    before = None
    while True:
        memory, metrics = server.json("/memory"), server.text("/metrics")
        at_rest = {
            "steps": memory["steps"],
            "leases": memory["leases"],
            "storage": metric(metrics, "strata_transfer_bytes_total", **{"from": "storage"}),
            "link": metric(metrics, "strata_transfer_bytes_total", **{"from": "host"}),
            "stall host": metric(metrics, "strata_weight_stall_seconds_total", **{"from": "host"}),
            "stall storage": metric(metrics, "strata_weight_stall_seconds_total", **{"from": "storage"}),
        }
        if at_rest == before:
            return memory, at_rest
        if time.monotonic() > deadline:
            raise server.problem("the transfer counters were still moving 10 s after the last step")
        before = at_rest
        time.sleep(0.1)


def stream_answer(server):
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    say(f"\nuser: {QUESTION}")
    print("assistant: ", end="", flush=True)
    started = time.monotonic()
    first = last = None
    usage = finish = None
    text = ""
    for event in server.events("/v1/chat/completions", body, ANSWER_SECONDS):
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            finish = choice.get("finish_reason") or finish
            piece = choice.get("delta", {}).get("content") or ""
            if piece:
                last = time.monotonic()
                first = first or last
                text += piece
                print(piece, end="", flush=True)
    print(flush=True)
    if not text.strip():
        raise server.problem("the answer is empty")
    if finish not in ("stop", "length"):
        raise server.problem(f"the answer ended with finish_reason {finish!r}")
    if not usage:
        raise server.problem("the stream had no usage, though it was asked for")
    tokens = usage["completion_tokens"]
    rate = f", then {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 and last > first else ""
    say(
        f"\n{usage['prompt_tokens']} prompt tokens, {tokens} generated ({finish}); "
        f"first after {first - started:.2f} s{rate}"
    )
    return usage


def print_memory(memory):
    reader = memory["reader"]
    say(f"\ndevice: {memory['device']}; reader: {reader['rung']} ({reader['reason']})")
    columns = ("budget", "weights", "ring", "kv", "scratch", "free", "home")
    total = sum(tier["home_bytes"] for tier in memory["tiers"])
    say(f"\n{'MiB':8}" + "".join(f"{column:>9}" for column in columns) + "  share of weights")
    for tier in memory["tiers"]:
        cells = ""
        for column in columns:
            count = tier.get(f"{column}_bytes")
            cells += f"{'-':>9}" if count is None else f"{count / 2**20:9.1f}"
        say(f"{tier['tier']:8}{cells}  {100 * tier['home_bytes'] / total:5.1f} %")
    process = memory["process"]
    overhead = ", ".join(f"{item['what']} {mebibytes(item['bytes'])}" for item in memory["overhead"])
    say(f"outside the budgets: {overhead or 'nothing listed'}")
    say(f"process: {mebibytes(process['rss_bytes'])} resident, {mebibytes(process['peak_rss_bytes'])} at most")


def print_transfers(before, after, per_step):
    steps = after["steps"] - before["steps"]
    say(f"\n{steps} steps (a step reads each weight once; the prompt takes one or more)")
    say(f"{'':28}{'before':>12}{'after':>12}{'per step':>12}{'planned':>12}")
    rows = (
        ("read from storage, MiB", "storage", per_step["storage_read_bytes"]),
        ("copied host -> device, MiB", "link", per_step["link_bytes"]),
    )
    for label, key, planned in rows:
        counts = (before[key], after[key], (after[key] - before[key]) / steps, planned)
        say(f"{label:28}" + "".join(f"{count / 2**20:12.2f}" for count in counts))
    for tier in TIERS:
        counts = (before["leases"][tier], after["leases"][tier])
        say(f"{f'leases, home {tier}':28}{counts[0]:12}{counts[1]:12}{(counts[1] - counts[0]) / steps:12.2f}")
    for tier in ("host", "storage"):
        counts = (before[f"stall {tier}"], after[f"stall {tier}"])
        say(
            f"{f'waited for {tier}, s':28}{counts[0]:12.3f}{counts[1]:12.3f}"
            f"{(counts[1] - counts[0]) / steps:12.4f}"
        )


def failures(memory, before, after, usage):
    """What does not hold, one sentence each."""
    wrong = []
    homes = {tier["tier"]: tier["home_bytes"] for tier in memory["tiers"]}
    total = sum(homes.values())
    for tier in TIERS:
        if homes.get(tier, 0) < 0.1 * total:
            wrong.append(f"{tier} is home to {mebibytes(homes.get(tier, 0))} of {mebibytes(total)}: less than 10 %")
    for tier in memory["tiers"]:
        if "budget_bytes" in tier:
            used = sum(tier[f"{kind}_bytes"] for kind in ("weights", "ring", "kv", "scratch"))
            if used > tier["budget_bytes"]:
                wrong.append(f"{tier['tier']} uses {mebibytes(used)} of a budget of {mebibytes(tier['budget_bytes'])}")
    steps = after["steps"] - before["steps"]
    # The first token comes with the prompt's last step, each further one takes a step.
    if steps < usage["completion_tokens"]:
        wrong.append(f"{usage['completion_tokens']} tokens were generated in {steps} steps")
    per_step = memory["per_step"]
    if per_step["storage_read_bytes"] <= 0:
        wrong.append("the plan reads nothing from storage")
    for name, key, planned in (
        ("storage", "storage", per_step["storage_read_bytes"]),
        ("host to device", "link", per_step["link_bytes"]),
    ):
        moved = after[key] - before[key]
        if moved < TOLERANCE * steps * planned:
            wrong.append(
                f"{mebibytes(moved)} were moved from {name} in {steps} steps: the plan says {mebibytes(planned)} a step"
            )
    for tier in TIERS:
        leased = after["leases"][tier] - before["leases"][tier]
        if leased < steps:
            wrong.append(f"groups at home on {tier} were leased {leased} times in {steps} steps")
    return wrong


def run(arguments):
    for path, make in ((arguments.strata, "build"), (arguments.model, "model")):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: run `make {make}` first")
    port = free_port()
    command = [arguments.strata, "serve", arguments.model, *arguments.flags, "--listen", f"{HOST}:{port}"]
    # Nothing is left outside of the target folder.
    command += ["--checksum-directory", os.path.join(TARGET, "demo", "checksums")]
    say("$ " + " ".join(command))
    with Server("strata", command, port, os.path.join(TARGET, "demo", "server.log")) as server:
        server.wait_ready(LOAD_SECONDS)
        say(f"ready on http://{HOST}:{port}")
        try:
            _, before = snapshot(server)
            usage = stream_answer(server)
            memory, after = snapshot(server)
            if after["steps"] <= before["steps"]:
                raise server.problem("/memory counts no steps for the answer")
            print_memory(memory)
            print_transfers(before, after, memory["per_step"])
            wrong = failures(memory, before, after, usage)
        except (KeyError, TypeError) as error:
            raise server.problem(f"/memory or the answer lacks a field: {error!r}") from error
        server.stop(STOP_SECONDS)
        if wrong:
            raise server.problem("the demonstration failed:\n" + "\n".join(f"- {sentence}" for sentence in wrong))
    say(
        "\nEach tier is home to at least a tenth of the weights and took part in every step; "
        "the server stopped with exit code 0."
    )


def main():
    parser = argparse.ArgumentParser(description="Serve a model across three tiers and check what was moved.")
    parser.add_argument("--strata", required=True, help="the executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("flags", nargs="*", help="flags of `strata serve`, after --")
    arguments = parser.parse_args()
    # SIGTERM ends this like an interrupt, so that the server is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        run(arguments)
    except Problem as problem:
        sys.exit(f"\ndemo: {problem}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")


if __name__ == "__main__":
    main()
