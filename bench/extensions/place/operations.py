"""Flops and memory traffic of each operation of a traced network, computed from shapes alone.

Matrix products and convolutions are counted by torch.utils.flop_counter; every other operation counts as one flop per
element of its largest tensor. Each tensor is read or written once; a view moves no bytes.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.base import IMAGE_SIZE
from bench.models.base import Model, check_images
from bench.strategies.placed.assignment import Work, parameters_of, trace, work_of
from collectives.options import incompatibility


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One node of the graph.

    Attributes:
        name: name of the node.
        kind: class name of the module, or name of the function or method.
        work: kind of work, which sets the efficiency.
        flops: flops of the forward pass.
        nbytes: bytes that the forward pass reads and writes; 0 for inputs and views, which take no time.
        value_nbytes: bytes of the result.
        parameters: bytes of each trained parameter that the operation reads, by name.
        inputs: names of the operations whose results it reads.
        is_input: True for input data, which the host sends.
        trains: True if a gradient of the result is needed.
        gradients: number of gradients that the backward pass computes here, 0 to 2: one for all inputs together, and
            one for all parameters together. Each takes about as long as the forward pass.
    """

    name: str
    kind: str
    work: Work
    flops: float
    nbytes: int
    value_nbytes: int
    parameters: Mapping[str, int]
    inputs: tuple[str, ...]
    is_input: bool
    trains: bool
    gradients: int


def operations_of(traced: fx.GraphModule, *inputs: torch.Tensor) -> list[Operation]:
    """Return the network's operations, in the order in which they run.

    Args:
        traced: the network on the meta device.
        inputs: one mini-batch on the meta device.

    Raises:
        UsageError: the operations depend on the values of the inputs.
    """
    recorder = _Recorder(traced)
    try:
        recorder.run(*inputs)
    except Exception as error:  # noqa: BLE001 - the network's own code runs on meta tensors and may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"the model's operations cannot be determined from shapes ({reason}); use a model whose operations do not "
            "depend on values"
        ) from None
    return recorder.operations


class _Recorder(fx.Interpreter):
    """Runs every node on meta tensors and records its operation."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.operations: list[Operation] = []
        self._traced = traced
        self._trains: dict[str, bool] = {}

    @override
    def run_node(self, n: fx.Node) -> Any:
        arguments = [self.env[node] for node in n.all_input_nodes]
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        if n.op != "output":
            self.operations.append(self._operation(n, arguments, value, counter.get_total_flops()))
        return value

    def _operation(self, node: fx.Node, arguments: list[Any], value: Any, counted_flops: int) -> Operation:
        results = list(_tensors(value))
        parameters = {name: self._traced.get_parameter(name).nbytes for name in parameters_of(node, self._traced)}
        flows = any(self._trains[producer.name] for producer in node.all_input_nodes)
        trains = (flows or bool(parameters)) and any(result.is_floating_point() for result in results)
        self._trains[node.name] = trains
        made = [result for result in results if result._base is None and all(result is not a for a in arguments)]
        is_computed = bool(made) and node.op.startswith("call_")
        module, kind = None, getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            module = self._traced.get_submodule(str(node.target))
            kind = type(module).__name__
        state = [] if module is None else [*module.parameters(), *module.buffers()]
        touched = [*_tensors(arguments), *results, *state] if is_computed else []
        return Operation(
            name=node.name,
            kind=kind,
            work=work_of(node, self._traced),
            flops=counted_flops or max((tensor.numel() for tensor in touched), default=0),
            nbytes=sum(tensor.nbytes for tensor in touched),
            value_nbytes=sum(result.nbytes for result in results),
            parameters=parameters,
            inputs=tuple(producer.name for producer in node.all_input_nodes),
            is_input=node.op == "placeholder",
            trains=trains,
            gradients=trains * flows + trains * bool(parameters) if is_computed else 0,
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def network_of(
    model: str, *, num_classes: int, batch_size: int, image_size: int = IMAGE_SIZE
) -> tuple[fx.GraphModule, list[Operation]]:
    """Return the traced network of a model and its operations on one mini-batch of square colour images.

    Raises:
        UsageError: there is no such model, it cannot be traced, or it cannot process images of this size.
    """
    with torch.device("meta"):
        network = cast(Model, spec.build("models", model)).build(num_classes)
        traced = trace(network)
        if reason := incompatibility(check_images, network, model, image_size):
            raise UsageError(f"{reason}; use another --model or --image-size")
        return traced, operations_of(traced, torch.empty(batch_size, 3, image_size, image_size))
