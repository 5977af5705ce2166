"""Compare predictions with runs: 30 randomly drawn configurations of two models, each measured with three seeds.

    python benchmarks/predict_validation.py --out results/reference/predict-validation.csv
    python benchmarks/predict_validation.py --others --out results/reference/predict-validation-others.csv

The program calibrates the models on this machine, which should be otherwise idle, predicts every configuration before
the first run, and keeps all configurations in the table. Finished measurements are not repeated. `--others` selects
twelve configurations of one model with an asynchronous server, a deliberately slow rank, or rates that change over
time. `--draw` writes the same configurations again: their seeds are part of this file, and were chosen before any of
the predictions.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.launch.sweep_file import Settings, toml_table

SEED, SEED_OF_OTHERS = 20261212, 20261225
FILES = Path("examples/predict")
RUNS = Path("results/runs/predict")
MODELS = ("resnet20", "small_cnn")
CELLS = 15
"""Number of configurations of each model."""
PAIRS = (
    ("none", "ring"),
    ("bf16", "allgather"),
    ("topk", "allgather"),
    ("group_topk", "ring"),
    ("powersgd", "tree"),
    ("sign", "server"),
)
OTHERS = "small_cnn-others"
PUSHED = (("none", "mode=asp"), ("topk", "mode=asp"), ("group_topk", "staleness=1"), ("sign", "staleness=4"))
"""(compressor, options of the asynchronous server)"""
TRACE = "examples/cell.trace"
BASE: Settings = {
    "dataset": "synthetic",
    "train_size": 2000,
    "test_size": 200,
    "steps": 25,
    "threads": 1,
    "seeds": "1-3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RUNS / "validation.csv")
    parser.add_argument("--draw", action="store_true", help="only write the configurations")
    parser.add_argument("--others", action="store_true", help="asynchronous servers, slow ranks and traces")
    arguments = parser.parse_args()
    if arguments.draw:
        for path in FILES.glob("*-uneven*.toml"):
            path.unlink()
        for path, text in drawn().items():
            path.write_text(text, encoding="utf-8")
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    rows = [row for name in ([OTHERS] if arguments.others else MODELS) for row in validated(name)]
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    errors = sorted(abs(float(row["error"])) for row in rows if row["error"])
    print(
        f"error of the step time: median {statistics.median(errors):.1%}, 90th percentile "
        f"{errors[math.ceil(0.9 * len(errors)) - 1]:.1%}, {len(errors)} of {len(rows)} configurations measured"
    )


def validated(name: str) -> list[dict[str, str]]:
    """Calibrate, then predict and measure the configurations of a file, whose name begins with the model's."""
    model = name.partition("-")[0]
    calibration, table = RUNS / f"{model}.json", RUNS / f"{name}.csv"
    if not calibration.exists():
        compressors = ",".join(dict.fromkeys(compressor for compressor, _ in PAIRS))
        bench(
            "calibrate", "--model", model, "--dataset", "synthetic", "--compressors", compressors, "--budget", "1h",
            "--out", calibration,
        )  # fmt: skip
    cells = FILES / f"{name}.toml"
    bench("predict", "--calibration", calibration, "--validate", cells, "--runs", RUNS / name, "--table", table)
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bench(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "bench", *map(str, arguments)], check=True)


def drawn() -> dict[Path, str]:
    """Return path -> text of the files: one sweep for each model, and the uneven clusters that it names."""
    rng = np.random.default_rng(SEED)
    files = {}
    for model in MODELS:
        tables = [toml_table("[base]", {"model": model} | BASE)]
        for number in range(CELLS):
            compressor, collective = PAIRS[number % len(PAIRS)]
            options = {"compressor": compressor, "collective": collective}
            hosts = int(rng.integers(2, 9))
            rate = f"{10 ** rng.uniform(1, 3):.0f}mbit"
            latency = "0ms" if rng.random() < 0.4 else f"{rng.uniform(1, 50):.0f}ms"
            if rng.random() < 0.3:
                path = FILES / f"{model}-uneven{number}.toml"
                files[path] = uneven(hosts, rate, latency, float(rng.uniform(0.2, 0.8)), float(rng.uniform(0.4, 0.9)))
                options["cluster"] = str(path)
            else:
                options |= {"hosts": hosts, "bandwidth": rate, "latency": latency}
            tables.append(toml_table("[[include]]", options))
        files[FILES / f"{model}.toml"] = "\n".join(tables)
    return files | drawn_others()


def drawn_others() -> dict[Path, str]:
    """Return the sweep of asynchronous servers, of slow ranks that all wait for, and of rates that change over time."""
    rng = np.random.default_rng(SEED_OF_OTHERS)
    model = OTHERS.partition("-")[0]
    # After the common start, a server's queue takes some steps to become stationary.
    tables = [toml_table("[base]", {"model": model} | BASE | {"steps": 60, "warmup_steps": 20})]

    def link() -> Settings:
        latency = "0ms" if rng.random() < 0.4 else f"{rng.uniform(1, 20):.0f}ms"
        return {
            "hosts": int(rng.integers(3, 7)),
            "bandwidth": f"{10 ** rng.uniform(1.3, 2.5):.0f}mbit",
            "latency": latency,
        }

    def slow_rank() -> str:
        return f"rank=1,slowdown={rng.uniform(1.5, 4):.1f}"

    for number, (compressor, waits) in enumerate(PUSHED):
        slow: Settings = {"straggler": slow_rank()} if number % 2 else {}
        strategy = f"async_server:{waits}"
        tables.append(toml_table("[[include]]", {"compressor": compressor, "strategy": strategy} | link() | slow))
    for compressor, collective in PAIRS[:4]:
        pair: Settings = {"compressor": compressor, "collective": collective}
        tables.append(toml_table("[[include]]", pair | link() | {"straggler": slow_rank()}))
    for compressor, collective in PAIRS[1:5]:
        where: Settings = {"hosts": int(rng.integers(2, 5)), "bandwidth_trace": TRACE, "steps": 150}
        tables.append(toml_table("[[include]]", {"compressor": compressor, "collective": collective} | where))
    return {FILES / f"{OTHERS}.toml": "\n".join(tables)}


def uneven(hosts: int, rate: str, latency: str, uplink_share: float, cpu_share: float) -> str:
    """Return a cluster file in which the first host has a slower uplink, and the last gets only a share of its CPU."""
    link = f'bandwidth = "{rate}"\nlatency = "{latency}"\n'
    slow_uplink = f"{uplink_share * float(rate.removesuffix('mbit')):.1f}mbit"
    tables = [f'[[host]]\nname = "far"\nuplink = "{slow_uplink}"\ndownlink = "{rate}"\nlatency = "{latency}"\n']
    if hosts > 2:
        tables.append(f'[[host]]\nname = "host"\ncount = {hosts - 2}\n{link}')
    return "\n".join([*tables, f'[[host]]\nname = "busy"\ncpu_share = {cpu_share:.2f}\n{link}'])


if __name__ == "__main__":
    main()
