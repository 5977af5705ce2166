"""AdaBelief and Max-AdaBelief: a function that makes one step, the options, and the torch optimizers that call it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from annotated_types import Gt, Lt
from torch import nn
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import OptionError, Options, PositiveOrZero, raise_first
from collectives.refusals import Refusal
from compressors.base import Compressor
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import BoundOptimizer, Trained, dense_refusal, network_of

# Elements per block: few enough for a CPU's caches, enough to outweigh the cost of the calls (measured with
# benchmarks/optimizer_step.py).
BLOCK_NUMEL = 1 << 17

TensorList = list[torch.Tensor] | tuple[torch.Tensor, ...]
# Replaces this rank's (bias-corrected means, maxima) in place with those of all ranks; every rank must call it.
ExchangeMoments = Callable[[TensorList, TensorList], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The parameters that distinguish the variants of AdaBelief.

    Attributes:
        beta1, beta2: decay rates of the running mean and of the running variance of gradients, in (0, 1).
        eps: added to the divisor.
        eps_in_variance: True if eps is also added to the variance itself in every step.
        max_of: the variance whose square root divides each step: the largest so far ("running"), the larger of the last
            two ("previous"), or the last one (None).
        max_over_corrected: True to compare variances after their bias correction; False to compare them before.
        keeps_exchanged: True if the next step compares its variance with the maximum that `exchange` has combined over
            ranks; False if with this rank's own maximum.
    """

    beta1: float
    beta2: float
    eps: float
    eps_in_variance: bool = True
    max_of: Literal["running", "previous"] | None = None
    max_over_corrected: bool = False
    keeps_exchanged: bool = False


@torch.no_grad()
def belief_update(
    theta: TensorList,
    g: TensorList,
    m: TensorList,
    s: TensorList,
    smax: TensorList,
    t: int,
    lr: float,
    rule: Rule,
    exchange: ExchangeMoments | None = None,
) -> None:
    """Update the parameters once: theta -= lr * m_hat / (sqrt(s_hat) + eps), with the bias-corrected m and s or smax.

    Args:
        theta: the parameters, updated in place; all tensors here are contiguous and at least fp32.
        g: the gradients.
        m: running mean of the gradients, updated in place.
        s: running variance of the gradients (mean square of g - m), updated in place.
        smax: largest or last variance, according to `rule.max_of`, updated in place; unused if `rule.max_of` is None.
        t: number of this step, counted from 1.
        lr: learning rate.
        rule: the variant of AdaBelief.
        exchange: combines bias-corrected means and maxima over ranks, in place; None if ranks exchange nothing.
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


def _blocks(*lists: TensorList) -> Iterator[tuple[TensorList, ...]]:
    """Split the tensors of all lists at the same places, and yield the corresponding parts of all lists together.

    Each part is small enough for a CPU's cache. On a GPU, yield the whole lists at once.
    """
    if lists[0][0].device.type != "cpu":
        yield lists
        return
    blocks = ([part for tensor in tensors for part in tensor.view(-1).split(BLOCK_NUMEL)] for tensors in lists)
    for parts in zip(*blocks, strict=True):
        yield tuple([part] for part in parts)


def _observe(g: TensorList, m: TensorList, s: TensorList, smax: TensorList, t: int, rule: Rule) -> TensorList:
    """Update m, s and smax in place, and return the variances; the step divides by their square roots."""
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
    larger: TensorList = torch._foreach_maximum(s, smax)
    torch._foreach_copy_(smax, s)
    return larger


def _descend(theta: TensorList, means: TensorList, largest: TensorList, t: int, step_size: float, rule: Rule) -> None:
    """Subtract step_size * means / (sqrt(largest / c) + eps) from theta, in place.

    c is the bias correction of the variances, or 1 if `largest` already includes the correction.
    """
    # sqrt(s / c) + eps = (sqrt(s) + eps sqrt(c)) / sqrt(c); the factor 1 / sqrt(c) goes into the step size for free
    root = 1.0 if rule.max_over_corrected else math.sqrt(1 - rule.beta2**t)
    divisor = torch._foreach_sqrt(largest)
    torch._foreach_add_(divisor, rule.eps * root)
    if rule.eps * root < torch.finfo(divisor[0].dtype).tiny:
        for part in divisor:
            part.masked_fill_(part == 0, math.inf)  # so that 0 / 0 becomes 0: no step where all gradients were zero
    torch._foreach_addcdiv_(theta, means, divisor, -step_size * root)


class Belief(BoundOptimizer):
    """A torch optimizer that runs the variant `rule` of AdaBelief.

    The function `belief_update` makes the whole step, so that another implementation (for example a SYCL kernel) can
    replace it. The state of a parameter has the parameter's shape, and is fp32 for 16-bit parameters. If ranks exchange
    moments, the state differs between ranks.

    Args:
        parameters: the parameters to update, or groups of them. A parameter without a gradient is skipped. If moments
            are exchanged, its gradient counts as zeros instead, because all ranks must exchange the same tensors.
        lr: the learning rate.
        rule: the variant of AdaBelief.
        exchange: combines bias-corrected means and maxima over ranks, in place; None if ranks exchange nothing.
    """

    def __init__(self, parameters: Any, lr: float, rule: Rule, exchange: ExchangeMoments | None = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self._rule = rule
        self._exchange = exchange
        self._names = ("mean", "variance") if rule.max_of is None else ("mean", "variance", "maximum")

    @override
    def update(self) -> None:
        for group in self.param_groups:
            by_age: dict[int, list[torch.nn.Parameter]] = {}  # by the number of this step, from 1
            for parameter in group["params"]:
                if parameter.grad is not None or self._exchange is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update({name: torch.zeros_like(_wide(parameter)) for name in self._names} | {"step": 0})
                    state["step"] += 1
                    by_age.setdefault(int(state["step"]), []).append(parameter)
            for age, parameters in by_age.items():
                self._step_together(parameters, age, group["lr"])

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        for index, saved in state_dict["state"].items():  # undoes torch's cast to the parameter's type
            for name in self._names:
                self.state[parameters[index]][name] = saved[name].to(parameters[index].device, copy=True)

    def _step_together(self, parameters: Sequence[torch.nn.Parameter], age: int, lr: float) -> None:
        theta = [_wide(parameter) for parameter in parameters]
        g = [
            torch.zeros_like(t) if p.grad is None else p.grad.to(t).contiguous()
            for p, t in zip(parameters, theta, strict=True)
        ]
        moments = [[self.state[parameter][name] for parameter in parameters] for name in self._names]
        m, s, smax = (*moments, moments[1])[:3]
        belief_update(theta, g, m, s, smax, age, lr, self._rule, self._exchange)
        for parameter, updated in zip(parameters, theta, strict=True):
            if updated is not parameter:
                parameter.copy_(updated)


def _wide(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the parameter if it is contiguous and at least fp32, else a contiguous copy of at least fp32."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    is_fit = parameter.dtype == dtype and parameter.is_contiguous()
    return parameter if is_fit else parameter.to(dtype, copy=True, memory_format=torch.contiguous_format)


@dataclasses.dataclass(kw_only=True)
class AdaBeliefOptions(Options, name="adabelief"):
    """AdaBelief: steps scaled by how far gradients lie from their running mean.

    Source: Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed gradients" (NeurIPS 2020),
    algorithm 1, and the published package (adabelief-pytorch 0.2.1) with rectify=False and no weight decay.

    As published, eps is added to the variance in every step, which adds up to at most eps / (1 - beta2).
    """

    default_lr: ClassVar[float] = 0.001

    beta1: Annotated[
        float, Gt(0), Lt(1), Doc("decay rate of the mean of gradients; at 0 no gradient would deviate from it")
    ] = 0.9
    beta2: Annotated[float, Gt(0), Lt(1), Doc("decay rate of the variance of gradients")] = 0.999
    eps: Annotated[PositiveOrZero, Doc("keeps the divisor away from 0")] = 1e-16

    @property
    def rule(self) -> Rule:
        """Return the variant of AdaBelief for these options."""
        return Rule(beta1=self.beta1, beta2=self.beta2, eps=self.eps)


@dataclasses.dataclass(kw_only=True)
class MaxAdaBeliefOptions(AdaBeliefOptions, name="max_adabelief"):
    """Max-AdaBelief: AdaBelief that divides by the largest variance so far; ranks exchange moments, not gradients.

    Source: a patent application of 2022 on training over CXL, paragraphs 12 and 74-78; where the application leaves the
    arithmetic open, AdaBelief as published (Zhuang et al., NeurIPS 2020; adabelief-pytorch 0.2.1, amsgrad=True,
    rectify=False).

    Each rank keeps mean m, variance s and the maximum of s for its own gradients; steps use their averages over ranks.

    Per step and rank i: m_i and s_i come from the rank's gradient; M combines the ranks' m_i / (1 - beta1^t); smax_i =
    max(smax_i, s_i); S combines the ranks' smax_i; theta -= lr M / (sqrt(S / (1 - beta2^t)) + eps).

    Bytes: two exchanges per step, M through the compressor with its error feedback and S uncompressed in fp32: without
    compression, twice the bytes of gradients.

    Notes:
        - M is the corrected mean of the averaged gradient. S is at least the maximum that the averaged gradient would
          have (a mean of squares is at least the square of the mean): it includes the variance between ranks, so steps
          are smaller where ranks disagree. mode=gradient, which averages gradients, is therefore a different method.
        - reduce=sum, the literal all-reduce, makes every step sqrt(ranks) times as long as reduce=mean.
        - The source describes two maxima: paragraphs 12 and 76 keep the maximum of all steps (running); paragraph 78
          takes the larger of s_t and s_(t-1) (previous), which can decrease.
        - Even with max_of=running the divisor can decrease: with max_over=raw, sqrt(smax / (1 - beta2^t)) can decrease
          because of the bias correction. With max_over=corrected the divisor cannot decrease, so sqrt(S) / lr does not
          decrease either, unless lr rises, as in a warm-up.

    Raises:
        OptionError: mode=gradient with `reduce` or `recursion`, or recursion=merged with reduce=sum or max_of=previous.
    """

    mode: Annotated[
        Literal["moments", "gradient"],
        Doc("moments: ranks exchange means M and variances S; gradient: they average gradients"),
    ] = "moments"
    reduce: Annotated[
        Literal["mean", "sum", "s_max"],
        Doc("how ranks combine means M and variances S: average both, sum both, or (s_max) average M, maximum of S"),
    ] = "mean"
    recursion: Annotated[
        Literal["local", "merged"],
        Doc("the next maximum starts from this rank's last maximum (local) or from S (merged)"),
    ] = "local"
    max_over: Annotated[
        Literal["raw", "corrected"],
        Doc("compare variances before their bias correction (raw, as published) or after it"),
    ] = "raw"
    eps_mode: Annotated[
        Literal["paper", "outside"],
        Doc("paper: eps is added to the divisor and, in every step, to the variance; outside: only to the divisor"),
    ] = "paper"
    max_of: Annotated[
        Literal["running", "previous"],
        Doc("divide by the largest variance of all steps (running), or of the last two (previous)"),
    ] = "running"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.component_name
        raise_first(
            OptionError,
            (
                self.mode == "gradient" and (self.reduce != "mean" or self.recursion != "local"),
                f"{name}: mode=gradient exchanges no moments; leave reduce and recursion out",
            ),
            (
                self.recursion == "merged" and self.reduce == "sum",
                f"{name}: recursion=merged with reduce=sum would multiply the maximum by the number of ranks in every "
                "step; use reduce=mean or recursion=local",
            ),
            (
                self.recursion == "merged" and self.max_of == "previous",
                f"{name}: max_of=previous keeps no maximum for recursion=merged to start from; leave one of them out",
            ),
        )

    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return the reasons why components do not work with these options, as refusals."""
        has_moments = self.mode == "moments"
        return [
            dense_refusal(f"{self.component_name} sends uncompressed tensors", collective, applies=has_moments),
            Refusal(
                has_moments and self.reduce == "s_max" and not collective.finds_maxima,
                f"{self.component_name} with reduce=s_max takes a maximum over ranks, and {collective} gives a sum of "
                "terms",
                [{"collective": "ring"}, {"optimizer.reduce": "mean"}],
            ),
        ]

    @property
    @override
    def rule(self) -> Rule:
        return dataclasses.replace(
            super().rule,
            eps_in_variance=self.eps_mode == "paper",
            max_of=self.max_of,
            max_over_corrected=self.max_over == "corrected",
            keeps_exchanged=self.recursion == "merged",
        )


class AdaBelief(Belief):
    """AdaBelief for all parameters; gradients must already be averaged over ranks.

    Args:
        model: the network, its parameters, or groups of parameters.
        lr: the learning rate.
        options: `AdaBeliefOptions`.

    Raises:
        OptionError: an option is unknown or out of range.
    """

    def __init__(self, model: Trained | Any, lr: float = AdaBeliefOptions.default_lr, **options: Any) -> None:
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        super().__init__(parameters, lr, AdaBeliefOptions.from_text(options).rule)


class MaxAdaBelief(Belief):
    """Max-AdaBelief for all parameters; ranks average moments, and gradients must not be averaged.

    With mode="gradient" nothing is exchanged, and gradients must already be averaged over ranks.

    Args:
        model: the network, the same on all ranks, or its parameters.
        lr: the learning rate.
        compressor: encodes the means; a spec such as "topk:ratio=0.1", or an instance.
        collective: sums what ranks send; a spec such as "ring", or an instance.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `compressor`, `collective`, `group` and `timeout_s`; the caller closes it.
        options: `MaxAdaBeliefOptions`.

    Raises:
        OptionError: an option is unknown or out of range, options contradict each other, or components do not work
            together.
    """

    def __init__(
        self,
        model: Trained,
        lr: float = MaxAdaBeliefOptions.default_lr,
        *,
        compressor: Compressor | str = "none",
        collective: Collective | str = "native",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        chosen, network = MaxAdaBeliefOptions.from_text(options), network_of(model)
        super().__init__([each for each in network.parameters() if each.requires_grad], lr, chosen.rule)
        self.keeps_gradients = chosen.mode == "moments"
        self._reduce = chosen.reduce
        if self.keeps_gradients and communicator is None and dist.is_initialized():
            communicator = self.open_communicator(network, compressor, collective, group, timeout_s, chosen.refusals)
        if self.keeps_gradients and communicator is not None:  # without a process group there is none
            self.communicator, self._exchange = communicator, self._combine_

    def _combine_(self, means: TensorList, maxima: TensorList) -> None:
        assert self.communicator is not None  # as there is an exchange
        self.communicator.mean_(means)
        self.communicator.combine_(maxima, "max" if self._reduce == "s_max" else self._reduce)
        if self._reduce == "sum":
            torch._foreach_mul_(means, self.communicator.transport.world_size)
