"""CompressorsConfig, the options of `bench compressors`, which the command sends to its worker."""

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
    """One measurement of compressors. `bench.launch.compressors.prepare` fills in the defaults."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, MEASUREMENT, PROCESSES, OUTPUT)

    compressors: Annotated[
        str,
        Doc("compressors to measure, separated by commas"),
        Flag(WHAT, room="compressors", many=True, chosen="all but PyTorch's own hooks"),
        NOT_RECORDED,
    ] = NOT_GIVEN
    model: Annotated[str, Doc("network whose layers' gradients are encoded"), Flag(WHAT, room="models")] = "resnet20"
    gradients: Annotated[
        Literal["synthetic", "recorded"],
        Doc("synthetic: random, heavy-tailed, with a scale per layer; recorded: from a few real training steps"),
        Flag(WHAT),
    ] = "synthetic"
    dataset: Annotated[
        str,
        Doc("data set of recorded gradients; also sets the number of classes"),
        Flag(WHAT, room="datasets"),
    ] = "digits"
    data_dir: Annotated[DataDir, Flag(WHAT)] = DATA_DIR
    repeats: Annotated[Count, Doc("timed turns of each compressor; compressors take turns"), Flag(MEASUREMENT)] = 9
    bucket_mb: Annotated[BucketMb, Flag(MEASUREMENT)] = 25.0
    threads: Annotated[Threads, Flag(PROCESSES)] = 1

    @property
    def compressor_specs(self) -> list[str]:
        """Return the spec text of each compressor."""
        return spec.split_list(self.compressors)
