"""Warn of everything that weakens a comparison: one sentence for each reason, which also says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.core.counters import NOTEWORTHY_SHARE
from bench.report import targets
from bench.report.comparison import SAME_ACCURACY, SAME_FACTOR, Comparison, Row
from bench.report.configurations import SETTINGS, Configuration, format_factor, format_value
from bench.report.selection import WORKLOAD
from bench.report.statistics import FEWEST_SEEDS, MOST_SEEDS, Effect, improvement, seeds_needed
from bench.report.store import Run
from bench.report.targets import Target

# Rows that differ in a column of _MACHINE have incomparable times; rows that differ in _WORK did different work.
_MACHINE = ("host", "cpu", "torch_version", "kernels", "threads", "device")
_WORK = [name for name in (*WORKLOAD, "accumulate") if name not in _MACHINE]
# In these columns an empty cell means "none", not "unknown".
_NONE_COUNTS = ("epochs", "steps", "uplink_bps", "downlink_bps", "link_trace", "cluster_digest", "straggler")
_LISTED = 3
SHORT = 10  # a last interval this many times shorter than the previous one says too little


def cautions(comparison: Comparison) -> list[str]:
    """Return the warnings that belong above the table: rows of different machines or versions of the code."""
    sentences = []
    if differing := _differing(comparison, _MACHINE):
        sentences.append(
            f"the rows come from different machines or versions, so their times cannot be compared: "
            f"{_listing(comparison, differing)}; run all of them on one machine, or hide this with "
            "--allow-other-machine"
        )
    if differing := _differing(comparison, ("git_sha",)):
        sentences.append(f"the rows come from different versions of the code: {_listing(comparison, differing)}")
    return sentences


def caveats(comparison: Comparison) -> list[str]:
    """Return the other warnings, the most serious first."""
    return [
        *_failures(comparison),
        *_unfinished(comparison),
        *_out_of_sync(comparison),
        *_other_work(comparison),
        *_links(comparison),
        *_warm_up(comparison),
        *_sent_at_first(comparison),
        *_short_last_part(comparison),
        *_mixtures(comparison),
        *_missed(comparison),
        *_fallbacks(comparison),
        *_one_seed(comparison),
        *_too_few(comparison),
        *_noisy_clock(comparison),
        *_shared_cores(comparison),
        *_repeats(comparison),
        *_dirty(comparison),
        *([comparison.ambiguity] if comparison.ambiguity else []),
    ]


def _failures(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        for run in row.configuration.runs:
            if not run.ended_well:
                yield (
                    f"{row.configuration.short}: seed {run['seed']} {run.ending} and does not count: "
                    f"{run['error'] or 'no reason is recorded'} ({run['run_id']})"
                )


def _unfinished(comparison: Comparison) -> Iterator[str]:
    if runs := comparison.unfinished:
        texts = [f"{run.title}, {run.ending} ({run['run_id']})" for run in runs]
        yield f"not in the table, since not finished: {_first_of(texts)}"


def _out_of_sync(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        if wrong := [run for run in configuration.runs if run.in_sync is False]:
            seeds = ", ".join(str(run["seed"]) for run in wrong)
            yield (
                f"{configuration.short}: the ranks ended with different parameters (seeds: {seeds}), so this was not "
                "data-parallel training, and its accuracy is that of one rank's model"
            )


def _other_work(comparison: Comparison) -> Iterator[str]:
    if differing := differing_work(comparison):
        yield (
            f"the rows differ in {_listing(comparison, differing)}, so a difference between them may come from that; "
            "--where chooses rows"
        )


def differing_work(comparison: Comparison) -> list[str]:
    """Return the settings of the workload in which rows differ, except those in ``--by``."""
    return _differing(comparison, _WORK)


def _links(comparison: Comparison) -> Iterator[str]:
    if rows := [each for each in _configurations(comparison) if each.distinct("link_warnings")]:
        where = f"{rows[0].short}, and in {len(rows) - 1} more rows" if rows[1:] else rows[0].short
        yield f"{where}: the links were not as configured: {rows[0].distinct('link_warnings')[0]}"


def _warm_up(comparison: Comparison) -> Iterator[str]:
    """Warn if the speed-up over the whole run differs from that of the last evaluation interval (density warm-up)."""
    if comparison.metric.name != "samples_per_s":
        return
    known = _speeds_in_all(comparison.baseline)
    others = []
    for row in comparison.candidates:
        in_all = improvement(known, _speeds_in_all(row.configuration), higher_is_better=True)
        at_last = row.gain.effect
        if in_all and at_last and not SAME_FACTOR[0] <= in_all.value / at_last.value <= SAME_FACTOR[1]:
            others.append(f"{row.configuration.short} {format_factor(in_all.value)}x")
    if others:
        yield (
            f"averaged over the whole run, the speed-up was: {_first_of(others)} (the table shows each run's last "
            "evaluation interval); --metric time_to_target_s compares whole runs"
        )


def _sent_at_first(comparison: Comparison) -> Iterator[str]:
    """Warn if early steps sent more bytes than those of the last evaluation interval."""
    if comparison.metric.name == targets.BYTES:
        return
    more = []
    for configuration in _configurations(comparison):
        known = [(run.payload_bytes_per_step_in_all, run["payload_bytes_per_step"]) for run in configuration.ok]
        factors = [in_all / at_last for in_all, at_last in known if in_all and at_last]
        if factors and (factor := sum(factors) / len(factors)) > SAME_FACTOR[1]:
            more.append((factor, configuration.short))
    if more:
        (most, name), *others = sorted(more, reverse=True)
        texts = [
            f"{name} sent {format_factor(most)}",
            *(f"{other} {format_factor(factor)}" for factor, other in others),
        ]
        yield (
            f"averaged over the whole run, {_first_of(texts)} times the bytes per step shown (early steps compress "
            "less); --metric bytes_to_target counts whole runs"
        )


def _short_last_part(comparison: Comparison) -> Iterator[str]:
    if short := [each for each in _configurations(comparison) if any(map(_ends_shortly, each.ok))]:
        yield (
            f"{_names(short)}: speeds are measured over the last evaluation interval, which is less than a tenth of "
            "the one before; choose --eval-every so that it divides the run"
        )


def _ends_shortly(run: Run) -> bool:
    """Return True if the run's last evaluation interval is far shorter than the one before."""
    *_, before, last = [None, *run.interval_steps]
    return before is not None and last is not None and 0 < SHORT * last < before


def _speeds_in_all(configuration: Configuration) -> list[float]:
    return [speed for speed in (run.samples_per_s_in_all for run in configuration.ok) if speed is not None]


def _mixtures(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        mixed = [name for name in SETTINGS if name not in comparison.by and len(configuration.distinct(name)) > 1]
        if mixed:
            yield (
                f"{configuration.short} averages runs that differ in {', '.join(mixed)}, so its intervals are not only "
                f"noise; group by these too: --by {','.join([*comparison.by, *mixed])}"
            )


def _missed(comparison: Comparison) -> Iterator[str]:
    metric = comparison.metric.name if comparison.is_to_target else targets.TIME
    for target in comparison.targets:
        counts = []
        for configuration in _configurations(comparison):
            seeds = targets.needs(configuration, metric, target)
            if missed := len(seeds) - targets.num_reached(seeds):
                counts.append(f"{configuration.short} ({missed} of {len(seeds)} seeds)")
        if counts:
            accuracy = "the target accuracy" if target.accuracy is None else target.title
            yield (
                f"missed {accuracy}: {_first_of(counts)}; a seed that missed it counts with everything that it "
                "spent, so the true mean is higher; train longer to reach the target"
            )
        if once := [each for each in _configurations(comparison) if _evaluated_once(each, metric, target)]:
            yield (
                f"{_names(once)}: evaluated only once, at the end of the run, so {target.title} may have been reached "
                "long before; run with --eval-every"
            )


def _evaluated_once(configuration: Configuration, metric: str, target: Target) -> bool:
    """Return True if the target was reached at the only evaluation, and so perhaps long before it."""
    found_by_run = target.accuracy is None and metric == targets.TIME
    reached = targets.num_reached(targets.needs(configuration, metric, target))
    return not found_by_run and reached > 0 and all(len(run.rows) == 1 for run in configuration.ok)


def _fallbacks(comparison: Comparison) -> Iterator[str]:
    if fell_back := [each for each in _configurations(comparison) if any(each.values("factor_fallbacks"))]:
        yield (
            f"{_names(fell_back)}: K-FAC sent some factors in another form, or with more damping, than configured "
            "(column factor_fallbacks), so this is not exactly the method named"
        )


def _noisy_clock(comparison: Comparison) -> Iterator[str]:
    if noisy := [row for row in comparison.candidates if row.only_wall_clock_is_noisy]:
        verdicts = _first_of([f"{row.configuration.short} {row.cpu.verdict}" for row in noisy])
        yield (
            f"times are too noisy for a verdict, but CPU time per step says: {verdicts}; other programs were using the "
            "machine or the network: run again when it is idle"
        )


def _shared_cores(comparison: Comparison) -> Iterator[str]:
    shares = []
    for configuration in _configurations(comparison):
        # Rows written before this was measured lack the column.
        known = [run.last_known.get("other_cpu_share") or 0.0 for run in configuration.ok]
        if (share := max(known, default=0.0)) > NOTEWORTHY_SHARE:
            shares.append(f"{configuration.short} {share:.0%}")
    if shares:
        yield (
            f"other programs took part of the cores while these runs were timed: {_first_of(shares)}; their times are "
            "too long: run them again on an idle machine"
        )


def _one_seed(comparison: Comparison) -> Iterator[str]:
    rows = [each for each in _configurations(comparison) if each.ok]
    if single := [each for each in rows if len(each.ok) == 1]:
        seeds = ",".join(map(str, range(1, FEWEST_SEEDS + 1)))
        whose = "each" if len(single) == len(rows) else f"of {_names(single)}"
        yield f"only one seed {whose}, so noise cannot be distinguished from an effect: run `--seeds {seeds}`"


def _too_few(comparison: Comparison) -> Iterator[str]:
    noisy = [row for row in comparison.candidates if row.verdict == "unclear" and not row.gain.held_back]
    if advice := [text for row in noisy for text in _advice(comparison, row)]:
        yield f"too noisy for a verdict: {_first_of(advice)}; run more seeds of these and of the baseline"


def _advice(comparison: Comparison, row: Row) -> Iterator[str]:
    """Yield how many seeds an unclear row needs, if its interval is known."""
    effect, half_width = _judged(comparison, row)
    if effect and effect.low is not None:
        n = min(_num_seeds(comparison, each) for each in (row.configuration, comparison.baseline))
        seeds = seeds_needed(effect, half_width=half_width, n=n, comparisons=len(comparison.candidates))
        wanted = f"about {seeds} would do" if seeds else f"not even {MOST_SEEDS} would do; reduce the noise"
        yield f"{row.configuration.short} ({n} seeds; {wanted})"


def _num_seeds(comparison: Comparison, configuration: Configuration) -> int:
    """Return how many seeds an effect is computed from; for metrics to a target these include diverged runs."""
    if comparison.is_to_target:
        return len(targets.needs(configuration, comparison.metric.name, comparison.targets[0]))
    return len(configuration.ok)


def _judged(comparison: Comparison, row: Row) -> tuple[Effect | None, float]:
    """Return the effect behind a row's verdict, and an interval half width at which a verdict would be possible.

    At this half width either a null effect or an effect of the present size would be recognized.
    """
    effect = row.gain.effect
    value = effect.value if effect else 1.0
    if comparison.metric.name == "test_accuracy":
        return effect, max(SAME_ACCURACY[1], abs(value))
    return effect, max((SAME_FACTOR[1] - 1.0) * value, abs(value - 1.0))


def _repeats(comparison: Comparison) -> Iterator[str]:
    counted = {id(repeat.counted) for repeat in comparison.repeats}
    runs = [
        (each.short, run["seed"]) for each in _configurations(comparison) for run in each.runs if id(run) in counted
    ]
    if runs:
        listing = _first_of([f"{name} seed {seed}" for name, seed in runs])
        yield f"run more than once: {listing}; only the newest run of each that ended well counts"


def _dirty(comparison: Comparison) -> Iterator[str]:
    if dirty := [each for each in _configurations(comparison) if True in each.distinct("git_dirty")]:
        yield f"{_names(dirty)}: run from a checkout with uncommitted changes, so git_sha does not identify the code"


def _configurations(comparison: Comparison) -> list[Configuration]:
    return [row.configuration for row in comparison.rows]


def _differing(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return those columns in which the rows differ, except the columns in ``--by``."""
    return [name for name in names if name not in comparison.by and len(_distinct(comparison, name)) > 1]


def _distinct(comparison: Comparison, name: str) -> list[Any]:
    if name in _NONE_COUNTS:
        return list(dict.fromkeys(run[name] for each in _configurations(comparison) for run in each.runs))
    values = [value for configuration in _configurations(comparison) for value in configuration.distinct(name)]
    return list(dict.fromkeys(values))


def _listing(comparison: Comparison, names: list[str]) -> str:
    return ", ".join(
        f"{name} ({' / '.join(format_value(name, value) for value in _distinct(comparison, name))})" for name in names
    )


def _names(configurations: Sequence[Configuration]) -> str:
    return _first_of([configuration.short for configuration in configurations])


def _first_of(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more
