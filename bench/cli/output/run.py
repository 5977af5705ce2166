"""Output of `bench run`: the plan, the progress of training, notes and warnings, and the summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.cli.output.console import LiveLine, plain_table
from bench.core.config.run import RunConfig
from bench.core.counters import NOTEWORTHY_SHARE
from bench.core.rows import read_rows
from bench.core.units import format_bytes, format_seconds
from bench.hosts.cluster import Cluster
from bench.hosts.support import check_and_choose_backend
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.resolve import prepare_data
from bench.launch.run import Result

if TYPE_CHECKING:
    from bench.launch.layer_plan import LayerPlan  # which imports torch

_PLAN_ROWS = (
    "model", "dataset", "train_size", "test_size", "optimizer", "lr", "schedule", "batch_size", "epochs", "steps",
    "compressor", "collective", "strategy", "trigger", "bucket_mb", "world_size", "hosts", "device", "threads", "amp",
    "digest",
)  # fmt: skip


class Display(LiveLine):
    """Progress of one run."""

    def report(self, line: dict[str, Any]) -> None:
        """Show one report of rank 0."""
        if "evaluated" in line:
            row = line["evaluated"]
            self.say_of_title(
                f"epoch {row['epoch']:.4g}  step {row['step']}  loss {row['train_loss']:.4f}  "
                f"accuracy {row['test_accuracy']:.2%}"
            )
        else:
            self.update(_progress(line), total=line["total_steps"], completed=line["step"])


def _progress(line: dict[str, Any]) -> list[str]:
    """Return the contents of a report as texts, the most important first."""
    known: dict[str, Callable[[float], str]] = {
        "eta_s": lambda value: f"{format_seconds(value)} left",
        "epoch": "epoch {:.1f}".format,
        "accuracy": "accuracy {:.1%}".format,
        "loss": "loss {:.3f}".format,
        "samples_per_s": "{:,.0f} samples/s".format,
        "waiting_share": "waiting {:.0%}".format,
    }
    return [text(line[name]) for name, text in known.items() if line[name] is not None]


def make_each_ready(configs: Sequence[RunConfig], server: ForkServer) -> None:
    """Prepare all configurations before the first run starts, and print their notes.

    Raises:
        UsageError: a configuration is not possible on this machine.
    """
    for config in {config.config_id: config for config in configs}.values():
        if config.cluster is not None:
            check_and_choose_backend(Cluster.from_dict(config.cluster))
    for dataset, data_dir in dict.fromkeys((config.dataset, config.data_dir) for config in configs):
        server.call(prepare_data, dataset, data_dir)
    print_notes(configs)


def print_notes(configs: Sequence[RunConfig]) -> None:
    """Print the notes about some configurations on stderr, each once."""
    for sentence in dict.fromkeys(note for config in configs for note in config.notes):
        print(f"note: {sentence}", file=sys.stderr)


def warn_of_other_work(results: Sequence[Result]) -> None:
    """Warn on stderr if other programs used so much of the cores that times are too long."""
    written = [result.folder.metrics for result in results if result.folder.metrics.exists()]
    shares = [row.get("other_cpu_share") or 0.0 for path in written for row in read_rows(path)]
    if (share := max(shares, default=0.0)) > NOTEWORTHY_SHARE:
        print(
            f"warning: other programs used up to {share:.0%} of this machine's cores during training, which makes the "
            "times too long; run it again on an idle machine",
            file=sys.stderr,
        )


def print_plan(configs: list[RunConfig]) -> None:
    """Print the first part of a dry run: what would be trained."""
    seeds = ", ".join(str(config.seed) for config in configs)
    table = Table(title=f"Plan: seed {seeds}", title_justify="left", show_header=False, box=box.SIMPLE)
    for name in _PLAN_ROWS:
        value = getattr(configs[0], name)
        if value is not None:
            table.add_row(name, str(value))
    if configs[0].cluster is not None:
        for link in Cluster.from_dict(configs[0].cluster).describe():
            table.add_row("virtual hosts", link)
    Console().print(table)


def print_layers(plan: LayerPlan) -> None:
    """Print the second part of a dry run: how each layer would be compressed."""
    table = plain_table("Layers: one rank's payload at full compression")
    table.show_footer = True
    sent = "by data" if plan.sent_nbytes is None else format_bytes(plan.sent_nbytes)
    table.add_column("layer", footer="together, as one bucket")
    table.add_column("shape")
    table.add_column("kind")
    table.add_column("payload")
    table.add_column("dense", justify="right", footer=format_bytes(plan.dense_nbytes))
    table.add_column("sent", justify="right", footer=sent)
    for row in plan.layers:
        table.add_row(
            row.name,
            "x".join(str(length) for length in row.shape),
            row.kind,
            row.payload,
            format_bytes(row.dense_nbytes),
            "by data" if row.sent_nbytes is None else format_bytes(row.sent_nbytes),
        )
    Console().print(table)


def print_summary(configs: list[RunConfig], results: list[Result]) -> None:
    """Print one row per run, and the folders of the results."""
    config = configs[0]
    what = (config.model, config.dataset, config.strategy, f"{config.world_size} ranks")
    table = plain_table()
    rows = [_summary(config.seed, result) for config, result in zip(configs, results, strict=False)]
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    console = Console()
    console.print(f"{config.compressor} on {config.collective}: {', '.join(what)}", highlight=False)
    console.print(table)
    for result in results:
        print(result.folder.path)


def _summary(seed: int, result: Result) -> dict[str, str]:
    """Return one run's cells by heading; cells without a value are empty."""
    measured = []
    if result.folder.metrics.exists():
        measured = [row for row in read_rows(result.folder.metrics) if row.get("test_accuracy") is not None]
    row = measured[-1] if measured else {}
    missed = "missed" if row.get("target_accuracy") is not None else ""
    return {
        "seed": str(seed),
        "status": result.status if result.status != "ok" else "",
        "accuracy": _cell(row.get("test_accuracy"), "{:.2%}".format),
        "samples/s": _cell(row.get("samples_per_s"), "{:,.0f}".format),
        "step": _cell(row.get("step_time_s"), format_seconds),
        "sent/step": _cell(row.get("payload_bytes_per_step"), format_bytes),
        "ratio": _cell(row.get("compression_ratio"), "{:.4g}x".format),
        "trained": _cell(row.get("train_time_s"), format_seconds),
        "to target": _cell(row.get("time_to_target_s"), format_seconds) or missed,
    }


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)
