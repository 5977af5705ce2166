"""Losses, which says how often hosts fail and how a job recovers, written ``every=6h,restart=30s,checkpoint=100``."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from bench.core.errors import UsageError
from bench.core.units import parse_duration

_FORM = re.compile(r"every=([^,]+),restart=([^,]+),checkpoint=([1-9][0-9]{0,8})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """Random failures of hosts, after each of which the job restarts from its last checkpoint.

    Attributes:
        every_s: mean seconds until a given host fails, the same for all hosts.
        restart_s: seconds from a failure until training resumes.
        checkpoint_steps: steps between two checkpoints.
    """

    every_s: float
    restart_s: float
    checkpoint_steps: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``every=6h,restart=30s,checkpoint=100``.

        Raises:
            UsageError: the text has another form, or the mean time between losses is 0.
        """
        match = _FORM.fullmatch(text.replace(" ", ""))
        if not match:
            raise UsageError(
                f"--losses {text} is not possible; write every=6h,restart=30s,checkpoint=100: each host's mean time "
                "until it is lost, the time until training resumes, and the steps between checkpoints"
            )
        losses = cls(
            every_s=parse_duration(match[1]), restart_s=parse_duration(match[2]), checkpoint_steps=int(match[3])
        )
        if losses.every_s <= 0:
            raise UsageError(f"--losses {text} is not possible; give a mean time between losses above 0")
        return losses

    def __str__(self) -> str:
        return f"every={_text(self.every_s)},restart={_text(self.restart_s)},checkpoint={self.checkpoint_steps}"


def _text(seconds: float) -> str:
    """Return seconds as text that `parse_duration` reads, rounded to microseconds."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"
