"""The command `bench profile`, which measures the steps of a user's own script for `bench predict`."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.console import print_json
from bench.cli.options import AsJson
from bench.core import spec
from bench.core.config.run import OUTPUT
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.core.units import format_bytes, format_seconds
from bench.extensions.predict.options import DEFAULT_COMPRESSORS
from collectives.options import raise_first

if TYPE_CHECKING:
    from bench.extensions.predict.script_profile import Profile

PROFILE = Path("profile.json")
EXAMPLES = """[bold]Examples[/bold]

  bench profile train.py --batch_size=12 --compile=False

  bench profile --world-size 4 --out gpt.json train.py config/train_shakespeare_char.py --device=cpu

  bench predict --from-profile profile.json --hosts 8 --bandwidth 100mbit --latency 5ms

The script is started with torchrun, unchanged. It must train one model in DistributedDataParallel, in fp32 on CPUs, and
make at least as many steps as are recorded. After these steps, the script is ended. Until then, it computes the same
results as without profiling, bit for bit.

Nothing else should run on the machine while the script is profiled."""


def profile(
    script: Annotated[Path, typer.Argument(help="Training script, as for torchrun.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGUMENTS]...")
    ] = None,
    world_size: Annotated[int, typer.Option(min=2, max=64, help="Number of ranks, all on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Number of steps to record.")] = 30,
    warmup_steps: Annotated[
        int, typer.Option(min=2, max=100_000, help="Number of steps before the recorded ones.")
    ] = 5,
    compressors: Annotated[
        str, typer.Option(help="Compressors whose encoding is measured, separated by commas.")
    ] = DEFAULT_COMPRESSORS,
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE", rich_help_panel=OUTPUT)] = PROFILE,
    as_json: AsJson = False,
) -> None:
    """Measure the steps of your own training script, started with torchrun, for `bench predict`."""
    if not script.is_file():
        raise UsageError(f"there is no script {script}; give the path of a Python file")
    check_writable(out)
    from bench.extensions.predict.calibrating import cannot_be_calibrated
    from bench.extensions.predict.script_profile import profile_of, record
    from compressors.base import Compressor

    wanted = [cast(Compressor, spec.build("compressors", text)) for text in spec.split_list(compressors)]
    raise_first(UsageError, *((True, reason) for reason in map(cannot_be_calibrated, wanted) if reason))
    given = arguments or []
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as name:
        record(script, given, Path(name), world_size=world_size, warmup=warmup_steps, steps=steps)
        print(f"recorded {steps} steps and ended {script}", file=sys.stderr)
        texts = [*dict.fromkeys(["none", *map(str, wanted)])]
        found = profile_of(Path(name), script, given, texts, _tell, warmup_steps=warmup_steps)
    found.write(out)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        _show(found)
    computed_s = found.computed_s + found.update_s
    idle_s = found.step_s - found.exposed_s - computed_s
    if idle_s > 0.2 * computed_s:
        print(
            f"warning: ranks also waited for {format_seconds(idle_s)} of a step, for data or for cores that other "
            "processes used; predictions leave that out",
            file=sys.stderr,
        )
    print(f"wrote {out}; next: bench predict --from-profile {out} --hosts 2 --bandwidth 100mbit", file=sys.stderr)


def _show(found: Profile) -> None:
    from bench.extensions.predict.sentences import first_epoch_note  # imports torch

    ready = ", ".join(
        f"{format_bytes(4 * sum(bucket.numels))} after {format_seconds(bucket.ready_s)}" for bucket in found.buckets
    )
    accumulated = f", in {found.micro_steps} micro-steps" if found.micro_steps > 1 else ""
    took = f"{format_seconds(found.step_s)}{accumulated}"
    print(f"{found.script}: a step of {found.world_size} ranks on this machine takes {took}")
    for part in ("batch", "forward", "backward", "exposed", "update"):
        earlier = f", with the first {found.micro_steps - 1} micro-steps" if accumulated and part == "forward" else ""
        print(f"  {part:<20} {format_seconds(getattr(found, f'{part}_s'))}{earlier}")
    print(f"  {'buckets ready':<20} {ready}")
    for text, in_first_epoch in found.first_epoch.items():
        first, later = (
            format_bytes(sum(offer.nbytes for bucket in buckets for offer in bucket.offers))
            for buckets in (in_first_epoch, found.encoded[text])
        )
        print(f"  {text:<20} {later} encoded; {first} in the first epoch")
    for sentence in first_epoch_note(found, found.first_epoch):
        print(sentence)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(function=profile, epilog=EXAMPLES, panel=MODEL, context_settings={"allow_interspersed_args": False})
