"""Run strata and its peers in turns on one file. Used by peers.py, which says which rows there are.

strata and llama.cpp are one process for each round: it loads the file, warms up, measures, prints JSON and ends. So
nothing of one spins, or is left in memory, while another is measured. mistral.rs, which loads slowly, stays for a row.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from build_peers import MISTRAL
from wheels import Problem, say

# The longest single measurement and the slowest load are minutes on a slow machine.
LIMIT_SECONDS = 1200
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


class Competitors:
    """How each program is asked. Everything that a program says beside its figures goes to the log."""

    def __init__(self, strata, threads, prefix, log):
        self.strata = strata
        self.threads = str(threads)
        self.prefix = prefix
        self.llama_folder = self.mistral_folder = None
        self.log = log
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "w"):
            pass

    def run(self, *arguments):
        """Let strata do something that is not measured."""
        self._output([self.strata, *arguments])

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
                chosen[f"mistral.rs {MISTRAL[1]}"] = lambda _row, _model, tokens: self._figures_of(
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
        return self._figures_of([*self.prefix, *command, "--rounds", "1", "--json"], "tokens_per_second")

    def _llama_bench(self, row, model, tokens, repack):
        lengths = f"{LLAMA_WARM_UP[row.kind]},{tokens}"
        prompts, generated = (lengths, "0") if row.kind == "prompt" else ("0", lengths)
        command = [os.path.join(self.llama_folder, "llama-bench"), "-m", model, "-t", self.threads, "-ngl", "0"]
        command += ["-p", prompts, "-n", generated, "-r", "1", "--no-warmup"]
        command += ["--repack", str(int(repack)), "-o", "json"]
        # In the order in which the lengths were given.
        last = self._figures_of([*self.prefix, *command], "avg_ts", opening="[")
        return {"tokens_per_second": last["avg_ts"]}

    def _llama_batched(self, row, model, tokens, repack):
        context = row.sequences * (row.depth + tokens)
        command = [os.path.join(self.llama_folder, "llama-batched-bench"), "-m", model, "-ngl", "0"]
        command += ["-t", self.threads, "-tb", self.threads, "-c", str(context), "-npp", str(row.depth)]
        command += ["-ntg", str(tokens), "-npl", str(row.sequences), "--output-format", "jsonl"]
        command += [] if repack else ["--no-repack"]
        answer = self._figures_of([*self.prefix, *command], "speed_tg")
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

    def _figures_of(self, command, rate, opening="{"):
        """The object, or the last of the list, that a program prints; its `rate` is a positive number."""
        output = self._output(command)
        # Some print other lines before it.
        start = 0 if output.startswith(opening) else output.find("\n" + opening) + 1
        try:
            printed = json.JSONDecoder().raw_decode(output[start:])[0]
            figures = printed[-1] if opening == "[" else printed
            if figures[rate] > 0:
                return figures
        except (ValueError, LookupError, TypeError):
            pass
        raise Problem(f"{_shown(command)} printed no rate: see {self.log}")

    def _output(self, command):
        try:
            # On a time-out or an interrupt this ends the process and waits for it.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=LIMIT_SECONDS,
            )
        except FileNotFoundError:
            raise Problem(f"{command[0]} is missing") from None
        except subprocess.TimeoutExpired:
            raise Problem(f"{_shown(command)} took more than {LIMIT_SECONDS} s") from None
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise Problem(f"{_shown(command)} ended with code {done.returncode} ({said[:200]}): see {self.log}")
        return done.stdout


def _shown(command):
    return " ".join([os.path.basename(command[0]), *command[1:3]])


def available_bytes():
    """Memory that is free or can be freed, of the whole machine."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise Problem("/proc/meminfo does not say how much memory is free")


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
