"""K-FAC's mathematics against plain references: moments of layers, factors over ranks, preconditioned gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import nn

from bench.core import spec
from collectives.base import Collective
from collectives.payloads.bundle import Bundle
from collectives.payloads.symmetric import MatrixForm, cholesky
from collectives.transport.base import Traffic
from compressors.floats import NoCompression
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import StepReport
from gradwire.optim.kfac import kl_scale, preconditioned, predicted_change
from gradwire.optim.kronecker import KroneckerLayer, MomentCapture, MomentExchange, kronecker_layers, owned
from tests.testing.compressor_cases import layers_of_shapes
from tests.testing.memory_transport import MemoryTransport, run_threads

SIZES = (5, 3, 8)
DAMPING = 0.003
CARRIED = [("triangle", "native"), ("triangle", "ring"), ("dense", "native"), ("cholesky", "allgather")] + [
    ("cholesky", collective) for collective in ("server", "server:placement=sharded", "ring", "tree")
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_of_outer_products(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.outer(row, row) for row in rows]).mean(0)


def patches(convolution: nn.Conv2d, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the kernel's inputs at each position of each sample, in the order of a filter's weights."""
    (high, wide), (down, right) = convolution.kernel_size, convolution.stride
    (gap_down, gap_right), (above, left) = convolution.dilation, convolution.padding
    padded = nn.functional.pad(x, (left, left, above, above))
    rows = (padded.shape[2] - gap_down * (high - 1) - 1) // down + 1
    columns = (padded.shape[3] - gap_right * (wide - 1) - 1) // right + 1
    return [
        image[
            :,
            i * down : i * down + gap_down * (high - 1) + 1 : gap_down,
            j * right : j * right + gap_right * (wide - 1) + 1 : gap_right,
        ].flatten()
        for image in padded
        for i, j in itertools.product(range(rows), range(columns))
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 4)])
def test_a_linear_layers_moments(bias: bool, shape: tuple[int, ...]) -> None:
    layer = KroneckerLayer(nn.Linear(4, 3, bias=bias))
    x, g = random(*shape), random(*shape[:-1], 3, seed=1)
    rows = [torch.cat([row, torch.ones(int(bias))]) for row in x.view(-1, 4)]
    torch.testing.assert_close(layer.input_moment(x).double(), mean_of_outer_products(rows), rtol=1e-5, atol=1e-6)
    expected = mean_of_outer_products(list(g.view(-1, 3)))
    torch.testing.assert_close(layer.output_moment(g).double(), expected, rtol=1e-5, atol=1e-6)
    assert layer.sizes == (4 + bias, 3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"padding": (0, 2)}, {"dilation": 2}])
def test_a_convolutions_moments_are_those_of_the_published_package(bias: bool, options: dict[str, int]) -> None:
    """The package divides rows, including the bias's 1, by the number of positions before averaging outer products."""
    convolution = nn.Conv2d(2, 3, (3, 2), bias=bias, **options)
    layer, x = KroneckerLayer(convolution), random(4, 2, 7, 6)
    g = random(*convolution(x.float()).shape, seed=1)
    positions = g.shape[2] * g.shape[3]
    rows = [torch.cat([row, torch.ones(int(bias))]) / positions for row in patches(convolution, x)]
    assert len(rows) == 4 * positions
    torch.testing.assert_close(layer.input_moment(x).double(), mean_of_outer_products(rows), rtol=1e-5, atol=1e-7)
    columns = [column / positions for column in g.permute(0, 2, 3, 1).reshape(-1, 3)]
    expected = mean_of_outer_products(columns)
    torch.testing.assert_close(layer.output_moment(g).double(), expected, rtol=1e-5, atol=1e-7)
    assert layer.sizes == (2 * 3 * 2 + bias, 3)


def test_moments_are_symmetric_bit_for_bit() -> None:
    moment = KroneckerLayer(nn.Linear(50, 3)).input_moment(random(33, 50))
    assert torch.equal(moment, moment.T)


def test_gradients_are_read_and_written_as_one_matrix() -> None:
    for module in (nn.Conv2d(2, 3, 2), nn.Linear(4, 3, bias=False)):
        layer = KroneckerLayer(module)
        for parameter in module.parameters():
            parameter.grad = random(*parameter.shape).float()
        matrix = layer.gradient
        assert matrix.shape == layer.sizes[::-1]
        changed = matrix + 1
        layer.replace_gradient(changed)
        assert torch.equal(layer.gradient, changed)


def test_only_layers_with_two_factors_are_taken() -> None:
    frozen = nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 3, padding="same"), nn.BatchNorm2d(2), frozen,
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.Sequential(nn.Linear(2, 2)),
    )  # fmt: skip
    assert [layer.module for layer in kronecker_layers(model)] == [model[0], model[6][0]]
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert [layer.module for layer in kronecker_layers(tied)] == [tied[2]]


def test_moments_are_of_the_last_pass_and_of_wanted_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place activations follow the layers, as in real models; a layer that is called twice has the mean of both."""
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.ReLU(inplace=True), linear, nn.ReLU(inplace=True))
    capture = MomentCapture(model)
    capture.wanted = True
    model(random(4, 3, seed=1).float()).sum().backward()  # of a skipped step
    x = random(4, 3, seed=2).float()
    hidden = torch.relu(linear(x)).detach()
    model(x).sum().backward()
    of_inputs, of_outputs = capture.moments()
    layer = KroneckerLayer(linear)
    torch.testing.assert_close(of_inputs, (layer.input_moment(x) + layer.input_moment(hidden)) / 2)
    last = (linear(hidden) > 0).float()
    first = (last @ linear.weight) * (linear(x) > 0)
    torch.testing.assert_close(of_outputs, (layer.output_moment(first) + layer.output_moment(last)) / 2)
    capture.wanted = False
    monkeypatch.setattr(KroneckerLayer, "input_moment", lambda *_: pytest.fail("nobody wants them"))
    model(x).sum().backward()


def test_autocast_does_not_reach_the_moments() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    capture = MomentCapture(model)
    capture.wanted = True
    x = random(4, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    assert torch.equal(capture.moments()[0], KroneckerLayer(model[0]).input_moment(x))
    assert capture.moments()[1].dtype is torch.float32


def moments_of(rank: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Return moments of fewer samples than rows, so that none has full rank."""
    rows = [random(2, size, seed=10 * rank + size).float() for size in SIZES]
    return [scale * matrix.T @ matrix / 2 for matrix in rows]


def exchange_on(
    transport: MemoryTransport, transfer: MatrixForm, collective: str, dtype: torch.dtype = torch.float32
) -> tuple[MomentExchange, CompressedCommunicator]:
    built = spec.build("collectives", collective)
    assert isinstance(built, Collective)
    channel = CompressedCommunicator(layers_of_shapes((3, 4)), reducer_for(NoCompression()), built, transport)
    return MomentExchange(channel, channel.bind(built), transfer, dtype), channel


def means_of(
    world_size: int, transfer: MatrixForm, collective: str, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Return every rank's means, fp64 [ranks, elements]."""

    def mean(transport: MemoryTransport) -> torch.Tensor:
        means = exchange_on(transport, transfer, collective, dtype)[0].mean(moments_of(transport.rank, scale))
        assert means is not None
        return torch.cat([matrix.flatten() for matrix in means]).double()

    return torch.stack(run_threads(mean, world_size))


def true_means(world_size: int, scale: float = 1.0) -> torch.Tensor:
    everyone = [torch.cat([m.double().flatten() for m in moments_of(rank, scale)]) for rank in range(world_size)]
    return torch.stack(everyone).mean(0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("transfer", "collective"), CARRIED)
def test_all_ways_lead_to_the_mean_with_the_same_bits_on_all_ranks(
    transfer: MatrixForm, collective: str, world_size: int
) -> None:
    means = means_of(world_size, transfer, collective, torch.float32)
    assert all(torch.equal(rank, means[0]) for rank in means)
    torch.testing.assert_close(means[0], true_means(world_size), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "roundoff"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize(("transfer", "collective"), CARRIED)
def test_in_sixteen_bits_neither_small_moments_vanish_nor_large_ones_overflow(
    transfer: MatrixForm, collective: str, dtype: torch.dtype, roundoff: float, scale: float
) -> None:
    means, expected = means_of(2, transfer, collective, dtype, scale)[0], true_means(2, scale)
    largest = expected.split([size**2 for size in SIZES])[2].abs().max()
    assert (means - expected).abs().max() <= 4 * roundoff * largest


def test_means_are_symmetric_bit_for_bit_in_whatever_order_they_were_added() -> None:
    """In a ring, the two halves of a matrix that is sent whole are added in different orders of ranks."""

    def mean(transport: MemoryTransport) -> list[torch.Tensor]:
        means = exchange_on(transport, "dense", "ring", torch.bfloat16)[0].mean(moments_of(transport.rank))
        assert means is not None
        return means

    for means in run_threads(mean, 3):
        assert all(torch.equal(matrix, matrix.T) for matrix in means)


def state_bytes(transfer: MatrixForm, collective: str, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes that all ranks send in one update."""

    def sent(transport: MemoryTransport) -> int:
        exchange, _ = exchange_on(transport, transfer, collective, dtype)
        means = exchange.mean(moments_of(transport.rank))
        assert means is not None
        exchange.factors(means, DAMPING)
        assert transport.traffic["gradient"] == Traffic()
        return transport.traffic["state"].nbytes

    return sum(run_threads(sent, world_size))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_counted_bytes_are_the_closed_forms(world_size: int, dtype: torch.dtype, width: int) -> None:
    """Triangles and factors have (d + 1) / 2d of the elements of whole matrices; 16 bits take half of 32."""
    others, halves = world_size - 1, [size * (size + 1) // 2 for size in SIZES]
    packed = [24 + width * half for half in halves]
    broadcast = sum(
        Bundle.packed_nbytes([packed[i] for i in share]) for share in owned(list(SIZES), world_size) if share
    )
    summed = 2 * others * width * sum(halves)
    assert state_bytes("triangle", "ring", dtype, world_size) == summed + others * broadcast
    assert state_bytes("dense", "ring", dtype, world_size) == 2 * others * width * sum(size**2 for size in SIZES)
    everybody = world_size * others * Bundle.packed_nbytes(packed)
    assert state_bytes("cholesky", "allgather", dtype, world_size) == everybody


@pytest.mark.parametrize("transfer", get_args(MatrixForm))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_factors_are_those_that_every_rank_would_compute_itself(transfer: MatrixForm, world_size: int) -> None:
    """A solve with the broadcast factor equals, bit for bit, the solve with the rank's own factor."""
    means = [matrix + torch.eye(len(matrix)) for matrix in moments_of(0)]
    factors = run_threads(lambda t: exchange_on(t, transfer, "allgather")[0].factors(means, DAMPING), world_size)
    for of_rank in factors:
        for factor, matrix in zip(of_rank, means, strict=True):
            own = cholesky(matrix, DAMPING)
            assert own is not None
            right = random(len(matrix), 4).float()
            assert torch.equal(torch.cholesky_solve(right, factor), torch.cholesky_solve(right, own))
            damped = matrix + DAMPING * torch.eye(len(matrix))
            torch.testing.assert_close(factor @ factor.T, damped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_factor_is_the_same_on_its_owner_and_elsewhere(dtype: torch.dtype) -> None:
    factors = run_threads(lambda t: exchange_on(t, "triangle", "ring", dtype)[0].factors(moments_of(0), DAMPING), 3)
    for other in factors[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, factors[0], strict=True))


@pytest.mark.parametrize("transfer", get_args(MatrixForm))
@pytest.mark.parametrize("lowest", [-0.02, -50.0])
def test_matrices_that_cannot_be_factored_as_asked_are_counted(transfer: MatrixForm, lowest: float) -> None:
    """-0.02 needs ten times the damping of 0.003; -50 cannot be factored, and is raised to the damping."""
    matrices = [torch.eye(3), torch.diag(torch.tensor([1.0, lowest]))]

    def counted(transport: MemoryTransport) -> tuple[list[torch.Tensor], StepReport]:
        exchange, channel = exchange_on(transport, transfer, "allgather")
        return exchange.factors(matrices, DAMPING), channel.finish_step()

    expected = torch.tensor([1.03, 0.01] if lowest == -0.02 else [1.0, DAMPING])
    for (sound, raised), report in run_threads(counted, 2):
        assert report.counts["factor_fallbacks"] == 1
        torch.testing.assert_close(sound @ sound.T, (1 + DAMPING) * torch.eye(3))
        torch.testing.assert_close(raised @ raised.T, torch.diag(expected))


def test_where_one_rank_has_no_factor_to_send_all_send_that_matrix_as_a_triangle() -> None:
    def summed(transport: MemoryTransport) -> tuple[list[torch.Tensor] | None, StepReport]:
        exchange, channel = exchange_on(transport, "cholesky", "allgather")
        moments = [torch.eye(2), torch.diag(torch.tensor([2.0, -1.0 if transport.rank else 3.0]))]
        return exchange.mean(moments), channel.finish_step()

    for means, report in run_threads(summed, 2):
        assert means is not None
        assert report.counts == {"factor_fallbacks": 1, "factor_updates_skipped": 0}
        torch.testing.assert_close(means[0], torch.eye(2))
        assert torch.equal(means[1], torch.diag(torch.tensor([2.0, 1.0])))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("transfer", get_args(MatrixForm))
def test_a_moment_that_is_not_finite_on_one_rank_stops_the_update_on_all(transfer: MatrixForm, value: float) -> None:
    def stopped(transport: MemoryTransport) -> tuple[list[torch.Tensor] | None, StepReport]:
        exchange, channel = exchange_on(transport, transfer, "allgather")
        moments = [torch.eye(2), torch.full((1, 1), value if transport.rank else 1.0)]
        return exchange.mean(moments), channel.finish_step()

    for means, report in run_threads(stopped, 2):
        assert means is None
        assert report.counts["factor_updates_skipped"] == 1


def test_owners_share_the_work() -> None:
    assert owned([1, 9, 8, 8, 1], 2) == [[1, 0, 4], [2, 3]]
    assert owned([3], 2) == [[0], []]


def test_a_preconditioned_gradient_is_the_product_with_both_inverses() -> None:
    a, g = (size * torch.eye(size).double() + random(size, size) @ random(size, size).T for size in (5, 3))
    gradient = random(3, 5, seed=1)
    factors = [torch.linalg.cholesky(matrix) for matrix in (a, g)]
    expected = torch.linalg.inv(g) @ gradient @ torch.linalg.inv(a)
    torch.testing.assert_close(preconditioned(gradient, *factors), expected)
    inverse_of_product = torch.linalg.inv(torch.kron(g, a))  # the curvature itself
    torch.testing.assert_close(preconditioned(gradient, *factors).flatten(), inverse_of_product @ gradient.flatten())


def test_a_step_is_shortened_to_the_predicted_change_that_is_allowed() -> None:
    gradients, changed = [random(2, 3), random(4, 1)], [3 * random(2, 3), 3 * random(4, 1)]
    change = sum(float((g * c).sum()) for g, c in zip(gradients, changed, strict=True))
    assert predicted_change(gradients, changed, 0.1) == pytest.approx(0.01 * change)
    assert kl_scale(0.01 * change, 0.001) == pytest.approx((0.001 / (0.01 * change)) ** 0.5)
    assert kl_scale(0.01 * change, 0.01 * change * 1.01) == 1
    assert kl_scale(0.0, 0.001) == 1
