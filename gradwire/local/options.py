"""The options of local steps, their presets, and what they cannot be combined with."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc, override

from collectives.base import Collective, without_residuals
from collectives.options import Count, CountOrZero, Incompatible, OptionError, Options, refuse
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
        OptionError: fragments that do not divide the steps, a delay beyond their interval, Nesterov momentum of 0, or
            steps=auto with options that need equal steps.
    """

    presets = PRESETS

    steps: Annotated[
        Count | Literal["auto"],
        Doc("steps of each rank between two exchanges of the same parameter; auto: as many as it makes in `seconds`"),
    ] = 30
    seconds: Annotated[
        float, Gt(0), Le(86400), Doc("with steps=auto, the time that ranks compute between two exchanges, at least")
    ] = 2.0
    outer_lr: Annotated[float, Gt(0), Le(10), Doc("share of the mean difference by which the outer copy moves")] = 1.0
    outer_momentum: Annotated[float, Ge(0), Lt(1), Doc("momentum of the outer copy")] = 0.0
    nesterov: Annotated[bool, Doc("apply Nesterov momentum to the outer copy")] = False
    start_after: Annotated[CountOrZero, Doc("first steps in which gradients are averaged, uncompressed, as in ddp")] = 0
    fragments: Annotated[Count, Doc("parts of the model that are exchanged in turn; they must divide steps")] = 1
    delay: Annotated[CountOrZero, Doc("steps that an exchange may take in the background; below steps / fragments")] = 0
    alpha: Annotated[
        float, Ge(0), Le(1), Doc("share of a rank's own parameters that it keeps when it takes over the outer copy")
    ] = 0.0
    average: Annotated[
        Literal["ranks", "senders"],
        Doc("divide the sum by the number of ranks, or each element by the number of ranks that sent it"),
    ] = "ranks"
    clip: Annotated[
        Literal["none", "median"], Doc("scale a rank's message of a layer down to the median norm over ranks, or not")
    ] = "none"
    decay: Annotated[float, Ge(0), Le(1), Doc("share of the residual that is added to the next difference")] = 1.0
    preset: Annotated[
        Preset, Doc("change the defaults of the other options to those of DiLoCo, its relatives, or post-local SGD")
    ] = "none"

    @property
    def interval(self) -> int:
        """Return the steps between two exchanges, of whichever fragment; 1 with steps=auto, which has no number."""
        return 1 if self.steps == "auto" else self.steps // self.fragments

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        is_auto = self.steps == "auto"
        of_equal_steps = {"fragments": 1, "delay": 0, "start_after": 0, "average": "ranks", "clip": "none"}
        changed = [name for name, value in of_equal_steps.items() if getattr(self, name) != value]
        name = self.component_name
        refuse(
            OptionError,
            *(
                (
                    is_auto,
                    f"{name}: steps=auto lets ranks make different numbers of steps, and {other}="
                    f"{getattr(self, other)} needs equal ones; use {other}={of_equal_steps[other]} or a number of "
                    "steps",
                )
                for other in changed
            ),
            (
                not is_auto and self.seconds != type(self).seconds,
                f"{name}: seconds={self.seconds:g} is for steps=auto; add that, or leave out seconds",
            ),
            (
                self.steps != "auto" and self.steps % self.fragments != 0,
                f"{name}: fragments={self.fragments} does not divide steps={self.steps}; choose steps that are a "
                "multiple of fragments",
            ),
            (
                self.delay >= self.interval,
                f"{name}: delay={self.delay} is not below the {self.interval} steps between two exchanges "
                "(steps / fragments); lower it",
            ),
            (
                self.nesterov and not self.outer_momentum,
                f"{name}: nesterov=true needs a momentum; add outer_momentum=0.9, or leave it out",
            ),
        )

    def check_pair(self, compressor: Compressor, collective: Collective) -> None:
        """Check that differences of parameters can be exchanged with these options by a compressor and a collective.

        Raises:
            Incompatible: they cannot; the message names what would work.
        """
        name, method, traits = self.component_name, compressor.component_name, compressor.traits
        by_preset = f" (preset={self.preset})" if PRESETS[self.preset].get("decay") == self.decay else ""
        without = "a compressor without momentum, such as topk"
        if hasattr(compressor, "momentum_correction"):
            without = "momentum_correction=false"
        combined = "average=senders" if self.average == "senders" else "clip=median" if self.clip == "median" else ""
        refuse(
            Incompatible,
            (
                isinstance(compressor, DdpHook),
                f"{method} works through DDP's communication hook of gradients, and {name} exchanges parameters; use "
                "another compressor",
            ),
            (
                traits.owns_momentum and self.outer_momentum > 0,
                f"{method} applies momentum before it sends, and outer_momentum={self.outer_momentum:g} of {name} is a "
                f"second one; use {without}",
            ),
            (
                traits.owns_momentum,
                f"{method} applies the optimizer's momentum to gradients, which {name} does not send; use {without}",
            ),
            (
                traits.one_bucket and self.fragments > 1,
                f"{method} wants the whole model as one message with these options, and fragments={self.fragments} "
                f"divides it; use fragments=1, or other options of {method}",
            ),
            (
                self.delay > 0 and getattr(compressor, "importance", None) == "taylor",
                f"{method} reads the weights while it encodes, and with delay={self.delay} they change meanwhile; use "
                "importance=l2 or delay=0",
            ),
            (
                bool(combined) and collective.component_name != "allgather",
                f"{combined} needs the message of every rank, and {collective.component_name} adds messages on their "
                "way; use collective allgather",
            ),
            (
                bool(combined) and (not isinstance(compressor, PerLayer) or traits.needs_all_ranks),
                f"{combined} needs messages that can be decoded one by one, and the ranks of {method} encode together; "
                "use another compressor, such as topk",
            ),
            (
                self.decay < 1 and not traits.keeps_residual,
                f"{name}: decay={self.decay:g}{by_preset} needs a compressor with a residual, such as group_topk, and "
                f"{method} keeps none with these options",
            ),
            (
                self.decay < 1 and collective.keeps_residuals,
                f"decay={self.decay:g}{by_preset} does not reach the errors of sums that {collective.component_name} "
                f"keeps; use decay=1, or {without_residuals(collective)}",
            ),
        )
