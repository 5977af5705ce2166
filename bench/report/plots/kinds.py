"""List every kind of picture with its name, its subject and how to read it.

Extensions and third parties add kinds by entry points of the group ``bench.plots``: a `PictureKind` draws the rows of
runs, and a `FileKind` draws a file of another format.
"""

import csv
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.core import registry
from bench.core.files import walk
from bench.report.plots import accuracy, speed, style
from bench.report.plots.results import NotDrawable, Results
from bench.report.store import matching


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureKind:
    """One kind of picture that is drawn from the rows of runs.

    Attributes:
        name: the name on the command line.
        shows: the subject, in one line.
        reading: sentences that explain how to read the picture.
        function: draws the picture; it raises ``NotDrawable`` if the rows lack what the picture shows.
        reading_if_lower: replaces `reading` if lower values of the drawn quality are better; empty if `reading` fits
            both cases.
    """

    name: str
    shows: str
    reading: str
    function: Callable[[Results], style.Picture]
    reading_if_lower: str = ""

    def reading_for(self, results: Results) -> str:
        """Return the sentences that explain how to read this kind of picture of the results."""
        return self.reading if results.quality.higher_is_better else self.reading_if_lower or self.reading

    def draw(self, results: Results) -> style.Picture:
        """Draw the picture in the style that all pictures share.

        Raises:
            NotDrawable: the rows lack what the picture shows; the message says what is needed.
        """
        with style.applied():
            return self.function(results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileKind:
    """One kind of picture that is drawn from a single file that does not belong to a run, such as a prediction.

    Attributes:
        name: the name on the command line.
        shows: the subject, in one line.
        reading: sentences that explain how to read the picture.
        made_by: the command that writes such files; error messages name it.
        keys: a file is of this kind if its JSON, or the first line of its CSV, has all of these keys.
        function: draws the file, given its path and the colours of methods; it raises ``NotDrawable`` if the file lacks
            what the picture shows.
    """

    name: str
    shows: str
    reading: str
    made_by: str
    keys: frozenset[str]
    function: Callable[[Path, style.Methods], style.Picture]

    def draw(self, path: Path, methods: style.Methods | None = None) -> style.Picture:
        """Draw the picture in the style that all pictures share.

        Args:
            path: the file.
            methods: colours and line styles of methods in other pictures of the same page; None if there are no other
                pictures.

        Raises:
            NotDrawable: the file is not of this kind, or it is damaged.
        """
        try:
            with style.applied():
                return self.function(path, style.Methods() if methods is None else methods)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise NotDrawable(f"{path} is damaged ({error}); write it again with {self.made_by}") from None


_BAND = "Lines are means over seeds, bands reach from the lowest seed to the highest."

KINDS: dict[str, PictureKind] = {
    kind.name: kind
    for kind in (
        PictureKind(
            name="accuracy-time",
            shows="test accuracy against training time",
            reading=f"{_BAND} Higher and further left is better; evaluation and set-up are not counted as time.",
            reading_if_lower=f"{_BAND} Lower and further left is better; evaluation and set-up are not counted.",
            function=partial(accuracy.draw_curves, cost="train_time_s", what="training time", unit_of="train_time_s"),
        ),
        PictureKind(
            name="accuracy-bytes",
            shows="test accuracy against bytes sent per rank",
            reading=f"{_BAND} Higher and further left is better.",
            reading_if_lower=f"{_BAND} Lower and further left is better.",
            function=partial(
                accuracy.draw_curves, cost="bytes_sent", what="bytes sent per rank", unit_of="payload_bytes_per_step"
            ),
        ),
        PictureKind(
            name="accuracy-epochs",
            shows="test accuracy against epochs",
            reading=f"{_BAND} Where a curve lies below the baseline, compression costs accuracy per epoch.",
            reading_if_lower=f"{_BAND} Where a curve lies above the baseline, compression costs quality per epoch.",
            function=partial(accuracy.draw_curves, cost="epoch", what="epochs", unit_of="epoch"),
        ),
        PictureKind(
            name="target",
            shows="steps to the target accuracy (Kaplan-Meier)",
            reading="The share of seeds that have reached the target. A vertical mark is a seed whose training ended "
            "without reaching the target; it counts as a seed that needs longer. Curves are shifted slightly, so that "
            "none hides another.",
            function=accuracy.draw_kaplan_meier,
        ),
        PictureKind(
            name="step",
            shows="where a step's time goes",
            reading="The upper bar divides the time of a step on one rank. The lower bar shows how long its exchange "
            "was busy, mostly during backward; the part that did not overlap with backward is exposed. There is no "
            "lower bar if the backend does not report the exchange.",
            function=speed.draw_step,
        ),
        PictureKind(
            name="pareto",
            shows="accuracy, time and bytes at the end (Pareto front)",
            reading="Points are means, whiskers reach from the lowest seed to the highest. Filled: no other "
            "configuration is at least as good in all three and better in one. Hollow: another configuration is.",
            function=accuracy.draw_pareto,
        ),
        PictureKind(
            name="bandwidth",
            shows="speed-up against bandwidth, with break-even points",
            reading="Above 1, a configuration processes more samples per second than the baseline on the same link. "
            "Whiskers are 95 % intervals over seeds. A ring marks the bandwidth at which a configuration breaks even, "
            "interpolated between the measured links. With two seeds, the whiskers may be longer than the picture.",
            function=speed.draw_over_bandwidth,
        ),
        PictureKind(
            name="scaling",
            shows="samples per second against the number of ranks",
            reading="Lines are means over seeds, whiskers reach from the lowest seed to the highest. On the grey line, "
            "twice the ranks process twice the samples per second.",
            function=speed.draw_over_ranks,
        ),
        PictureKind(
            name="profile",
            shows="performance profile over workloads (Dolan and More)",
            reading="The share of workloads on which a method reaches the target within this factor of the fastest "
            "method's time. Each seed counts as a workload, and a missed target never counts. Higher and further left "
            "is better.",
            function=accuracy.draw_profile,
        ),
        PictureKind(
            name="density",
            shows="share of each layer that was sent, over time",
            reading="Each row is a layer, in the model's order. Each cell covers the steps since the previous "
            "evaluation; the darker it is, the less was sent. Values are means over seeds.",
            function=speed.draw_density,
        ),
    )
}


@functools.cache
def kinds() -> dict[str, PictureKind]:
    """Return all kinds of pictures that are drawn from the rows of runs, by name.

    A built-in kind takes precedence over an added kind with the same name.
    """
    return {
        kind.name: kind
        for kind in registry.load_plugins("plots", PictureKind, FileKind)
        if isinstance(kind, PictureKind)
    } | KINDS


@functools.cache
def file_kinds() -> dict[str, FileKind]:
    """Return all kinds of pictures that are drawn from a single file, by name."""
    return {
        kind.name: kind for kind in registry.load_plugins("plots", PictureKind, FileKind) if isinstance(kind, FileKind)
    }


def drawn_files(paths: Sequence[str | Path]) -> list[tuple[FileKind, Path]]:
    """Return a tuple (kind of picture, file) for every file that can be drawn, in the order of `file_kinds`.

    Args:
        paths: files, folders to search recursively, or glob patterns of these; files that cannot be drawn are ignored
            without a warning.
    """
    if not file_kinds():
        return []
    files = {file.absolute(): file for path in paths for file in _candidates(path)}
    keys = [(_keys(file), file) for file in files.values()]
    return [(kind, file) for kind in file_kinds().values() for found, file in keys if kind.keys <= found]


def _candidates(path: str | Path) -> Iterator[Path]:
    for match in matching(path):
        if match.is_file():
            yield match
            continue
        for folder, folders, names in walk(match):
            if "config.json" in names:  # a run folder
                folders.clear()
            else:  # not pipes: reading one might never end
                yield from filter(Path.is_file, (folder / name for name in names if name.endswith((".json", ".csv"))))


def _keys(file: Path) -> set[str]:
    try:
        with file.open(encoding="utf-8", newline="") as text:
            names = next(csv.reader(text), []) if file.suffix == ".csv" else json.load(text)
    except (OSError, ValueError, RecursionError, csv.Error):
        return set()  # `store.read` reports what is wrong with the file
    return {name for name in names if isinstance(name, str)} if isinstance(names, list | dict) else set()
