"""Build and check the compressor and the collective that a user gives to `attach` and similar functions."""

from collections.abc import Sequence

import torch

from collectives.base import Collective
from collectives.options import build
from compressors.base import Compressor, first_compatible
from compressors.layer import Layer


def build_components(
    compressor: Compressor | str, collective: Collective | str | None
) -> tuple[Compressor, Collective]:
    """Build the compressor and the collective from their specs, unless they are built already.

    If `collective` is None, choose as `bench run` does: the first of the compressor's default collectives that works
    with the compressor's options.

    Raises:
        OptionError: a spec names an unknown component, or has a wrong option.
    """
    if isinstance(compressor, str):
        compressor = build("compressors", Compressor, compressor)
    if isinstance(collective, Collective):
        return compressor, collective
    names = compressor.traits.default_collectives if collective is None else [collective]
    return compressor, first_compatible(compressor, [build("collectives", Collective, name) for name in names])


def check_types(layers: Sequence[Layer], compressor: Compressor) -> None:
    """Check that the compressor can send the gradients of these layers.

    Raises:
        ValueError: a layer is complex, or a layer is fp64 and would be compressed.
    """
    for layer in layers:
        assert layer.weight is not None
        if layer.weight.is_complex():
            raise ValueError(
                f"{layer.name} is complex, which no compressor supports; use two real parameters for its real and "
                "imaginary parts"
            )
        if layer.weight.dtype == torch.float64 and not compressor.leaves_dense(layer):
            raise ValueError(
                f"{layer.name} is fp64 and {compressor.component_name} works in fp32, where its gradient may overflow; "
                "convert the model to fp32, or use compressor none"
            )


def check_momentum(compressor: Compressor, momentum: float | None, *, nesterov: bool) -> None:
    """Check that momentum is given if the compressor applies momentum itself, and is not given otherwise.

    Raises:
        ValueError: momentum is missing or out of range, or is given to a compressor that does not use it.
    """
    name = compressor.component_name
    if not compressor.traits.owns_momentum:
        if momentum is not None or nesterov:
            option = "nesterov" if momentum is None else "momentum"
            raise ValueError(f"{name} applies no momentum with these options; leave {option} to the optimizer")
    elif momentum is None or not 0 <= momentum < 1:
        raise ValueError(
            f"{name} applies the momentum itself with these options; give attach its coefficient in [0, 1), "
            "for example momentum=0.9, and the optimizer momentum=0"
        )
