"""Parts of a step, measured on one machine, from which steps on other links and among more ranks are put together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import pydantic
from annotated_types import Ge, Gt

from bench.core.errors import UsageError
from bench.core.files import check_regular
from bench.core.run_folder import write_json

Seconds = Annotated[float, Ge(0), pydantic.AllowInfNan(False)]
AtLeastOne = Annotated[int, Ge(1)]

VERSION = 4
FP32_BYTES = 4
# How messages go: within one machine, which also stands for the way between two machines.
LOCAL = "local"
# How messages go between virtual hosts: as real frames or large segments by the kernel, or as forwarded frames.
FRAMES, SEGMENTS, FORWARDED = "frames", "segments", "forwarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSize:
    """One payload of a message; see `collectives.schedule.layout.Leaf`.

    Attributes:
        nbytes: of its packed form, one rank's.
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
        """Return the size of a `collectives.payloads.base.Payload`."""
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
    """CPU time of what is done to a payload, or to a part of one.

    Attributes:
        fixed_s: of any, however short.
        per_byte_s: of a byte more.
    """

    fixed_s: Seconds = 0.0
    per_byte_s: Seconds = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageProfile:
    """A message as one rank offers it to a collective.

    Attributes:
        leaves: its payloads.
        layers: ids of the layers inside, in the order in which they lie in it: not that of the bucket.
        growth: (ranks, bytes of their union / bytes of one rank's payload), measured; ends where it was not.
        merge: adding what came from another rank to what is there, on its way.
        pack_s: seconds to lay the payload out as bytes.
        unpack: reading them.
        decode_s: to add one rank's payload to a dense tensor.
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

    @property
    def unpack_s(self) -> float:
        """Return the seconds to read all of one rank's payload."""
        return self.unpack.fixed_s + self.unpack.per_byte_s * self.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedBucket:
    """The messages and the work that a compressor makes of a bucket.

    Attributes:
        work_s: before each message, and after the last one.
        offers: the messages.
    """

    work_s: tuple[Seconds, ...]
    offers: tuple[MessageProfile, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketParts:
    """A bucket of gradients.

    Attributes:
        ready_s: after backward began.
        layers: ids of its layers, in the order in which they lie in it.
        numels: their elements.
    """

    ready_s: Seconds
    layers: tuple[int, ...]
    numels: tuple[AtLeastOne, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuContention:
    """A step of compute while several ranks make theirs at once on the same cores, begun together.

    Attributes:
        load: threads that compute / cores.
        handed_over_s: when each bucket was ready on the rank that came last.
        computed_s: when backward had ended there.
        cpu_s: CPU time of the whole step, the update included, on average over ranks.
    """

    load: Annotated[float, Gt(0), pydantic.AllowInfNan(False)]
    handed_over_s: tuple[Seconds, ...]
    computed_s: Seconds
    cpu_s: Seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageCosts:
    """Costs of messages beside the time on their links.

    Attributes:
        message_s, per_byte_s: CPU time of a rank for one message, and for one byte, sent or received.
        wake_s: from a short message's arrival until the rank that waits for it goes on.
        carry_byte_s: CPU time of the machine beside its ranks' for a byte on its way between virtual hosts, or of the
            thread that forwards all.
    """

    message_s: Seconds = 0.0
    per_byte_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    carry_byte_s: Seconds = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validated:
    """A configuration that was predicted and measured on the calibrated machine, whose cores all ranks shared.

    Attributes:
        strategy, trigger, straggler, link_trace, ranks_per_host: as in `metrics.csv`.
        error: predicted / measured - 1, of the time of a step.
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
    """A machine and a model, measured.

    Attributes:
        cpu, torch_version, kernels: as in `metrics.csv`.
        cores: that ranks could use.
        model, dataset, optimizer, batch_size, augment, threads, bucket_mb: of the run that was measured.
        batch_s, forward_s, backward_s, update_s: of one rank that has the machine to itself, CPU seconds where several
            threads do not make that more than the time.
        buckets: in the order in which they are ready.
        encoded: by compressor, what it makes of each bucket.
        crowds: the same step among others, by ascending load; the first, of one rank, shows whether it was disturbed.
        messages: their costs by the way that they go.
        around_message_s: CPU time of a rank for one message, sent or received, beside these: what collectives do, and
            what everything takes longer where the rank was computing just before.
        crowded_wake_s: from a message's arrival until the rank goes on, while all cores of its crowd, the last of
            `crowds`, compute.
        validated: what is known of predictions from here.
        cut: what was measured less often than it might have been, for lack of time: "4 of 36 steps".
    """

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
    around_message_s: Seconds = 0.0
    crowded_wake_s: Seconds = 0.0
    augment: bool = True
    validated: tuple[Validated, ...] = ()
    cut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.buckets)
        parts = [len(crowd.handed_over_s) for crowd in self.crowds] + [len(each) for each in self.encoded.values()]
        encoded = [bucket for each in self.encoded.values() for bucket in each]
        fits = all(length == count for length in parts)
        fits = fits and all(len(bucket.work_s) == len(bucket.offers) + 1 for bucket in encoded)
        fits = fits and all(len(bucket.layers) == len(bucket.numels) for bucket in self.buckets)
        fits = fits and all(
            len(set(offer.layers)) == len(offer.layers) and set(offer.layers) <= set(bucket.layers)
            for each in self.encoded.values()
            for bucket, made in zip(self.buckets, each, strict=True)
            for offer in made.offers
        )
        if not (fits and self.buckets and self.crowds and LOCAL in self.messages):
            raise ValueError("buckets, and what was measured of each of them, do not belong together")

    @property
    def was_disturbed(self) -> bool:
        """Tell whether one rank by itself waited for its core for more than a tenth of its time."""
        return self.threads == 1 and self.crowds[0].computed_s > 1.1 * self.computed_s

    @property
    def computed_s(self) -> float:
        """Return the seconds of a step of compute up to the end of backward."""
        return self.batch_s + self.forward_s + self.backward_s

    @property
    def dense_nbytes(self) -> int:
        """Return the bytes of the whole gradient in fp32."""
        return FP32_BYTES * sum(sum(bucket.numels) for bucket in self.buckets)

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            write_json(path, dataclasses.asdict(self))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file") from None

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a file that `write` wrote.

        Raises:
            UsageError: it is not there, or is no such file, or one of another version.
        """
        check_regular(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"the calibration {path} cannot be read: {error.strerror}; make one with bench calibrate --out {path}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no calibration: {error}; make one with bench calibrate") from None
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise UsageError(f"{path} is no calibration of version {VERSION}; make a new one with bench calibrate")
        return cls.of(content, where=str(path))

    @classmethod
    def of(cls, values: Any, where: str = "what was measured") -> Calibration:
        """Build it from plain values, as JSON has them.

        Raises:
            UsageError: they are none.
        """
        try:
            return pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UsageError(f"{where} is no calibration: {field}: {first['msg']}; make a new one") from None
