"""The commands `bench calibrate` and `bench predict`.

`bench calibrate` measures the parts of a training step on this machine. From these parts, `bench predict` computes a
training step on other links and with other numbers of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import AsJson, takes
from bench.core.config.run import OUTPUT
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.extensions.predict.options import PARTS, TABLE, VALIDATION, WHAT, CalibrateConfig, PredictConfig
from collectives.options import raise_first

if TYPE_CHECKING:
    from bench.extensions.predict.calibration import Calibration

CALIBRATION = Path("calibration.json")
RUNS = Path("results/runs/predict")

EXAMPLES_OF_CALIBRATE = """[bold]Examples[/bold]

  bench calibrate --model resnet20 --dataset synthetic --out resnet20.json

  bench calibrate --model resnet18 --dataset synthetic --compressors none,bf16,topk:ratio=0.001 --out resnet18.json

[bold]What is measured[/bold]

  First, two processes exchange messages, which gives the cost of a message and of a byte. Then one rank runs alone. The
  times of its batch, forward and update are measured, and the time in backward at which each DDP bucket is ready. For
  every compressor, the encoding and decoding of each bucket are timed, and the encoded bytes are counted, also after
  entries of several ranks are merged. With one thread, all these times are CPU time, which other work on the machine
  affects least.

  Then several ranks run steps at the same time, as many ranks as cores and twice as many. This wall-clock time shows
  how much they slow each other down. If the machine supports virtual hosts, the cost of messages between two of them is
  measured too, including the kernel's work. Nothing else should run on the machine during these two measurements.

  Finished measurements are kept in FILE.parts until all are done; after an interruption, the same command continues."""

EXAMPLES_OF_PREDICT = """[bold]Examples[/bold]

  bench predict --calibration resnet20.json --compressor topk --world-size 64 --bandwidth 100mbit --latency 10ms

  bench predict --calibration resnet20.json --compressor powersgd --hosts 8 --sweep bandwidth=1mbit..10gbit

  bench predict --calibration resnet20.json --latency 5ms --sweep bandwidth=1mbit..10gbit,world_size=2..64

  bench predict --calibration resnet20.json --compressor topk --hosts 4 --bandwidth 1mbit --steps-from results/runs

  bench predict --calibration resnet20.json --hosts 8 --bandwidth 10mbit --latency 5ms

  bench predict --from-profile profile.json --hosts 8 --bandwidth 10mbit --latency 5ms

  bench predict --parameters 124M --step-time 250ms --world-size 8 --needed-rate

  bench predict --calibration resnet20.json --compressor topk --hosts 8 --losses every=6h,restart=30s,checkpoint=100

  bench predict --calibration resnet20.json --strategy async_server:mode=asp --hosts 8 --straggler rank=1,slowdown=3

  bench predict --calibration resnet20.json --compressor topk --hosts 4 --bandwidth-trace examples/cell.trace

  bench predict --calibration resnet20.json --cluster my_machines.toml --compressor group_topk --json

[bold]The model[/bold]

  Buckets become ready during backward. They are encoded one after the other, summed with the messages that the
  collective really sends, and decoded.

  "Bound by" names the resource that limits the step: compute, network, exchange (each rank's work of encoding, sending,
  receiving and decoding), or cpu if ranks share cores.

  Each host has its own link to one switch. A link is a queue that is never idle while a message waits. Every message
  and every byte costs its rank CPU time. A step ends when its slowest rank ends, and not before the shared cores have
  done the work of all ranks.

  With async_server, the pushes of all ranks and the server's answers are simulated event by event. Messages that are
  sent at the same time share the links fairly. Step times are then those of rank 0, as in metrics.csv.

  A bandwidth trace is followed from its beginning, step after step, through whole repetitions of the trace, for at
  least 16 steps; the step time is the mean over all steps. If steps are shorter than a 500th of the trace, one step is
  simulated for each such interval. The intervals are longer if many ranks send many messages; with thousands of ranks,
  a prediction takes minutes."""


@takes(CalibrateConfig)
def calibrate(
    options: CalibrateConfig,
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE", rich_help_panel=OUTPUT)] = CALIBRATION,
) -> None:
    """Measure the parts of a training step on this machine and write them to a file for `bench predict`."""
    check_writable(out)
    from bench.extensions.predict.calibrating import WORKER, KeptParts, check, execute, resolve
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.without_torch import without_torch

    with ForkServer(WORKER) as server:
        without_torch(check, options)
        server.warm_up(options.threads)
        config = server.call(resolve, options)
        kept = KeptParts(out, config)
        if kept.parts:
            print(f"continuing with {len(kept.parts)} finished part(s) from {kept.path}", file=sys.stderr)
        found = execute(config, lambda text: print(text, file=sys.stderr, flush=True), server, kept)
    found.write(out)
    kept.path.unlink(missing_ok=True)
    print(f"wrote {out}", file=sys.stderr)
    if found.cut:
        print(
            f"note: with --budget {options.budget}, not everything was repeated as often as planned: "
            f"{', '.join(found.cut)}; a longer budget makes predictions more precise",
            file=sys.stderr,
        )
    # The rank that ran alone waited for its core for more than a tenth of its compute time.
    if found.threads == 1 and found.crowds[0].computed_s > 1.1 * found.computed_s:
        print(
            "warning: other processes used the cores during the calibration, so step times of ranks that share cores "
            "will be predicted too long; calibrate again when nothing else is running",
            file=sys.stderr,
        )


@takes(PredictConfig)
def predict(
    options: PredictConfig,
    from_profile: Annotated[
        Path | None,
        typer.Option(
            help="File from bench profile: predict the steps of your own script.", metavar="FILE", rich_help_panel=PARTS
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File from bench calibrate.", metavar="FILE", rich_help_panel=PARTS, show_default=str(CALIBRATION)
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Predict over a range of rates: bandwidth=1mbit..10gbit. With ,world_size=2..64 appended: show the "
            "fastest pair for each rate and number of ranks.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    needed_rate: Annotated[
        bool,
        typer.Option(
            "--needed-rate",
            help="Find the rate of the links at which each method reaches 50, 80, 90, 95 and 99 % of the speed without "
            "an exchange.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    steps_from: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs (folders or CSV files) that trained the same configuration to a target: adds the predicted time "
            "to that target. Give the option once for each path.",
            metavar="PATH",
            rich_help_panel=WHAT,
        ),
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option(
            help="Predict the configurations of this sweep file, run them here, and compare. With a folder of finished "
            "runs: compare with those.",
            metavar="PATH",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    runs: Annotated[
        Path,
        typer.Option(
            help="Folder of the runs of a sweep file; finished runs are not repeated.", rich_help_panel=VALIDATION
        ),
    ] = RUNS,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV file for predicted and measured values.",
            show_default=f"{TABLE} in the runs' folder",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the time, exposed time and bytes of a training step, and whether compression beats dense bf16."""
    default, one = PredictConfig(), "--steps-from" if steps_from else "--losses" if options.losses else ""
    over_rates = "--needed-rate" if needed_rate else "--sweep"
    rates = ("network", "bandwidth", "uplink", "downlink", "bandwidth_trace", "uplink_trace", "downlink_trace")
    given = [f"--{name.replace('_', '-')}" for name in rates if getattr(options, name)]
    of_model = (
        "model",
        "dataset",
        "classes",
        "batch_size",
        "step_time",
        "parameters",
        "device",
        "shared_cores",
        "strategy",
    )
    raise_first(
        UsageError,
        (
            validate is not None
            and (
                sweep is not None or needed_rate or bool(steps_from) or from_profile is not None or options != default
            ),
            f"--validate {validate} predicts the configurations of that file or folder; leave out all other options "
            "that say what to predict",
        ),
        (sweep is not None and needed_rate, "--needed-rate finds rates by itself; leave out --sweep"),
        (
            (sweep is not None or needed_rate) and bool(given),
            f"{over_rates} sets the rate of all links; leave out {', '.join(given)}",
        ),
        (
            one != "" and (sweep is not None or needed_rate),
            f"{one} needs a single prediction; leave out {over_rates}",
        ),
        (one != "" and not options.compressor, f"{one} needs a single compressor; name it with --compressor"),
        (
            validate is None and (table is not None or runs != RUNS),
            f"--{'runs' if table is None else 'table'} has a meaning only with --validate; leave it out",
        ),
        (
            validate is not None and validate.is_dir() and runs != RUNS,
            f"{validate} holds the runs; leave out --runs, or give a sweep file",
        ),
        *(
            (
                from_profile is not None and is_given,
                f"--from-profile predicts the steps of your own script; leave out {name}",
            )
            for name, is_given in (
                ("--calibration", calibration is not None),
                ("--steps-from", bool(steps_from)),
                *(
                    (f"--{name.replace('_', '-')}", getattr(options, name) != getattr(default, name))
                    for name in of_model
                ),
            )
        ),
    )
    if from_profile is None:
        known = _known(options, calibration)
    else:
        from bench.extensions.predict.script_profile import Profile

        known = Profile.read(from_profile)
    calibration = calibration or CALIBRATION
    if validate is None and options.compressor and "," not in (sweep or ""):
        from bench.launch.without_torch import without_torch

        without_torch(_check, options, known)
    from bench.extensions.predict import answers, ranking  # import torch

    if validate is not None and validate.is_dir():
        answers.compare_with_finished(known, calibration, validate, table, as_json=as_json)
    elif validate is not None:
        answers.validate(known, calibration, validate, runs, table, as_json=as_json)
    elif needed_rate:
        from bench.extensions.predict.needed_rate import predict_needed_rates

        predict_needed_rates(known, options, as_json=as_json)
    elif sweep is None and not options.compressor:
        ranking.rank_compressors(known, options, as_json=as_json)
    elif sweep is None:
        answers.predict_one(known, options, steps_from or [], as_json=as_json)
    elif "," in sweep or not options.compressor:
        ranking.predict_map(known, options, sweep, as_json=as_json)
    else:
        ranking.predict_curve(known, options, sweep, as_json=as_json)


def _known(options: PredictConfig, path: Path | None) -> Calibration:
    """Return the calibration from a file, or an estimate of it if --step-time is given.

    Args:
        options: the options of `bench predict`.
        path: the file that --calibration names; None if the option is not given.

    Raises:
        UsageError: there is no calibration, or it is of another model, data set or batch size than the options name.
    """
    from bench.core import spec
    from bench.extensions.predict.calibration import Calibration

    if options.step_time is not None or options.parameters is not None:
        if path is not None:
            raise UsageError(
                "--step-time and --parameters are for an estimate without a calibration; leave out --calibration"
            )
        from bench.extensions.predict.estimate import estimated

        return estimated(options)
    raise_first(
        UsageError,
        (
            options.classes is not None,
            "--classes is for a rough estimate with --step-time; a calibration has those of its data set",
        ),
        (options.device != "cpu", "--device is for a rough estimate with --step-time; leave it out"),
    )
    if path is None and not CALIBRATION.exists():
        named = f"--model {options.model} " if options.model else ""
        raise UsageError(
            f"there is no {CALIBRATION} here; measure a model with `bench calibrate {named}--out {CALIBRATION}`, or "
            f"give {named or '--parameters 124M '}--step-time 120ms for a rough estimate"
        )
    known = Calibration.read(path or CALIBRATION)
    measured = {name: getattr(known, name) for name in ("model", "dataset", "batch_size")}
    wanted = measured | {
        name: str(spec.build(kind, text))
        for name, kind in (("model", "models"), ("dataset", "datasets"))
        if (text := getattr(options, name)) is not None
    }
    wanted["batch_size"] = options.batch_size or known.batch_size
    for name, value in wanted.items():
        if value != measured[name]:
            flags = " ".join(f"--{key.replace('_', '-')} {text}" for key, text in wanted.items())
            raise UsageError(
                f"{path or CALIBRATION} was measured with {name} {measured[name]}, not with {value}; run "
                f"`bench calibrate {flags} --out other.json`, or give --step-time 120ms for a rough estimate"
            )
    return known


def _check(options: PredictConfig, known: Calibration) -> None:
    from bench.extensions.predict.request import check

    check(options, known)


CALIBRATE = Command(function=calibrate, epilog=EXAMPLES_OF_CALIBRATE, panel=MODEL)
PREDICT = Command(function=predict, epilog=EXAMPLES_OF_PREDICT, panel=MODEL)
