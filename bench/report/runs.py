"""Runs: from rows, one per evaluation, to runs, one per configuration and seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_RUN = ["run_id", "config_id", "seed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """A seed that was run more than once in one configuration.

    Attributes:
        counted: run_id of the run that stands for the seed.
        superseded: run_ids of the others.
    """

    compressor: str
    collective: str
    seed: int
    counted: str
    superseded: list[str]


def final_states(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per run: its last status, and the last known value of every other column.

    A row written after a failure knows nothing of speed, and time_to_target_s may stand in the row that reached the
    target only: hence the last known value rather than the last row. ``replicas_in_sync`` is false if any row says so.

    Args:
        rows: what ``store.load`` returns; not changed.
    """
    groups = rows.groupby(_RUN, sort=False)
    states = groups.last().reset_index()
    in_sync = groups["replicas_in_sync"].min().reset_index(drop=True)
    return states.assign(replicas_in_sync=in_sync)[list(rows.columns)]


def one_per_seed(runs: pd.DataFrame, keys: Sequence[str]) -> tuple[pd.DataFrame, list[Repeat]]:
    """For each configuration and seed the newest run that is ok, or the newest one if none is.

    Args:
        runs: what ``final_states`` returns; not changed.
        keys: columns that the comparison groups by; runs that differ in one of them never stand for each other.

    Returns:
        The runs that count, in the order given, and what they supersede.
    """
    best_last = runs.assign(_ok=runs["status"].eq("ok")).sort_values(
        ["_ok", "started_at"], kind="stable", na_position="first"
    )
    counted, repeats = [], []
    for _, same in best_last.groupby(list(dict.fromkeys([*keys, "config_id", "seed"])), sort=False, dropna=False):
        counted.append(same.index[-1])
        if len(same) > 1:
            newest = same.iloc[-1]
            repeats.append(
                Repeat(
                    compressor=newest["compressor"],
                    collective=newest["collective"],
                    seed=int(newest["seed"]),
                    counted=newest["run_id"],
                    superseded=list(same["run_id"].iloc[:-1]),
                )
            )
    return runs.loc[sorted(counted)], repeats
