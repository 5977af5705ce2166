"""State the verdict of a comparison in sentences, with the caveats that weaken it.

The verdict has at most three lines above a table, and some sentences in a report. Each caveat is one sentence: a reason
to trust the verdict less, and what the user can do.
"""

from collections.abc import Callable, Iterator, Sequence

from bench.core.counters import NOTEWORTHY_SHARE
from bench.report import targets
from bench.report.columns import format_effect, format_factor, format_points, format_value
from bench.report.comparison import BETTER, SAME_FACTOR, WORSE, ComparedRow, Comparison
from bench.report.groups import SETTINGS, WORKLOAD, RunGroup
from bench.report.quality import SAME_CHANGE
from bench.report.statistics import CONFIDENCE, FEWEST_SEEDS, MOST_SEEDS, improvement, seeds_needed
from bench.report.store import Row, Run, grouped, interval_steps

_LISTED = 3
_LINES = 3

_ONE_SEED = "No verdict from one seed"
_MISSED = "No verdict, since seeds missed the target or diverged"
_NOISY = "No verdict, too much noise"
_FAILED = "No run ended well"

# Rows that differ in a column of _MACHINE have incomparable times; rows that differ in _WORK did different work.
_MACHINE = ("host", "cpu", "torch_version", "kernels", "threads", "device")
_WORK = [name for name in (*WORKLOAD, "accumulate") if name not in _MACHINE]
# In these columns an empty cell means "none", not "unknown".
_NONE_COUNTS = ("epochs", "steps", "uplink_bps", "downlink_bps", "link_trace", "cluster_digest", "straggler")
SHORT = 10  # a last evaluation interval this many times shorter than the previous one measures no reliable speed


def in_lines(comparison: Comparison) -> list[str]:
    """Return the verdict in at most three lines, such as ``Faster, no worse in accuracy: topk 1.31x``.

    Rows with the same kind of result share a line. Better rows come first, before equal, worse and unclear rows. If
    there are more than three kinds of result, the third line joins the remaining kinds. If the rows did not do the same
    work, the first line says so.
    """
    if not comparison.candidates:
        return [f"There is only {comparison.baseline.title}, and nothing to compare it with"]
    better, *others = _words(comparison)
    costs = (f", no worse in {comparison.quality.noun}", "", ", at some cost", f", {comparison.quality.noun} unclear")
    headings = [*(better + cost for cost in costs), *others, _ONE_SEED, _NOISY, _MISSED, _FAILED]
    sign = -1.0 if comparison.is_about_quality and not comparison.quality.higher_is_better else 1.0
    rows = sorted(
        comparison.candidates, key=lambda row: sign * row.gain.effect.value if row.gain.effect else 0.0, reverse=True
    )
    groups = grouped(rows, lambda row: _heading(comparison, row))
    said = []
    for heading in filter(groups.__contains__, headings):
        texts = [_text(comparison, row) for row in groups[heading][:_LISTED]]
        more = [f"and {len(groups[heading]) - _LISTED} more"] if len(groups[heading]) > _LISTED else []
        separator = "; " if any("," in text for text in texts) else ", "
        said.append(f"{heading}: {separator.join([*texts, *more])}")
    if mixed := differing(comparison):
        said.insert(0, f"Compare only rows with the same work: these differ in {', '.join(mixed)}")
    return [*said[: _LINES - 1], *filter(None, [". ".join(said[_LINES - 1 :])])]


def _words(comparison: Comparison) -> tuple[str, ...]:
    if comparison.is_about_quality:
        words = ("Higher", "Same", "Lower") if comparison.quality.higher_is_better else ("Lower", "Same", "Higher")
        return tuple(f"{word} {comparison.quality.noun}" for word in words)
    if comparison.is_about_speed:
        return "Faster", "As fast", "Slower"
    if comparison.metric.unit == "bytes":
        return "Fewer bytes", "As many bytes", "More bytes"
    return f"Better in {comparison.metric.name}", "The same", "Worse"


def _heading(comparison: Comparison, row: ComparedRow) -> str:
    better, same, worse = _words(comparison)
    match row.gain.verdict:
        case "failed":
            return _FAILED
        case "unclear" if min(len(row.group.ok), len(comparison.baseline.ok)) <= 1:
            return _ONE_SEED
        case "unclear":
            return _MISSED if row.gain.held_back else _NOISY
        case "same":
            return same
        case "slower" | "worse" | "lower":
            return worse
    quality = comparison.quality
    if comparison.is_about_quality or row.accuracy.effect is None:
        return better
    costs = {"unclear": f"{quality.noun} unclear"} | dict.fromkeys(WORSE, "at some cost")
    return f"{better}, {costs.get(row.accuracy.verdict, f'no worse in {quality.noun}')}"


def _text(comparison: Comparison, row: ComparedRow) -> str:
    name, gain, change = row.group.short, row.gain.effect, row.accuracy.effect
    quality, unit = comparison.quality, comparison.quality.unit
    if gain is None:
        return name
    if comparison.is_about_quality:
        return f"{name} {format_points(gain.value)} {unit}"
    text = f"{name} {format_factor(gain.value)}x"
    if change is None or row.accuracy.verdict in ("same", *BETTER):
        return text
    if row.accuracy.verdict in WORSE:
        amount = quality.amount(f"{100.0 * abs(change.value):.1f}".removesuffix(".0"))
        return f"{text}, {quality.noun} {amount} {'lower' if quality.higher_is_better else 'higher'}"
    return f"{text} ({format_points(change.value)} {unit})"


_GAINS = {"time_to_target_s": "sooner at the target than", "samples_per_s": "faster than"}


def answer(comparison: Comparison) -> str:
    """Return a sentence that says whether compression is better than the baseline in the metric of the comparison."""
    baseline, rows = comparison.baseline, comparison.candidates
    if not rows:
        return f"There is only {baseline.title}, and nothing to compare it with."
    if not baseline.is_dense:
        return f"These runs do not show whether compression pays: the baseline, {baseline.title}, also compresses."
    rows = [row for row in rows if not row.group.is_dense]
    if not rows:
        return "These runs do not show whether compression pays: no row compresses."
    quality = comparison.quality
    better = [row for row in rows if row.gain.verdict in BETTER]
    than = f"better in {quality.noun} than" if comparison.is_about_quality else _GAINS[comparison.metric.name]
    gain = f"{than} {baseline.title}"
    if kept := [row for row in better if row.accuracy.verdict in ("same", *BETTER)]:
        return f"Yes: {_titles(kept)} {gain}, and no worse in {quality.noun}."
    if better:
        return f"Perhaps: {_titles(better)} {gain}, but worse in {quality.noun}, or that is unclear."
    if unclear := [row for row in rows if row.gain.verdict in ("unclear", "failed")]:
        return f"These runs do not show whether {_titles(unclear)} {gain}."
    return f"No: no row is {gain}."


def _titles(rows: Sequence[ComparedRow]) -> str:
    # The subject of a sentence with its verb: ``a, b and c are``.
    *most, last = (row.group.title for row in rows)
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


def evidence(row: ComparedRow) -> str:
    """Return a sentence with the effects that were measured for a row of the comparison."""
    gain, accuracy, quality = row.gain, row.accuracy, row.group.quality
    parts: list[str] = [] if gain.verdict == "failed" and gain.effect is None else [gain.verdict]
    if gain.effect:
        parts = [f"{gain.verdict}, {format_effect(gain.effect, lambda factor: f'{format_factor(factor)}x')}"]
    if accuracy.effect:
        change = format_effect(accuracy.effect, format_points)
        parts.append(f"{quality.noun} {accuracy.verdict}, {change} {quality.unit}")
    return f"{row.group.title}: {'; '.join(parts) or 'no run ended well'}."


def cautions(comparison: Comparison) -> Iterator[str]:
    """Yield the warnings to show above the table, if its rows come from different machines or versions of the code."""
    if found := differing(comparison, _MACHINE):
        yield (
            f"the rows come from different machines or versions, so their times cannot be compared: "
            f"{', '.join(found.values())}; run all of them on one machine, or hide this with --allow-other-machine"
        )
    if found := differing(comparison, ("git_sha",)):
        yield f"the rows come from different versions of the code: {', '.join(found.values())}"


def caveats(comparison: Comparison) -> Iterator[str]:
    """Yield all warnings about a comparison except those of `cautions`, the most serious first."""
    groups = comparison.groups
    runs = [(group.short, run) for group in groups for run in group.runs]
    yield from (
        f"{name}: seed {run['seed']} {run.ending} and does not count: {run['error'] or 'no reason is recorded'} "
        f"({run['run_id']})"
        for name, run in runs
        if not run.ended_well
    )
    if texts := [f"{run.title}, {run.ending} ({run['run_id']})" for run in comparison.unfinished]:
        yield f"not in the table, because they did not finish: {_first_of(texts)}"
    yield from of_runs(comparison)
    if found := differing(comparison):
        yield (
            f"the rows differ in {', '.join(found.values())}, so a difference in results may come from these settings; "
            "choose comparable rows with --where"
        )
    if any(run["stop_at_target"] for _, run in runs):
        noun = comparison.quality.noun
        yield f"runs with --stop-at-target ended at their target, so they do not show the {noun} of a whole training"
    yield from _warm_up(comparison)
    yield from _sent_at_first(comparison)
    for group in groups:
        if mixed := [name for name in SETTINGS if name not in comparison.by and len(group.distinct(name)) > 1]:
            yield (
                f"{group.short} averages runs that differ in {', '.join(mixed)}, so its intervals mix noise with "
                "the effect of these settings; to show such runs in separate rows, write --by "
                f"{','.join([*comparison.by, *mixed])}"
            )
    yield from _missed(comparison)
    yield from _too_few(comparison)
    yield from _other_programs(comparison)
    if texts := [f"{name} seed {run['seed']}" for name, run in runs if run in comparison.repeated]:
        yield f"run more than once: {_first_of(texts)}; of each, only the newest successful run counts"
    if dirty := _names(groups, lambda group: True in group.distinct("git_dirty")):
        yield f"{dirty}: run from a checkout with uncommitted changes, so git_sha does not identify the code"
    if comparison.ambiguity:
        yield comparison.ambiguity


def _warm_up(comparison: Comparison) -> Iterator[str]:
    # The speed-up over the whole run may differ from the one in the last evaluation interval (density warm-up).
    others = []
    for row in comparison.candidates if comparison.metric.name == "samples_per_s" else ():
        speeds = map(_speeds_in_all, (comparison.baseline, row.group))
        in_all, at_last = improvement(*speeds, higher_is_better=True), row.gain.effect
        if in_all and at_last and not SAME_FACTOR[0] <= in_all.value / at_last.value <= SAME_FACTOR[1]:
            others.append(f"{row.group.short} {format_factor(in_all.value)}x")
    if others:
        yield (
            f"averaged over the whole run, the speed-up was: {_first_of(others)} (the table shows each run's last "
            "evaluation interval); --metric time_to_target_s compares whole runs"
        )


def _speeds_in_all(group: RunGroup) -> list[float]:
    # Samples per second over the whole run, for each successful run that recorded the necessary columns.
    speeds = []
    for run in group.ok:
        ranks = run["replicas"] or run["world_size"] or 0
        samples = int((run["step"] or 0) * (run["batch_size"] or 0) * (run["accumulate"] or 1) * ranks)
        if samples and run["train_time_s"]:
            speeds.append(samples / run["train_time_s"])
    return speeds


def _sent_at_first(comparison: Comparison) -> Iterator[str]:
    # Warn about rows that sent more bytes per step over the whole run than in the last evaluation interval.
    more = []
    for group in comparison.groups if comparison.metric.name != targets.BYTES else ():
        factors = []
        for run in group.ok:
            steps, payloads = interval_steps(run.rows), [row["payload_bytes_per_step"] for row in run.rows]
            if run["step"] and run["payload_bytes_per_step"] and None not in (*steps, *payloads):
                in_all = sum(number * nbytes for number, nbytes in zip(steps, payloads, strict=True)) / run["step"]
                if in_all:
                    factors.append(in_all / run["payload_bytes_per_step"])
        if factors and (factor := sum(factors) / len(factors)) > SAME_FACTOR[1]:
            more.append((factor, group.short))
    if more:
        (most, name), *others = sorted(more, reverse=True)
        sent = [f"{name} sent {format_factor(most)}", *(f"{other} {format_factor(factor)}" for factor, other in others)]
        yield (
            f"averaged over the whole run, {_first_of(sent)} times the bytes per step in the table (early steps "
            "compress less); --metric bytes_to_target counts whole runs"
        )


def of_runs(comparison: Comparison) -> Iterator[str]:
    """Yield the warnings about runs that make sense even without a comparison; `bench run` prints them too."""
    groups = comparison.groups
    yield from implausible(comparison)
    if others := [group for group in groups if group.distinct("link_warnings")]:
        where = f"{others[0].short}, and in {len(others) - 1} more rows" if others[1:] else others[0].short
        yield f"{where}: the links were not as configured: {others[0].distinct('link_warnings')[0]}"
    if short := _names(groups, lambda group: any(map(_ends_shortly, group.ok))):
        yield (
            f"{short}: speeds are measured over the last evaluation interval, which is less than a tenth of the one "
            "before; choose an --eval-every that divides the number of steps"
        )
    if fell_back := _names(groups, lambda group: any(group.values("factor_fallbacks"))):
        yield (
            f"{fell_back}: K-FAC sent some factors in another form, or with more damping, than configured (column "
            "factor_fallbacks), so the rows are not exactly of the method that they name"
        )


def implausible(comparison: Comparison) -> Iterator[str]:
    """Yield warnings about ranks that drifted apart, runs that do not learn, and methods that learn suspiciously fast.

    A method that loses information should not need fewer samples than a dense baseline with the same tuning.
    Source: MLPerf's reference convergence points, which are lower bounds on the samples that a run needs.
    """
    for group in comparison.groups:
        if seeds := [str(run["seed"]) for run in group.runs if run.in_sync is False]:
            yield (
                f"{group.short}: the ranks ended with different parameters (seeds: {', '.join(seeds)}), so this was "
                f"not data-parallel training, and the {comparison.quality.noun} is that of one rank's model only"
            )
        if seeds := [str(run["seed"]) for run in group.ok if _has_learned_nothing(comparison, run)]:
            yield (
                f"{group.short}: neither training loss nor test loss fell (seeds: {', '.join(seeds)}), so nothing was "
                "learned and its speed says nothing; check --lr and the method"
            )
    baseline = comparison.baseline
    for group in (row.group for row in comparison.candidates):
        if group.is_dense or not baseline.is_dense or group.distinct("rates_tried") != baseline.distinct("rates_tried"):
            continue
        theirs, ours = ({run["seed"]: _samples_to(comparison, run) for run in each.ok} for each in (baseline, group))
        pairs = [(theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())]
        known = [(their, own) for their, own in pairs if their and own]
        sides = [float(their) for their, _ in known], [float(own) for _, own in known]
        effect = improvement(*sides, higher_is_better=False, paired=True, rule=comparison.rule)
        if effect and effect.p is not None and effect.p < 1.0 - CONFIDENCE and effect.value > SAME_FACTOR[1]:
            yield (
                f"{group.short} needed {format_factor(effect.value)} times fewer samples to the target than "
                f"{baseline.short}, although it loses information; tune the learning rate of both (bench tune) before "
                "you trust its lead"
            )


def _has_learned_nothing(comparison: Comparison, run: Run) -> bool:
    # The training loss alone says too little, because it can come from a few noisy steps.
    if any(_at_target(comparison, run)):
        return False
    losses = [[row[name] for row in run.rows if row[name] is not None] for name in ("train_loss", "test_loss")]
    known = [each for each in losses if len(each) > 1]
    return bool(known) and all(each[-1] >= each[0] for each in known)


def _samples_to(comparison: Comparison, run: Run) -> int | None:
    return next((row["samples"] for row in _at_target(comparison, run)), None)


def _at_target(comparison: Comparison, run: Run) -> Iterator[Row]:
    quality, target = comparison.targets[0].of(run)
    return (row for row in run.rows if target and quality.reaches(row[quality.column], target))


def _ends_shortly(run: Run) -> bool:
    *_, before, last = [None, *interval_steps(run.rows)]
    return before is not None and last is not None and 0 < SHORT * last < before


def _missed(comparison: Comparison) -> Iterator[str]:
    metric = comparison.metric.name if comparison.is_to_target else targets.TIME
    for target in comparison.targets:
        seeds = [(group, targets.needs(group, metric, target)) for group in comparison.groups]
        missed = [(group.short, len(each) - targets.num_reached(each), len(each)) for group, each in seeds]
        if counts := [f"{name} ({number} of {total} seeds)" for name, number, total in missed if number]:
            title = f"the target {comparison.quality.noun}" if target.value is None else target.title
            yield (
                f"missed {title}: {_first_of(counts)}; a seed that missed it counts with everything that it "
                "spent, so the true mean is higher; train longer to reach the target"
            )
        if target.value is None and metric == targets.TIME:
            continue  # the run itself recorded when it reached the target
        reached = [group for group, each in seeds if targets.num_reached(each)]
        if once := _names(reached, lambda group: all(len(run.rows) == 1 for run in group.ok)):
            yield (
                f"{once}: evaluated only once, at the end of the run, so {target.title} may have been "
                "reached long before; run with --eval-every"
            )


def _too_few(comparison: Comparison) -> Iterator[str]:
    """Yield a warning about rows with a single seed, and one with the number of seeds that each unclear row needs.

    With that many seeds, the comparison could show either that there is no effect or that an effect of the measured
    size is real.
    """
    groups = [group for group in comparison.groups if group.ok]
    if single := _names(groups, lambda group: len(group.ok) == 1):
        seeds = ",".join(map(str, range(1, FEWEST_SEEDS + 1)))
        whose = "each" if all(len(group.ok) == 1 for group in groups) else f"of {single}"
        yield f"only one seed {whose}, so noise cannot be distinguished from an effect: run `--seeds {seeds}`"
    advice = []
    for row in comparison.candidates:
        effect = row.gain.effect
        if row.gain.verdict != "unclear" or row.gain.held_back or effect is None or effect.low is None:
            continue
        half_width = (
            max(SAME_CHANGE[1], abs(effect.value))
            if comparison.is_about_quality
            else max((SAME_FACTOR[1] - 1.0) * effect.value, abs(effect.value - 1.0))
        )
        # Time and bytes to a target include diverged runs.
        sides = [
            targets.needs(group, comparison.metric.name, comparison.targets[0]) if comparison.is_to_target else group.ok
            for group in (row.group, comparison.baseline)
        ]
        n = min(map(len, sides))
        enough = seeds_needed(effect, half_width=half_width, n=n, comparisons=len(comparison.candidates))
        wanted = f"about {enough} would do" if enough else f"not even {MOST_SEEDS} would do; reduce the noise"
        advice.append(f"{row.group.short} ({n} seeds; {wanted})")
    if advice:
        yield f"too noisy for a verdict: {_first_of(advice)}; run more seeds of these and of the baseline"


def _other_programs(comparison: Comparison) -> Iterator[str]:
    if noisy := [row for row in comparison.candidates if row.only_wall_clock_is_noisy]:
        verdicts = _first_of([f"{row.group.short} {row.cpu.verdict}" for row in noisy])
        yield (
            f"times are too noisy for a verdict, but CPU time per step says: {verdicts}; other programs were using the "
            "machine or the network: run again when it is idle"
        )
    shares = [(group.short, max(group.values("other_cpu_share"), default=0.0)) for group in comparison.groups]
    if texts := [f"{name} {share:.0%}" for name, share in shares if share > NOTEWORTHY_SHARE]:
        yield (
            f"other programs used some of the cores while these runs were timed: {_first_of(texts)}; their times are "
            "too long: run them again on an idle machine"
        )


def differing(comparison: Comparison, names: Sequence[str] = _WORK) -> dict[str, str]:
    """Return the columns in which the compared rows differ, except the columns of option ``--by``.

    Args:
        comparison: the comparison.
        names: the columns to examine; by default the settings that define the workload.

    Returns:
        For each of these columns, its name and a text with its values, such as ``model (resnet18 / resnet20)``.
    """
    found = {}
    for name in names:
        values = dict.fromkeys(run[name] for group in comparison.groups for run in group.runs)
        known = [format_value(name, value) for value in values if value is not None or name in _NONE_COUNTS]
        if len(known) > 1 and name not in comparison.by:
            found[name] = f"{name} ({' / '.join(known)})"
    return found


def _names(groups: Sequence[RunGroup], applies: Callable[[RunGroup], bool]) -> str:
    return _first_of([group.short for group in groups if applies(group)])


def _first_of(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more
