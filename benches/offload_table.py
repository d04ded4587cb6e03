"""Judge what offload.py measured, print it, and write it down. What is judged is a list of dicts with raw figures, a
line each; a table says how their cells are shown."""

import datetime
import json
import os
import platform
import statistics
from dataclasses import dataclass

from build_peers import LLAMA
from peer_table import figure, processor
from wheels import mebibytes, say

# What of a budget is not weights or KV cache: rings, scratch and alignment.
ALLOWED_BYTES = 64 << 20
READING_BAR = 0.95
LOADING_BAR = 0.9
LIMIT_BAR = 0.9
# Multiple of llama.cpp to reach under each cap.
CAPPED_BARS = {2560 << 20: 1.9, 4096 << 20: 6.0}
PREDICTION_BAR = 0.15
# Of single rows; storage drifts more than processors do.
STORAGE_PREDICTION_BAR = 0.25
NOT_SHOWN = "-"


@dataclass
class Table:
    title: str
    # Heading and how the cell of a line is shown. Those of `words` stand left.
    columns: tuple
    words: tuple
    lines: list
    notes: list

    def cells(self):
        return [[show(line) for _, show in self.columns] for line in self.lines]

    def headings(self):
        return [heading for heading, _ in self.columns]

    def text(self):
        rows = [self.headings(), *self.cells()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        text = [f"\n{self.title}"]
        for cells in rows:
            padded = [
                cell.ljust(width) if heading in self.words else cell.rjust(width)
                for heading, cell, width in zip(self.headings(), cells, widths)
            ]
            text.append("  ".join(padded).rstrip())
        return "\n".join([*text, *(f"  {note}" for note in self.notes)])

    def markdown(self):
        rules = ["---" if heading in self.words else "--:" for heading in self.headings()]
        text = [f"## {self.title}", ""]
        text += ["| " + " | ".join(row) + " |" for row in [self.headings(), rules, *self.cells()]]
        return "\n".join([*text, "", *(f"- {note}" for note in self.notes)])


def _judged(line, ours, theirs, bar):
    """With ours over theirs, and whether that is enough; no bar asks for nothing."""
    ratio = ours / theirs
    return {**line, "ratio": ratio, "bar": bar, "met": ratio >= bar if bar else None}


def _met(line):
    return {True: "yes", False: "no", None: NOT_SHOWN}[line["met"]]


RATIO = (
    ("ratio", lambda line: f"{line['ratio']:.2f}"),
    ("bar", lambda line: f"{line['bar']:.2f}" if line["bar"] else NOT_SHOWN),
    ("met", _met),
)


def step_limit(touched_bytes, memory, rate, computing_seconds):
    """Seconds of the fastest step, and what bounds it. `memory` is what the plan says of the host."""
    for_weights = memory["budget_bytes"] - memory["kv_bytes"] - ALLOWED_BYTES
    reading_seconds = max(0, touched_bytes - for_weights) / rate
    bound = "storage" if reading_seconds > computing_seconds else "computing"
    return max(reading_seconds, computing_seconds), bound


def _beside_fio(title, work, rates, setting, fio_rates, bar, notes):
    """A table of one line: bytes per second of strata and of fio."""
    ours, theirs = statistics.median(rates), statistics.median(fio_rates)
    line = {"strata": ours, "beside": f"fio, {setting}", "theirs": theirs}
    return Table(
        title,
        (
            ("work", lambda _: work),
            ("strata", lambda line: f"{line['strata'] / 1e9:.2f} GB/s"),
            ("beside", lambda line: line["beside"]),
            ("its figure", lambda line: f"{line['theirs'] / 1e9:.2f} GB/s"),
            *RATIO,
        ),
        ("work", "beside", "met"),
        [_judged(line, ours, theirs, bar)],
        notes,
    )


def _reading(result):
    medians = [statistics.median(rates) for rates in result["tried"].values()]
    note = (
        f"fio tried {len(medians)} settings of size x depth before, which had medians of {min(medians) / 1e9:.2f} to "
        f"{max(medians) / 1e9:.2f} GB/s, and raced with the best of them"
    )
    work, best = f"reads of the file, {result['how']}", result["best"]
    return _beside_fio("Reading", work, result["strata"], best, result["fio"], READING_BAR, [note])


def _loading(offload, result):
    work, best = "all weights into memory", offload.fio.best()
    given = result["memory"]
    notes = [
        "from before the memory is taken until the model can compute; checksums are recorded or compared meanwhile",
        f"just before, as much memory was taken and given back, at {min(given) / 1e9:.2f} to {max(given) / 1e9:.2f} GB/s: a "
        "virtual machine waits for its host where it touches memory for the first time",
    ]
    return _beside_fio("Loading", work, result["strata"], best, result["fio"], LOADING_BAR, notes)


def _steps(offload, results):
    lines = []
    for work in offload.works:
        result = results[work.name]
        rate = statistics.median(result["fio"])
        computing = statistics.median(map(work.seconds, result["resident"]))
        # All in one step, as wide as the prompt; a plan with little memory may make narrower ones.
        touched = result["resident"][0]["bytes_per_step"]
        for percent in offload.budgets:
            figures = result[f"{percent} %"]
            memory = figures[0]["memory"]["host"]
            seconds = statistics.median(map(work.seconds, figures))
            limit, bound = step_limit(touched, memory, rate, computing)
            line = {
                "work": work.shown,
                "percent": percent,
                "memory": memory,
                "rate": rate,
                "limit_seconds": limit,
                "bound": bound,
                "seconds": seconds,
            }
            lines.append(_judged(line, limit, seconds, LIMIT_BAR))
    return Table(
        "A step with memory for a part of the weights",
        (
            ("work", lambda line: line["work"]),
            ("weights", lambda line: f"{line['percent']} %"),
            ("budget", lambda line: mebibytes(line["memory"]["budget_bytes"])),
            ("KV", lambda line: mebibytes(line["memory"]["kv_bytes"])),
            ("fio", lambda line: f"{line['rate'] / 1e9:.2f} GB/s"),
            ("limit", lambda line: f"{1e3 * line['limit_seconds']:.0f} ms"),
            ("by", lambda line: line["bound"]),
            ("step", lambda line: f"{1e3 * line['seconds']:.0f} ms"),
            *RATIO,
        ),
        ("work", "by", "met"),
        lines,
        ["weights: the budget in percent of them; a prompt is taken as one step"],
    )


def _capped(results):
    lines, notes = [], []
    for cap, result in ((int(cap), result) for cap, result in results.items()):
        rates = {
            name: statistics.median(figures["tokens_per_second"] for figures in result[name])
            for name in ("strata", "llama.cpp", "resident")
        }
        memory = result["strata"][0]["memory"]["host"]
        limit, bound = step_limit(
            result["resident"][0]["bytes_per_step"], memory, statistics.median(result["fio"]), 1 / rates["resident"]
        )
        work = f"decode in {mebibytes(cap)}"
        beside_llama = {"work": work, "strata": rates["strata"], "beside": "llama.cpp", "theirs": rates["llama.cpp"]}
        lines.append(_judged(beside_llama, rates["strata"], rates["llama.cpp"], CAPPED_BARS.get(cap)))
        beside_limit = {"work": work, "strata": rates["strata"], "beside": f"limit, by {bound}", "theirs": 1 / limit}
        lines.append(_judged(beside_limit, rates["strata"], 1 / limit, LIMIT_BAR))
        held = {
            name: mebibytes(max(figures["anonymous_peak_bytes"] for figures in result[name]))
            for name in ("strata", "llama.cpp")
        }
        notes.append(
            f"in {mebibytes(cap)} strata chose a budget of {mebibytes(memory['budget_bytes'])} and held at most "
            f"{held['strata']}, with the memory whose rate its bench measures; llama.cpp held {held['llama.cpp']} beside the "
            "page cache; nothing was killed"
        )
    return Table(
        "Decode under a memory cap, page cache included",
        (
            ("work", lambda line: line["work"]),
            ("strata", lambda line: f"{figure(line['strata'])} tokens/s"),
            ("beside", lambda line: line["beside"]),
            ("its figure", lambda line: f"{figure(line['theirs'])} tokens/s"),
            *RATIO,
        ),
        ("work", "beside", "met"),
        lines,
        notes,
    )


def _bound(figures):
    """What a step was busy with for longest."""
    moved = figures["moved_per_step"]
    busy = {
        "storage": moved["storage_busy_seconds"],
        "link": moved["link_busy_seconds"],
        "computing": figures["step_seconds"] - moved["stall_seconds"],
    }
    return max(busy, key=busy.get)


def _predicted(offload, results):
    measured = {}
    for work in offload.works:
        for percent in offload.budgets if "steps" in results else ():
            measured[f"{work.shown}; cpu, {percent} %"] = (work, results["steps"][work.name][f"{percent} %"])
        for name, figures in results["predicted"].items():
            if name.startswith(f"{work.shown};"):
                measured[name] = (work, figures)
    lines = []
    for name, (work, figures) in measured.items():
        if not all("predicted_step_seconds" in one for one in figures):
            continue
        # Of all steps of a prompt: from newer rates the plan may have made them of another width. So each prediction is
        # held against what was measured right after it.
        taken = list(map(work.seconds, figures))
        predictions = [
            one["predicted_step_seconds"] * (one["steps_per_round"] if work.kind == "prompt" else 1) for one in figures
        ]
        seconds, predicted = statistics.median(taken), statistics.median(predictions)
        bound = _bound(figures[0])
        bar = STORAGE_PREDICTION_BAR if bound == "storage" else PREDICTION_BAR
        error = statistics.median(one / other - 1 for one, other in zip(predictions, taken))
        line = {"work": name, "bound": bound, "predicted_seconds": predicted, "seconds": seconds, "error": error}
        lines.append({**line, "bar": bar, "met": abs(error) <= bar})
    notes = ["the strata that was measured prints no prediction"]
    if lines:
        median = statistics.median(abs(line["error"]) for line in lines)
        met = "met" if median <= PREDICTION_BAR else "not met"
        notes = [
            f"median of the errors: {100 * median:.0f} %; bar {100 * PREDICTION_BAR:.0f} %, {met}",
            "a step of all sequences, or all steps of a prompt; an error is the median of those of the rounds, each of a "
            "prediction from rates that were less than two minutes old",
        ]
    return Table(
        "Predicted beside achieved",
        (
            ("work", lambda line: line["work"]),
            ("bound by", lambda line: line["bound"]),
            ("predicted", lambda line: f"{1e3 * line['predicted_seconds']:.0f} ms"),
            ("took", lambda line: f"{1e3 * line['seconds']:.0f} ms"),
            ("error", lambda line: f"{100 * line['error']:+.0f} %"),
            ("bar", lambda line: f"{100 * line['bar']:.0f} %"),
            ("met", _met),
        ),
        ("work", "bound by", "met"),
        lines,
        notes,
    )


def _tables(offload, results):
    made = {
        "reading": lambda: _reading(results["reading"]),
        "loading": lambda: _loading(offload, results["loading"]),
        "steps": lambda: _steps(offload, results["steps"]),
        "capped": lambda: _capped(results["capped"]),
        "predicted": lambda: _predicted(offload, results),
    }
    return {name: make() for name, make in made.items() if name in results}


def about(arguments, offload, facts):
    """What the figures are of, as lines."""
    today = datetime.date.today().isoformat()
    lines = [
        f"{today}; {processor()}; Linux {platform.release()}",
        f"{facts['strata']}; {facts['fio']}; llama.cpp: the sources in {LLAMA[0]} {LLAMA[1]}, built for this machine",
        f"{os.path.basename(offload.model)}, {facts['weight_bytes'] / 1e9:.2f} GB of weights; {arguments.threads} threads",
        f"medians of {arguments.rounds} rounds",
    ]
    if any(offload.fio.rates.values()):
        best = offload.fio.rates[offload.fio.best()]
        lines.append(f"fio, {offload.fio.best()}: {min(best) / 1e9:.2f} to {max(best) / 1e9:.2f} GB/s over the whole run")
    return lines + ["a quick run, to see that all of it works: its figures say little"] * arguments.quick


def report(arguments, offload, facts, results, path):
    """Prints the tables of the section that was measured last, and writes all down."""
    tables = _tables(offload, results)
    say(list(tables.values())[-1].text() + "\n")
    document = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor(),
        "kernel": platform.release(),
        "llama.cpp": f"{LLAMA[0]} {LLAMA[1]}",
        **facts,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "tables": {name: table.lines for name, table in tables.items()},
        "results": results,
    }
    write(path, json.dumps(document, indent=2))
    if arguments.write_table:
        text = ["# strata with little memory", "", "Written by `benches/offload.py`, which says how it measures.", ""]
        text += [f"- {fact}" for fact in about(arguments, offload, facts)]
        for table in tables.values():
            text += ["", table.markdown()]
        write(arguments.write_table, "\n".join(text) + "\n")


def write(path, text):
    partial = path + ".partial"
    with open(partial, "w") as out:
        out.write(text)
    os.replace(partial, path)
