"""Run strata and its peers in turns on one file. Used by peers.py, which says which rows there are.

strata and llama.cpp are one process for each round: it loads the file, warms up, measures, prints JSON and ends. So
nothing of one spins, or is left in memory, while another is measured. mistral.rs, which loads slowly, stays for a row.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from build_peers import MISTRAL
from programs import LIMIT_SECONDS, Programs
from wheels import Problem, say

MISTRAL_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_mistral.py")
# Tokens of the run before the first counted round; it is there for the page cache.
WARM_UP_TOKENS = 4
# llama-bench loads the file once for all lengths that it is given: this one comes first and touches all the weights,
# in place of its own warm-up, which repeats the whole measurement.
LLAMA_WARM_UP = {"prompt": 16, "decode": 4}


@dataclass
class Row:
    """One race: what is asked, of whom, and what strata should reach."""

    name: str
    work: str
    model: str
    kind: str = "decode"
    tokens: int = 64
    sequences: int = 1
    # Positions of each sequence that are filled before the first token that counts.
    depth: int = 0
    peers: tuple = ("llama.cpp",)
    # Share of the memory's limit to reach; 0 where decode is not bound by it.
    limit_bar: float = 0
    # Multiple of the best peer to reach.
    peer_bar: float = 0
    # Where this share of the memory's limit is less than `peer_bar` times the peer, it is enough.
    peer_bar_of_limit: float = 0


class Competitors(Programs):
    """How each program is asked."""

    def __init__(self, strata, threads, prefix, log):
        super().__init__(strata, log)
        self.threads = str(threads)
        self.prefix = prefix
        self.llama_folder = self.mistral_folder = None

    @contextlib.contextmanager
    def of(self, row, model):
        """{name: function of (row, model, tokens)} that gives an object with `tokens_per_second`"""
        chosen = {"strata": self._strata}
        if "llama.cpp" in row.peers:
            bench = self._llama_bench if row.sequences == 1 else self._llama_batched
            chosen["llama.cpp, repacked"] = lambda *task: bench(*task, repack=True)
            chosen["llama.cpp, as in the file"] = lambda *task: bench(*task, repack=False)
        if "mistral.rs" in row.peers:
            with self._mistral_server(model) as path:
                command = [sys.executable, MISTRAL_PROGRAM, "ask", path]
                # The server computes: the prefix is before it, not before the client.
                chosen[f"mistral.rs {MISTRAL[1]}"] = lambda _row, _model, tokens: self.figures(
                    [*command, str(tokens)], "tokens_per_second"
                )
                yield chosen
        else:
            yield chosen

    def _strata(self, row, model, tokens):
        command = [self.strata, "bench", row.kind, model, "--threads", self.threads, "--tokens", str(tokens)]
        # In huge pages, whatever pages the file is cached in.
        command += ["--copy"]
        if row.kind == "decode":
            command += ["--sequences", str(row.sequences), "--depth", str(row.depth)]
        return self.figures([*self.prefix, *command, "--rounds", "1", "--json"], "tokens_per_second")

    def _llama_bench(self, row, model, tokens, repack):
        lengths = f"{LLAMA_WARM_UP[row.kind]},{tokens}"
        prompts, generated = (lengths, "0") if row.kind == "prompt" else ("0", lengths)
        command = [os.path.join(self.llama_folder, "llama-bench"), "-m", model, "-t", self.threads, "-ngl", "0"]
        command += ["-p", prompts, "-n", generated, "-r", "1", "--no-warmup"]
        command += ["--repack", str(int(repack)), "-o", "json"]
        # In the order in which the lengths were given.
        last = self.figures([*self.prefix, *command], "avg_ts", opening="[")
        return {"tokens_per_second": last["avg_ts"]}

    def _llama_batched(self, row, model, tokens, repack):
        context = row.sequences * (row.depth + tokens)
        command = [os.path.join(self.llama_folder, "llama-batched-bench"), "-m", model, "-ngl", "0"]
        command += ["-t", self.threads, "-tb", self.threads, "-c", str(context), "-npp", str(row.depth)]
        command += ["-ntg", str(tokens), "-npl", str(row.sequences), "--output-format", "jsonl"]
        command += [] if repack else ["--no-repack"]
        answer = self.figures([*self.prefix, *command], "speed_tg")
        return {"tokens_per_second": answer["speed_tg"]}

    @contextlib.contextmanager
    def _mistral_server(self, model):
        """Gives the socket on which mistral.rs answers, once it has loaded the file."""
        with tempfile.TemporaryDirectory(prefix="peers-") as folder, open(self.log, "a") as log:
            path = os.path.join(folder, "socket")
            command = [*self.prefix, sys.executable, MISTRAL_PROGRAM, "serve", path, model, self.threads]
            environment = dict(os.environ, PYTHONPATH=self.mistral_folder)
            say("  mistral.rs loads the file")
            server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
            try:
                end = time.monotonic() + LIMIT_SECONDS
                while not os.path.exists(path):
                    if server.poll() is not None or time.monotonic() > end:
                        raise Problem(f"mistral.rs could not load {os.path.basename(model)}: see {self.log}")
                    time.sleep(0.2)
                yield path
            finally:
                server.kill()
                server.wait()
                server.stdin.close()

def race(row, model, competitors, rounds):
    """{name: {"rounds": [tokens/s]}}; of strata also the rate of RAM and the bytes of a step."""
    with competitors.of(row, model) as asked:
        results = {name: {"rounds": []} for name in asked}
        for number in range(-1, rounds):
            shown = []
            for name in list(asked) if number % 2 == 0 else list(asked)[::-1]:
                answer = asked[name](row, model, row.tokens if number >= 0 else min(row.tokens, WARM_UP_TOKENS))
                shown.append(f"{name} {answer['tokens_per_second']:.2f}")
                if number >= 0:
                    _add(results[name], answer)
            say(f"  {'warm-up' if number < 0 else f'round {number + 1}'}: {'; '.join(shown)}")
    return results


def _add(result, answer):
    result["rounds"].append(answer["tokens_per_second"])
    # What only strata tells.
    if "bytes_per_step" in answer:
        result["bytes_per_step"] = answer["bytes_per_step"]
        result["instruction_set"] = answer["instruction_set"]
        result.setdefault("ram_read_bytes_per_second", []).append(answer["ram_read_bytes_per_second"])
