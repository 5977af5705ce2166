"""Failures around a hook of `attach`: non-finite gradients, misuse, a lost rank, impossible pairs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from collectives.allreduce import Allgather, BoundAllgather, Native, Ring
from collectives.base import SumEncoder
from collectives.transport.base import Transport, TransportError
from compressors.floats import NoCompression
from compressors.group_topk import GroupTopK
from compressors.layer import Step
from compressors.topk import Dgc, TopK
from compressors.torch_hooks import TorchFp16
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.step_guard import NonFiniteGradient
from tests.testing.ddp_scenes import LR, batch, loss_of, message_of, network, played_by_two, train, wrapped
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("ddp hook failures")  # its ranks run once for all tests


@dataclasses.dataclass(kw_only=True)
class Witness(Allgather):
    """An all-gather that counts committed and dropped steps."""

    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundWitness:
        return BoundWitness(self, transport)


class BoundWitness(BoundAllgather):
    def __init__(self, options: Allgather, transport: Transport) -> None:
        super().__init__(options, transport)
        self.committed = self.dropped = 0

    def commit(self) -> None:
        self.committed += 1

    def drop(self) -> None:
        self.dropped += 1


def bad_gradient(rank: int) -> dict[str, Any]:
    ddp = wrapped()
    hook = attach(ddp, TopK(ratio=0.05), Witness())
    witness = cast(BoundWitness, hook.collective)
    train(ddp, hook, range(2))
    before = hook.state_dict()["reducer"]["residuals"]
    loss = loss_of(ddp, rank, 2)
    (loss * float("nan") if rank == 0 else loss).backward()
    ok = hook.step_ok()
    after = hook.state_dict()["reducer"]["residuals"]
    kept = all(torch.equal(before[key], after[key]) for key in before)
    ddp.zero_grad()
    loss_of(ddp, rank, 3).backward()
    ok_again = hook.step_ok()
    hook.close()
    return {"ok": ok, "kept": kept, "ok_again": ok_again, "collective": (witness.committed, witness.dropped)}


def bad_gradient_raises(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NoCompression(), Allgather(), nonfinite="raise")
    (loss_of(ddp, rank, 0) * float("inf")).backward()
    message = message_of(hook.step_ok)
    hook.close()
    return message


def forgotten(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NoCompression(), Allgather())
    loss_of(ddp, rank, 0).backward()
    message = message_of(lambda: loss_of(ddp, rank, 1).backward())
    hook.close()
    return message


def closed(rank: int) -> str:
    ddp = wrapped()
    attach(ddp, NoCompression(), Allgather()).close()
    return message_of(lambda: loss_of(ddp, rank, 0).backward())


def wrapped_again(rank: int) -> list[str]:
    """Return the errors of training a closed hook's model next to a new DDP over the same network."""
    said = []
    for bucket_view in (False, True):
        first = wrapped(gradient_as_bucket_view=bucket_view)
        hook = attach(first, TopK(ratio=0.05), Allgather())
        train(first, hook, range(2))
        loss_of(first, rank, 2)  # as an evaluation that keeps a graph
        hook.close()
        second = DistributedDataParallel(first.module, gradient_as_bucket_view=bucket_view)
        hook = attach(second, TopK(ratio=0.05), Allgather())
        train(second, hook, range(2, 5))
        hook.close()
        said.append(message_of(lambda: loss_of(first, rank, 5).backward()))  # noqa: B023 - called at once
    return said


def wrapped_while_open(rank: int) -> list[Any]:
    """Return what is said of a new DDP around the network of an open hook, as after an exception, and its weights."""
    first = wrapped()
    attach(first, TopK(ratio=0.05), Allgather())
    loss_of(first, rank, 0).backward()  # no step follows
    first.zero_grad()
    second = DistributedDataParallel(first.module)
    hook = attach(second, TopK(ratio=0.05), Allgather())
    after = train(second, hook, range(3))
    hook.close()
    alone = wrapped()
    hook = attach(alone, TopK(ratio=0.05), Allgather())
    equal = torch.equal(train(alone, hook, range(3)), after)
    hook.close()
    return [equal, message_of(loss_of(first, rank, 5).backward)]


def missed(rank: int) -> dict[str, str]:
    """Return the messages of `step_ok` after steps whose gradients DDP did not hand over, and after legitimate ones."""

    def of(step: Callable[[DistributedDataParallel], object], **options: Any) -> str:
        ddp = wrapped(**options)
        hook = attach(ddp, NoCompression(), Allgather())
        train(ddp, hook, range(2))
        step(ddp)
        message = message_of(hook.step_ok)
        hook.close()
        return message

    def inside_no_sync(ddp: DistributedDataParallel) -> None:
        with ddp.no_sync():
            loss_of(ddp, rank, 2).backward()

    def accumulate(ddp: DistributedDataParallel) -> None:
        inside_no_sync(ddp)
        loss_of(ddp.module, rank, 3).backward()
        loss_of(ddp, rank, 4).backward()

    def in_bf16(ddp: DistributedDataParallel) -> None:
        ddp.bfloat16()
        ddp(batch(rank, 2)[0].bfloat16()).sum().backward()

    def freeze(ddp: DistributedDataParallel) -> None:
        ddp.module[0].requires_grad_(False)
        loss_of(ddp, rank, 2).backward()

    def replace(ddp: DistributedDataParallel) -> None:
        ddp.module[0] = nn.Linear(20, 30)
        loss_of(ddp, rank, 2).backward()

    def use_the_first(ddp: DistributedDataParallel) -> None:
        ddp.module = ddp.module[:1]
        ddp(torch.ones(3, 20)).sum().backward()

    def use_the_last(ddp: DistributedDataParallel) -> None:
        ddp.module = ddp.module[2:]
        ddp(torch.ones(3, 30)).sum().backward()

    return {
        "bare": of(lambda ddp: loss_of(ddp.module, rank, 2).backward()),
        "no_sync": of(inside_no_sync),
        "twice": of(lambda _: None),
        "accumulated": of(accumulate),
        "converted": of(in_bf16),
        "frozen": of(freeze),
        "replaced": of(replace),
        "last unused": of(use_the_first, bucket_cap_mb=3e-4),
        "first unused": of(use_the_last, bucket_cap_mb=3e-4),
    }


Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]
"""(network, optimizer): what happens to them between two steps"""
REFUSED_LATER: dict[str, tuple[Change, str]] = {
    "unfrozen": (lambda net, _: net[0].requires_grad_(True), "0.weight was added, replaced or unfrozen after"),
    "appended": (lambda net, _: net.append(nn.Linear(5, 5)), "3.weight was added, replaced or unfrozen after"),
    "replaced": (lambda net, _: net.__setitem__(0, nn.Linear(20, 30)), "0.weight was added, replaced or unfrozen"),
    "assigned": (
        lambda net, _: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
        "2.weight was added, replaced or unfrozen after",
    ),
    "a new parameter by a parametrization": (
        lambda net, _: nn.utils.parametrizations.weight_norm(net[2]),
        "2.parametrizations.weight.original0 was added, replaced or unfrozen after",
    ),
    "added to the optimizer": (
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]}),
        "a parameter of shape [3, 4] that DDP does not exchange was added to an optimizer; put it into the model",
    ),
}
FOLLOWED: dict[str, Change] = {
    "frozen": lambda net, _: net[2].bias.requires_grad_(False),
    "renamed by a parametrization": lambda net, _: nn.utils.parametrize.register_parametrization(
        net[2], "weight", nn.Identity()
    ),
    "a layer without parameters": lambda net, _: net.append(nn.ReLU()),
    "a group of known parameters": lambda net, optimizer: optimizer.add_param_group(
        {"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.2}
    ),
    "other data": lambda net, _: setattr(net[2].weight, "data", net[2].weight.data.clone()),
    "the optimizer's state loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


def changed_later(rank: int) -> dict[str, str]:
    """Return what is said in the two steps after a change of the model or its optimizer."""
    said = {}
    for name, change in ({name: change for name, (change, _) in REFUSED_LATER.items()} | FOLLOWED).items():
        ddp = DistributedDataParallel(with_a_layer_at_rest(), find_unused_parameters=True)
        optimizer = torch.optim.SGD([each for each in ddp.parameters() if each.requires_grad], lr=LR)
        hook = attach(ddp, NoCompression(), Allgather(), optimizer=optimizer)

        def steps(*indices: int, ddp: Any = ddp, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for index in indices:
                loss_of(ddp, rank, index).backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(0, 1)
        change(ddp.module, optimizer)
        said[name] = message_of(functools.partial(steps, 2, 3))
        hook.close()
    return said


def converted_early(rank: int) -> str:
    """Return what is said if the model is converted after the first step, before DDP makes its buckets again."""
    ddp = wrapped(gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    hook = attach(ddp, NoCompression(), Allgather(), optimizer=optimizer)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    ddp.module.double()
    ddp(batch(rank, 1)[0].double()).sum().backward()
    said = message_of(optimizer.step)
    hook.close()
    return said


def new_optimizer(rank: int) -> list[str]:
    """Return what is said when another optimizer takes over, with and without giving it to the hook."""
    said = []
    for watched in (True, False):
        ddp = wrapped()
        hook = attach(ddp, NoCompression(), Allgather(), optimizer=torch.optim.SGD(ddp.parameters(), lr=LR))
        other = torch.optim.AdamW(ddp.parameters())
        if watched:
            hook.watch(other)
        loss_of(ddp, rank, 0).backward()
        other.step()
        said.append(message_of(loss_of(ddp, rank, 1).backward))
        hook.close()
    return said


def warnings_of(
    compressor: str, prepare: Callable[[CompressionHook], object] = lambda _: None, collective: str = "allgather"
) -> list[str]:
    """Return the warnings of three steps with a prepared hook."""
    ddp = wrapped()
    hook = attach(ddp, compressor, collective)
    prepare(hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, hook, range(3))
    hook.close()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def warned(rank: int) -> list[list[str]]:
    """Return the warnings of three steps: without an epoch, with set_epoch, with start_step, and without a warm-up."""
    step = Step(index=0, epoch=0, rank=rank, world_size=2, seed=0, warmup=False)
    return [
        warnings_of("topk:ratio=0.01"),
        warnings_of("topk:ratio=0.01", lambda hook: hook.set_epoch(0)),
        warnings_of("topk:ratio=0.01", lambda hook: hook.start_step(step)),
        warnings_of("topk:warmup_epochs=0"),
        warnings_of("topk:ratio=0.5"),
    ]


def joined(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NoCompression(), Allgather())
    with ddp.join():
        message = message_of(lambda: loss_of(ddp, rank, 0).backward())
    hook.close()
    return message


def given_back(_: int) -> list[bool]:
    """Return whether the model is alive while its hook is attached, and after the hook was closed twice."""
    ddp = wrapped(gradient_as_bucket_view=True)
    hook = attach(ddp, TopK(ratio=0.05), Allgather())
    train(ddp, hook, range(2))
    model = weakref.ref(ddp)
    del ddp
    lives = [model() is not None]
    hook.close()
    hook.close()
    gc.collect()
    return [*lives, model() is not None]


def changed(change: Callable[[nn.Module], object], model: nn.Module | None = None) -> DistributedDataParallel:
    """Return the network, or another one, changed after it was wrapped."""
    ddp = DistributedDataParallel(model or network(), find_unused_parameters=True)
    change(ddp.module[0])
    return ddp


def with_a_layer_at_rest() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def by_python_reducer() -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def mixed() -> DistributedDataParallel:
    ddp = wrapped()
    ddp.mixed_precision = _MixedPrecision()  # DDP itself accepts this on GPUs only
    return ddp


def delayed() -> DistributedDataParallel:
    model = with_a_layer_at_rest()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return DistributedDataParallel(model, delay_all_reduce_named_params=trained, param_to_hook_all_reduce=trained[0][1])


def hooked() -> DistributedDataParallel:
    ddp = wrapped()
    attach(ddp, NoCompression(), Allgather()).close()
    return ddp


def with_a_built_in_hook() -> DistributedDataParallel:
    ddp = wrapped()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return ddp


def refusals(rank: int) -> dict[str, str]:
    small, large = wrapped(), DistributedDataParallel(nn.Linear(1000, 1000))
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 3, sparse=True)))
    of_two_types = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16)))
    tries: dict[str, Callable[[], Any]] = {
        "pair": lambda: attach(small, TopK(), Native()),
        "missing": lambda: attach(small, Dgc(), Allgather()),
        "range": lambda: attach(small, Dgc(), Allgather(), momentum=1.0),
        "in vain": lambda: attach(small, TopK(), Allgather(), momentum=0.9),
        "buckets": lambda: attach(large, GroupTopK(preset="patent"), Ring()),
        "types": lambda: attach(of_two_types, GroupTopK(scope="model"), Ring()),
        "engine": lambda: attach(small, TorchFp16(), Native()),
        "sparse": lambda: attach(sparse, TopK(), Allgather()),
        "complex": lambda: attach(DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64)), TopK(), Allgather()),
        "frozen": lambda: attach(changed(lambda m: m.weight.requires_grad_(False)), TopK(), Allgather()),
        "thawed": lambda: attach(
            changed(lambda m: m.requires_grad_(True), with_a_layer_at_rest()), TopK(), Allgather()
        ),
        "converted": lambda: attach(changed(lambda m: m.bfloat16()), TopK(), Allgather()),
        "fp64": lambda: attach(DistributedDataParallel(network().double()), TopK(), Allgather()),
        "bare": lambda: attach(network(), TopK(), Allgather()),  # type: ignore[arg-type]
        "FSDP": lambda: attach(
            FullyShardedDataParallel(network(), device_id=torch.device("cpu")),  # type: ignore[arg-type]
            TopK(),
            Allgather(),
        ),
        "FSDP2": lambda: attach(
            fully_shard(network(), mesh=init_device_mesh("cpu", (2,))),  # type: ignore[arg-type]
            TopK(),
            Allgather(),
        ),
        "python": lambda: attach(by_python_reducer(), TopK(), Allgather()),
        "mixed": lambda: attach(mixed(), TopK(), Allgather()),
        "delayed": lambda: attach(delayed(), TopK(), Allgather()),
        "hooked": lambda: attach(hooked(), TopK(), Allgather()),
        "built in": lambda: attach(with_a_built_in_hook(), TopK(), Allgather()),
        "skips": lambda: attach(
            wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True), TopK(), Allgather()
        ),
    }
    return {name: message_of(call) for name, call in tries.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every scene, per rank."""
    scenes = (
        bad_gradient,
        bad_gradient_raises,
        forgotten,
        closed,
        wrapped_again,
        wrapped_while_open,
        missed,
        warned,
        joined,
        given_back,
        refusals,
        changed_later,
        new_optimizer,
        converted_early,
    )
    return played_by_two(scenes, tmp_path_factory.mktemp("ranks"))


def test_one_bad_gradient_skips_the_step_on_all_ranks_and_leaves_no_trace(played: list[dict[str, Any]]) -> None:
    expected = {"ok": False, "kept": True, "ok_again": True, "collective": (3, 1)}
    assert [rank["bad_gradient"] for rank in played] == [expected] * 2


def test_or_it_raises(played: list[dict[str, Any]]) -> None:
    wanted = f"{NonFiniteGradient.__name__}: a gradient was not finite at step 0"
    assert [rank["bad_gradient_raises"] for rank in played] == [wanted] * 2


def test_a_step_that_nobody_asked_about_is_an_error(played: list[dict[str, Any]]) -> None:
    assert played[0]["forgotten"] == (
        "RuntimeError: step_ok() was not called after the last backward(); call it after each"
    )


def test_a_closed_hook_says_so(played: list[dict[str, Any]]) -> None:
    assert "is closed; wrap the model in DDP again" in played[0]["closed"]


def test_a_closed_hook_leaves_the_network_to_a_new_ddp(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert [message.partition(":")[0] for message in rank["wrapped_again"]] == ["RuntimeError"] * 2
        assert all("is closed; wrap the model in DDP again" in message for message in rank["wrapped_again"])


def test_attach_closes_the_open_hook_of_the_same_network(played: list[dict[str, Any]]) -> None:
    for rank in played:
        equal, said = rank["wrapped_while_open"]
        assert equal
        assert "is closed; wrap the model in DDP again" in said


def test_a_step_without_gradients_from_ddp_is_an_error_that_says_why(played: list[dict[str, Any]]) -> None:
    nothing_came = (
        "no gradient came through DDP since the last step_ok(); call ddp(x), not model(x), leave the last "
        "backward() of a step outside no_sync(), and call step_ok() once per step; if the network is trained without "
        "this hook now, call its close()"
    )
    before = "; do that first, then wrap the model in DDP"
    unused = "backward() gave {} no gradient, so DDP did not finish; wrap the model with find_unused_parameters=True"
    for rank in played:
        assert rank["missed"].pop("accumulated") == "no error"
        assert {name: said.removeprefix("RuntimeError: ") for name, said in rank["missed"].items()} == {
            "bare": nothing_came,
            "no_sync": nothing_came,
            "twice": nothing_came,
            "converted": "0.weight was torch.float32 [30, 20] on cpu when the model was wrapped and is torch.bfloat16 "
            "[30, 20] on cpu" + before,
            "frozen": "0.weight was frozen after the model was wrapped" + before,
            "replaced": "0.weight was added, replaced or unfrozen after the model was wrapped" + before,
            "last unused": unused.format("2.weight"),
            "first unused": unused.format("0.weight"),
        }


def test_a_parameter_that_ddp_does_not_exchange_is_refused_before_the_next_update(played: list[dict[str, Any]]) -> None:
    for rank in played:
        for name, (_, sentence) in REFUSED_LATER.items():
            assert rank["changed_later"][name].startswith(f"RuntimeError: {sentence}"), name
        assert {name: rank["changed_later"][name] for name in FOLLOWED} == dict.fromkeys(FOLLOWED, "no error")


def test_a_new_optimizer_must_be_given_to_the_hook(played: list[dict[str, Any]]) -> None:
    for rank in played:
        followed, refused = rank["new_optimizer"]
        assert followed == "no error"
        assert "not followed by optimizer.step()" in refused
        assert refused.endswith("if an optimizer that was made later does the update, give it to hook.watch")


def test_a_conversion_in_the_first_steps_is_named(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert "0.weight was torch.float32 [30, 20] on cpu when the model was wrapped" in rank["converted_early"]


def test_a_density_that_waits_for_its_epoch_warns_once_and_on_one_rank(played: list[dict[str, Any]]) -> None:
    warning = (
        "topk sends more in its first 3 epochs only if hook.set_epoch(epoch) is called before each; "
        "call it, or set warmup_epochs=0 or warmup_steps=N"
    )
    assert played[0]["warned"] == [[warning], [], [], [], []]
    assert played[1]["warned"] == [[]] * 5


def test_ranks_that_join_are_told_that_they_cannot(played: list[dict[str, Any]]) -> None:
    assert [rank["joined"] for rank in played] == [
        "RuntimeError: ddp.join() is not possible with this hook; give every rank equally many batches"
    ] * 2


def test_a_closed_hook_lets_go_of_the_model(played: list[dict[str, Any]]) -> None:
    assert [rank["given_back"] for rank in played] == [[True, False]] * 2


def test_what_cannot_work_is_refused_in_one_sentence_before_anything_starts(
    played: list[dict[str, Any]],
) -> None:
    said = played[0]["refusals"]
    assert said["pair"].startswith("Incompatible: topk sends Sparse payloads: ")
    assert said["missing"].startswith("ValueError: dgc applies the momentum itself")
    assert said["range"] == said["missing"]
    assert said["in vain"].startswith("ValueError: topk applies no momentum")
    assert said["buckets"].endswith("wrap it with DistributedDataParallel(..., bucket_cap_mb=4)")
    assert "parameters of torch.bfloat16 and torch.float32 into separate buckets" in said["types"]
    assert (
        said["sparse"]
        == "ValueError: Embedding 0 makes sparse gradients, which do not fit in buckets; give it sparse=False, and use "
        "compressor row_sparse to send the rows that are not zero"
    )
    assert said["engine"].startswith("ValueError: torch_fp16 is PyTorch's own hook")
    assert said["complex"].startswith("ValueError: weight is complex, which no compressor supports")
    assert said["frozen"].startswith("ValueError: 0.weight was frozen after the model was wrapped; do")
    assert said["thawed"].startswith("ValueError: 0.weight was added, replaced or unfrozen after the model")
    assert said["converted"].startswith(
        "ValueError: 0.weight was torch.float32 [30, 20] on cpu when the model was wrapped and is torch.b"
    )
    assert said["fp64"] == (
        "ValueError: 0.weight is fp64 and topk works in fp32, where its gradient may overflow; "
        "convert the model to fp32, or use compressor none"
    )
    wanted = "ValueError: attach needs a model in DDP and got {}; give it DistributedDataParallel(model)"
    assert said["bare"] == wanted.format("a bare Sequential")
    assert said["FSDP"] == wanted.format("one in FSDP, which reduces gradients itself")
    assert said["FSDP2"].endswith("got one in fully_shard; use gradwire.attach_fsdp")
    assert said["python"].startswith(
        'ValueError: under torch._dynamo.config.optimize_ddp = "python_reducer" DDP has no'
    )
    assert said["mixed"].startswith("ValueError: mixed_precision takes the place of DDP's communication hook")
    assert said["delayed"].startswith("ValueError: delay_all_reduce_named_params leaves DDP without buckets")
    assert said["hooked"].startswith("ValueError: this model already has a communication hook")
    assert said["built in"] == said["hooked"]
    assert said["skips"].startswith("ValueError: with skip_all_reduce_unused_params ranks would not know")


def leave_early(rank: int) -> int | None:
    ddp = wrapped()
    hook = attach(ddp, NoCompression(), Ring())
    train(ddp, hook, range(2))  # in its second step DDP itself communicates, to form new buckets
    if rank == 1:
        return None
    loss_of(ddp, rank, 2).backward()
    with pytest.raises(TransportError) as caught:
        hook.step_ok()
    return caught.value.lost_rank


def test_a_lost_rank_is_named_to_the_training_loop(tmp_path: Path) -> None:
    assert run_ranks(leave_early, 2, tmp_path)[0] == 1
