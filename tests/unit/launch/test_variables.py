"""What every started process is told about threads and memory, by whichever command."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.compressors_config import CompressorsConfig
from bench.core.errors import Interrupted
from bench.launch import compressors, torchrun


def test_blocks_are_kept_up_to_a_size_that_every_glibc_accepts() -> None:
    given = torchrun.variables(3)
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == "3"
    # half of the largest heap of a thread: 2 x 4 MiB x 8 bytes on 64 bits; more is refused before version 2.35
    assert int(given["MALLOC_MMAP_THRESHOLD_"]) <= 32 * 2**20 < int(given["MALLOC_TRIM_THRESHOLD_"])


def test_compressors_are_measured_as_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def start(_arguments: Any, variables: dict[str, str], _log: Any) -> None:
        started.append(variables)
        raise KeyboardInterrupt

    monkeypatch.setattr(torchrun, "start", start)
    config = CompressorsConfig(compressors="none", model="linear", threads=2, device="cpu")
    with pytest.raises(Interrupted):
        compressors.execute(config, lambda _: None)
    assert torchrun.variables(2).items() <= started[0].items()
