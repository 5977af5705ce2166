"""The tables of a decision: its methods, the checks on the link, step times, and the link itself."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.units import format_bytes, format_rate, format_seconds
from bench.deciding.answer import Answer, LinkCheck, factor_of
from bench.deciding.decision import Evidence
from bench.deciding.step_times import SAME_LEVEL
from bench.report.columns import NOTHING, format_points, format_value
from bench.report.tables import Table, TableCell, TableColumn, table_of

_STYLES = {"faster": "green", "slower": "red", "missed": "red", "open": "yellow"}
_NAME = TableColumn("method", "left", 0)


def decision_table(answer: Answer) -> Table:
    """Return the table of a decision, with the answer above it and explanations below it."""
    decisions = {each.method: each for each in answer.decisions}
    records = {each["method"]: each for each in answer.to_dict()["decisions"]}
    baseline, quality = answer.baseline.method, answer.baseline.quality

    def time_to_target(evidence: Evidence) -> TableCell:
        reached = [each.seconds for each in evidence.times if each.reached]
        mean = statistics.fmean(reached) if reached else None
        return TableCell(text=NOTHING if mean is None else format_seconds(mean), raw={"time_to_target_s": mean})

    def first_epochs(evidence: Evidence) -> TableCell:
        seconds = _denser_s(evidence)
        return TableCell(text=format_seconds(seconds) if seconds else NOTHING, raw={"first_epochs_s": seconds})

    def reached(evidence: Evidence) -> TableCell:
        number, total = sum(each.reached for each in evidence.times), len(evidence.times)
        return TableCell(text=f"{number}/{total}", raw={"num_reached": number, "num_seeds": total})

    def factor(evidence: Evidence) -> TableCell:
        if evidence.method not in decisions:
            return TableCell(raw=dict.fromkeys(("factor", "low", "high")))
        record = records[evidence.method]
        return TableCell(
            text=factor_of(decisions[evidence.method]), raw={name: record[name] for name in ("factor", "low", "high")}
        )

    def verdict(evidence: Evidence) -> TableCell:
        text = decisions[evidence.method].verdict if evidence.method in decisions else "baseline"
        return TableCell(text=text, raw={"verdict": text}, style=_STYLES.get(text, ""))

    def change(evidence: Evidence) -> TableCell:
        names = [quality.name, f"{quality.name}_low", f"{quality.name}_high", f"{quality.name}_verdict"]
        record = records.get(evidence.method, {})
        decision = decisions.get(evidence.method)
        text = NOTHING
        if decision is not None and decision.accuracy is not None:
            text = f"{format_points(decision.accuracy.value)} {decision.accuracy_verdict}"
        return TableCell(text=text, raw={name: record.get(name) for name in names})

    columns: list[tuple[TableColumn, Callable[[Evidence], TableCell]]] = [
        (_NAME, lambda each: TableCell(text=each.method, raw={"method": each.method})),
        (TableColumn("reached"), reached),
        (TableColumn("to target"), time_to_target),
        *([(TableColumn("first epochs"), first_epochs)] if any(map(_denser_s, answer.evidence)) else []),
        (TableColumn(f"sooner than {baseline}"), factor),
        (TableColumn("verdict"), verdict),
        (TableColumn(quality.noun), change),
    ]
    origin = "whole runs on the link" if answer.baseline.step_times is None else "measured step times"
    notes = [
        f"to target: mean over seeds that reached it, from {origin}",
        f"{quality.noun}: change from {baseline} in {quality.unit}",
    ]
    if any(map(_denser_s, answer.evidence)):
        notes.append(
            "first epochs: part of this time in which steps send more than at the end, such as a density warm-up; to "
            "leave it out, write warmup_epochs=0: topk:ratio=0.01,warmup_epochs=0"
        )
    if answer.faster_up_to:
        above = f">{format_rate(max(answer.rates_tried))}"
        limits = {name: above if rate == math.inf else format_rate(rate) for name, rate in answer.faster_up_to.items()}
        notes.append(f"faster up to: {', '.join(sorted(map(' '.join, limits.items())))}")
    texts = {"cautions": answer.warnings, "answer": answer.sentences, "title": answer.question, "notes": notes}
    return table_of(columns, answer.evidence, **texts)


def _denser_s(evidence: Evidence) -> float:
    """Return the mean seconds to the target in which steps send more than at the end; 0 if all were timed alike."""
    if evidence.step_times is None or len(evidence.step_times.nbytes) < 2:
        return 0.0
    found = []
    for each in evidence.trajectories:
        last = each.intervals[-1][2]
        if each.num_to_target is not None:
            denser = {nbytes: count for nbytes, count in each.steps.items() if nbytes > SAME_LEVEL * last}
            found.append(evidence.step_times.training_s(denser) if denser else 0.0)
    return statistics.fmean(found) if found else 0.0


def check_table(answer: Answer) -> Table:
    """Return the table of the whole runs that checked composed times."""
    columns: list[tuple[TableColumn, Callable[[LinkCheck], TableCell]]] = [
        (_NAME, lambda each: TableCell(text=each.method)),
        (TableColumn("seed"), lambda each: TableCell(text=str(each.seed))),
        (TableColumn("composed"), lambda each: TableCell(text=format_seconds(each.composed_s))),
        (TableColumn("whole run"), lambda each: TableCell(text=format_seconds(each.measured_s))),
        (TableColumn("difference"), lambda each: TableCell(text=f"{each.deviation:+.1%}")),
        (TableColumn("same losses"), lambda each: TableCell(text="yes" if each.is_same_training else "no")),
    ]
    note = "composed: number of steps x their duration on the link, timed right before and after the whole run"
    title = "Check: composed time to the target against a whole run"
    return table_of(columns, answer.checks, title=title, notes=[note])


def step_table(answer: Answer) -> Table:
    """Return the table of the mean duration of a step of each method on the link, in each job that timed steps."""
    timed = [each for each in answer.evidence if each.step_times is not None and each.steps]
    num_jobs = max((len(each) for _, each in map(step_seconds, timed)), default=0)
    columns: list[tuple[TableColumn, Callable[[Evidence], TableCell]]] = [
        (_NAME, lambda each: TableCell(text=each.method)),
        (TableColumn("sent per step"), lambda each: TableCell(text=format_bytes(_mean_bytes(each)))),
        (TableColumn("mean step"), lambda each: TableCell(text=format_seconds(step_seconds(each)[0]))),
        *((TableColumn(f"job {number + 1}"), _of_job(number)) for number in range(num_jobs)),
    ]
    note = "A step is an average step of the training up to the target. Each job timed all methods in random order."
    return table_of(columns, timed, title="Step times on the link", notes=[note])


def step_seconds(evidence: Evidence) -> tuple[float, list[float]]:
    """Return the mean seconds of a step on the link over all jobs, and the mean in each job."""
    times, steps = evidence.step_times, evidence.steps
    if times is None:
        return math.nan, []
    number = sum(steps.values())
    of_jobs = [times.training_s(steps, job) / number for job in range(len(times.seconds))]
    return times.training_s(steps) / number, of_jobs


def _of_job(number: int) -> Callable[[Evidence], TableCell]:
    return lambda each: TableCell(text=format_seconds(step_seconds(each)[1][number]))


def _mean_bytes(evidence: Evidence) -> float:
    return sum(nbytes * count for nbytes, count in evidence.steps.items()) / sum(evidence.steps.values())


def link_table(flows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the link's connections as measured.

    Args:
        flows: entries of ``flows`` in the file `link.json` of a run.
    """
    names = ("configured_bps", "long_bps", "short_bps")
    columns: list[tuple[TableColumn, Callable[[dict[str, Any]], TableCell]]] = [
        (TableColumn("from", "left", 0), lambda each: TableCell(text=each["sender"])),
        (TableColumn("to", "left", 0), lambda each: TableCell(text=each["receiver"])),
        *(
            (TableColumn(heading), lambda each, name=name: TableCell(text=format_value("uplink_bps", each[name])))
            for heading, name in zip(("configured", "long messages", "short messages"), names, strict=True)
        ),
        (TableColumn("round trip"), lambda each: TableCell(text=format_seconds(each["rtt_s"]))),
    ]
    return table_of(columns, flows, title="The link, measured before a whole run")
