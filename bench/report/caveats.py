"""Caveats: what a reader must know before believing a comparison, one sentence each, with what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.report.comparison import SAME_ACCURACY, SAME_FACTOR, Comparison, Row
from bench.report.configurations import SETTINGS, Configuration, plain
from bench.report.formats import format_value
from bench.report.statistics import FEWEST_SEEDS, MOST_SEEDS, Effect, seeds_needed

# Columns that make times of two rows incomparable, and columns that make them answer different questions.
_MACHINE = ("host", "cpu", "torch_version", "threads", "device")
_WORK = ("model", "dataset", "train_size", "test_size", "batch_size", "target_accuracy")
_LISTED = 3


def caveats(comparison: Comparison, *, allow_other_machine: bool = False) -> list[str]:
    """Everything that weakens a comparison, the gravest first.

    Args:
        comparison: the rows beside their baseline.
        allow_other_machine: say nothing about rows of different machines; the user knows.
    """
    sentences = [*_failures(comparison), *_out_of_sync(comparison)]
    if not allow_other_machine:
        sentences += _other_machines(comparison)
    return [
        *sentences,
        *_other_work(comparison),
        *_mixtures(comparison),
        *_missed(comparison),
        *_too_few(comparison),
        *_repeats(comparison),
        *_code(comparison),
        *([comparison.ambiguity] if comparison.ambiguity else []),
    ]


def _failures(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        runs = row.configuration.runs
        for _, run in runs[~runs["status"].eq("ok")].iterrows():
            reason = plain(run["error"]) or (
                "it is still running, or was killed" if run["status"] == "running" else "no reason is recorded"
            )
            yield (
                f"{row.configuration.title}: seed {run['seed']} {_ended(run['status'])} and does not count: "
                f"{reason} ({run['run_id']})"
            )


def _ended(status: str) -> str:
    return {"running": "has not ended", "interrupted": "was interrupted", "timeout": "timed out"}.get(status, status)


def _out_of_sync(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        wrong = configuration.runs[configuration.runs["replicas_in_sync"].eq(False)]
        if len(wrong):
            seeds = ", ".join(str(seed) for seed in wrong["seed"])
            yield (
                f"{configuration.title}: the ranks ended with different parameters (seeds: {seeds}); "
                "its accuracy is that of one replica, and the run is not data-parallel training"
            )


def _other_machines(comparison: Comparison) -> Iterator[str]:
    if differing := _differing(comparison, _MACHINE):
        yield (
            f"THE ROWS COME FROM DIFFERENT MACHINES: {_listing(comparison, differing)}; their times cannot be "
            "compared: run them on one machine, or silence this with --allow-other-machine"
        )


def _other_work(comparison: Comparison) -> Iterator[str]:
    if differing := _differing(comparison, _WORK):
        yield (
            f"the rows differ in {_listing(comparison, differing)}: an effect then mixes this with the effect of the "
            "compressor and the collective"
        )


def _mixtures(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        mixed = [name for name in SETTINGS if name not in comparison.by and len(configuration.distinct(name)) > 1]
        if mixed:
            yield (
                f"{configuration.title} mixes runs that differ in {', '.join(mixed)}, so its intervals are not only "
                "noise; add these to --by"
            )


def _missed(comparison: Comparison) -> Iterator[str]:
    missing = [configuration for configuration in _configurations(comparison) if configuration.num_missed]
    if missing:
        counts = [f"{each.title} ({each.num_missed} of {len(each.ok)} seeds)" for each in missing]
        yield (
            f"the target accuracy was missed by {'; '.join(counts)}: a mean time to target covers only the seeds that "
            "reached it"
        )


def _too_few(comparison: Comparison) -> Iterator[str]:
    few = [row for row in comparison.rows if len(row.configuration.ok) == 1]
    if few:
        yield (
            f"{_titles(few)}: one seed says nothing about noise, so every verdict on it is unclear; "
            f"next: run at least {FEWEST_SEEDS} seeds of each row"
        )
    advice = [text for row in comparison.candidates if row.verdict == "unclear" for text in _advice(comparison, row)]
    if advice:
        yield f"too noisy for a verdict: {'; '.join(advice)}; next: run more seeds of these and of the baseline"


def _advice(comparison: Comparison, row: Row) -> Iterator[str]:
    """How many seeds an unclear row needs, where its interval is known at all."""
    effect, half_width = _judged(comparison, row)
    if effect and effect.low is not None:
        n = min(len(row.configuration.ok), len(comparison.baseline.ok))
        seeds = seeds_needed(effect, half_width=half_width, n=n)
        wanted = f"about {seeds} would do" if seeds else f"not even {MOST_SEEDS} would do, find the noise first"
        yield f"{row.configuration.title} ({n} seeds, {wanted})"


def _judged(comparison: Comparison, row: Row) -> tuple[Effect | None, float]:
    """The effect behind a row's verdict, and the half width of its interval that would allow one."""
    if row.effects is None:
        return None, math.nan
    if comparison.metric.name == "test_accuracy":
        return row.effects.accuracy, SAME_ACCURACY[1]
    gain = row.effects.gain
    return gain, (SAME_FACTOR[1] - 1.0) * (gain.value if gain else 1.0)


def _repeats(comparison: Comparison) -> Iterator[str]:
    if comparison.repeats:
        seeds = [f"{each.compressor} + {each.collective} seed {each.seed}" for each in comparison.repeats]
        more = f" and {len(seeds) - _LISTED} more" if len(seeds) > _LISTED else ""
        yield (
            f"run more than once: {', '.join(seeds[:_LISTED])}{more}; only the newest ok run of each counts, since "
            "repeats of a seed say nothing about other seeds"
        )


def _code(comparison: Comparison) -> Iterator[str]:
    dirty = [row for row in comparison.rows if True in row.configuration.distinct("git_dirty")]
    if dirty:
        yield f"{_titles(dirty)}: run from a checkout with uncommitted changes, so git_sha does not identify the code"
    if differing := _differing(comparison, ("git_sha",)):
        yield f"the rows come from different versions of the code: {_listing(comparison, differing)}"


def _configurations(comparison: Comparison) -> list[Configuration]:
    return [row.configuration for row in comparison.rows]


def _differing(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Columns of these in which the rows differ though they are not compared by them."""
    return [name for name in names if name not in comparison.by and len(_distinct(comparison, name)) > 1]


def _distinct(comparison: Comparison, name: str) -> list[Any]:
    values = [value for configuration in _configurations(comparison) for value in configuration.distinct(name)]
    return list(dict.fromkeys(values))


def _listing(comparison: Comparison, names: list[str]) -> str:
    return ", ".join(
        f"{name} ({' / '.join(format_value(name, value) for value in _distinct(comparison, name))})" for name in names
    )


def _titles(rows: list[Row]) -> str:
    return "; ".join(row.configuration.title for row in rows)
