"""The sentences of results/reference/text-links.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from bench.report.columns import format_factor
from benchmarks.prose.rows import decision, per_cent, rows, runs

PAGE = "results/reference/text-links.md"
LINKS = ("10mbit", "50mbit", "1gbit")
# (compressor, strategy, optimizer) of the baseline, and of the methods that several sentences name.
ADAMW = ("bf16", "ddp", "adamw")
MUON = ("bf16", "ddp", "muon")
SPARSE = ("group_topk:ratio=0.1,values=two_magnitudes", "local:steps=4", "muon")
SPARSE_TOPK = ("topk:ratio=0.1,values=two_magnitudes", "local:steps=4", "muon")
DEMO = ("none", "ddp", "demo:k=24,value_dtype=bf16")

Parts = Iterator[tuple[Any, ...]]


def sentences() -> Parts:
    yield from quality()
    yield from times()
    yield from longer()
    yield from fewest_bytes()


def _short(text: str) -> str:
    """Return a component as the page names it: without options that all or none of its rows share."""
    name, _, options = text.partition(":")
    kept = [each for each in options.split(",") if each and each not in _NOT_NAMED.get(name, _NOT_NAMED[""])]
    return ":".join(filter(None, (name, ",".join(kept))))


_NOT_NAMED: Mapping[str, tuple[str, ...]] = {
    "": ("warmup_epochs=0", "group_size=4096"),
    "adamw": ("beta2=0.99", "weight_decay=0.1"),
}


def methods(name: str) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Return the runs of each method, with the name that the page gives it, indexed by seed."""
    own = runs(name)
    keys = [own[column].map(_short) for column in ("compressor", "strategy", "optimizer")]
    return {method: each.set_index("seed") for method, each in own.groupby(keys)}


def change(ours: pd.DataFrame, than: pd.DataFrame) -> float:
    """Return by how many per cent more bits per byte a method needs: the geometric mean over the seeds of both."""
    ratios = (ours.test_bits_per_byte / than.test_bits_per_byte).dropna()
    return per_cent(math.exp(ratios.map(math.log).mean()))


def quality() -> Parts:
    found = methods("text-links")
    for (compressor, strategy, optimizer), own in found.items():
        inner = "the optimizer itself" if compressor == "none" else f"`{compressor}`"
        method = inner if strategy == "ddp" else f"`{strategy}` with {inner}"
        written = {"adamw": "AdamW", "muon": "Muon"}.get(optimizer, f"`{optimizer}`")
        bits = own.test_bits_per_byte
        more = "" if (compressor, strategy, optimizer) == ADAMW else f" {change(own, found[ADAMW]):+.1f} %"
        yield (
            f"| {method} | {written} | {{:g}} | {{:.0f}} | {{:.2f}} ± {{:.2f}} |{more} | {{}} |",
            own.lr.iloc[0], own.compression_ratio.mean(), bits.mean(), bits.std(), len(own),
        )  # fmt: skip
    hylo = found["hylo", "ddp", "adamw"]
    saved, more_bits = _saved(hylo, found)
    yield "`hylo` comes within {:.0f} %, at {:.1f} times fewer bytes", more_bits, saved
    yield "better than dense AdamW at {:.0f} times fewer bytes", found[SPARSE_TOPK].compression_ratio.mean()
    yield "Both methods end {:.0f} % below dense AdamW", -_mean_change(found, ADAMW)
    yield "the same two methods lose {:.0f} %,", _mean_change(found, MUON)
    yield (
        "**`demo` ends {:.1f} % above dense AdamW** at {:.0f} times fewer bytes",
        change(found[DEMO], found[ADAMW]), found[DEMO].compression_ratio.mean(),
    )  # fmt: skip
    local = [change(own, found[ADAMW]) for (_, strategy, _), own in found.items() if "preset" in strategy]
    yield "end {:.0f} to {:.0f} % above dense AdamW", min(local), max(local)
    dion = found["bf16", "ddp", "dion:rank_fraction=0.05"]
    yield "`dion` with a twentieth of the rank ends {:.0f} % above", change(dion, found[ADAMW])
    tuning = methods("text-links-tuning")
    powersgd = tuning["powersgd:rank=4", "local:steps=4", "muon"].test_bits_per_byte.min()
    yield (
        "in place of the sparse differences ended {:.0f} % above bf16",
        per_cent(powersgd / tuning[ADAMW].test_bits_per_byte.min()),
    )  # fmt: skip
    presets = {strategy.partition("preset=")[2].partition(",")[0]: own for (_, strategy, _), own in found.items()}
    diloco, streaming, sparseloco = (presets[name] for name in ("diloco", "streaming", "sparseloco"))
    yield "| {:.0f} times less, 30 steps: {:.0f} % more bits per byte |", *_saved(diloco, found)
    yield "| {:.0f} times less: {:.0f} % more |", *_saved(streaming, found)
    yield (
        "2 bits, {:.0f} times less: {:.0f} % more than bf16, `diloco` {:.0f} %;",
        *_saved(sparseloco, found), change(diloco, found[ADAMW]),
    )  # fmt: skip
    saved, fewer = _saved(found[SPARSE], found)
    yield (
        "{:.0f} times less, {:.0f} % fewer bits per byte than dense AdamW, {:.0f} % more than dense Muon;",
        saved, -fewer, change(found[SPARSE], found[MUON]),
    )  # fmt: skip
    yield "| {:.0f} times less: {:.1f} % more; in the longer", *_saved(found[DEMO], found)
    yield "| {:.0f} times less, a twentieth of the rank: {:.0f} % more |", *_saved(dion, found)


def _mean_change(found: Mapping[tuple[str, str, str], pd.DataFrame], than: tuple[str, str, str]) -> float:
    return (change(found[SPARSE], found[than]) + change(found[SPARSE_TOPK], found[than])) / 2


def _saved(own: pd.DataFrame, found: Mapping[tuple[str, str, str], pd.DataFrame]) -> tuple[float, float]:
    """Return how many times fewer bytes a method sends, and its change from the baseline in per cent."""
    return own.compression_ratio.mean(), change(own, found[ADAMW])


def times() -> Parts:
    of_link = {link: decided(link) for link in LINKS}
    seconds = [rows(f"text-links-{link}").query("method == 'bf16'").time_to_target_s.mean() for link in LINKS]
    yield "| `bf16`, AdamW: the baseline |" + " {:.0f} s |" * 3, *seconds
    for method in of_link["10mbit"]:
        cells = [_verdict(of_link[link][method]) for link in LINKS]
        figures = [figure for _, several in cells for figure in several]
        yield " | ".join((f"| `{method}`", *(cell for cell, _ in cells), "")), *figures
    yield "there a whole run of `bf16` takes {:.0f} and {:.0f} minutes", seconds[1] / 60, seconds[0] / 60
    checks = sorted(decision("text-links-1gbit")["checks"], key=lambda each: each["method"])
    longer = (per_cent(each["measured_s"] / each["composed_s"]) for each in checks)
    yield "whole runs on the link took {:.1f} and {:.1f} % longer than the composed times of `bf16` and of", *longer
    demo = rows("text-links-10mbit").query("method.str.startswith('demo')")
    yield "at {:.0f} times fewer bytes, and reached the target with {} of {} seeds.", *(
        methods("text-links")[DEMO].compression_ratio.mean(), *(_NUMBERS[n] for n in (demo.reached.sum(), len(demo)))
    )  # fmt: skip


def decided(link: str) -> dict[str, dict[str, Any]]:
    """Return what `bench decide` found on a link, by method as the page names it."""
    return {_plain(each["method"]): each for each in decision(f"text-links-{link}")["decisions"]}


_NUMBERS = {3: "three", 4: "four", 5: "five", 6: "six"}


def _plain(method: str) -> str:
    return " ".join(map(_short, method.split()))


def _verdict(found: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a cell of the table and its figures."""
    if found["factor"] is None:
        return found["verdict"], []
    figures = [format_factor(found["factor"]), found["low"], found["high"], found["verdict"]]
    return "{}x [{:.2g}, {:.2g}] {}", figures


def longer() -> Parts:
    found = methods("text-links-long")
    adamw, muon, sparse, demo = (
        found[method] for method in (ADAMW, MUON, ("group_topk:ratio=0.1", "local:steps=4", "muon"), DEMO)
    )
    for text, own in (
        ("`bf16` | Muon", muon), ("`local:steps=4` with `group_topk:ratio=0.1` | Muon", sparse),
        ("the optimizer itself | `demo:k=24,value_dtype=bf16`", demo),
    ):  # fmt: skip
        figures = [own.compression_ratio.mean(), own.test_bits_per_byte.mean(), change(own, adamw)]
        last = " |" if own is muon else " {:+.1f} % |"
        figures += [] if own is muon else [change(own, muon)]
        yield f"| {text} | {{:.0f}} | {{:.2f}} | {{:+.1f}} % |" + last, *figures
    yield (
        "| `bf16` | AdamW | {:.0f} | {:.2f} | | {:+.1f} % |",
        adamw.compression_ratio.mean(), adamw.test_bits_per_byte.mean(), change(adamw, muon),
    )  # fmt: skip
    yield "lose 9 %, and {:.1f} % in the [longer training]", change(sparse, muon)
    yield "the loss of local steps and sparse differences is {:.1f} %", change(sparse, muon)
    yield (
        "in the longer training {:.0f} % fewer and {:.1f} % more |", -change(sparse, adamw), change(sparse, muon)
    )  # fmt: skip
    yield "in the longer training {:.1f} % less |", -change(demo, adamw)


def fewest_bytes() -> Parts:
    own = runs("local-30-steps")
    digits = dict(list(own[own.model == "small_cnn"].groupby("strategy")))
    accuracy = {name: 100 * each.test_accuracy for name, each in digits.items()}
    sent = digits["local"].iloc[0]
    yield (
        "| 6000 | 1/64 | 1 | {:.0f} (with statistics {:.0f}) | {:.1f} ± {:.1f} % | {:.1f} ± {:.1f} % |",
        sent.compression_ratio, sent.dense_bytes_per_step / (sent.payload_bytes_per_step + sent.state_bytes_per_step),
        *(figure(accuracy[name]) for name in ("local", "ddp") for figure in (pd.Series.mean, pd.Series.std)),
    )  # fmt: skip
    lost = accuracy["ddp"].mean() - accuracy["local"].mean()
    yield "{:.2f} points are lost: {:.1f} of {} test images", lost, lost / 100 * 450, 450
    whole = own.query("model == 'gpt:preset=small' and test_size == 8477")
    by_strategy = pd.concat([runs("gpt-stdlib"), whole]).set_index(["strategy", "seed"]).sort_index()
    dense, local = (by_strategy.test_bits_per_byte[strategy] for strategy in ("ddp", "local:outer_lr=2"))
    ratio = by_strategy.compression_ratio["local:outer_lr=2"]
    yield (
        "| 1/40 | 2 | {:.0f} (no BatchNorm) | {:.3f} ± {:.3f} | {:.3f} ± {:.3f} |",
        ratio.median(), local.mean(), local.std(), dense.mean(), dense.std(),
    )  # fmt: skip
    below = -100 * (local / dense - 1)
    yield "local steps end {:.1f} to {:.1f} % below dense training", below.min(), below.max()
    yield "the means are {:.3f} and {:.3f}. Both", local.drop(1).mean(), dense.drop(1).mean()
    yield (
        "{:.0f} times less: {:.1f} % fewer bits per byte than dense training |",
        ratio.median(), -per_cent(local.mean() / dense.mean()),
    )  # fmt: skip
    bits = windows_of_400()
    adamw = "adamw:beta2=0.99,weight_decay=0.1"
    yield (
        "With `outer_lr=1`, seed 1 ended at {:.3f} on 400 test windows, {:.0f} % above `average=senders` on the same "
        "windows ({:.3f}); one run with Muon inside (0.02) at {:.3f}. In",
        bits["local", adamw], per_cent(bits["local", adamw] / bits["local:average=senders", adamw]),
        bits["local:average=senders", adamw], bits["local", "muon"],
    )  # fmt: skip
    smaller = own[own.model.str.contains("width=48") & (own.lr == 0.003)]
    trials = smaller.set_index(["strategy", "compressor"]).test_bits_per_byte
    yield "one seed; dense training has {:.3f} (`bench", trials["ddp", "bf16"]
    yield "| dense | {:.3f} | - | {:.3f} | - | - |", trials["local", "none"], trials["local:outer_lr=2", "none"]
    sparse = "group_topk:ratio=0.025,warmup_epochs=0"
    columns = ("local", "local:outer_lr=1.5", "local:outer_lr=2", "local:outer_lr=3", "local:average=senders")
    yield "| 1/40 in two bits |" + " {:.3f} |" * 5, *(trials[strategy, sparse] for strategy in columns)


def windows_of_400() -> pd.Series:
    """Return bits per byte of the recipe's model on 400 test windows, by strategy and optimizer (seed 1)."""
    own = runs("local-30-steps").query("model == 'gpt:preset=small' and test_size == 400")
    return own.set_index(["strategy", "optimizer"]).test_bits_per_byte
