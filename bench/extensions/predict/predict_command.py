"""`bench predict`: what a step would take on links and among ranks that one does not have."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import AsJson, takes
from bench.core.errors import UsageError
from bench.core.units import format_seconds
from bench.extensions.predict.options import VALIDATION, WHAT, Losses, PredictConfig

if TYPE_CHECKING:
    from bench.extensions.predict.calibration import Calibration
    from bench.extensions.predict.prediction import Prediction
    from bench.extensions.predict.request import PredictionRequest
    from bench.extensions.predict.validation import Cell
    from bench.launch.sweeps.state import SweepState
    from compressors.base import Compressor

MAP_POINTS_PER_DECADE = 3
CALIBRATION = Path("calibration.json")
RUNS, TABLE = Path("results/runs/predict"), "validation.csv"

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
    if validate is not None and validate.is_dir():
        _hold_against_finished(known, calibration, validate, table, as_json=as_json)
    elif validate is not None:
        _validate(known, calibration, validate, runs, table, as_json=as_json)
    elif sweep is None and not options.compressor:
        _rank(known, options, as_json=as_json)
    elif sweep is None:
        _predict_one(known, options, steps_from or [], as_json=as_json)
    elif "," in sweep or not options.compressor:
        _predict_map(known, options, sweep, as_json=as_json)
    else:
        _predict_curve(known, options, sweep, as_json=as_json)


def _known(options: PredictConfig, path: Path | None) -> Calibration:
    """The parts of a step: a calibration, or an estimate where the time of a step is given.

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


def _refuse_early(options: PredictConfig, known: Calibration) -> None:
    """Refuse what shows without torch."""
    from bench.launch.refusals import without_torch

    def check_here() -> None:
        from bench.extensions.predict.request import check

        check(options, known)

    without_torch(check_here)


def _predict_one(known: Calibration, options: PredictConfig, steps_from: list[Path], *, as_json: bool) -> None:
    """One compressor at one rate, on its fastest collective unless one is named."""
    _refuse_early(options, known)
    from bench.extensions.predict.notes import latency_note, notes
    from bench.extensions.predict.output import print_step
    from bench.extensions.predict.ranking import fastest, ways_of
    from bench.extensions.predict.request import request_from_options
    from bench.extensions.predict.step import columns
    from bench.extensions.predict.time_to_target import with_losses

    ways = ways_of(known, request_from_options(options))
    best = fastest(known, ways)
    checked, prediction = best.request, best.prediction
    said = [*notes(known, checked), *latency_note(options, checked)]
    if best.request != ways[0]:
        said.append(
            f"The fastest of {len(ways)} collectives is shown; bench run takes {ways[0].collective} unless you add "
            f"--collective {best.collective}"
        )
    row = columns(checked, prediction, known)
    if steps_from:
        said.append(_add_time_to_target(row, known, checked, steps_from))
    if options.losses:
        row |= with_losses(Losses.parse(options.losses), checked, prediction, row.get("time_to_target_s"))
    said += _pays(known, checked, prediction, row)
    print_step(checked, prediction, row, said, as_json=as_json)


def _rank(known: Calibration, options: PredictConfig, *, as_json: bool) -> None:
    """Every calibrated compressor at one rate."""
    from bench.extensions.predict.notes import latency_note, notes, range_notes
    from bench.extensions.predict.output import print_ranking
    from bench.extensions.predict.ranking import MOST_TRIED, dense_ways, fastest, ranked
    from bench.extensions.predict.request import BASELINE, request_from_options
    from bench.extensions.predict.step import columns

    job = request_from_options(options)
    ways, left_out = ranked(known, job)
    dense = fastest(known, dense_ways(known, job)) if BASELINE in known.encoded else None
    rows = [
        columns(way.request, way.prediction, known)
        | ({"times_as_fast": way.prediction.samples_per_s / dense.prediction.samples_per_s} if dense else {})
        for way in ways
    ]
    said = [*dict.fromkeys(note for way in ways for note in notes(known, way.request, range_too=False))]
    said += [*range_notes(known, [way.request for way in ways]), *latency_note(options, ways[0].request)]
    if not job.collective and job.waits and job.world_size > MOST_TRIED:
        said.append(f"Among more than {MOST_TRIED} ranks each is taken on the collective that a run would choose")
    said += [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    print_ranking(ways[0].request, rows, said, as_json=as_json)


def _predict_curve(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """One compressor over a range of rates."""
    _refuse_early(options, known)
    from bench.extensions.predict.notes import latency_note, notes
    from bench.extensions.predict.output import print_curve
    from bench.extensions.predict.ranking import parse_sweep, sweep
    from bench.extensions.predict.request import check, request_from_options
    from bench.extensions.predict.step import same_everywhere

    rates = parse_sweep(text)
    checked = check(options, known)
    curve = sweep(known, request_from_options(options), rates)
    said = list(dict.fromkeys(said for way in (curve.pair[0], curve.pair[-1]) for said in notes(known, way.request)))
    said += latency_note(options, checked)
    print_curve(checked, curve, said, same_everywhere(checked, known), as_json=as_json)


def _predict_map(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Which pair is fastest where: over the rate, and over numbers of ranks where the text has some."""
    from bench.extensions.predict.notes import NOT_CHECKED, latency_note, notes
    from bench.extensions.predict.output import print_map
    from bench.extensions.predict.ranking import parse_sweep, parse_world_sizes, regimes
    from bench.extensions.predict.request import BASELINE, check
    from bench.extensions.predict.step import same_everywhere

    rates_text, comma, sizes_text = text.partition(",")
    if comma:
        _check_map(options, text)
    if options.collective:
        raise UsageError(
            f"--sweep tries all collectives; name a --compressor, or leave out --collective {options.collective}"
        )
    checked = check(dataclasses.replace(options, compressor=BASELINE), known)
    jobs = [checked]
    if comma:
        sizes = parse_world_sizes(sizes_text.partition("=")[2])
        jobs = [dataclasses.replace(checked, hosts=checked.hosts[:1] * size) for size in sizes]
    found = regimes(known, jobs, parse_sweep(rates_text, per_decade=MAP_POINTS_PER_DECADE))
    beyond = sum(each.outside is not None for each in found)
    said = [*notes(known, checked, range_too=False), *latency_note(options, checked)]
    if beyond:
        said.append(f"{NOT_CHECKED}: {beyond} of {len(found)} cells; bench predict --validate does that")
    print_map(found, said, same_everywhere(checked, known), as_json=as_json)


def _check_map(options: PredictConfig, text: str) -> None:
    """Refuse options that a map over numbers of ranks sets."""
    if text.partition(",")[2].partition("=")[0].strip() != "world_size":
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit,world_size=2..64")
    set_by_map = (
        "compressor", "collective", "strategy", "straggler", "world_size", "hosts", "ranks_per_host", "cluster_file",
    )  # fmt: skip
    plain = PredictConfig()
    if given := [option.flag_name for option in PredictConfig.options() if option.name in set_by_map and
                 getattr(options, option.name) != getattr(plain, option.name)]:  # fmt: skip
        raise UsageError(f"a map tries all pairs among equal hosts with one rank each; leave out {', '.join(given)}")


def _validate(known: Calibration, path: Path, file: Path, runs: Path, table: Path | None, *, as_json: bool) -> None:
    """Every configuration is predicted before the first is run."""
    from bench.cli.output.sweep import SweepProgress, say_plan
    from bench.extensions.predict.validation import cells_of, check_machine
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.sweeps.file import plan_runs, read_sweep
    from bench.launch.sweeps.state import SweepState

    check_machine(known)
    again = f"to run them again, remove their folders from {runs}"
    with ForkServer(TRAIN) as server:
        agenda = SweepState.look_up(plan_runs(read_sweep(file), server), runs)
        cells = cells_of(known, agenda.runs)
        _check_kept(path, table)
        configs = agenda.to_do(retry_failed=False)
        say_plan(agenda, configs, again)
        if configs:
            agenda = SweepProgress(agenda, configs, server).run_all()
    _keep_compared(known, path, cells, agenda, table or runs / TABLE, as_json=as_json)
    agenda.raise_failures(again)


def _hold_against_finished(known: Calibration, path: Path, folder: Path, table: Path | None, *, as_json: bool) -> None:
    """Nothing is run: what was measured before is predicted now."""
    from bench.extensions.predict.validation import cells_of, finished_runs

    table = table or folder / TABLE
    _check_kept(path, table)
    agenda = finished_runs(known, folder, lambda sentence: print(sentence, file=sys.stderr))
    _keep_compared(known, path, cells_of(known, agenda.runs), agenda, table, as_json=as_json)


def _check_kept(*files: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    from bench.core.files import check_writable

    for file in files:
        if file is not None:
            check_writable(file)


def _keep_compared(
    known: Calibration, path: Path, cells: Sequence[Cell], agenda: SweepState, table: Path, *, as_json: bool
) -> None:
    """Show predictions beside runs; the calibration remembers how far they were off."""
    from bench.extensions.predict.output import print_validation
    from bench.extensions.predict.validation import as_rows, compare, with_validated, write_table

    compared = compare(cells, agenda)
    rows = as_rows(compared, known)
    with_validated(known, compared).write(path)
    write_table(rows, table)
    print_validation(rows, as_json=as_json)


def _pays(known: Calibration, checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> list[str]:
    """Whether it is faster than dense gradients in 16 bits, where those are calibrated; their step, into the row."""
    from bench.extensions.predict.ranking import dense_ways, fastest
    from bench.extensions.predict.request import BASELINE

    if BASELINE not in known.encoded or checked.compressor == BASELINE:
        return []
    dense = fastest(known, dense_ways(known, checked))
    row |= {"dense_collective": dense.collective, "dense_step_time_s": dense.step_time_s}
    ratio = dense.prediction.samples_per_s / prediction.samples_per_s
    if not checked.waits:
        per_s = f"{dense.prediction.samples_per_s:.1f} per second"
        return [f"{1 / ratio:.2f} times as many samples as with dense {BASELINE}: {per_s}"]
    than = f"dense {BASELINE} on {dense.collective}, whose step takes {format_seconds(dense.step_time_s)}"
    if checked.compressor == "none":
        return [f"uncompressed in 32 bits a step takes {ratio:.2f} times as long as with {than}"]
    if ratio < 1:
        return [f"a step is {1 / ratio:.2f} times as fast as with {than}"]
    return [f"compression does not pay here: a step takes {ratio:.2f} times as long as with {than}"]


def _add_time_to_target(row: dict[str, Any], known: Calibration, checked: PredictionRequest, paths: list[Path]) -> str:
    """Into the row, where runs say it; return on what it rests, or why there is none."""
    if not checked.waits:
        raise UsageError("--steps-from knows steps of ranks that wait for each other; leave out --strategy")
    from bench.core import spec
    from bench.extensions.predict.time_to_target import needed_steps
    from bench.report.store import read

    needed = needed_steps(read(paths), known, checked.compressor, checked.world_size)
    row["steps_to_target"] = needed.steps
    row["time_to_target_s"] = None
    if needed.steps is None:
        return needed.said
    compressor = cast("Compressor", spec.build("compressors", checked.compressor))
    if (needed.of_epochs and compressor.denser_epochs) or getattr(compressor, "dense_steps", 0):
        return (
            f"{needed.said}; {checked.compressor} sends more in the first of them than in the step predicted, so no "
            "time follows: give runs with --steps, or warmup_epochs=0, and without dense_steps"
        )
    row["time_to_target_s"] = needed.steps * row["step_time_s"]
    return needed.said


COMMAND = Command(function=predict, epilog=EXAMPLES, panel=MODEL)
