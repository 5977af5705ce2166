"""The options of the commands that measure components: `CollectivesConfig` and `CompressorsConfig`."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core import spec
from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Flag
from bench.core.config.run import (
    DATA_DIR,
    MEASUREMENT,
    OUTPUT,
    PROCESSES,
    VIRTUAL_HOSTS,
    BucketMb,
    DataDir,
    JobConfig,
    RanksConfig,
    Threads,
)
from bench.core.units import parse_sizes
from collectives.options import Count, CountOrZero

WHAT_TO_SUM = "What to sum"
Dtype = Literal["fp32", "fp16", "bf16", "int8", "int32"]
_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig(RanksConfig):
    """One sweep: what to sum, how and where. `measurement.py` fills in the defaults."""

    panels: ClassVar[tuple[str, ...]] = (WHAT_TO_SUM, MEASUREMENT, PROCESSES, VIRTUAL_HOSTS, OUTPUT)

    sizes: Annotated[
        str,
        Doc("sizes of the tensor: a list, or a range of doubled sizes (1KiB:64MiB)"),
        Flag(WHAT_TO_SUM),
        NOT_RECORDED,
    ] = "10kB,1MB,10MB"
    compressors: Annotated[
        str,
        Doc("compressors that make the payload, separated by commas; none: the tensor is sent uncompressed"),
        Flag(WHAT_TO_SUM, kind="compressors", many=True),
        NOT_RECORDED,
    ] = "none"
    collectives: Annotated[
        str | None,
        Doc("collectives that sum the payloads, separated by commas"),
        Flag(WHAT_TO_SUM, kind="collectives", many=True, chosen="every collective that takes the payload"),
        NOT_RECORDED,
    ] = None
    dtype: Annotated[Dtype, Doc("type of the tensor's elements"), Flag(WHAT_TO_SUM)] = "fp32"
    overlap: Annotated[
        float, Ge(0), Le(1), Doc("share of the elements that have the same magnitude on all ranks"), Flag(WHAT_TO_SUM)
    ] = 0.0
    iters: Annotated[Count, Doc("timed sums per round"), Flag(MEASUREMENT)] = 20
    warmup: Annotated[CountOrZero, Doc("untimed sums before the timed ones of each round"), Flag(MEASUREMENT)] = 3
    rounds: Annotated[
        Count,
        Doc("rounds, in each of which every pair takes a turn; results are medians over rounds"),
        Flag(MEASUREMENT),
    ] = 5
    pairs: Annotated[
        tuple[tuple[str, str], ...], Doc("spec texts of (collective, compressor) that work together"), NOT_RECORDED
    ] = ()

    @property
    def sizes_bytes(self) -> list[int]:
        """Return `sizes` as numbers of bytes.

        Raises:
            UsageError: the text does not name sizes.
        """
        return parse_sizes(self.sizes)

    def count(self, size: int) -> int:
        """Return the number of elements of a tensor of at most `size` bytes."""
        return size // _ITEMSIZE[self.dtype]

    def size_bytes(self, size: int) -> int:
        """Return the bytes of the largest whole number of elements that fit in `size` bytes."""
        return self.count(size) * _ITEMSIZE[self.dtype]


WHAT_TO_ENCODE = "What to encode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorsConfig(JobConfig):
    """One measurement of compressors. `measurement.py` fills in the defaults."""

    panels: ClassVar[tuple[str, ...]] = (WHAT_TO_ENCODE, MEASUREMENT, PROCESSES, OUTPUT)

    compressors: Annotated[
        str,
        Doc("compressors to measure, separated by commas"),
        Flag(WHAT_TO_ENCODE, kind="compressors", many=True, chosen="all but PyTorch's own hooks"),
        NOT_RECORDED,
    ] = NOT_GIVEN
    model: Annotated[str, Doc("network whose layers' gradients are encoded"), Flag(WHAT_TO_ENCODE, kind="models")] = (
        "resnet20"
    )
    gradients: Annotated[
        Literal["synthetic", "recorded"],
        Doc("synthetic: random, heavy-tailed, with a scale per layer; recorded: from a few real training steps"),
        Flag(WHAT_TO_ENCODE),
    ] = "synthetic"
    dataset: Annotated[
        str,
        Doc("data set of recorded gradients; also sets the number of classes"),
        Flag(WHAT_TO_ENCODE, kind="datasets"),
    ] = "digits"
    data_dir: Annotated[DataDir, Flag(WHAT_TO_ENCODE)] = DATA_DIR
    repeats: Annotated[Count, Doc("timed turns of each compressor; compressors take turns"), Flag(MEASUREMENT)] = 9
    bucket_mb: Annotated[BucketMb, Flag(MEASUREMENT)] = 25.0
    threads: Annotated[Threads, Flag(PROCESSES)] = 1

    @property
    def compressor_specs(self) -> list[str]:
        """Return the spec text of each compressor."""
        return spec.split_list(self.compressors)
