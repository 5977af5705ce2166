"""Compare the time of a step of Max-AdaBelief, without its exchange, with torch's foreach AMSGrad.

    python benchmarks/optimizer_step.py [--turns 30] [--model resnet18]

The optimizers run interleaved on one thread, on the same gradients. Each step is divided by the step of AMSGrad before
it, and the median ratios are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench.core import registry
from bench.models.base import Model
from gradwire.optim.adabelief import AdaBelief, Belief, MaxAdaBelief, MaxAdaBeliefOptions


def parameters_of(model: str) -> list[torch.nn.Parameter]:
    """Return a model's parameters, with random gradients."""
    torch.manual_seed(0)
    component = registry.load("models", model)()
    assert isinstance(component, Model)
    parameters = list(component.build(10).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="number of rounds")
    parser.add_argument("--model", default="resnet18")
    options = parser.parse_args()
    torch.set_num_threads(1)
    amsgrad = torch.optim.Adam(parameters_of(options.model), lr=1e-3, amsgrad=True, foreach=True)
    contenders: dict[str, torch.optim.Optimizer] = {
        "adabelief": AdaBelief(parameters_of(options.model), 1e-3),
        "max_adabelief in moments": Belief(
            parameters_of(options.model), 1e-3, MaxAdaBeliefOptions().rule, exchange=lambda means, maxima: None
        ),
        "max_adabelief": MaxAdaBelief(parameters_of(options.model), 1e-3),
        "max_adabelief:max_of=previous": MaxAdaBelief(parameters_of(options.model), 1e-3, max_of="previous"),
        "max_adabelief:max_over=corrected": MaxAdaBelief(parameters_of(options.model), 1e-3, max_over="corrected"),
    }

    def seconds(optimizer: torch.optim.Optimizer) -> float:
        started = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - started

    for optimizer in (amsgrad, *contenders.values()):
        optimizer.step()  # creates the optimizer's state
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    baseline = []
    for _ in range(options.turns):
        for name, optimizer in contenders.items():
            baseline.append(seconds(amsgrad))
            ratios[name].append(seconds(optimizer) / baseline[-1])
    print(f"torch's foreach AMSGrad: {1e3 * statistics.median(baseline):.1f} ms per step of {options.model}")
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.2f} times AMSGrad")


if __name__ == "__main__":
    main()
