"""Choose the baseline: the row with which all other rows are compared."""

from collections.abc import Sequence

from bench.core.errors import UsageError
from bench.report.groups import RunGroup

_FP32, _BF16 = ("none",), ("bf16", "torch_bf16")
BASELINES = (*_FP32, *_BF16)  # the default baselines, the preferred one first
BASELINES_OF_SPEED = (*_BF16, *_FP32)  # bf16 is free; compared with fp32, others would look too fast


def choose_baseline(
    rows: Sequence[RunGroup], wanted: str | None, defaults: Sequence[str]
) -> tuple[RunGroup, str | None]:
    """Choose the baseline of a comparison.

    If several rows match, a row with a successful run is preferred, then one with the collective ``native``, then one
    with the strategy ``ddp``, then the one that appears first.

    Args:
        rows: the groups of runs, in order of appearance; at least one.
        wanted: the user's name for the baseline: a compressor, ``compressor+collective``, a run's name, or one of the
            values in a row's label. A row whose compressor has exactly the named options takes precedence over a row
            whose compressor has other options. If None, the defaults are tried in order on the rows with a successful
            run; if no such row uses any of them, the first row is chosen.
        defaults: compressors, the preferred one first.

    Returns:
        The baseline, and a sentence for the user that names the baseline. The sentence is None unless several rows
        match, or no row uses one of ``defaults``.

    Raises:
        NoSuchBaseline: no row matches ``wanted``; the message lists the rows.
    """
    fit = [row for row in rows if row.ok] or rows
    if wanted is None:
        advice = " (--baseline chooses another)"
        choices = [(f"use {name}", [row for row in fit if row.distinct("compressor") == [name]]) for name in defaults]
    else:
        advice = ""
        choices = [
            (f"fit --baseline {wanted}", [row for row, own in zip(rows, names, strict=True) if wanted in own])
            for names in zip(*map(_names, rows), strict=True)
        ]
    for what, found in choices:
        if found:
            ok = [row for row in found if row.ok] or found
            chosen = min(
                ok, key=lambda row: (row.distinct("collective") != ["native"], row.distinct("strategy") != ["ddp"])
            )
            return chosen, f"{len(found)} rows {what}; the baseline is {chosen.title}{advice}" if found[1:] else None
    if wanted is not None:
        raise NoSuchBaseline(f"no row fits --baseline {wanted}; the rows are: {'; '.join(row.title for row in rows)}")
    said = f"no row uses {' or '.join(defaults)}, so the baseline is {fit[0].title}{advice}"
    return fit[0], said if fit[1:] else None


class NoSuchBaseline(UsageError):
    """No row matches the baseline that the user named."""


def _names(row: RunGroup) -> list[set[str]]:
    # The texts by which a user can name a row, the most exact ones first.
    specs = {(str(run["compressor"]), str(run["collective"])) for run in row.runs}
    bare = {(compressor.partition(":")[0], collective.partition(":")[0]) for compressor, collective in specs}
    return [
        {compressor for compressor, _ in specs},
        {f"{compressor}+{collective}" for compressor, collective in specs},
        set(row.distinct("name")),
        set(row.distinct("config_id")),
        {row.title, *map(str, row.label.values())},
        {compressor for compressor, _ in bare},
        {f"{compressor}+{collective}" for compressor, collective in bare},
    ]
