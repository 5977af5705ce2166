"""Compare `--compressor auto` with the best static pair on fixed links, on links that change, and in accuracy.

`python -m benchmarks.auto OUT.csv` trains with `auto` and with six static pairs on four virtual hosts: every model on
every fixed link, and one model on three traces of a changing link. All methods run in the same processes, in
interleaved blocks of steps, so that differences between processes and changes over minutes affect all of them equally.
On fixed links, `auto` makes its first choice before the first round; on traces, during the rounds. After that, `bench
run` trains with `auto` and with `bf16` on real images, with three seeds or those of `--seeds`, for enough epochs that
`bf16` no longer improves. Rows are appended after each scene, and an existing file is continued. `--summary` prints the
step times of each scene relative to the best static pair and to dense bf16 (the median over rounds, and the 95 %
interval of the mean). Run it on an otherwise idle machine; it takes three and a half hours.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.environment import origin_columns
from bench.hosts.cluster import Cluster
from bench.hosts.cluster_options import link_of
from bench.hosts.support import choose_backend
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.run import measure
from bench.report.statistics import two_sided_quantile
from benchmarks.auto_worker import TurnsConfig

HOSTS = 4
METHODS = {
    "auto": ("auto", "ring"),
    "bf16": ("bf16", "ring"),
    "none": ("none", "ring"),
    "group_topk": ("group_topk", "ring"),
    "group_topk 10 %": ("group_topk:ratio=0.1", "ring"),
    "topk": ("topk", "allgather"),
    "hylo": ("hylo", "allgather"),
}
PAIRED = ("auto", "bf16")
"""Methods that are compared over at least nine rounds, even if one of them is slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The data that a model is trained on.

    Attributes:
        dataset, batch_size, train_size: for the step times.
        epochs, batch_size_of_epochs: for the accuracy, which is measured on digits.
    """

    dataset: str
    batch_size: int
    train_size: int | None = None
    epochs: int
    batch_size_of_epochs: int


MODELS = {
    "small_cnn": Workload(dataset="digits", batch_size=32, epochs=40, batch_size_of_epochs=32),
    "resnet20": Workload(dataset="synthetic", batch_size=32, train_size=4000, epochs=20, batch_size_of_epochs=8),
    "resnet18": Workload(dataset="synthetic", batch_size=4, train_size=4000, epochs=10, batch_size_of_epochs=4),
}
LINKS = ("10mbit", "100mbit", "1gbit", "unlimited")
TRACES = {
    "two rates": lambda second: 5e6 if second % 40 < 20 else 200e6,
    "slow": lambda second: 2e6 * 5 ** abs(1 - second % 20 / 10),
    "fast": lambda second: 30e6 * 10 ** abs(1 - second % 20 / 10),
}
"""Name -> rate in bit/s at a second: one rate that jumps, and two that change gradually. The fastest pair differs
between parts of each trace."""
TRACE_MODEL, TRACE_S, FRAME_BITS = "small_cnn", 40, 12_000
"""A trace and a block on it last a whole number of the trace's periods, so each method sees every rate equally long."""
BLOCK_S, TURNS, TRACE_TURNS = 1.0, 25, 4
FAR_BEHIND, TRACE_FAR_BEHIND = (3.0, 3), (1.3, 1)
"""(slowdown, rounds): a method that is slower than the fastest by this factor takes part in only this many rounds. The
limits are tighter on traces, where a block takes long."""
SEEDS = (1, 2, 3)
ACCURACY_LINKS = {"auto": "100mbit", "bf16": "unlimited"}
"""`auto` trains on a link where compression pays off. The accuracy with dense gradients does not depend on the link."""
PARTS = ("links", "traces", "accuracy")
CELL = ("part", "link", "model", "method", "turn")
MEASURED = ("steps", "seconds", "step_s", "accuracy", "chosen", "held")
ORIGIN = ("host", "cpu", "torch_version", "kernels", "git_sha", "git_dirty")
Row = Mapping[str, Any]


def write_trace(path: Path, rate_at: Any) -> None:
    """Write one line, the time in milliseconds, for each frame that the link passes.

    Args:
        path: the file to write.
        rate_at: returns the rate in bit/s at a time in seconds.
    """
    lines, credit = [], 0.0
    for millisecond in range(1000 * TRACE_S):
        credit += rate_at(millisecond / 1000) / 1000 / FRAME_BITS
        lines += [str(millisecond + 1)] * int(credit)
        credit %= 1
    path.write_text("\n".join(lines) + "\n")


def turns(part: str, link: str, model: str, folder: Path) -> list[Row]:
    """Measure a scene, and return a row per block.

    Raises:
        BenchError: the measurement failed.
    """
    on_trace = part == "traces"
    texts = {"bandwidth_trace": str(folder / f"{link}.trace")} if on_trace else {"bandwidth": link}
    cluster = choose_backend(Cluster.uniform(HOSTS, link=link_of({} if link == "unlimited" else texts)))
    workload = MODELS[model]
    far_behind, turns_far_behind = TRACE_FAR_BEHIND if on_trace else FAR_BEHIND
    config = TurnsConfig(
        world_size=HOSTS,
        threads=1,
        device="cpu",
        cluster=cluster.to_dict(),
        **cluster.columns(),
        ways={name: list(pair) for name, pair in METHODS.items()},
        paired=[] if on_trace else list(PAIRED),
        model=model,
        dataset=workload.dataset,
        batch_size=workload.batch_size,
        train_size=workload.train_size,
        turns=TRACE_TURNS if on_trace else TURNS,
        far_behind=far_behind,
        turns_far_behind=turns_far_behind,
        block_s=TRACE_S if on_trace else BLOCK_S,
        chooses_first=not on_trace,
    )
    rows: list[Row] = []

    def take(report: Row) -> None:
        print(part, link, model, *report.values(), flush=True)
        where = {"part": part, "link": link, "model": model, "step_s": report["seconds"] / report["steps"]}
        rows.append({**where, **report})

    with ForkServer("benchmarks.auto_worker") as server:
        measure(
            "auto",
            config,
            lambda run_folder: torchrun.launch(config, run_folder, server),
            WatchdogTimeouts.with_job(config),
            take,
        )
    return rows


def accuracy(model: str, method: str, seed: int) -> Row:
    """Train to the end with `bench run`, and return the figures of its last row.

    Raises:
        RuntimeError: the run failed.
    """
    compressor, collective = METHODS[method]
    workload, link = MODELS[model], ACCURACY_LINKS[method]
    with tempfile.TemporaryDirectory(prefix="bench-auto-") as out:
        command = [
            sys.executable, "-m", "bench", "run", "--hosts", str(HOSTS), "--threads", "1", "--model", model,
            "--dataset", "digits", "--batch-size", str(workload.batch_size_of_epochs), "--compressor", compressor,
            "--collective", collective, "--seeds", str(seed), *([] if link == "unlimited" else ["--bandwidth", link]),
            "--epochs", str(workload.epochs), "--eval-every", str(workload.epochs), "--out", out,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{model}, {method}, seed {seed}: {done.stderr[-500:]}")
        (path,) = Path(out).glob("*/metrics.csv")
        last = read(path)[-1]
    seconds, steps = float(last["train_time_s"]), int(last["step"])
    found = {"steps": steps, "seconds": seconds, "step_s": seconds / steps, "accuracy": last["test_accuracy"]}
    cell = {"part": "accuracy", "link": link, "model": model, "method": method, "turn": seed}
    print(*cell.values(), last["test_accuracy"], last["chosen"], flush=True)
    return {**cell, **found, "chosen": last["chosen"]}


def measure_all(path: Path, parts: Sequence[str], models: Sequence[str], seeds: Sequence[int]) -> None:
    """Append the rows that the file lacks: those of whole scenes, and accuracies for each seed."""
    rows = read(path) if path.exists() else []
    done = set(map(scene_of, rows))
    trained = {(row["model"], int(row["turn"])) for row in rows if row["part"] == "accuracy"}
    scenes = [("links", link, model) for model in models for link in LINKS]
    scenes += [("traces", trace, TRACE_MODEL) for trace in TRACES]
    with tempfile.TemporaryDirectory(prefix="bench-auto-") as name:
        folder = Path(name)
        for trace, rate_at in TRACES.items():
            write_trace(folder / f"{trace}.trace", rate_at)
        for part, link, model in scenes:
            if part not in parts or (part, link, model) in done:
                continue
            append(path, turns(part, link, model, folder))
    for model in models if "accuracy" in parts else ():
        for seed in seeds:
            if (model, seed) not in trained:
                append(path, [accuracy(model, method, seed) for method in PAIRED])


def append(path: Path, rows: Sequence[Row]) -> None:
    is_new, origin = not path.exists(), origin_columns()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CELL + MEASURED + ORIGIN, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({**row, **{name: origin[name] for name in ORIGIN}} for row in rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def scene_of(row: Row) -> tuple[str, str, str]:
    """Return (part, link, model), which is equal for rows that are compared; accuracies are compared across links."""
    return row["part"], "" if row["part"] == "accuracy" else row["link"], row["model"]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Return a line per scene that compares `auto` with the best static pair and with dense bf16."""
    over_traces: dict[str, list[float]] = {}
    beside_itself: list[float] = []
    for part, link, model in dict.fromkeys(map(scene_of, rows)):
        scene = [row for row in rows if scene_of(row) == (part, link, model)]
        if part == "accuracy":
            yield accuracies(model, scene)
            continue
        counted = [row for row in scene if int(row["turn"]) >= 0]
        times = {name: {r["turn"]: float(r["step_s"]) for r in counted if r["method"] == name} for name in METHODS}
        medians = {name: statistics.median(of_turns.values()) for name, of_turns in times.items() if of_turns}
        if part == "traces":  # the mean step time over the whole measurement, trials included
            medians = {name: mean_step_s(counted, name) for name in METHODS}
            for name, step_s in medians.items():
                over_traces.setdefault(name, []).append(step_s)
        else:
            if (chosen := chosen_pair(counted)) is not None:
                beside_itself.append(statistics.mean(log_ratios(times["auto"], times[chosen])))
        best = min((name for name in medians if name != "auto"), key=medians.__getitem__)
        yield (
            f"{model} on {link}: auto {1000 * medians['auto']:.1f} ms, best {best} {1000 * medians[best]:.1f} ms, "
            f"ratio {medians['auto'] / medians[best]:.3f}, by rounds auto / {best} "
            f"{ratios(times['auto'], times[best])}, auto / bf16 "
            f"{ratios(times['auto'], times['bf16'])}{first_choice(scene, medians['auto'])}; "
            f"chose {statistics.mode(row['chosen'] for row in counted if row['method'] == 'auto')}"
        )
    if len(beside_itself) > 1:
        yield f"auto / the pair that it chose, mean over links and models: {interval(beside_itself)}"
    if over_traces:
        means = {name: statistics.geometric_mean(values) for name, values in over_traces.items()}
        ranked = sorted(means, key=means.__getitem__)
        yield "over all traces, geometric mean: " + ", ".join(f"{name} {1000 * means[name]:.1f} ms" for name in ranked)


def mean_step_s(rows: Sequence[Row], method: str) -> float:
    own = [row for row in rows if row["method"] == method]
    return sum(float(row["seconds"]) for row in own) / sum(int(row["steps"]) for row in own)


def first_choice(scene: Sequence[Row], settled_s: float) -> str:
    """Describe the first choice: its steps, and how many steps with the chosen pair the trials cost in addition."""
    (first,) = [row for row in scene if row["method"] == "auto" and int(row["turn"]) < 0]
    if not first["chosen"]:
        return ""
    lost = float(first["seconds"]) / settled_s - int(first["steps"])
    return f", the first choice took {first['steps']} steps, {lost:.0f} of them lost"


def accuracies(model: str, rows: Sequence[Row]) -> str:
    """Return a line with the mean accuracies over seeds, and the 95 % interval of their mean difference."""
    scores = {name: {r["turn"]: 100 * float(r["accuracy"]) for r in rows if r["method"] == name} for name in PAIRED}
    auto, dense = (statistics.mean(values.values()) for values in scores.values())
    lost = [scores["auto"][seed] - scores["bf16"][seed] for seed in scores["auto"]]
    told = f"{model}, accuracy: auto {auto:.2f} %, bf16 {dense:.2f} %, {auto - dense:+.2f} points"
    if len(lost) < 2:
        return told
    mean, half = statistics.mean(lost), half_interval(lost)
    return f"{told} [{mean - half:+.2f}, {mean + half:+.2f}] over {len(lost)} seeds"


def chosen_pair(rows: Sequence[Row]) -> str | None:
    """Return the static pair that `auto` used for most elements in most rounds; None if that pair was not measured."""
    chosen = statistics.mode(row["chosen"] for row in rows if row["method"] == "auto")
    return next((name for name, pair in METHODS.items() if chosen.startswith(" on ".join(pair))), None)


def ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """Format the median ratio over rounds, and the 95 % interval of the mean."""
    logs = log_ratios(ours, theirs)
    median = f"{math.exp(statistics.median(logs)):.3f}"
    return median if len(logs) < 2 else f"{median} {interval(logs).partition(' ')[2]}"


def log_ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[float]:
    """Return the logarithms of the ratios in the rounds that both took part in."""
    return [math.log(ours[turn] / theirs[turn]) for turn in ours if turn in theirs]


def interval(logs: Sequence[float]) -> str:
    """Format the geometric mean of two or more ratios, given as logarithms, and its 95 % interval."""
    mean, half = statistics.mean(logs), half_interval(logs)
    return f"{math.exp(mean):.3f} [{math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}]"


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean of two or more values."""
    return two_sided_quantile(0.05, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure what the file lacks, unless only the summary is wanted, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="OUT.csv")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="seeds of the whole runs for the accuracy")
    parser.add_argument("--summary", action="store_true", help="only print the summary")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if not given.summary:
        try:
            measure_all(given.path, given.parts, given.models, given.seeds)
        except KeyboardInterrupt:
            print(f"stopped; the same command continues {given.path}", file=sys.stderr)
            sys.exit(130)
    print("\n".join(summary(read(given.path))))


if __name__ == "__main__":
    main()
