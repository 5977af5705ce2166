"""`attach_fsdp` on four gloo ranks, two replicas of two shards, against one process and against its own promises."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.fsdp.attach import ShardHook, attach_fsdp
from gradwire.step_guard import NonFiniteGradient
from tests.testing.ddp_scenes import LR, Scene, loaded, message_of, saved, weights
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("fsdp")  # its ranks run once for all tests

RANKS, SHARDS = 4, 2
TOPK = "group_topk:ratio=0.01,warmup_epochs=0"


class Network(nn.Module):
    """Two blocks and a parameter of the root; first dimensions that two shards do not divide."""

    def __init__(self, width: int = 31) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(20, width), nn.ReLU()), nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of five classes."""
        out: torch.Tensor = self.head(self.blocks(x)) * self.scale
        return out


def network(width: int = 31) -> Network:
    torch.manual_seed(3)
    return Network(width)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // SHARDS, SHARDS), mesh_dim_names=("replica", "shard"))


def sharded(model: nn.Module | None = None) -> nn.Module:
    """Return the network, its blocks and the rest sharded over this replica's ranks."""
    model = network() if model is None else model
    for block in cast(Iterable[nn.Module], model.blocks):
        fully_shard(block, mesh=mesh()["shard"])
    return cast(nn.Module, fully_shard(model, mesh=mesh()["shard"]))


def attached(model: nn.Module, compressor: str, collective: str = "ring", **options: Any) -> ShardHook:
    return attach_fsdp(model, compressor, collective, replicas=mesh()["replica"].get_group(), **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def whole(model: nn.Module) -> torch.Tensor:
    """Return all parameters, gathered from the shards, as one vector."""
    return torch.cat([cast(DTensor, p).full_tensor().detach().flatten() for p in model.parameters()])


def train(model: nn.Module, hook: ShardHook, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in steps:
        loss_of(model, rank, step).backward()
        assert hook.step_ok()
        optimizer.step()
        optimizer.zero_grad()


def alone(batches: Iterable[list[tuple[int, int]]]) -> torch.Tensor:
    """Return the weights after training in one process, with each step's mean loss over (rank, step) pairs."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for pairs in batches:
        for pair in pairs:
            (loss_of(model, *pair) / len(pairs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def uncompressed(rank: int) -> dict[str, torch.Tensor]:
    after = {}
    for compressor, collective in (
        ("none", "ring"),
        ("none", "native"),
        ("topk:ratio=1.0,value_dtype=fp32", "allgather"),
    ):
        model = sharded()
        hook = attached(model, compressor, collective)
        train(model, hook, rank, range(3))
        hook.close()
        after[f"{compressor} {collective}"] = whole(model)
    return after


def first_weights(rank: int) -> torch.Tensor:
    """Return the weights after `attach_fsdp` to replicas with different ones."""
    torch.manual_seed(rank // SHARDS)
    model = sharded(Network())
    attached(model, "none").close()
    return whole(model)


def sent_bytes(rank: int) -> dict[str, int]:
    sent = {}
    for compressor in ("none", TOPK):
        model = sharded(network(width=400))
        hook = attached(model, compressor)
        train(model, hook, rank, range(1))
        sent[compressor] = hook.traffic["gradient"].nbytes
        hook.close()
    return sent


def mixed_precision(rank: int) -> torch.Tensor:
    model = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh()["shard"], mp_policy=policy)
    hook = attached(model, "none")
    train(model, hook, rank, range(1))
    hook.close()
    return whole(model)


def accumulated(rank: int) -> dict[str, Any]:
    """Train two steps of three micro-steps, which skip the exchange between replicas or all communication."""
    found: dict[str, Any] = {}

    def skip_replicas(model: Any, hook: ShardHook, is_last: bool) -> None:
        hook.set_requires_all_reduce(is_last)

    def skip_all(model: Any, hook: ShardHook, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)

    for tell in (skip_replicas, skip_all):
        model = sharded()
        hook = attached(model, "none")
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        sent = []
        for step in range(2):
            for micro in range(3):
                tell(model, hook, micro == 2)
                (loss_of(model, rank, 3 * step + micro) / 3).backward()
                sent.append(hook.traffic["gradient"].messages)
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
        hook.close()
        found[tell.__name__] = whole(model), sent
    return found


def telescoped(rank: int) -> float:
    """Return the relative error of: gradients of all replicas = what was sent + residuals (times the replicas)."""
    model = sharded()
    hook = attached(model, "group_topk:ratio=0.05,group_size=64,warmup_epochs=0,value_dtype=fp32")
    dense = sharded()
    reference = attached(dense, "none")
    sums = [torch.zeros(0)] * 2
    for step in range(3):
        for index, (each, its_hook) in enumerate(((model, hook), (dense, reference))):
            loss_of(each, rank, step).backward()
            assert its_hook.step_ok()
            gradient = torch.cat([cast(DTensor, p.grad).full_tensor().flatten() for p in each.parameters()])
            sums[index] = gradient + (sums[index] if step else 0)
            each.zero_grad()
    residuals = hook.state_dict()["reducer"]["residuals"]
    kept = torch.cat([whole_residual(hook, residuals, index) for index in range(len(list(model.parameters())))])
    sent, expected = sums
    hook.close()
    reference.close()
    assert not torch.allclose(sent, expected, rtol=0.1)  # something is kept
    return float((sent + kept - expected).norm() / expected.norm())


def whole_residual(hook: ShardHook, residuals: dict[int, torch.Tensor], layer_id: int) -> torch.Tensor:
    """Return a parameter's residual, mean over replicas, from the padded pieces of all shards."""
    (layer,) = [layer for layer in hook.layers if layer.id == layer_id]
    pieces = [torch.zeros(layer.numel) for _ in range(RANKS)]
    dist.all_gather(pieces, residuals[layer_id])
    first, second = ((pieces[shard] + pieces[SHARDS + shard]) / 2 for shard in range(SHARDS))
    sizes = dict(enumerate(p.numel() for p in network().parameters()))
    return torch.cat([first, second])[: sizes[layer_id]]


def resumed(rank: int) -> dict[str, bool]:
    equal = {}
    for compressor, collective, options in (
        ("group_topk:ratio=0.05,group_size=64,warmup_epochs=0", "ring", {}),
        ("topk:ratio=0.1,momentum_correction=true,warmup_epochs=0", "allgather", {"momentum": 0.9}),
        ("powersgd:rank=1,error_feedback=true", "native", {}),
    ):
        undisturbed = sharded()
        hook = attached(undisturbed, compressor, collective, **options)
        train(undisturbed, hook, rank, range(3))
        hook.close()
        first = sharded()
        hook = attached(first, compressor, collective, **options)
        train(first, hook, rank, range(2))
        state, saved_weights = hook.state_dict(), {k: v.clone() for k, v in first.state_dict().items()}
        hook.close()
        torch.manual_seed(rank)
        second = sharded(Network())
        second.load_state_dict(saved_weights)
        hook = attached(second, compressor, collective, **options)
        hook.load_state_dict(state)
        train(second, hook, rank, range(2, 3))
        hook.close()
        equal[compressor] = torch.equal(whole(undisturbed), whole(second))
    return equal


def bad_gradient(rank: int) -> dict[str, Any]:
    """Give one rank a NaN that no other rank sees, because it is in the sum of one shard only."""
    model = sharded()
    hook = attached(model, TOPK)
    train(model, hook, rank, range(2))
    before = hook.state_dict()["reducer"]["residuals"]

    unit = hook._units[0]
    exchange = functools.partial(hook._exchange, unit)

    def spoilt(shard: torch.Tensor) -> None:
        shard[0] = float("nan")
        exchange(shard)

    unit.module.set_all_reduce_hook(spoilt if rank == 3 else exchange)
    loss_of(model, rank, 2).backward()
    unit.module.set_all_reduce_hook(exchange)
    ok = hook.step_ok()
    after = hook.state_dict()["reducer"]["residuals"]
    kept = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    model.zero_grad()
    loss_of(model, rank, 3).backward()
    ok_again = hook.step_ok()
    hook.close()
    return {"ok": ok, "kept": kept, "ok_again": ok_again}


def bad_gradient_raises(rank: int) -> str:
    model = sharded()
    hook = attached(model, "none", nonfinite="raise")
    (loss_of(model, rank, 0) * (float("nan") if rank == 0 else 1)).backward()
    try:
        hook.step_ok()
    except NonFiniteGradient as error:
        return str(error)
    finally:
        hook.close()
    return "no error"


def places(rank: int) -> list[bool]:
    """Return, for each parameter of two models, whether its gradient lies in FSDP2's buffer where its layer is."""
    found = []
    grouped = network()
    fully_shard([grouped.blocks, grouped.head], mesh=mesh()["shard"])
    fully_shard(grouped, mesh=mesh()["shard"])
    for model in (sharded(), grouped):
        hook = attached(model, "none")
        loss_of(model, rank, 0).backward()
        parameters = dict(model.named_parameters())
        for unit in hook._units:
            offset = 0
            for layer in unit.layers:
                found.append(int(cast(DTensor, parameters[layer.name].grad).to_local().storage_offset()) == offset)
                offset += layer.numel
        assert hook.step_ok()
        hook.close()
    return found


def refusals(rank: int) -> dict[str, str]:
    shards = mesh()["shard"].get_group()
    others = cast(dist.ProcessGroup, dist.new_group([2, 3]))
    root_only = network()
    fully_shard(root_only.blocks, mesh=mesh()["shard"])
    table = network()
    table.blocks.append(nn.EmbeddingBag(8, 3, sparse=True))
    with torch.device("meta"):
        empty = network()
    said: dict[str, Callable[[], object]] = {
        "bare": lambda: attached(network(), "none"),
        "ddp": lambda: attached(DistributedDataParallel(network()), "none"),
        "fsdp1": lambda: attached(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), "none"),
        "hsdp": lambda: attached(fully_shard(network(), mesh=mesh()), "none"),  # type: ignore[arg-type]
        "not sharded": lambda: attached(root_only, "none"),
        "pair": lambda: attached(sharded(), "topk", "native"),
        "auto": lambda: attached(sharded(), "auto"),
        "torch": lambda: attached(sharded(), "torch_fp16", "native"),
        "one bucket": lambda: attached(sharded(), "group_topk:scope=model"),
        "momentum": lambda: attached(sharded(), "none", momentum=0.9),
        "shards": lambda: attach_fsdp(sharded(), "none", "ring", replicas=shards),
        "meta": lambda: attached(sharded(empty), "none"),
        "sparse": lambda: attached(sharded(table), "row_sparse"),
        "fp64": lambda: attached(sharded(network().double()), "group_topk"),
    }
    found = {name: message_of(call) for name, call in said.items()}
    if rank < 2:
        found["outside"] = message_of(lambda: attach_fsdp(sharded(), "none", "ring", replicas=others))
    return found


def misuse(rank: int) -> dict[str, str]:
    found = {}
    model = sharded()
    hook = attached(model, "none")
    found["no backward"] = message_of(hook.step_ok)
    loss_of(model, rank, 0).backward()
    found["twice"] = message_of(lambda: loss_of(model, rank, 0).backward())
    hook.close()
    model = sharded()
    hook = attached(model, "none")
    hook.close()
    hook.close()
    found["closed"] = message_of(lambda: loss_of(model, rank, 0).backward())

    class Unused(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.blocks(x))
            return out

    model = sharded(Unused())
    hook = attached(model, "none")
    found["unused"] = message_of(lambda: loss_of(model, rank, 0).backward())
    hook.close()
    model = sharded(Unused())
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    hook = attached(model, "none")
    loss_of(model, rank, 0).backward()
    found["zeros"] = str(hook.step_ok())
    state = hook.state_dict()
    state["shard"] = [state["shard"][0], 4]
    found["other shards"] = message_of(lambda: hook.load_state_dict(state))
    hook.close()

    class Skipping(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.nn.functional.pad(x, (0, 11))) * self.scale
            return out

    model = sharded(Skipping())
    hook = attached(model, "none")
    loss_of(model, rank, 0).backward()
    found["skipped"] = message_of(hook.step_ok)
    hook.close()
    model = sharded()
    hook = attached(model, "group_topk")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, hook, rank, range(2))
    found["epoch"] = " ".join(str(warning.message) for warning in caught)
    hook.close()
    return found


def append_bare(model: Any) -> None:
    model.blocks.append(nn.Linear(31, 31))


def append_sharded(model: Any) -> None:
    model.blocks.append(fully_shard(nn.Linear(31, 31), mesh=mesh()["shard"]))


def swap_frozen(model: Any) -> None:
    model.blocks[1][0].bias.requires_grad_(False)
    model.blocks[1][1].bias.requires_grad_(True)  # of the same size


def load_anew(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


LATER: dict[Callable[[Any], None], str] = {
    append_bare: "RuntimeError: blocks.2.weight is not sharded, so FSDP2 does not reduce its gradient; call",
    append_sharded: "RuntimeError: blocks.2.bias was added, removed, replaced, frozen or unfrozen after the hook was",
    swap_frozen: "RuntimeError: blocks.1.0.bias was added, removed, replaced, frozen or unfrozen after the hook was",
    load_anew: "no error",
}
"""what happens to a model between two steps, and what is said before the next update"""


def changed_later(rank: int) -> dict[str, str]:
    said = {}
    for change in LATER:
        model = network()
        model.blocks[1][1].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        model = cast(Network, sharded(model))
        hook = attached(model, "none")
        train(model, hook, rank, range(2))
        change(model)
        said[change.__name__] = message_of(functools.partial(train, model, hook, rank, range(2, 4)))
        hook.close()
    return said


TRAINING: list[Scene] = [uncompressed, first_weights, sent_bytes, mixed_precision, accumulated, telescoped, resumed]
FAILURES: list[Scene] = [bad_gradient, bad_gradient_raises, places, refusals, misuse, changed_later]
Results = list[dict[str, Any]]
"""by rank: the results of the scenes"""


def play(rank: int, scenes: list[Scene]) -> bytes:
    return saved({scene.__name__: scene(rank) for scene in scenes})


def played(scenes: list[Scene], folder: Path) -> Results:
    return [loaded(result) for result in run_ranks(play, RANKS, folder, args=(scenes,))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return played(TRAINING, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return played(FAILURES, tmp_path_factory.mktemp("fsdp"))


def test_dense_training_equals_one_process(results: Results) -> None:
    expected = alone([(rank, step) for rank in range(RANKS)] for step in range(3))
    for name, after in results[0]["uncompressed"].items():
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(result["uncompressed"][name], after) for result in results)


def test_replicas_start_with_the_weights_of_the_first(results: Results) -> None:
    torch.manual_seed(0)
    expected = weights(Network())
    assert all(torch.equal(result["first_weights"], expected) for result in results)


def test_group_topk_sends_50_times_fewer_bytes_between_replicas(results: Results) -> None:
    for result in results:
        assert result["sent_bytes"]["none"] >= 50 * result["sent_bytes"][TOPK] > 0


def test_bf16_gradients_give_about_the_same_step(results: Results) -> None:
    expected = alone([[(rank, 0) for rank in range(RANKS)]])
    for result in results:
        torch.testing.assert_close(result["mixed_precision"], expected, rtol=0, atol=2e-3)
        assert torch.equal(result["mixed_precision"], results[0]["mixed_precision"])


def test_accumulation_sends_once_and_equals_one_large_batch(results: Results) -> None:
    pairs = [[(rank, 3 * step + micro) for micro in range(3) for rank in range(RANKS)] for step in range(2)]
    expected = alone(pairs)
    for result in results:
        for after, messages in result["accumulated"].values():
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
            once = messages[2]
            assert messages == [0, 0, once, once, once, 2 * once]
            assert once > 0


def test_sent_gradients_and_residuals_add_up_to_all_gradients(results: Results) -> None:
    assert all(result["telescoped"] < 1e-6 for result in results)


def test_a_resumed_run_equals_an_undisturbed_one(results: Results) -> None:
    for result in results:
        assert len(result["resumed"]) == 3
        assert all(result["resumed"].values()), result["resumed"]


def test_nan_on_one_rank_skips_the_step_on_all(failures: Results) -> None:
    for result in failures:
        assert result["bad_gradient"] == {"ok": False, "kept": True, "ok_again": True}
        assert result["bad_gradient_raises"] == "a gradient was not finite at step 0"


def test_layers_lie_where_fsdp_puts_them(failures: Results) -> None:
    for result in failures:
        assert len(result["places"]) == 2 * len(list(network().parameters()))
        assert all(result["places"])


def test_refusals_say_what_to_do(failures: Results) -> None:
    said = failures[0]["refusals"]
    needs = "ValueError: compression in FSDP2 needs a model in fully_shard and got "
    for name, begin in {
        "bare": needs + "a bare Network; call fully_shard on its blocks",
        "ddp": needs + "one in DDP; use attach",
        "fsdp1": needs + "one in FSDP1; call fully_shard",
        "hsdp": "ValueError: scale is sharded over a mesh of 2 dimensions, as in native HSDP",
        "not sharded": "ValueError: scale is not sharded, so FSDP2 does not reduce its gradient; call fully_shard on",
        "pair": "Incompatible: topk sends Sparse payloads: native adds",
        "auto": "ValueError: auto works through DDP's communication hook",
        "torch": "ValueError: torch_fp16 works through DDP's communication hook",
        "one bucket": "ValueError: group_topk wants the whole model as one bucket with these options, and fully_shard",
        "momentum": "ValueError: none applies no momentum",
        "shards": "ValueError: rank 0 holds shard 0 of 2 and rank 1 shard 1 of 2, and replicas must join",
        "fp64": "ValueError: scale is fp64 and group_topk works in fp32",
        "sparse": "ValueError: Embedding blocks.2 makes sparse gradients, which do not fit in buckets; give it",
        "meta": "ValueError: scale is on the meta device; call model.to_empty",
        "outside": "ValueError: rank 0 is not in its group of replicas; with a mesh of (replica, shard) pass",
    }.items():
        assert said[name].startswith(begin)


def test_misuse_raises(failures: Results) -> None:
    for result in failures:
        said = result["misuse"]
        assert said["no backward"].startswith("RuntimeError: no gradient was exchanged since the last step_ok()")
        assert said["twice"].startswith("RuntimeError: blocks.1 was reduced twice since the last step_ok(); call")
        assert said["closed"] == "RuntimeError: the hook of this model is closed; attach one again"
        assert said["unused"].startswith("RuntimeError: FSDP2 reduced 96 elements of the model instead of 99, because")
        assert said["zeros"] == "True"
        assert "shard 0 of 4, and this rank holds shard 0 of 2" in said["other shards"].replace("shard 1", "shard 0")
        assert said["skipped"].startswith("RuntimeError: backward() did not reach blocks.0, and every module")
    assert failures[0]["misuse"]["epoch"].count("hook.set_epoch(epoch)") == 1


def test_a_parameter_that_replicas_do_not_exchange_is_refused_before_the_next_update(failures: Results) -> None:
    for result in failures:
        for change, begin in LATER.items():
            assert result["changed_later"][change.__name__].startswith(begin)
