"""0/1 Adam: ranks exchange one bit per element from the start, and later make several steps per exchange."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from typing_extensions import Doc, override

from collectives.options import Count
from gradwire.exchange.communicator import set_parts_
from gradwire.optim.base import Trained, add_flat_, flat_of
from gradwire.optim.onebit import (
    BitsMean,
    Mean,
    OneBitOptimizer,
    OneBitOptions,
    Root,
    direction_of,
    observe_,
    root_of,
)


@torch.no_grad()
def zero_one_adam_update(
    X: Sequence[torch.Tensor],
    G: torch.Tensor,
    M: torch.Tensor,
    V: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mean_: Mean,
    bits_mean_: BitsMean,
    root: Root | None,
) -> Root:
    """Update all parameters once, before V is frozen, with the mean gradient: sent whole if V is updated, else in bits.

    Arguments and result are those of `onebit_adam_update`; `root` is None in steps that update V.
    """
    if root is None:
        mean_(G)
        observe_(G, M, V, beta1, beta2)
        root = root_of(V, eps)
    else:
        bits_mean_(G, root[1])
        M.lerp_(G, 1 - beta1)
    add_flat_(X, direction_of(X, M, root, weight_decay), -lr)
    return root


@torch.no_grad()
def merge_drifts_(
    anchor: torch.Tensor, drift: torch.Tensor, M: torch.Tensor, root: Root, lr_sum: float, bits_mean_: BitsMean
) -> None:
    """Exchange the steps that ranks made alone: anchor += mean drift; drift = 0; M = -(mean drift) * root / lr_sum.

    Args:
        anchor: the parameters after the last exchange, fp32 [elements of all parameters], updated in place.
        drift: the sum of this rank's steps since the last exchange, of the same shape, updated in place.
        M: mean of gradients, of the same shape, overwritten with a value that follows from the mean of the steps.
        root: `root_of(V)`.
        lr_sum: sum of the learning rates of these steps.
        bits_mean_: averages over ranks, with one bit per element and error feedback.
    """
    divisor, frozen = root
    sent = drift * divisor
    bits_mean_(sent, frozen)
    torch.div(sent, -lr_sum, out=M)
    anchor.addcdiv_(sent, divisor)
    if frozen is not None:  # only weight decay moves these elements, equally on all ranks
        anchor.add_(drift.masked_fill(~frozen, 0))
    drift.zero_()


@dataclasses.dataclass(kw_only=True)
class ZeroOneAdamOptions(OneBitOptions, name="zero_one_adam"):
    """0/1 Adam: one bit per element from the start, a second moment that is updated ever less often, then local steps.

    Source: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (arXiv:2202.06009),
    and DeepSpeed (runtime/fp16/onebit/zoadam.py); the options have DeepSpeed's names.
    Differs: as `onebit_adam`. Also, before a rank adds a mean, it returns to the parameters of the last exchange,
    instead of subtracting its own steps, so that all ranks have the same bits.

    Until step `var_freeze_step`, ranks average gradients. At every `interval`-th step they send whole gradients, which
    then update the second moment; at all other steps they send one bit per element. The interval starts at 1 and
    doubles after every `var_update_scaler` updates.

    After that the second moment does not change, and every rank makes steps of its own. At every `interval`-th step,
    ranks average their steps since the last exchange with one bit per element, and derive the momentum from the mean.
    This interval starts at 1 and doubles after every `local_step_scaler` steps, up to `local_step_clipper`. Between
    exchanges, evaluations use the parameters of the last exchange.

    Bytes: per step, those of `onebit_adam` with whole gradients or with one bit per element; 0 for a step without an
    exchange.
    """

    var_freeze_step: Annotated[Count, Doc("last step that may update the second moment")] = 1000
    var_update_scaler: Annotated[Count, Doc("number of updates after which the interval between them doubles")] = 16
    local_step_scaler: Annotated[
        Count, Doc("number of local steps after which the interval between exchanges doubles")
    ] = 32678
    local_step_clipper: Annotated[Count, Doc("longest interval between exchanges, in steps")] = 16

    def updates_moment(self, step: int) -> bool:
        """Return True if this step, counted from 1 and at most `var_freeze_step`, updates the second moment."""
        last, interval = 0, 1
        while (
            end := (last // interval + self.var_update_scaler) * interval
        ) < step:  # the last update with this interval
            last, interval = end, 2 * interval
        return step % interval == 0

    def exchanges_steps(self, step: int) -> bool:
        """Return True if ranks average their steps after this step, counted from 1 and above `var_freeze_step`."""
        times_doubled = (step - self.var_freeze_step - 1) // self.local_step_scaler
        return step % min(self.local_step_clipper, 1 << min(times_doubled, 62)) == 0


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam for all parameters; gradients must not be averaged before.

    After step `var_freeze_step`, ranks have different parameters between two exchanges: "anchor", the parameters after
    the last exchange, which are equal on all ranks, plus "drift", this rank's own steps since that exchange. To
    evaluate or save the parameters in this phase, call `show_shared` before, and `show_own` afterwards.

    Args:
        model: the network, the same on all ranks, or its parameters.
        lr: the learning rate.
        options: `collective`, `group`, `timeout_s` and `communicator` as in `OneBitAdam`, and `ZeroOneAdamOptions`.

    Raises:
        OptionError: an option is unknown or out of range, or the collective does not work with 0/1 Adam.
    """

    options_class = ZeroOneAdamOptions
    _options: ZeroOneAdamOptions

    def __init__(self, model: Trained, lr: float = OneBitOptions.default_lr, **options: Any) -> None:
        super().__init__(model, lr, **options)
        self.counts["lr_sum"] = 0.0  # of the steps since the last exchange

    @override
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        self.counts["step"] += 1
        step = int(self.counts["step"])
        if step <= self._options.var_freeze_step:
            self.descend_by(zero_one_adam_update, gradient, lr, observes=self._options.updates_moment(step))
            return
        if "anchor" not in self.memory:
            self.memory |= {"anchor": flat_of(self.parameters), "drift": self.zeros()}
            self.forget_residuals()
        self._descend_apart(gradient, lr)

    @override
    @torch.no_grad()
    def show_shared(self) -> None:
        if "anchor" in self.memory:
            set_parts_(self.parameters, self.memory["anchor"])

    @override
    @torch.no_grad()
    def show_own(self) -> None:
        if "anchor" in self.memory:
            set_parts_(self.parameters, self.memory["anchor"] + self.memory["drift"])

    def _descend_apart(self, gradient: torch.Tensor, lr: float) -> None:
        mean, anchor, drift = (self.memory[name] for name in ("mean", "anchor", "drift"))
        mean.lerp_(gradient, 1 - self._options.beta1)
        drift.sub_(direction_of(self.parameters, mean, self.root(), self._options.weight_decay), alpha=lr)
        self.counts["lr_sum"] += lr
        if self._options.exchanges_steps(int(self.counts["step"])) and self.counts["lr_sum"]:
            merge_drifts_(anchor, drift, mean, self.root(), self.counts["lr_sum"], self.average_bits_)
            self.counts["lr_sum"] = 0.0
        self.show_own()
