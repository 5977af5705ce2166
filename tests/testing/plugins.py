"""A third-party package with misbehaving components, installed for a test by its entry points alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SOURCE = '''
"""Components that misbehave on purpose."""
import dataclasses
import os
import signal
import time
from pathlib import Path

import torch

from collectives.base import PendingSum
from collectives.payloads.base import Dense
from collectives.allreduce import BoundNative, Native
from compressors.floats import Fp16
from compressors.group_topk import GroupTopK


@dataclasses.dataclass(kw_only=True)
class Raising(Fp16):
    """Fails on rank 1 at step 3."""

    def encode_bucket(self, gradients, residual, left, layers, step, *, screen=False):
        if (step.rank, step.index) == (1, 3):
            raise ValueError("this compressor is broken")
        return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)


@dataclasses.dataclass(kw_only=True)
class Sleepy(Fp16):
    """Takes 50 ms per bucket, so that a test can act in the middle of an epoch."""

    def encode_bucket(self, gradients, residual, left, layers, step, *, screen=False):
        time.sleep(0.05)
        return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)


@dataclasses.dataclass(kw_only=True)
class Hanging(Fp16):
    """Rank 1 never sends at step 3."""

    def encode_bucket(self, gradients, residual, left, layers, step, *, screen=False):
        if (step.rank, step.index) == (1, 3):
            time.sleep(3600)
        return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)


@dataclasses.dataclass(kw_only=True)
class Mortal(GroupTopK):
    """Rank 1 is killed at step 7, unless the file that MORTAL names says that it was before."""

    def encode_bucket(self, gradients, residual, left, layers, step, *, screen=False):
        was_killed = Path(os.environ["MORTAL"])
        if (step.rank, step.index) == (1, 7) and not was_killed.exists():
            was_killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)


@dataclasses.dataclass(kw_only=True)
class Losing(Native):
    """Loses the last element on rank 1."""

    def bind(self, transport, downlink=None):
        return BoundLosing(self, transport)


class BoundLosing(BoundNative):
    def start_like(self, payload, layout, op):
        total = super().start_like(payload, layout, op).finish()
        if self.transport.rank == 1:
            total.wire[-1] = 0
        return PendingSum.done(total)


@dataclasses.dataclass(kw_only=True)
class Breaking(Native):
    """Fails on rank 1 at more than 1000 elements."""

    def bind(self, transport, downlink=None):
        return BoundBreaking(self, transport)


class BoundBreaking(BoundNative):
    def start_like(self, payload, layout, op):
        if self.transport.rank == 1 and payload.numel > 1000:
            raise ValueError("this collective is broken")
        return super().start_like(payload, layout, op)
'''
ENTRY_POINTS = {
    "bench.compressors": {name: f"misbehaving:{name.title()}" for name in ("raising", "sleepy", "hanging", "mortal")},
    "bench.collectives": {name: f"misbehaving:{name.title()}" for name in ("losing", "breaking")},
}


def install(folder: Path) -> str:
    """Write the package to `folder`; return the PYTHONPATH that makes it visible to every rank."""
    (folder / "misbehaving.py").write_text(SOURCE, encoding="utf-8")
    install_entry_points(folder, "misbehaving", ENTRY_POINTS)
    return str(folder)


def install_entry_points(folder: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a package to `folder`: group -> component -> ``module:Class``."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = []
    for group, components in points.items():
        lines += [f"[{group}]", *(f"{component} = {target}" for component, target in components.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
