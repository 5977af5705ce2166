"""The assignment of a network's operations to devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.core.errors import UsageError
from bench.extensions.place.assignment import assign, check_values, trace, work_of
from bench.models.base import Model
from bench.models.cnn import Linear, SmallCnn
from bench.models.resnet import ResNet18, ResNet20
from tests.extensions.place.devices import pool_of

ALL = pool_of("gpu", "fpga", "asic", "dpu")
IMAGES = torch.empty(2, 3, 32, 32, device="meta")


@pytest.mark.parametrize(
    "model", [Linear(), SmallCnn(), ResNet20(), ResNet18()], ids=lambda model: model.component_name
)
def test_every_operation_is_on_the_device_of_its_role(model: Model) -> None:
    traced = trace(model.build(10))
    device_of = assign(traced, ALL).device_of
    found = {work_of(node, traced): set() for node in traced.graph.nodes}  # type: ignore[var-annotated]
    for node in traced.graph.nodes:
        if node.op != "output":
            found[work_of(node, traced)].add(device_of[node.name])
    assert found["matrix"] == {"gpu0"}
    assert found.get("convolution", {"fpga0"}) == {"fpga0"}
    assert found.get("activation", {"asic0"}) == {"asic0"}
    assert set(device_of) == {node.name for node in traced.graph.nodes if node.op != "output"}


def test_the_rest_stays_beside_what_makes_its_input_and_the_input_where_it_is_used() -> None:
    traced = trace(SmallCnn().build(10))
    device_of = assign(traced, ALL).device_of
    assert [device_of[name] for name in ("input_1", "_0", "_1", "_2")] == ["fpga0", "fpga0", "fpga0", "asic0"]
    assert device_of["_12"] == "asic0"  # flattens the output of an activation


def test_activations_may_alternate_between_two_roles() -> None:
    traced = trace(SmallCnn().build(10))
    device_of = assign(traced, ALL, "turns").device_of
    assert [device_of[name] for name in ("_2", "_5", "_8", "_11", "_14")] == ["asic0", "dpu0", "asic0", "dpu0", "asic0"]
    assert {assign(traced, ALL, "dpu").device_of[name] for name in ("_2", "_5")} == {"dpu0"}


def test_activations_can_stay_where_their_input_is_made() -> None:
    traced = trace(SmallCnn().build(10))
    device_of = assign(traced, ALL, "producer").device_of
    by_work = {(work_of(node, traced), device_of[node.name]) for node in traced.graph.nodes if node.op != "output"}
    assert {found for found in by_work if found[0] == "activation"} == {("activation", "fpga0"), ("activation", "gpu0")}
    assert set(device_of.values()) == {"fpga0", "gpu0"}


def test_several_devices_of_a_role_take_turns_and_a_module_stays_on_one() -> None:
    layer = nn.Linear(4, 4)
    traced = trace(nn.Sequential(layer, layer, nn.Linear(4, 4)))
    gpus = (*pool_of("gpu"), *(pool_of("gpu")[0].__class__(name="gpu1", role="gpu", kind="gpu"),))
    device_of = assign(traced, gpus).device_of
    assert [device_of[node.name] for node in traced.graph.nodes if node.op == "call_module"] == ["gpu0", "gpu0", "gpu1"]


def test_a_missing_role_is_replaced_and_said() -> None:
    traced = trace(SmallCnn().build(10))
    without_asic = assign(traced, pool_of("gpu", "fpga", "dpu"))
    assert without_asic.device_of["_2"] == "dpu0"
    assert without_asic.notes == ["there is no asic for activation operations; dpu does them"]
    alone = assign(traced, pool_of("gpu"))
    assert set(alone.device_of.values()) == {"gpu0"}
    assert len(alone.notes) == 2


def test_a_traced_network_shares_its_parameters_and_works_on_nothing_in_place() -> None:
    model = ResNet18().build(10)
    traced = trace(model)
    assert [id(p) for p in traced.parameters()] == [id(p) for p in model.parameters()]
    assert [id(b) for b in traced.buffers()] == [id(b) for b in model.buffers()]
    assert any(getattr(module, "inplace", False) for module in model.modules())
    assert not any(getattr(module, "inplace", False) for module in traced.modules())
    x = torch.randn(2, 3, 32, 32)
    model.eval(), traced.eval()
    assert torch.equal(model(x), traced(x))


class Branching(nn.Module):
    """A network whose operations depend on the brightness of the images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Splitting(nn.Module):
    """A network that splits its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=2)
        return left + right


def test_a_network_that_has_no_one_graph_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be traced \(.*\), so its layers cannot be placed by type"):
        trace(Branching())


def test_a_network_whose_operations_hand_on_several_tensors_is_refused() -> None:
    with torch.device("meta"), pytest.raises(UsageError, match="operation chunk makes a tuple instead of one tensor"):
        check_values(trace(Splitting()), IMAGES)


class Changing(nn.Module):
    """A network that changes a tensor in place while another name refers to it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        rows = y.flatten(1)
        match self.what:
            case "part":
                y[:, :1].mul_(2)
            case "viewed":
                y.mul_(2)
            case "buffer":
                self.seen.add_(y.detach().mean((0, 1, 2)))
            case "function":
                torch.relu_(y)
        return rows + y.flatten(1)


@pytest.mark.parametrize("what", ["part", "viewed", "buffer", "function"])
def test_a_network_that_changes_in_place_what_others_see_is_refused(what: str) -> None:
    with torch.device("meta"), pytest.raises(UsageError, match="changes in place a value that other layers"):
        check_values(trace(Changing(what)), IMAGES)


def test_the_shipped_networks_are_not_refused() -> None:
    for model in (SmallCnn(), ResNet20(), ResNet18(), Linear()):
        with torch.device("meta"):
            check_values(trace(model.build(10)), IMAGES)


@pytest.mark.parametrize(
    "text", ["gpt:layers=2,width=12,heads=3,context=9", "ngram_embedding:order=3,rows=500,width=4,hidden=8"]
)
def test_a_model_of_text_is_not_refused(text: str) -> None:
    with torch.device("meta"):
        network = spec.build("models", text).build(256)
        check_values(trace(network), torch.zeros(2, 9, dtype=torch.int64))
