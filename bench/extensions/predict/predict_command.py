"""`bench predict`: what a step would take on links and among ranks that one does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import AsJson, takes
from bench.core.errors import UsageError
from bench.extensions.predict.options import TABLE, VALIDATION, WHAT, PredictConfig

if TYPE_CHECKING:
    from bench.extensions.predict.calibration import Calibration

CALIBRATION = Path("calibration.json")
RUNS = Path("results/runs/predict")

EXAMPLES = """[bold]Examples[/bold]

  bench predict --calibration resnet20.json --compressor topk --world-size 64 --bandwidth 100mbit --latency 10ms

  bench predict --calibration resnet20.json --compressor powersgd --hosts 8 --sweep bandwidth=1mbit..10gbit

  bench predict --calibration resnet20.json --latency 5ms --sweep bandwidth=1mbit..10gbit,world_size=2..64

  bench predict --calibration resnet20.json --compressor topk --hosts 4 --bandwidth 1mbit --steps-from results/runs

  bench predict --calibration resnet20.json --hosts 8 --bandwidth 10mbit --latency 5ms

  bench predict --calibration resnet20.json --compressor topk --hosts 8 --losses every=6h,restart=30s,checkpoint=100

  bench predict --calibration resnet20.json --strategy async_server:mode=asp --hosts 8 --straggler rank=1,slowdown=3

  bench predict --calibration resnet20.json --compressor topk --hosts 4 --bandwidth-trace examples/cell.trace

  bench predict --calibration resnet20.json --cluster my_machines.toml --compressor group_topk --collective ring --json

[bold]The model[/bold]

  Buckets are ready during backward, encoded one after the other, summed by the collective's own messages, and decoded.

  "Bound by" is what it would help most to have more of: compute, network, exchange (what each rank does for it:
  encoding, messages, decoding), or cpu where ranks share cores.

  Hosts hang from one switch by links of their own: queues that never idle while something waits. Every message and byte
  costs its rank some work. A step ends with its slowest rank, and not before shared cores have done all ranks' work.

  With async_server every rank's pushes and the server's answers are played through, event by event; what is under way
  at once shares the links fairly. Times of a step are then rank 0's, as in metrics.csv.

  A trace is followed from its beginning, step after step, through whole rounds of it, 16 steps at least; a step is
  then the mean over all. One shorter than a 500th of the trace stands for those in that time; where many ranks send
  many messages the parts are larger, and thousands of ranks take minutes."""


@takes(PredictConfig)
def predict(
    options: PredictConfig,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File from bench calibrate.", metavar="FILE", rich_help_panel=WHAT, show_default=str(CALIBRATION)
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Predict over a range of rates: bandwidth=1mbit..10gbit; followed by ,world_size=2..64: which pair "
            "is fastest where.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    steps_from: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs (folders or CSV files) that took the same configuration to a target: adds the time to it. "
            "Several times for several.",
            metavar="PATH",
            rich_help_panel=WHAT,
        ),
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option(
            help="Predict the configurations of this sweep file, run them here, and show both; or those of finished "
            "runs, where it is their folder.",
            metavar="PATH",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    runs: Annotated[
        Path,
        typer.Option(
            help="Folder of the runs of a sweep file; what is done is not done again.", rich_help_panel=VALIDATION
        ),
    ] = RUNS,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV file for what was predicted and measured.",
            show_default=f"{TABLE} in the runs' folder",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a training step, its exposed time and its bytes, and whether compression pays against dense bf16."""
    _check_together(options, sweep, steps_from, validate)
    _check_validation(validate, runs, table)
    known = _known(options, calibration)
    calibration = calibration or CALIBRATION
    if validate is None and options.compressor and "," not in (sweep or ""):
        from bench.launch.refusals import without_torch

        without_torch(_check, options, known)
    from bench.extensions.predict import answers  # imports torch

    if validate is not None and validate.is_dir():
        answers.compare_with_finished(known, calibration, validate, table, as_json=as_json)
    elif validate is not None:
        answers.validate(known, calibration, validate, runs, table, as_json=as_json)
    elif sweep is None and not options.compressor:
        answers.rank_compressors(known, options, as_json=as_json)
    elif sweep is None:
        answers.predict_one(known, options, steps_from or [], as_json=as_json)
    elif "," in sweep or not options.compressor:
        answers.predict_map(known, options, sweep, as_json=as_json)
    else:
        answers.predict_curve(known, options, sweep, as_json=as_json)


def _known(options: PredictConfig, path: Path | None) -> Calibration:
    """Return the calibration, or an estimate if the time of a step is given.

    Raises:
        UsageError: there is none, or it is of another model, data set or batch than the options name.
    """
    from bench.core import spec
    from bench.extensions.predict.calibration import Calibration

    if options.step_time is not None:
        if path is not None:
            raise UsageError("--step-time is for an estimate without a calibration; leave out --calibration")
        from bench.extensions.predict.estimate import estimated

        return estimated(options)
    if path is None and not CALIBRATION.exists():
        named = f"--model {options.model} " if options.model else ""
        raise UsageError(
            f"there is no {CALIBRATION} here; measure a model with `bench calibrate {named}--out {CALIBRATION}`, or "
            f"give {named}--step-time 120ms for a rough estimate"
        )
    known = Calibration.read(path or CALIBRATION)
    measured = {name: getattr(known, name) for name in ("model", "dataset", "batch_size")}
    wanted = measured | {
        name: spec.short_text(spec.build(room, text))
        for name, room in (("model", "models"), ("dataset", "datasets"))
        if (text := getattr(options, name)) is not None
    }
    wanted["batch_size"] = options.batch_size or known.batch_size
    for name, value in wanted.items():
        if value != measured[name]:
            flags = " ".join(f"--{key.replace('_', '-')} {text}" for key, text in wanted.items())
            raise UsageError(
                f"{path or CALIBRATION} was measured with {name} {measured[name]}, which says nothing of {value}; run "
                f"`bench calibrate {flags} --out other.json`, or give --step-time 120ms for a rough estimate"
            )
    return known


def _check_together(
    options: PredictConfig, sweep: str | None, steps_from: list[Path] | None, validate: Path | None
) -> None:
    """Refuse options that leave each other no room."""
    if validate is not None and (sweep is not None or steps_from or options != PredictConfig()):
        raise UsageError(f"{validate} says what is predicted; leave out what else says it")
    if sweep is not None and (options.bandwidth or options.uplink or options.downlink or options.network):
        raise UsageError("--sweep sets the rate of all links; leave out what else sets it")
    if sweep is not None and (steps_from or options.losses):
        one = "--steps-from" if steps_from else "--losses"
        raise UsageError(f"{one} belongs to one prediction; leave out --sweep")
    if not options.compressor and (steps_from or options.losses):
        one = "--steps-from" if steps_from else "--losses"
        raise UsageError(f"{one} belongs to one compressor; name it with --compressor")


def _check_validation(validate: Path | None, runs: Path, table: Path | None) -> None:
    """Refuse what would be ignored."""
    if validate is None and (table is not None or runs != RUNS):
        raise UsageError(f"--{'runs' if table is None else 'table'} belongs to --validate; leave it out")
    if validate is not None and validate.is_dir() and runs != RUNS:
        raise UsageError(f"{validate} holds the runs; leave out --runs, or give a sweep file")


def _check(options: PredictConfig, known: Calibration) -> None:
    from bench.extensions.predict.request import check

    check(options, known)


COMMAND = Command(function=predict, epilog=EXAMPLES, panel=MODEL)
