"""Trainers with compressed gradients make the updates of a plain loop, and resume as if they had never stopped."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach
from gradwire.ddp.hook import CompressionHook
from tests.testing.ddp_scenes import batch, loaded, message_of, network, saved, weights
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.slow

PAIR = ("group_topk:ratio=0.05,group_size=100,warmup_epochs=1", "ring")
EPOCH = 30
"""Steps; every run has two epochs, with the same batches in both."""
BATCH = 16


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's batch; one batch of rank 0 makes a gradient that is not finite."""
    x, y = batch(rank, step)
    return (x * float("nan") if (rank, step) == (0, 7) else x), y


def descent(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def result(model: nn.Module, hook: CompressionHook) -> dict[str, Any]:
    """Return all that must be equal between runs; the bytes are of the steps of this process."""
    return {
        "weights": weights(model),
        "nbytes": hook.traffic["gradient"].nbytes,
        "state": hook.state_dict(),
    }


def plain(rank: int) -> tuple[dict[str, Any], int]:
    """Return the result of a loop without a trainer, and the bytes of its second epoch."""
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer, hook = descent(ddp), attach(ddp, *PAIR)
    num_skipped = first = 0
    for step in range(2 * EPOCH):
        hook.set_epoch(step // EPOCH)
        if step == EPOCH:
            first = hook.traffic["gradient"].nbytes
        x, y = samples(rank, step % EPOCH)
        nn.functional.cross_entropy(ddp(x), y).backward()
        if hook.step_ok():
            optimizer.step()
        else:
            num_skipped += 1
        optimizer.zero_grad()
    hook.close()
    assert num_skipped == 2
    return result(ddp.module, hook), hook.traffic["gradient"].nbytes - first


def with_lightning(rank: int, folder: Path) -> Iterator[Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader, TensorDataset

    from gradwire.trainers.lightning import GradwireDDPStrategy

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, pair: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.network(pair[0]), pair[1])

        def configure_optimizers(self) -> torch.optim.SGD:
            return descent(self)

    data = TensorDataset(*map(torch.cat, zip(*(samples(rank, step) for step in range(EPOCH)), strict=True)))
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def trained(checkpoint: str | None) -> dict[str, Any]:
        strategy, model = GradwireDDPStrategy(*PAIR), Classifier()
        trainer = Trainer(
            **silent,
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            max_epochs=2,
            use_distributed_sampler=False,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
        )
        trainer.fit(model, DataLoader(data, BATCH), ckpt_path=checkpoint)
        trainer.save_checkpoint(folder / "after.ckpt")  # when the hook is closed
        assert (folder / f"gradwire-{rank}-after.safetensors").is_file()
        return result(model.network, strategy.hook)

    yield trained(None)
    yield trained(str(folder / "epoch=0.ckpt"))
    dist.barrier()
    (folder / "gradwire-1-epoch=0.safetensors").unlink(missing_ok=True)
    yield message_of(lambda: trained(str(folder / "epoch=0.ckpt")))
    scaled = GradwireDDPStrategy(*PAIR)
    scaled.precision_plugin = SimpleNamespace(scaler=object())
    yield [
        message_of(scaled._register_ddp_hooks),
        message_of(lambda: GradwireDDPStrategy(*PAIR, ddp_comm_hook=print)),
        message_of(lambda: GradwireDDPStrategy(*PAIR).remove_checkpoint("memory://a.ckpt")),
    ]


def with_accelerate(rank: int, folder: Path) -> Iterator[Any]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from gradwire.trainers.accelerate import GradwireHandler, check

    def trained(checkpoint: str | None) -> dict[str, Any]:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=10)])
        model = network()
        optimizer = descent(model)
        handler = GradwireHandler(accelerator, *PAIR, optimizer=optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert model.bucket_bytes_cap == 10 << 20
        if checkpoint:
            accelerator.load_state(checkpoint)
        for step in range(EPOCH if checkpoint else 0, 2 * EPOCH):
            if step == EPOCH and not checkpoint:
                accelerator.save_state(str(folder / "half"))
            handler.hook.set_epoch(step // EPOCH)
            x, y = samples(rank, step % EPOCH)
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        handler.close()
        return result(model.module, handler.hook)

    yield trained(None)
    yield trained(str(folder / "half"))
    dist.barrier()
    (folder / "half" / "gradwire-1.safetensors").unlink(missing_ok=True)
    yield message_of(lambda: trained(str(folder / "half")))

    def of(**changes: Any) -> Any:
        return SimpleNamespace(
            **{"distributed_type": Accelerator().distributed_type, "multi_device": False, "mixed_precision": "no"}
            | changes
        )

    model = network()
    accelerator, optimizer = Accelerator(cpu=True), descent(model)
    hooked = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    prepared = accelerator.prepare(optimizer)
    yield [
        message_of(lambda: check(of(mixed_precision="fp16"))),
        message_of(lambda: check(of(distributed_type=type(accelerator.distributed_type).NO))),
        message_of(lambda: check(of(distributed_type=type(accelerator.distributed_type).FSDP))),
        message_of(lambda: GradwireHandler(hooked, *PAIR, optimizer=optimizer)),
        message_of(lambda: GradwireHandler(accelerator, *PAIR, optimizer=prepared)),
        message_of(lambda: GradwireHandler(accelerator, *PAIR, optimizer=optimizer).close()),
    ]


def with_transformers(rank: int, folder: Path) -> Iterator[Any]:
    from transformers import Trainer, TrainingArguments

    from gradwire.trainers.transformers import GradwireCallback

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    # rank r takes batches r, r + 2, ...
    order = [samples(rank, step) for step in range(EPOCH) for rank in range(2)]
    data = [{"x": x, "labels": y} for batch in order for x, y in zip(*batch, strict=True)]

    def trained(checkpoint: str | None, output: str = "out") -> dict[str, Any]:
        model = Classifier()
        arguments = TrainingArguments(
            str(folder / output),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="epoch",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(descent(model), None))
        trainer.evaluate(data[:2])
        callback = GradwireCallback(trainer, *PAIR)
        trainer.add_callback(callback)
        trainer.evaluate(data[:2])  # before training, and after: neither changes it
        trainer.predict(data[:2])
        trainer.train(resume_from_checkpoint=checkpoint)
        return result(model.network, callback.hook)

    half = folder / "out" / f"checkpoint-{EPOCH}"
    yield trained(None)
    yield trained(str(half))
    other = folder / "other" / half.name  # of the same step, with other weights
    other.mkdir(parents=True, exist_ok=True)
    own = f"gradwire-{rank}.safetensors"
    (other / own).write_bytes((half.with_name(f"checkpoint-{2 * EPOCH}") / own).read_bytes())
    dist.barrier()
    elsewhere = message_of(lambda: trained(str(half), "other"))
    dist.barrier()
    (half / "gradwire-1.safetensors").unlink(missing_ok=True)
    yield message_of(lambda: trained(str(half)))
    yield [elsewhere]


STEPS, FAILS_AFTER = 5, 3
"""Steps of a training, and of one before it that an exception ended."""


def fresh(model: nn.Module) -> torch.optim.SGD:
    """Give the network its first weights, and return an optimizer without a state."""
    model.load_state_dict(network().state_dict())
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lightning_again(rank: int, folder: Path) -> Iterator[torch.Tensor]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader

    from gradwire.trainers.lightning import GradwireDDPStrategy

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.fails = False

        def training_step(self, pair: list[torch.Tensor], number: int) -> torch.Tensor:
            if self.fails and number == FAILS_AFTER:
                raise KeyError("as a user's code may")
            return nn.functional.cross_entropy(self.network(pair[0]), pair[1])

        def configure_optimizers(self) -> torch.optim.SGD:
            return fresh(self.network)

    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    loader = DataLoader([batch(rank, step) for step in range(STEPS)], batch_size=None)  # type: ignore[arg-type]

    def trainer_of(strategy: GradwireDDPStrategy) -> Trainer:
        return Trainer(
            **silent,
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            max_epochs=1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )

    def failed() -> tuple[Classifier, Trainer]:
        model, trainer = Classifier(), trainer_of(GradwireDDPStrategy(*PAIR))
        model.fails = True
        with pytest.raises(KeyError):
            trainer.fit(model, loader)
        model.fails = False
        return model, trainer

    model, again = failed()
    again.fit(model, loader)
    assert again.global_step > FAILS_AFTER
    for model in (Classifier(), failed()[0]):
        for _ in range(2):
            trainer_of(GradwireDDPStrategy(*PAIR)).fit(model, loader)
            yield weights(model.network)


def accelerate_again(rank: int, folder: Path) -> Iterator[torch.Tensor]:
    from accelerate import Accelerator

    from gradwire.trainers.accelerate import GradwireHandler

    def trained(accelerator: Accelerator, bare: nn.Module, num_steps: int, times: int = 1) -> Iterator[torch.Tensor]:
        optimizer = fresh(bare)
        handler = GradwireHandler(accelerator, *PAIR, optimizer=optimizer)
        for _ in range(times):
            bare.load_state_dict(network().state_dict())
            model, prepared = accelerator.prepare(bare, optimizer)
            for step in range(num_steps):
                x, y = batch(rank, step)
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                prepared.step()
                prepared.zero_grad()
            assert message_of(lambda: accelerator.prepare(network())).startswith("ValueError: GradwireHandler serves")
            if num_steps == STEPS:
                accelerator.save_state(str(folder / "again"))
                handler.close()
            accelerator.free_memory()
            yield weights(bare)

    yield from trained(Accelerator(cpu=True), network(), STEPS)
    accelerator, model = Accelerator(cpu=True), network()
    next(trained(accelerator, model, FAILS_AFTER))  # what an exception would leave
    yield from trained(accelerator, model, STEPS, times=2)
    yield from trained(accelerator, network(), STEPS)


def transformers_again(rank: int, folder: Path) -> Iterator[torch.Tensor]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradwire.trainers.transformers import GradwireCallback

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    class Failing(TrainerCallback):
        error: RuntimeError | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == FAILS_AFTER and (error := self.error):
                self.error = None
                raise error

    order = [batch(rank, step) for step in range(STEPS) for rank in range(2)]
    data = [{"x": x, "labels": y} for batch in order for x, y in zip(*batch, strict=True)]
    failing = Failing()

    def trainer_of(**options: Any) -> tuple[nn.Module, Trainer]:
        model = Classifier()
        arguments = TrainingArguments(
            str(folder / "again"),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **options,
        )
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(fresh(model.network), None))
        trainer.add_callback(failing)
        trainer.add_callback(GradwireCallback(trainer, *PAIR))
        return model.network, trainer

    def trained(model: nn.Module, trainer: Trainer) -> torch.Tensor:
        model.load_state_dict(network().state_dict())
        trainer.train()
        return weights(model)

    yield trained(*trainer_of())
    model, trainer = trainer_of()
    failing.error = RuntimeError("as a user's code may raise")
    assert "as a user's" in message_of(trainer.train)
    yield trained(model, trainer)
    yield trained(model, trainer)
    model, trainer = trainer_of(auto_find_batch_size=True)
    failing.error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    trainer.train()
    assert trainer._train_batch_size < BATCH
    failing.error = None
    second = GradwireCallback(trainer, *PAIR)
    trainer.add_callback(second)
    assert "two callbacks of gradwire; remove one with trainer.remove_callback" in message_of(trainer.train)
    trainer.remove_callback(second)
    trainer.train()


def played_again(rank: int, scene: Callable[[int, Path], Iterator[torch.Tensor]], folder: str) -> list[torch.Tensor]:
    meet(rank)
    after = [each.tolist() for each in scene(rank, Path(folder))]
    assert "exchange" not in [thread.name for thread in threading.enumerate()]  # all hooks are closed
    return after


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(lightning_again, marks=pytest.mark.long),
        pytest.param(accelerate_again, marks=pytest.mark.long),
        transformers_again,  # all three close an earlier hook through attach
    ],
)
def test_a_training_after_one_that_failed_is_like_any_other(
    scene: Callable[[int, Path], Iterator[torch.Tensor]], tmp_path: Path
) -> None:
    package = scene.__name__.partition("_")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    one, two = run_ranks(played_again, 2, tmp_path, args=(scene, str(tmp_path)))
    assert one == two
    assert len(one) >= 3
    assert all(each == one[0] for each in one)


def meet(rank: int) -> None:
    """Tell trainers of the process group that this rank is in already."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TOKENIZERS_PARALLELISM": "false"},  # they have met already
    }


def played(rank: int, scene: Callable[[int, Path], Iterator[Any]], folder: str) -> bytes:
    meet(rank)
    return saved((*plain(rank), *scene(rank, Path(folder))))


def ranks_of(package: str, scene: Callable[[int, Path], Iterator[Any]], tmp_path: Path) -> list[str]:
    """Hold the scene's runs against the plain loop, and return what it said of wrong use."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for rank, raw in enumerate(run_ranks(played, 2, tmp_path, args=(scene, str(tmp_path)))):
        by_hand, second_half, whole, resumed, incomplete, refusals = loaded(raw)
        assert whole["nbytes"] == by_hand["nbytes"]
        assert resumed["nbytes"] == second_half
        for run in (whole, resumed):
            assert torch.equal(run["weights"], by_hand["weights"])
            torch.testing.assert_close(run["state"], by_hand["state"], rtol=0, atol=0)
        assert incomplete.startswith("ValueError: there is no state of rank 1 beside "), rank
    return refusals


def test_lightning(tmp_path: Path) -> None:
    scaled, second_hook, remote = ranks_of("lightning", with_lightning, tmp_path)
    assert "train in bf16" in scaled
    assert second_hook.endswith("brings the communication hook of the model; leave out ddp_comm_hook")
    assert remote.endswith("memory://a.ckpt is not in one")


def test_accelerate(tmp_path: Path) -> None:
    scaled, alone, sharded, second_hook, prepared, early = ranks_of("accelerate", with_accelerate, tmp_path)
    assert "train in bf16" in scaled
    assert alone.endswith("there is only one process; start several with torchrun or accelerate launch")
    assert sharded.endswith("this Accelerator uses FSDP")
    assert second_hook.endswith("has a communication hook already; create it without comm_hook")
    assert prepared.endswith("is prepared already; create GradwireHandler before accelerator.prepare")
    assert early.endswith("call accelerator.prepare(model, optimizer, ...) first")


def test_transformers(tmp_path: Path) -> None:
    (elsewhere,) = ranks_of("transformers", with_transformers, tmp_path)
    assert "belongs to other weights than those that were loaded" in elsewhere
