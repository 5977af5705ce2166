"""The sentences of results/reference/README.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from bench.report.statistics import Effect
from bench.report.targets import TIME
from benchmarks.prose.rows import REFERENCE, per_cent, rows, runs, sooner
from benchmarks.published.figures import Gain, SweepRuns
from benchmarks.published.setups import LINKS, METHODS

Parts = Iterator[tuple[Any, ...]]


def sentences() -> Parts:
    yield from files()
    yield from slow_link()
    yield from break_even_rates()
    yield from accuracy()
    yield from two_bits()
    yield from encoding()
    yield from collectives()
    yield from links()
    yield from auto()
    yield from predictions()


def files() -> Parts:
    deviation = 100 * rows("composed-times").deviation.abs()
    yield (
        "whole runs: {} configurations, median deviation {:.1f} %, largest {:.1f} %",
        len(deviation), deviation.median(), deviation.max(),
    )  # fmt: skip
    text = runs("gpt-stdlib").iloc[0]
    yield (
        "The recipe: {:.3f} bits per byte of the held-out text after ten minutes, gzip {:.2f} |",
        text.test_bits_per_byte, text.gzip_bits_per_byte,
    )  # fmt: skip
    digits = runs("local-30-steps").query("model == 'small_cnn'").groupby("strategy").test_accuracy.mean()
    yield "times fewer bytes; {:.1f} points lost on digits", 100 * (digits["ddp"] - digits["local"])
    yield "{} predicted and measured step times |", len(rows("predict-validation"))
    yield "simulating 10 000 ranks: at most {:.0f} s |", rows("predict-scale").wall_s.max()


def slow_link() -> Parts:
    of_method = runs("five-methods").groupby("compressor")
    times = {name: own.set_index("seed").time_to_target_s for name, own in of_method}
    factors = {name: sooner(times["bf16"], own).value for name, own in times.items()}
    compressed = [factors[name] for name in ("group_topk", "powersgd", "topk")]
    accuracies = of_method.test_accuracy.mean()
    yield (
        "reached the target {:.1f} to {:.1f} times sooner than dense bf16, and their final accuracy was up to {} lower",
        min(compressed), max(compressed), _points(100 * (accuracies["bf16"] - accuracies.min())),
    )  # fmt: skip
    yield "bf16 alone reached it {:.1f} times sooner than fp32", 1 / factors["none"]
    yield "Sending {:.0f} times fewer bytes", of_method.compression_ratio.last()["group_topk"]
    together = SweepRuns.read(REFERENCE / "published/together.csv")
    gains = {
        link: max(Gain(which={**which, **rate}, than={**METHODS["dense fp32"], **rate}, metric=TIME).of(together).value
                  for name, which in METHODS.items() if name != "dense fp32")
        for link, rate in LINKS.items()
    }  # fmt: skip
    yield (
        "reached the target {:.0f} times sooner than dense fp32 at 10 Mbit/s, and {:.1f} times sooner at 100 Mbit/s",
        gains["10 Mbit/s"], gains["100 Mbit/s"],
    )  # fmt: skip


def _points(points: float) -> str:
    return "one point" if f"{points:.1f}" == "1.0" else f"{points:.1f} points"


def break_even_bps(name: str, faster: float = 1.0) -> dict[str, float]:
    """Return the rate at which each method takes as long as a dense sum that is faster than gloo's by a factor.

    It is interpolated linearly between logarithms, and infinite where the method is faster at every rate.
    """
    found = {}
    own = rows(name).query("checkout == 'now' and way != 'bf16 by gloo'").sort_values("rate_bps")
    for way, group in own.groupby("way"):
        logs = list(zip(map(math.log, group.rate_bps), map(math.log, group.ratio * faster), strict=True))
        crossings = [
            low - a * (high - low) / (b - a) for (low, a), (high, b) in itertools.pairwise(logs) if a < 0.0 <= b
        ]
        found[way.partition("+")[0]] = math.exp(crossings[0]) if crossings else math.inf if logs[-1][1] < 0.0 else 0.0
    return {method: bps for method, bps in found.items() if method not in ("bf16", "fp16")}


def break_even_rates() -> Parts:
    rates = break_even_bps("break-even")
    fastest_first = sorted(rates.items(), key=lambda each: (-each[1], each[0]))
    for text, low, high in (("above 10", 10, math.inf), ("8 to 10", 8, 10), ("4 to 6", 4, 6), ("2 to 4", 2, 4)):
        yield f"| {text} Gbit/s | {{}} |", _code(method for method, bps in fastest_first if low <= bps / 1e9 <= high)
    ring = loopback(2)["ring"]
    against_ring = break_even_bps("break-even", ring)
    above = [f"`{name}`" for name, bps in against_ring.items() if bps == math.inf]
    others = [bps / 1e9 for bps in against_ring.values() if bps < math.inf]
    yield (
        "`ring` sums 10 MB {:.2f} times as fast as gloo over loopback. Against a dense sum that is faster by this "
        "factor at every rate, {} have rates above 10 Gbit/s, and the others from {:.1f} to {:.1f} Gbit/s.",
        ring, " and ".join(above), min(others), max(others),
    )  # fmt: skip
    older = break_even_bps("break-even-avx2")
    lower = {name: 100 * (1 - older[name] / bps) for name, bps in rates.items() if bps < math.inf and name in older}
    clearly = [value for value in lower.values() if value > 10]
    yield (
        "Without AVX-512, and with older loops, they are {:.0f} to {:.0f} % lower, except those of {}.",
        min(clearly), max(clearly), " and ".join(f"`{name}`" for name, value in lower.items() if value <= 10),
    )  # fmt: skip


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def accuracy() -> Parts:
    of = runs("topk-synthetic").groupby("compressor").test_accuracy
    mean, sd = 100 * of.mean(), 100 * of.std()
    yield "dense reaches {:.1f} ± {:.1f} %:", mean["none"], sd["none"]
    for kept, ratio in (("1 %", ""), ("0.1 %", "ratio=0.001")):
        specs = (
            ":".join(filter(None, ("topk", ",".join(filter(None, (feedback, ratio, warm_up))))))
            for feedback, warm_up in itertools.product(("", "error_feedback=false"), ("", "warmup_epochs=0"))
        )
        yield f"| {kept} | {{:.1f}} | {{:.1f}} | {{:.1f}} | {{:.1f}} |", *(mean[spec] for spec in specs)
    tuned = runs("tuned-synthetic")
    tests, trials = tuned[tuned.holdout_size == 0], tuned[tuned.holdout_size > 0]
    best = trials.sort_values("test_accuracy").groupby("compressor").lr.last()
    at_rate = (100 * tests.set_index(["compressor", "lr"]).test_accuracy).groupby(level=[0, 1]).mean()
    order = ("none", "dgc", "topk", "group_topk", "powersgd", "threshold", "twobit", "onebit", "sign", "randomk")
    for text, rate in (("shared", dict.fromkeys(order, 0.02)), ("tuned", best)):
        yield f"| {text}, % |" + " {:.1f} |" * len(order), *(at_rate[name, rate[name]] for name in order)
    means = runs("compressors-training").groupby(["dataset", "compressor"]).test_accuracy.mean() * 100
    lost = {data: means[data]["none"] - means[data] for data in ("digits", "synthetic")}
    yield "On `digits` no compressor is more than {:.1f} points below dense", lost["digits"].max()
    loses = lost["synthetic"][lost["synthetic"] > 1.5]
    yield "methods lose {:.0f} to {:.0f} points at the shared rate", loses.min(), loses.max()


def two_bits() -> Parts:
    yield from value_codes()
    yield from default_of_group_topk()


def value_codes() -> Parts:
    own = rows("value-codes").set_index(["model", "tensors", "compressor", "by_layer", "values"]).sort_index()
    groups, layers = ("group_topk:ratio=0.01,group_size=1024", False), ("topk:ratio=0.01", True)
    codes = ("two_magnitudes", "sigma", "int8")
    for model in ("small_cnn", "gpt:preset=small"):
        for tensors, text in (("gradients", "gradients"), ("differences", "change over 30 steps")):
            errors = [
                own.error[(model, tensors, *selection)][values] for selection in (groups, layers) for values in codes
            ]
            yield (
                f"| `{model}`, {text} | `group_topk` | {{}} | {{}} | {{}} | | | `topk` | {{}} | {{}} | {{}} |",
                *(f"{error:.{2 if error >= 0.1 else 3 if error >= 1e-3 else 5}f}" for error in errors),
            )
    most = own.of_sigma.xs("two_magnitudes", level="values").groupby(["by_layer", "compressor"]).max()
    yield (
        "at most {:.2f} of `sigma`'s with `group_topk`, and {:.2f} if each layer is a message of its own, as in the "
        "published code (64 of 4096). With `topk` it is at most {:.2f}. The",
        most[False].max(), most[True, "group_topk:ratio=0.015625,group_size=4096"], most[True, "topk:ratio=0.01"],
    )  # fmt: skip


def default_of_group_topk() -> Parts:
    times = rows("group-topk-values")
    floats, small, large, dense = (
        f"group_topk:{options}" if options else "bf16"
        for options in ("values=floats", "values=two_magnitudes", "group_size=4096,values=two_magnitudes", "")
    )
    found: dict[tuple[str, str], Effect] = {}
    for link, own in times.groupby("bandwidth"):
        by_method = own.pivot(index="seed", columns="method", values="time_to_target_s")
        for method in (small, large, dense):
            found[method, link] = sooner(by_method[floats], by_method[method].dropna(), "anytime")
    for text, method in (("groups of 1024", small), ("groups of 4096: the default", large)):
        each = (found[method, link] for link in ("10mbit", "100mbit", "1gbit"))
        yield (
            f"| `two_magnitudes`, {text} |" + " {:.2f} [{:.2f}, {:.2f}] |" * 3,
            *(bound for effect in each for bound in (effect.value, effect.low, effect.high)),
        )
    beside = [found[dense, "1gbit"].value / value for value in (1, *(found[m, "1gbit"].value for m in (small, large)))]
    yield "and dense bf16 is {:.1f} to {:.1f} times sooner than all three", min(beside), max(beside)
    seeds = times.groupby(["bandwidth", "method"]).seed.nunique()
    yield "intervals over the same {} to {} seeds", seeds.min(), seeds.max()


def encoding() -> Parts:
    def of_floor(name: str) -> pd.Series:
        own = rows(name).query("path == 'native'").set_index("name").of_floor.sort_values()
        return own[~own.index.str.startswith("decode")]

    yield "on 11 million elements ({:.1f} ms), including", 1000 * rows("encode").set_index("name").seconds["r += g"]
    units = of_floor("encode")
    groups = (units[units < 2], units[(units >= 2) & (units < 2.85)], units[units >= 2.85])
    yield (
        "| {:.1f} to {:.1f} | {:.1f} to {:.1f} | {:.1f} to {:.1f} | | :--- | :--- | :--- | | {} | {} | {} |",
        *(bound for group in groups for bound in (group.min(), group.max())),
        *(_code(group.index) for group in groups),
    )  # fmt: skip
    by_layer = of_floor("encode-resnet18") / units
    yield "take up to {:.1f} times as long on ResNet-18's 62 layers", by_layer.max()
    yield "`torch.topk` alone takes {:.0f} units", rows("encode").set_index("name").of_floor["top-k"]
    ms = rows("exchange").query("mode == 'exchange' and hosts == 4 and checkout == 'now'").set_index("way").ms
    yield (
        "takes {:.0f} ms with `group_topk` on `allgather`. It takes {:.0f} ms with `torch.topk` per layer, fp32 values "
        "and int32 indices, and {:.0f} ms with dense bf16 over gloo.",
        ms["group_topk+allgather"], ms["usual"], ms["bf16 by gloo"],
    )  # fmt: skip


def loopback(ranks: int) -> dict[str, float]:
    """Return the speed of each collective relative to gloo's all-reduce of 10 MB of fp32."""
    own = rows("collectives-loopback").query(f"world_size == {ranks} and size_bytes == 10000000 and payload == 'none'")
    times = own.set_index("collective").time_p50_s
    return dict(times["native"] / times)


def collectives() -> Parts:
    names = ("ring", "halving_doubling", "tree", "hierarchical", "server", "allgather", "pool")
    for ranks in (2, 4):
        yield f"| {ranks} |" + " {:.2f} |" * len(names), *(loopback(ranks)[name] for name in names)
    sent = rows("sparse-ring").pivot(
        index=["payload", "overlap", "world_size", "size_bytes"], columns="collective", values="bytes_sent"
    )
    factor = sent["ring"] / sent["allgather"]
    floats, two_bits = (factor[name] for name in ("group_topk:group_size=1024,values=floats", "group_topk"))
    yield (
        "sends {:.1f} to {:.1f} times as many bytes as `allgather` if the ranks' index sets hardly overlap, and {:.1f} "
        "to {:.1f} times with values of two bits. If half of the indices overlap, it sends {:.1f} to {:.1f} times as "
        "many, and {:.1f} to {:.1f} times with two bits",
        *(bound(kind[overlap]) for overlap in (0.0, 0.5) for kind in (floats, two_bits) for bound in (min, max)),
    )  # fmt: skip


def link_deviation() -> int:
    """Return within how many per cent of their settings the median rates, delays and losses are."""
    own = rows("links")
    by_link = own.groupby(["rate_bps", "latency_s", "loss_ratio"])
    pairs = (("udp_bps", "rate_bps"), ("one_way_s", "latency_s"), ("measured_loss_ratio", "loss_ratio"))
    off = [(by_link[measured].median() / by_link[given].first() - 1).abs().max() for measured, given in pairs]
    return math.ceil(100 * max(off))


def links() -> Parts:
    own = rows("links")
    yield "medians are within {} % of the rate, delay and loss", link_deviation()
    yield "was up to {:.0f} % off in rate", 100 * (own.udp_bps / own.rate_bps - 1).abs().max()
    lossy = own.query("rate_bps == 1e8 and latency_s == 0.01 and loss_ratio == 0.01")
    yield "with a round trip of 20 ms to {:.0f} Mbit/s", lossy.tcp_bps.median() / 1e6


AUTO = {"auto": "with AVX-512", "auto-avx2": "without"}


def auto_near_best(name: str) -> tuple[int, int]:
    """Return in how many of how many cases `auto` was within 5 % of the best static pair."""
    own = rows(name).query("part == 'links' and turn >= 0")
    step_s = own.groupby(["model", "link", "method"]).step_s.median().unstack()
    ratio = step_s["auto"] / step_s.drop(columns="auto").min(axis=1)
    return int((ratio <= 1.05).sum()), len(ratio)


def auto_on_traces(name: str) -> tuple[float, float]:
    """Return by how many per cent `auto` is slower than the best pair: over all traces, and at most on each."""
    total = rows(name).query("part == 'traces' and turn >= 0").groupby(["link", "method"])[["seconds", "steps"]].sum()
    step_s = (total.seconds / total.steps).unstack()
    each = step_s["auto"] / step_s.drop(columns="auto").min(axis=1)
    mean = step_s.map(math.log).mean()
    return per_cent(math.exp(mean["auto"] - mean.drop("auto").min())), per_cent(each.max())


def auto_lost(name: str) -> pd.Series:
    """Return for each model by how many points the mean accuracy of `auto` is below dense bf16."""
    means = rows(name).query("part == 'accuracy'").groupby(["model", "method"]).accuracy.mean().unstack()
    return 100 * (means["bf16"] - means["auto"])


def auto() -> Parts:
    near = {text: auto_near_best(name) for name, text in AUTO.items()}
    yield (
        "within 5 % of the best of six static pairs in {} of {} cases with AVX-512 and {} of {} without",
        *near["with AVX-512"], *near["without"],
    )  # fmt: skip
    (slower, most), (faster, most_without) = map(auto_on_traces, AUTO)
    yield (
        "On three changing links it was {:.0f} % slower than the best single pair overall with AVX-512 and {:.0f} % "
        "faster without, and at most {:.0f} % slower than the best pair on each.",
        slower, -faster, max(most, most_without),
    )  # fmt: skip
    lost = pd.concat(map(auto_lost, AUTO))
    yield "was {:.1f} to {:.1f} points below dense bf16", lost.min(), lost.max()


def predictions() -> Parts:
    errors = 100 * rows("predict-validation").error.abs()
    yield (
        "{} configurations drawn before predicting, the error of the step time was {:.1f} % in the median, {:.1f} % "
        "at the 90th percentile and {:.1f} % at most.",
        len(errors), errors.median(), errors.quantile(0.9, interpolation="lower"), errors.max(),
    )  # fmt: skip


def harder_errors() -> dict[str, tuple[float, float]]:
    """Return the smallest and largest error in per cent of each kind of harder case."""
    own = rows("predict-validation-others")
    speed = 100 * (own.predicted_samples_per_s / own.samples_per_s - 1).abs()
    has = own.settings.str.contains
    is_server = has("async_server")
    kinds = {
        "bounded": speed[is_server & has("staleness")],
        "asp": speed[is_server & has("mode=asp")],
        "slow rank": 100 * own.error.abs()[~is_server & has("straggler")],
        "trace": 100 * own.error.abs()[has("bandwidth_trace")],
    }
    return {kind: (errors.min(), errors.max()) for kind, errors in kinds.items()}
