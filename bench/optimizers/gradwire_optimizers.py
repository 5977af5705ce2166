"""The optimizers of `gradwire.optim`, which a training script can use without `bench`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from typing_extensions import Doc, override

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.base import Optimizer
from collectives.base import Collective
from collectives.options import OptionError
from collectives.refusals import Refusal
from compressors.base import Compressor
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.adabelief import AdaBelief, AdaBeliefOptions, MaxAdaBelief, MaxAdaBeliefOptions
from gradwire.optim.demo import DeMo, DeMoOptions
from gradwire.optim.dion import Dion, DionOptions
from gradwire.optim.kfac import KFAC, KfacOptions
from gradwire.optim.muon import Muon, MuonOptions
from gradwire.optim.onebit import OneBitAdam, OneBitAdamOptions
from gradwire.optim.zero_one import ZeroOneAdam, ZeroOneAdamOptions


@dataclasses.dataclass(kw_only=True)
class UseMuon(MuonOptions, Optimizer, name="muon"):
    """Muon: steps along a momentum whose singular values are all made about 1."""

    built = Muon
    needs_network: ClassVar[bool] = True

    @property
    @override
    def exchanges(self) -> bool:
        return self.shard


@dataclasses.dataclass(kw_only=True)
class UseDion(DionOptions, Optimizer, name="dion"):
    """Dion: orthonormal low-rank steps; ranks exchange the factors of their momentum, not gradients."""

    built = Dion
    needs_network: ClassVar[bool] = True


@dataclasses.dataclass(kw_only=True)
class UseDeMo(DeMoOptions, Optimizer, name="demo"):
    """DeMo: ranks exchange the largest frequencies of their momentum, and step along the sign of the mean."""

    built = DeMo


@dataclasses.dataclass(kw_only=True)
class UseOneBitAdam(OneBitAdamOptions, Optimizer, name="onebit_adam"):
    """1-bit Adam: Adam at first, then ranks average their momentum with one bit per element."""

    built = OneBitAdam

    @override
    def warnings(self) -> list[str]:
        return [
            f"onebit_adam sends whole gradients in its first {self.warmup_steps} steps (warmup_steps); 15 to 25 % of "
            "a run's steps are usual, which limits the compression of the whole run to 4 to 6 times"
        ]


@dataclasses.dataclass(kw_only=True)
class UseZeroOneAdam(ZeroOneAdamOptions, Optimizer, name="zero_one_adam"):
    """0/1 Adam: one bit per element from the start, a second moment updated ever less often, then local steps."""

    built = ZeroOneAdam
    needs_network: ClassVar[bool] = True


@dataclasses.dataclass(kw_only=True)
class UseAdaBelief(AdaBeliefOptions, Optimizer, name="adabelief"):
    """AdaBelief: steps scaled by how far gradients lie from their running mean."""

    built = AdaBelief

    @override
    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        return self.built(model, lr, **self.option_values())


@dataclasses.dataclass(kw_only=True)
class UseMaxAdaBelief(MaxAdaBeliefOptions, Optimizer, name="max_adabelief"):
    """Max-AdaBelief: AdaBelief that divides by the largest variance so far; ranks exchange moments, not gradients."""

    built = MaxAdaBelief

    @property
    @override
    def keeps_gradients(self) -> bool:
        return self.mode == "moments"


@dataclasses.dataclass(kw_only=True)
class UseKfac(KfacOptions, Optimizer, name="kfac"):
    """K-FAC: gradients times the inverse of an approximate curvature, in front of any other optimizer.

    Raises:
        OptionError: `inner` or `collective` cannot be built, `inner` is kfac itself, or `inner` encodes its own
            messages.

    Attributes:
        stepping: the optimizer named by `inner`, which updates the parameters.
        summing: the collective named by `collective`, which sums K-FAC's matrices; None: the run's collective.
    """

    default_lr: ClassVar[float] = 0.02
    watches_layers: ClassVar[bool] = True
    needs_network: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True

    inner: Annotated[str, Doc("optimizer that steps on the preconditioned gradients; give --lr to suit it")] = "sgd"
    collective: Annotated[
        str | None,
        Doc("sums the factors; with transfer=cholesky, ring halves bytes for any number of ranks; none: the run's own"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stepping: Optimizer = self._part("optimizers", "inner", self.inner)
        if self.stepping.encodes_itself:
            raise OptionError(
                f"{self.component_name}: inner={self.inner} is not possible: it encodes its own messages, "
                "and K-FAC can change only gradients; name another optimizer, such as sgd"
            )
        self.summing: Collective | None = (
            None if self.collective is None else self._part("collectives", "collective", self.collective)
        )

    def _part(self, kind: str, option: str, text: str) -> Any:
        if text.partition(":")[0] == self.component_name:  # it would contain itself without end
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
    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        summing = self.summing
        return [
            Refusal(
                summing is not None and summing.recodes and not summing.decodes,
                f"{self.component_name}: collective={self.collective} encodes sums of quantised values again, and "
                "factors are not quantised",
                [{"optimizer.collective": summing and summing.component_name}],
            ),
            *self.summing_refusals(summing or collective),
            *self.stepping.refusals(compressor, collective),
        ]

    @override
    def check_layers(self, layers: Sequence[Layer]) -> None:
        self.stepping.check_layers(layers)

    @override
    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        inner = self.stepping.bind(model, lr, communicator if self.stepping.exchanges else None)
        options = {name: value for name, value in self.option_values().items() if name in KfacOptions.option_names()}
        return KFAC(model, inner, collective=self.summing, communicator=communicator, **options)
