"""The command `bench trace`, which reads the profiler traces of the user's own training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.commands import ANSWER, Command
from bench.cli.options import AsJson
from bench.core.config.run import OUTPUT
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.core.units import format_bytes, format_rate, format_seconds, parse_rate, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.extensions.trace.collectives import CollectiveRow
    from bench.extensions.trace.steps import TracedJob

EXAMPLES = """[bold]Examples[/bold]

  bench trace traces/

  bench trace rank-0.json.gz rank-1.json.gz --bandwidth 100gbit --picture step.svg

  bench run --hosts 2 --bandwidth 100mbit --steps 20 --profile 5 --out runs && bench trace runs

[bold]How to record[/bold]

  In every rank: torch.profiler.profile(record_shapes=True, schedule=..., on_trace_ready=...), and profiler.step() after
  each training step. docs/trace.md shows it for PyTorch, Lightning, Accelerate, Transformers and torchtitan."""

_MOST_BPS = 1e14  # the links inside a server are faster than those that can be emulated
_MOST_ROWS = 32
# What the first line says about the longest part.
_BOUND_BY = {
    "compute_s": "computing",
    "encoding_s": "encoding",
    "exposed_transfer_s": "the transfer of data",
    "exposed_wait_s": "waiting for late ranks",
    "exposed_unsplit_s": "the exchange (transfer, or waiting for late ranks)",
    "idle_s": "idle time (not computing: Python, data, or other processes)",
}


def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of the ranks of one job, or folders of these.", metavar="FILE|FOLDER...", show_default=False
        ),
    ],
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Rate of the link, such as 100gbit: shows which share of it each exchange reached."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw one step (.svg, .png or .pdf).", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="The step to draw, by its number in the trace.",
            show_default="the step of median length",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    max_size: Annotated[str, typer.Option(help="Largest size of a file, after unpacking.")] = "1GB",
    as_json: AsJson = False,
) -> None:
    """Read profiler traces of your own training, and show what its steps wait for.

    A trace is a file of torch.profiler, one per rank, of any training with NCCL, RCCL or gloo, such as DDP or FSDP.
    """
    from bench.report.plots.style import SUFFIXES

    rate_bps = None if bandwidth is None else parse_rate(bandwidth, _MOST_BPS)
    if picture is None and step is not None:
        raise UsageError("--step chooses the step to draw; give --picture FILE too, or leave out --step")
    if picture is not None:
        if picture.suffix.lower() not in SUFFIXES:
            raise UsageError(f"--picture {picture} must end in {', '.join(SUFFIXES)}")
        check_writable(picture)
    from bench.extensions.trace.collectives import rows
    from bench.extensions.trace.job import read_job
    from bench.extensions.trace.steps import job_of

    recordings, left_out = read_job(paths, parse_size(max_size))
    job = job_of(recordings)
    job.notes[:0] = left_out
    collectives = rows(recordings, [each.calls for each in job.ranks])
    if as_json:
        from bench.cli.console import print_json

        print_json(_as_json(job, collectives, rate_bps))
    else:
        _print(job, collectives, rate_bps)
        for note in job.notes:
            print(f"note: {note}", file=sys.stderr)
    if picture is not None:
        from bench.extensions.trace.picture import draw
        from bench.report.plots.style import save

        save(draw(recordings, job, step), picture)
        print(f"wrote {picture}", file=sys.stderr)


def headline(job: TracedJob) -> str:
    """Return the first line: what bounds the step, and how much sooner it would be if nothing were exchanged."""
    longest_s = job.parts[job.bound_by] or 0.0
    text = f"a step takes {format_seconds(job.step_s)} and is bound by {_BOUND_BY[job.bound_by]}"
    text += f" ({longest_s / job.step_s:.0%} of it)"
    if all(job.parts[name] is None for name in ("exposed_transfer_s", "exposed_wait_s", "exposed_unsplit_s")):
        return text + "; how much sooner it would be without an exchange is not known"
    return (
        f"{text}; if nothing were exchanged, it would take at least {format_seconds(job.least_s)}: "
        f"{job.step_s / max(job.least_s, 1e-9):.3g}x as fast at most"
    )


def _print(job: TracedJob, collectives: Sequence[CollectiveRow], rate_bps: float | None) -> None:
    from bench.cli.console import stdout_console, table_of
    from bench.extensions.trace.steps import PARTS

    console = stdout_console()
    console.print(headline(job), markup=False, soft_wrap=True)
    for late in job.late:
        console.print(
            f"rank {late.rank} is late: each other rank waits {format_seconds(late.wait_s)} per step for it "
            f"({late.wait_s / job.step_s:.0%})",
            markup=False,
            soft_wrap=True,
        )
    shown = [name for name in PARTS if name not in ("encoding_s", "exposed_unsplit_s") or job.parts[name]]
    cells = []
    for name in ("step_s", *shown):
        mean = job.step_s if name == "step_s" else job.parts[name]
        if mean is None:
            cells.append([PARTS[name], "not known", "", ""])
            continue
        most_s, rank = max((value, -each.rank) for each in job.ranks if (value := each.mean(name)) is not None)
        longest = f"{format_seconds(most_s)} (rank {-rank})" if len(job.ranks) > 1 else ""
        cells.append([PARTS.get(name, "step"), format_seconds(mean), f"{mean / job.step_s:.1%}", longest])
    num_steps = len(job.ranks[0].numbers)
    ranks = f"{len(job.ranks)} rank{'s' * (len(job.ranks) > 1)}"
    heading = f"mean of {ranks}, {num_steps} step{'s' * (num_steps > 1)}"
    console.print(table_of([heading], ["time", "share", "longest"], cells))
    if len(job.ranks) > 1:
        console.print(
            table_of(
                ["rank"],
                ["step", *(PARTS[name].removeprefix("exposed ").partition(",")[0] for name in shown)],
                [
                    [
                        str(each.rank),
                        *(_seconds(each.mean(name)) for name in ("step_s", *shown)),
                    ]
                    for each in job.ranks[:_MOST_ROWS]
                ],
            )
        )
        if len(job.ranks) > _MOST_ROWS:
            console.print(f"and {len(job.ranks) - _MOST_ROWS} more ranks; --json shows all\n", markup=False)
    if collectives:
        headings = ["calls/step", "bytes/step", "time/step", "bus bandwidth"]
        headings += [] if rate_bps is None else [f"of {format_rate(rate_bps)}"]
        console.print(
            table_of(["exchange", "group", "type"], headings, [_row(row, rate_bps) for row in collectives[:_MOST_ROWS]])
        )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _row(row: CollectiveRow, rate_bps: float | None) -> list[str]:
    at_least = ">= " if row.with_waits else ""
    bus = "-" if row.bus_bps is None else f"{at_least}{format_rate(row.bus_bps)}"
    cells = [row.kind, row.group, row.dtype or "-", f"{row.count:.3g}"]
    cells += ["-" if row.nbytes is None else format_bytes(row.nbytes), format_seconds(row.seconds), bus]
    if rate_bps is not None:
        cells.append("-" if row.bus_bps is None else f"{at_least}{row.bus_bps / rate_bps:.0%}")
    return cells


def _as_json(job: TracedJob, collectives: Sequence[CollectiveRow], rate_bps: float | None) -> dict[str, Any]:
    ranks = [
        {
            "rank": each.rank,
            "steps": [
                {
                    "step": number,
                    "step_s": float(each.step_s[index]),
                    **{name: None if part is None else float(part[index]) for name, part in each.parts.items()},
                }
                for index, number in enumerate(each.numbers)
            ],
        }
        for each in job.ranks
    ]
    return {
        "answer": headline(job),
        "bound_by": job.bound_by,
        "step_s": job.step_s,
        "parts": job.parts,
        "without_exchange_s": job.least_s,
        "late": [vars(late) for late in job.late],
        "ranks": ranks,
        "collectives": [
            {**vars(row), "share_of_bandwidth": row.bus_bps and rate_bps and row.bus_bps / rate_bps}
            for row in collectives
        ],
        "notes": job.notes,
    }


COMMAND = Command(function=trace, epilog=EXAMPLES, panel=ANSWER)
