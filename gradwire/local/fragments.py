"""Fragments: the parts of a model that are exchanged in turn, and their outer copy, which is equal on all ranks.

Source: Douillard et al. 2023 (DiLoCo, arXiv:2311.08105) for the outer step; Douillard et al. 2025 (Streaming DiLoCo,
arXiv:2501.18512) for dealing blocks to fragments round robin, and for mixing the outer copy with each rank's own
(inner) parameters.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import nn

from collectives.options import Incompatible
from collectives.payloads import Dense, Payload
from collectives.payloads.bundle import UnreducedSum, mean_over_senders_
from compressors.layer import Layer, layers_of, memory_nbytes
from gradwire.exchange.report import EncodedLayer, StepReport
from gradwire.local.options import LocalOptions
from gradwire.step_guard import parameters_of

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of a fragment's outer copy, given the copy's parameters, shaped like those of the model."""


def units_of(model: nn.Module) -> list[list[Layer]]:
    """Return the model's trainable parameters by block, in registration order.

    A block is a direct child of the model, or of a `Sequential`, a `ModuleList` or a `ModuleDict` in it, such as an
    embedding, a block of a transformer or a head. A module that only wraps another module is not itself a block but is
    divided into blocks. So is a module that contains such a list, unless the module is itself an element of such a
    list.
    """
    layer_of = {id(layer.weight): layer for layer in layers_of(model)}
    units = []
    for parameters in _blocks(model):
        unit = [layer_of.pop(id(each)) for each in parameters if id(each) in layer_of]  # shared ones count once
        if unit:
            units.append(unit)
    return units


def _blocks(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    yield list(module.parameters(recurse=False))
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    for child in children:
        has_blocks = _is_list(child) or (not _is_list(module) and any(map(_is_list, child.modules())))
        opens = len(children) == 1 or has_blocks
        if opens and next(child.children(), None) is not None:
            yield from _blocks(child)
        else:
            yield list(child.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def dealt(model: nn.Module, count: int) -> list[list[Layer]]:
    """Divide the model's blocks among `count` fragments, and return the layers of each fragment.

    Block b belongs to fragment b modulo `count`.

    Raises:
        Incompatible: the model has fewer blocks than fragments.
    """
    units = units_of(model)
    if len(units) < count:
        raise Incompatible(
            f"fragments={count} needs a model of as many blocks, and this one has {len(units)}; use "
            f"fragments={max(1, len(units))} or fewer"
        )
    return [
        sorted((layer for unit in units[k::count] for layer in unit), key=lambda layer: layer.id) for k in range(count)
    ]


class Fragment:
    """Layers that are exchanged together, and the outer copy of their parameters, which is equal on all ranks.

    Args:
        layers: the layers; their weights are the rank's own (inner) parameters.
        outer_optimizer: function that makes the optimizer that moves the outer copy.

    Attributes:
        layers: the argument.
        outer: the outer copy, fp32 [elements of all layers].
        optimizer: what `outer_optimizer` returned.

    Raises:
        ValueError: `outer_optimizer` does not return an optimizer of exactly the parameters that it is given.
    """

    def __init__(self, layers: Sequence[Layer], outer_optimizer: OuterOptimizer) -> None:
        self.layers = list(layers)
        self._sizes = [layer.numel for layer in layers]
        self.outer = self._inner()
        parts = zip(self.layers, self.split(self.outer), strict=True)
        self._parameters = [nn.Parameter(part.view(layer.shape)) for layer, part in parts]
        made = outer_optimizer(self._parameters) if callable(outer_optimizer) else None
        wanted = set(map(id, self._parameters))
        if not isinstance(made, torch.optim.Optimizer) or set(map(id, parameters_of(made))) != wanted:
            raise ValueError(
                "outer_optimizer must return a torch.optim.Optimizer of all parameters that it is given; use, for "
                "example, outer_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
            )
        self.optimizer = made

    @property
    def nbytes(self) -> int:
        """Return the bytes of the outer copy and the state of its optimizer."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return memory_nbytes([self.outer, *(value for value in values if isinstance(value, torch.Tensor))])

    def state_dict(self) -> dict[str, Any]:
        """Return the outer copy and the state of its optimizer, which are equal on all ranks."""
        return {"outer": self.outer, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned."""
        self.outer.copy_(state["outer"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each layer's part of `flat`, [elements of all layers], as a view."""
        return cast("Sequence[torch.Tensor]", flat.split(self._sizes))

    def begin(self) -> None:
        """Set the outer copy to this rank's own (inner) parameters, which are equal on all ranks at this time."""
        self.outer.copy_(self._inner())

    def difference(self) -> torch.Tensor:
        """Return the outer copy minus this rank's own parameters, fp32 [elements], to be used like a gradient."""
        inner = self._inner()
        return torch.sub(self.outer, inner, out=inner)

    def step(self, mean: torch.Tensor) -> None:
        """Make a step of the outer optimizer: the gradient of the outer copy is the mean of all ranks' differences.

        Args:
            mean: fp32 [elements], equal on all ranks.
        """
        for parameter, part in zip(self._parameters, self.split(mean), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def adopt(self, alpha: float = 0.0) -> None:
        """Set this rank's own (inner) parameters to alpha * inner + (1 - alpha) * outer.

        Where inner is not finite, the outer copy is used alone.
        """
        for layer, flat in zip(self.layers, self.split(self.outer), strict=True):
            weight, outer = cast(torch.Tensor, layer.weight), flat.view(layer.shape)
            if alpha == 0:
                weight.copy_(outer)
            else:
                weight.mul_(alpha).add_(outer, alpha=1 - alpha)
                weight.copy_(torch.where(weight.isfinite(), weight, outer))

    def _inner(self) -> torch.Tensor:
        weights = [cast(torch.Tensor, layer.weight).detach().flatten() for layer in self.layers]
        return torch.cat([weight.float() for weight in weights]) if len(weights) > 1 else weights[0].float().clone()


@dataclasses.dataclass(kw_only=True, eq=False)
class FragmentExchange:
    """The exchange of one fragment (a part of the model).

    Attributes:
        number: the number of exchanges, of any fragment, that were begun before this one.
        mean: this rank's difference, fp32 [elements of the fragment]; once `done` is complete, the mean over ranks.
        buffers: copies of the model's buffers, which are replaced with values shared by all ranks; empty except with
            the last fragment.
        done: completed at the end of the exchange, with its times and layers.
    """

    number: int
    mean: torch.Tensor
    buffers: list[torch.Tensor]
    done: Future[StepReport] = dataclasses.field(default_factory=Future)

    def state_dict(self) -> dict[str, Any]:
        """Wait for the result of the exchange, and return the exchange with its result."""
        report = self.done.result()
        return {
            "number": self.number,
            "mean": self.mean,
            "buffers": self.buffers,
            "encoded": [vars(part) | {"layer": part.layer.id} for part in report.encoded],
            "seconds": {name: getattr(report, name) for name in ("encode_s", "exchange_s", "exposed_s")},
        }

    @classmethod
    def of_state(cls, state: dict[str, Any], layers: Sequence[Layer]) -> "FragmentExchange":
        """Return the exchange that `state_dict` saved; `layers` are the model's layers."""
        buffers = [buffer.clone() for buffer in state["buffers"]]
        exchange = cls(number=state["number"], mean=state["mean"].clone(), buffers=buffers)
        layer_of = {layer.id: layer for layer in layers}
        encoded = [EncodedLayer(**saved | {"layer": layer_of[saved["layer"]]}) for saved in state["encoded"]]
        exchange.done.set_result(StepReport(**state["seconds"], encoded=encoded))
        return exchange


def combined(total: Payload, numels: Sequence[int], options: LocalOptions) -> Payload:
    """Return a sum of the ranks' messages, weighted as the options say; the caller divides it by the number of ranks.

    Source: the code of SparseLoCo, which averages every element over the ranks that sent it, and scales down the
    messages of a layer that are longer than the median.

    Args:
        total: the sum over ranks, as `allgather` returns it.
        numels: number of elements of each layer in the messages, in order.
        options: the options, of which `average` and `clip` are used.
    """
    if options.average == "ranks" and options.clip == "none":
        return total
    terms = list(total.terms) if isinstance(total, UnreducedSum) else [total]
    factors = _factors(terms, numels) if options.clip == "median" else None
    result = torch.zeros(total.numel, device=total.device)
    for rank, term in enumerate(terms):
        dense = term.to_dense()
        if factors is not None:
            for part, factor in zip(dense.split(list(numels)), factors[rank].tolist(), strict=True):
                part.mul_(factor)
        result += dense
    if options.average == "senders":
        mean_over_senders_(result.mul_(len(terms)), terms)
    return Dense(result)


def _factors(terms: Sequence[Payload], numels: Sequence[int]) -> torch.Tensor:
    """Return min(1, median of the layer's norms over ranks / the rank's norm of the layer), fp64 [ranks, layers].

    With an even number of ranks, the median is the mean of the two middle norms.
    """
    norms = torch.stack([_norms(term.to_dense(), numels) for term in terms])
    median = norms.quantile(0.5, dim=0)
    return torch.where(norms > median, median / norms, torch.ones_like(norms))


def _norms(dense: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    return torch.stack([norm(part) for part in dense.split(list(numels))])
