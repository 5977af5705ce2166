"""K-FAC: gradients times the inverse of an approximate curvature, before any other optimizer.

The curvature of a linear or convolution layer is approximated by a Kronecker product of two small symmetric matrices:
the second moments A of its inputs and G of its output gradients. Gradients of other parameters are not changed. Besides
gradients, ranks exchange these factors: half of each symmetric matrix is enough, and one rank's Cholesky factorisation
serves all ranks.

Source: Martens, Grosse 2015 (linear) and Grosse, Martens 2016 (convolution); formulas and defaults of kfac-pytorch
(Pauloski et al. 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, cast

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from typing_extensions import Doc, override

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.base import Optimizer
from bench.optimizers.kronecker.exchange import MomentExchange
from bench.optimizers.kronecker.layer import MomentCapture
from bench.optimizers.kronecker.preconditioner import Preconditioner
from collectives.base import Collective
from collectives.options import Count, OptionError, Options, Positive
from collectives.payloads import CholeskyFactor, Dense, Payload, Triangle
from collectives.payloads.symmetric import Form
from compressors.base import Compressor
from compressors.ddp.communicator import CompressedCommunicator

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS: dict[Form, type[Payload]] = {"triangle": Triangle, "cholesky": CholeskyFactor, "dense": Dense}


@dataclasses.dataclass(kw_only=True)
class Kfac(Optimizer):
    """Precondition gradients with K-FAC before the optimizer `inner`.

    Bytes: per update and d x d factor with values of v bytes, v d (d + 1) / 2 are summed and as many broadcast.
    transfer=dense sums v d^2, transfer=cholesky 24 + v d (d + 1) / 2; both then factor on all ranks. With `ring`, which
    merges factors by QR, cholesky halves the bytes of dense for any number of ranks. With `allgather` each rank sends
    its factor n - 1 times: half the bytes of a dense ring for two ranks, as many for four, more for larger n.

    An `inner` that exchanges moments instead of gradients (max_adabelief) steps on every rank's own gradient,
    preconditioned with the factors that all ranks share. `kl_clip` then bounds the mean over ranks of their predicted
    changes, which is at least that of the mean gradient; all ranks shorten their steps by the same factor.

    Raises:
        OptionError: `inner` or `collective` is not possible, for example inner=kfac.

    Attributes:
        stepping: the inner optimizer.
        summing: the collective for the factors; None: the run's collective.
    """

    default_lr: ClassVar[float] = 0.02

    inner: Annotated[str, Doc("optimizer that steps on the preconditioned gradients; give --lr to suit it")] = "sgd"
    update_every: Annotated[Count, Doc("steps between updates of the factors")] = 10
    damping: Annotated[Positive, Doc("added to the diagonal of both factors")] = 0.003
    decay: Annotated[float, Ge(0), Lt(1), Doc("share of the running averages that an update keeps")] = 0.95
    kl_clip: Annotated[
        float | None, Gt(0), Le(1e12), Doc("bound of lr^2 gradient * preconditioned gradient; none: unbounded")
    ] = 0.001
    transfer: Annotated[
        Form,
        Doc("how factors are sent: as triangles, each sum factored by one rank; as each rank's Cholesky factor; whole"),
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
        self.stepping = cast(Optimizer, self._part("optimizers", "inner", self.inner))
        self.summing: Collective | None = None
        if self.collective is not None:
            self.summing = cast(Collective, self._part("collectives", "collective", self.collective))

    def _part(self, room: str, option: str, text: str) -> Options:
        if text.partition(":")[0] == self.component_name:  # would recurse without end
            raise OptionError(
                f"{self.component_name}: {option}={text} is not possible: it needs another optimizer inside"
            )
        try:
            return spec.build(room, text)
        except UsageError as error:
            raise OptionError(f"{self.component_name}: {option}={text} is not possible: {error}") from None

    @property
    @override
    def exchanges(self) -> bool:
        return True

    @property
    @override
    def keeps_gradients(self) -> bool:
        return self.stepping.keeps_gradients

    @property
    @override
    def watches_layers(self) -> bool:
        return True

    @override
    def refusal(self, compressor: Compressor, collective: Collective) -> str | None:
        if reason := self.stepping.refusal(compressor, collective):
            return reason
        summing, kind = self.summing or collective, _KINDS[self.transfer]
        reason = summing.refusal(kind)
        if (summing.recodes or summing.keeps_residuals) and not kind.elementwise:
            reason = f"a server encodes gradients again and keeps their residuals, not {kind.__name__} payloads"
        if reason is None:
            return None
        return f"{self.component_name}: transfer={self.transfer} is not possible: {reason}; add collective=ring to it"

    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Build only the inner optimizer: without the model's layers there are no factors."""
        return self.stepping.build(parameters, lr)

    @override
    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        assert channel is not None  # because `exchanges` is True
        preconditioner = Preconditioner(
            MomentCapture(model),
            MomentExchange(
                channel,
                channel.bind(self.summing or channel.collective.options),
                self.transfer,
                _DTYPES[self.precision],
            ),
            update_every=self.update_every,
            damping=self.damping,
            decay=self.decay,
            kl_clip=self.kl_clip,
            own_gradients=self.keeps_gradients,
        )
        optimizer = self.stepping.bind(model, lr, channel if self.stepping.exchanges else None)
        optimizer.register_step_pre_hook(lambda step, *_: preconditioner.precondition_(step.param_groups[0]["lr"]))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"factors": preconditioner.state_dict()})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: preconditioner.load_state_dict(state["factors"])  # the inner optimizer loads the rest
        )
        return optimizer
