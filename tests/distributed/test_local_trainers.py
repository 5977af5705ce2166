"""Trainers with local steps make the updates of a plain loop, evaluate and save the outer copy, and resume."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradwire import attach_local
from tests.distributed.test_integrations import meet
from tests.testing.ddp_scenes import batch, message_of
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = ("topk:ratio=0.2,warmup_epochs=1", "allgather")
OPTIONS: dict[str, Any] = {"preset": "diloco", "steps": 4, "delay": 1}
EPOCH, BATCH = 7, 16
"""Steps, and samples in each; every run has two epochs. After the first, an exchange is under way."""


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's batch; one batch of rank 0 makes a gradient that is not finite."""
    x, y = batch(rank, step)
    return (x * float("nan") if (rank, step) == (0, 5) else x), y


def descent(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain(rank: int) -> list[torch.Tensor]:
    """Return the outer copy after each epoch of a loop without a trainer, and that at the end."""
    model, seen = network(), []
    optimizer = descent(model)
    local = attach_local(model, optimizer, *PAIR, **OPTIONS)
    for step in range(2 * EPOCH):
        local.set_epoch(step // EPOCH)
        x, y = samples(rank, step % EPOCH)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EPOCH == EPOCH - 1:
            with local.outer():
                seen.append(weights(model))
    local.close()
    return [*seen, weights(model)]


Result = tuple[list[torch.Tensor], torch.Tensor]
"""The weights that each evaluation of a run and the end saw, and those of the last checkpoint"""


def with_lightning(rank: int, folder: Path) -> Iterator[Result]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from gradwire.trainers.lightning import GradwireLocalStrategy

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.seen: list[torch.Tensor] = []

        def training_step(self, pair: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.network(pair[0]), pair[1])

        def validation_step(self, *_: Any) -> None:
            self.seen.append(weights(self.network))

        def configure_optimizers(self) -> torch.optim.SGD:
            return descent(self)

    data = TensorDataset(*map(torch.cat, zip(*(samples(rank, step) for step in range(EPOCH)), strict=True)))

    def trained(checkpoint: str | None) -> Result:
        model = Classifier()
        trainer = Trainer(
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=2,
            strategy=GradwireLocalStrategy(*PAIR, OPTIONS),
            plugins=[TorchElasticEnvironment()],
            max_epochs=2,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
        )
        trainer.fit(model, DataLoader(data, BATCH), DataLoader([0]), ckpt_path=checkpoint)
        dist.barrier()
        saved = torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
        own = [saved[f"network.{name}"].flatten() for name, _ in model.network.named_parameters()]
        trainer.validate(model, DataLoader([0]), verbose=False)
        return model.seen, torch.cat(own)

    yield trained(None)
    yield trained(str(folder / "epoch=0.ckpt"))
    assert message_of(lambda: GradwireLocalStrategy(find_unused_parameters=True)).endswith(
        "the module is not in DDP, so find_unused_parameters has no effect; leave it out"
    )


def with_accelerate(rank: int, folder: Path) -> Iterator[Result]:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from gradwire.trainers.accelerate import GradwireLocalHandler

    def trained(accelerator: Accelerator, checkpoint: Path | None) -> Result:
        model, seen = network(), []
        optimizer = descent(model)
        handler = GradwireLocalHandler(accelerator, model, *PAIR, optimizer=optimizer, **OPTIONS)
        prepared, stepping = accelerator.prepare(model, optimizer)
        assert prepared is model
        if checkpoint:
            accelerator.load_state(str(checkpoint))
        for step in range(EPOCH if checkpoint else 0, 2 * EPOCH):
            handler.hook.set_epoch(step // EPOCH)
            x, y = samples(rank, step % EPOCH)
            accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
            stepping.step()
            stepping.zero_grad()
            if step % EPOCH == EPOCH - 1:
                with handler.hook.outer():
                    seen.append(weights(model))
                accelerator.save_state(str(folder / f"epoch-{step // EPOCH}"))
        handler.close()
        accelerator.free_memory()
        dist.barrier()
        saved = load_file(folder / "epoch-1" / "model.safetensors")
        return [*seen, weights(model)], torch.cat([saved[name].flatten() for name, _ in model.named_parameters()])

    yield trained(Accelerator(cpu=True), None)
    again = Accelerator(cpu=True)
    yield trained(again, folder / "epoch-0")
    yield trained(again, folder / "epoch-0")
    prepared = again.prepare(network())
    assert message_of(lambda: GradwireLocalHandler(again, prepared, optimizer=descent(prepared))).endswith(
        "this model is prepared already; create GradwireLocalHandler before accelerator.prepare"
    )


def with_transformers(rank: int, folder: Path) -> Iterator[Result]:
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    from gradwire.trainers.transformers import GradwireLocalCallback

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.training:
                self.seen.append(weights(self))
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    # rank r takes batches r, r + 2, ...
    order = [samples(rank, step) for step in range(EPOCH) for rank in range(2)]
    data = [{"x": x, "labels": y} for batch in order for x, y in zip(*batch, strict=True)]

    def trained(checkpoint: str | None, **options: Any) -> Result:
        model = Classifier()
        arguments = TrainingArguments(
            str(folder / "out"),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="epoch",
            eval_strategy="epoch",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:2], optimizers=(descent(model), None)
        )
        trainer.add_callback(GradwireLocalCallback(trainer, *PAIR, **OPTIONS))
        trainer.train(resume_from_checkpoint=checkpoint)
        dist.barrier()
        saved = load_file(folder / "out" / f"checkpoint-{2 * EPOCH}" / "model.safetensors")
        trainer.evaluate()
        return model.seen, torch.cat([saved[name].flatten() for name, _ in model.named_parameters()])

    yield trained(None)
    yield trained(str(folder / "out" / f"checkpoint-{EPOCH}"))
    seen, _ = trained(None, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    assert torch.equal(seen[-1], seen[0])  # whose loss is the larger one


def played(rank: int, scene: Callable[[int, Path], Iterator[Result]], folder: str) -> list[torch.Tensor]:
    meet(rank)
    first, last, end = plain(rank)
    assert not torch.equal(first, last)
    for number, (seen, saved) in enumerate(scene(rank, Path(folder))):
        wanted = [first, last, end] if number == 0 else [last, end]  # what resumes has one epoch
        assert len(seen) == len(wanted)
        assert all(map(torch.equal, seen, wanted)), number
        assert torch.equal(saved, last), number
    return [first, last, end]


@pytest.mark.parametrize("scene", [with_lightning, with_accelerate, with_transformers])
def test_a_trainer_makes_the_local_steps_of_a_plain_loop(
    scene: Callable[[int, Path], Iterator[Result]], tmp_path: Path
) -> None:
    package = scene.__name__.removeprefix("with_")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    one, two = run_ranks(played, 2, tmp_path, args=(scene, str(tmp_path)))
    assert all(map(torch.equal, one, two))


def example_and_loop(rank: int, folder: str) -> None:
    meet(rank)
    os.environ["TORCHELASTIC_RUN_ID"] = "of torchrun"
    os.chdir(folder)  # for Lightning's checkpoint
    sys.path.insert(0, str(EXAMPLES))
    of_example = runpy.run_path(str(EXAMPLES / "train_lightning_local.py"), run_name="__main__")
    torch.manual_seed(1)
    data, model = of_example["train"], of_example["network"]()
    sampler = DistributedSampler(data, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    local = attach_local(model, optimizer, "bf16", "ring", preset="diloco", steps=10)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32, sampler=sampler, drop_last=True):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    local.close()
    assert torch.equal(weights(of_example["model"]), weights(model))


def test_the_example_in_lightning_trains_as_a_plain_loop(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    run_ranks(example_and_loop, 2, tmp_path, args=(str(tmp_path),))
