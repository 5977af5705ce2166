"""The sentences of README.md and docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from bench.core.units import format_rate, format_seconds
from bench.report.columns import format_factor, format_points
from bench.report.statistics import Effect
from bench.report.targets import TIME
from benchmarks.prose import text_links
from benchmarks.prose.reference import auto_lost, auto_near_best, link_deviation
from benchmarks.prose.rows import REFERENCE, decision, rows, runs, sooner
from benchmarks.published.figures import Figure, Gain, SweepRuns
from benchmarks.published.setups import LINKS, METHODS

Parts = Iterator[tuple[Any, ...]]


def demo() -> Parts:
    """What `make demo` prints."""
    yield from (_as_template(line) for line in _demo_lines())


def _demo_lines() -> Iterator[str]:
    content, own = decision("demo/decision"), rows("demo/decision")
    yield from content["answer"]
    decided = {each["method"]: each for each in content["decisions"]}
    table = []
    for method, each in own.groupby("method", sort=False):
        cells = [f" {method}", f"{each.reached.sum()}/{len(each)}", format_seconds(each.time_to_target_s.mean())]
        if method in decided:
            found = decided[method]
            factor, low, high = (format_factor(found[name]) for name in ("factor", "low", "high"))
            cells += [f"{factor}x [{low}, {high}]", found["verdict"]]
            cells += [format_points(found["accuracy"]), found["accuracy_verdict"]]
        else:
            cells += ["-", "baseline", "-"]
        table.append(" ".join(cells))
    yield "".join(table) + " "
    highest = format_rate(max(content["rates_tried_bps"]))
    limits = content["faster_up_to_bps"].items()
    shown = (f"{method} {format_rate(bps) if bps else f'>{highest}'}" for method, bps in sorted(limits))
    yield f"faster up to: {', '.join(shown)}"


def _as_template(line: str) -> tuple[str, ...]:
    """Return a printed line as a template, with its figures."""
    figure = r"[-+]?\d+(?:\.\d+)?"
    return re.sub(figure, "{}", line), *re.findall(figure, line)


def training_images() -> Parts:
    yield "`digits`, has {} training images", runs("five-methods").train_size.iloc[0]


def measuring() -> Parts:
    yield "`digits` has {} training images", runs("five-methods").train_size.iloc[0]
    published = ("published/answers", "published/group_topk_links", "published/heterogeneous_factors")
    own = pd.concat(map(rows, ("five-methods", *published)))
    more = 100 * (own.wire_bytes_per_step / (own.payload_bytes_per_step + own.state_bytes_per_step.fillna(0)) - 1)
    of_powersgd = own.compressor == "powersgd"
    yield (
        "Wire bytes exceed the payload by {:.0f} to {:.0f} % in the committed results, and by {:.0f} to {:.0f} % for "
        "`powersgd`, which sends more messages.",
        more[~of_powersgd].min(), more[~of_powersgd].max(), more[of_powersgd].min(), more[of_powersgd].max(),
    )  # fmt: skip


def concepts() -> Parts:
    own = rows("five-methods").query("compressor == 'topk'").groupby("epoch").payload_bytes_per_step.last()
    yield (
        "sent {:.3g} kB per step in the first epoch, then {:.3g} kB, {:.3g} kB and, from the fourth on, {:.3g} kB.",
        *own.iloc[:4] / 1000,
    )


def virtual_hosts() -> Parts:
    yield "Medians of its rates, delays and losses were within {} % of the settings", link_deviation()
    busy = rows("links").query("rate_bps == 1e8 and loss_ratio == 0").forwarder_cpu_share
    yield "It takes about {:.0f} % of a core at 100 Mbit/s", 100 * busy.median()


def answer() -> Parts:
    """The demo's answer in one sentence."""
    found = {each["method"]: each for each in decision("demo/decision")["decisions"]}
    yield "`group_topk` reached the target {} times sooner", format_factor(found["group_topk"]["factor"])


def auto() -> Parts:
    near, near_without = map(auto_near_best, ("auto", "auto-avx2"))
    yield "of six fixed pairs in {} of {} cases on one machine, {} of {} on another", *near, *near_without
    lost = pd.concat(map(auto_lost, ("auto", "auto-avx2")))
    yield "on average {:.1f} to {:.1f} points below dense", lost.min(), lost.max()


def predict() -> Parts:
    errors = 100 * rows("predict-validation").error.abs()
    yield "the median error was {:.1f} %, the largest {:.1f} %", errors.median(), errors.max()


def workloads() -> Parts:
    yield "{:.3f} bits per byte (measured)", runs("gpt-stdlib").test_bits_per_byte.iloc[0]


def methods() -> Parts:
    """The table of measured results."""
    together = SweepRuns.read(REFERENCE / "published/together.csv")
    accuracy = runs("published/together").groupby(["compressor", "uplink_bps"]).test_accuracy.mean()
    patent = "group_topk:preset=patent"
    for link, rate in LINKS.items():
        ours, bf16 = ({**METHODS[name], **rate} for name in ("Group-TopK, patent", "bf16"))
        found = Gain(which=ours, than=bf16, metric=TIME).of(together)
        verdict = "faster" if found.low and found.low > 1 else "open"
        lost = 100 * (accuracy[patent, rate["uplink_bps"]] - accuracy["bf16", rate["uplink_bps"]])
        yield (
            f"| {link} | `{patent}` on `ring` | {{}}x [{{}}, {{}}] {verdict} | {{:+.1f}} points |",
            *_factors(found),
            lost,
        )
    of_method = runs("five-methods").groupby("compressor")
    times = {name: own.set_index("seed").time_to_target_s for name, own in of_method}
    own_accuracy = of_method.test_accuracy.mean()
    yield (
        "| 2 | 50 Mbit/s | `powersgd` | {}x [{}, {}] faster | {:+.1f} points |",
        *_factors(sooner(times["bf16"], times["powersgd"])), 100 * (own_accuracy["powersgd"] - own_accuracy["bf16"]),
    )  # fmt: skip
    trained = text_links.methods("text-links")
    for link, shown, written, method in (
        ("10mbit", "10 Mbit/s", "local:steps=4 muon topk:ratio=0.1,values=two_magnitudes", text_links.SPARSE_TOPK),
        ("50mbit", "50 Mbit/s", "local:steps=4 muon group_topk:ratio=0.1,values=two_magnitudes", text_links.SPARSE),
        ("1gbit", "1 Gbit/s", "local:steps=4 muon group_topk:ratio=0.1,values=two_magnitudes", text_links.SPARSE),
    ):
        found = text_links.decided(link)[written]
        yield (
            f"| {shown} | `{written}`" + " | {}x [{:.2g}, {:.2g}] {} | {:+.1f} % bits per byte |",
            format_factor(found["factor"]), found["low"], found["high"], found["verdict"],
            text_links.change(trained[method], trained[text_links.ADAMW]),
        )  # fmt: skip


def _factors(found: Effect | Figure) -> list[str]:
    return [format_factor(figure) for figure in (found.value, found.low, found.high) if figure is not None]
