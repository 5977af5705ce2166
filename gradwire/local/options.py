"""The options of local steps, their presets, and the components that they do not work with."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc, override

from collectives.allreduce import Allgather
from collectives.base import Collective
from collectives.options import Count, CountOrZero, Options
from collectives.refusals import Refusal, refuse
from compressors.base import Compressor, DdpHook, PerLayer

Preset = Literal["none", "diloco", "streaming", "sparseloco", "post_local"]

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "diloco": {"steps": 500, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    "streaming": {
        "steps": 100,
        "outer_lr": 0.4,
        "outer_momentum": 0.9,
        "nesterov": True,
        "fragments": 4,
        "delay": 5,
        "alpha": 0.5,
    },
    "sparseloco": {"steps": 30, "outer_lr": 0.4, "decay": 0.95},
    "post_local": {"steps": 4, "start_after": 100},
}


@dataclasses.dataclass(kw_only=True, eq=False)
class LocalOptions(Options, name="local"):
    """Options of `gradwire.local.exchange.LocalSteps`; the defaults average the parameters every 30 steps.

    Raises:
        OptionError: the number of fragments does not divide the steps, the delay is not shorter than steps / fragments,
            nesterov is set without momentum, or steps=auto is combined with options for which all ranks must make the
            same number of steps.
    """

    presets = PRESETS

    steps: Annotated[
        Count | Literal["auto"],
        Doc("number of steps between two exchanges of a parameter; auto: as many as a rank can make in `seconds`"),
    ] = 30
    seconds: Annotated[
        float,
        Gt(0),
        Le(86400),
        Doc("with steps=auto, the shortest time in seconds that ranks compute between two exchanges"),
    ] = 2.0
    outer_lr: Annotated[
        float,
        Gt(0),
        Le(10),
        Doc("learning rate of the outer copy (parameters equal on all ranks), for the ranks' mean difference"),
    ] = 1.0
    outer_momentum: Annotated[float, Ge(0), Lt(1), Doc("momentum of the outer copy")] = 0.0
    nesterov: Annotated[bool, Doc("apply Nesterov momentum to the outer copy")] = False
    start_after: Annotated[
        CountOrZero, Doc("number of first steps, in which ranks average uncompressed gradients, as in ddp")
    ] = 0
    fragments: Annotated[Count, Doc("number of parts of the model, which are exchanged in turn; must divide steps")] = 1
    delay: Annotated[
        CountOrZero, Doc("number of steps that an exchange may take in the background; below steps / fragments")
    ] = 0
    alpha: Annotated[
        float,
        Ge(0),
        Le(1),
        Doc("share of its own parameters that a rank keeps after an exchange; the rest comes from the outer copy"),
    ] = 0.0
    average: Annotated[
        Literal["ranks", "senders"],
        Doc("divide the sum by the number of ranks, or each element by the number of ranks that sent it"),
    ] = "ranks"
    clip: Annotated[
        Literal["none", "median"],
        Doc("median: scale longer messages of a layer down to the median of the ranks' norms for this layer"),
    ] = "none"
    decay: Annotated[
        float, Ge(0), Le(1), Doc("share of the residual (what was not sent) that a rank adds to its next difference")
    ] = 1.0
    preset: Annotated[
        Preset, Doc("change the defaults of the other options to those of DiLoCo, its relatives, or post-local SGD")
    ] = "none"

    @property
    def interval(self) -> int:
        """Return the number of steps from one exchange, of any part of the model, to the next; 1 with steps=auto."""
        return 1 if self.steps == "auto" else self.steps // self.fragments

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self._own_refusals)

    def _own_refusals(self) -> list[Refusal]:
        name, is_auto = self.component_name, self.steps == "auto"
        of_equal_steps = {"fragments": 1, "delay": 0, "start_after": 0, "average": "ranks", "clip": "none"}
        return [
            *(
                Refusal(
                    is_auto and getattr(self, option) != value,
                    f"{name}: steps=auto lets ranks make different numbers of steps, and {option}="
                    f"{getattr(self, option)} needs equal numbers",
                    [{f"strategy.{option}": value}],
                )
                for option, value in of_equal_steps.items()
            ),
            Refusal(
                not is_auto and self.seconds != type(self).seconds,
                f"{name}: seconds={self.seconds:g} is for steps=auto",
                [{"strategy.seconds": None}, {"strategy.steps": "auto"}],
            ),
            Refusal(
                self.steps != "auto" and self.steps % self.fragments != 0,
                f"{name}: fragments={self.fragments} does not divide steps={self.steps}",
                [{"strategy.steps": self.fragments * max(1, round(self.interval))}, {"strategy.fragments": 1}],
            ),
            Refusal(
                not is_auto and self.delay >= self.interval,
                f"{name}: delay={self.delay} is not below the {self.interval} steps between two exchanges "
                "(steps / fragments)",
                [{"strategy.delay": self.interval - 1}],
            ),
            Refusal(
                self.nesterov and not self.outer_momentum,
                f"{name}: nesterov=true needs a momentum",
                [{"strategy.outer_momentum": 0.9}, {"strategy.nesterov": None}],
            ),
        ]

    def pair_refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return the reasons why this compressor and collective cannot exchange differences of parameters."""
        name, method, traits = self.component_name, compressor.component_name, compressor.traits
        by_preset = f" (preset={self.preset})" if PRESETS[self.preset].get("decay") == self.decay else ""
        without: dict[str, Any] = {"compressor": "topk"}
        if hasattr(compressor, "momentum_correction"):
            without = {"compressor.momentum_correction": False}
        combined = "average=senders" if self.average == "senders" else "clip=median" if self.clip == "median" else ""
        return [
            Refusal(
                isinstance(compressor, DdpHook),
                f"{method} works through DDP's communication hook of gradients, and {name} exchanges parameters",
                [{"compressor": "none"}],
            ),
            Refusal(
                traits.owns_momentum and self.outer_momentum > 0,
                f"{method} applies momentum before it sends, and outer_momentum={self.outer_momentum:g} of {name} "
                "would apply it a second time",
                [without],
            ),
            Refusal(
                traits.owns_momentum,
                f"{method} applies the optimizer's momentum to gradients, which {name} does not send",
                [without],
            ),
            Refusal(
                traits.one_bucket and self.fragments > 1,
                f"{method} wants the whole model as one message with these options, and fragments={self.fragments} "
                "divides it",
                [{"strategy.fragments": 1}, {"compressor": "none"}],
            ),
            Refusal(
                self.delay > 0 and getattr(compressor, "importance", None) == "taylor",
                f"{method} reads the weights while it encodes, and with delay={self.delay} they change meanwhile",
                [{"compressor.importance": "l2"}, {"strategy.delay": 0}],
            ),
            Refusal(
                bool(combined) and not isinstance(collective, Allgather),
                f"{combined} needs the message of every rank, and {collective.component_name} adds messages on their "
                "way",
                [{"collective": "allgather"}],
            ),
            Refusal(
                bool(combined) and (not isinstance(compressor, PerLayer) or traits.needs_all_ranks),
                f"{combined} needs messages that can be decoded one by one, and the ranks of {method} encode together",
                [{"compressor": "topk"}],
            ),
            Refusal(
                self.decay < 1 and not traits.keeps_residual,
                f"{name}: decay={self.decay:g}{by_preset} needs a compressor with a residual, and {method} keeps none "
                "with these options",
                [{"compressor": "group_topk"}, {"strategy.decay": 1}],
            ),
            Refusal(
                self.decay < 1 and collective.keeps_residuals,
                f"decay={self.decay:g}{by_preset} does not apply to the residuals of sums that "
                f"{collective.component_name} keeps",
                [{"strategy.decay": 1}, {"collective": "allgather"}],
            ),
        ]
