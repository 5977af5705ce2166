"""RunConfig: the one value that crosses from the command line to the launcher to every rank."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Flag, Form, Recorded, short_digest
from bench.core.config.job import (
    DATA_DIR,
    MACHINES,
    MEASUREMENT,
    OUTPUT,
    PROCESSES,
    VIRTUAL_HOSTS,
    BucketMb,
    DataDir,
    RanksConfig,
)
from bench.core.config.lr_scaling import LrScaling
from bench.core.config.straggler import Straggler
from bench.core.errors import UsageError
from collectives.options import MOST, Count, CountOrZero, Positive, PositiveOrZero

WHAT = "What to train"
COMMUNICATION = "Communication"
DEFAULT_EPOCHS = 20


def folder_part(name: str) -> str:
    """A name that can be part of a folder's.

    Raises:
        UsageError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9._+-]{1,80}", name):
        raise UsageError(f"--name '{name}' cannot be part of a folder's name; use letters, digits and . _ + -")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(RanksConfig):
    """One run as it was asked for; complete once `bench.launch.resolve` has filled in what was left open."""

    panels: ClassVar[tuple[str, ...]] = (
        WHAT,
        COMMUNICATION,
        PROCESSES,
        MACHINES,
        VIRTUAL_HOSTS,
        MEASUREMENT,
        OUTPUT,
    )

    model: Annotated[str, Doc("network that is trained"), Flag(WHAT, room="models")] = "small_cnn"
    dataset: Annotated[str, Doc("data set"), Flag(WHAT, room="datasets")] = "digits"
    optimizer: Annotated[str, Doc("optimizer"), Flag(WHAT, room="optimizers")] = "sgd"
    batch_size: Annotated[Count, Doc("samples per rank and step"), Flag(WHAT)] = 32
    accumulate: Annotated[
        Count,
        Doc("batches whose gradients a rank adds up before they are exchanged and a step is made"),
        Flag(WHAT),
        Recorded(absent=1),
    ] = 1
    epochs: Annotated[
        int | None, Ge(1), Le(MOST), Doc("length in epochs"), Flag(WHAT, chosen=f"{DEFAULT_EPOCHS} without --steps")
    ] = None
    steps: Annotated[
        int | None, Ge(1), Le(MOST), Doc("length in steps instead; starts at full compression"), Flag(WHAT)
    ] = None
    lr: Annotated[Positive, Doc("peak learning rate, before lr_scaling"), Flag(WHAT, chosen="the optimizer's own")] = (
        NOT_GIVEN
    )
    schedule: Annotated[
        Literal["constant", "cosine", "step"], Doc("lr over time: constant, cosine or step"), Flag(WHAT)
    ] = "cosine"
    warmup_epochs: Annotated[PositiveOrZero, Doc("epochs over which the learning rate rises from zero"), Flag(WHAT)] = (
        0.0
    )
    lr_scaling: Annotated[
        str,
        Doc("how lr follows the ranks: none, linear (times ranks), linear:base=N (times ranks / N: lr suits N)"),
        Flag(WHAT, chosen="the compressor's own: linear for group_topk:preset=patent, else none"),
        Form(LrScaling.parse),
    ] = NOT_GIVEN
    augment: Annotated[bool, Doc("random crop and flip"), Flag(WHAT)] = True
    amp: Annotated[Literal["none", "bf16"], Doc("autocast: none or bf16"), Flag(WHAT)] = "none"
    train_size: Annotated[Count, Doc("training samples used, all ranks together"), Flag(WHAT, chosen="all")] = NOT_GIVEN
    test_size: Annotated[Count, Doc("test samples used"), Flag(WHAT, chosen="all")] = NOT_GIVEN
    holdout_size: Annotated[
        CountOrZero,
        Doc("of the training samples, so many are held out and evaluated on in the test set's place: for tuning"),
        Flag(WHAT),
        Recorded(absent=0),
    ] = 0
    data_dir: Annotated[DataDir, Flag(WHAT)] = DATA_DIR
    partition: Annotated[Literal["iid"], Doc("how training samples are dealt to ranks")] = "iid"

    compressor: Annotated[str, Doc("gradient compressor"), Flag(COMMUNICATION, room="compressors")] = "none"
    collective: Annotated[
        str,
        Doc("how ranks sum"),
        Flag(
            COMMUNICATION,
            room="collectives",
            chosen="the strategy's own; with ddp the compressor's own, else the first legal of native and allgather",
        ),
    ] = NOT_GIVEN
    strategy: Annotated[
        str, Doc("when ranks exchange what"), Flag(COMMUNICATION, room="strategies"), Recorded(absent="ddp")
    ] = "ddp"
    trigger: Annotated[
        Literal["async", "sync"],
        Doc("when a bucket is sent; async: when it is ready, sync: when rank 0 saw all ranks done"),
        Flag(COMMUNICATION),
    ] = "async"
    bucket_mb: Annotated[
        BucketMb,
        Flag(
            COMMUNICATION,
            chosen="a quarter of the model, from 1 to 25; all of it for group_topk:scope=model; none without DDP",
        ),
    ] = NOT_GIVEN
    nonfinite: Annotated[
        Literal["skip", "raise", "zero"],
        Doc("at a non-finite gradient: skip the step, raise, or zero it"),
        Flag(COMMUNICATION),
    ] = "skip"

    straggler: Annotated[
        str | None, Doc("a rank that is slow on purpose: rank=1,slowdown=3"), Flag(PROCESSES), Form(Straggler.parse)
    ] = None

    target_accuracy: Annotated[
        float | None,
        Ge(0),
        Le(1),
        Doc("test accuracy; when it is reached is recorded"),
        Flag(MEASUREMENT),
    ] = None
    eval_every: Annotated[
        CountOrZero,
        Doc("epochs between evaluations, or steps with --steps; 0: only at the end"),
        Flag(MEASUREMENT, chosen="1; with --steps: 0"),
    ] = NOT_GIVEN
    warmup_steps: Annotated[CountOrZero, Doc("first steps that are trained but not timed"), Flag(MEASUREMENT)] = 3
    rates_tried: Annotated[
        CountOrZero,
        Doc("learning rates, or settings, that were tried on held-out samples to choose this one; 0: it is not tuned"),
        Flag(MEASUREMENT),
        Recorded(identity=False, absent=0),
    ] = 0
    profile: Annotated[
        CountOrZero,
        Doc("record N steps, which are not timed, as a Chrome trace on every rank"),
        Flag(MEASUREMENT),
        NOT_RECORDED,
    ] = 0

    name: Annotated[
        str,
        Doc("label of the run"),
        Flag(OUTPUT, chosen="its components"),
        Recorded(identity=False),
        Form(folder_part),
    ] = NOT_GIVEN
    checkpoint_every: Annotated[
        CountOrZero,
        Doc("epochs between checkpoints, or steps with --steps, from which --resume goes on; 0: none"),
        Flag(OUTPUT),
        NOT_RECORDED,
    ] = 0
    max_restarts: Annotated[
        CountOrZero,
        Doc("times that the job is started again from its last checkpoint after a rank or machine was lost"),
        Flag(PROCESSES),
        NOT_RECORDED,
    ] = 0
    save_model: Annotated[bool, Doc("keep the trained weights"), Flag(OUTPUT, name="--save-model"), NOT_RECORDED] = (
        False
    )
    replicas: Annotated[
        int,
        Ge(1),
        Doc("mini-batches per step: the ranks, or the copies of the network that their devices hold"),
        Recorded(identity=False),
    ] = NOT_GIVEN
    devices: Annotated[dict[str, Any] | None, Doc("the devices, as `Topology.to_dict`"), NOT_RECORDED] = None
    track: Annotated[
        Literal["none", "tensorboard", "mlflow"],
        Doc("where every row's numbers go beside metrics.csv: none, tensorboard or mlflow, both on this machine"),
        Flag(OUTPUT),
        NOT_RECORDED,
    ] = "none"
    filled: Annotated[
        dict[str, str],
        Doc("the components' texts with every option, by field; short texts are for people"),
        NOT_RECORDED,
    ] = dataclasses.field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What identifies the experiment, components with every option."""
        of_devices = {"devices": self.devices} if self.devices else {}
        identity = super().identity() | self.filled | of_devices
        # The experiment is the one it was before there were these options.
        if self.accumulate == 1:
            del identity["accumulate"]
        if self.link_trace is None:
            del identity["link_trace"]
        return identity

    @property
    def untimed_steps(self) -> int:
        """Of the beginning: those that warm up, and those that a profiler looks at, one to warm it up among them."""
        return self.warmup_steps + (self.profile + 1 if self.profile else 0)

    @property
    def samples_per_step(self) -> int:
        """Training samples that one replica uses in a step."""
        return self.batch_size * self.accumulate

    @property
    def digest(self) -> str:
        """Ten hex digits over `identity`."""
        return short_digest(self.identity())

    @property
    def config_id(self) -> str:
        """The digest without the seed: equal for repeats of one configuration."""
        return short_digest({name: value for name, value in self.identity().items() if name != "seed"})

    def columns(self) -> dict[str, Any]:
        """This run's identity columns for `metrics.csv`, all but `run_id`."""
        return {"digest": self.digest, "config_id": self.config_id} | super().columns()
