"""Options of `bench calibrate` and `bench predict`, with their ranges and help texts."""

import dataclasses
import re
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Configuration, Flag, syntax
from bench.core.config.run import DATA_DIR, MEASUREMENT, OUTPUT, PROCESSES, BucketMb, DataDir, JobConfig, Threads
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.core.units import duration, parse_count, parse_duration
from collectives.options import MOST, Count

# Most parameters of a model of which only their number is known, because a 64th of them is encoded to count its bytes.
MOST_PARAMETERS = 1e10
_FORM = re.compile(r"every=([^,]+),restart=([^,]+),checkpoint=([1-9][0-9]{0,8})")


def parse_parameters(text: str) -> int:
    """Parse a number of parameters: ``124M`` -> 124 000 000.

    Raises:
        UsageError: the text is not a number from 1 to `MOST_PARAMETERS`.
    """
    return parse_count(text, MOST_PARAMETERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """Random failures of hosts; after each failure, the job restarts from its last checkpoint.

    Attributes:
        every_s: mean seconds until a given host fails; the same for every host.
        restart_s: seconds from a failure until training resumes.
        checkpoint_steps: steps between two checkpoints.
    """

    every_s: float
    restart_s: float
    checkpoint_steps: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text like ``every=6h,restart=30s,checkpoint=100``.

        Raises:
            UsageError: the text has another form, or the mean time until a host fails is 0.
        """
        match = _FORM.fullmatch(text.replace(" ", ""))
        if not match:
            raise UsageError(
                f"--losses {text} is not possible; write every=6h,restart=30s,checkpoint=100: each host's mean time "
                "until it is lost, the time until training resumes, and the steps between checkpoints"
            )
        losses = cls(
            every_s=parse_duration(match[1]), restart_s=parse_duration(match[2]), checkpoint_steps=int(match[3])
        )
        if losses.every_s <= 0:
            raise UsageError(f"--losses {text} is not possible; give a mean time above 0 after every=")
        return losses

    def __str__(self) -> str:
        # In a form that `parse_duration` reads, rounded to microseconds.
        every, restart = (f"{seconds:.6f}".rstrip("0").rstrip(".") for seconds in (self.every_s, self.restart_s))
        return f"every={every}s,restart={restart}s,checkpoint={self.checkpoint_steps}"


MEASURED_RUN = "What to measure"
DEFAULT_COMPRESSORS = "none,bf16,topk,group_topk,powersgd,qsgd,sign"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(JobConfig):
    """Options of `bench calibrate`: the step to measure, and how; `calibrating.resolve` fills in the defaults."""

    panels: ClassVar[tuple[str, ...]] = (MEASURED_RUN, MEASUREMENT, PROCESSES, OUTPUT)

    model: Annotated[str, Doc("network to train"), Flag(MEASURED_RUN, kind="models")] = "small_cnn"
    dataset: Annotated[str, Doc("data set to train on"), Flag(MEASURED_RUN, kind="datasets")] = "digits"
    data_dir: Annotated[DataDir, Flag(MEASURED_RUN)] = DATA_DIR
    optimizer: Annotated[str, Doc("optimizer"), Flag(MEASURED_RUN, kind="optimizers")] = "sgd"
    batch_size: Annotated[Count, Doc("samples per rank and step"), Flag(MEASURED_RUN)] = 32
    augment: Annotated[
        bool, Doc("change training images at random: crop and flip, or as the data set does"), Flag(MEASURED_RUN)
    ] = True
    bucket_mb: Annotated[BucketMb, Flag(MEASURED_RUN, chosen="25 to 45 % of the model, at least 1 and at most 25")] = (
        NOT_GIVEN
    )
    compressors: Annotated[
        str,
        Doc("compressors whose encoding is measured, separated by commas"),
        Flag(MEASURED_RUN, kind="compressors", many=True),
    ] = DEFAULT_COMPRESSORS
    virtual_hosts: Annotated[
        bool, Doc("also measure messages between virtual hosts, if this machine supports them"), Flag(MEASUREMENT)
    ] = True
    budget: Annotated[
        str,
        Doc("time for the whole calibration; with less time, steps and encodings are timed less often"),
        Flag(MEASUREMENT),
        syntax(duration),
    ] = "3m"
    repeats: Annotated[
        Count, Doc("least number of timed training steps, spread over the measurement"), Flag(MEASUREMENT)
    ] = 15
    turns: Annotated[
        Count, Doc("number of times that each compressor encodes the gradients of four ranks"), Flag(MEASUREMENT)
    ] = 5
    threads: Annotated[Threads, Flag(PROCESSES)] = 1
    left_s: Annotated[float, Doc("seconds left of the budget"), NOT_RECORDED] = 0.0
    done: Annotated[tuple[str, ...], Doc("parts that were measured already"), NOT_RECORDED] = ()
    later: Annotated[tuple[str, ...], Doc("parts that the launcher measures after the worker"), NOT_RECORDED] = ()


WHAT = "What to predict"
PARTS = "What the step times come from"
RANKS = "Ranks and links"
VALIDATION = "Validation"
TABLE = "validation.csv"
# Largest numbers of ranks that can be simulated: with one rank per host, and with several ranks per host.
MOST_RANKS, MOST_TOGETHER = 16_384, 4096
MOST_CORES = 100_000
Ranks = Annotated[int, Ge(1), Le(MOST_RANKS)]

LinkText = Annotated[str | None, Flag(RANKS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(Configuration):
    """Options of `bench predict`: compressor, collective, ranks and links; the calibration sets everything else."""

    panels: ClassVar[tuple[str, ...]] = (PARTS, WHAT, RANKS, VALIDATION, OUTPUT)

    step_time: Annotated[
        str | None,
        Doc("time of a step without exchange, for a rough estimate from --model without a calibration: 50ms"),
        Flag(PARTS),
        syntax(duration),
    ] = None
    parameters: Annotated[
        str | None,
        Doc("number of parameters, for a rough estimate with --step-time of a model that bench does not know: 124M"),
        Flag(PARTS),
        syntax(parse_parameters),
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"],
        Doc("what encodes, for a rough estimate with --step-time: one CPU thread, or a GPU like NVIDIA's H200"),
        Flag(PARTS),
    ] = "cpu"
    compressor: Annotated[
        str, Doc("gradient compressor"), Flag(WHAT, kind="compressors", chosen="all that the calibration has, ranked")
    ] = NOT_GIVEN
    collective: Annotated[
        str,
        Doc("how ranks sum gradients"),
        Flag(
            WHAT,
            kind="collectives",
            chosen="the fastest; with more than 64 ranks or with async_server, the one that bench run would choose",
        ),
    ] = NOT_GIVEN
    strategy: Annotated[
        str, Doc("how ranks train together: ddp, local or async_server"), Flag(WHAT, kind="strategies")
    ] = "ddp"
    model: Annotated[
        str | None, Doc("network to train; must be that of the calibration"), Flag(WHAT, kind="models")
    ] = None
    dataset: Annotated[
        str | None,
        Doc("data set; must be that of the calibration (without a calibration: digits)"),
        Flag(WHAT, kind="datasets"),
    ] = None
    classes: Annotated[
        int | None,
        Ge(2),
        Le(MOST),
        Doc("number of classes, for a rough estimate with --step-time (by default those of the data set)"),
        Flag(WHAT),
    ] = None
    batch_size: Annotated[
        int | None,
        Ge(1),
        Le(MOST),
        Doc("samples per rank and step; must be those of the calibration (without a calibration: 32)"),
        Flag(WHAT),
    ] = None
    trigger: Annotated[
        Literal["async", "sync"],
        Doc("when a bucket is sent; async: as soon as it is ready, sync: once all are ready"),
        Flag(WHAT),
    ] = "async"
    world_size: Annotated[
        Ranks, Doc("ranks of the whole job"), Flag(RANKS, chosen="2, or as many as the hosts have")
    ] = NOT_GIVEN
    hosts: Annotated[Ranks, Doc("machines, each with a link to one switch"), Flag(RANKS, chosen="one per rank")] = (
        NOT_GIVEN
    )
    ranks_per_host: Annotated[Count, Doc("ranks on each host, which share its link and cores"), Flag(RANKS)] = 1
    network: Annotated[LinkText, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkText, Doc("rate of each host's link in both directions: 100mbit")] = None
    uplink: Annotated[LinkText, Doc("rate at which a host can send: 10mbit")] = None
    downlink: Annotated[LinkText, Doc("rate at which a host can receive: 100mbit")] = None
    bandwidth_trace: Annotated[
        LinkText,
        Doc("file with a varying rate, for both directions; each line is a time in ms at which 1500 bytes may pass"),
    ] = None
    uplink_trace: Annotated[LinkText, Doc("file like --bandwidth-trace, only for what a host sends")] = None
    downlink_trace: Annotated[LinkText, Doc("file like --bandwidth-trace, only for what a host receives")] = None
    latency: Annotated[LinkText, Doc("one-way delay of what a host sends, half the time that ping shows: 5ms")] = None
    cluster_file: Annotated[
        str | None, Doc("TOML file that describes hosts that differ"), Flag(RANKS, name="--cluster")
    ] = None
    straggler: Annotated[
        str | None, Doc("make one rank slow on purpose: rank=1,slowdown=3"), Flag(RANKS), syntax(Straggler.parse)
    ] = None
    losses: Annotated[
        str | None,
        Doc(
            "random failures of hosts: each host's mean time until it fails, the time that a restart takes, and the "
            "steps between checkpoints: every=6h,restart=30s,checkpoint=100"
        ),
        Flag(RANKS),
        syntax(Losses.parse),
    ] = None
    shared_cores: Annotated[
        int | None,
        Ge(1),
        Le(MOST_CORES),
        Doc("cores that all hosts share, as virtual hosts do; by default each has those of the calibrated machine"),
        Flag(RANKS),
    ] = None
