"""`bench calibrate`: what the parts of a step take on this machine, for `bench predict` elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import takes
from bench.core.config.job import OUTPUT
from bench.core.files import check_writable
from bench.extensions.predict.options import CalibrateConfig

EXAMPLES = """[bold]Examples[/bold]

  bench calibrate --model resnet20 --dataset synthetic --out resnet20.json

  bench calibrate --model resnet18 --dataset synthetic --compressors none,bf16,topk:ratio=0.001 --out resnet18.json

[bold]What is measured[/bold]

  Two processes that exchange messages: what one costs, and what a byte costs. Then one rank by itself: batch, forward,
  when each of DDP's buckets is ready in backward, update; and for every compressor encoding and decoding of each
  bucket, its bytes, and how they grow where ranks' entries are merged. With one thread all of it is CPU time, which
  other work on the machine changes least.

  Then steps of several ranks at once, as many as cores and twice as many, by the clock: what they take from each other.
  And where virtual hosts are possible, what messages cost between two, the kernel's work included. Both want a machine
  that does nothing else.

  Each part is kept in FILE.parts until all are there: the same command goes on where it was interrupted."""


@takes(CalibrateConfig)
def calibrate(
    options: CalibrateConfig,
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE", rich_help_panel=OUTPUT)] = Path(
        "calibration.json"
    ),
) -> None:
    """Measure the parts of a training step on this machine, and write them to a small file that travels."""
    check_writable(out)
    from bench.extensions.predict.calibrating import WORKER, KeptParts, check, execute, resolve
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.refusals import without_torch

    with ForkServer(WORKER) as server:
        without_torch(check, options)
        server.warm_up(options.threads)
        config = server.call(resolve, options)
        kept = KeptParts(out, config)
        if kept.parts:
            print(f"going on with {len(kept.parts)} part(s) that are kept in {kept.path}", file=sys.stderr)
        calibration = execute(config, lambda text: print(text, file=sys.stderr, flush=True), server, kept)
    calibration.write(out)
    kept.remove()
    print(f"wrote {out}", file=sys.stderr)
    if calibration.cut:
        print(
            f"note: --budget {options.budget} was too short to repeat everything as often as planned: "
            f"{', '.join(calibration.cut)}; a longer one makes predictions more precise",
            file=sys.stderr,
        )
    if calibration.was_disturbed:
        print(
            "warning: other work took the cores meanwhile, and ranks that share some will be predicted too slow; "
            "calibrate again when there is none",
            file=sys.stderr,
        )


COMMAND = Command(function=calibrate, epilog=EXAMPLES, panel=MODEL)
