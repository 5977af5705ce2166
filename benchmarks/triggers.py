"""Measure the cost of letting the host command the exchange: step times of `placed` with both triggers, interleaved.

Each of two devices has one replica. With `--trigger sync` the host waits for all devices and then commands the
exchange; with `async` a device starts as soon as it is ready. Both run with equal devices and with one device that
takes three times as long. The last row of every run is written to one CSV file; the printed figures are medians over
repeats.

    python benchmarks/triggers.py --out results/reference/triggers.csv [--repeats 5]
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

DEVICES = '[[device]]\nrole = "gpu"\ncount = 2\nlink = "cxl2x16"\n'
RUN = ["run", "--train-size", "1280", "--test-size", "64", "--batch-size", "16", "--steps", "40", "--threads", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV file for the last rows")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        devices = Path(folder) / "two.toml"
        devices.write_text(DEVICES, encoding="utf-8")
        for _, slow, trigger in itertools.product(range(asked.repeats), (False, True), ("sync", "async")):
            straggler = ["--straggler", "rank=2,slowdown=3"] if slow else []
            strategy = f"placed:by=data,devices={devices}"
            options = [*RUN, *straggler, "--strategy", strategy, "--trigger", trigger, "--out", f"{folder}/runs"]
            subprocess.run([sys.executable, "-m", "bench", *options], check=True, capture_output=True)
        rows = pd.concat(
            pd.read_csv(path, dtype={"digest": str, "config_id": str}).tail(1)
            for path in sorted(Path(folder).glob("runs/*/metrics.csv"))
        )
    rows["strategy"] = "placed:by=data,devices=two gpus"  # the real value names a temporary file
    rows.to_csv(asked.out, index=False)
    rows["straggler"] = rows.straggler.fillna("none")
    print(rows.groupby(["straggler", "trigger"])[["step_time_s", "exposed_s", "exchange_s"]].median().to_string())


if __name__ == "__main__":
    main()
