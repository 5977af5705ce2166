"""What AdaBelief and Max-AdaBelief share: options, one step of all parameters, and the torch optimizer around it.

The step is one function with one signature, so that another implementation of it (a SYCL kernel, say) can take its
place.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Lt
from typing_extensions import Doc, override

from bench.optimizers.base import Optimizer
from collectives.options import PositiveOrZero

# Elements worked on together: few enough to stay in a CPU's caches, enough to outweigh the calls (measured with
# benchmarks/optimizer_step.py).
BLOCK_NUMEL = 1 << 17

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
Exchange = Callable[[Tensors, Tensors], None]
"""(bias-corrected means, maxima) of this rank -> those of all ranks together, in place; every rank must call"""


@dataclasses.dataclass(kw_only=True)
class BeliefOptimizer(Optimizer):
    """Base of the components `adabelief` and `max_adabelief`: the options that both have."""

    default_lr: ClassVar[float] = 0.001

    beta1: Annotated[
        float, Gt(0), Lt(1), Doc("decay rate of the mean of gradients; at 0 no gradient would deviate from it")
    ] = 0.9
    beta2: Annotated[float, Gt(0), Lt(1), Doc("decay rate of the variance of gradients")] = 0.999
    eps: Annotated[PositiveOrZero, Doc("keeps the divisor away from 0")] = 1e-16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What tells the relatives apart.

    Attributes:
        beta1, beta2: decay rates of the mean and of the variance, in (0, 1).
        eps: added to the divisor.
        eps_in_variance: eps is also added to the variance itself in every step.
        max_of: divide by the root of the largest variance so far, of the larger of the last two, or of the last.
        max_over_corrected: compare variances after their bias correction instead of before.
        keeps_exchanged: the next maximum is taken over what the exchange gave, not over this rank's own.
    """

    beta1: float
    beta2: float
    eps: float
    eps_in_variance: bool = True
    max_of: Literal["running", "previous"] | None = None
    max_over_corrected: bool = False
    keeps_exchanged: bool = False


@torch.no_grad()
def step(
    theta: Tensors,
    g: Tensors,
    m: Tensors,
    s: Tensors,
    smax: Tensors,
    t: int,
    lr: float,
    rule: Rule,
    exchange: Exchange | None = None,
) -> None:
    """Update the parameters once: theta -= lr * m_hat / (sqrt(s_hat) + eps).

    Args:
        theta: the parameters; like all other tensors contiguous, and of the state's type.
        g: their gradients.
        m: mean of the gradients, updated.
        s: variance of the gradients, updated.
        smax: largest variance so far, or the last one, as the rule says, updated; left alone by a rule without maximum.
        t: number of this step, from 1.
        lr: learning rate.
        rule: which relative.
        exchange: None where nothing is exchanged.
    """
    mean_correction = 1 - rule.beta1**t
    if exchange is None:
        for theta_, g_, m_, s_, smax_ in _blocks(theta, g, m, s, smax):
            _descend(theta_, m_, _observe(g_, m_, s_, smax_, t, rule), t, lr / mean_correction, rule)
        return
    means, largest = ([torch.empty_like(tensor) for tensor in m] for _ in range(2))
    for g_, m_, s_, smax_, means_, largest_ in _blocks(g, m, s, smax, means, largest):
        torch._foreach_copy_(largest_, _observe(g_, m_, s_, smax_, t, rule))
        torch._foreach_copy_(means_, m_)
        torch._foreach_div_(means_, mean_correction)
    exchange(means, largest)
    if rule.keeps_exchanged:
        torch._foreach_copy_(smax, largest)
    for theta_, means_, largest_ in _blocks(theta, means, largest):
        _descend(theta_, means_, largest_, t, lr, rule)


def _blocks(*lists: Tensors) -> Iterator[tuple[Tensors, ...]]:
    """The same stretches of every list, so short that they stay in a CPU's cache meanwhile; on a GPU all at once."""
    if lists[0][0].device.type != "cpu":
        yield lists
        return
    stretches = ([part for tensor in tensors for part in tensor.view(-1).split(BLOCK_NUMEL)] for tensors in lists)
    for parts in zip(*stretches, strict=True):
        yield tuple([part] for part in parts)


def _observe(g: Tensors, m: Tensors, s: Tensors, smax: Tensors, t: int, rule: Rule) -> Tensors:
    """Update the moments, and return what is divided by the root of."""
    torch._foreach_lerp_(m, g, 1 - rule.beta1)
    deviation = torch._foreach_sub(g, m)
    torch._foreach_mul_(s, rule.beta2)
    torch._foreach_addcmul_(s, deviation, deviation, 1 - rule.beta2)
    if rule.eps_in_variance:
        torch._foreach_add_(s, rule.eps)
    if rule.max_over_corrected:
        s = torch._foreach_div(s, 1 - rule.beta2**t)
    if rule.max_of is None:
        return s
    if rule.max_of == "running":
        torch._foreach_maximum_(smax, s)
        return smax
    larger: Tensors = torch._foreach_maximum(s, smax)
    torch._foreach_copy_(smax, s)
    return larger


def _descend(theta: Tensors, means: Tensors, largest: Tensors, t: int, step_size: float, rule: Rule) -> None:
    """Subtract step_size * means / (sqrt(largest / c) + eps), where c is the bias correction that is still due."""
    # sqrt(s / c) + eps = (sqrt(s) + eps sqrt(c)) / sqrt(c), and a factor costs nothing
    root = 1.0 if rule.max_over_corrected else math.sqrt(1 - rule.beta2**t)
    divisor = torch._foreach_sqrt(largest)
    torch._foreach_add_(divisor, rule.eps * root)
    if rule.eps * root < torch.finfo(divisor[0].dtype).tiny:
        for part in divisor:
            part.masked_fill_(part == 0, math.inf)  # no step where no gradient ever was: 0 / 0 = 0
    torch._foreach_addcdiv_(theta, means, divisor, -step_size * root)


class Belief(torch.optim.Optimizer):
    """`step` over parameters; the state is fp32 where they are 16 bits wide, and differs between ranks that exchange.

    Args:
        parameters: what it updates; those without a gradient are left alone, or count as zeros in an exchange, in
            which all ranks must take part alike.
        lr: the learning rate.
        rule: which relative.
        exchange: as in `step`.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, rule: Rule, exchange: Exchange | None = None
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._rule = rule
        self._exchange = exchange
        self._names = ("mean", "variance") if rule.max_of is None else ("mean", "variance", "maximum")

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_age: dict[int, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None or self._exchange is not None:
                    by_age.setdefault(self._aged(parameter), []).append(parameter)
            for age, parameters in by_age.items():
                self._step_together(parameters, age, group["lr"])
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        for index, saved in state_dict["state"].items():  # torch has cast them to the parameter's type
            for name in self._names:
                self.state[parameters[index]][name] = saved[name].to(parameters[index].device, copy=True)

    def _aged(self, parameter: torch.nn.Parameter) -> int:
        """The number of the parameter's step that begins now."""
        state = self.state[parameter]
        if not state:
            wide = _wide(parameter)
            state.update({name: torch.zeros_like(wide) for name in self._names})
            state["step"] = 0
        state["step"] += 1
        return int(state["step"])

    def _step_together(self, parameters: Sequence[torch.nn.Parameter], age: int, lr: float) -> None:
        theta = [_wide(parameter) for parameter in parameters]
        g = [
            torch.zeros_like(t) if p.grad is None else p.grad.to(t).contiguous()
            for p, t in zip(parameters, theta, strict=True)
        ]
        moments = [[self.state[parameter][name] for parameter in parameters] for name in self._names]
        m, s, smax = (*moments, moments[1])[:3]
        step(theta, g, m, s, smax, age, lr, self._rule, self._exchange)
        for parameter, updated in zip(parameters, theta, strict=True):
            if updated is not parameter:
                parameter.copy_(updated)


def _wide(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter itself, or a contiguous copy, in fp32 where it has 16 bits."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    is_fit = parameter.dtype == dtype and parameter.is_contiguous()
    return parameter if is_fit else parameter.to(dtype, copy=True, memory_format=torch.contiguous_format)
