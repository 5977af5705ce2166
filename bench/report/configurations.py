"""Configurations: the rows of a comparison, each with the runs behind it and a label that tells it from the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.core.schema import METRICS, METRICS_BY_NAME
from bench.report.formats import format_value
from bench.report.statistics import Estimate, estimate

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS = ["compressor", "collective"]
_SPECS = [*_ALWAYS, "strategy"]
_NO_SETTING = {"run_id", "digest", "config_id", "name", "seed"}
SETTINGS = [column.name for column in METRICS if column.group == "identity" and column.name not in _NO_SETTING]
"""Columns that say how a run was set up, the seed and labels apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is compared with others: one configuration, or one group of ``--by``.

    Attributes:
        label: the columns that tell it from the others, with their values.
        runs: one row per seed (``runs.one_per_seed``).
    """

    label: dict[str, Any]
    runs: pd.DataFrame

    @property
    def title(self) -> str:
        """``topk:ratio=0.01 + allgather, lr=0.1``: the label in one text."""
        specs = " + ".join(format_value(name, value) for name, value in self.label.items() if name in _SPECS)
        others = [f"{name}={format_value(name, value)}" for name, value in self.label.items() if name not in _SPECS]
        return ", ".join([specs, *others] if specs else others)

    @property
    def ok(self) -> pd.DataFrame:
        """The runs that ended well: the only ones whose figures count."""
        return self.runs[self.runs["status"].eq("ok")]

    @property
    def num_missed(self) -> int:
        """Runs that ended well without reaching the target accuracy they had."""
        return int((self.ok["target_accuracy"].notna() & self.ok["time_to_target_s"].isna()).sum())

    def values(self, column: str) -> list[float]:
        """The known values of a column, one per seed that ended well."""
        return [float(value) for value in self.ok[column].dropna()]

    def estimate(self, column: str) -> Estimate | None:
        """Mean over seeds with its interval, None where no seed has a value."""
        return estimate(self.values(column))

    def distinct(self, column: str) -> list[Any]:
        """The known values of a column over all runs, each once, in order of appearance."""
        return [plain(value) for value in self.runs[column].dropna().unique()]


def configurations(runs: pd.DataFrame, by: Sequence[str]) -> list[Configuration]:
    """Group runs into the rows of a comparison, in order of appearance.

    Args:
        runs: one row per configuration and seed.
        by: columns to group by; empty: by ``config_id``, labelled by compressor, collective, the strategy where one is
            not the usual, and every setting that is not the same in all runs.
    """
    keys = list(by) or ["config_id"]
    groups = [group for _, group in runs.groupby(keys, sort=False, dropna=False)]
    names = list(by) or _telling_columns(runs, groups)
    return [Configuration(label={name: plain(group[name].iloc[0]) for name in names}, runs=group) for group in groups]


def _telling_columns(runs: pd.DataFrame, groups: Sequence[pd.DataFrame]) -> list[str]:
    """Columns that tell the groups apart; what no setting shows (a hidden default), the name or the digest does."""
    always = _SPECS if runs["strategy"].dropna().ne(METRICS_BY_NAME["strategy"].absent).any() else _ALWAYS
    names = always + [name for name in SETTINGS if name not in always and runs[name].nunique(dropna=False) > 1]
    for last_resort in ("name", "config_id"):
        if len({tuple(str(plain(group[name].iloc[0])) for name in names) for group in groups}) == len(groups):
            break
        if runs[last_resort].nunique(dropna=False) > 1:
            names.append(last_resort)
    return names


def plain(value: Any) -> Any:
    """A cell of a data frame as a plain Python value; None for every way pandas writes "nothing"."""
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    return value.item() if hasattr(value, "item") else value
