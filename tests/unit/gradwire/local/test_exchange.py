"""Local steps against their definition: outer step, fragments, delay, residual, sums, buffers and state."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench.models.gpt import Gpt
from bench.models.resnet import ResNet20
from collectives.options import Incompatible
from gradwire.local import exchange
from gradwire.local.fragments import dealt, units_of
from tests.testing.local_steps import Rank, Scalars, flat, run_local

# Values of both fragments after 0 to 15 steps, by delay and alpha: every step subtracts 2, and outer_lr is 2.
TRAJECTORIES = {
    (0, 0.0): (
        "1 -1 -3 -11 -13 -15 -17 -19 -21 -35 -37 -39 -41 -43 -45 -59",
        "1 -1 -3 -5 -7 -9 -23 -25 -27 -29 -31 -33 -47 -49 -51 -53",
    ),
    (0, 0.5): (
        "1 -1 -3 -8 -10 -12 -14 -16 -18 -24.5 -26.5 -28.5 -30.5 -32.5 -34.5 -40.25",
        "1 -1 -3 -5 -7 -9 -17 -19 -21 -23 -25 -27 -32 -34 -36 -38",
    ),
    (0, 0.25): ("1 -1 -3 -9.5 -11.5 -13.5 -15.5 -17.5 -19.5 -29.375", "1 -1 -3 -5 -7 -9 -20 -22 -24 -26"),
    (1, 0.0): (
        "1 -1 -3 -7 -9 -11 -13 -15 -17 -27 -29 -31 -33 -35 -37 -47",
        "1 -1 -3 -5 -7 -9 -19 -21 -23 -25 -27 -29 -39 -41 -43 -45",
    ),
    (1, 0.5): (
        "1 -1 -3 -6 -8 -10 -12 -14 -16 -21.5 -23.5 -25.5 -27.5 -29.5 -31.5 -35.75",
        "1 -1 -3 -5 -7 -9 -15 -17 -19 -21 -23 -25 -29 -31 -33 -35",
    ),
    (1, 1.0): (" ".join(str(1 - 2 * step) for step in range(16)),) * 2,
    (2, 1.0): (" ".join(str(1 - 2 * step) for step in range(16)),) * 2,
}


def subtract(amount: float) -> Any:
    return lambda model, rank, step: [parameter.sub_(amount) for parameter in model.parameters()]


@pytest.mark.parametrize(("delay", "alpha"), TRAJECTORIES)
def test_fragments_follow_the_published_trajectories(delay: int, alpha: float) -> None:
    def work(rank: Rank) -> list[list[float]]:
        values = [flat(rank.model).tolist()]
        for index in range(15):
            rank.step(subtract(2.0), index)
            values.append(flat(rank.model).tolist())
        return [list(fragment) for fragment in zip(*values, strict=True)]

    wanted = [[float(value) for value in text.split()] for text in TRAJECTORIES[delay, alpha]]
    found = run_local(lambda: Scalars(1.0, 1.0), work, steps=6, fragments=2, delay=delay, alpha=alpha, outer_lr=2.0)
    assert [[fragment[: len(wanted[0])] for fragment in each] for each in found] == [wanted, wanted]


def test_the_outer_step_is_nesterov_momentum_of_torch() -> None:
    def work(rank: Rank) -> list[float]:
        found = []
        for index in range(3):
            rank.step(subtract(1.0), index)
            found.append(float(rank.outer()))
        return found

    options = {"steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
    assert run_local(lambda: Scalars(0.0), work, **options)[0] == pytest.approx([-1.33, -3.227, -5.6343])
    reference = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9)
    for _ in range(3):
        reference.grad = torch.ones(1)
        sgd.step()
    heavy = run_local(lambda: Scalars(0.0), work, **options | {"nesterov": False})[0]
    assert heavy[-1] == pytest.approx(float(reference.detach()))


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))


def drift(model: nn.Module, rank: int, step: int) -> None:
    """Change all parameters and buffers, differently on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    for buffer in model.buffers():
        buffer += 1 + rank


def test_between_exchanges_nothing_is_sent_and_ranks_differ() -> None:
    def work(rank: Rank) -> list[Any]:
        seen = []
        for index in range(6):
            before = sum(entry.nbytes for entry in rank.transport.traffic.values())
            rank.step(drift, index)
            sent = sum(entry.nbytes for entry in rank.transport.traffic.values()) - before
            seen.append((sent, flat(rank.model)))
        traffic = rank.transport.traffic
        return [*seen, (traffic["gradient"].nbytes, traffic["state"].nbytes, traffic["control"].nbytes)]

    one, two = run_local(network, work, ranks=2, collective="native", steps=3)
    for index in range(6):
        exchanges = index % 3 == 2
        assert (one[index][0] > 0, two[index][0] > 0) == (exchanges, exchanges)
        assert torch.equal(one[index][1], two[index][1]) == exchanges
    numel = flat(network()).numel()
    # the model by the formula of native, twice; buffers by ring, and from rank 0 a count with its header and length
    assert one[-1] == (2 * 4 * numel, 2 * (4 * 16 + 16 + 8), 2 * 8)
    assert two[-1] == (2 * 4 * numel, 2 * 4 * 16, 0)


def test_an_evaluation_sees_the_outer_copy_and_changes_nothing() -> None:
    def work(rank: Rank, *, evaluates: bool) -> list[torch.Tensor]:
        seen = []
        for index in range(7):
            rank.step(drift, index)
            if evaluates:
                own = flat(rank.model)
                seen.append(rank.outer())
                rank.local.show_inner()
                assert torch.equal(flat(rank.model), own)
        return [*seen, flat(rank.model)]

    options: dict[str, Any] = {"steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "compressor": "topk:ratio=0.1"}
    options["collective"] = "allgather"
    one, two, three = run_local(network, lambda rank: work(rank, evaluates=True), ranks=3, **options)
    for index in range(7):
        assert torch.equal(one[index], two[index])
        assert torch.equal(one[index], three[index])
    assert not torch.equal(one[0], one[-2])
    undisturbed = run_local(network, lambda rank: work(rank, evaluates=False), ranks=3, **options)
    assert torch.equal(undisturbed[0][-1], one[-1])


@pytest.mark.parametrize("collective", ["ring:requantise=true", "server:downlink=recode"])
def test_random_numbers_do_not_depend_on_how_long_an_exchange_takes(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: Rank, *, waits: int) -> torch.Tensor:
        reduce, may_begin = rank.local.reducer.reduce, threading.Event()

        def slow_reduce(*arguments: Any) -> None:
            may_begin.wait()
            may_begin.clear()
            reduce(*arguments)

        monkeypatch.setattr(rank.local.reducer, "reduce", slow_reduce)
        for index in range(8):
            if index % 4 == 1 + waits:  # an exchange begins after steps 1 and 5, and is due after steps 3 and 7
                may_begin.set()
            rank.step(drift, index)
            if not waits:
                rank.outer()
        return rank.outer()

    options: dict[str, Any] = {"compressor": "qsgd", "collective": collective, "steps": 4, "delay": 2}
    early, late = (run_local(network, lambda rank, waits=waits: work(rank, waits=waits), **options) for waits in (0, 2))
    assert torch.equal(early[0], late[0])
    assert torch.equal(early[1], late[1])


@pytest.mark.parametrize("delay", [0, 1])
def test_an_exchange_that_ends_during_its_delay_exposes_nothing(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(exchange, "time", SimpleNamespace(perf_counter=lambda: now))

    def work(rank: Rank) -> list[tuple[float | None, float | None]]:
        reduce, may_begin = rank.local.reducer.reduce, threading.Event()

        def slow_reduce(*arguments: Any) -> None:
            nonlocal now
            may_begin.wait()
            now += 1.0
            reduce(*arguments)

        monkeypatch.setattr(rank.local.reducer, "reduce", slow_reduce)
        seen = []
        for index in range(2):
            if delay == 0:
                may_begin.set()
            rank.step(drift, index)
            may_begin.set()
            rank.outer()  # waits for the exchange
            seen.append((rank.report.exchange_s, rank.report.exposed_s))
        return seen

    found = run_local(network, work, ranks=1, steps=2, delay=delay)
    assert found == [[(0.0, 0.0), (1.0, 0.0 if delay else 1.0)]]


@pytest.mark.parametrize(
    ("start_after", "wanted"),
    [
        (0, [[0.0, 1.0, 0.0]] * 2 + [[4.5, 5.5, 3.0]] * 2),
        (1, [[1.5, 2.5, 1.0]] * 3 + [[6.0, 7.0, 4.0]]),  # shared after step 1, exchanged after step 4
    ],
)
def test_the_outer_copy_has_the_buffers_of_the_last_exchange(start_after: int, wanted: list[list[float]]) -> None:
    def work(rank: Rank) -> list[Any]:
        seen = []
        for index in range(4):
            rank.step(drift, index)
            own = [buffer.clone() for buffer in rank.model.buffers()]
            rank.outer()
            seen.append([float(buffer.flatten()[0]) for buffer in rank.model.buffers()])
            rank.local.show_inner()
            assert all(map(torch.equal, rank.model.buffers(), own))
        return seen

    # mean, variance and count begin with 0, 1 and 0; in each step rank r adds 1 + r
    assert run_local(network, work, steps=3, start_after=start_after) == [wanted] * 2


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_what_was_sent_and_what_waits_add_up(decay: float) -> None:
    def work(rank: Rank) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        moved, waits, sent = [], [], torch.zeros(0)
        for index in range(6):
            before = flat(rank.model)
            rank.step(drift, index)
            outer = rank.outer()
            generator = torch.Generator().manual_seed(1000 * index + rank.transport.rank)
            noise = [torch.randn(p.shape, generator=generator).flatten() * 0.01 for p in rank.model.parameters()]
            moved.append(-torch.cat(noise))
            residuals = rank.local.reducer.state_dict()["residuals"]
            waits.append(torch.cat([residuals[key].flatten() for key in sorted(residuals)]))
            sent = before - outer  # the mean of what ranks sent, because outer_lr is 1
            moved[-1] = torch.stack([moved[-1], sent])
        return torch.stack(moved), waits, sent

    found = run_local(
        network, work, ranks=2, compressor="topk:ratio=0.05,warmup_epochs=0,value_dtype=fp32", collective="allgather",
        steps=1, decay=decay,
    )  # fmt: skip
    waiting = torch.zeros_like(found[0][1][0])
    for index in range(6):
        moved = (found[0][0][index][0] + found[1][0][index][0]) / 2
        sent = found[0][0][index][1]
        now = (found[0][1][index] + found[1][1][index]) / 2
        torch.testing.assert_close(sent + now, moved + decay * waiting, rtol=1e-5, atol=2e-7)
        waiting = now
    if decay == 1:
        total = sum(each[0].sum(0) for each in found) / 2  # [what moved, what was sent]
        lost = (total[0] - total[1] - waiting).norm() / total[0].norm()
        assert float(lost) < 1e-6


def test_one_step_of_a_whole_message_is_the_mean_of_the_parameters() -> None:
    def work(rank: Rank) -> torch.Tensor:
        for index in range(4):
            rank.step(drift, index)
        return rank.outer()

    sparse = run_local(network, work, compressor="topk:ratio=1,value_dtype=fp32", collective="allgather", steps=2)
    dense = run_local(network, work, steps=2)
    torch.testing.assert_close(sparse[0], dense[0], rtol=1e-6, atol=1e-7)


def test_senders_and_the_median_norm() -> None:
    def work(rank: Rank) -> list[float]:
        rank.step(lambda model, rank, _: next(model.parameters()).sub_(MOVES[rank]), 0)
        return rank.outer().tolist()

    def make() -> nn.Module:
        return nn.ParameterList([torch.zeros(4)])

    options: dict[str, Any] = {"ranks": 3, "collective": "allgather", "steps": 1}
    options["compressor"] = "topk:ratio=0.5,value_dtype=fp32,warmup_epochs=0"
    by_ranks = run_local(make, work, **options)
    assert by_ranks[0] == pytest.approx([-(4 + 8) / 3, -3 / 3, -6 / 3, -5 / 3])
    by_senders = run_local(make, work, average="senders", **options)
    assert by_senders[0] == by_senders[2] == pytest.approx([-(4 + 8) / 2, -3, -6, -5])
    # norms 5, 10 and 5: the message of rank 1 is halved
    clipped = run_local(make, work, clip="median", **options)
    assert clipped[0] == pytest.approx([-(4 + 4) / 3, -3 / 3, -3 / 3, -5 / 3])


MOVES = [torch.tensor([4.0, 3.0, 0, 1.0]), torch.tensor([8.0, 1, 6.0, 0]), torch.tensor([0, 0, 0, 5.0])]


def test_gradients_are_averaged_until_local_steps_start() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        seen = []
        for index in range(4):
            rank.local.start_step(rank.local.step_of(index, 0, 1))
            for parameter in rank.model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank.transport.rank))
            assert rank.local.prepare_gradients_()
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter.sub_(parameter.grad)
            rank.local.after_update()
            seen.append(flat(rank.model))
        return seen

    one, two = run_local(lambda: Scalars(0.0), work, steps=2, start_after=2, outer_lr=0.5)
    assert [float(each) for each in one] == [-0.5, -1.0, -1.0, -1.5]  # half of the mean step of 1, from -1
    assert [float(each) for each in two] == [-0.5, -1.0, -2.0, -1.5]


def test_a_rank_without_a_finite_gradient_skips_its_own_step() -> None:
    def work(rank: Rank) -> bool:
        rank.local.start_step(rank.local.step_of(0, 0, 1))
        for parameter in rank.model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan" if rank.transport.rank else 1))
        return rank.local.prepare_gradients_()

    assert run_local(lambda: Scalars(0.0), work, steps=2) == [True, False]


@pytest.mark.parametrize(("alpha", "of_rank_0"), [(0.0, -0.5), (0.5, -0.75), (1.0, -1.0)])
def test_a_rank_that_is_not_finite_takes_over_the_outer_copy(alpha: float, of_rank_0: float) -> None:
    def work(rank: Rank) -> float:
        rank.step(lambda model, rank, _: next(model.parameters()).sub_(float("inf") if rank else 1.0), 0)
        return float(flat(rank.model))

    assert run_local(lambda: Scalars(0.0), work, steps=1, alpha=alpha) == [of_rank_0, -0.5]


def test_buffers_that_are_not_finite_do_not_spread() -> None:
    def change(model: nn.Module, rank: int, step: int) -> None:
        drift(model, rank, step)
        if rank:
            model[1].running_mean[0] = float("nan")

    def work(rank: Rank) -> list[float]:
        rank.step(change, 0)
        return rank.model[1].running_mean[:2].tolist()

    assert run_local(network, work, steps=1) == [[0.5, 1.5]] * 2  # 0 for the NaN, and 1; 1 and 2


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 3},
        {"steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "outer_momentum": 0.9, "nesterov": True},
        {"steps": 3, "start_after": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("compressor", ["topk:ratio=0.1", "powersgd"])
def test_a_saved_state_goes_on_bit_for_bit_at_every_step(options: dict[str, Any], compressor: str) -> None:
    def work(rank: Rank, stops: int) -> torch.Tensor:
        for index in range(9):
            if index == stops:
                rank.local.show_outer()
                state = copy.deepcopy((rank.model.state_dict(), rank.local.state_dict()))
                for parameter in rank.model.parameters():
                    parameter.data.fill_(7.0)
                again = Rank(rank.transport, rank.model, compressor, "allgather", options)
                again.model.load_state_dict(state[0])
                again.local.load_state_dict(state[1])
                rank = again
            rank.step(drift, index)
        return torch.cat([rank.outer(), *(each.flatten().float() for each in rank.model.buffers())])

    found = [
        run_local(network, lambda rank, stops=stops: work(rank, stops), compressor=compressor, collective="allgather",
                  **options)[0]
        for stops in (99, 1, 2, 3, 4, 5)
    ]  # fmt: skip
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_blocks_are_dealt_round_robin() -> None:
    blocks = [{".".join(layer.name.split(".")[:2]) for layer in unit} for unit in units_of(Gpt(layers=3).build(256))]
    assert len(blocks) == 6  # two embeddings, three blocks, the last normalisation
    assert {"blocks.1"} in blocks
    resnet = ResNet20().build(10)
    fragments = dealt(resnet, 3)
    assert sorted(layer.id for fragment in fragments for layer in fragment) == list(range(len([*resnet.parameters()])))
    assert {layer.name.split(".")[0] for layer in fragments[2]} == {"3", "4", "5", "8"}  # of each stage a block
    with pytest.raises(Incompatible, match="fragments=9 needs a model of as many blocks, and this one has 6; use"):
        dealt(Gpt(layers=3).build(256), 9)


class Parts(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_the_blocks_of_a_decoder_inside_a_language_model_are_blocks() -> None:
    blocks = [
        Parts(attention=nn.Linear(4, 4), mlp=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        for _ in range(3)
    ]
    decoder = Parts(embed=nn.Embedding(9, 4), layers=nn.ModuleList(blocks), norm=nn.LayerNorm(4))
    units = units_of(Parts(model=decoder, head=nn.Linear(4, 9)))
    assert [len(unit) for unit in units] == [1, 6, 6, 6, 2, 2]  # weights and biases
