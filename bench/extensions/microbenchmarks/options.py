"""Declare the options of `bench collectives` and `bench compressors`, and the order in which both commands measure."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Le
from typing_extensions import Doc

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
from collectives.options import Count, CountOrZero

T = TypeVar("T")

WHAT_TO_SUM, WHAT_TO_ENCODE = "What to sum", "What to encode"
Dtype = Literal["fp32", "fp16", "bf16", "int8", "int32"]
BYTES_PER_ELEMENT: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig(RanksConfig):
    """Options of `bench collectives`: the tensors to sum, the number of sums, and the ranks.

    `measurement.check_sums` fills in the defaults that depend on other options or on the machine.
    """

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
        Doc("rounds, each of which times every pair; results are medians over rounds"),
        Flag(MEASUREMENT),
    ] = 5
    pairs: Annotated[
        tuple[tuple[str, str], ...], Doc("pairs (collective, compressor) that work together, as texts"), NOT_RECORDED
    ] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorsConfig(JobConfig):
    """Options of `bench compressors`: the compressors, the gradients to encode, and the number of repeats.

    `measurement.check_encoding` fills in the defaults that depend on other options or on the machine.
    """

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
    repeats: Annotated[
        Count, Doc("how often each compressor encodes and decodes a gradient; compressors alternate"), Flag(MEASUREMENT)
    ] = 9
    bucket_mb: Annotated[BucketMb, Flag(MEASUREMENT)] = 25.0
    threads: Annotated[Threads, Flag(PROCESSES)] = 1


def interleave(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (index of the round, item), with every item once per round.

    Slow and fast periods of the machine then affect all items equally. Each round starts one item later than the round
    before, so that every item is measured at every position.
    """
    for round_ in range(rounds):
        start = round_ % len(items)
        for item in [*items[start:], *items[:start]]:
            yield round_, item
