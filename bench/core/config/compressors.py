"""CompressorsConfig: what `bench compressors` measures; crosses from the command line to the worker."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from typing_extensions import Doc

from bench.core import spec
from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Flag
from bench.core.config.job import (
    DATA_DIR,
    MEASUREMENT,
    OUTPUT,
    PROCESSES,
    BucketMb,
    DataDir,
    JobConfig,
    Threads,
)
from collectives.options import Count

WHAT = "What to encode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorsConfig(JobConfig):
    """One measurement; complete once `bench.launch.compressors.resolve` has filled in the rest."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, MEASUREMENT, PROCESSES, OUTPUT)

    compressors: Annotated[
        str,
        Doc("which, separated by commas"),
        Flag(WHAT, room="compressors", many=True, chosen="all but the hooks of PyTorch's own"),
        NOT_RECORDED,
    ] = NOT_GIVEN
    model: Annotated[str, Doc("network whose layers' gradients are encoded"), Flag(WHAT, room="models")] = "resnet20"
    gradients: Annotated[
        Literal["synthetic", "recorded"],
        Doc("heavy-tailed and each layer at its own scale (synthetic), or of some real training steps (recorded)"),
        Flag(WHAT),
    ] = "synthetic"
    dataset: Annotated[
        str,
        Doc("what recorded gradients are trained on; gives the number of classes"),
        Flag(WHAT, room="datasets"),
    ] = "digits"
    data_dir: Annotated[DataDir, Flag(WHAT)] = DATA_DIR
    repeats: Annotated[Count, Doc("timed turns of each compressor; they alternate"), Flag(MEASUREMENT)] = 9
    bucket_mb: Annotated[BucketMb, Flag(MEASUREMENT)] = 25.0
    threads: Annotated[Threads, Flag(PROCESSES)] = 1

    @property
    def compressor_specs(self) -> list[str]:
        """Each compressor's spec text."""
        return spec.split_list(self.compressors)
