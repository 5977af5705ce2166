"""Kinds: every picture by its name, with what it shows and how to read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from bench.report.plots import accuracy, bandwidth, density, pareto, profile, scaling, step_time, style, target
from bench.report.plots.picture import Picture
from bench.report.plots.results import Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of picture.

    Attributes:
        name: the word on the command line.
        shows: one line.
        reading: how to read it, in whole sentences.
        function: draws it; raises ``NotDrawable``.
    """

    name: str
    shows: str
    reading: str
    function: Callable[[Results], Picture]

    def draw(self, results: Results) -> Picture:
        """Draw it in the common style.

        Raises:
            NotDrawable: the rows lack what it shows (the message says what).
        """
        with style.applied():
            return self.function(results)


_BAND = "Lines are means over seeds, bands reach from the lowest seed to the highest."

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="accuracy-time",
            shows="test accuracy against training time",
            reading=f"{_BAND} Higher and further left is better; evaluation and set-up are not counted as time.",
            function=accuracy.against_time,
        ),
        Kind(
            name="accuracy-bytes",
            shows="test accuracy against bytes sent per rank",
            reading=f"{_BAND} Higher and further left is better.",
            function=accuracy.against_bytes,
        ),
        Kind(
            name="accuracy-epochs",
            shows="test accuracy against epochs",
            reading=f"{_BAND} Where a curve lies below that of the baseline, compression costs accuracy per epoch.",
            function=accuracy.against_epochs,
        ),
        Kind(
            name="target",
            shows="steps to the target accuracy (Kaplan-Meier)",
            reading="The share of seeds that have reached the target. A vertical mark is a seed whose training ended "
            "without reaching it: it counts as one that would need longer. Curves are shifted by a hair, so that none "
            "hides another.",
            function=target.draw,
        ),
        Kind(
            name="step",
            shows="where a step's time goes",
            reading="The upper bar is the step as a rank sees it, the lower one what its exchange was busy with, "
            "mostly while backward ran; what could not hide behind backward is exposed. There is no lower bar "
            "where the backend hides the exchange.",
            function=step_time.draw,
        ),
        Kind(
            name="pareto",
            shows="accuracy, time and bytes at the end (Pareto front)",
            reading="Points are means, whiskers reach from the lowest seed to the highest. Filled: no other "
            "configuration is at least as good in all three and better in one. Hollow: some other one is.",
            function=pareto.draw,
        ),
        Kind(
            name="bandwidth",
            shows="speed-up against bandwidth, with break-even points",
            reading="Above 1 a configuration does more samples per second than the baseline on the same link. Whiskers "
            "are 95 % intervals over seeds; a ring marks the bandwidth at which it breaks even, on straight lines "
            "between the measured links. Whiskers that leave the picture do so because two seeds say little.",
            function=bandwidth.draw,
        ),
        Kind(
            name="scaling",
            shows="samples per second against the number of ranks",
            reading="Lines are means over seeds, whiskers reach from the lowest seed to the highest. On the grey line "
            "twice the ranks do twice the work.",
            function=scaling.draw,
        ),
        Kind(
            name="profile",
            shows="performance profile over workloads (Dolan and More)",
            reading="On how many workloads a method reaches the target within this factor of the fastest method's "
            "time; each seed counts as a workload, and a missed target is within no factor. Higher and further left is "
            "better.",
            function=profile.draw,
        ),
        Kind(
            name="density",
            shows="share of each layer that was sent, over time",
            reading="A row per layer in the model's order, a cell for the steps since the previous evaluation; the "
            "darker, the less was sent. Means over seeds.",
            function=density.draw,
        ),
    )
}
