"""DeMo: ranks exchange the largest frequencies of their momentum, and step along the sign of the mean."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.allreduce import Allgather
from collectives.base import Collective
from collectives.options import Count, Options, PositiveOrZero
from collectives.payloads import Bundle, GroupSparse, Payload, PayloadError, UnreducedSum
from collectives.payloads.bundle import mean_over_senders_
from collectives.refusals import Refusal
from collectives.schedule.rounds import leaves
from compressors.base import Compressor
from compressors.kernels.selection import select_groups
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import FlatOptimizer, Trained, add_flat_, compressor_refusal, flat_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@functools.cache
def dct_matrix(size: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal DCT-II as a matrix, fp32 [size, size]: c = matrix @ x are the frequencies of x."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * places + 1) * places[:, None] / (2 * size)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.float().to(device)


class Tiles:
    """The chunks of one parameter: rectangles with the largest sides, up to `limit`, that divide the parameter's sides.

    A vector is one row. The filters of a convolution are rows of the matrix [outputs, all other dimensions].

    Args:
        shape: the parameter's shape.
        limit: the longest side.
        transform: "dct" to transform every chunk into its frequencies; "none" to leave chunks unchanged.

    Attributes:
        numel: number of elements of a chunk.
    """

    def __init__(self, shape: torch.Size, limit: int, transform: Literal["dct", "none"]) -> None:
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape.numel() // max(1, rows)
        self._height, self._width = (
            max(side for side in range(1, limit + 1) if length % side == 0) for length in (rows, columns)
        )
        self._grid = rows // self._height, columns // self._width
        self._is_transformed = transform == "dct"
        self.numel = self._height * self._width

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frequencies of a parameter's chunks, one chunk after another: fp32 [numel of the parameter]."""
        (down, across), (height, width) = self._grid, (self._height, self._width)
        tiles = x.view(down, height, across, width).transpose(1, 2)
        if self._is_transformed:
            tiles = dct_matrix(height, x.device) @ tiles @ dct_matrix(width, x.device).T
        return tiles.reshape(-1)

    def join(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return the elements of the parameter whose chunks have these frequencies: the inverse of `split`."""
        (down, across), (height, width) = self._grid, (self._height, self._width)
        tiles = frequencies.view(down, across, height, width)
        if self._is_transformed:
            tiles = dct_matrix(height, tiles.device).T @ tiles @ dct_matrix(width, tiles.device)
        return tiles.transpose(1, 2).reshape(-1)


@torch.no_grad()
def demo_update(
    X: Sequence[torch.Tensor],
    G: torch.Tensor,
    M: torch.Tensor,
    lr: float,
    beta: float,
    extract_: Callable[[torch.Tensor], torch.Tensor],
    *,
    lr_inside: bool = True,
    weight_decay: float = 0.0,
) -> None:
    """Update all parameters once: M = beta M + lr G; take Q = extract(M) out of M; X -= lr sign(mean of Q over ranks).

    Args:
        X: the parameters, of any shape, updated in place.
        G: this rank's gradients, laid end to end, fp32 [elements of all parameters].
        M: this rank's momentum, fp32 of the same shape, updated in place; afterwards it contains what was not sent.
        lr: the learning rate.
        beta: share of the momentum that a step keeps.
        extract_: takes the largest frequencies out of M, in place, and returns their mean over ranks, shaped like M.
        lr_inside: multiply gradients by the learning rate before adding them to the momentum, as published.
        weight_decay: share of X removed per step, times lr.
    """
    M.mul_(beta).add_(G, alpha=lr if lr_inside else 1.0)
    signs = extract_(M).sign_()
    if weight_decay:
        add_flat_(X, flat_of(X), -lr * weight_decay)
    add_flat_(X, signs, -lr)


@dataclasses.dataclass(kw_only=True)
class DeMoOptions(Options, name="demo"):
    """DeMo: ranks exchange the largest frequencies of their momentum, and step along the sign of the mean.

    Source: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (arXiv:2411.19870), and its repository
    (bloc97/DeMo, demo.py).
    Differs: indices and values are packed (12 + 32 bits for the default chunk, instead of 64 + 32); the sum over ranks
    has a fixed order; tensors of more than two dimensions count as matrices [first, rest].

    Each rank adds its own gradient, times the learning rate, to its decaying momentum. It cuts every parameter into
    chunks of at most chunk x chunk elements, sends the k largest frequencies (DCT-II) of each chunk, and subtracts them
    from its momentum. All ranks average the frequencies, transform the means back, and step by the learning rate along
    their sign. The mean of a frequency is taken over the ranks that sent it.

    Bytes: (n-1) times a message with one GroupSparse payload per layer; such a payload takes
    24 + z v + min(ceil(z b / 8), ceil(m / 8)) bytes for m elements in chunks of s, with z = k m / s values of v bytes
    and b = ceil(log2 s). For chunks of 64 x 64 and k = 32 that is 93 times less than fp32, and 146 times less with
    value_dtype=bf16; the published code sends 42.7 times less.
    """

    default_lr: ClassVar[float] = 0.001  # 0.0004 in the repository, for 300 million parameters
    default_collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    beta: Annotated[float, Ge(0), Le(1), Doc("share of the momentum that a step keeps")] = 0.999
    k: Annotated[Count, Doc("number of frequencies that a rank sends of each chunk")] = 32
    chunk: Annotated[int, Ge(1), Le(128), Doc("longest side of a chunk; sides divide the parameter's sides")] = 64
    transform: Annotated[
        Literal["dct", "none"], Doc("what is selected: frequencies of the chunks, or the elements themselves (faster)")
    ] = "dct"
    value_dtype: Annotated[Literal["fp32", "bf16"], Doc("type of the values on the wire")] = "fp32"
    lr_inside: Annotated[
        bool, Doc("multiply gradients by the learning rate before adding them to the momentum, as published")
    ] = True
    weight_decay: Annotated[PositiveOrZero, Doc("share of the weight removed per step, times lr")] = 0.0

    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return the reasons why components do not work with these options, as refusals."""
        return [
            compressor_refusal(self.component_name, compressor),
            Refusal(
                not isinstance(collective, Allgather),
                f"{self.component_name} takes means over the ranks that sent a value, for which it needs all messages, "
                f"and {collective.component_name} adds them",
                [{"collective": "allgather"}],
            ),
        ]


class DeMo(FlatOptimizer):
    """DeMo for all parameters; each rank's momentum keeps what was not sent, and gradients must not be averaged.

    The state is the vector "momentum" in `memory`, fp32 [elements of all parameters], which differs between ranks.

    Args:
        model: the network, the same on all ranks, or its parameters.
        lr: the learning rate.
        collective: must be `allgather`, because only `allgather` gives each rank all messages.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `collective`, `group` and `timeout_s`; the caller closes it.
        options: `DeMoOptions`.

    Raises:
        OptionError: an option is unknown or out of range, or the collective does not work with DeMo.
    """

    def __init__(
        self,
        model: Trained,
        lr: float = DeMoOptions.default_lr,
        *,
        collective: Collective | str = "allgather",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        self._options = chosen = DeMoOptions.from_text(options)
        super().__init__(model, lr, chosen.refusals, collective, group, timeout_s, communicator)
        self._tiles = [Tiles(parameter.shape, chosen.chunk, chosen.transform) for parameter in self.parameters]
        self.memory["momentum"] = self.zeros()

    @override
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        options = self._options
        demo_update(
            self.parameters,
            gradient,
            self.memory["momentum"],
            lr,
            options.beta,
            self._extract_,
            lr_inside=options.lr_inside,
            weight_decay=options.weight_decay,
        )

    @property
    @override
    def residual_nbytes(self) -> int:
        return self.memory["momentum"].nbytes

    def _extract_(self, momentum: torch.Tensor) -> torch.Tensor:
        """Take the largest frequencies out of the momentum; return their mean over ranks, transformed back."""
        with self.communicator.exchanging() as report:
            started = time.perf_counter()
            payloads = [
                self._encode(part, tiles) for part, tiles in zip(momentum.split(self.numels), self._tiles, strict=True)
            ]
            report.encode_s = time.perf_counter() - started
            report.encoded = self.encoded(payloads, report.encode_s)
            mean = mean_over_senders(self._gathered(payloads), self.numels)
        parts = zip(self._tiles, mean.split(self.numels), strict=True)
        return torch.cat([tiles.join(part) for tiles, part in parts])

    def _encode(self, momentum: torch.Tensor, tiles: Tiles) -> GroupSparse:
        """Return a layer's largest frequencies, and subtract them from its momentum, fp32 [numel] (mutated)."""
        frequencies, k = tiles.split(momentum), min(self._options.k, tiles.numel)
        positions = select_groups(frequencies, tiles.numel, k, 0)
        values = frequencies[positions].to(_DTYPES[self._options.value_dtype])
        payload = GroupSparse(momentum.numel(), tiles.numel, k, values, positions % tiles.numel)
        momentum.sub_(tiles.join(payload.to_dense()))
        return payload

    def _gathered(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        """Return the messages of all ranks, in rank order."""
        total = self.communicator.collective.sum(
            Bundle(payloads), tuple(layer.id for layer in self.communicator.layers)
        )
        return total.terms if isinstance(total, UnreducedSum) else [total]


def mean_over_senders(terms: Sequence[Payload], numels: Sequence[int]) -> torch.Tensor:
    """Return each element's mean over the ranks that sent it, 0 where no rank did: fp32 [elements of all layers].

    Ranks are added in their order, so that all ranks get the same bits.

    Args:
        terms: the message of each rank, in rank order, with one sparse payload per layer.
        numels: number of elements of each layer.

    Raises:
        PayloadError: a message contains other payloads.
    """
    if any([(type(part), part.numel) for part in leaves(term)] != [(GroupSparse, n) for n in numels] for term in terms):
        raise PayloadError("a rank sent other payloads than one GroupSparse per layer")
    return mean_over_senders_(UnreducedSum(terms).to_dense(), terms)
