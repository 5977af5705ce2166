"""Specs: reading `name:key=value,key=value`, and building what they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core import spec
from bench.core.errors import UsageError
from bench.core.spec import Spec
from bench.optimizers.sgd import Sgd

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9_.+/:-]{1,12}", fullmatch=True)


def test_a_name_alone() -> None:
    assert Spec.parse(" topk ") == Spec("topk", {})


def test_options_keep_their_texts() -> None:
    assert Spec.parse("topk:ratio=0.001, skip = norm+bias") == Spec("topk", {"ratio": "0.001", "skip": "norm+bias"})


def test_a_value_may_hold_colons_and_equal_signs() -> None:
    assert Spec.parse("cifar10:url=http://host:1/a?b=c").options == {"url": "http://host:1/a?b=c"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' names no component"),
        (":a=1", "':a=1' names no component"),
        ("topk:", "'topk:' is malformed at ''"),
        ("topk:ratio", "'topk:ratio' is malformed at 'ratio'"),
        ("topk:ratio=", "malformed at 'ratio='"),
        ("topk:=1", "malformed at '=1'"),
        ("topk:ratio=1,", "malformed at ''"),
        ("topk:ratio=1,ratio=2", "gives ratio twice"),
    ],
)
def test_malformed_texts_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        Spec.parse(text)
    assert sentence in str(refused.value)


@given(WORDS, st.dictionaries(WORDS, VALUES, max_size=4))
def test_reading_what_was_written_gives_the_same_spec(name: str, options: dict[str, str]) -> None:
    assert Spec.parse(str(Spec(name, options))) == Spec(name, options)


def test_options_are_written_in_alphabetical_order() -> None:
    assert str(Spec("a", {"z": "1", "b": "2"})) == "a:b=2,z=1"


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
    assert spec.short_text(spec.build("optimizers", "sgd:momentum=0.90,weight_decay=1e-4")) == "sgd:weight_decay=0.0001"
    assert spec.short_text(spec.build("optimizers", "sgd")) == "sgd"


def test_the_full_text_shows_every_option_and_builds_the_same_component() -> None:
    built = spec.build("optimizers", "sgd:weight_decay=1e-4")
    text = spec.full_text(built)
    assert text == "sgd:momentum=0.9,nesterov=false,weight_decay=0.0001"
    assert spec.build("optimizers", text) == built
