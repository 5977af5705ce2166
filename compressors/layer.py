"""The arguments of a compressor: a layer, the current step, and the tensors kept between steps.

Random numbers of compressors depend only on a key. `seed_for` computes the key from the run's seed, the step, the layer
and, if ranks must differ, the rank. `collectives/payloads/codec/philox.py` computes the numbers from the key; they are
the same on every device and in any order. PyTorch's global generator is not used, so that data augmentation and dropout
are the same with and without compression.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from collectives.base import Key
from collectives.payloads import Dense

T = TypeVar("T")

Tensors = dict[int, torch.Tensor]  # by layer id, of any shape


@dataclasses.dataclass(eq=False)
class BufferPool:
    """Buffers that are reused in later steps, because touching new memory pages costs more than copying into old ones.

    A buffer that is not released by the end of a step may still be in use, so it is not reused.
    """

    _free: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _lent: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _returned: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _scratch: torch.Tensor | None = None

    def acquire(self, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor, [numel of all layers], with room in front for a `Dense` payload's header."""
        key, numel = tuple([layer.id for layer in layers]), sum([layer.numel for layer in layers])
        buffer = self._free.pop(key, None)
        if buffer is None or buffer.numel() != numel or buffer.dtype != dtype:
            buffer = Dense.room(numel, dtype, device)
        self._lent[key] = buffer
        return buffer

    def release(self, keys: Iterable[Key]) -> None:
        """Mark the buffers for these keys (the ids of the layers in a buffer) as free from the next step on."""
        for key in keys:
            if (buffer := self._lent.pop(key, None)) is not None:
                self._returned[key] = buffer

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor, [numel], which is valid until the next call of this method."""
        old = self._scratch
        if old is None or old.numel() < numel or (old.dtype, old.device) != (dtype, device):
            old = self._scratch = torch.empty(numel, dtype=dtype, device=device)
        return old[:numel]

    def end_step(self) -> None:
        """Keep the buffers that were released in this step, and drop all other buffers."""
        self._free, self._lent, self._returned = self._returned, {}, {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        of_messages = [*self._free.values(), *self._lent.values(), *self._returned.values()]
        return memory_nbytes(of_messages if self._scratch is None else [*of_messages, self._scratch])


@dataclasses.dataclass(eq=False)
class Memory:
    """A compressor's state between steps: named tensors per layer, such as thresholds or warm starts.

    During a step, new tensors are only proposed; `commit` makes them current if the step succeeds on all ranks.

    Attributes:
        scales: the scales on which all ranks agreed in this step, by layer id; not part of the saved state.
        buffers: memory for messages; not part of the saved state.
    """

    scales: dict[int, float] = dataclasses.field(default_factory=dict)
    buffers: BufferPool = dataclasses.field(default_factory=BufferPool)
    _accepted: dict[str, Tensors] = dataclasses.field(default_factory=dict)
    _proposed: dict[str, Tensors] = dataclasses.field(default_factory=dict)
    _derived: dict[str, Any] = dataclasses.field(default_factory=dict)

    def get(self, name: str, layer_id: int) -> torch.Tensor | None:
        """Return a layer's tensor of this name as of the last `commit`; None if there is none yet.

        The caller must not change the tensor.
        """
        return self.by_layer(name).get(layer_id)

    def propose(self, name: str, layer_id: int, tensor: torch.Tensor) -> None:
        """Make `tensor` the layer's tensor of this name at the next `commit`. The caller must not change it later."""
        self._proposed.setdefault(name, {})[layer_id] = tensor

    def by_layer(self, name: str) -> Tensors:
        """Return the tensors of this name for all layers, as of the last `commit`, by layer id."""
        return self._accepted.get(name, {})

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, or the result of an earlier call with this name since the last `commit`.

        `make` must not use tensors that are only proposed.
        """
        if name not in self._derived:
            self._derived[name] = make()
        return cast(T, self._derived[name])

    def commit(self) -> None:
        """Make the tensors proposed since the last `commit` or `drop` current, so that `get` returns them."""
        for name, tensors in self._proposed.items():
            self._accepted.setdefault(name, {}).update(tensors)
        self._proposed, self._derived = {}, {}
        self.buffers.end_step()

    def drop(self) -> None:
        """Discard the tensors that were proposed since the last `commit`; the current tensors stay unchanged."""
        self._proposed = {}
        self.buffers.end_step()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all current and proposed tensors."""
        named = [*self._accepted.values(), *self._proposed.values()]
        return memory_nbytes(tensor for tensors in named for tensor in tensors.values())

    def state_dict(self) -> dict[str, Tensors]:
        """Return copies of the current tensors, by name and layer id."""
        return {name: copies(tensors) for name, tensors in self._accepted.items()}

    def load_state_dict(self, state: dict[str, Tensors]) -> None:
        """Replace all state with copies of the tensors in `state`."""
        self._accepted = {name: copies(tensors) for name, tensors in state.items()}
        self._proposed, self._derived = {}, {}


def memory_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory that holds these tensors; memory that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def copies(tensors: Tensors) -> Tensors:
    """Return clones of the tensors, by layer id."""
    return {layer_id: tensor.clone() for layer_id, tensor in tensors.items()}


LayerKind = Literal["conv", "linear", "attention", "embedding", "norm", "bias", "other"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One parameter of the model.

    Attributes:
        id: position in `model.named_parameters()`, the same on every rank and in every run.
        name: the parameter's name.
        shape: the parameter's shape.
        kind: the parameter's role in the network.
        numel: number of elements.
        filter_axis: for a convolution, the axis of its filters (0, or 1 if transposed); for an embedding, the axis of
            its rows (0); None for other kinds.
        position: from 0 for the first module of the model to 1 for the last; the same for all parameters of a module.
        weight: the parameter itself, read only; None if only shapes are known.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    kind: LayerKind = "other"
    numel: int
    filter_axis: int | None = None
    position: float = 0.0
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The current training step.

    Attributes:
        index: index of the optimizer step, from 0.
        epoch: number of finished epochs; None if it is not known, in which case warm-up epochs are skipped.
        rank: number of this rank in the group that averages gradients.
        world_size: number of ranks in that group.
        seed: seed of the run, from which the compressors' random numbers derive.
        warmup: True if compressors may send more entries during a warm-up; False if they send as few as after a
            warm-up.
        memory: the compressor's state on this rank; empty if the compressor keeps no state.
    """

    index: int
    epoch: int | None
    rank: int
    world_size: int
    seed: int
    warmup: bool = True
    memory: Memory = dataclasses.field(default_factory=Memory, compare=False, repr=False)


def seed_for(layer: Layer, step: Step, *, per_rank: bool) -> int:
    """Return a 63-bit seed for random numbers, which differs between layers, steps and (if `per_rank`) ranks.

    The seed is the same on all machines.
    """
    fields = struct.pack("<QQQQ", step.seed % 2**64, step.index, layer.id, step.rank + 1 if per_rank else 0)
    return int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "little") >> 1


def end_to_end(layers: Sequence[Layer]) -> Layer:
    """Return one flat layer that stands for the concatenation of `layers`; a single layer is returned unchanged."""
    if len(layers) == 1:
        return layers[0]
    numel = sum([layer.numel for layer in layers])
    return Layer(id=layers[0].id, name=f"{layers[0].name}..{layers[-1].name}", shape=(numel,), numel=numel)


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's trainable parameters, in `model.named_parameters()` order.

    A parameter that several modules share counts once, with the kind that the first module gives it. A matrix inside an
    attention module has kind "attention"; the name of such a module's class, or of a base class, ends in "Attention".
    """
    owner: dict[int, tuple[nn.Module, str]] = {}
    in_attention: set[int] = set()
    for module in model.modules():
        for field, parameter in module.named_parameters(recurse=False):
            owner.setdefault(id(parameter), (module, field))
        if any(cls.__name__.endswith("Attention") for cls in type(module).__mro__):
            in_attention.update(map(id, module.modules()))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    modules = dict.fromkeys(id(owner[id(parameter)][0]) for _, parameter in trainable)
    position_of = {module_id: place / max(1, len(modules) - 1) for place, module_id in enumerate(modules)}
    layers = []
    for index, (name, parameter) in enumerate(trainable):
        module, field = owner[id(parameter)]
        kind, axis = next(((kind, axis) for types, kind, axis in _KINDS if isinstance(module, types)), ("other", None))
        if "bias" in field and kind != "norm":
            kind, axis = "bias", None
        elif id(module) in in_attention and kind in ("linear", "other") and parameter.dim() == 2:
            kind = "attention"
        layers.append(
            Layer(
                id=index,
                name=name,
                shape=tuple(parameter.shape),
                kind=kind,
                numel=parameter.numel(),
                filter_axis=axis,
                position=position_of[id(module)],
                weight=parameter,
            )
        )
    return layers


def sparse_gradients(model: nn.Module) -> str | None:
    """Return why a model's gradients cannot be exchanged, if an embedding makes sparse gradients; otherwise None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            embedding = f"Embedding {name}".strip()
            return (
                f"{embedding} makes sparse gradients, which do not fit in buckets; give it sparse=False, and use "
                "compressor row_sparse to send the rows that are not zero"
            )
    return None


def without_gradient(layers: Sequence[Layer]) -> str | None:
    """Return why DDP cannot sum gradients, if backward gave some layers no gradient; None if all layers have one.

    DDP waits for the missing gradients, so it also leaves gradients of other layers out of its sums. DDP itself reports
    this only in the next forward, without the layers' names.
    """
    names = [layer.name for layer in layers if layer.weight is not None and layer.weight.grad is None]
    if not names:
        return None
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"the loss does not depend on {', '.join(names[:_NAMED])}{more}, so backward() gave no gradient there; use it "
        "in every forward(), remove it, or freeze it with requires_grad_(False)"
    )


_NAMED = 6


# Kind and filter axis of the parameters of a module, except for biases.
_KINDS: tuple[tuple[Any, LayerKind, int | None], ...] = (
    ((nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), "norm", None),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), "conv", 0),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), "conv", 1),
    (nn.Linear, "linear", None),
    ((nn.Embedding, nn.EmbeddingBag), "embedding", 0),
)
