"""The sentences of results/reference/heterogeneous.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.prose.rows import points, rows, runs

SETTINGS = (("digits", 4), ("synthetic", 2), ("synthetic", 4))
OPTIMIZERS = ("adam", "adabelief", "max_adabelief", "max_adabelief:mode=gradient")

Parts = Iterator[tuple[Any, ...]]


def sentences() -> Parts:
    yield from triggers()
    yield from optimizers()
    yield from kfac()


def triggers() -> Parts:
    slow = runs_of_triggers().query("straggler == 'rank=2,slowdown=3'").groupby("trigger")
    for trigger, own in slow:
        yield (
            f"| one takes three times as long | {trigger} | {{:.1f}} ms | {{:.1f}} ms |",
            1000 * own.step_time_s.median(), 1000 * own.exchange_s.median(),
        )  # fmt: skip


def runs_of_triggers() -> pd.DataFrame:
    """Return all repeated runs, which have the same seed."""
    return rows("triggers").groupby("run_id").last()


def tested(name: str) -> pd.DataFrame:
    """Return the runs with new seeds, without those that chose a learning rate."""
    own = runs(name)
    return own[own.holdout_size == 0]


def optimizers() -> Parts:
    own = tested("optimizers").set_index(["dataset", "world_size", "optimizer", "seed"]).sort_index()
    accuracy, rate = 100 * own.test_accuracy, own.lr
    for optimizer in OPTIMIZERS:
        keys = [(*setting, optimizer) for setting in SETTINGS]
        cells = [(accuracy[key].mean(), accuracy[key].std(), rate[key].iloc[0]) for key in keys]
        yield f"| `{optimizer}` |" + " {:.1f} ± {:.1f} (lr {:g}) |" * len(keys), *itertools.chain(*cells)
    changes = [
        points(*(own.test_accuracy[(*setting, optimizer)] for optimizer in ("adam", "max_adabelief")), paired=True)
        for setting in SETTINGS
    ]
    yield (
        "in points with 95 % intervals: {:.1f} [{:.1f}, {:.1f}] (digits, 4), {:.1f} [{:.1f}, {:.1f}] (synthetic, 2), "
        "{:.1f} [{:.1f}, {:.1f}] (synthetic, 4).",
        *(figure for change in changes for figure in (change.value, change.low, change.high)),
    )  # fmt: skip
    trials = runs("optimizers").query("holdout_size > 0 and lr == 0.03 and dataset == 'digits'")
    held_out = 100 * trials.set_index(["optimizer", "world_size"]).test_accuracy.sort_index()
    ours, others = held_out["max_adabelief"], held_out.drop("max_adabelief")
    yield (
        "({:.0f} to {:.0f} %, while the others keep {:.0f} to {:.0f} %)",
        ours.min(), ours.max(), others.min(), others.max(),
    )  # fmt: skip


def kfac() -> Parts:
    of = dict(list(tested("kfac").set_index("seed").groupby("optimizer")))
    for name, own in of.items():
        accuracy = 100 * own.test_accuracy
        yield (
            f"| `{name}` (lr {{:g}}) | {{:.1f}} ± {{:.1f}} | {{:.0f}} ms | {{:,.0f}} | {{:,.0f}} | {{:.0f}} |",
            own.lr.iloc[0], accuracy.mean(), accuracy.std(), 1000 * own.step_time_s.mean(),
            own.payload_bytes_per_step.mean(), own.state_bytes_per_step.mean(), own.factor_fallbacks.fillna(0).sum(),
        )  # fmt: skip
    better = points(of["sgd"].test_accuracy, of["kfac"].test_accuracy)
    yield "K-FAC is {:.1f} points better (95 % interval {:.1f} to {:.1f})", better.value, better.low, better.high
