"""The command `bench calibrate`: measure the parts of a training step on this machine, as input for `bench predict`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import takes
from bench.core.config.run import OUTPUT
from bench.core.files import check_writable
from bench.extensions.predict.options import CalibrateConfig

EXAMPLES = """[bold]Examples[/bold]

  bench calibrate --model resnet20 --dataset synthetic --out resnet20.json

  bench calibrate --model resnet18 --dataset synthetic --compressors none,bf16,topk:ratio=0.001 --out resnet18.json

[bold]What is measured[/bold]

  First, two processes exchange messages, which gives the cost of a message and of a byte. Then one rank runs alone. Its
  batch, forward and update are timed, and when each of DDP's buckets is ready during backward. For every compressor,
  the encoding and decoding of each bucket are timed, and its bytes are counted, also after entries of several ranks are
  merged. With one thread, all these times are CPU time, which other work on the machine affects least.

  Then several ranks run steps at the same time, as many ranks as cores and twice as many. This wall-clock time shows
  how much they slow each other down. If the machine supports virtual hosts, the cost of messages between two of them is
  measured too, including the kernel's work. Nothing else should run on the machine during these two measurements.

  Finished parts are kept in FILE.parts until all are measured; after an interruption, the same command continues."""


@takes(CalibrateConfig)
def calibrate(
    options: CalibrateConfig,
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE", rich_help_panel=OUTPUT)] = Path(
        "calibration.json"
    ),
) -> None:
    """Measure the parts of a training step on this machine and write them to a file for `bench predict`."""
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
            print(f"continuing with {len(kept.parts)} finished part(s) from {kept.path}", file=sys.stderr)
        calibration = execute(config, lambda text: print(text, file=sys.stderr, flush=True), server, kept)
    calibration.write(out)
    kept.path.unlink(missing_ok=True)
    print(f"wrote {out}", file=sys.stderr)
    if calibration.cut:
        print(
            f"note: --budget {options.budget} was too short to repeat everything as often as planned: "
            f"{', '.join(calibration.cut)}; a longer one makes predictions more precise",
            file=sys.stderr,
        )
    if calibration.was_disturbed:
        print(
            "warning: other processes used the cores during the calibration, so step times of ranks that share cores "
            "will be predicted too long; calibrate again when nothing else is running",
            file=sys.stderr,
        )


COMMAND = Command(function=calibrate, epilog=EXAMPLES, panel=MODEL)
