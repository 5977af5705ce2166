"""Measure how much of a text's held-out part stands verbatim in its training part.

    python -m benchmarks.text_split stdlib site                    # the figures in docs/workloads.md
    python -m benchmarks.text_split stdlib --without 20            # also what changes if one of 20 files is removed

For comparison, the same is measured with single files held out by the hash of their names.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection
from pathlib import Path
from typing import cast

import numpy as np

from bench.core import spec
from bench.datasets.corpus import Corpus
from bench.datasets.split import HELD_OUT, held_out_among, place_of
from bench.datasets.text import TextDataset

BLOCK = 4_000_000  # bytes that are hashed at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--piece", type=int, default=64, help="bytes of a piece, a power of two")
    parser.add_argument("--without", type=int, default=0, help="number of files, of which each is removed once")
    arguments = parser.parse_args()
    for name in arguments.datasets:
        corpus = cast(TextDataset, spec.build("datasets", name)).corpus
        single = {file for file in corpus.sizes if place_of(file) < HELD_OUT}
        for rule, held_out in (("single files", single), ("groups of files", corpus.held_out)):
            report(corpus, f"{name}, {rule}", held_out, arguments.piece)
        every = max(1, len(corpus.sizes) // max(1, arguments.without))
        for removed in list(corpus.sizes)[::every][: arguments.without]:
            sizes = {file: size for file, size in corpus.sizes.items() if file != removed}
            changed = held_out_among(sizes, functools.partial(read, corpus.folder)) ^ (corpus.held_out - {removed})
            share = sum(map(sizes.__getitem__, changed)) / sum(sizes.values())
            print(f"{name} without {removed}: {share:.2%} of the bytes change sides")


def report(corpus: Corpus, what: str, held_out: Collection[str], piece: int) -> None:
    """Print the share of held-out pieces that stand in the training text, and the files with most of them."""
    contents = {name: read(corpus.folder, name) for name in corpus.sizes}
    tested = {name: hashes(contents[name], piece) for name in sorted(held_out)}
    known = np.unique(np.concatenate(list(tested.values())))
    found = np.zeros(len(known), bool)
    for name, content in contents.items():
        if name not in held_out:
            for start in range(0, len(content), BLOCK):
                here = hashes(content[start : start + BLOCK + piece - 1], piece)
                place = np.searchsorted(known, here) % len(known)
                found[place[known[place] == here]] = True
    counts = {name: int(found[np.searchsorted(known, of_file)].sum()) for name, of_file in tested.items()}
    total = sum(map(len, tested.values()))
    most = ", ".join(f"{name} {counts[name] / total:.2%}" for name in sorted(counts, key=counts.__getitem__)[:-6:-1])
    nbytes = sum(map(corpus.sizes.__getitem__, held_out))
    print(
        f"{what}: {nbytes:,} of {sum(corpus.sizes.values()):,} bytes held out; of their pieces of {piece} bytes, "
        f"{sum(counts.values()) / total:.2%} stand in the training text ({most})"
    )


def read(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def hashes(content: bytes, size: int) -> np.ndarray:
    """Return a 64-bit hash of the piece of `size` bytes at each offset, uint64 [len(content) - size + 1]."""
    with np.errstate(over="ignore"):
        value = (np.frombuffer(content, np.uint8).astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
        value ^= value >> np.uint64(29)
        factor, width = np.uint64(0x9E3779B97F4A7C15), 1
        while width < size:
            value = value[:-width] * factor + value[width:]
            factor, width = factor * factor, 2 * width
        return value ^ value >> np.uint64(32)


if __name__ == "__main__":
    main()
