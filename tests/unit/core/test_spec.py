"""Specs on the command line: building components, and error messages for impossible ones."""

from __future__ import annotations

import pytest

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.torch_optimizers import Sgd


def test_building_validates_and_converts() -> None:
    optimizer = spec.build("optimizers", "sgd:momentum=0.5,nesterov=true")
    assert isinstance(optimizer, Sgd)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.5, True, 0.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sgd:momentun=0.5", "sgd has no option 'momentun' (did you mean 'momentum'?)"),
        ("sgd:momentum=1", "sgd: momentum=1 is not possible"),
        ("sgd:momentum=fast", "sgd: momentum=fast is not possible"),
        ("sgd:nesterov=maybe", "sgd: nesterov=maybe is not possible"),
    ],
)
def test_a_wrong_option_is_refused_and_the_way_to_the_right_one_named(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        spec.build("optimizers", text)
    assert sentence in str(refused.value)
    assert "`bench list optimizers --long`" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_short_text_shows_only_what_differs_from_the_default() -> None:
    assert str(spec.build("optimizers", "sgd:momentum=0.90,weight_decay=1e-4")) == "sgd:weight_decay=0.0001"
    assert str(spec.build("optimizers", "sgd")) == "sgd"


def test_the_full_text_shows_every_option_and_builds_the_same_component() -> None:
    built = spec.build("optimizers", "sgd:weight_decay=1e-4")
    text = spec.full_text(built)
    assert text == "sgd:momentum=0.9,nesterov=false,weight_decay=0.0001"
    assert spec.build("optimizers", text) == built
