"""K-FAC: gradients times the inverse of an approximate curvature, before any other optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from typing_extensions import Doc, override

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.base import Optimizer
from bench.optimizers.flat import OwnPayloads
from bench.optimizers.kronecker import MomentCapture, MomentExchange
from collectives.base import Collective
from collectives.options import Count, Incompatible, OptionError, Positive, incompatibility
from collectives.payloads import CholeskyFactor, Dense, Payload, Triangle
from collectives.payloads.symmetric import MatrixForm
from compressors.base import Compressor
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator


class Preconditioner:
    """Keep running averages of the second moments of a model's layers, and precondition its gradients in place.

    Args:
        options: the options of K-FAC; their `kl_clip` bounds `predicted_change`, or its mean over ranks if ranks have
            different gradients.
        capture: computes the second moments of the model's layers.
        exchange: averages the moments over ranks, and computes the averages' Cholesky factors.
    """

    def __init__(self, options: Kfac, capture: MomentCapture, exchange: MomentExchange) -> None:
        self._options = options
        self._capture = capture
        self._exchange = exchange
        self._averages = [
            torch.eye(size, device=layer.module.weight.device) for layer in capture.layers for size in layer.sizes
        ]
        self._factors: list[torch.Tensor] = []
        self._steps = 0
        capture.wanted = True

    @torch.no_grad()
    def precondition_(self, lr: float) -> None:
        """Replace the gradients with preconditioned gradients, in place.

        Every rank must call this method in every step, except in skipped steps.

        Args:
            lr: learning rate of the optimizer's next step.
        """
        options = self._options
        # The factors follow this step's moments, unless one of them is not finite.
        if self._capture.wanted and self._averages:
            means = self._exchange.mean(self._capture.moments())
            if means is not None:
                for average, mean in zip(self._averages, means, strict=True):
                    average.mul_(options.decay).add_(mean, alpha=1 - options.decay)
                self._factors = self._exchange.factors(self._averages, options.damping)
        self._steps += 1
        self._capture.wanted = self._steps % options.update_every == 0
        if not self._factors:
            return
        gradients = [layer.gradient for layer in self._capture.layers]
        changed = [
            preconditioned(gradient, *self._factors[2 * index : 2 * index + 2])
            for index, gradient in enumerate(gradients)
        ]
        scale = 1.0
        if options.kl_clip is not None:
            change = predicted_change(gradients, changed, lr)
            scale = kl_scale(self._exchange.mean_scalar(change) if options.keeps_gradients else change, options.kl_clip)
        for layer, matrix in zip(self._capture.layers, changed, strict=True):
            layer.replace_gradient(matrix * scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the running averages, their Cholesky factors and the number of steps; all are equal on all ranks."""
        return {"averages": self._averages, "factors": self._factors, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a copy of the state that `state_dict` returned."""
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)
        self._factors = [factor.clone() for factor in state["factors"]]
        self._steps = state["steps"]
        self._capture.wanted = self._steps % self._options.update_every == 0


def preconditioned(gradient: torch.Tensor, of_inputs: torch.Tensor, of_outputs: torch.Tensor) -> torch.Tensor:
    """Return the preconditioned gradient G^-1 gradient A^-1, [out, in].

    Args:
        gradient: a layer's gradient, [out, in].
        of_inputs: Cholesky factor L [in, in] of A, so L L^T = A.
        of_outputs: Cholesky factor L [out, out] of G, so L L^T = G.
    """
    return torch.cholesky_solve(torch.cholesky_solve(gradient, of_outputs).T, of_inputs).T


def predicted_change(gradients: list[torch.Tensor], changed: list[torch.Tensor], lr: float) -> float:
    """Return |lr^2 sum(gradients * changed)| over all elements, which estimates how much a step changes the outputs.

    Args:
        gradients: each layer's gradient, [out, in].
        changed: each layer's preconditioned gradient, [out, in].
        lr: learning rate of the step.
    """
    products = [(gradient * matrix).sum() for gradient, matrix in zip(gradients, changed, strict=True)]
    return lr**2 * abs(float(torch.stack(products).sum()))


def kl_scale(change: float, bound: float) -> float:
    """Return the factor, at most 1, for preconditioned gradients, so that their `predicted_change` is at most `bound`.

    Args:
        change: the result of `predicted_change` for unscaled gradients, at least 0.
        bound: largest result after scaling.
    """
    return min(1.0, math.sqrt(bound / change)) if change else 1.0


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS: dict[MatrixForm, type[Payload]] = {"triangle": Triangle, "cholesky": CholeskyFactor, "dense": Dense}


@dataclasses.dataclass(kw_only=True)
class Kfac(Optimizer, name="kfac"):
    """K-FAC: gradients times the inverse of an approximate curvature, before any other optimizer.

    The curvature of a linear or convolution layer is approximated by a Kronecker product of two small symmetric
    matrices: the second moments A of its inputs and G of its output gradients. Gradients of other parameters are not
    changed. Besides gradients, ranks exchange these factors: half of each symmetric matrix is enough, and one rank's
    Cholesky factorisation serves all ranks.

    Source: Martens, Grosse 2015 (linear) and Grosse, Martens 2016 (convolution); formulas and defaults of kfac-pytorch
    (Pauloski et al. 2021).

    Precondition gradients with K-FAC before the optimizer `inner`.

    Bytes: per update and d x d factor with values of v bytes, transfer=triangle sums v d (d + 1) / 2 bytes over ranks
    and broadcasts as many. transfer=dense sums v d^2 bytes, transfer=cholesky 24 + v d (d + 1) / 2; with both, every
    rank then factors all matrices. With `ring`, which merges factors by QR, cholesky halves the bytes of dense for any
    number of ranks. With `allgather` each of n ranks sends its factor n - 1 times: half the bytes of a dense ring for
    two ranks, as many for four, more for larger n.

    An `inner` that exchanges moments instead of gradients (max_adabelief) steps on every rank's own gradient,
    preconditioned with the factors that all ranks share. `kl_clip` then bounds the mean over ranks of their predicted
    changes, which is at least that of the mean gradient; all ranks shorten their steps by the same factor.

    Raises:
        OptionError: `inner` or `collective` cannot be built, or is kfac itself, or `inner` encodes its own messages.

    Attributes:
        stepping: the optimizer named by `inner`, which updates the parameters.
        summing: the collective named by `collective`, which sums the factors; None: the run's collective.
    """

    default_lr: ClassVar[float] = 0.02
    watches_layers: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True

    inner: Annotated[str, Doc("optimizer that steps on the preconditioned gradients; give --lr to suit it")] = "sgd"
    update_every: Annotated[Count, Doc("steps between updates of the factors")] = 10
    damping: Annotated[Positive, Doc("added to the diagonal of both factors")] = 0.003
    decay: Annotated[float, Ge(0), Lt(1), Doc("share of the running averages that an update keeps")] = 0.95
    kl_clip: Annotated[
        float | None, Gt(0), Le(1e12), Doc("bound of lr^2 gradient * preconditioned gradient; none: unbounded")
    ] = 0.001
    transfer: Annotated[
        MatrixForm,
        Doc("form in which factors are sent: triangle (one rank factors each sum), cholesky (one per rank), dense"),
    ] = "triangle"
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Doc("type of factors' values on the wire")] = "fp32"
    collective: Annotated[
        str | None,
        Doc(
            "sums the factors; with transfer=cholesky, ring halves their bytes for any number of ranks; none: the run's"
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stepping: Optimizer = self._part("optimizers", "inner", self.inner)
        if isinstance(self.stepping, OwnPayloads):
            raise OptionError(
                f"{self.component_name}: inner={self.inner} is not possible: it does not precondition for an "
                "optimizer that encodes what it sends; name another, such as sgd"
            )
        self.summing: Collective | None = (
            None if self.collective is None else self._part("collectives", "collective", self.collective)
        )

    def _part(self, kind: str, option: str, text: str) -> Any:
        if text.partition(":")[0] == self.component_name:  # would recurse without end
            raise OptionError(
                f"{self.component_name}: {option}={text} is not possible: it would contain itself; name another "
                "optimizer, such as sgd"
            )
        try:
            return spec.build(kind, text)
        except UsageError as error:
            raise OptionError(f"{self.component_name}: {option}={text} is not possible: {error}") from None

    @property
    @override
    def keeps_gradients(self) -> bool:
        return self.stepping.keeps_gradients

    @property
    @override
    def period(self) -> int:
        return self.update_every

    @override
    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        self.stepping.check_compatible(compressor, collective)
        summing, kind = self.summing or collective, _KINDS[self.transfer]
        if self.summing and summing.recodes and not summing.decodes:
            raise Incompatible(
                f"{self.component_name}: collective={self.collective} encodes sums of codes again, and factors are no "
                f"codes; use collective={summing.component_name}"
            )
        reason = incompatibility(summing.check_compatible, kind)
        if not (reason or kind.elementwise) and (summing.recodes or summing.keeps_residuals):
            reason = f"a server encodes gradients again and keeps their residuals, not {kind.__name__} payloads"
        if reason:
            raise Incompatible(
                f"{self.component_name}: transfer={self.transfer} is not possible: {reason}; add collective=ring to it"
            )

    @override
    def check_layers(self, layers: Sequence[Layer]) -> None:
        self.stepping.check_layers(layers)

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return self.stepping.build(parameters, lr)  # alone: without the model's layers there are no factors

    @override
    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        assert channel is not None  # because `exchanges` is True
        collective = channel.bind(self.summing or channel.collective.options)
        exchange = MomentExchange(channel, collective, self.transfer, _DTYPES[self.precision])
        preconditioner = Preconditioner(self, MomentCapture(model), exchange)
        optimizer = self.stepping.bind(model, lr, channel if self.stepping.exchanges else None)
        optimizer.register_step_pre_hook(lambda step, *_: preconditioner.precondition_(step.param_groups[0]["lr"]))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"factors": preconditioner.state_dict()})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: preconditioner.load_state_dict(state["factors"])  # the inner optimizer loads the rest
        )
        return optimizer
