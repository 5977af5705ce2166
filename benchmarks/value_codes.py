"""Measure the error of values sent as codes, on gradients and on parameter differences of short trainings.

A training records the gradient of every `--local`-th step, and the change of the parameters over as many steps, which
local SGD exchanges. Each is encoded without a residual. Printed is the squared error of the values sent, relative to
their squares: the median over records, and in brackets the largest share of the error of `sigma`. "By layer" means that
each layer is a message of its own, as in the published code: `sigma` then has four levels per layer, not four for all.

    python benchmarks/value_codes.py [--steps 300] [--local 30] [--out FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from bench.core import spec
from bench.core.environment import origin_columns
from bench.datasets.base import Dataset
from bench.models.base import Model
from collectives.options import build
from collectives.payloads.sparse import IndexedValues
from compressors.base import PerLayer
from compressors.layer import Layer, Step

TRAININGS = {  # (model, data set, batch size) -> optimizer
    ("small_cnn", "digits", 64): lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ("gpt:preset=small", "stdlib", 16): lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
SELECTIONS = (  # (compressor, by layer)
    ("topk:ratio=0.01", True),
    ("group_topk:ratio=0.01,group_size=1024", False),
    ("group_topk:ratio=0.015625,group_size=4096", False),
    ("group_topk:ratio=0.015625,group_size=4096", True),
)
CODINGS = ("two_magnitudes", "sigma", "int8")
Records = dict[str, list[list[torch.Tensor]]]
STEP = Step(index=0, epoch=99, rank=0, world_size=2, seed=1)


def recorded(model_spec: str, data_spec: str, batch: int, steps: int, local: int) -> Records:
    """Train, and return gradients and parameter differences, each a list of records of fp32 [numel] per layer."""
    torch.manual_seed(1)
    dataset = cast(Dataset, spec.build("datasets", data_spec))
    model = cast(Model, spec.build("models", model_spec)).build(dataset.num_classes)
    train, _ = dataset.load(Path("data"), seed=1)
    parameters = list(model.parameters())
    optimizer = TRAININGS[model_spec, data_spec, batch](parameters)
    records: Records = {"gradients": [], "differences": []}
    start = [p.detach().clone() for p in parameters]
    for step in range(1, steps + 1):
        inputs, targets = train.at(torch.randint(len(train), (batch,)))
        optimizer.zero_grad()
        dataset.task.loss(model(dataset.normalise(inputs)), targets.long()).backward()
        optimizer.step()
        if step % local == 0:
            records["gradients"].append([p.grad.flatten().clone() for p in parameters if p.grad is not None])
            records["differences"].append([(a - p.detach()).flatten() for a, p in zip(start, parameters, strict=True)])
            start = [p.detach().clone() for p in parameters]
    return records


def error(compressor: PerLayer, messages: list[torch.Tensor]) -> float:
    """Return the squared error of the values sent, relative to their squares."""
    lost = kept = 0.0
    for number, x in enumerate(messages):
        layer = Layer(id=number, name="", shape=(x.numel(),), kind="linear", numel=x.numel())
        payload = compressor.encode(x, layer, STEP)
        assert isinstance(payload, IndexedValues)
        sent = x[payload.positions]
        lost += float((sent - payload.values).double().square().sum())
        kept += float(sent.double().square().sum())
    return lost / kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local", type=int, default=30, help="steps between two records")
    parser.add_argument("--out", type=Path, help="CSV file for the rows")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # so that the trainings repeat
    rows = []
    table = Table("training", "tensors", "selection", *CODINGS)
    for (model, data, batch), _ in TRAININGS.items():
        for name, records in recorded(model, data, batch, asked.steps, asked.local).items():
            for compressor, by_layer in SELECTIONS:
                messages = records if by_layer else [[torch.cat(tensors)] for tensors in records]
                built = {coding: build("compressors", PerLayer, f"{compressor},values={coding}") for coding in CODINGS}
                errors = {coding: [error(built[coding], x) for x in messages] for coding in CODINGS}
                cells = []
                for coding, own in errors.items():
                    middle = statistics.median(own)
                    of_sigma = max(a / b for a, b in zip(own, errors["sigma"], strict=True))
                    cells.append(f"{middle:.5f} ({of_sigma:.2f})")
                    rows.append(
                        {
                            "model": model, "tensors": name, "compressor": compressor, "by_layer": by_layer,
                            "values": coding, "error": middle, "of_sigma": of_sigma, **origin_columns(),
                        }
                    )  # fmt: skip
                table.add_row(f"{model}, {data}", name, compressor + ", by layer" * by_layer, *cells)
    Console(width=140).print(table)
    if asked.out:
        with asked.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
