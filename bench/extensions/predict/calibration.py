"""Calibration: the measured parts of a training step on one machine, from which steps on other links are predicted.

`bench calibrate` writes a calibration as JSON, and `bench predict` reads it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pydantic
from annotated_types import Ge, Gt

from bench.core.errors import UsageError
from bench.core.files import check_regular, writing
from bench.core.run_folder import write_json

Seconds = Annotated[float, Ge(0), pydantic.AllowInfNan(False)]
AtLeastOne = Annotated[int, Ge(1)]

VERSION = 5
FP32_BYTES = 4
# Key of the costs of messages within one machine; these costs are also used for messages between two machines.
LOCAL = "local"
# Keys of the costs of messages between virtual hosts: the kernel carries real frames, the kernel carries large
# segments, or a process forwards frames.
FRAMES, SEGMENTS, FORWARDED = "frames", "segments", "forwarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSize:
    """The size of one payload (one encoded tensor) in a message.

    Attributes:
        nbytes: bytes of one rank's payload, packed into bytes.
        numel, alignment, addable, splits_blocks: as in `collectives.schedule.rounds.Leaf`.
        wire_numel, wire_dtype: number of elements and dtype of the tensor that is sent instead of packed bytes; None if
            the payload is always packed.
    """

    numel: Annotated[int, Ge(0)]
    nbytes: Annotated[int, Ge(0)]
    alignment: AtLeastOne = 1
    addable: bool = True
    wire_numel: int | None = None
    wire_dtype: str | None = None
    splits_blocks: bool = False

    @classmethod
    def of(cls, leaf: Any) -> LeafSize:
        """Return the size of `leaf`, a `collectives.payloads.base.Payload`."""
        wire = leaf.wire if leaf.elementwise else None
        return cls(
            numel=leaf.numel,
            nbytes=leaf.nbytes,
            alignment=leaf.alignment,
            addable=leaf.addable,
            wire_numel=None if wire is None else wire.numel(),
            wire_dtype=None if wire is None else str(wire.dtype).removeprefix("torch."),
            splits_blocks=leaf.splits_blocks,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCost:
    """CPU time of an operation on a payload or on a part of it, as a linear function of the length in bytes.

    Attributes:
        fixed_s: seconds that do not depend on the length.
        per_byte_s: seconds for each byte.
    """

    fixed_s: Seconds = 0.0
    per_byte_s: Seconds = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageProfile:
    """Sizes and costs of one message, as a rank passes it to a collective.

    Attributes:
        leaves: sizes of the payloads in the message.
        layers: ids of the layers in the message, in the message's order, which may differ from the bucket's order.
        growth: measured pairs (number of ranks, bytes of their merged payload / bytes of one rank's payload), up to the
            largest number of ranks that was measured. For 1 rank, the ratio is bytes of a payload that is cut into
            parts / bytes of the whole payload.
        merge: cost of adding a received payload to this rank's payload before the sum is sent on.
        pack_s: seconds to pack the whole message into bytes.
        unpack: cost of reading a payload from bytes.
        decode_s: seconds to add one rank's payloads to a dense tensor.
    """

    leaves: tuple[LeafSize, ...]
    layers: tuple[int, ...]
    growth: tuple[tuple[AtLeastOne, Seconds], ...] = ((1, 1.0),)
    merge: LinearCost = LinearCost()
    pack_s: Seconds = 0.0
    unpack: LinearCost = LinearCost()
    decode_s: Seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Return the bytes of one rank's message in packed form."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedBucket:
    """The messages that a compressor produces from a bucket of gradients, and the time to produce them.

    Attributes:
        work_s: seconds of the compressor's work before each message, and after the last message.
        offers: the messages, in the order in which they are sent.
    """

    work_s: tuple[Seconds, ...]
    offers: tuple[MessageProfile, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketParts:
    """A bucket of gradients, which DDP sends together.

    Attributes:
        ready_s: seconds from the start of backward until all gradients of the bucket are computed.
        layers: ids of the layers in the bucket, in the bucket's order.
        numels: number of elements of each layer.
    """

    ready_s: Seconds
    layers: tuple[int, ...]
    numels: tuple[AtLeastOne, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuContention:
    """Times of forward and backward when several ranks start a step together on the same cores.

    Attributes:
        load: number of computing threads / number of cores.
        handed_over_s: for each bucket of gradients, seconds from the start until the bucket is ready on the slowest
            rank.
        computed_s: seconds from the start until the slowest rank has finished backward.
        cpu_s: CPU seconds of the whole step including the update, averaged over ranks.
    """

    load: Annotated[float, Gt(0), pydantic.AllowInfNan(False)]
    handed_over_s: tuple[Seconds, ...]
    computed_s: Seconds
    cpu_s: Seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageCosts:
    """Costs of messages, in addition to their travel time on links.

    Attributes:
        message_s, per_byte_s: CPU seconds of a rank for each message and for each byte that it sends or receives.
        wake_s: seconds from a short message's arrival until the waiting rank continues.
        carry_byte_s: CPU seconds for carrying a byte between virtual hosts, not counting the ranks' own CPU time; with
            forwarded frames, CPU seconds of the forwarding thread.
    """

    message_s: Seconds = 0.0
    per_byte_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    carry_byte_s: Seconds = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validated:
    """Predicted and measured step time of one configuration; all ranks shared the cores of the calibrated machine.

    Attributes:
        compressor, collective: texts such as "topk:ratio=0.01", without the options that have their default.
        bandwidth_bps: slowest rate of any link in bits per second; None if no link is limited.
        latency_s: longest one-way delay of any host in seconds.
        predicted_s, measured_s: seconds of a step.
        strategy, trigger, straggler, link_trace, ranks_per_host: as in `metrics.csv`.
        error: relative error of the predicted step time: predicted / measured - 1.
    """

    compressor: str
    collective: str
    world_size: int
    bandwidth_bps: float | None
    latency_s: float
    predicted_s: float
    measured_s: float
    error: float
    strategy: str = "ddp"
    trigger: str = "async"
    straggler: str | None = None
    link_trace: str | None = None
    ranks_per_host: AtLeastOne = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measured parts of a training step of one model on one machine.

    Attributes:
        version: version of the file format.
        cpu, torch_version, kernels: as in `metrics.csv`.
        cores: number of cores that the ranks could use.
        model, dataset, optimizer, batch_size, augment, threads, bucket_mb: options of the run that was measured.
        batch_s, forward_s, backward_s, update_s: seconds to load a batch, to compute forward and backward, and to
            update the parameters, for one rank that has the machine to itself; CPU time with one thread, wall-clock
            time with several.
        buckets: the buckets in the order in which they are ready.
        encoded: the messages of each bucket after any density warm-up, by compressor.
        first_epoch: the same in the first epoch, of the compressors that send more then.
        crowds: times of the same step when several ranks compute at once, by ascending load (computing threads /
            cores). The first entry is of a single rank, and shows whether other processes disturbed the measurement.
        messages: costs of messages, by the way in which messages travel: `LOCAL`, `FRAMES`, `SEGMENTS` or `FORWARDED`.
        around_message_s: CPU seconds of a rank for one message, sent or received, in addition to those in `messages`:
            for the work of the collective, and because all work is slower right after compute.
        crowded_wake_s: extra seconds from a message's arrival until the waiting rank continues, while the ranks of the
            last entry of `crowds` keep all cores busy.
        validated: comparisons of predictions from this calibration with real runs.
        cut: measurements that were repeated less often than planned for lack of time, like "4 of 36 steps".
    """

    # For messages to the user: what a file of this class is called, the command that makes it, and how to check
    # predictions from it.
    kind: ClassVar[str] = "calibration"
    command: ClassVar[str] = "bench calibrate"
    how_to_check: ClassVar[str] = "bench predict --validate does that"

    version: int
    cpu: str
    cores: AtLeastOne
    torch_version: str
    kernels: str
    model: str
    dataset: str
    optimizer: str
    batch_size: AtLeastOne
    threads: AtLeastOne
    bucket_mb: float
    batch_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    buckets: tuple[BucketParts, ...]
    encoded: dict[str, tuple[EncodedBucket, ...]]
    crowds: tuple[CpuContention, ...]
    messages: dict[str, MessageCosts]
    first_epoch: dict[str, tuple[EncodedBucket, ...]] = dataclasses.field(default_factory=dict)
    around_message_s: Seconds = 0.0
    crowded_wake_s: Seconds = 0.0
    augment: bool = True
    validated: tuple[Validated, ...] = ()
    cut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        encoded = [*self.encoded.values(), *self.first_epoch.values()]
        per_bucket = [*(crowd.handed_over_s for crowd in self.crowds), *encoded]
        fits = (
            all(len(each) == len(self.buckets) for each in per_bucket)
            and all(len(bucket.layers) == len(bucket.numels) for bucket in self.buckets)
            and all(
                len(made.work_s) == len(made.offers) + 1
                and all(
                    len(set(offer.layers)) == len(offer.layers) and set(offer.layers) <= set(bucket.layers)
                    for offer in made.offers
                )
                for each in encoded
                for bucket, made in zip(self.buckets, each, strict=True)
            )
        )
        if not (fits and self.buckets and self.crowds and LOCAL in self.messages):
            raise ValueError("the buckets and the measurements of the buckets do not match")

    @property
    def computed_s(self) -> float:
        """Return the seconds from the start of a step until backward has ended, for one rank alone on the machine."""
        return self.batch_s + self.forward_s + self.backward_s

    @property
    def about(self) -> str:
        """Return the name of the model, and what it is trained on."""
        return f"{self.model} on {self.dataset}"

    @property
    def numel(self) -> int:
        """Return the number of parameters that are trained."""
        return sum(sum(bucket.numels) for bucket in self.buckets)

    @property
    def dense_nbytes(self) -> int:
        """Return the bytes of the whole gradient in fp32."""
        return FP32_BYTES * self.numel

    def write(self, path: Path) -> None:
        """Write the calibration as JSON.

        Raises:
            UsageError: the file cannot be written.
        """
        with writing(path, "file"):
            write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the calibration from a file that `write` wrote.

        Raises:
            UsageError: the file does not exist, is not a calibration, or is of another version.
        """
        check_regular(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"the {cls.kind} {path} cannot be read: {error.strerror}; make one with {cls.command} --out {path}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a {cls.kind}: {error}; make one with {cls.command}") from None
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise UsageError(f"{path} is not a {cls.kind} of version {VERSION}; make a new one with {cls.command}")
        return cls.of(content, where=str(path))

    @classmethod
    def of(cls, values: Any, where: str = "what was measured") -> Self:
        """Return a calibration from plain values, as JSON contains them.

        Args:
            values: values of the fields, by name.
            where: text that names the origin of the values in an error message.

        Raises:
            UsageError: the values are not those of a calibration.
        """
        try:
            return pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UsageError(f"{where} is not a {cls.kind}: {field}: {first['msg']}; make a new one") from None
