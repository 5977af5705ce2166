"""Endpoint, the address and port of machine 0, written ``host0:29500``."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from bench.core.errors import UsageError

_FORM = re.compile(r"(\S+):([0-9]{1,5})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A machine's address and port.

    Attributes:
        host: name or IP address; an IPv6 address without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``host0:29500`` or ``[::1]:29500``.

        Raises:
            UsageError: the text has another form.
        """
        match = _FORM.fullmatch(text)
        if not match or not 0 < int(match[2]) < 65536:
            raise UsageError(f"--rdzv-endpoint {text} is not HOST:PORT with a port from 1 to 65535")
        return cls(host=match[1].removeprefix("[").removesuffix("]"), port=int(match[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
