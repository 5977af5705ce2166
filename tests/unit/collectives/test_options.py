"""Options: dataclass fields that check themselves, from Python values and from texts."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from collectives.options import OptionError, Options, did_you_mean, options_of, value_text


@dataclasses.dataclass(kw_only=True)
class Sample(Options):
    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries")] = 0.01
    count: Annotated[int, Ge(0), Doc("how many")] = 3
    share: Annotated[float, Ge(0), Lt(1)] = 0.5
    decay: Annotated[float, Ge(0)] = 0.0
    flag: bool = False
    mode: Literal["fast", "exact"] = "fast"
    kinds: tuple[Literal["norm", "bias", "conv"], ...] = ()
    limit: Annotated[int, Gt(0)] | None = None


@dataclasses.dataclass(kw_only=True)
class Nothing(Options):
    pass


def test_texts_become_values() -> None:
    texts = {"ratio": "1e-3", "count": "7", "flag": "true", "mode": "exact", "kinds": "norm+bias", "limit": "5"}
    assert Sample.from_text(texts) == Sample(
        ratio=0.001, count=7, flag=True, mode="exact", kinds=("norm", "bias"), limit=5
    )


def test_none_is_no_value_where_a_value_may_be_absent() -> None:
    assert Sample.from_text({"limit": "none"}).limit is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratio", "0"),
        ("ratio", "1.01"),
        ("ratio", "much"),
        ("ratio", "nan"),
        ("decay", "inf"),
        ("count", "-1"),
        ("count", "1.5"),
        ("share", "1"),
        ("flag", "maybe"),
        ("mode", "slow"),
        ("kinds", "norm+unknown"),
        ("limit", "0"),
        ("count", "none"),
    ],
)
def test_values_outside_type_or_range_are_refused(name: str, text: str) -> None:
    with pytest.raises(OptionError) as refused:
        Sample.from_text({name: text})
    assert f"{name}={text} is not possible: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_library_use_is_checked_alike() -> None:
    with pytest.raises(OptionError, match="ratio=2 is not possible"):
        Sample(ratio=2)


def test_an_unknown_option_is_refused_with_the_nearest_one_and_all_of_them() -> None:
    with pytest.raises(
        OptionError, match=r"no option 'ration' \(did you mean 'ratio'\?\); its options are ratio, count"
    ):
        Sample.from_text({"ration": "1"})
    with pytest.raises(OptionError, match="no option 'a'; it has none"):
        Nothing.from_text({"a": "1"})


def test_options_describe_themselves() -> None:
    ratio, count, share, decay, flag, mode, kinds, limit = [option.describe() for option in options_of(Sample)]
    assert ratio == {
        "name": "ratio",
        "type": "float",
        "default": "0.01",
        "range": "(0, 1]",
        "meaning": "kept entries / entries",
    }
    assert [each["range"] for each in (count, share, decay, flag)] == ["[0, inf)", "[0, 1)", "[0, inf)", ""]
    assert (flag["default"], mode["type"], kinds["default"], limit["default"]) == (
        "false",
        "fast|exact",
        "none",
        "none",
    )
    assert kinds["type"] == "list of norm|bias|conv"
    assert limit["type"] == "int|none"


def test_texts_of_a_component_build_it_again() -> None:
    sample = Sample(ratio=0.25, kinds=("bias", "norm"), limit=4, flag=True)
    assert Sample.from_text(sample.option_texts()) == sample
    assert Sample.from_text(Sample().option_texts()) == Sample()


def test_only_changed_options_differ_from_their_default() -> None:
    assert Sample(ratio=0.010, count=4).option_texts(only_changed=True) == {"count": "4"}


def test_the_name_is_the_modules() -> None:
    assert Sample.component_name == "test_options"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "none"), (0.01, "0.01"), (2.0, "2"), (1e20, "1e+20"), (("a", "b"), "a+b"), ("x", "x")],
)
def test_value_texts(value: object, text: str) -> None:
    assert value_text(value) == text


def test_did_you_mean_guesses_only_what_is_near() -> None:
    assert did_you_mean("alegather", ["allgather", "ring"]) == " (did you mean 'allgather'?)"
    assert did_you_mean("xyz", ["allgather", "ring"]) == ""
