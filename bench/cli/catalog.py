"""Collect details of components from their classes, for `bench list --long` and `bench list pairs`.

Importing this module is cheap; its functions import the components and with them torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from bench.core import registry
from collectives.options import OptionInfo, Options

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from collectives.base import Collective
    from compressors.base import Compressor

# Labels of the docstring paragraphs that are shown with a component's options.
_NOTES = ("Source", "Differs", "Bytes")
_NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detail:
    """Details of a component, read from its class.

    Attributes:
        notes: labelled paragraphs of its docstring: its source, how it differs from that, and the bytes it sends.
        facts: properties by name: flags, numbers, texts, or lists of these.
        options: in declaration order.
    """

    notes: dict[str, str]
    facts: dict[str, Any]
    options: list[OptionInfo]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One cell of the compressor x collective matrix, for default options of both.

    Attributes:
        refusal: the reason why the two cannot work together; None if they can.
    """

    compressor: str
    collective: str
    refusal: str | None


def details(kind: str) -> dict[str, Detail]:
    """Import every component of a kind and return its details, by name."""

    def detail(component: type[Options]) -> Detail:
        facts = _FACTS_OF_DEFAULT[kind](component()) if kind in _FACTS_OF_DEFAULT else {}
        return Detail(
            notes=_notes(component),
            facts=_class_facts(component, registry.ROOMS[kind].base) | facts,
            options=component.describe_options(),
        )

    return registry.ask_each(kind, detail)


def pairs() -> list[Pair]:
    """Return all pairs of compressor and collective, with the reason if a pair is refused."""
    collectives = registry.ask_each("collectives", lambda component: cast("type[Collective]", component))

    def refusals(component: type[Options]) -> dict[str, str | None]:
        compressor = cast("Compressor", component())
        return {name: compressor.refusal(collective) for name, collective in collectives.items()}

    return [
        Pair(compressor=compressor, collective=collective, refusal=refusal)
        for compressor, answers in registry.ask_each("compressors", refusals).items()
        for collective, refusal in answers.items()
    ]


def _notes(component: type[Options]) -> dict[str, str]:
    text = "\n\n".join(filter(None, (inspect.getdoc(sys.modules[component.__module__]), component.__doc__)))
    found = {}
    for label in _NOTES:
        match = re.search(rf"^ *{label}: (.*?)(?=\n *\n|\n *[A-Z][a-z]+:|\Z)", text, re.DOTALL | re.MULTILINE)
        if match:
            found[label.lower()] = " ".join(match[1].split())
    return found


def _class_facts(component: type[Options], base: str) -> dict[str, Any]:
    """Return the class variables that the room's base class declares, with the component's values."""
    declared: dict[str, Any] = {}
    for parent in component.__mro__:
        if parent.__name__ == base:
            declared = inspect.get_annotations(parent)
    return {
        name: _plain(getattr(component, name))
        for name, hint in declared.items()
        if str(hint).startswith("ClassVar") and hasattr(component, name)
    }


def _plain(value: Any) -> Any:
    """Return a fact in a form that JSON can hold: classes as their names, sets as sorted lists."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, frozenset)):
        return sorted(map(_plain, value)) if isinstance(value, frozenset) else [_plain(item) for item in value]
    return value


def _compressor_facts(component: Options) -> dict[str, Any]:
    return {"emits": _plain(cast("Compressor", component).emits)}


def _dataset_facts(component: Options) -> dict[str, Any]:
    dataset = cast("Dataset", component)
    train, test = dataset.sizes()
    return {
        "num_classes": dataset.num_classes,
        "image_size": dataset.image_size,
        "train_size": train,
        "test_size": test,
    }


def _model_facts(component: Options) -> dict[str, Any]:
    import torch

    with torch.device("meta"):  # shapes only: no memory, no initialisation
        model = cast("Model", component).build(_NUM_CLASSES)
    return {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}


# Facts that need an instance, which is made with default options.
_FACTS_OF_DEFAULT: dict[str, Callable[[Options], dict[str, Any]]] = {
    "compressors": _compressor_facts,
    "datasets": _dataset_facts,
    "models": _model_facts,
}
