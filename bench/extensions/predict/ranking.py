"""Find and print the fastest pair of compressor and collective: on given links, by link rate, and by number of ranks.

`bench predict` ranks all compressors on given links, compares one compressor with dense gradients over a range of link
rates (a curve), or shows the fastest pair at each rate and number of ranks (a map).
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from rich.markup import escape

from bench.cli.console import plain_table, print_json, stdout_console
from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.units import format_bytes, format_rate, format_seconds, parse_rate
from bench.core.waiting import waiting
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.fastest import PredictedPair, fastest
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.request import (
    BASELINE,
    DDP,
    PredictionRequest,
    check,
    check_predictable,
    check_request,
    columns,
    first_epoch_columns,
    predicted,
    predicted_in_first_epoch,
    request_from_options,
)
from bench.extensions.predict.script_profile import Profile
from bench.extensions.predict.sentences import (
    ACCURACY,
    about,
    first_epoch_note,
    group_note,
    grouped,
    heading,
    in_first_epoch,
    num_not_told_apart,
    where_it_pays,
)
from bench.extensions.predict.validation import NOT_CHECKED, latency_note, notes, outside, range_notes
from bench.strategies.local import Local
from collectives.base import Collective
from collectives.options import incompatibility, raise_first
from collectives.refusals import refuse
from compressors.base import Compressor

# Largest number of ranks for which all collectives are tried; with more ranks, only the one of a run is tried.
MOST_TRIED = 64
POINTS_PER_DECADE, MAP_POINTS_PER_DECADE = 6, 3
# Largest number of ranks in a map, which needs hundreds of predictions.
MOST_RANKS = 1024
# Columns that a sweep over link rates sets.
SWEPT = ("uplink_bps", "downlink_bps")


def on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return one request per collective that the compressor can use; the first is what a run would choose.

    If `request` names a collective, or ranks do not wait for each other, or there are more than `MOST_TRIED` ranks, the
    list has one request only.

    Raises:
        UsageError: a component is unknown or not calibrated, or cannot be combined or predicted.
    """
    default = check_request(calibration, request)
    if request.collective or not request.waits or request.world_size > MOST_TRIED:
        return [default]
    return [default, *(pair for pair in pairs(default, [default.compressor]) if pair != default)]


def dense_on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return a request per collective for dense 16-bit gradients on the same ranks and links; `local` becomes `ddp`.

    Raises:
        UsageError: dense 16-bit gradients are not calibrated.
    """
    strategy = DDP if request.waits else request.strategy
    dense = dataclasses.replace(request, compressor=BASELINE, collective="", strategy=strategy)
    return on_each_collective(calibration, dense)


def dense_name(request: PredictionRequest) -> str:
    """Return the name of the dense gradients with which a request is compared."""
    return f"dense {BASELINE}" + (" with ddp" if request.is_local else "")


def pairs(request: PredictionRequest, compressors: Iterable[str]) -> Iterator[PredictionRequest]:
    """Yield a request for each compressor with each collective that can sum its payloads, on the same ranks and links.

    If hosts have several ranks, a hierarchical collective (within hosts, then between hosts) is included. `native` is
    left out, because `ring` sends the same messages.
    """
    strategy, names = spec.build("strategies", request.strategy), [*registry.entries("collectives")]
    if 1 < request.ranks_per_host < request.world_size:
        names.append(str(spec.build("collectives", f"hierarchical:group_size={request.ranks_per_host}")))
    for name in dict.fromkeys(names):
        collective = cast(Collective, spec.build("collectives", name))
        if (
            name == "native"
            or incompatibility(check_predictable, collective)
            or incompatibility(refuse, collective.rank_refusals, request.world_size)
        ):
            continue
        for name_of_compressor in compressors:
            compressor = cast(Compressor, spec.build("compressors", name_of_compressor))
            if isinstance(strategy, Local) and incompatibility(refuse, strategy.pair_refusals, compressor, collective):
                continue
            if not incompatibility(compressor.check_compatible, collective):
                yield dataclasses.replace(request, compressor=name_of_compressor, collective=name)


def ranked(calibration: Calibration, request: PredictionRequest) -> tuple[list[PredictedPair], dict[str, str]]:
    """Predict each calibrated compressor on its fastest collective, and return the predictions, the fastest first.

    The second returned value says, by compressor, why a compressor was left out.

    Raises:
        UsageError: no compressor can be predicted.
    """
    found, refused = [], {}
    for number, name in enumerate(calibration.encoded, 1):
        waiting.doing(f"predicting {name}, {number} of {len(calibration.encoded)}")
        try:
            requests = on_each_collective(calibration, dataclasses.replace(request, compressor=name))
        except UsageError as reason:
            refused[name] = str(reason)
        else:
            found.append(fastest(calibration, requests))
    if not found:
        raise UsageError(next(iter(refused.values())))
    return sorted(found, key=lambda pair: -pair.prediction.samples_per_s), refused


def step_as_it_is(profile: Profile, request: PredictionRequest) -> float:
    """Return the predicted seconds of a step of the profiled script without changes, on the requested links."""
    plain = dataclasses.replace(request, compressor="none", collective="native", trigger="async")
    return predicted(profile, check_request(profile, plain)).step_time_s


def print_table(rows: Sequence[Mapping[str, str]], *, left: Collection[str]) -> None:
    """Print rows (cells by heading) as a table; the columns in `left` are aligned left, the others right."""
    table = plain_table()
    for name in rows[0]:
        table.add_column(
            name, justify="left" if name in left else "right", no_wrap=name == "compressor", overflow="fold"
        )
    for row in rows:
        table.add_row(*row.values())
    stdout_console().print(table)


def rank_compressors(known: Calibration, options: PredictConfig, *, as_json: bool) -> None:
    """Print the predictions for all calibrated compressors on the same links, the fastest first."""
    job = request_from_options(options)
    found, left_out = ranked(known, job)
    dense = fastest(known, dense_on_each_collective(known, job)) if BASELINE in known.encoded else None
    num_close = num_not_told_apart(known, found)
    rows = [
        columns(pair.request, known, pair.prediction, predicted_in_first_epoch(known, pair.request))
        | {"told_apart": number >= num_close}
        | ({"times_as_fast": pair.prediction.samples_per_s / dense.prediction.samples_per_s} if dense else {})
        for number, pair in enumerate(found)
    ]
    said = [
        *group_note(known, found[:num_close]),
        *first_epoch_note(known, [pair.request.compressor for pair in found]),
    ]
    said += [*dict.fromkeys(note for pair in found for note in notes(known, pair.request, range_too=False))]
    said += [*range_notes(known, [pair.request for pair in found]), *latency_note(options, found[0].request)]
    as_it_is = [step_as_it_is(known, job)] if isinstance(known, Profile) else []
    if not job.collective and job.waits and job.world_size > MOST_TRIED:
        said.append(f"With more than {MOST_TRIED} ranks, each compressor uses the collective that a run would choose")
    said += [*(f"{name} is left out: {reason}" for name, reason in left_out.items()), ACCURACY]
    if as_json:
        print_json({"ranking": rows, "notes": said} | ({"step_as_it_is_s": as_it_is[0]} if as_it_is else {}))
        return
    print(about(known), heading(found[0].request, of_all=True), sep="\n")
    for step_s in as_it_is:
        print(f"{known.model} as it is, without compression: a step of {format_seconds(step_s)}")
    cells = [
        {
            "compressor": escape(row["compressor"]),
            "collective": escape(row["collective"]),
            "step": format_seconds(row["step_time_s"]),
            **({"vs bf16": f"{row['times_as_fast']:.2f}x"} if dense else {}),
            "sent": format_bytes(row["payload_bytes_per_step"]),
            "bound by": row["bound_by"],
            **({"first epoch": in_first_epoch(row)} if known.first_epoch else {}),
        }
        for row in rows
    ]
    print_table(grouped(cells, num_close), left=("compressor", "collective", "bound by"))
    print(*said, sep="\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Steps of one compressor and of dense gradients at several link rates.

    Attributes:
        pair: at each rate, the step of the requested compressor, with the named collective or with the fastest one.
        dense: at each rate, the step of dense 16-bit gradients on the fastest collective.
        pays: at each rate, True if the step of the compressor is shorter than the step of dense gradients.
        break_even_bps: interpolated rates at which both steps take equally long.
    """

    pair: list[PredictedPair]
    dense: list[PredictedPair]
    pays: list[bool]
    break_even_bps: list[float]


def sweep(calibration: Calibration, request: PredictionRequest, rates_bps: Sequence[float]) -> Curve:
    """Predict the steps of a compressor and of dense gradients, with all links at each rate (bits per second).

    Raises:
        UsageError: the request cannot be predicted, hosts already have link rates, or dense 16-bit gradients are not
            calibrated.
    """
    pair, dense = (
        [fastest(calibration, [each.at_rate(rate) for each in requests]) for rate in rates_bps]
        for requests in (on_each_collective(calibration, request), dense_on_each_collective(calibration, request))
    )
    times_s, dense_s = ([each.prediction.step_time_s for each in of_all] for of_all in (pair, dense))
    both = list(zip(times_s, dense_s, strict=True))
    ratios, logs = np.log([of_pair / of_dense for of_pair, of_dense in both]), np.log(rates_bps)
    crossings = np.flatnonzero((ratios[:-1] < 0) != (ratios[1:] < 0))
    at = [logs[i] + (logs[i + 1] - logs[i]) * ratios[i] / (ratios[i] - ratios[i + 1]) for i in crossings]
    return Curve(
        pair=pair,
        dense=dense,
        pays=[of_pair < of_dense for of_pair, of_dense in both],
        break_even_bps=np.exp(at).tolist(),
    )


def parse_sweep(text: str, per_decade: int = POINTS_PER_DECADE) -> list[float]:
    """Parse ``bandwidth=1mbit..10gbit``; return rates in bits per second, evenly spaced on a logarithmic scale.

    Raises:
        UsageError: the text has another form.
    """
    name, _, ends = text.partition("=")
    first, dots, last = ends.partition("..")
    if name.strip() != "bandwidth" or not dots:
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit")
    low, high = parse_rate(first.strip()), parse_rate(last.strip())
    if not low < high:
        raise UsageError(f"--sweep '{text}' is not in ascending order; write the slower rate first")
    points = max(2, round(per_decade * math.log10(high / low)) + 1)
    return [float(rate) for rate in np.geomspace(low, high, points)]


def predict_curve(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Print the predictions for one compressor, and for dense 16-bit gradients, over a range of link rates."""
    rates = parse_sweep(text)
    checked = check(options, known)
    curve = sweep(known, request_from_options(options), rates)
    said = list(dict.fromkeys(said for pair in (curve.pair[0], curve.pair[-1]) for said in notes(known, pair.request)))
    said += [*latency_note(options, checked), *where_it_pays(checked, curve.pays, curve.break_even_bps)]
    said += [*first_epoch_note(known, [checked.compressor]), ACCURACY]
    points = list(zip(rates, curve.pair, curve.dense, strict=True))
    of_first = [predicted_in_first_epoch(known, pair.request) for pair in curve.pair]
    if as_json:
        rows = [
            {
                "bandwidth_bps": rate,
                "step_time_s": pair.prediction.step_time_s,
                "exposed_s": pair.prediction.exposed_s,
                "payload_bytes_per_step": pair.prediction.payload_bytes_per_step,
                "bound_by": pair.prediction.bound_by,
                "collective": pair.request.collective,
                "dense_step_time_s": dense.prediction.step_time_s,
                "dense_collective": dense.request.collective,
                **first_epoch_columns(first),
            }
            for (rate, pair, dense), first in zip(points, of_first, strict=True)
        ]
        print_json(
            {
                **columns(checked, known, without=SWEPT),
                "curve": rows,
                "break_even_bps": curve.break_even_bps,
                "notes": said,
            }
        )
        return
    where = ", ".join(dict.fromkeys(dense.request.collective for dense in curve.dense))
    method = checked.compressor if checked.is_ddp else f"{checked.compressor}, {checked.strategy}"
    print(about(known))
    print(f"{method}, {checked.world_size} ranks, compared with {dense_name(checked)} on {where}")
    cells = [
        {
            "bandwidth": format_rate(rate),
            "step": format_seconds(pair.prediction.step_time_s),
            "collective": pair.request.collective,
            "bound by": pair.prediction.bound_by,
            "dense bf16": format_seconds(dense.prediction.step_time_s),
            "vs bf16": f"{dense.prediction.step_time_s / pair.prediction.step_time_s:.2f}x",
            **({"first epoch": in_first_epoch(first_epoch_columns(first))} if first else {}),
        }
        for (rate, pair, dense), first in zip(points, of_first, strict=True)
    ]
    print_table(cells, left=("collective", "bound by"))
    print(*said, sep="\n")


def regimes(
    calibration: Calibration, jobs: Sequence[PredictionRequest], rates_bps: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the fastest calibrated compressor and its fastest collective, for every job and every link rate.

    The result has one dict for each job and rate, with the rate of all links (`bandwidth_bps`), `world_size`,
    `compressor`, `collective`, `step_time_s`, the step time of dense 16-bit gradients on their fastest collective
    (`dense_step_time_s`), `speedup` (dense step time / step time), and `outside`: why the request is outside the range
    that was checked against real runs; None if it is inside.

    Args:
        calibration: the calibration from which steps are predicted.
        jobs: requests that give ranks and links; their compressors and collectives are ignored.
        rates_bps: rates of all links in bits per second.

    Raises:
        UsageError: hosts already have link rates, or dense 16-bit gradients are not calibrated.
    """
    found = []
    for job in jobs:
        default = dense_on_each_collective(calibration, job)[0]
        dense, others = [default, *pairs(default, [BASELINE])], [*pairs(job, calibration.encoded)]
        for rate in rates_bps:
            waiting.doing(f"predicting {job.world_size} ranks at {format_rate(rate)}")
            base = fastest(calibration, [pair.at_rate(rate) for pair in dense])
            # Of equally fast pairs, the first is chosen, which is dense.
            best = fastest(calibration, [base.request, *(pair.at_rate(rate) for pair in others)])
            found.append(
                {
                    "bandwidth_bps": rate,
                    "world_size": job.world_size,
                    "compressor": best.request.compressor,
                    "collective": best.request.collective,
                    "step_time_s": best.prediction.step_time_s,
                    "dense_step_time_s": base.prediction.step_time_s,
                    "outside": outside(calibration, best.request),
                    "speedup": base.prediction.step_time_s / best.prediction.step_time_s,
                }
            )
    return found


def parse_world_sizes(text: str) -> list[int]:
    """Parse ``2..64``; return 2, 4, 8, .. 64. The last number is always included.

    Raises:
        UsageError: the text has another form.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()) or not 2 <= int(first) < int(last) <= MOST_RANKS:
        raise UsageError(f"world_size={text} is not possible; write it like world_size=2..64, at most {MOST_RANKS}")
    sizes = [int(first)]
    while 2 * sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    return [*sizes, int(last)]


def predict_map(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Print the fastest compressor and collective at each link rate and each number of ranks that `text` names."""
    rates_text, comma, sizes_text = text.partition(",")
    variable, _, sizes = sizes_text.partition("=")
    set_by_map = (
        "compressor", "collective", "strategy", "straggler", "world_size", "hosts", "ranks_per_host", "cluster_file",
    )  # fmt: skip
    given = [
        option.flag_name
        for option in PredictConfig.options()
        if option.name in set_by_map and getattr(options, option.name) != option.default
    ]
    raise_first(
        UsageError,
        (
            comma != "" and variable.strip() != "world_size",
            f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit,world_size=2..64",
        ),
        (
            comma != "" and bool(given),
            "a map over rates and ranks tries all compressors and collectives on equal hosts with one rank each; leave "
            f"out {', '.join(given)}",
        ),
        (
            bool(options.collective),
            f"--sweep tries all collectives; name a --compressor, or leave out --collective {options.collective}",
        ),
    )
    checked = check(dataclasses.replace(options, compressor=BASELINE), known)
    jobs = [checked]
    if comma:
        jobs = [dataclasses.replace(checked, hosts=checked.hosts[:1] * size) for size in parse_world_sizes(sizes)]
    found = regimes(known, jobs, parse_sweep(rates_text, per_decade=MAP_POINTS_PER_DECADE))
    beyond = sum(each["outside"] is not None for each in found)
    said = [*notes(known, checked, range_too=False), *latency_note(options, checked)]
    if beyond:
        said.append(f"{NOT_CHECKED}: {beyond} of {len(found)} cells; bench predict --validate does that")
    said.append(ACCURACY)
    if as_json:
        print_json(
            {
                **columns(checked, known, without=(*SWEPT, "compressor", "collective", "world_size", "hosts")),
                "regimes": found,
                "notes": said,
            }
        )
        return
    rows: dict[float, dict[str, str]] = {}
    for each in found:
        row = rows.setdefault(each["bandwidth_bps"], {"bandwidth": format_rate(each["bandwidth_bps"])})
        row[f"{each['world_size']} ranks"] = f"{each['compressor']}+{each['collective']} {each['speedup']:.1f}x"
    print(about(known))
    print(f"the fastest pair, and how many times as fast as {dense_name(jobs[0])} on its fastest collective")
    print_table(list(rows.values()), left=[f"{each['world_size']} ranks" for each in found])
    print(*said, sep="\n")
