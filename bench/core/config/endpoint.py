"""Endpoint: where machine 0 is found, written ``host0:29500``."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from bench.core.errors import UsageError

_FORM = re.compile(r"(\S+):([0-9]{1,5})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A port of a machine.

    Attributes:
        host: name or address; an IPv6 address without its brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``host0:29500`` or ``[::1]:29500``.

        Raises:
            UsageError: the text is not of that form.
        """
        match = _FORM.fullmatch(text)
        if not match or not 0 < int(match[2]) < 65536:
            raise UsageError(f"--rdzv-endpoint {text} is not HOST:PORT with a port from 1 to 65535")
        return cls(host=match[1].removeprefix("[").removesuffix("]"), port=int(match[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
