"""The trainers with compressed gradients or local steps, behind one interface, and a plain loop that they equal."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gradwire import attach, attach_local
from tests.testing.ddp_scenes import batch, weights

GRADIENTS = ("group_topk:ratio=0.05,group_size=100,warmup_epochs=1", "ring")
DIFFERENCES = ("topk:ratio=0.2,warmup_epochs=1", "allgather")
LOCAL: dict[str, Any] = {"preset": "diloco", "steps": 4, "delay": 1}
EPOCH, BATCH = 7, 16
"""Steps, and samples in each; whole runs have two epochs. After the first, an exchange of local steps is under way."""
FAILS_AFTER = 3
"""Steps before the error of a network that fails."""


class Network(nn.Sequential):
    """Layers, the weights that evaluations have seen, and the error of a later step."""

    def __init__(self, momentum: float = 0.9) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))
        self.seen: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.num_steps, self.momentum = 0, momentum

    def see(self) -> None:
        self.seen.append(weights(self))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, or raise the error once."""
        if self.error is not None and self.num_steps == FAILS_AFTER:
            error, self.error = self.error, None
            raise error
        self.num_steps += 1
        return nn.functional.cross_entropy(self(x), y)

    def begin(self) -> None:
        """Take the first weights again, and forget what was seen."""
        self.load_state_dict(Network().state_dict())
        self.seen.clear()
        self.num_steps = 0

    def descent(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's batch; one batch of rank 0 makes a gradient that is not finite."""
    x, y = batch(rank, step)
    return (x * float("nan") if (rank, step) == (0, 5) else x), y


@dataclasses.dataclass
class Run:
    """The result of a training: the hook, the weights at each evaluation, and those in the last checkpoint."""

    hook: Any
    seen: list[torch.Tensor]
    saved: torch.Tensor


def plain(rank: int, *, is_local: bool) -> tuple[Run, int]:
    """Return the result of a loop without a trainer, and the bytes of its first epoch."""
    network, nbytes = Network(), 0
    optimizer, model = network.descent(), network
    if is_local:
        hook: Any = attach_local(model, optimizer, *DIFFERENCES, **LOCAL)
    else:
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        hook = attach(model, *GRADIENTS, optimizer=optimizer)
    for step in range(2 * EPOCH):
        hook.set_epoch(step // EPOCH)
        x, y = samples(rank, step % EPOCH)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EPOCH == EPOCH - 1:
            nbytes = nbytes or hook.traffic["gradient"].nbytes
            with hook.outer() if is_local else contextlib.nullcontext():
                network.see()
    hook.close()
    network.see()
    return Run(hook, network.seen, network.seen[1]), nbytes


class Adapter(abc.ABC):
    """A trainer on this rank; `trainer` serves one `fit` or, where a user may do that, several."""

    half: ClassVar[str]  # the checkpoint after the first epoch

    def __init__(self, rank: int, folder: Path, *, is_local: bool) -> None:
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"GROUP_RANK": "0", "TOKENIZERS_PARALLELISM": "false"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},  # the ranks have met already
        }
        self.rank, self.folder, self.is_local = rank, folder, is_local

    @abc.abstractmethod
    def trainer(self, network: Network, num_epochs: int = 2, **options: Any) -> Any:
        """Return a new trainer."""

    @abc.abstractmethod
    def fit(self, trainer: Any, network: Network, checkpoint: str = "") -> Any:
        """Train from the first weights, or from a checkpoint, and return the closed hook."""

    @abc.abstractmethod
    def saved(self) -> dict[str, torch.Tensor]:
        """Return the state of the network in the last checkpoint."""

    def state_file(self, rank: int) -> Path:
        """Return the file of a rank's state after the first epoch."""
        return self.folder / self.half / f"gradwire-{rank}.safetensors"

    def run(self, checkpoint: str = "", **options: Any) -> Run:
        network = Network()
        hook = self.fit(self.trainer(network, **options), network, checkpoint)
        dist.barrier()
        saved = self.saved()
        names = [name for name, _ in network.named_parameters()]
        return Run(hook, network.seen, torch.cat([saved[name].flatten() for name in names]))

    def short(self, network: Network, trainer: Any = None) -> torch.Tensor:
        """Return the weights after one epoch."""
        self.fit(trainer or self.trainer(network, num_epochs=1), network)
        return weights(network)


class Lightning(Adapter):
    half = "epoch=0.ckpt"

    def strategy(self, **options: Any) -> Any:
        from gradwire.trainers.lightning import GradwireDDPStrategy, GradwireLocalStrategy

        if self.is_local:
            return GradwireLocalStrategy(*DIFFERENCES, LOCAL, **options)
        return GradwireDDPStrategy(*GRADIENTS, **options)

    def trainer(self, network: Network, num_epochs: int = 2, **options: Any) -> Any:
        from lightning.pytorch import Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment

        return Trainer(
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
            accelerator="cpu",
            devices=2,
            strategy=self.strategy(),
            plugins=[TorchElasticEnvironment()],
            max_epochs=num_epochs,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=self.folder,
            enable_checkpointing=num_epochs > 1,
            callbacks=[ModelCheckpoint(dirpath=self.folder, filename="{epoch}", save_top_k=-1)] * (num_epochs > 1),
            **options,
        )

    def fit(self, trainer: Any, network: Network, checkpoint: str = "") -> Any:
        from lightning.pytorch import LightningModule

        class Classifier(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, pair: list[torch.Tensor], _: int) -> torch.Tensor:
                return self.network.loss(*pair)

            def validation_step(self, *_: Any) -> None:
                self.network.see()

            def configure_optimizers(self) -> torch.optim.SGD:
                return self.network.descent()

        data = TensorDataset(*map(torch.cat, zip(*(samples(self.rank, step) for step in range(EPOCH)), strict=True)))
        network.begin()
        model, nothing = Classifier(), DataLoader([0])  # type: ignore[arg-type, var-annotated]
        trainer.fit(
            model, DataLoader(data, BATCH), nothing, ckpt_path=str(self.folder / checkpoint) if checkpoint else None
        )
        trainer.validate(model, nothing, verbose=False)
        return trainer.strategy.hook

    def saved(self) -> dict[str, torch.Tensor]:
        state = torch.load(self.folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
        return {name.removeprefix("network."): tensor for name, tensor in state.items()}

    def state_file(self, rank: int) -> Path:
        return self.folder / f"gradwire-{rank}-epoch=0.safetensors"


class Accelerate(Adapter):
    half = "epoch-0"

    def trainer(self, network: Network, num_epochs: int = 2, **options: Any) -> Any:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=10)])
        accelerator.num_epochs = num_epochs
        return accelerator

    def handler(self, accelerator: Any, network: Any, optimizer: Any) -> Any:
        from gradwire.trainers.accelerate import GradwireHandler, GradwireLocalHandler

        if self.is_local:
            return GradwireLocalHandler(accelerator, network, *DIFFERENCES, optimizer=optimizer, **LOCAL)
        return GradwireHandler(accelerator, *GRADIENTS, optimizer=optimizer)

    def fit(self, trainer: Any, network: Network, checkpoint: str = "", handler: Any = None) -> Any:
        network.begin()
        optimizer = network.descent()
        handler = self.handler(trainer, network, optimizer)
        model, prepared = trainer.prepare(network, optimizer)
        assert model is network if self.is_local else model.bucket_bytes_cap == 10 << 20
        if checkpoint:
            trainer.load_state(str(self.folder / checkpoint))
        for step in range(EPOCH if checkpoint else 0, trainer.num_epochs * EPOCH):
            handler.hook.set_epoch(step // EPOCH)
            x, y = samples(self.rank, step % EPOCH)
            trainer.backward(nn.functional.cross_entropy(model(x), y))
            prepared.step()
            prepared.zero_grad()
            network.num_steps += 1
            if network.error is not None and network.num_steps == FAILS_AFTER:
                error, network.error = network.error, None
                raise error
            if step % EPOCH == EPOCH - 1:
                with handler.hook.outer() if self.is_local else contextlib.nullcontext():
                    network.see()
                trainer.save_state(str(self.folder / f"epoch-{step // EPOCH}"))
        handler.close()
        trainer.free_memory()
        network.see()
        return handler.hook

    def saved(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "epoch-1" / "model.safetensors")


class Transformers(Adapter):
    half = f"checkpoint-{EPOCH}"

    def trainer(self, network: Network, num_epochs: int = 2, **options: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                if not self.training:
                    self.network.see()
                    return {"loss": nn.functional.cross_entropy(self.network(x), labels)}
                return {"loss": self.network.loss(x, labels)}

        # rank r takes batches r, r + 2, ...
        order = [samples(step_rank, step) for step in range(EPOCH) for step_rank in range(2)]
        data = [{"x": x, "labels": y} for pair in order for x, y in zip(*pair, strict=True)]
        of_evaluation: dict[str, Any] = (
            {"save_strategy": "epoch", "eval_strategy": "epoch"} if num_epochs > 1 else {"save_strategy": "no"}
        )
        arguments = TrainingArguments(
            str(self.folder),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=num_epochs,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **of_evaluation | options,
        )
        trainer = Trainer(
            Classifier(), arguments, train_dataset=data, eval_dataset=data[:2], optimizers=(network.descent(), None)
        )
        if num_epochs > 1:
            trainer.evaluate()  # before training: it changes nothing
        self.add(trainer)
        if num_epochs > 1:
            trainer.evaluate()
            trainer.predict(data[:2])
        return trainer

    def add(self, trainer: Any) -> Any:
        from gradwire.trainers.transformers import GradwireCallback, GradwireLocalCallback

        callback = (
            GradwireLocalCallback(trainer, *DIFFERENCES, **LOCAL)
            if self.is_local
            else GradwireCallback(trainer, *GRADIENTS)
        )
        trainer.add_callback(callback)
        trainer.added = callback
        return callback

    def fit(self, trainer: Any, network: Network, checkpoint: str = "") -> Any:
        network.begin()
        trainer.train(resume_from_checkpoint=str(self.folder / checkpoint) if checkpoint else None)
        if trainer.args.num_train_epochs > 1:
            trainer.evaluate()
        return trainer.added.hook

    def saved(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        state = load_file(self.folder / f"checkpoint-{2 * EPOCH}" / "model.safetensors")
        return {name.removeprefix("network."): tensor for name, tensor in state.items()}


TRAINERS: dict[str, type[Adapter]] = {"lightning": Lightning, "accelerate": Accelerate, "transformers": Transformers}


def trainers(*names: str, long: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Call the test on two ranks with the name of each `trainer` that is installed; of some in `make exhaustive`."""
    marked = []
    for name in names or TRAINERS:
        marks = [pytest.mark.ranks(2, name)]
        if name in long:
            marks.append(pytest.mark.long)
        if importlib.util.find_spec(name) is None:
            marks.append(pytest.mark.skip(f"{name} is not installed"))
        marked.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("trainer", marked)
