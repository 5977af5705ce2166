"""Parse options whose text has a syntax of its own, such as endpoints, stragglers, partitions and seeds."""

import dataclasses
import math
import re
from typing import Self

from bench.core.errors import UsageError

_ENDPOINT = re.compile(r"(\S+):([0-9]{1,5})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A machine's address and port.

    Attributes:
        host: name or IP address; an IPv6 address without brackets.
        port: port number, 1 to 65535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as ``host0:29500`` or ``[::1]:29500``.

        Raises:
            UsageError: the text is not HOST:PORT, or the port is out of range.
        """
        match = _ENDPOINT.fullmatch(text)
        if not match or not 0 < int(match[2]) < 65536:
            raise UsageError(f"--rdzv-endpoint {text} is not HOST:PORT with a port from 1 to 65535")
        return cls(host=match[1].removeprefix("[").removesuffix("]"), port=int(match[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
_STRAGGLER = re.compile(rf"\s*rank\s*=\s*([0-9]{{1,9}})\s*,\s*slowdown\s*=\s*{_NUMBER}\s*")
MAX_SLOWDOWN = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """One rank that is slowed down on purpose.

    Attributes:
        rank: number of the rank, from 0.
        slowdown: factor by which forward and backward take longer, at least 1.
    """

    rank: int
    slowdown: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as ``rank=1,slowdown=3``.

        Raises:
            UsageError: the text has another form, or the slowdown is out of range.
        """
        match = _STRAGGLER.fullmatch(text)
        slowdown = float(match[2]) if match else math.nan
        if not match or not 1 <= slowdown <= MAX_SLOWDOWN:
            raise UsageError(
                f"--straggler {text} is not possible; write rank=1,slowdown=3, with a slowdown of 1 to {MAX_SLOWDOWN:g}"
            )
        return cls(rank=int(match[1]), slowdown=slowdown)

    def __str__(self) -> str:
        return f"rank={self.rank},slowdown={self.slowdown:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrScaling:
    """Linear scaling of the learning rate with the number of ranks, or no scaling.

    Source: Goyal et al. 2017 (arXiv:1706.02677) for linear scaling, and its section 2.2 for `gradual`; also part of the
    Group-TopK ring-sharing patent.

    Attributes:
        base: number of ranks that the learning rate was chosen for; None if the rate is not scaled.
        gradual: True if warm-up starts at the unscaled rate; False if it starts at zero.
    """

    base: int | None = None
    gradual: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``none``, ``linear``, ``linear:base=4``, ``linear:gradual=true`` or ``linear:base=4,gradual=true``.

        Raises:
            UsageError: the text has another form, or the base is 0.
        """
        if text.strip() == "none":
            return cls()
        name, colon, rest = "".join(text.split()).partition(":")
        given = dict(item.partition("=")[::2] for item in rest.split(",")) if colon else {}
        base, gradual = given.pop("base", "1"), given.pop("gradual", "false")
        is_known = name == "linear" and not given and gradual in ("true", "false")
        if not (is_known and re.fullmatch("[0-9]{1,9}", base) and int(base)):
            raise UsageError(
                f"--lr-scaling {text} is not possible; write none, linear or linear:base=N, where N is the number of "
                "ranks that --lr was chosen for, and add gradual=true to rise from --lr during warm-up"
            )
        return cls(base=int(base), gradual=gradual == "true")

    def factor(self, world_size: int) -> float:
        """Return the factor by which the learning rate is multiplied if there are `world_size` ranks."""
        return 1.0 if self.base is None else world_size / self.base

    def __str__(self) -> str:
        if self.base is None:
            return "none"
        options = [f"base={self.base}"] * (self.base != 1) + ["gradual=true"] * self.gradual
        return ":".join(["linear", *filter(None, [",".join(options)])])


_CLASSES = re.compile(r"\s*classes\s*:\s*per_rank\s*=\s*([0-9]{1,9})\s*")
_DIRICHLET = re.compile(rf"\s*dirichlet\s*:\s*alpha\s*=\s*{_NUMBER}\s*")
LEAST_ALPHA, LARGEST_ALPHA = 1e-6, 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """How training samples are divided among ranks: evenly at random (iid), unless an attribute is set.

    Attributes:
        per_rank: number of classes that each rank has samples of; None if any rank may have samples of all classes.
        alpha: concentration of the Dirichlet distribution from which each rank's class shares are drawn; None if the
            shares are not drawn.
    """

    per_rank: int | None = None
    alpha: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``iid``, ``classes:per_rank=2`` or ``dirichlet:alpha=0.5``.

        Raises:
            UsageError: the text has another form, or the number is out of range.
        """
        if text.strip() == "iid":
            return cls()
        if (match := _CLASSES.fullmatch(text)) and int(match[1]) > 0:
            return cls(per_rank=int(match[1]))
        if (match := _DIRICHLET.fullmatch(text)) and LEAST_ALPHA <= float(match[1]) <= LARGEST_ALPHA:
            return cls(alpha=float(match[1]))
        raise UsageError(
            f"--partition {text} is not possible; write iid, classes:per_rank=2, with 1 or more, or "
            f"dirichlet:alpha=0.5, with {LEAST_ALPHA:g} to {LARGEST_ALPHA:g}"
        )

    def __str__(self) -> str:
        if self.per_rank is not None:
            return f"classes:per_rank={self.per_rank}"
        return "iid" if self.alpha is None else f"dirichlet:alpha={self.alpha:.15g}"


MOST_SEEDS = 1000


def parse_seeds(text: str, option: str = "--seeds") -> list[int]:
    """Return the seeds that a text lists, in the text's order.

    Args:
        text: seeds and ranges of seeds, separated by commas, such as ``1,2,5-8``.
        option: the option that the text was given for, named in error messages.

    Raises:
        UsageError: the text is not such a list, or it names no seed, one seed twice, or more than `MOST_SEEDS` seeds.
    """
    seeds: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", item)
        if not match:
            raise UsageError(f"{option} {text} is not a list of seeds; write 1,2,3 or 1-5")
        named = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not named:
            raise UsageError(f"{option} {text} has a range that ends before it begins; write the smaller seed first")
        if len(seeds) + len(named) > MOST_SEEDS:
            raise UsageError(f"{option} {text} names more than {MOST_SEEDS} runs; give fewer seeds")
        seeds += named
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"{option} {text} names no seed, or a seed twice; each seed is one run")
    return seeds
