"""Train on digits with Dion: torchrun --nproc-per-node 2 examples/train_dion.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from gradwire.optim import Dion


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return images and labels, to train with and to test with."""
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    return (x[:1300].float() / 16, y[:1300]), (x[1300:].float() / 16, y[1300:])


def network(num_classes: int = 10) -> nn.Sequential:
    """Return three layers; the weights of the first two are the hidden matrices whose factors Dion exchanges."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes))


def train(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Train this rank's copy of the model, without DistributedDataParallel: Dion averages what it needs."""
    optimizer = Dion(model, lr=0.05)
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, ((x, y), (test_x, test_y)) = network(), digits()
    own = torch.arange(dist.get_rank(), len(y), dist.get_world_size())  # this rank's samples
    orders = [own[torch.randperm(len(own))] for _ in range(10)]  # of ten epochs
    train(model, [(x[batch], y[batch]) for order in orders for batch in order.split(32)])
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"rank {dist.get_rank()}: accuracy {accuracy:.1%}")
    dist.destroy_process_group()
