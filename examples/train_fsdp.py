"""Train on handwritten digits with FSDP2: two replicas of two shards, with compressed gradients between the replicas.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --compressor group_topk:ratio=0.01

Only the lines marked with (*) differ from plain FSDP2.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire import attach_fsdp

NUM_SHARDS = 2


def main() -> None:
    """Train, and print the accuracy and the bytes that each rank sent to other replicas."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compressor", default="group_topk:ratio=0.01", help="a spec, such as none or qsgd:bits=4")
    parser.add_argument("--collective", default="allgather")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shape = (dist.get_world_size() // NUM_SHARDS, NUM_SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))

    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU()), nn.Sequential(nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 10)
    )
    for block in model:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    replicas = mesh["replica"].get_group()
    hook = attach_fsdp(model, options.compressor, options.collective, replicas=replicas)  # (*)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16 - 0.3, torch.tensor(labels)
    is_test = torch.arange(len(y)) % 4 == 3
    train = torch.nonzero(~is_test).flatten()
    num_steps = 0
    for epoch in range(options.epochs):
        hook.set_epoch(epoch)  # (*) the density warms up over the first epochs
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch in order[: len(order) // 128 * 128].split(128):
            own = batch[dist.get_rank() :: dist.get_world_size()].tensor_split(options.accumulate)
            for number, micro in enumerate(own, start=1):
                hook.set_requires_all_reduce(number == len(own))  # (*) exchange once per step
                (nn.functional.cross_entropy(model(x[micro]), y[micro]) / len(own)).backward()
            if hook.step_ok():  # (*) the gradients of all ranks were finite
                optimizer.step()
            optimizer.zero_grad()
            num_steps += 1

    with torch.no_grad():  # on every rank, because FSDP2 gathers the parameters
        accuracy = float((model(x[is_test]).argmax(1) == y[is_test]).float().mean())
    sent = hook.traffic["gradient"].nbytes / max(1, num_steps)  # (*)
    shard = 4 * sum(layer.numel for layer in hook.layers)
    hook.close()  # (*)
    if dist.get_rank() == 0:
        print(f"{options.compressor} on {options.collective}: accuracy {accuracy:.1%} after {num_steps} steps; "
              f"each rank sent {sent:,.0f} bytes per step to other replicas (its shard has {shard:,})")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
