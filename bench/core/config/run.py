"""RunConfig, the options of `bench run`, and its bases JobConfig and RanksConfig, whose options other commands share.

The command line passes a configuration to the launcher, and the launcher passes it to the ranks.
"""

import dataclasses
import re
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt
from pydantic import AfterValidator
from typing_extensions import Doc

from bench.core.config.configuration import (
    NOT_GIVEN,
    NOT_RECORDED,
    Configuration,
    Flag,
    Recorded,
    short_digest,
    syntax,
)
from bench.core.config.syntax import Endpoint, LrScaling, Partition, Straggler
from bench.core.errors import UsageError
from collectives.options import MOST, Count, CountOrZero, Positive, PositiveOrZero

WHAT = "What to train"
COMMUNICATION = "Communication"
MEASUREMENT = "Measurement"
PROCESSES = "Processes"
MACHINES = "Several machines"
VIRTUAL_HOSTS = "Virtual hosts"
OUTPUT = "Output"

DEFAULT_EPOCHS = 20
DEFAULT_BATCH_SIZE = 32
DEFAULT_WORLD_SIZE = 2
MAX_RANKS = 4096
# Random number generators take a seed of 32 bits.
MAX_SEED = 2**32 - 1
# Ten days; poll() counts milliseconds in 31 bits.
MAX_TIMEOUT_S = 864_000

RankCount = Annotated[int, Ge(1), Le(MAX_RANKS)]

Threads = Annotated[int, Ge(1), Le(1024), Doc("threads per rank for tensor operations")]
BucketMb = Annotated[float, Ge(0.001), Le(1e6), Doc("DDP's bucket size in MiB"), Recorded(unit="MiB")]
DataDir = Annotated[str, Doc("folder of the data sets"), NOT_RECORDED]
DATA_DIR = "data"
# An option that describes links. Its text is not recorded; the numbers computed from the text are recorded
# (`RanksConfig.uplink_bps` and the fields below it).
LinkWord = Annotated[str | None, Flag(VIRTUAL_HOSTS), NOT_RECORDED]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Configuration):
    """Options of a job of one or more processes."""

    seed: Annotated[int, Ge(0), Le(MAX_SEED), Doc("seed of everything random"), Flag(MEASUREMENT)] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc("device to compute on: cpu, cuda, or auto: cuda if torch sees enough GPUs"),
        Flag(PROCESSES),
    ] = "auto"
    timeout_s: Annotated[
        float,
        Ge(1),
        Le(MAX_TIMEOUT_S),
        Doc("time limit in seconds for a step, sum or round of sums; if exceeded, the job ends, naming the late rank"),
        Flag(PROCESSES, name="--timeout"),
        NOT_RECORDED,
    ] = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksConfig(JobConfig):
    """Options of a job of several ranks: their number, their machines or virtual hosts, and the links between these."""

    world_size: Annotated[
        RankCount,
        Doc("number of ranks of the whole job"),
        Flag(PROCESSES, chosen=f"{DEFAULT_WORLD_SIZE}, or the number of ranks on the virtual hosts"),
    ] = NOT_GIVEN
    threads: Annotated[Threads, Flag(PROCESSES, chosen="cores / ranks")] = NOT_GIVEN
    nnodes: Annotated[
        RankCount, Doc("number of machines; start the same command on each"), Flag(MACHINES), NOT_RECORDED
    ] = 1
    node_rank: Annotated[
        int, Ge(0), Lt(MAX_RANKS), Doc("number of this machine, from 0"), Flag(MACHINES), NOT_RECORDED
    ] = 0
    rdzv_endpoint: Annotated[
        str | None,
        Doc("HOST:PORT of machine 0, to which all machines connect"),
        Flag(MACHINES),
        NOT_RECORDED,
        syntax(Endpoint.parse),
    ] = None
    hosts: Annotated[
        int | None,
        Ge(1),
        Le(MAX_RANKS),
        Doc("number of virtual hosts on this machine (in rows of runs without virtual hosts: number of machines)"),
        Flag(VIRTUAL_HOSTS),
    ] = None
    ranks_per_host: Annotated[
        RankCount, Doc("ranks on each host"), Flag(VIRTUAL_HOSTS, chosen="1 on a virtual host")
    ] = NOT_GIVEN
    network: Annotated[LinkWord, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkWord, Doc("rate of each host's link in both directions: 100mbit")] = None
    uplink: Annotated[LinkWord, Doc("rate at which a host can send: 10mbit")] = None
    downlink: Annotated[LinkWord, Doc("rate at which a host can receive: 100mbit")] = None
    bandwidth_trace: Annotated[
        LinkWord,
        Doc("file of a varying rate, for both directions; each line is a time in ms at which 1500 bytes may pass"),
    ] = None
    uplink_trace: Annotated[LinkWord, Doc("file like --bandwidth-trace, only for what a host sends")] = None
    downlink_trace: Annotated[LinkWord, Doc("file like --bandwidth-trace, only for what a host receives")] = None
    latency: Annotated[
        LinkWord, Doc("one-way delay of what a host sends, half of the round-trip time between two hosts: 5ms")
    ] = None
    jitter: Annotated[
        LinkWord, Doc("largest random deviation from the delay, up or down; frames keep their order: 1ms")
    ] = None
    loss: Annotated[LinkWord, Doc("probability that a frame that a host sends is lost: 1%")] = None
    cluster_file: Annotated[
        str | None,
        Doc("TOML file that describes virtual hosts that differ"),
        Flag(VIRTUAL_HOSTS, name="--cluster"),
        NOT_RECORDED,
    ] = None
    # The fields below are computed from the options above. The recorded numbers and the digest describe the cluster
    # completely, so `cluster` itself is not part of the experiment's identity.
    cluster: Annotated[dict[str, Any] | None, Doc("the result of `Cluster.to_dict`"), NOT_RECORDED] = None
    uplink_bps: Annotated[
        float | None,
        Doc("slowest sending rate set for any host; a varying rate counts as its mean (empty: not limited)"),
        Recorded(unit="bit/s"),
    ] = None
    downlink_bps: Annotated[
        float | None,
        Doc("slowest receiving rate set for any host; a varying rate counts as its mean (empty: not limited)"),
        Recorded(unit="bit/s"),
    ] = None
    link_trace: Annotated[str | None, Doc("name and digest of the trace files (empty: the rates are constant)")] = None
    latency_s: Annotated[float | None, Doc("longest one-way delay that is set for any link"), Recorded(unit="s")] = None
    jitter_s: Annotated[
        float | None, Doc("largest random deviation from the delay, up or down"), Recorded(unit="s")
    ] = None
    loss_ratio: Annotated[float | None, Doc("largest share of frames that any host loses on purpose")] = None
    cpu_share: Annotated[float | None, Doc("smallest share of time in which a host's processes may run")] = None
    cluster_digest: Annotated[str | None, Doc("hash of all links (empty: all hosts are equal)")] = None


def folder_part(name: str) -> str:
    """Return the name, after checking that it can be part of a folder's name.

    Raises:
        UsageError: the name is empty, longer than 80 characters, or has characters other than letters, digits, . _ + -
    """
    if not re.fullmatch(r"[A-Za-z0-9._+-]{1,80}", name):
        raise UsageError(f"--name '{name}' cannot be part of a folder's name; use letters, digits and . _ + -")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(RanksConfig):
    """The configuration of one run. `bench.launch.plan` fills in the options that the user did not give."""

    panels: ClassVar[tuple[str, ...]] = (
        WHAT,
        COMMUNICATION,
        PROCESSES,
        MACHINES,
        VIRTUAL_HOSTS,
        MEASUREMENT,
        OUTPUT,
    )

    recipe: Annotated[
        str | None,
        Doc("published set of options to start from; options that you give replace them; see bench list recipes"),
        Flag(WHAT),
        Recorded(identity=False),  # the options that the recipe sets are part of the identity
    ] = None
    model: Annotated[str, Doc("network to train: resnet18, or your own as net.py:build"), Flag(WHAT, kind="models")] = (
        "small_cnn"
    )
    dataset: Annotated[
        str, Doc("data set to train on: digits, or your own as data.py:load"), Flag(WHAT, kind="datasets")
    ] = "digits"
    optimizer: Annotated[str, Doc("optimizer"), Flag(WHAT, kind="optimizers")] = "sgd"
    batch_size: Annotated[
        Count,
        Doc("samples per rank and step"),
        Flag(WHAT, chosen=f"{DEFAULT_BATCH_SIZE}, or the recipe's samples per step / ranks"),
    ] = NOT_GIVEN
    accumulate: Annotated[
        Count,
        Doc("number of batches per step on each rank; their gradients are added up before the exchange"),
        Flag(WHAT),
    ] = 1
    epochs: Annotated[
        int | None,
        Ge(1),
        Le(MOST),
        Doc("length of the training in epochs"),
        Flag(WHAT, chosen=f"{DEFAULT_EPOCHS} without --steps"),
    ] = None
    steps: Annotated[
        int | None,
        Ge(1),
        Le(MOST),
        Doc("length of the training in steps, instead of --epochs; compression starts at its final ratio"),
        Flag(WHAT),
    ] = None
    lr: Annotated[
        Positive, Doc("peak learning rate, before lr_scaling"), Flag(WHAT, chosen="the optimizer's default")
    ] = NOT_GIVEN
    schedule: Annotated[
        Literal["constant", "cosine", "step"], Doc("learning rate over time: constant, cosine or step"), Flag(WHAT)
    ] = "cosine"
    warmup_epochs: Annotated[PositiveOrZero, Doc("epochs over which the learning rate rises from zero"), Flag(WHAT)] = (
        0.0
    )
    lr_scaling: Annotated[
        str,
        Doc(
            "factor that multiplies lr; none: 1, linear: the number of ranks, linear:base=N: ranks / N, if lr was "
            "chosen for N ranks; with gradual=true, warm-up starts at lr instead of zero"
        ),
        Flag(WHAT, chosen="the compressor's default: linear for group_topk:preset=patent, else none"),
        syntax(LrScaling.parse),
    ] = NOT_GIVEN
    clip_norm: Annotated[
        float | None,
        Ge(0),
        Le(1e12),
        Doc(
            "largest L2 norm of the mean gradient; after the exchange, a larger gradient is scaled down to this norm; "
            "0: no limit, even if the recipe sets one"
        ),
        Flag(WHAT),
    ] = None
    label_smoothing: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc("share of each training target that is spread evenly over all classes; test_loss is not smoothed"),
        Flag(WHAT),
    ] = 0.0
    augment: Annotated[
        bool, Doc("change training images at random: crop and flip, or as the data set does"), Flag(WHAT)
    ] = True
    amp: Annotated[Literal["none", "bf16"], Doc("mixed precision with torch's autocast: none or bf16"), Flag(WHAT)] = (
        "none"
    )
    train_size: Annotated[
        Count, Doc("number of training samples to use, all ranks together"), Flag(WHAT, chosen="all")
    ] = NOT_GIVEN
    test_size: Annotated[Count, Doc("number of test samples to use"), Flag(WHAT, chosen="all")] = NOT_GIVEN
    holdout_size: Annotated[
        CountOrZero,
        Doc("number of training samples to hold out and evaluate on instead of the test set, for tuning"),
        Flag(WHAT),
    ] = 0
    data_dir: Annotated[DataDir, Flag(WHAT)] = DATA_DIR
    partition: Annotated[
        str,
        Doc(
            "how training samples are divided among ranks; iid: at random, classes:per_rank=2: two classes on each "
            "rank, dirichlet:alpha=0.5: class shares drawn at random; a smaller alpha makes ranks differ more"
        ),
        Flag(WHAT),
        syntax(Partition.parse),
    ] = "iid"

    compressor: Annotated[str, Doc("gradient compressor"), Flag(COMMUNICATION, kind="compressors")] = "none"
    collective: Annotated[
        str,
        Doc("how ranks sum gradients"),
        Flag(
            COMMUNICATION,
            kind="collectives",
            chosen="the strategy's or the compressor's default, else native, or allgather if native does not work",
        ),
    ] = NOT_GIVEN
    strategy: Annotated[
        str,
        Doc("how ranks train together: what they exchange, and when"),
        Flag(COMMUNICATION, kind="strategies"),
    ] = "ddp"
    trigger: Annotated[
        Literal["async", "sync"],
        Doc("when a bucket is sent; async: as soon as it is ready, sync: once all ranks have finished backward"),
        Flag(COMMUNICATION),
    ] = "async"
    bucket_mb: Annotated[
        BucketMb,
        Flag(
            COMMUNICATION,
            chosen="25 to 45 % of the model, within 1 to 25 MiB; the whole model for group_topk:scope=model; "
            "none without DDP",
        ),
    ] = NOT_GIVEN
    nonfinite: Annotated[
        Literal["skip", "raise", "zero"],
        Doc("what to do about a NaN or infinite gradient: skip the step, raise an error, or zero the gradient"),
        Flag(COMMUNICATION),
    ] = "skip"

    straggler: Annotated[
        str | None, Doc("make one rank slow on purpose: rank=1,slowdown=3"), Flag(PROCESSES), syntax(Straggler.parse)
    ] = None

    target_accuracy: Annotated[
        float | None,
        Ge(0),
        Le(1),
        Doc("test accuracy, 0 to 1; time_to_target_s records the training time until it is reached"),
        Flag(MEASUREMENT),
    ] = None
    target_bits_per_byte: Annotated[
        float | None,
        Ge(0),
        Le(8),
        Doc("target for a text, like target_accuracy: bits per byte of the held-out text"),
        Flag(MEASUREMENT),
    ] = None
    stop_at_target: Annotated[
        bool,
        Doc("end the run at the first evaluation that reaches the target"),
        Flag(MEASUREMENT, name="--stop-at-target"),
    ] = False
    eval_every: Annotated[
        float,
        Ge(0),
        Le(MOST),
        Doc("epochs (with --steps: steps) between evaluations, such as 0.25; 0: only at the end"),
        Flag(MEASUREMENT, chosen="1; with --steps: 0"),
        AfterValidator(lambda every: int(every) if every.is_integer() else every),  # in CSV files 1, not 1.0
    ] = NOT_GIVEN
    warmup_steps: Annotated[CountOrZero, Doc("steps at the start that are not timed"), Flag(MEASUREMENT)] = 3
    rates_tried: Annotated[
        CountOrZero,
        Doc("number of learning rates or settings tried on held-out samples before one was chosen; 0: not tuned"),
        Flag(MEASUREMENT),
        Recorded(identity=False),
    ] = 0
    profile: Annotated[
        CountOrZero,
        Doc("number of steps to record as a Chrome trace on every rank; these steps are not timed"),
        Flag(MEASUREMENT),
        NOT_RECORDED,
    ] = 0

    name: Annotated[
        str,
        Doc("label of the run, part of its folder's name"),
        Flag(OUTPUT, chosen="the names of its components"),
        Recorded(identity=False),
        syntax(folder_part),
    ] = NOT_GIVEN
    checkpoint_every: Annotated[
        CountOrZero,
        Doc("epochs (with --steps: steps) between the checkpoints from which --resume continues; 0: no checkpoints"),
        Flag(OUTPUT),
        NOT_RECORDED,
    ] = 0
    max_restarts: Annotated[
        CountOrZero,
        Doc("number of times that the job may lose a rank or machine and restart from its last checkpoint"),
        Flag(PROCESSES),
        NOT_RECORDED,
    ] = 0
    save_model: Annotated[
        bool, Doc("save the trained weights in model.pt"), Flag(OUTPUT, name="--save-model"), NOT_RECORDED
    ] = False
    replicas: Annotated[
        int,
        Ge(1),
        Doc("mini-batches per step: one per rank, or one per copy of the network if devices share each copy"),
        Recorded(identity=False),
    ] = NOT_GIVEN
    strategy_input: Annotated[
        dict[str, Any], Doc("values that the strategy read from a file that its option names"), NOT_RECORDED
    ] = dataclasses.field(default_factory=dict)
    rank_names: Annotated[
        tuple[str, ...], Doc("name of each rank in messages; empty: rank 0, rank 1 and so on"), NOT_RECORDED
    ] = ()
    track: Annotated[
        Literal["none", "tensorboard", "mlflow"],
        Doc("also log every row to a local tracker: none, tensorboard or mlflow"),
        Flag(OUTPUT),
        NOT_RECORDED,
    ] = "none"
    filled: Annotated[
        dict[str, str],
        Doc("full spec of each component, with every option, by field name; the fields hold shorter specs"),
        NOT_RECORDED,
    ] = dataclasses.field(default_factory=dict)
    notes: Annotated[
        tuple[str, ...], Doc("what the user should know about this configuration, one sentence each"), NOT_RECORDED
    ] = ()

    def identity(self) -> dict[str, Any]:
        """Return the values that identify the experiment, by option name; a component's spec has every option."""
        return super().identity() | self.filled | {"strategy_input": self.strategy_input}

    @property
    def has_target(self) -> bool:
        """Return True if the run measures the time to a target accuracy or to a target of bits per byte."""
        return self.target_accuracy is not None or self.target_bits_per_byte is not None

    def reaches_target(self, accuracy: float | None, bits_per_byte: float | None) -> bool:
        """Return True if the run has a target and these values of an evaluation reach it.

        Args:
            accuracy: the test accuracy, 0 to 1; None if it was not measured.
            bits_per_byte: bits per byte of the held-out text; None for other data.
        """
        if self.target_bits_per_byte is not None:
            return bits_per_byte is not None and bits_per_byte <= self.target_bits_per_byte
        return self.target_accuracy is not None and accuracy is not None and accuracy >= self.target_accuracy

    @property
    def untimed_steps(self) -> int:
        """Return the number of steps at the start that are not timed: the warm-up steps and the profiler's steps.

        The profiler's steps are one step that warms the profiler up, and `profile` steps that it records.
        """
        return self.warmup_steps + (self.profile + 1 if self.profile else 0)

    @property
    def samples_per_step(self) -> int:
        """Return the number of training samples that one replica (copy of the model) uses in an optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def digest(self) -> str:
        """Return ten hex digits that identify the experiment: a hash of `identity`."""
        return short_digest(self.identity())

    @property
    def config_id(self) -> str:
        """Return ten hex digits that identify the experiment apart from its seed: a hash of `identity` without seed."""
        return short_digest({name: value for name, value in self.identity().items() if name != "seed"})

    def columns(self) -> dict[str, Any]:
        """Return the values for the column group `identity` of `metrics.csv`, except `run_id`, by column name."""
        return {"digest": self.digest, "config_id": self.config_id} | super().columns()
