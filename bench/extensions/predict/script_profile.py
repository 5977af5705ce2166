"""Profile a training script: run it with torchrun, and turn the recorded times into input for `bench predict`."""

import dataclasses
import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench.core import environment
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import die_with_parent, import_variables, interruptible
from bench.extensions.predict.calibrating import denser_epochs
from bench.extensions.predict.calibration import LOCAL, VERSION, AtLeastOne, Calibration, CpuContention, Seconds
from bench.extensions.predict.estimate import ANY_LOAD, AROUND_MESSAGE_S, MESSAGES
from bench.extensions.predict.options import CalibrateConfig
from bench.extensions.predict.step_parts import RANKS, bucket_parts, encoded
from bench.launch.jobs.fork_server import end
from compressors.layer import Layer
from gradwire.exchange.packed_state import load_state

RECORDER = Path(__file__).with_name("recorder.py")
# Bytes that are read between two timings of an encoding, so that the caches are as full as after backward.
STIRRED_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(Calibration):
    """The measured parts of a training step of a user's own script; `model` is the script's file name.

    Attributes:
        script, script_sha256, arguments: path, SHA-256 and arguments of the script.
        world_size: number of ranks that were profiled, all on one machine.
        warmup_steps, steps: number of steps before the recorded ones, and of recorded steps.
        micro_steps: number of backward passes whose gradients add up before they are exchanged, in most steps.
        step_s: wall-clock seconds of a step.
        exposed_s: wall-clock seconds of a step in which a rank waits for DDP after backward, averaged over ranks.
    """

    kind: ClassVar[str] = "profile"
    command: ClassVar[str] = "bench profile"
    how_to_check: ClassVar[str] = "time some steps of the script there to do that"

    script: str
    script_sha256: str
    arguments: tuple[str, ...]
    world_size: AtLeastOne
    warmup_steps: AtLeastOne
    steps: AtLeastOne
    micro_steps: AtLeastOne
    step_s: Seconds
    exposed_s: Seconds

    @property
    def about(self) -> str:
        """Return the name of the script, and how many micro-steps a step has if it accumulates gradients."""
        return self.model + (f", {self.micro_steps} micro-steps in a step" if self.micro_steps > 1 else "")

    @property
    def said(self) -> str:
        """Return a sentence that tells the user what predictions are based on."""
        return (
            f"From a profile of {self.script} on {self.world_size} ranks of one machine, and typical costs of messages"
        )


def record(script: Path, arguments: Sequence[str], folder: Path, *, world_size: int, warmup: int, steps: int) -> None:
    """Run a script with torchrun until enough steps are recorded; every rank writes `rank-R.safetensors` into `folder`.

    The script's output goes to stderr.

    Raises:
        RunFailed: the script failed, or ended its processes with `os._exit`.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"),
        *(str(RECORDER), str(folder), str(warmup), str(steps), str(script), *arguments),
    ]
    with interruptible():
        job = subprocess.Popen(
            command, env=os.environ | import_variables(), stdout=sys.stderr.fileno(), preexec_fn=die_with_parent
        )
        try:
            exit_code = job.wait()
        finally:
            end(job)
    if exit_code:
        raise RunFailed(f"{script} failed with exit code {exit_code}; its error is above")
    if len(list(folder.iterdir())) < world_size:
        raise RunFailed(f"{script} ended its own process, so nothing was recorded; let it end by its last line")


def profile_of(
    folder: Path,
    script: Path,
    arguments: Sequence[str],
    compressors: Sequence[str],
    tell: Callable[[str], None],
    *,
    warmup_steps: int,
) -> Profile:
    """Return the profile of a script whose ranks wrote their records into a folder, and measure the compressors.

    Encoding is timed in this process, with the gradients of the last recorded step of up to `RANKS` ranks.

    Args:
        folder: the folder with the records.
        script: the script.
        arguments: the script's arguments.
        compressors: spec texts of the compressors.
        tell: called with a line of text before each compressor.
        warmup_steps: number of steps that were made before the recorded ones.

    Raises:
        UsageError: the script cannot be profiled.
    """
    files = sorted(folder.glob("rank-*.safetensors"), key=lambda file: int(file.stem.partition("-")[2]))
    ranks = [load_state(file, torch.device("cpu")) for file in files]
    first = ranks[0]
    for sentence in filter(None, (rank["refusal"] for rank in ranks)):
        raise UsageError(f"{script} {sentence}")
    torch.set_num_threads(first["threads"])
    layers = [Layer(**fields) for fields in first["layers"]]
    buckets = [[layers[index] for index in bucket] for bucket in first["buckets"]]
    gradients = [list(zip(buckets, rank["gradients"], strict=True)) for rank in ranks[:RANKS]]
    times = profiled_steps([rank["steps"] for rank in ranks], is_cpu_time=first["threads"] == 1)
    ready_s = times.pop("ready_s")
    begins_s = times["batch_s"] + times["forward_s"]
    config, found, first_epoch = CalibrateConfig(), {}, {}
    for text in compressors:
        tell(f"timing {text}")
        found[text] = encoded(text, gradients, config, _stir())[0]
        if denser_epochs(text):
            first_epoch[text] = encoded(text, gradients, config, _stir(), in_first_epoch=True)[0]
    return Profile(
        version=VERSION,
        cpu=environment.cpu_model(),
        cores=environment.usable_cores(),
        torch_version=environment.version_of("torch"),
        kernels=environment.kernels(),
        model=script.name,
        dataset="",
        optimizer=first["optimizer"],
        batch_size=first["samples"] or 1,
        threads=first["threads"],
        bucket_mb=first["bucket_mb"],
        backward_s=ready_s[-1],
        buckets=tuple(bucket_parts(at, bucket) for at, bucket in zip(ready_s, buckets, strict=True)),
        encoded=found,
        first_epoch=first_epoch,
        crowds=(
            CpuContention(
                load=ANY_LOAD,
                handed_over_s=tuple(begins_s + at for at in ready_s),
                computed_s=begins_s + ready_s[-1],
                cpu_s=begins_s + ready_s[-1] + times["update_s"],
            ),
        ),
        messages={LOCAL: MESSAGES},
        around_message_s=AROUND_MESSAGE_S,
        script=str(script),
        script_sha256=hashlib.sha256(script.read_bytes()).hexdigest(),
        arguments=tuple(arguments),
        world_size=len(ranks),
        warmup_steps=warmup_steps,
        steps=len(first["steps"]),
        micro_steps=statistics.mode(step["micro_steps"] for step in first["steps"]),
        **times,
    )


def profiled_steps(ranks: Sequence[Sequence[dict[str, Any]]], *, is_cpu_time: bool) -> dict[str, Any]:
    """Return the median seconds of a step's parts; in each step, the parts of the rank that computes longest are used.

    Args:
        ranks: the moments that each rank recorded, as [rank][step], each step as in `ScriptProfiler.done`.
        is_cpu_time: True if a rank computes on one thread, whose CPU time other work on the machine does not
            lengthen; False for wall-clock time.

    Returns:
        By name: `batch_s`: from the end of the previous update to the first forward. `forward_s`: from there to the
        backward that exchanges gradients. `update_s`: of the update, including the copying of averaged gradients.
        `ready_s`: for each bucket, from the start of backward until the bucket is ready. `exposed_s`: wall-clock
        seconds from the last bucket until DDP has exchanged all buckets, averaged over ranks. `step_s`: wall-clock
        seconds of the whole step.
    """
    clock = int(is_cpu_time)
    steps, exposed, lasted = [], [], []
    for of_ranks in zip(*ranks, strict=True):
        parts = [_parts(step, clock) for step in of_ranks]
        steps.append(max(parts, key=lambda each: each[0] + each[1] + each[-1]))
        exposed.append(statistics.fmean(step["exchanged"][0] - step["ready"][-1][0] for step in of_ranks))
        lasted.append(statistics.fmean(step["updated"][0] - step["updated_before"][0] for step in of_ranks))
    batch_s, forward_s, update_s, *ready_s = map(statistics.median, zip(*steps, strict=True))
    times = {"batch_s": batch_s, "forward_s": forward_s, "update_s": update_s, "ready_s": ready_s}
    return times | {"exposed_s": statistics.median(exposed), "step_s": statistics.median(lasted)}


def _parts(step: dict[str, Any], clock: int) -> list[float]:
    """Return, for one step on one rank, the seconds of batch, forward and update, and until each bucket is ready."""
    before, forward, backward, exchanged, updated = (
        step[name][clock] for name in ("updated_before", "forward", "backward", "exchanged", "updated")
    )
    ready = [at[clock] for at in step["ready"]]
    # The thread takes no CPU time while it waits for DDP, but then copies the averaged gradients.
    update_begins = ready[-1] if clock else exchanged
    return [forward - before, backward - forward, updated - update_begins, *(at - backward for at in ready)]


def _stir() -> Callable[[], object]:
    filler = torch.zeros(STIRRED_BYTES // 4)
    return lambda: filler.add_(1.0)
