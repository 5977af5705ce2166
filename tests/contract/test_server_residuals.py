"""A server's answers and its residuals add up to what was pushed, for every order of layers in DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from collectives.base import BoundCollective, Collective
from collectives.options import build
from collectives.payloads import Bundle, Dense, GroupSparse, Sparse
from collectives.payloads.base import Payload
from collectives.payloads.group_sparse import RowSparse
from collectives.payloads.sparse import Seeded
from compressors.base import Compressor
from compressors.group_topk import GroupTopK
from compressors.topk import TopK
from gradwire.exchange.communicator import CompressedSums
from gradwire.exchange.packed_state import pack_state, unpack_state
from tests.testing.compressor_cases import layers_of_shapes, step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

LAYERS = layers_of_shapes((30, 8), (50,), (12, 10), (7,))
NUMEL = sum(layer.numel for layer in LAYERS)
LAID_OUT = [[(0, 1, 2, 3)], [(3, 2), (1, 0)], [(3, 2), (1, 0)], [(3,), (2, 0, 1)]]
"""Keys of each step's messages: DDP's first step is one bucket in registration order, and later ones are reversed."""
WORLD_SIZE = 4


def pushed(kind: str, numels: Sequence[int], step: int, rank: int) -> Payload:
    """Return a payload of integers: their sums do not fit in 16 bits, but are exact in fp32."""
    numel = sum(numels)
    generator = torch.Generator().manual_seed(1000 * numel + 10 * step + rank)
    x = torch.randint(-20_000, 20_001, (numel,), generator=generator).float()
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    match kind:
        case "fp32":
            return Dense(x)
        case "bf16" | "fp16":
            return Dense(x.to(dtype))
        case "seeded":
            return Seeded(numel, step, x[: numel // 3].to(dtype))
        case "group_sparse":
            positions = torch.zeros(-(-numel // 8), dtype=torch.int64)
            return GroupSparse(numel, 8, 1, x[torch.arange(0, numel, 8)].to(dtype), positions)
        case "rows":
            parts = [RowSparse(n, torch.tensor([step % n]), p[:1].view(1, 1).to(dtype)) for n, p in split(x, numels)]
        case _:
            indices = [torch.randperm(n, generator=generator)[: max(1, n // 4)].sort().values for n in numels]
            parts = [Sparse(n, i, p[i].to(dtype)) for i, (n, p) in zip(indices, split(x, numels), strict=True)]
    return parts[0] if len(parts) == 1 else Bundle(parts)


def split(x: torch.Tensor, numels: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    return zip(numels, x.split(list(numels)), strict=True)


def bound(transport: MemoryTransport, options: str, compressor: Compressor) -> BoundCollective:
    sums = CompressedSums(compressor, LAYERS)
    sums.step = step_at(0, transport.rank, transport.world_size)
    return build("collectives", Collective, f"server:{options}").bind(transport, sums)


def add_by_layer_(into: torch.Tensor, total: torch.Tensor, key: Sequence[int]) -> None:
    """Add a message of these layers to a vector of all layers in model order."""
    parts = dict(enumerate(into.split([layer.numel for layer in LAYERS])))
    for layer, part in zip(key, total.split([LAYERS[layer].numel for layer in key]), strict=True):
        parts[layer].add_(part)


def owed(state: dict[str, Any]) -> torch.Tensor:
    """Return the residuals in one rank's state, fp64 [elements of all layers]."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    parts = dict(enumerate(total.split([layer.numel for layer in LAYERS])))
    for (layer, start, stop), residual in state["residuals"].items():
        parts[layer][start:stop].add_(residual)
    return total


def one_step(server: BoundCollective, kind: str, step: int, given: torch.Tensor, got: torch.Tensor) -> list[bytes]:
    """Sum all messages of a step; add what all ranks pushed to `given`, and the answers to `got`."""
    answers = []
    for key in LAID_OUT[step % len(LAID_OUT)]:
        numels = [LAYERS[layer].numel for layer in key]
        terms = [pushed(kind, numels, step, rank) for rank in range(server.transport.world_size)]
        answer = server.sum(terms[server.transport.rank], key).to_dense()
        answers.append(answer.numpy().tobytes())
        add_by_layer_(got, answer, key)
        for rank in range(server.transport.world_size):
            add_by_layer_(given, pushed(kind, numels, step, rank).to_dense(), key)
    return answers


CASES = [
    *((kind, f"downlink={downlink},error_feedback=true") for kind in ("bf16", "fp16", "seeded") for downlink in (
        "dense", "union")),
    *((kind, "downlink=union,error_feedback=true") for kind in ("sparse", "rows", "group_sparse")),
    *((kind, "downlink=recode") for kind in ("sparse", "rows", "group_sparse", "bf16")),
]  # fmt: skip


@pytest.mark.parametrize("placement", ["colocated,root=1", "sharded", "sharded,split_numel=20"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_answers_and_what_is_owed_add_up_to_what_was_pushed(kind: str, options: str, placement: str) -> None:
    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        server = bound(transport, f"{options},placement={placement}", TopK(ratio=0.2, skip=()))
        given, got = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
        for step in range(7):
            if step == 4:  # a dropped step
                one_step(server, kind, step, given.clone(), got.clone())
                server.drop()
                continue
            one_step(server, kind, step, given, got)
            server.commit()
        return given, got, server.state_dict()

    ranks = run_threads(rank, WORLD_SIZE)
    given, got = ranks[0][:2]
    still_owed = sum(owed(state) for _, _, state in ranks)
    assert torch.equal(got + still_owed, given)
    assert not torch.equal(got, given)  # something was lost


@pytest.mark.parametrize("options", ["downlink=recode,error_feedback=false", "downlink=union", "downlink=dense"])
def test_without_error_feedback_nothing_is_owed(options: str) -> None:
    def rank(transport: MemoryTransport) -> dict[str, Any]:
        server = bound(transport, options, TopK(ratio=0.2, skip=()))
        given, got = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
        one_step(server, "sparse", 0, given, got)
        server.commit()
        assert torch.equal(given, got) == (options == "downlink=dense")  # the others lose something
        return server.state_dict()

    assert all(not state["residuals"] for state in run_threads(rank, 2))


def test_what_is_pushed_in_fp32_is_answered_as_it_is() -> None:
    """An optimizer's moments pass through the same server; the residuals of gradients must not be added to them."""

    def rank(transport: MemoryTransport) -> None:
        server = bound(transport, "downlink=dense,error_feedback=true", TopK())
        given, got = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
        one_step(server, "bf16", 0, given, got)
        server.commit()
        before = owed(server.state_dict())
        given, got = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
        one_step(server, "fp32", 1, given, got)
        server.commit()
        assert torch.equal(given, got)
        assert torch.equal(owed(server.state_dict()), before)

    run_threads(rank, WORLD_SIZE)


@pytest.mark.parametrize("resumed_at", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("group_sparse", "downlink=recode"), ("sparse", "downlink=union,error_feedback=true,split_numel=20"),
     ("bf16", "error_feedback=true,split_numel=20")],
)  # fmt: skip
def test_a_resumed_server_answers_as_if_it_had_gone_on(kind: str, options: str, resumed_at: int) -> None:
    def rank(transport: MemoryTransport) -> tuple[list[bytes], list[bytes]]:
        def new() -> BoundCollective:
            return bound(transport, f"{options},placement=sharded", GroupTopK(ratio=0.2, warmup_epochs=0))

        server, ignored = new(), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(resumed_at):
            one_step(server, kind, step, ignored, ignored)
            server.commit()
        later = new()
        later.load_state_dict(unpack_state(pack_state(server.state_dict())))
        answers: list[list[bytes]] = []
        for each in (server, later):
            answers.append([])
            for step in range(resumed_at, 6):
                answers[-1] += one_step(each, kind, step, ignored, ignored)
                each.commit()
        return answers[0], answers[1]

    for went_on, resumed in run_threads(rank, WORLD_SIZE):
        assert went_on == resumed


def test_moving_what_is_owed_is_counted_as_state_and_done_once() -> None:
    """Layers 1 and 0 move to another server with the second layout: 290 fp32 values leave the old one."""

    def rank(transport: MemoryTransport) -> list[int]:
        server = bound(transport, "downlink=recode,placement=sharded", GroupTopK(ratio=0.2, warmup_epochs=0))
        ignored, sent = torch.zeros(NUMEL, dtype=torch.float64), []
        for step in range(3):
            one_step(server, "group_sparse", step, ignored, ignored)
            server.commit()
            sent.append(transport.traffic["state"].nbytes)
        return sent

    first, *others = run_threads(rank, WORLD_SIZE)
    assert first == [0, 4 * NUMEL, 4 * NUMEL]  # rank 0 served all; layers 3 and 2 go to rank 3, layers 1 and 0 to 1
    assert others == [[0, 0, 0]] * 3
