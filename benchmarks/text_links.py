"""Decide which methods train a small GPT sooner on three links; `results/reference/text-links.md` shows the answers.

    bench tune examples/text-links.toml --out results/runs/text-tune
    python benchmarks/text_links.py results/runs/text-tune/tuned.toml results/runs/text-links

The first method of the tuned file is the baseline. The answers are written beside the folder, to `FOLDER-RATE.json` and
`.csv`, because each link replaces those of the one before in the folder.
"""

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import bench

RATES = ("1gbit", "50mbit", "10mbit")  # whole runs check the first; at 10 Mbit/s one takes 14 minutes
NOT_SHARED = {"seeds", "world_size"}  # bench decide chooses seeds, and the hosts give the number of ranks


def main(tuned: Path, out: Path) -> None:
    """Decide for each link, with the trainings of the first one."""
    content = tomllib.loads(tuned.read_text(encoding="utf-8"))
    shared: dict[str, Any] = {name: value for name, value in content["base"].items() if name not in NOT_SHARED}
    baseline, *methods = (
        {name: value for name, value in method.items() if name != "rates_tried"} for method in content["include"]
    )
    rule: dict[str, Any] = {"max_seeds": 6, "budget": "10h"}
    for number, rate in enumerate(RATES):
        if number == 0:
            options = shared | {"hosts": 4, "target_bits_per_byte": 3.0}
            bench.decide(methods, baseline=baseline, out=out, bandwidth=rate, **rule, **options)
        else:
            bench.decide(source=out, bandwidth=rate, **rule)
        for ending in ("json", "csv"):
            shutil.copy(out / f"decision.{ending}", out.parent / f"{out.name}-{rate}.{ending}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
