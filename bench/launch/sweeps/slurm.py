"""Write the sbatch command that submits a sweep to Slurm as a job array with one run per element."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from pathlib import Path

from bench.core.config.run import RunConfig
from bench.launch.sweeps.state import SweepState


def sbatch_line(file: Path, agenda: SweepState, configs: list[RunConfig], *, retry_failed: bool) -> str:
    """Return the command for these runs; each element requests as many cores as the largest run uses.

    Args:
        file: the sweep file.
        agenda: all runs of the sweep.
        configs: the runs to execute.
        retry_failed: whether failed runs are among them.
    """
    wanted = {config.digest for config in configs}
    indices = [index for index, run in enumerate(agenda.runs) if run.config.digest in wanted]
    cores = max(config.world_size * config.threads for config in configs)
    again = ["--retry-failed"] if retry_failed else []
    element = shlex.join(["bench", "sweep", str(file.absolute()), "--out", str(agenda.out.absolute()), *again])
    return shlex.join(
        [
            "sbatch",
            f"--job-name={file.stem}",
            f"--array={_ranges(indices)}",
            "--ntasks=1",
            f"--cpus-per-task={cores}",
            f"--wrap={element} --only $SLURM_ARRAY_TASK_ID",
        ]
    )


def _ranges(indices: Iterable[int]) -> str:
    """Write indices as ranges: ``[0, 1, 2, 5]`` -> ``0-2,5``."""
    texts = []
    for _, group in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        texts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(texts)
