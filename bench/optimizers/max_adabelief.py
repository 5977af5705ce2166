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
    """Keep mean m, variance s and maximum of each rank's own gradients, and step with their averages over ranks.

    Per step and rank i: m_i and s_i come from the rank's gradient; M combines the ranks' m_i / (1 - beta1^t); smax_i =
    max(smax_i, s_i); S combines the ranks' smax_i; theta -= lr M / (sqrt(S / (1 - beta2^t)) + eps).

    Bytes: two exchanges per step, M through the compressor with its error feedback and S whole in fp32: without
    compression, twice the bytes of gradients.

    Notes:
        - M is the corrected mean of the averaged gradient. S is at least the maximum that the averaged gradient would
          have (a mean of squares is at least the square of the mean): it includes the variance between ranks, so steps
          are smaller where ranks disagree. mode=gradient, which averages gradients, is therefore a different method.
        - reduce=sum, the literal all-reduce, makes every step sqrt(ranks) times as long as reduce=mean.
        - The source describes two maxima: paragraphs 12 and 76 keep the maximum of all steps (running); paragraph 78
          takes the larger of s_t and s_(t-1) (previous), which can decrease.
        - Even with max_of=running the divisor can decrease: with max_over=raw, sqrt(smax / (1 - beta2^t)) does, because
          of the bias correction. With max_over=corrected it cannot; then sqrt(S) / lr never decreases as long as lr
          does not rise, as it does during a warm-up.

    Raises:
        OptionError: options contradict each other.
    """

    mode: Annotated[
        Literal["moments", "gradient"], Doc("moments: ranks exchange M and S; gradient: they average gradients")
    ] = "moments"
    reduce: Annotated[
        Literal["mean", "sum", "s_max"], Doc("how ranks combine M and S: by means, sums, or M by mean and S by maximum")
    ] = "mean"
    recursion: Annotated[
        Literal["local", "merged"], Doc("the next maximum is taken over this rank's last one, or over S")
    ] = "local"
    max_over: Annotated[
        Literal["raw", "corrected"], Doc("compare variances before their bias correction, as published, or after")
    ] = "raw"
    eps_mode: Annotated[
        Literal["paper", "outside"],
        Doc("paper: eps is also added to the variance in every step; outside: only to the divisor"),
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
        """Return the variant of AdaBelief for these options."""
        return Rule(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            eps_in_variance=self.eps_mode == "paper",
            max_of=self.max_of,
            max_over_corrected=self.max_over == "corrected",
            keeps_exchanged=self.recursion == "merged",
        )
