"""Train on handwritten digits in several processes, in a script of your own with compressed gradients.

    torchrun --nproc-per-node 2 examples/train_digits.py --compressor group_topk
    torchrun --nproc-per-node 2 examples/train_digits.py --checkpoint checkpoints/digits   # continues where it stopped

Only the lines marked with (*) differ from plain DistributedDataParallel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from collectives.options import build
from compressors.base import Compressor
from gradwire import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.exchange.packed_state import pack_state, unpack_state

MOMENTUM = 0.9
# Compressors with a collective that takes their payloads; --compressor also takes any other spec, such as qsgd:bits=4.
PAIRS = {
    "none": ("none", "native"),
    "int8": ("int8", "allgather"),
    "sign": ("sign", "allgather"),
    "group_topk": ("group_topk:ratio=0.02,momentum_correction=true", "allgather"),
    "topk": ("topk:ratio=0.02,momentum_correction=true", "allgather"),
}


def main() -> None:
    """Train, and print the accuracy and the bytes that each rank sent."""
    options = parse_options()
    text, collective = PAIRS.get(options.compressor, (options.compressor, "allgather"))
    compressor = build("compressors", Compressor, text)  # attach also takes the text
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # every rank draws the same weights

    train, test = digits()
    sampler = DistributedSampler(train, seed=options.seed, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    # Methods with momentum correction apply the momentum themselves, before they choose which entries to send.
    momentum = MOMENTUM if compressor.traits.owns_momentum else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=MOMENTUM if momentum is None else 0.0)
    hook = attach(model, compressor, collective, seed=options.seed, momentum=momentum, optimizer=optimizer)  # (*)

    num_steps = first_epoch = 0
    if options.checkpoint and any(options.checkpoint.glob("epoch-*/.metadata")):
        first_epoch = load(options.checkpoint, model, optimizer, hook)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        hook.set_epoch(epoch)  # (*) the density warms up over the first epochs
        if num_steps == options.steps:
            break
        for x, y in loader:
            if num_steps == options.steps:
                break
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # changes nothing if a rank's gradient was not finite
            optimizer.zero_grad()
            num_steps += 1
        else:  # the whole epoch
            if options.checkpoint:
                save(options.checkpoint, epoch + 1, model, optimizer, hook)

    accuracy = accuracy_of(model.module, test)
    sent = hook.traffic["gradient"].nbytes  # (*)
    dist.barrier()
    hook.close()  # (*)
    if dist.get_rank() == 0:
        dense = 4 * sum(p.numel() for p in model.parameters())
        per_step = sent / max(1, num_steps)
        print(f"{options.compressor} on {collective}: accuracy {accuracy:.1%} after {num_steps} steps; "
              f"each rank sent {per_step:,.0f} bytes per step (the gradient has {dense:,})")  # fmt: skip
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compressor", default="group_topk", help=f"{', '.join(PAIRS)}, or any spec")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="stop after this number of steps")
    parser.add_argument("--checkpoint", type=Path, help="folder to continue from, and to save to after every epoch")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: CompressionHook) -> None:
    """Save the state that is equal on all ranks once, and the hook's state of each rank under a separate name."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, f"hook-{dist.get_rank()}": pack_state(hook.state_dict())}  # (*)
    dcp.save(state, checkpoint_id=folder / f"epoch-{epoch:04d}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, hook: CompressionHook) -> int:
    """Load the last complete checkpoint, and return the number of finished epochs."""
    last = max(path.parent for path in folder.glob("epoch-*/.metadata"))
    name = f"hook-{dist.get_rank()}"
    size = dcp.FileSystemReader(last).read_metadata().state_dict_metadata[name].size  # (*) the shape to allocate
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, name: torch.empty(size, dtype=torch.uint8)}  # (*)
    dcp.load(state, checkpoint_id=last)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    hook.load_state_dict(unpack_state(state[name]))  # (*)
    return int(last.name.removeprefix("epoch-"))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1797 images of 8x8 pixels; every fourth is a test image."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.3
    y = torch.tensor(labels)
    is_test = torch.arange(len(y)) % 4 == 3
    return TensorDataset(x[~is_test], y[~is_test]), TensorDataset(x[is_test], y[is_test])


def network() -> nn.Module:
    """Return a network of two convolutions and two linear layers, 151 306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def accuracy_of(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of the test images that are classified correctly."""
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    main()
