"""Read a file of trace events: plain or compressed JSON that may be damaged, cut off, or not a trace at all.

The file is untrusted: its unpacked size is limited, and each event is decoded when it is asked for, so that only the
text is in memory. An end that was cut off costs only the events after it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench.core.errors import UsageError
from bench.core.files import check_regular
from bench.core.units import format_bytes

HOW = "record one with torch.profiler and export_chrome_trace"
_PACKED = b"\x1f\x8b"
_GAP = re.compile(r"[\s,]*")


def read_events(path: Path, limit: int, take: Callable[[dict[str, Any]], object]) -> tuple[dict[str, Any], bool]:
    """Call `take` with every event of a file; return the other entries of the file, and whether the file is whole.

    Args:
        path: the file.
        limit: most bytes that the file may have after unpacking.
        take: called with each event.

    Raises:
        UsageError: the file cannot be read, is too large, or holds no events.
    """
    text, is_whole = _text(path, limit)
    about: dict[str, Any] = {}
    num_events = 0
    try:
        for key, value in _entries(text):
            if key is not None:
                about[key] = value
            elif isinstance(value, dict):
                num_events += 1
                take(value)
    except (ValueError, RecursionError):
        is_whole = False
    if not num_events:
        raise UsageError(_what_it_is(path, text, about))
    return about, is_whole


def looks_like_one(path: Path) -> bool:
    """Return True if a file in a folder begins as a trace does."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    if head[:2] == _PACKED:
        try:
            head = zlib.decompressobj(31).decompress(head, 1 << 16)
        except zlib.error:
            return False
    return head.lstrip()[:1] in (b"{", b"[") and (b'"traceEvents"' in head or b'"schemaVersion"' in head)


def _text(path: Path, limit: int) -> tuple[str, bool]:
    """Return a file's unpacked text, and whether the compressed file is whole."""
    check_regular(path)
    parts, size, is_whole = [], 0, True
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _PACKED
            file.seek(0)
            for part in _unpacked(file) if is_packed else iter(lambda: file.read(1 << 20), b""):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise UsageError(
                        f"{path} is larger than {format_bytes(limit)} unpacked; record fewer steps, or give --max-size"
                    )
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        is_whole = False
    return b"".join(parts).decode(errors="replace"), is_whole


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file that was compressed with gzip, in parts of at most 1 MiB.

    Raises:
        EOFError: the file ends too early; all that it holds was yielded before.
        zlib.error: the file is damaged.
    """
    unpacker = zlib.decompressobj(wbits=31)
    while packed := unpacker.unconsumed_tail or unpacker.unused_data or file.read(1 << 16):
        if unpacker.eof:  # a file may consist of several compressed parts
            unpacker = zlib.decompressobj(wbits=31)
        yield unpacker.decompress(packed, 1 << 20)
    if not unpacker.eof:
        raise EOFError


def _entries(text: str) -> Iterator[tuple[str | None, Any]]:
    """Yield (None, event) for each event, and (key, value) for each other entry of the outermost object.

    Raises:
        ValueError: the text is not JSON from some place on.
    """
    decode = json.JSONDecoder().raw_decode
    at = _next(text, 0)
    if text[at : at + 1] == "[":  # events without an object around them
        yield from ((None, event) for event, _ in _items(text, at))
        return
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at += 1
    while True:
        at = _next(text, at)
        if text[at : at + 1] == "}":
            return
        key, at = decode(text, at)
        at = text.index(":", at) + 1
        at = _next(text, at)
        if key == "traceEvents" and text[at : at + 1] == "[":
            for event, end in _items(text, at):
                at = end
                yield None, event
            at = text.index("]", at) + 1
        else:
            value, at = decode(text, at)
            yield str(key), value


def _next(text: str, at: int) -> int:
    """Return the place of the next character that is neither white space nor a comma."""
    found = _GAP.match(text, at)
    return found.end() if found else at


def _items(text: str, at: int) -> Iterator[tuple[Any, int]]:
    """Yield (item, where it ends) for each item of the JSON array that begins at a place."""
    decode = json.JSONDecoder().raw_decode
    at += 1
    while True:
        at = _next(text, at)
        if text[at : at + 1] == "]":
            return
        item, at = decode(text, at)
        yield item, at


def _what_it_is(path: Path, text: str, about: dict[str, Any]) -> str:
    """Return a sentence that says why a file without events is not a trace."""
    head = text[:1000].lstrip().lower()
    if not head:
        return f"{path} is empty; {HOW}"
    if head.startswith("<"):
        return f"{path} is a web page or XML, not a trace; download the file itself, or {HOW}"
    if "nodes" in about or '"schema": "1' in head or "chakra" in head:
        return f"{path} is an execution trace (Chakra), which does not say when the device worked; {HOW}"
    if not head.startswith(("{", "[")):
        return f"{path} is not JSON; {HOW}"
    return f"{path} holds no events of a profiler; {HOW}"
