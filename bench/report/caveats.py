"""Caveats: what a reader must know before believing a comparison, one sentence each, with what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.report import targets
from bench.report.comparison import SAME_ACCURACY, SAME_FACTOR, Comparison, Row
from bench.report.configurations import SETTINGS, Configuration
from bench.report.formats import format_factor, format_value
from bench.report.runs import Run
from bench.report.statistics import FEWEST_SEEDS, MOST_SEEDS, Effect, improvement, seeds_needed
from bench.report.targets import Target
from bench.report.workloads import WORKLOAD

# Columns that make times of two rows incomparable, and columns that make them answer different questions.
_MACHINE = ("host", "cpu", "torch_version", "kernels", "threads", "device")
_WORK = [name for name in (*WORKLOAD, "accumulate") if name not in _MACHINE]
# Here an empty cell says that there is none, and not that it is unknown.
_NONE_COUNTS = ("epochs", "steps", "uplink_bps", "downlink_bps", "link_trace", "cluster_digest", "straggler")
_LISTED = 3
SHORT = 10  # so many times shorter than the one before says too little


def cautions(comparison: Comparison) -> list[str]:
    """What must be known before looking at a number: rows of different machines or versions."""
    sentences = []
    if differing := _differing(comparison, _MACHINE):
        sentences.append(
            f"THE ROWS COME FROM DIFFERENT MACHINES OR VERSIONS: {_listing(comparison, differing)}; their times cannot "
            "be compared: run them on one machine, or silence this with --allow-other-machine"
        )
    if differing := _differing(comparison, ("git_sha",)):
        sentences.append(f"the rows come from different versions of the code: {_listing(comparison, differing)}")
    return sentences


def caveats(comparison: Comparison) -> list[str]:
    """Everything else that weakens a comparison, the gravest first."""
    return [
        *_failures(comparison),
        *_out_of_sync(comparison),
        *_other_work(comparison),
        *_links(comparison),
        *_warm_up(comparison),
        *_sent_at_first(comparison),
        *_short_last_part(comparison),
        *_mixtures(comparison),
        *_missed(comparison),
        *_fallbacks(comparison),
        *_too_few(comparison),
        *_noisy_clock(comparison),
        *_repeats(comparison),
        *_dirty(comparison),
        *([comparison.ambiguity] if comparison.ambiguity else []),
    ]


def _failures(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        for run in row.configuration.runs:
            if not run.ended_well:
                reason = run["error"] or (
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
        if wrong := [run for run in configuration.runs if run.in_sync is False]:
            seeds = ", ".join(str(run["seed"]) for run in wrong)
            yield (
                f"{configuration.title}: the ranks ended with different parameters (seeds: {seeds}); "
                "its accuracy is that of one replica, and the run is not data-parallel training"
            )


def _other_work(comparison: Comparison) -> Iterator[str]:
    if differing := _differing(comparison, _WORK):
        yield (
            f"the rows differ in {_listing(comparison, differing)}: an effect then mixes this with the effect of the "
            "compressor and the collective"
        )


def _links(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        if warnings := configuration.distinct("link_warnings"):
            yield f"{configuration.title}: the links were not as asked for: {warnings[0]}"


def _warm_up(comparison: Comparison) -> Iterator[str]:
    """Speeds are of a run's last part: compressors that send more at first were not as fast from the beginning."""
    if comparison.metric.name != "samples_per_s":
        return
    known = _speeds_in_all(comparison.baseline)
    others = []
    for row in comparison.candidates:
        in_all = improvement(known, _speeds_in_all(row.configuration), higher_is_better=True)
        at_last = row.gain.effect
        if in_all and at_last and not SAME_FACTOR[0] <= in_all.value / at_last.value <= SAME_FACTOR[1]:
            others.append(f"{row.configuration.title} {format_factor(in_all.value)}x")
    if others:
        yield (
            f"speeds are those of each run's last evaluation interval; over whole trainings, warm-up of the density "
            f"included: {'; '.join(others)}; --metric time_to_target_s compares whole runs"
        )


def _sent_at_first(comparison: Comparison) -> Iterator[str]:
    """Bytes per step are of a run's last part too."""
    if comparison.metric.name == targets.BYTES:
        return
    more = []
    for configuration in _configurations(comparison):
        known = [(run.payload_bytes_per_step_in_all, run["payload_bytes_per_step"]) for run in configuration.ok]
        factors = [in_all / at_last for in_all, at_last in known if in_all and at_last]
        if factors and (factor := sum(factors) / len(factors)) > SAME_FACTOR[1]:
            more.append(f"{configuration.title} {format_factor(factor)} times as many")
    if more:
        yield (
            "bytes per step are those of each run's last evaluation interval; over whole trainings: "
            f"{'; '.join(more)}; --metric bytes_to_target counts whole runs"
        )


def _short_last_part(comparison: Comparison) -> Iterator[str]:
    """Speeds of a few steps that were left over say little."""
    short = [each for each in _configurations(comparison) if any(map(_ends_shortly, each.ok))]
    if short:
        yield (
            f"the last evaluation interval of {_names(short)} is less than a tenth of the one before, and speeds are "
            "those of its steps alone; choose --eval-every so that it divides the run"
        )


def _ends_shortly(run: Run) -> bool:
    """Whether its last interval is far shorter than the one before."""
    *_, before, last = [None, *run.interval_steps]
    return before is not None and last is not None and 0 < SHORT * last < before


def _speeds_in_all(configuration: Configuration) -> list[float]:
    return [speed for speed in (run.samples_per_s_in_all for run in configuration.ok) if speed is not None]


def _mixtures(comparison: Comparison) -> Iterator[str]:
    for configuration in _configurations(comparison):
        mixed = [name for name in SETTINGS if name not in comparison.by and len(configuration.distinct(name)) > 1]
        if mixed:
            yield (
                f"{configuration.title} mixes runs that differ in {', '.join(mixed)}, so its intervals are not only "
                "noise; add these to --by"
            )


def _missed(comparison: Comparison) -> Iterator[str]:
    metric = comparison.metric.name if comparison.is_to_target else targets.TIME
    for target in comparison.targets:
        counts = []
        for configuration in _configurations(comparison):
            seeds = targets.needs(configuration, metric, target)
            if missed := len(seeds) - targets.num_reached(seeds):
                counts.append(f"{configuration.title} ({missed} of {len(seeds)} seeds)")
        if counts:
            accuracy = "the target accuracy" if target.accuracy is None else target.title
            yield (
                f"{accuracy} was missed by {'; '.join(counts)}: a seed that missed it counts with all that it spent, "
                "so that its mean is a lower bound; more epochs would tell more"
            )
        if once := [each for each in _configurations(comparison) if _evaluated_once(each, metric, target)]:
            yield (
                f"{_names(once)}: one evaluation per run, so what was needed until {target.title} is known no better "
                "than the run's end; run with --eval-every"
            )


def _evaluated_once(configuration: Configuration, metric: str, target: Target) -> bool:
    """A target was reached at the only evaluation there is, though perhaps long before."""
    found_by_run = target.accuracy is None and metric == targets.TIME
    reached = targets.num_reached(targets.needs(configuration, metric, target))
    return not found_by_run and reached > 0 and all(len(run.rows) == 1 for run in configuration.ok)


def _fallbacks(comparison: Comparison) -> Iterator[str]:
    if fell_back := [each for each in _configurations(comparison) if any(each.values("factor_fallbacks"))]:
        yield (
            f"{_names(fell_back)}: some factors of K-FAC were sent in another form than asked for, or factored with "
            "more damping (factor_fallbacks), so this is not quite the method named"
        )


def _noisy_clock(comparison: Comparison) -> Iterator[str]:
    if noisy := [row for row in comparison.candidates if row.only_wall_clock_is_noisy]:
        verdicts = "; ".join(f"{row.configuration.title} ({row.cpu.verdict})" for row in noisy)
        yield (
            f"only the wall clock is noisy, CPU time per step allows a verdict: {verdicts}; something else was using "
            "the machine or the network: repeat these runs on an idle one"
        )


def _too_few(comparison: Comparison) -> Iterator[str]:
    few = [each for each in _configurations(comparison) if len(each.ok) == 1]
    if few:
        yield (
            f"{_names(few)}: one seed says nothing about noise, so every verdict on it is unclear; "
            f"next: run at least {FEWEST_SEEDS} seeds of each row"
        )
    noisy = [row for row in comparison.candidates if row.verdict == "unclear" and not row.gain.held_back]
    advice = [text for row in noisy for text in _advice(comparison, row)]
    if advice:
        yield f"too noisy for a verdict: {'; '.join(advice)}; next: run more seeds of these and of the baseline"


def _advice(comparison: Comparison, row: Row) -> Iterator[str]:
    """How many seeds an unclear row needs, where its interval is known at all."""
    effect, half_width = _judged(comparison, row)
    if effect and effect.low is not None:
        n = min(_num_seeds(comparison, each) for each in (row.configuration, comparison.baseline))
        seeds = seeds_needed(effect, half_width=half_width, n=n, comparisons=len(comparison.candidates))
        wanted = f"about {seeds} would do" if seeds else f"not even {MOST_SEEDS} would do, find the noise first"
        yield f"{row.configuration.title} ({n} seeds, {wanted})"


def _num_seeds(comparison: Comparison, configuration: Configuration) -> int:
    """On which an effect rests: of what was needed until a target also those that diverged."""
    if comparison.is_to_target:
        return len(targets.needs(configuration, comparison.metric.name, comparison.targets[0]))
    return len(configuration.ok)


def _judged(comparison: Comparison, row: Row) -> tuple[Effect | None, float]:
    """The effect behind a row's verdict, and the half width of its interval that would allow one.

    That it is none; or, if it stays as large as it is, that it is one.
    """
    effect = row.gain.effect
    value = effect.value if effect else 1.0
    if comparison.metric.name == "test_accuracy":
        return effect, max(SAME_ACCURACY[1], abs(value))
    return effect, max((SAME_FACTOR[1] - 1.0) * value, abs(value - 1.0))


def _repeats(comparison: Comparison) -> Iterator[str]:
    if comparison.repeats:
        runs = [each.counted for each in comparison.repeats]
        seeds = [f"{run['compressor']} + {run['collective']} seed {run['seed']}" for run in runs]
        more = f" and {len(seeds) - _LISTED} more" if len(seeds) > _LISTED else ""
        yield (
            f"run more than once: {', '.join(seeds[:_LISTED])}{more}; only the newest ok run of each counts, since "
            "repeats of a seed say nothing about other seeds"
        )


def _dirty(comparison: Comparison) -> Iterator[str]:
    if dirty := [each for each in _configurations(comparison) if True in each.distinct("git_dirty")]:
        yield f"{_names(dirty)}: run from a checkout with uncommitted changes, so git_sha does not identify the code"


def _configurations(comparison: Comparison) -> list[Configuration]:
    return [row.configuration for row in comparison.rows]


def _differing(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Columns of these in which the rows differ though they are not compared by them."""
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
    return "; ".join(configuration.title for configuration in configurations)
