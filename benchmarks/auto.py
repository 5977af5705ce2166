"""Whether `--compressor auto` keeps up with the best static pair on every link, on links that change, and in accuracy.

`python -m benchmarks.auto OUT.csv [--quick]` runs `auto` and six static pairs on four virtual hosts in turns, for every
link and model, and on three traces of a link that changes; then `auto` and `bf16` over three seeds to the end, for the
accuracy. After three turns `auto` and `bf16` go on alone, for the interval of their ratio. Rows are appended as runs
end, and a file that is there already is gone on with. `--summary OUT.csv` prints, per cell, step times relative to the
best static pair and to dense bf16 (median, and the 95 % interval of the mean ratio over turns). Do this on a machine
that has nothing else to do; all of it takes most of a day, `--models small_cnn` two hours, and so does `--quick`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.report.student import two_sided_quantile

METHODS = {
    "auto": ("auto", "ring"),
    "bf16": ("bf16", "ring"),
    "none": ("none", "ring"),
    "group_topk": ("group_topk", "ring"),
    "group_topk 10 %": ("group_topk:ratio=0.1", "ring"),
    "topk": ("topk", "allgather"),
    "hylo": ("hylo", "allgather"),
}
MODELS = {
    "small_cnn": ("--dataset", "digits", "--batch-size", "32"),
    "resnet20": ("--dataset", "synthetic", "--train-size", "4000", "--batch-size", "32"),
    "resnet18": ("--dataset", "synthetic", "--train-size", "4000", "--batch-size", "4"),
}
LINKS = ("10mbit", "100mbit", "1gbit", "unlimited")
TRACES = {
    "two rates": lambda second: 5e6 if second % 40 < 20 else 200e6,
    "fading": lambda second: 5e6 * 40 ** abs(1 - second % 60 / 30),
    "bursts": lambda second: 10e6 if second % 10 < 7 else 100e6,
}
TRACE_S, FRAME_BITS = 120, 12_000
AUTO_STEPS, STATIC_STEPS, TRACE_STEPS = 450, 100, 600
FEW_STEPS = {
    ("small_cnn", "10mbit"): 24,
    ("resnet20", "10mbit"): 24,
    ("resnet18", "10mbit"): 6,
    ("resnet18", "100mbit"): 12,
}
HEAVY = ("bf16", "none", "hylo")
"""these make fewer steps where one is long: the link decides how long, and repeats it; cores do not"""
TURNS, TURNS_OF_ALL = 9, 3
PAIRED = ("auto", "bf16")
QUICK = ("small_cnn", "resnet20")
EPOCHS = {"small_cnn": 10, "resnet20": 10, "resnet18": 2}
CELL, MEASURED = ("part", "link", "model", "method", "turn"), ("step_s", "whole_step_s", "accuracy", "chosen")
ORIGIN = ("host", "cpu", "torch_version", "kernels", "git_sha", "git_dirty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the benchmark.

    Attributes:
        part: "links", "traces" or "accuracy".
        turn: which repeat, or seed.
        length: options that say how long it is; evaluations share it out.
    """

    part: str
    link: str
    model: str
    method: str
    turn: int
    length: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others in the file."""
        return self.part, self.link, self.model, self.method, str(self.turn)


def cells(models: Sequence[str], *, quick: bool) -> Iterator[Cell]:
    """All runs of some models, methods in turns."""
    for turn in range(TURNS_OF_ALL if quick else TURNS):
        for model in models:
            for link in LINKS:
                for method in METHODS if turn < TURNS_OF_ALL else PAIRED:
                    steps = FEW_STEPS.get((model, link), STATIC_STEPS) if method in HEAVY else STATIC_STEPS
                    steps = AUTO_STEPS if method == "auto" else steps
                    length = ("--steps", str(steps), "--eval-every", str(steps // 3))
                    yield Cell(part="links", link=link, model=model, method=method, turn=turn, length=length)
    for turn in range(1 if quick else 3):
        for link in TRACES if "small_cnn" in models else ():
            for method in METHODS:
                length = ("--steps", str(TRACE_STEPS), "--eval-every", str(TRACE_STEPS))
                yield Cell(part="traces", link=link, model="small_cnn", method=method, turn=turn, length=length)
    for seed in () if quick else (1, 2, 3):
        for model in models:
            for method in PAIRED:
                length = ("--epochs", str(EPOCHS[model]), "--eval-every", str(EPOCHS[model]))
                yield Cell(part="accuracy", link="100mbit", model=model, method=method, turn=seed, length=length)


def write_trace(path: Path, link: str) -> None:
    """A line for each millisecond at which a frame passes."""
    lines, credit = [], 0.0
    for millisecond in range(1000 * TRACE_S):
        credit += TRACES[link](millisecond / 1000) / 1000 / FRAME_BITS
        lines += [str(millisecond + 1)] * int(credit)
        credit %= 1
    path.write_text("\n".join(lines) + "\n")


def run(cell: Cell, folder: Path) -> dict[str, object]:
    """The row of a run.

    Raises:
        RuntimeError: it failed.
    """
    compressor, collective = METHODS[cell.method]
    link: tuple[str, ...] = () if cell.link == "unlimited" else ("--bandwidth", cell.link)
    if cell.part == "traces":
        link = ("--bandwidth-trace", str(folder / f"{cell.link}.trace"))
    out = Path(tempfile.mkdtemp(dir=folder))
    seed = cell.turn if cell.part == "accuracy" else 1
    command = [
        sys.executable, "-m", "bench", "run", "--hosts", "4", "--threads", "1", "--model", cell.model,
        *MODELS[cell.model], "--compressor", compressor, "--collective", collective, "--seeds", str(seed), *link,
        *cell.length, "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{cell}: {done.stderr[-500:]}")
    (path,) = out.glob("*/metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
    whole = float(last["train_time_s"]) / int(last["step"])
    steps = int(last["step"]) - int(first["step"])
    settled = (float(last["train_time_s"]) - float(first["train_time_s"])) / steps if steps else whole
    measured = (settled, whole, last["test_accuracy"], last["chosen"])
    figures = dict(zip(CELL + MEASURED, (*cell.key, *measured), strict=True))
    return figures | {name: last[name] for name in ORIGIN}


def measure(path: Path, models: Sequence[str], *, quick: bool) -> None:
    """Append what the file lacks."""
    done = {tuple(row[name] for name in CELL) for row in read(path)} if path.exists() else set()
    with (
        tempfile.TemporaryDirectory(prefix="bench-auto-") as name,
        path.open("a", encoding="utf-8", newline="") as file,
    ):
        for link in TRACES:
            write_trace(Path(name) / f"{link}.trace", link)
        writer = csv.DictWriter(file, CELL + MEASURED + ORIGIN, lineterminator="\n")
        if not done:
            writer.writeheader()
        for cell in cells(models, quick=quick):
            if cell.key not in done:
                row = run(cell, Path(name))
                writer.writerow(row)
                file.flush()
                print(*cell.key, f"{1000 * float(str(row['step_s'])):.1f} ms", row["chosen"], flush=True)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """A line per cell: `auto` against the best static pair and against dense bf16."""
    for part, link, model in dict.fromkeys((row["part"], row["link"], row["model"]) for row in rows):
        cell = [row for row in rows if (row["part"], row["link"], row["model"]) == (part, link, model)]
        if part == "accuracy":
            scores = {name: [float(r["accuracy"]) for r in cell if r["method"] == name] for name in ("auto", "bf16")}
            means = {name: 100 * statistics.mean(values) for name, values in scores.items() if values}
            yield f"{model} on {link}, accuracy: " + ", ".join(f"{name} {mean:.2f} %" for name, mean in means.items())
            continue
        column = "whole_step_s" if part == "traces" else "step_s"
        times = {name: {r["turn"]: float(r[column]) for r in cell if r["method"] == name} for name in METHODS}
        medians = {name: statistics.median(values.values()) for name, values in times.items() if values}
        best = min((name for name in medians if name != "auto"), key=medians.__getitem__)
        text = f"{model} on {link}: auto {1000 * medians['auto']:.1f} ms, best {best} {1000 * medians[best]:.1f} ms, "
        text += (
            f"auto / {best} {ratios(times['auto'], times[best])}, auto / bf16 {ratios(times['auto'], times['bf16'])}"
        )
        yield f"{text}; chose {statistics.mode(row['chosen'] for row in cell if row['method'] == 'auto')}"


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """The median ratio over turns, and the interval of its mean."""
    logs = [math.log(ours[turn] / theirs[turn]) for turn in ours.keys() & theirs.keys()]
    median = f"{math.exp(statistics.median(logs)):.3f}"
    if len(logs) < 2:
        return median
    mean, half = (
        statistics.mean(logs),
        two_sided_quantile(0.05, len(logs) - 1) * statistics.stdev(logs) / len(logs) ** 0.5,
    )
    return f"{median} [{math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}]"


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure, or sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="OUT.csv")
    parser.add_argument("--models", default="", help="of small_cnn, resnet20 and resnet18, with commas; all by default")
    parser.add_argument("--quick", action="store_true", help="two models, three turns, each trace once, no accuracy")
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    given = parser.parse_args(None if arguments is None else list(arguments))
    models = given.models.split(",") if given.models else QUICK if given.quick else tuple(MODELS)
    if unknown := set(models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; choose of {', '.join(MODELS)}")
    if not given.summary:
        try:
            measure(given.path, models, quick=given.quick)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on with {given.path}", file=sys.stderr)
            sys.exit(130)
    print("\n".join(summary(read(given.path))))


if __name__ == "__main__":
    main()
