"""The sentences of results/reference/guides.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from bench.core.units import format_bytes
from bench.deciding.answer import LARGEST_DEVIATION
from benchmarks.job_error import summarise
from benchmarks.prose.reference import harder_errors
from benchmarks.prose.rows import points, rows, runs

Parts = Iterator[tuple[Any, ...]]


def sentences() -> Parts:
    yield from muon_and_dion()
    yield from partitions()
    yield from hook_memory()
    yield from deciding()
    yield from predictions()
    yield from auto()
    yield from loopback()
    yield from gpu()


def muon_and_dion() -> Parts:
    own = runs("muon-dion")
    for (optimizer, compressor), each in own.groupby(["optimizer", "compressor"]):
        yield (
            f"| `{optimizer}` | {{:g}} | `{compressor}` | {{:.0f}} | {{:.1f}} % |",
            each.lr.iloc[0], each.payload_bytes_per_step.mean() / 1000, 100 * each.test_accuracy.mean(),
        )  # fmt: skip


def partitions() -> Parts:
    own = runs("partitions")
    for partition, of_partition in own.groupby("partition"):
        scores = {name: each.test_accuracy for name, each in of_partition.groupby("compressor")}
        cells = []
        for name in ("powersgd", "group_topk"):
            change = points(scores["bf16"], scores[name])
            cells += [100 * scores[name].mean(), 100 * scores[name].std(), change.value, change.low, change.high]
        yield (
            f"| `{partition}` |" + " {:.2f} | {:.1f} ± {:.1f} |" + " {:.1f} ± {:.1f}: {:+.1f} [{:+.1f}, {:+.1f}] |" * 2,
            of_partition.label_skew.mean(), 100 * scores["bf16"].mean(), 100 * scores["bf16"].std(), *cells,
        )  # fmt: skip


def hook_memory() -> Parts:
    own = rows("hook-memory").set_index("compressor")
    yield (
        "{:.1f} times the gradient's size above DDP without a hook for `none`, and up to {:.1f} more for the others.",
        own.peak_above_ddp["none"], own.peak_above_none.max(),
    )  # fmt: skip
    held = own[own.nbytes > 0]
    off = (held.in_use_above_ddp / held.nbytes - 1).abs().max()
    yield "the sums of `hook.nbytes` are within {:.0f} % of what the C library", 100 * off


def deciding() -> Parts:
    alike = rows("stopping_rule").query("effect == 0")
    yield "gave at most {:.1f} % at 5 %", 100 * (alike.above + alike.below).max()
    jobs = summarise(rows("job-error")).set_index("pair").loc[["bf16 / topk", "bf16 / group_topk", "bf16 / powersgd"]]
    between, within = (100 * jobs[f"deviation_{name}"] for name in ("of_jobs", "expected_from_blocks"))
    yield "deviated by {:.0f} % (`topk`), {:.0f} % (`group_topk`) and {:.0f} % (`powersgd`) in their ratio", *between
    yield "the spread of blocks within a job suggests ({:.0f}, {:.0f} and {:.0f} %)", *within
    yield "Other work took at most {:.0f} % of the cores", 100 * jobs.largest_other_cpu_share.max()
    idle, busy = (rows(name) for name in ("composed-times", "composed-times-busy"))
    yield (
        "Composed times of {} configurations lay at most {:.1f} % from whole runs on an idle machine",
        len(idle), 100 * idle.deviation.abs().max(),
    )  # fmt: skip
    yield (
        "took {:.0f} to {:.0f} % of the cores, {} of these {} lay more than 10 % apart, the worst by {:.0f} %",
        100 * busy.other_cpu_share.min(), 100 * busy.other_cpu_share.max(),
        (busy.deviation.abs() > LARGEST_DEVIATION).sum(), len(busy), 100 * busy.deviation.abs().max(),
    )  # fmt: skip
    found = rows("decision-error")
    yield "at most {:.1f} % of {} decisions were wrong", 100 * found.wrong.max(), found.decisions.iloc[0]
    faster = found.query("factor == 1.5 and job_error == 0.02")
    yield (
        "found by the sixth seed in at least {:.0f} % of decisions if jobs deviate by 2 % and seeds by 5 %, and in "
        "{:.0f} % with three methods and seeds that deviate by 10 %",
        100 * faster[faster.spread <= 0.05].by_sixth.min(),
        100 * faster.query("candidates == 3 and spread == 0.1").by_sixth.min(),
    )


def predictions() -> Parts:
    errors = 100 * rows("predict-validation").error.abs()
    yield (
        "two models, six pairs | {} | median {:.1f} %, 90th percentile {:.1f} %, worst {:.1f} % |",
        len(errors), errors.median(), errors.quantile(0.9, interpolation="lower"), errors.max(),
    )  # fmt: skip
    own = rows("predict-local-steps")
    by_speed = own.settings.str.contains("steps=auto")
    for text, kind in (("(chosen, not drawn)", own[~by_speed]), ("one rank three times as slow", own[by_speed])):
        high = "all too high" if (kind.error > 0).all() else "not all too high"
        error = 100 * kind.error.abs()
        yield f"{text} | {{}} | median {{:.1f}} %, worst {{:.1f}} %, {high} |", len(kind), error.median(), error.max()
    found = harder_errors()
    yield "| step time with a slow rank | 4 | {:.0f} to {:.0f} % |", *found["slow rank"]
    yield "| step time on a trace | 4 | {:.0f} to {:.0f} % |", *found["trace"]
    yield "with bounded staleness | 2 | {:.0f} and {:.0f} % too low |", *found["bounded"]
    yield "`async_server:mode=asp` | 2 | {:.0f} and {:.0f} % too high |", *found["asp"]
    less = 100 * (1 - own.cpu_s_per_step / own.predicted_cpu_s_per_step)[~by_speed]
    yield "because they took {:.0f} % less CPU time than the calibrated step", less.median()
    rarer = (own.predicted_messages_per_step / own.messages_per_step)[by_speed]
    yield "exchanged {:.2f} to {:.1f} times more rarely than predicted", rarer.min(), rarer.max()


def auto() -> Parts:
    own = rows("auto-avx2").query("part == 'links' and turn >= 0")
    times = own.pivot(index=["model", "link", "turn"], columns="method", values="step_s")
    ratio = (times["auto"] / times["bf16"]).groupby(["model", "link"]).median()
    chosen = own[own.method == "auto"].groupby(["model", "link"]).chosen.agg(lambda each: each.mode()[0].split()[0])
    links = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
    shown = (("resnet18", "10mbit"), ("resnet18", "1gbit"), ("small_cnn", "100mbit"), ("small_cnn", "1gbit"))
    for model, link in shown:
        yield f"| `{model}` | {links[link]} | `{{}}` | {{:.2f}} |", chosen[model, link], ratio[model, link]


def loopback() -> Parts:
    own = rows("collectives-loopback").query("world_size == 2 and size_bytes == 10000000")
    by_pair = own.set_index(["payload", "collective"])
    sparse = "group_topk:values=floats,group_size=1024"
    shown = {"none": ("native", "ring", "pool"), "group_topk": ("allgather", "ring")}
    for payload, collective in ((payload, name) for payload, names in shown.items() for name in names):
        row = by_pair.loc[(payload, collective)]
        messages = "-" if pd.isna(row.messages) else f"{row.messages:.0f}"
        yield (
            f"| `{sparse if payload == 'group_topk' else payload}` | `{collective}` |"
            " {:.2f} ms | {:.2f} GB/s | {:.2f}x | {} | " + messages + " | {} |",
            1000 * row.time_p50_s, row.busbw_Bps / 1e9, by_pair.time_p50_s["none", "native"] / row.time_p50_s,
            row.num_wrong, format_bytes(row.bytes_sent),
        )  # fmt: skip


def gpu() -> Parts:
    steps = 1000 * runs("resnet18-h200").set_index("compressor").step_time_s
    yield (
        "and `powersgd` (median steps of {:.0f}, {:.0f}, {:.0f}, {:.0f} and {:.0f} ms)",
        *(steps[name] for name in ("none", "bf16", "topk", "group_topk", "powersgd")),
    )  # fmt: skip
