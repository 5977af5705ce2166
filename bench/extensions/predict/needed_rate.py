"""Find the slowest link on which each method reaches a share of the speed that training has without an exchange.

At a share of 80 %, a step takes 1 / 0.8 of its time without an exchange. A step is never longer on a faster link, and
log(step time) is nearly a piecewise linear function of log(rate). So two rates are found between which the step becomes
short enough, and Brent's method finds the rate between them with few predictions. Rates above 100 Gbit/s are
interpolated: a step is assumed to grow linearly with the time that a bit takes.

Source: R. P. Brent, "Algorithms for Minimization without Derivatives" (1973), chapter 4.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from scipy.optimize import brentq

from bench.cli.console import print_json
from bench.core.errors import UsageError
from bench.core.units import MAX_RATE_BPS, format_seconds
from bench.core.waiting import waiting
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.fastest import PredictedPair, fastest
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import SWEPT, on_each_collective, print_table
from bench.extensions.predict.request import (
    PredictionRequest,
    columns,
    predicted,
    request_from_options,
    step_without_exchange_s,
)
from bench.extensions.predict.sentences import ACCURACY, about
from bench.extensions.predict.validation import error_of, latency_note, notes
from collectives.options import raise_first

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
# The share by whose rate methods are sorted, and for which a table of several methods names a link.
MAIN_SHARE = 0.9
LINK_HEADING = f"for {MAIN_SHARE:.0%}"
# Common links with their nominal rates in bits per second, the slowest first. Wi-Fi is that of `--network wifi`.
LINKS = {
    "Wi-Fi": 100e6,
    "110 Mbit/s uplink": 110e6,
    "1 GbE": 1e9,
    "10 GbE": 10e9,
    "25 GbE": 25e9,
    "100 GbE": 100e9,
    "PCIe 4.0 x16": 252e9,
}
# Slowest and fastest link that is simulated, in bits per second.
SLOWEST_BPS, FASTEST_BPS = 1e5, MAX_RATE_BPS
# Largest relative error of a rate, and the ratio of the rates that are tried until one is too slow and one suffices.
PRECISION, STRIDE = 0.01, 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeededRate:
    """The rate at which a method reaches a share of the speed without an exchange.

    Attributes:
        share: the share, 0 to 1.
        bandwidth_bps: rate of all links in bits per second; None if the share is not reached on any link.
        collective: the fastest collective at this rate; None if there is no rate.
        step_time_s: predicted seconds of a step at this rate; None if there is no rate.
        link: name of the slowest of `LINKS` that suffices; None if there is none.
    """

    share: float
    bandwidth_bps: float | None = None
    collective: str | None = None
    step_time_s: float | None = None
    link: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodNeeds:
    """The rates that a method needs.

    Attributes:
        compressor: the method.
        most: the share of the speed without an exchange that the method reaches on links without a limit.
        rates: one for each of `SHARES`.
    """

    compressor: str
    most: float
    rates: tuple[NeededRate, ...]

    @property
    def main(self) -> NeededRate:
        """Return the rate for `MAIN_SHARE`."""
        return self.rates[SHARES.index(MAIN_SHARE)]


def needs_of(calibration: Calibration, requests: Sequence[PredictionRequest]) -> MethodNeeds:
    """Return the rates that a method needs on the fastest of several collectives.

    Args:
        calibration: the calibration from which steps are predicted.
        requests: checked requests that differ only in their collective; their links have no limit.
    """
    alone_s = step_without_exchange_s(calibration, requests[0])
    unlimited, best = fastest(calibration, requests), _fastest_at(calibration, requests, math.log(FASTEST_BPS))
    unlimited_s, least_s = unlimited.prediction.step_time_s, best.prediction.step_time_s
    limited_s = predicted(calibration, unlimited.request.at_rate(FASTEST_BPS)).step_time_s
    # At this rate, a rank sends its bytes in the time of a step without an exchange.
    guess_bps = 8 * best.prediction.payload_bytes_max_per_step / alone_s
    log_rate = math.log(min(max(guess_bps, SLOWEST_BPS), FASTEST_BPS))
    found = []
    for share in reversed(SHARES):  # a smaller share needs a slower link, so that the search goes on from the last rate
        longest_s = alone_s / share
        if longest_s <= unlimited_s:
            found.append(NeededRate(share=share))
            continue
        if longest_s < least_s:
            rate_bps = FASTEST_BPS * (limited_s - unlimited_s) / (longest_s - unlimited_s)
            step_time_s, pair = longest_s, unlimited
        else:
            log_rate, best = _least_of_all(calibration, requests, best, longest_s, log_rate)
            rate_bps, step_time_s, pair = _rate_bps(log_rate), best.prediction.step_time_s, best
        found.append(
            NeededRate(
                share=share,
                bandwidth_bps=rate_bps,
                collective=pair.request.collective,
                step_time_s=step_time_s,
                link=next((name for name, link_bps in LINKS.items() if link_bps >= rate_bps), None),
            )
        )
    return MethodNeeds(
        compressor=requests[0].compressor,
        most=alone_s / unlimited_s,
        rates=tuple(reversed(found)),
    )


def _fastest_at(calibration: Calibration, requests: Sequence[PredictionRequest], log_rate: float) -> PredictedPair:
    return fastest(calibration, [request.at_rate(_rate_bps(log_rate)) for request in requests])


def _least_of_all(
    calibration: Calibration,
    requests: Sequence[PredictionRequest],
    start: PredictedPair,
    longest_s: float,
    guess: float,
) -> tuple[float, PredictedPair]:
    """Return the least log(rate) at which a step on any collective takes at most `longest_s`, and the step there.

    The search is on one collective. If another one is faster at the rate that is found, it goes on with that.

    Args:
        calibration: the calibration from which steps are predicted.
        requests: as in `needs_of`.
        start: a pair whose collective takes at most `longest_s` on the fastest link.
        longest_s: seconds that the step may take.
        guess: a log(rate) near the result.
    """
    best = start
    while True:
        (one,) = (each for each in requests if each.collective == best.request.collective)

        @functools.cache
        def step_s(log_rate: float, one: PredictionRequest = one) -> float:
            return predicted(calibration, one.at_rate(_rate_bps(log_rate))).step_time_s

        guess = _least(step_s, longest_s, guess)
        best = _fastest_at(calibration, requests, guess)
        if best.prediction.step_time_s >= step_s(guess):
            return guess, best


def _rate_bps(log_rate: float) -> float:
    return min(max(math.exp(log_rate), SLOWEST_BPS), FASTEST_BPS)  # `exp` rounds


def _least(step_s: Callable[[float], float], longest_s: float, guess: float) -> float:
    """Return the least log(rate) from `SLOWEST_BPS` at which a step takes at most `longest_s` seconds.

    Args:
        step_s: returns the seconds of a step at a log(rate).
        longest_s: seconds that the step may take; it does not take longer at `FASTEST_BPS`.
        guess: a log(rate) near the result.
    """

    def excess(log_rate: float) -> float:
        return math.log(step_s(log_rate) / longest_s)

    slowest, highest, stride, fits = math.log(SLOWEST_BPS), math.log(FASTEST_BPS), math.log(STRIDE), guess
    while excess(fits) > 0:
        fits = min(fits + stride, highest)
    late = max(fits - stride, slowest)
    while excess(late) <= 0:
        fits, late = late, max(late - stride, slowest)
        if fits == slowest:
            return fits
    root: float = brentq(excess, late, fits, xtol=PRECISION)
    return min(fits, root + PRECISION)  # the root may lie slightly below the rate that suffices


def needs(calibration: Calibration, job: PredictionRequest) -> tuple[list[MethodNeeds], list[str]]:
    """Return what each method needs, the method with the slowest link first, and why other methods are left out.

    Args:
        calibration: the calibration from which steps are predicted.
        job: the ranks; if it names a compressor, only this compressor is predicted.

    Raises:
        UsageError: no method can be predicted, or links have rates.
    """
    raise_first(
        UsageError,
        (
            any(rate is not None for host in job.hosts for rate in host.mean_rates),
            "--needed-rate finds one rate for all links; remove the rates of the hosts from the cluster file",
        ),
        (
            len(job.hosts) == 1 < job.ranks_per_host,
            "the ranks of one host need no link; give --hosts 2 or more",
        ),
        (not job.waits, "--needed-rate is for ranks that wait for each other; leave out --strategy"),
    )
    found: list[MethodNeeds] = []
    refused: list[str] = []
    names = [job.compressor] if job.compressor else [*calibration.encoded]
    for number, name in enumerate(names, 1):
        waiting.doing(f"predicting {name}, {number} of {len(names)}")
        try:
            requests = on_each_collective(calibration, dataclasses.replace(job, compressor=name))
        except UsageError as reason:
            if name == names[-1] and not found:
                raise
            refused.append(f"{name} is left out: {reason}")
        else:
            found.append(needs_of(calibration, requests))
    return sorted(found, key=lambda each: (each.main.bandwidth_bps or math.inf, -each.most)), refused


def predict_needed_rates(known: Calibration, options: PredictConfig, *, as_json: bool) -> None:
    """Print the rates at which each method reaches shares of the speed without an exchange."""
    job = request_from_options(options)
    if not options.compressor:
        job = dataclasses.replace(job, compressor="")
    found, left_out = needs(known, job)
    job = dataclasses.replace(job, compressor=found[0].compressor)
    alone_s = step_without_exchange_s(known, job)
    said = [*notes(known, job, range_too=False), *latency_note(options, job)]
    said.append(f"Choose a faster link than the rate: predicted steps may be off by {error_of(known, job):.0%}")
    if known.first_epoch:
        said.append("The rates are for steps after the density warm-up, in which some methods send more")
    said += [*left_out, ACCURACY]
    if as_json:
        values = columns(job, known, without=(*SWEPT, "compressor", "collective"))
        needed: list[dict[str, Any]] = [dataclasses.asdict(each) for each in found]
        print_json(values | {"step_without_exchange_s": alone_s, "links": LINKS, "needed_rates": needed, "notes": said})
        return
    delay_s = max(host.latency_s for host in job.hosts)
    parts = [
        "" if job.is_ddp else job.strategy,
        f"{job.world_size} ranks",
        f"one-way delay {format_seconds(delay_s)}" if delay_s else "",
        f"a straggler ({job.straggler_text})" if job.straggler_text else "",
        f"a step without an exchange takes {format_seconds(alone_s)}",
    ]
    print(about(known), ", ".join(filter(None, parts)), sep="\n")
    print("Mbit/s of all links at which a step reaches a share of the speed without an exchange")
    left = ("compressor", "link", LINK_HEADING, "collective")
    print_table(_of_one(found[0]) if len(found) == 1 else _of_all(found), left=left)
    print(*said, sep="\n")


def _of_one(needs: MethodNeeds) -> list[dict[str, str]]:
    return [
        {
            "share": f"{each.share:.0%}",
            "Mbit/s": _rate(each),
            "link": _link(each),
            "collective": escape(each.collective or "-"),
            "step": "-" if each.step_time_s is None else format_seconds(each.step_time_s),
        }
        for each in needs.rates
    ]


def _of_all(found: Sequence[MethodNeeds]) -> list[dict[str, str]]:
    return [
        {
            "compressor": escape(each.compressor),
            **{f"{rate.share:.0%}": _rate(rate) for rate in each.rates},
            "at most": f"{each.most:.1%}",
            LINK_HEADING: _link(each.main),
        }
        for each in found
    ]


def _rate(needed: NeededRate) -> str:
    if needed.bandwidth_bps is None:
        return "never"
    most = max(LINKS.values())
    if needed.bandwidth_bps > most:
        return f">{most / 1e6:,.0f}"
    rate = float(f"{needed.bandwidth_bps / 1e6:.3g}")
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:g}"


def _link(needed: NeededRate) -> str:
    return "-" if needed.bandwidth_bps is None else needed.link or "none"
