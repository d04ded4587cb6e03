#!/usr/bin/env python3
"""How fast is strata beside llama.cpp, mistral.rs and the memory of this machine, on the same files?

Each row of the table is one race: in each round strata and its peers run one after another on the same file, in an order
that is reversed every other round, so that drift of the machine meets all of them. A process runs alone and computes for
all it is worth; the first round of each row brings the file into the page cache and is not counted. Figures are medians.
The limit of decode is the rate at which plain reads of RAM go, taken by strata in the same rounds with the same threads
and prefetching, over the bytes that a step has to read.

    peers.py --strata target/release/strata --vocabulary models/SmolLM2-135M-Instruct.Q4_1.gguf
    peers.py ... --only 8b-decode q8_0 --rounds 3 --write-table FILE.md

llama.cpp is built for this machine by scripts/build_peers.py. It runs with and without repacking its weights, and the
better of the two counts. Models other than SmolLM2 have the shape of the real ones and random weights. Everything that
is built, written or fetched lies under target/peers. Standard library only.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

from build_peers import PEERS, end_on_sigterm, llama_cpp, mistral_rs  # noqa: E402
from peer_race import Competitors, Row, race  # noqa: E402
from peer_table import assess, write_json, write_markdown, write_text  # noqa: E402
from programs import LIMIT_SECONDS, available_bytes  # noqa: E402
from wheels import ROOT, Problem, locked, require_free_space, say  # noqa: E402

SMALL, LARGE = "smollm2", "llama-3.1-8b"
CARD = "tinyllama-1.1b"
VOCABULARY_SIZE = 49152
# What `quantisation` of the card is set to, and about the size of the file that it gives.
TYPES = {
    "q4_k_m": 700 << 20,
    "q8_0": 1200 << 20,
    "q6_k": 950 << 20,
    "q5_k_m": 820 << 20,
    "q4_0": 680 << 20,
    "q4_1": 740 << 20,
    "q5_0": 800 << 20,
}
LARGE_BYTES = 4900 << 20
# Bytes per second that any drive writes: what bounds the time for a file.
SLOW_WRITES = 50 << 20
BATCH = f"{CARD}-q4_k_m"

ROWS = [
    Row(
        "8b-decode",
        "8B Q4_K_M, decode",
        LARGE,
        tokens=32,
        peers=("mistral.rs",),
        limit_bar=0.85,
        peer_bar=1.5,
        peer_bar_of_limit=0.9,
    ),
    Row("8b-prompt-128", "8B Q4_K_M, prompt of 128", LARGE, kind="prompt", tokens=128, peer_bar=1.4),
    Row("8b-prompt-512", "8B Q4_K_M, prompt of 512", LARGE, kind="prompt", tokens=512, peer_bar=1.6),
    Row("batch-4", "1.1B Q4_K_M, 4 sequences in a step", BATCH, tokens=32, sequences=4, depth=16, peer_bar=2.0),
    Row("batch-8", "1.1B Q4_K_M, 8 sequences in a step", BATCH, tokens=32, sequences=8, depth=16, peer_bar=2.0),
    *(
        Row(kind.replace("_m", ""), f"1.1B {kind.upper()}, decode", f"{CARD}-{kind}", peers=(), limit_bar=0.75)
        for kind in ("q8_0", "q6_k", "q5_k_m", "q4_0", "q4_1", "q5_0")
    ),
    Row("smollm2-decode", "SmolLM2 135M Q4_1, decode", SMALL, peer_bar=1.2),
    Row("smollm2-prompt-128", "SmolLM2 135M Q4_1, prompt of 128", SMALL, kind="prompt", tokens=128, peer_bar=1.2),
    Row("smollm2-prompt-512", "SmolLM2 135M Q4_1, prompt of 512", SMALL, kind="prompt", tokens=512, peer_bar=1.2),
]
# A peer may hold a copy of the weights beside the file's pages, and some of them in a wider form.
MEMORY_PER_FILE_BYTE = 2.5


def synthesised(strata, vocabulary, name, card, bytes_expected):
    """The path of a file of the shape `card` (text of a shape card), written unless it is there."""
    folder = os.path.join(PEERS, "models")
    path, noted = os.path.join(folder, f"{name}.gguf"), os.path.join(folder, f"{name}.toml")
    with locked(folder):
        if os.path.exists(path) and os.path.exists(noted):
            with open(noted) as file:
                if file.read() == card:
                    return path
        require_free_space(folder, bytes_expected + (512 << 20), f"the model {name}")
        say(f"writing {os.path.relpath(path)}")
        for old in (path, noted):
            if os.path.exists(old):
                os.remove(old)
        partial = noted + ".partial"
        with open(partial, "w") as file:
            file.write(card)
        try:
            # Runs at the end of which the file is there in one rename.
            limit_seconds = LIMIT_SECONDS + bytes_expected // SLOW_WRITES
            strata.run("synth", partial, path, "--vocabulary", vocabulary, limit_seconds=limit_seconds)
            os.rename(partial, noted)
        finally:
            # The file's own is left behind where its writer was killed.
            for left in (partial, path + ".partial"):
                if os.path.exists(left):
                    os.remove(left)
    return path


def with_values(card, values):
    """The text of a shape card with other values of some keys."""
    lines = card.split("\n")
    for key, value in values.items():
        places = [index for index, line in enumerate(lines) if line.split("=")[0].strip() == key]
        if len(places) != 1:
            raise Problem(f"the shape card sets {key} {len(places)} times, not once")
        lines[places[0]] = f"{key} = {value}"
    return "\n".join(lines)


def model_file(strata, vocabulary, name):
    if name == SMALL:
        return vocabulary
    card = LARGE if name == LARGE else CARD
    with open(os.path.join(ROOT, "models", f"{card}.toml")) as file:
        text = file.read()
    if card == LARGE:
        return synthesised(strata, vocabulary, name, text, LARGE_BYTES)
    kind = name[len(CARD) + 1 :]
    # SmolLM2's vocabulary is larger than the card's.
    text = with_values(text, {"quantisation": f'"{kind}"', "vocabulary_size": VOCABULARY_SIZE})
    return synthesised(strata, vocabulary, name, text, TYPES[kind])


def chosen_rows(only):
    """The rows whose names begin with one of `only`."""
    for name in only:
        if not any(row.name.startswith(name) for row in ROWS):
            raise Problem(f"no row begins with `{name}`; there are {', '.join(row.name for row in ROWS)}")
    return [row for row in ROWS if not only or any(row.name.startswith(name) for name in only)]


def run(arguments):
    for path in (arguments.strata, arguments.vocabulary):
        if not os.path.isfile(path):
            raise Problem(f"{path} is missing: `make build model` brings it")
    if arguments.rounds < 1 or arguments.threads < 1:
        raise Problem("--rounds and --threads are at least 1")
    rows = chosen_rows(arguments.only)
    needed = {peer for row in rows for peer in row.peers}
    competitors = Competitors(
        os.path.abspath(arguments.strata), arguments.threads, arguments.prefix.split(), os.path.abspath(arguments.log)
    )
    if "llama.cpp" in needed:
        competitors.llama_folder = llama_cpp()
    if "mistral.rs" in needed:
        competitors.mistral_folder = mistral_rs()
    vocabulary = os.path.abspath(arguments.vocabulary)
    # All files first: a full disk shows before hours are spent.
    paths = {row.model: model_file(competitors, vocabulary, row.model) for row in rows}
    results = {}
    for row in rows:
        size = os.path.getsize(paths[row.model])
        if available_bytes() < MEMORY_PER_FILE_BYTE * size:
            raise Problem(
                f"{row.name} needs {MEMORY_PER_FILE_BYTE * size / 1e9:.1f} GB of memory and {available_bytes() / 1e9:.1f} "
                "are free: end other programs, or choose other rows with --only"
            )
        say(f"{row.work} ({os.path.basename(paths[row.model])}, {size / 1e9:.2f} GB)")
        results[row.name] = race(row, paths[row.model], competitors, arguments.rounds)
        lines = [line for done in rows if done.name in results for line in assess(done, results[done.name])]
        # After each row, so that an interrupted run leaves what it has.
        write_json(arguments, results, lines, os.path.join(PEERS, "peers.json"))
    write_text(arguments, results, lines)
    if arguments.write_table:
        write_markdown(arguments, results, lines, arguments.write_table)
        say(f"\nwrote {arguments.write_table}")


def main():
    parser = argparse.ArgumentParser(description="Speed of strata beside llama.cpp, mistral.rs and the memory's rate.")
    parser.add_argument("--strata", required=True, help="the executable")
    parser.add_argument("--vocabulary", required=True, help="SmolLM2's GGUF file: raced with, and lends its vocabulary")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"rows, or how they begin: {names}")
    parser.add_argument("--prefix", default="", metavar="COMMAND", help="put before each measured command: chrt, nice")
    parser.add_argument("--write-table", metavar="PATH", help="also write the table as Markdown")
    parser.add_argument("--log", default=os.path.join(PEERS, "peers.log"), help="where what the programs say goes")
    arguments = parser.parse_args()
    end_on_sigterm()
    try:
        run(arguments)
    except (Problem, OSError) as problem:
        sys.exit(f"\npeers: {problem}")
    except KeyboardInterrupt:
        sys.exit("\npeers: interrupted")


if __name__ == "__main__":
    main()
