#!/usr/bin/env python3
"""Fetch the vocabularies that llama.cpp tests its tokenizers with: 74 MiB, with texts and the ids they must become.

They lie in the source archive of the Python package `llama-cpp-python`, which is checked against its sha256. The files
are put into models/vocabularies/ in one rename, so an interrupted run leaves nothing half done and is simply started
again. Does nothing where the right files are there. llama.cpp's licence is MIT; each vocabulary is that of its model.
Standard library only.
"""

import hashlib
import os
import shutil
import sys
import tarfile

from wheels import ROOT, TARGET, Problem, download, locked, mebibytes, require_free_space, say, sha256_of

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCES = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models"
FILES, BYTES = 49, 77_618_052
# Of what `sha256sum ggml-vocab-*` prints.
LIST_SHA256 = "f94989e10403d3109c67b3386af1cd349e370248be6b65d37e9cf4265ec94eda"
ARCHIVE_BYTES = 76_589_250
FOLDER = os.path.join(ROOT, "models", "vocabularies")


def is_right(folder):
    if not os.path.isdir(folder):
        return False
    names = sorted(os.listdir(folder))
    paths = [os.path.join(folder, name) for name in names]
    if len(names) != FILES or sum(map(os.path.getsize, paths)) != BYTES:
        return False
    lines = (f"{sha256_of(path)}  {name}\n" for path, name in zip(paths, names))
    return hashlib.sha256("".join(lines).encode()).hexdigest() == LIST_SHA256


def unpack(archive, folder):
    with tarfile.open(archive) as members:
        for member in members:
            parent, name = os.path.split(member.name)
            if member.isfile() and parent == SOURCES and name.startswith("ggml-vocab-"):
                with members.extractfile(member) as content, open(os.path.join(folder, name), "wb") as out:
                    shutil.copyfileobj(content, out)


def fetch():
    shown = os.path.relpath(FOLDER)
    if is_right(FOLDER):
        say(f"{shown} is there ({FILES} files, {mebibytes(BYTES)}, sha256 checked)")
        return
    downloads = os.path.join(TARGET, "downloads")
    with locked(downloads):
        if is_right(FOLDER):
            return
        if os.path.exists(FOLDER):
            say(f"{shown} does not hold the expected files: fetching them again")
        # The archive, pip's own copy of it, and what pip unpacks to read the package's metadata.
        require_free_space(downloads, 8 * ARCHIVE_BYTES, "the download")
        archive = download(PACKAGE, VERSION, downloads, source=True)
        found = sha256_of(archive)
        if found != SHA256:
            os.remove(archive)
            raise Problem(f"{PACKAGE} {VERSION} has sha256 {found}, not {SHA256}: it was not kept; try again")
        partial = FOLDER + ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
        try:
            unpack(archive, partial)
            if not is_right(partial):
                raise Problem(f"{PACKAGE} {VERSION} does not hold the expected vocabularies")
            shutil.rmtree(FOLDER, ignore_errors=True)
            os.rename(partial, FOLDER)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        os.remove(archive)
    say(f"wrote {shown} ({FILES} files, {mebibytes(BYTES)}, sha256 checked)")


def main():
    try:
        fetch()
    except (Problem, OSError, tarfile.TarError) as problem:
        sys.exit(f"fetch_vocabularies: {problem}")
    except KeyboardInterrupt:
        sys.exit("fetch_vocabularies: interrupted; start it again to go on")


if __name__ == "__main__":
    main()
