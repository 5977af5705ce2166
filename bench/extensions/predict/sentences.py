"""The sentences above and below the tables of `bench predict`."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bench.core.units import format_bytes, format_rate, format_seconds
from bench.extensions.predict.calibrating import denser_epochs
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.fastest import PredictedPair
from bench.extensions.predict.request import BASELINE, PredictionRequest
from bench.extensions.predict.script_profile import Profile
from bench.extensions.predict.validation import error_of

ACCURACY = (
    "Accuracy is not predicted: bench decide measures it in trainings here, and docs/methods.md says what was measured"
)


def about(calibration: Calibration) -> str:
    """Return one line that names the model and its number of parameters."""
    numel = calibration.numel
    return f"{calibration.about}, {f'{numel / 1e6:.3g} million' if numel >= 1e6 else f'{numel:,}'} parameters"


def heading(checked: PredictionRequest, *, of_all: bool = False) -> str:
    """Return one line that describes the predicted job; if `of_all` is True, the line does not name the compressor."""
    strategy = "" if checked.is_ddp else checked.strategy
    where = checked.collective if checked.waits else checked.strategy
    rate = "on links without a limit" if checked.slowest_bps is None else f"at {format_rate(checked.slowest_bps)}"
    if len({dataclasses.replace(host, name="any") for host in checked.hosts}) > 1:
        rate += " on the slowest link"
    delay = max(host.latency_s for host in checked.hosts)
    parts = [
        "" if of_all else f"{checked.compressor} on {where}",
        strategy if of_all or checked.waits else "",
        f"{checked.world_size} ranks",
        f"{checked.link_trace}, {rate} on average" if checked.link_trace else rate,
        f"one-way delay {format_seconds(delay)}" if delay else "",
        f"a straggler ({checked.straggler_text})" if checked.straggler_text else "",
    ]
    return ", ".join(filter(None, parts))


def in_first_epoch(row: Mapping[str, Any]) -> str:
    """Return the time and the bytes of a step in the first epoch from a row of `columns`; empty without a warm-up."""
    step_s, nbytes = row["first_epoch_step_time_s"], row["first_epoch_payload_bytes_per_step"]
    return "" if step_s is None else f"{format_seconds(step_s)}, {format_bytes(nbytes)}"


def first_epoch_note(calibration: Calibration, compressors: Collection[str]) -> list[str]:
    """Return a sentence about the first epochs of the methods that send more then; no sentence if there are none."""
    denser = {name: epochs for name in compressors if (epochs := denser_epochs(name))}
    if not denser:
        return []
    name, last = next(iter(denser)), max(denser.values())
    option = f"{name}{',' if ':' in name else ':'}warmup_epochs=0"
    unless = ", or do not call hook.set_epoch in your script" if isinstance(calibration, Profile) else ""
    return [
        f"first epoch: a step at the start of the density warm-up, which ends after epoch {last} at the latest; to "
        f"leave it out, write {option}{unless}"
    ]


def num_not_told_apart(calibration: Calibration, ranking: Sequence[PredictedPair]) -> int:
    """Return how many of the first methods of a ranking differ from the fastest by less than the error of predictions.

    Args:
        calibration: the calibration that the predictions were made from.
        ranking: the predicted methods, the fastest first.
    """
    best = ranking[0]
    least = best.prediction.samples_per_s / (1 + error_of(calibration, best.request))
    return sum(pair.prediction.samples_per_s >= least for pair in ranking)


def group_note(calibration: Calibration, close: Sequence[PredictedPair]) -> list[str]:
    """Return a sentence that names the methods that are not told apart; no sentence if the fastest one is alone."""
    if len(close) < 2:
        return []
    *names, last = (pair.request.compressor for pair in close)
    error = error_of(calibration, close[0].request)
    return [
        f"Not told apart: {', '.join(names)} and {last} differ by less than such predictions may be wrong ({error:.0%})"
    ]


def grouped(rows: Sequence[dict[str, str]], num_close: int) -> list[dict[str, str]]:
    """Return the rows of a table, with a row above those that are not told apart and one above the slower ones.

    Args:
        rows: the cells of each row, by heading; the first heading is that of the method.
        num_close: number of methods at the top that are not told apart; 1 if the first one is the fastest.
    """
    if num_close < 2:
        return [*rows]
    first, *others = rows[0]

    def group(title: str, members: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        above = {first: title} | dict.fromkeys(others, "")
        return [above, *(row | {first: f"  {row[first]}"} for row in members)] if members else []

    return [*group("not told apart:", rows[:num_close]), *group("slower:", rows[num_close:])]


def where_it_pays(checked: PredictionRequest, pays: Sequence[bool], break_even_bps: Sequence[float]) -> list[str]:
    """Return a sentence that says at which link rates the compressor is faster than dense 16-bit gradients.

    Args:
        checked: the request, whose compressor was predicted over a range of rates.
        pays: at each rate, ascending, True if the compressor's step is shorter.
        break_even_bps: rates at which both steps take equally long.
    """
    if checked.compressor == BASELINE and not checked.is_local:
        return []
    it = "uncompressed in 32 bits is faster" if checked.compressor == "none" else "compression pays"
    if all(pays):
        return [f"{it} over the whole range"]
    if not any(pays):
        return [
            "16 bits are faster over the whole range"
            if checked.compressor == "none"
            else "compression does not pay anywhere in the range"
        ]
    first, *others = map(format_rate, break_even_bps)
    between = [f"between {low} and {high}" for low, high in itertools.pairwise((first, *others))]
    stretches = [f"below {first}", *between, f"above {(first, *others)[-1]}"]
    return [f"{it} {', and '.join(stretches[0 if pays[0] else 1 :: 2])}"]
