"""Choose the files of a text that are held out, so that copies and files from one template stay on one side.

Files that share much text are one group, and a group is trained on or held out as a whole. Two groups share much text
if one piece of `COPIED` bytes stands in both, or if a fifth of the pieces of `SHORT` bytes of a file in one of them
stand in the other. The comment at the top of a file does not count, because a licence does not make two files alike.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

COPIED, SHORT = 256, 64
LIKE = 1 / 5  # share of a file's short pieces that make it like a group
COMMON = 100  # a short piece in more groups than this is an idiom, which says nothing about any two of them
HELD_OUT = 1 / 14
# Pieces of a text with more bytes are searched in several passes, each for a part of the pieces, so that the memory
# stays below half a gigabyte.
PASS_BYTES = 128_000_000

# Comments of common languages, and the lines of a text, of which long ones are cut.
_COMMENTS = re.compile(rb"\s*(?:(?:#|//|--|;|%)[^\n]*\s*|/\*(?s:.*?)\*/\s*|<!--(?s:.*?)-->\s*)*")
_LINE = re.compile(rb"[^\n]{1,%d}\n?" % COPIED)


def held_out_among(sizes: Mapping[str, int], read: Callable[[str], bytes]) -> set[str]:
    """Return the names of the files that are held out: about a 14th of the bytes, in whole groups of files.

    The hash of a group's first name decides, so another file does not change the side of a group that it does not
    belong to. The largest group is never held out, and one group always is; of a single group, no file is held out.

    Args:
        sizes: bytes of each file, by name.
        read: returns the content of the file with a name.
    """
    groups = groups_among(sizes, read)
    others = sorted(groups, key=lambda group: (sum(map(sizes.__getitem__, group)), group))[:-1]
    first = min((group[0] for group in others), key=place_of, default=None)
    return {name for group in others if group[0] == first or place_of(group[0]) < HELD_OUT for name in group}


def place_of(name: str) -> float:
    """Return a pseudo-random number from 0 to 1 that depends only on a name."""
    return int.from_bytes(hashlib.sha256(b"held out " + os.fsencode(name)).digest()[:8]) / 2**64


def groups_among(sizes: Mapping[str, int], read: Callable[[str], bytes]) -> list[list[str]]:
    """Return the names of the files in groups that share much text; each group is sorted, and so are the groups.

    Args:
        sizes: bytes of each file, by name.
        read: returns the content of the file with a name.
    """
    leader = {name: name for name in sizes}

    def group_of(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    def join(one: str, other: str) -> None:
        one, other = sorted((group_of(one), group_of(other)))
        leader[other] = one

    passes = 1 + sum(sizes.values()) // PASS_BYTES
    for number in range(passes):
        first: dict[int, str] = {}
        for name in sizes:
            for piece in _pieces(read(name), COPIED):
                if piece % passes == number and (other := first.setdefault(piece, name)) is not name:
                    join(other, name)
    del first
    num_pieces: Counter[str] = Counter()
    num_in: Counter[tuple[str, str]] = Counter()  # (file, another group): number of the file's pieces in that group
    for number in range(passes):
        for names in _sharing(sizes, read, num_pieces, number, passes):
            groups = set(map(group_of, names))
            if 1 < len(groups) <= COMMON:
                num_in.update((name, group) for name in names for group in groups if group != group_of(name))
    for (name, group), num_shared in num_in.items():
        if num_shared >= LIKE * num_pieces[name]:
            join(name, group)
    found: dict[str, list[str]] = {}
    for name in sorted(sizes):
        found.setdefault(group_of(name), []).append(name)
    return sorted(found.values())


def _sharing(
    names: Mapping[str, int], read: Callable[[str], bytes], num_pieces: Counter[str], number: int, passes: int
) -> list[list[str]]:
    """Return the files that contain a short piece, for each shared piece of a pass; count all pieces of each file."""
    first: dict[int, str] = {}
    found: dict[int, list[str]] = {}
    for name in names:
        pieces = {piece for piece in _pieces(read(name), SHORT) if piece % passes == number}
        num_pieces[name] += len(pieces)
        for piece in pieces:
            if (other := first.setdefault(piece, name)) is not name:
                found.setdefault(piece, [other]).append(name)
    return list(found.values())


def _pieces(content: bytes, size: int) -> Iterator[int]:
    """Yield a hash of the `size` bytes from the start of each line on, which is the same in this process only."""
    start = match.end() if (match := _COMMENTS.match(content)) else 0
    start = start if start < len(content) else 0
    yield hash(content[start : start + size])  # of a short file, the whole content
    for line in _LINE.finditer(content, start):
        if line.start() + size > len(content):
            return
        yield hash(content[line.start() : line.start() + size])
