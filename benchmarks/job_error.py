"""Measure by how much the ratio of two methods' step times differs between jobs that time the same steps.

    python -m benchmarks.job_error --out rows.csv            # one job of the methods of `make demo`: a row per pair
    python -m benchmarks.job_error --summary rows.csv [--out results/reference/job-error.csv]

Blocks of one job share its processes, memory and minute, so only other jobs show how far a job's mean is from the
truth. Run the first command again and again, at least ten minutes apart; each run appends rows. The summary has one
row per pair: the standard deviation of the jobs' mean log ratios, beside what the spread of blocks within a job would
suggest if blocks were independent. Needs virtual hosts.
"""

import argparse
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd

from bench.core.counters import OtherWork
from bench.core.environment import origin_columns
from bench.deciding.search import LONGEST_TIMING_S
from bench.deciding.step_times import measure_step_times
from bench.deciding.study import Study, parse_method, read_methods
from bench.launch.jobs.fork_server import TRAIN, ForkServer

METHODS = Path("examples/demo.toml")
BASELINE = "bf16"
ORIGIN = ("host", "cpu", "torch_version", "kernels", "git_sha", "git_dirty")


def measure(max_s: float) -> list[dict[str, Any]]:
    """Time the steps of all methods in one job; return a row per method, beside the baseline."""
    base, methods = read_methods(METHODS)
    study = Study(base={"eval_every": 0.25} | base, methods=[parse_method(BASELINE), *methods], rule={})
    load, began = os.getloadavg(), time.time()
    others = OtherWork(os.getpid())
    with ForkServer(TRAIN) as server:
        planned = study.plan(server)
        others.start()
        times = measure_step_times(
            {method.name: method.on_link for method in planned},
            {method.name: [0] for method in planned},
            server,
            max_s=max_s,
            on_block=lambda _: None,
        )
        job_s = time.time() - began
        others.stop()
    baseline, *names = times
    origin = origin_columns(planned[0].on_link.device)
    rows = []
    for name in names:
        pairs = zip(times[baseline].seconds[0], times[name].seconds[0], strict=True)
        ratios = [math.log(theirs / own) for (theirs,), (own,) in pairs]
        rows.append(
            {
                "began_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began)),
                "pair": f"{baseline} / {name}",
                "load_1min": round(load[0], 2),
                "load_5min": round(load[1], 2),
                "other_cpu_share": round(others.share or 0.0, 4),
                "job_s": round(job_s, 2),
                "blocks": len(ratios),
                "mean_log_ratio": statistics.fmean(ratios),
                "block_deviation": statistics.stdev(ratios) if len(ratios) > 1 else None,
                "job_log_ratio": math.log(times[baseline].training_s({0.0: 1}) / times[name].training_s({0.0: 1})),
            }
            | {key: origin[key] for key in ORIGIN}
        )
    return rows


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per pair: how far jobs lie apart, and how far they would if their blocks were independent."""
    found = []
    for pair, jobs in rows.groupby("pair", sort=False):
        within = math.sqrt((jobs["block_deviation"] ** 2 / jobs["blocks"]).mean())
        ratios = jobs["job_log_ratio"]
        found.append(
            {
                "pair": pair,
                "jobs": len(jobs),
                "from": jobs["began_at"].min(),
                "to": jobs["began_at"].max(),
                "largest_other_cpu_share": jobs["other_cpu_share"].max(),
                "factor": round(math.exp(ratios.mean()), 4),
                "deviation_of_jobs": round(ratios.std(), 4),
                "lowest": round(math.exp(ratios.min()), 4),
                "highest": round(math.exp(ratios.max()), 4),
                "deviation_expected_from_blocks": round(within, 4),
                "cpu": jobs["cpu"].iloc[-1],
                "git_sha": jobs["git_sha"].iloc[-1],
            }
        )
    return pd.DataFrame(found)


def main() -> None:
    """Measure one job and append its rows, or summarise the jobs of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file; the rows of a job are appended")
    parser.add_argument("--summary", type=Path, metavar="CSV", help="summarise the jobs in this file instead")
    parser.add_argument("--max-s", type=float, default=LONGEST_TIMING_S, help="seconds of timing in the job")
    options = parser.parse_args()
    if options.summary:
        rows = summarise(pd.read_csv(options.summary))
    else:
        rows = pd.DataFrame(measure(options.max_s))
    print(rows.to_string(index=False))
    if options.out:
        is_new = bool(options.summary) or not options.out.exists()
        rows.to_csv(options.out, mode="w" if is_new else "a", header=is_new, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
