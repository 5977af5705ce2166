"""Traces: the rate of a link over time, as a file of delivery opportunities.

Each line is the millisecond, counted from the beginning, at which one packet of 1500 bytes may pass; several lines with
the same number let several packets pass. An opportunity without a waiting packet is lost, small packets share one, and
after the last line the trace starts again.
Source: Netravali et al. 2015 (Mahimahi, USENIX ATC), whose recorded traces of cellular networks have this form.
"""

from __future__ import annotations

import array
import codecs
import dataclasses
import hashlib
from pathlib import Path
from typing import Self

from bench.core.counters import FRAME_BYTES
from bench.core.errors import UsageError
from bench.core.files import check_regular

# Twelve days: the forwarder stores milliseconds in 32 bits.
_LAST_MS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A reference to a trace file and its contents at the time when the run was configured.

    Attributes:
        path: the file.
        digest: digest of its contents, ten hex digits.
        mean_bps: mean rate in bits per second, including headers: each opportunity carries a frame of 1514 bytes.
    """

    path: str
    digest: str
    mean_bps: float

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            UsageError: it cannot be read, or is not a trace.
        """
        opportunities = _read(path)
        return cls(path=str(path.absolute()), digest=_digest(opportunities), mean_bps=_mean_bps(opportunities))

    def opportunities(self) -> array.array[int]:
        """Read the file and return the millisecond of each opportunity, ascending, as unsigned 32-bit numbers.

        Raises:
            UsageError: the file cannot be read, or has changed.
        """
        opportunities = _read(Path(self.path))
        if _digest(opportunities) != self.digest:
            raise UsageError(f"the trace {self.path} has changed since the run was configured; restore the old file")
        return opportunities

    @property
    def label(self) -> str:
        """Return its name in rows, such as ``cell.up (1a2b3c4d5e)``."""
        return f"{Path(self.path).name} ({self.digest})"


def _read(path: Path) -> array.array[int]:
    check_regular(path)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("ascii").splitlines()
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"{path} is not a trace: it holds more than numbers; give one with a whole number of milliseconds a line"
        ) from None
    opportunities = array.array("I")
    last = 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        moment = int(text) if text.isdecimal() and len(text) < 12 else -1
        if not last <= moment <= _LAST_MS:
            raise UsageError(
                f"{path}, line {number}: '{text[:20]}' is not a delivery opportunity; write milliseconds as whole"
                " numbers, one on each line, none below the one before"
            )
        opportunities.append(moment)
        last = moment
    if last == 0:
        raise UsageError(f"{path} is not a trace: it needs a delivery opportunity after millisecond 0")
    return opportunities


def _mean_bps(opportunities: array.array[int]) -> float:
    return 8 * FRAME_BYTES * len(opportunities) / (1e-3 * opportunities[-1])


def _digest(opportunities: array.array[int]) -> str:
    return hashlib.sha256(" ".join(map(str, opportunities)).encode()).hexdigest()[:10]
