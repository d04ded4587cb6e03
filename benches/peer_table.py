"""Judge the races of peers.py and print them. A line of the table is (work, strata, peer, peer's figure, bar)."""

import datetime
import json
import os
import statistics
from dataclasses import asdict, dataclass

from build_peers import LLAMA, MISTRAL
from wheels import say

PEERS_SHOWN = (
    f"llama.cpp: the sources in {LLAMA[0]} {LLAMA[1]}, built for this machine; mistral.rs: {MISTRAL[0]} {MISTRAL[1]}"
)
HEADINGS = ("work", "strata", "beside", "its figure", "ratio", "bar", "met")


@dataclass
class Line:
    work: str
    strata: float
    beside: str
    theirs: float
    bar: float

    @property
    def ratio(self):
        return self.strata / self.theirs

    @property
    def met(self):
        return self.ratio >= self.bar

    def cells(self):
        met = "yes" if self.met else "no"
        return (
            self.work,
            figure(self.strata),
            self.beside,
            figure(self.theirs),
            f"{self.ratio:.2f}",
            f"{self.bar:.2f}",
            met,
        )


def memory_rate(results):
    """The median of the row's rounds, each of which tells the median of its passes over memory.

    What is held against it is a median of the same rounds. The best pass of minutes would be a rate that nothing keeps
    up where others use the same memory.
    """
    return statistics.median(results["strata"]["ram_read_bytes_per_second"])


def assess(row, results):
    """The lines of one row: beside the memory's limit, beside the best peer, or both."""
    ours = statistics.median(results["strata"]["rounds"])
    memory = memory_rate(results)
    limit = memory / results["strata"]["bytes_per_step"] * row.sequences
    lines = []
    if row.limit_bar:
        lines.append(Line(row.work, ours, f"RAM, {memory / 1e9:.1f} GB/s", limit, row.limit_bar))
    others = {name: statistics.median(result["rounds"]) for name, result in results.items() if name != "strata"}
    if others:
        best = max(others, key=others.get)
        bar = row.peer_bar
        if row.peer_bar_of_limit:
            bar = min(bar, row.peer_bar_of_limit * limit / others[best])
        lines.append(Line(row.work, ours, best, others[best], bar))
    return lines


def figure(value):
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def processor():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0]}, {len(names)} processors" if names else "unknown processor"


def _facts(arguments, results):
    rates = [memory_rate(result) for result in results.values()]
    sets = sorted({result["strata"]["instruction_set"] for result in results.values()})
    today = datetime.date.today().isoformat()
    return [
        f"{today}; {processor()}; strata computes with {', '.join(sets)}",
        f"RAM is read at {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GB/s; {arguments.threads} threads; medians of {arguments.rounds} rounds; tokens/s",
        PEERS_SHOWN,
    ]


def write_text(arguments, results, lines):
    rows = [HEADINGS, *(line.cells() for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    say("\n" + "\n".join(_facts(arguments, results)) + "\n")
    for cells in rows:
        padded = [
            cell.ljust(width) if index in (0, 2) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths))
        ]
        say("  ".join(padded).rstrip())
    say("\nspread of the rounds")
    for name, result in results.items():
        spreads = [f"{who} {figure(min(of['rounds']))} to {figure(max(of['rounds']))}" for who, of in result.items()]
        say(f"  {name}: {'; '.join(spreads)}")


def write_markdown(arguments, results, lines, path):
    text = ["# strata beside its peers", "", "Written by `benches/peers.py`, which says how it measures.", ""]
    text += [f"- {fact}" for fact in _facts(arguments, results)]
    text += ["", "| " + " | ".join(HEADINGS) + " |", "|---|--:|---|--:|--:|--:|---|"]
    text += ["| " + " | ".join(line.cells()) + " |" for line in lines]
    partial = path + ".partial"
    with open(partial, "w") as out:
        out.write("\n".join(text) + "\n")
    os.replace(partial, path)


def write_json(arguments, results, lines, path):
    document = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "peers": {"llama.cpp": f"{LLAMA[0]} {LLAMA[1]}", "mistral.rs": f"{MISTRAL[0]} {MISTRAL[1]}"},
        "table": [{**asdict(line), "ratio": line.ratio, "met": line.met} for line in lines],
        "results": results,
    }
    partial = path + ".partial"
    with open(partial, "w") as out:
        json.dump(document, out, indent=2)
    os.replace(partial, path)
