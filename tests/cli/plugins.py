"""A third-party package with misbehaving compressors, installed for a test by its entry points alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

SOURCE = '''
"""Compressors that misbehave on purpose."""
import dataclasses
import time

import torch

from collectives.kinds.dense import Dense
from compressors.none import NONE


@dataclasses.dataclass(kw_only=True)
class Raising(NONE):
    """Fails on rank 1 at step 3."""

    def encode(self, x, layer, step):
        if (step.rank, step.index) == (1, 3):
            raise ValueError("this compressor is broken")
        return super().encode(x, layer, step)


@dataclasses.dataclass(kw_only=True)
class Sleepy(NONE):
    """Takes 50 ms per bucket, so that a test can act in the middle of an epoch."""

    def encode(self, x, layer, step):
        time.sleep(0.05)
        return super().encode(x, layer, step)


@dataclasses.dataclass(kw_only=True)
class Hanging(NONE):
    """Rank 1 never sends at step 3."""

    def encode(self, x, layer, step):
        if (step.rank, step.index) == (1, 3):
            time.sleep(3600)
        return super().encode(x, layer, step)
'''


def install(folder: Path) -> str:
    """Lay the package into `folder`; returns the PYTHONPATH that makes it visible to every rank."""
    (folder / "misbehaving.py").write_text(SOURCE, encoding="utf-8")
    info = folder / "misbehaving-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n", encoding="utf-8")
    names = ("Raising", "Sleepy", "Hanging")
    points = "\n".join(f"{name.lower()} = misbehaving:{name}" for name in names)
    (info / "entry_points.txt").write_text(textwrap.dedent(f"[bench.compressors]\n{points}\n"), encoding="utf-8")
    return str(folder)
