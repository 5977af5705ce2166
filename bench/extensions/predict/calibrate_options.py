"""CalibrateConfig, the options of `bench calibrate`, which the command sends to its worker."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Flag, syntax
from bench.core.config.job import DATA_DIR, MEASUREMENT, OUTPUT, PROCESSES, BucketMb, DataDir, JobConfig, Threads
from bench.core.units import duration, parse_duration
from collectives.options import Count

WHAT = "What to measure"
DEFAULT_COMPRESSORS = "none,bf16,topk,group_topk,powersgd,qsgd,sign"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(JobConfig):
    """One calibration: the training step to measure, and how. `calibrating.resolve` fills in the defaults."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, MEASUREMENT, PROCESSES, OUTPUT)

    model: Annotated[str, Doc("network to train"), Flag(WHAT, kind="models")] = "small_cnn"
    dataset: Annotated[str, Doc("data set to train on"), Flag(WHAT, kind="datasets")] = "digits"
    data_dir: Annotated[DataDir, Flag(WHAT)] = DATA_DIR
    optimizer: Annotated[str, Doc("optimizer"), Flag(WHAT, kind="optimizers")] = "sgd"
    batch_size: Annotated[Count, Doc("samples per rank and step"), Flag(WHAT)] = 32
    augment: Annotated[bool, Doc("crop and flip training images at random"), Flag(WHAT)] = True
    bucket_mb: Annotated[BucketMb, Flag(WHAT, chosen="a quarter of the model, from 1 to 25")] = NOT_GIVEN
    compressors: Annotated[
        str,
        Doc("compressors whose encoding is measured, separated by commas"),
        Flag(WHAT, kind="compressors", many=True),
    ] = DEFAULT_COMPRESSORS
    virtual_hosts: Annotated[
        bool, Doc("also measure messages between virtual hosts, if this machine supports them"), Flag(MEASUREMENT)
    ] = True
    budget: Annotated[
        str,
        Doc("time for the whole calibration; a short one times fewer steps and turns"),
        Flag(MEASUREMENT),
        syntax(duration),
    ] = "3m"
    repeats: Annotated[
        Count, Doc("least number of timed training steps, spread over the measurement"), Flag(MEASUREMENT)
    ] = 15
    turns: Annotated[
        Count, Doc("timed turns of each compressor, each with the gradients of four ranks"), Flag(MEASUREMENT)
    ] = 5
    threads: Annotated[Threads, Flag(PROCESSES)] = 1
    left_s: Annotated[float, Doc("seconds left of the budget"), NOT_RECORDED] = 0.0
    done: Annotated[tuple[str, ...], Doc("parts that were measured already"), NOT_RECORDED] = ()
    later: Annotated[tuple[str, ...], Doc("parts that the launcher measures after the worker's"), NOT_RECORDED] = ()

    @property
    def budget_s(self) -> float:
        """Return `budget` in seconds."""
        return parse_duration(self.budget)
