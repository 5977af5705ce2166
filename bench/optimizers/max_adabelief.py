"""Max-AdaBelief: AdaBelief that divides by the largest variance so far; ranks exchange moments, not gradients.

Source: a patent application of 2022 on training over CXL, paragraphs 12 and 74-78; where it leaves the arithmetic open,
AdaBelief as published (Zhuang et al., NeurIPS 2020; adabelief-pytorch 0.2.1, amsgrad=True, rectify=False).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import nn
from typing_extensions import Doc, override

from bench.core import spec
from bench.optimizers._belief import Belief, BeliefOptimizer, Rule, Tensors
from collectives.base import Collective
from collectives.options import OptionError
from collectives.payloads.dense import Dense
from compressors.base import Compressor
from compressors.ddp.communicator import CompressedCommunicator


@dataclasses.dataclass(kw_only=True)
class MaxAdaBelief(BeliefOptimizer):
    """Each rank keeps mean m, variance s and maximum of its own gradients; what it steps with is equal on all ranks.

    Per step and rank i: m_i and s_i from the own gradient; M = the ranks' m_i / (1 - beta1^t) together; smax_i =
    max(smax_i, s_i); S = the ranks' smax_i together; theta -= lr M / (sqrt(S / (1 - beta2^t)) + eps).

    Bytes: two exchanges per step, M through the compressor with its error feedback and S whole in fp32: without
    compression twice the gradient's.

    What to know of it:
        - M is the corrected mean of the averaged gradient. S is at least the maximum that the averaged gradient would
          have (a mean of squares is no less than the square of the mean): it holds the variance between ranks as well,
          so steps are smaller where ranks disagree. mode=gradient, which averages gradients, is another method.
        - reduce=sum, the literal all-reduce, makes every step sqrt(ranks) times as long as reduce=mean does.
        - The document says both: paragraphs 12 and 76 keep the maximum of all steps (running), paragraph 78 takes the
          larger of s_t and s_(t-1) (previous), which falls again.
        - A maximum that never falls is not yet a divisor that never falls: sqrt(smax / (1 - beta2^t)) does fall with
          max_over=raw, because its correction does. With max_over=corrected it cannot; then sqrt(S) / lr never falls
          as long as lr never rises, which a warm-up of lr breaks.

    Raises:
        OptionError: options that mean nothing together.
    """

    mode: Annotated[
        Literal["moments", "gradient"], Doc("moments: ranks exchange M and S; gradient: they average gradients")
    ] = "moments"
    reduce: Annotated[
        Literal["mean", "sum", "s_max"], Doc("what becomes of M and S: means, sums, or M's mean and S's maximum")
    ] = "mean"
    recursion: Annotated[
        Literal["local", "merged"], Doc("the next maximum is taken over this rank's last one, or over S")
    ] = "local"
    max_over: Annotated[
        Literal["raw", "corrected"], Doc("compare variances before their bias correction, as published, or after")
    ] = "raw"
    eps_mode: Annotated[
        Literal["paper", "outside"],
        Doc("paper: eps also enters the variance in every step; outside: the divisor alone"),
    ] = "paper"
    max_of: Annotated[
        Literal["running", "previous"], Doc("the maximum of all steps, or the larger of the last two variances")
    ] = "running"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.component_name
        if self.mode == "gradient" and (self.reduce != "mean" or self.recursion != "local"):
            raise OptionError(f"{name}: mode=gradient exchanges no moments; leave reduce and recursion out")
        if self.recursion == "merged" and self.reduce == "sum":
            raise OptionError(
                f"{name}: recursion=merged with reduce=sum would multiply the maximum by the number of ranks in every "
                "step; use reduce=mean or recursion=local"
            )
        if self.recursion == "merged" and self.max_of == "previous":
            raise OptionError(
                f"{name}: max_of=previous keeps no maximum for recursion=merged to start from; leave one of them out"
            )

    @property
    @override
    def keeps_gradients(self) -> bool:
        return self.mode == "moments"

    @override
    def refusal(self, compressor: Compressor, collective: Collective) -> str | None:
        if self.mode == "gradient":
            return None
        name = self.component_name
        if reason := collective.refusal(Dense):
            return f"{name} sends Dense payloads: {reason}"
        if self.reduce == "s_max" and not collective.finds_maxima:
            return (
                f"{name} with reduce=s_max takes a maximum over ranks, and {spec.short_text(collective)} gives a sum "
                "of terms; use collective ring or reduce=mean"
            )
        return None

    @override
    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return Belief(parameters, lr, self.rule)

    @override
    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        if channel is None:
            return super().bind(model, lr)

        def exchange(means: Tensors, maxima: Tensors) -> None:
            channel.mean_(means)
            channel.combine_(maxima, "max" if self.reduce == "s_max" else self.reduce)
            if self.reduce == "sum":
                torch._foreach_mul_(means, channel.transport.world_size)

        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Belief(trainable, lr, self.rule, exchange)

    @property
    def rule(self) -> Rule:
        """Which relative of AdaBelief these options make."""
        return Rule(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            eps_in_variance=self.eps_mode == "paper",
            max_of=self.max_of,
            max_over_corrected=self.max_over == "corrected",
            keeps_exchanged=self.recursion == "merged",
        )
