"""Models: published sizes and shapes, the shortcuts of the thin residual networks, reproducible weights."""

from __future__ import annotations

import itertools

import pytest
import torch
import torchvision
from torch import nn

from bench.core import registry, spec
from bench.models.base import try_forward
from bench.models.resnet import BasicBlock
from collectives.options import Incompatible
from gradwire.exchange.packed_state import bits_hash

PARAMETERS = {
    "linear": 30_730,
    "small_cnn": 193_178,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet56": 853_018,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "vgg11": 28_146_762,
    "gpt": 805_248,
    "ngram_embedding": 6_310_666,
}


def build(text: str, num_classes: int = 10) -> nn.Module:
    model: nn.Module = spec.build("models", text).build(num_classes)  # type: ignore[attr-defined]
    return model


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_every_model_is_listed_here() -> None:
    assert set(registry.entries("models")) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_is_the_published_one(name: str) -> None:
    with torch.device("meta"):
        assert count(build(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["linear", "small_cnn", "resnet20", "resnet18", "resnet50", "vgg11:width=8"])
def test_every_parameter_takes_part(name: str) -> None:
    torch.manual_seed(0)
    network = build(name, num_classes=100)
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 100)
    assert network.training
    logits.square().sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", ["small_cnn", "resnet20", "resnet18", "gpt:layers=2", "ngram_embedding:rows=500"])
def test_weights_follow_the_global_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(name).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_stem_keeps_the_resolution_of_small_images(name: str) -> None:
    with torch.device("meta"):
        network = build(name)
    sizes = {}
    for stage in ("layer1", "layer4"):
        module = network.get_submodule(stage)
        module.register_forward_hook(lambda _, __, output, stage=stage: sizes.update({stage: output.shape[2:]}))
    network(torch.empty(1, 3, 32, 32, device="meta"))
    assert sizes == {"layer1": (32, 32), "layer4": (4, 4)}


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)]
)
def test_with_the_stem_of_imagenet_a_network_is_torchvisions(name: str, num_parameters: int) -> None:
    torch.manual_seed(0)
    ours, theirs = build(f"{name}:stem=imagenet", num_classes=1000), torchvision.models.get_model(name)
    assert count(ours) == num_parameters
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_an_image_that_a_network_cannot_take_is_told_from_its_shapes() -> None:
    with torch.device("meta"):
        linear, resnet = build("linear"), build("resnet18:stem=imagenet")
    sides = {side: torch.empty(2, 3, side, side, device="meta") for side in (32, 64, 224)}
    try_forward(linear, "linear", sides[32])
    with pytest.raises(Incompatible, match=r"linear cannot take inputs of 3x64x64 \("):
        try_forward(linear, "linear", sides[64])
    try_forward(resnet, "resnet18", sides[224])


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_convolutions_have_he_initialisation(name: str) -> None:
    torch.manual_seed(0)
    for module in build(name).modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and module.weight.numel() > 2000:
            # Torchvision's networks are initialised by fan-out, the thin ones by fan-in, as in the paper.
            fan = module.out_channels if name == "resnet18" else module.in_channels
            assert module.weight.std().item() == pytest.approx((2 / (9 * fan)) ** 0.5, rel=0.1)


def test_a_block_adds_a_shortcut_that_subsamples_and_pads_channels_with_zeros() -> None:
    block = BasicBlock(16, 32, stride=2)
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 16, 8, 8)
    shortcut = block.shortcut(x)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert not shortcut[:, :8].any()
    assert not shortcut[:, 24:].any()
    assert torch.equal(BasicBlock(16, 16, stride=1).shortcut(x), x)
    assert torch.equal(block(x), shortcut.relu())


def test_small_cnn_gives_compressors_something_to_do_and_its_options_set_its_size() -> None:
    layers = [module for module in build("small_cnn").modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert {type(layer) for layer in layers if layer.weight.numel() > 16384} == {nn.Conv2d, nn.Linear}
    network = build("small_cnn:width=4,hidden=10")
    # Convolutions 3-4-8-16-16 without bias, each with a scale and an offset per channel, then 256-10-10 with biases.
    assert count(network) == 9 * (3 * 4 + 4 * 8 + 8 * 16 + 16 * 16) + 2 * (4 + 8 + 16 + 16) + 2570 + 110


def test_vgg11_has_the_papers_layers_and_scales_all_of_them_alike() -> None:
    def layers(text: str, kind: type[nn.Conv2d | nn.Linear]) -> list[int]:
        with torch.device("meta"):
            return [module.weight.numel() for module in build(text).modules() if isinstance(module, kind)]

    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    assert layers("vgg11", nn.Conv2d) == [9 * a * b for a, b in itertools.pairwise(channels)]
    assert layers("vgg11", nn.Linear) == [512 * 4096, 4096 * 4096, 4096 * 10]
    quarter = "vgg11:width=16,hidden=1024"
    shares = [sum(layers(text, nn.Linear)) / count(build(text)) for text in ("vgg11:width=32,hidden=2048", quarter)]
    assert shares == pytest.approx([0.672, 0.672], abs=0.001)  # as in full size: mostly fully connected layers


def test_a_parameter_without_dimensions_is_hashed_like_others() -> None:
    scales = [nn.Parameter(torch.tensor(value)) for value in (1.0, 1.0, 2.0)]
    first, same, other = (bits_hash([scale]) for scale in scales)
    assert (first == same, first == other) == (True, False)
