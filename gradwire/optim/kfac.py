"""K-FAC: multiplies gradients by the inverse of an approximate curvature, in front of any other optimizer.

The curvature of a linear or convolution layer is approximated by a Kronecker product of two small symmetric matrices:
the second moments A of the layer's inputs and G of its output gradients. Gradients of other parameters are not changed.
Besides gradients, ranks exchange the matrices A and G: sending half of each symmetric matrix is enough, and only one
rank needs to compute a matrix's Cholesky factor, which it sends to all ranks.

Source: Martens, Grosse 2015 (linear) and Grosse, Martens 2016 (convolution); formulas and defaults of kfac-pytorch
(Pauloski et al. 2021).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import Count, Options, Positive, build, incompatibility
from collectives.payloads import CholeskyFactor, Dense, Payload, Triangle
from collectives.payloads.symmetric import MatrixForm
from collectives.refusals import Refusal
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import BoundOptimizer, FlatOptimizer
from gradwire.optim.kronecker import MomentCapture, MomentExchange


@torch.no_grad()
def kfac_update(
    G: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    lr: float,
    kl_clip: float | None,
    mean: Callable[[float], float] = lambda change: change,
) -> list[torch.Tensor]:
    """Return each layer's preconditioned gradient B^-1 G A^-1, [out, in], all scaled by the same factor, at most 1.

    Args:
        G: each layer's gradient, [out, in].
        factors: for each layer the Cholesky factors of A [in, in] and of B [out, out], in this order.
        lr: learning rate of the step.
        kl_clip: upper bound of the mean of `predicted_change`; None: no bound.
        mean: averages `predicted_change` over ranks, if ranks have different gradients.
    """
    changed = [preconditioned(g, *factors[2 * index : 2 * index + 2]) for index, g in enumerate(G)]
    if kl_clip is None:
        return changed
    scale = kl_scale(mean(predicted_change(G, changed, lr)), kl_clip)
    return [matrix * scale for matrix in changed]


def preconditioned(gradient: torch.Tensor, of_inputs: torch.Tensor, of_outputs: torch.Tensor) -> torch.Tensor:
    """Return the preconditioned gradient G^-1 gradient A^-1, [out, in].

    Args:
        gradient: a layer's gradient, [out, in].
        of_inputs: Cholesky factor L [in, in] of A, so L L^T = A.
        of_outputs: Cholesky factor L [out, out] of G, so L L^T = G.
    """
    return torch.cholesky_solve(torch.cholesky_solve(gradient, of_outputs).T, of_inputs).T


def predicted_change(gradients: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], lr: float) -> float:
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
        bound: largest allowed `predicted_change` of the scaled gradients.
    """
    return min(1.0, math.sqrt(bound / change)) if change else 1.0


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS: dict[MatrixForm, type[Payload]] = {"triangle": Triangle, "cholesky": CholeskyFactor, "dense": Dense}


@dataclasses.dataclass(kw_only=True)
class KfacOptions(Options, name="kfac"):
    """Options: how K-FAC approximates the curvature, and in which form ranks exchange its matrices.

    Bytes: in each update, for each d x d matrix with values of v bytes, transfer=triangle sums v d (d + 1) / 2 bytes
    over ranks, and then broadcasts the same number of bytes. transfer=dense sums v d^2 bytes, transfer=cholesky 24 + v
    d (d + 1) / 2; in both forms, every rank then factors all matrices. With `ring`, which merges factors by QR,
    cholesky halves the bytes of dense for any number of ranks. With `allgather` each of n ranks sends its factor n - 1
    times: this is half the bytes of a dense ring for two ranks, the same for four ranks, and more for larger n.

    An inner optimizer that exchanges moments instead of gradients (max_adabelief) steps on every rank's own gradient,
    preconditioned with the factors that all ranks share. `kl_clip` then bounds the mean of the ranks' predicted
    changes, which is at least the predicted change of the mean gradient; all ranks shorten their steps by the same
    factor.
    """

    update_every: Annotated[Count, Doc("steps between updates of the factors")] = 10
    damping: Annotated[Positive, Doc("added to the diagonal of both factors")] = 0.003
    decay: Annotated[float, Ge(0), Lt(1), Doc("share of the running averages that an update keeps")] = 0.95
    kl_clip: Annotated[
        float | None, Gt(0), Le(1e12), Doc("upper bound of lr^2 gradient * preconditioned gradient; none: no bound")
    ] = 0.001
    transfer: Annotated[
        MatrixForm,
        Doc("form in which ranks send A and G: triangle (half of each), cholesky (Cholesky factors), dense (whole)"),
    ] = "triangle"
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Doc("type of factors' values on the wire")] = "fp32"

    def summing_refusals(self, collective: Collective) -> list[Refusal]:
        """Return the reasons why this collective cannot sum K-FAC's matrices in the form `transfer`."""
        kind = _KINDS[self.transfer]
        reason = incompatibility(collective.check_compatible, kind)
        if not (reason or kind.elementwise) and (collective.recodes or collective.keeps_residuals):
            reason = f"a server encodes gradients again and keeps their residuals, not {kind.__name__} payloads"
        return [
            Refusal(
                reason is not None,
                f"{self.component_name}: transfer={self.transfer} is not possible: {reason}",
                [{"optimizer.collective": "ring"}],
            )
        ]


class KFAC(BoundOptimizer):
    """K-FAC in front of another optimizer, with the same parameter groups as that optimizer.

    K-FAC measures the matrices A and G of every layer while the model runs forward and backward, once per step. The
    state consists of running averages of these matrices, fp32 [d, d], their Cholesky factors, and the inner optimizer's
    state. Averages and factors are equal on all ranks.

    Args:
        model: the network. Its gradients must be averaged over ranks, by DistributedDataParallel or otherwise, unless
            `inner` takes each rank's own gradients, as `MaxAdaBelief` does.
        inner: another optimizer of the same network, which makes the steps, with the preconditioned gradients.
        collective: sums K-FAC's matrices; a spec such as "ring", or an instance; None: the communicator's collective,
            or "native" without a communicator.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: connects the ranks in place of a group; the caller closes it.
        options: `KfacOptions`.

    Raises:
        OptionError: an option is unknown or out of range, or the collective cannot sum factors.
        ValueError: `inner` encodes its messages itself.
    """

    communicator: CompressedCommunicator

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        collective: Collective | str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        chosen = KfacOptions.from_text(options)
        if isinstance(inner, FlatOptimizer):
            raise ValueError(
                f"K-FAC does not precondition for {type(inner).__name__}, which encodes what it sends; give it another "
                "optimizer, such as torch.optim.SGD"
            )
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self._bound = inner if isinstance(inner, BoundOptimizer) else None
        if isinstance(collective, str):
            collective = build("collectives", Collective, collective)
        self.communicator = communicator or self.open_communicator(
            model, "none", collective or "native", group, timeout_s, lambda _, summing: chosen.summing_refusals(summing)
        )
        summing = self.communicator.bind(collective or self.communicator.collective.options)
        self._options = chosen
        self._capture = MomentCapture(model)
        self._exchange = MomentExchange(self.communicator, summing, chosen.transfer, _DTYPES[chosen.precision])
        self._averages = [
            torch.eye(size, device=layer.module.weight.device) for layer in self._capture.layers for size in layer.sizes
        ]
        self._factors: list[torch.Tensor] = []
        self._steps = 0
        self._capture.wanted = True

    @override
    def update(self) -> None:
        if any(parameter.grad is not None for layer in self._capture.layers for parameter in layer.parameters):
            self._precondition()  # `gradwire.attach` sets all gradients of a skipped step to None
        self.inner.step()

    @property
    @override
    def residual_nbytes(self) -> int:
        return self._bound.residual_nbytes if self._bound else 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "inner": self.inner.state_dict(),
            "averages": self._averages,
            "factors": self._factors,
            "steps": self._steps,
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        for average, saved in zip(self._averages, state_dict["averages"], strict=True):
            average.copy_(saved)
        self._factors = [factor.clone() for factor in state_dict["factors"]]
        self._steps = state_dict["steps"]
        self._capture.wanted = self._steps % self._options.update_every == 0

    @override
    def close(self) -> None:
        super().close()
        if self._bound is not None:
            self._bound.close()

    def _update_factors(self) -> None:
        """Update the factors with this step's moments, if an update is due and all moments are finite."""
        if not (self._capture.wanted and self._averages):
            return
        means = self._exchange.mean(self._capture.moments())
        if means is not None:
            for average, mean in zip(self._averages, means, strict=True):
                average.mul_(self._options.decay).add_(mean, alpha=1 - self._options.decay)
            self._factors = self._exchange.factors(self._averages, self._options.damping)

    def _precondition(self) -> None:
        """Replace the gradients of all layers with preconditioned gradients, once there are factors."""
        self._update_factors()
        self._steps += 1
        self._capture.wanted = self._steps % self._options.update_every == 0
        if not self._factors:
            return
        has_own_gradients = self._bound is not None and self._bound.keeps_gradients
        changed = kfac_update(
            [layer.gradient for layer in self._capture.layers],
            self._factors,
            self.param_groups[0]["lr"],
            self._options.kl_clip,
            self._exchange.mean_scalar if has_own_gradients else lambda change: change,
        )
        for layer, matrix in zip(self._capture.layers, changed, strict=True):
            layer.replace_gradient(matrix)
