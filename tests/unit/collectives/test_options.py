"""Options and specs: fields that check themselves, texts `name:key=value`, and the components that they build."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Doc

from collectives import options
from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.options import (
    Incompatible,
    OptionError,
    Options,
    Spec,
    did_you_mean,
    incompatibility,
    options_of,
    value_text,
)
from collectives.refusals import refuse
from collectives.server import Server
from collectives.transport.base import Transport
from tests.testing.memory_transport import MemoryTransport, MemoryWires


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


def test_texts_become_values_and_the_texts_of_a_component_build_it_again() -> None:
    texts = {"ratio": "1e-3", "count": "7", "flag": "true", "mode": "exact", "kinds": "norm+bias", "limit": "5"}
    sample = Sample(ratio=0.001, count=7, flag=True, mode="exact", kinds=("norm", "bias"), limit=5)
    assert Sample.from_text(texts) == sample
    assert Sample.from_text({"limit": "none"}).limit is None
    for each in (sample, Sample(), Sample(ratio=0.25, kinds=("bias", "norm"), limit=4, flag=True)):
        assert Sample.from_text(each.option_texts()) == each
    assert Sample(ratio=0.010, count=4).option_texts(only_changed=True) == {"count": "4"}
    assert Sample.component_name == "test_options"  # that of the module


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
    with pytest.raises(OptionError, match="ratio=2 is not possible"):
        Sample(ratio=2)  # in Python as well


def test_an_unknown_option_is_refused_with_the_nearest_one_and_all_of_them() -> None:
    with pytest.raises(
        OptionError, match=r"no option 'ration' \(did you mean 'ratio'\?\); its options are ratio, count"
    ):
        Sample.from_text({"ration": "1"})
    with pytest.raises(OptionError, match="no option 'a'; it has none"):
        Nothing.from_text({"a": "1"})
    assert did_you_mean("alegather", ["allgather", "ring"]) == " (did you mean 'allgather'?)"
    assert did_you_mean("xyz", ["allgather", "ring"]) == ""


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


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "none"), (0.01, "0.01"), (2.0, "2"), (1e20, "1e+20"), (("a", "b"), "a+b"), ("x", "x")],
)
def test_value_texts(value: object, text: str) -> None:
    assert value_text(value) == text


WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9_.+/:-]{1,12}", fullmatch=True)


def test_a_spec_is_a_name_and_the_texts_of_its_options() -> None:
    assert Spec.parse(" topk ") == Spec("topk", {})
    assert Spec.parse("topk:ratio=0.001, skip = norm+bias") == Spec("topk", {"ratio": "0.001", "skip": "norm+bias"})
    assert Spec.parse("cifar10:url=http://host:1/a?b=c").options == {"url": "http://host:1/a?b=c"}
    assert str(Spec("a", {"z": "1", "b": "2"})) == "a:b=2,z=1"
    built = options.build("collectives", Collective, "server:placement=sharded,split_numel=7")
    assert isinstance(built, Server)
    assert (built.placement, built.split_numel) == ("sharded", 7)


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
    with pytest.raises(OptionError) as refused:
        Spec.parse(text)
    assert sentence in str(refused.value)


@given(WORDS, st.dictionaries(WORDS, VALUES, max_size=4))
def test_reading_what_was_written_gives_the_same_spec(name: str, options: dict[str, str]) -> None:
    assert Spec.parse(str(Spec(name, options))) == Spec(name, options)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rign", r"there is no collective 'rign' \(did you mean 'ring'\?\)"),
        ("options", "there is no collective 'options'"),
        ("base", "there is no collective 'base'"),
        ("server:rot=1", "did you mean 'root'"),
        ("server:root=-1", "root=-1 is not possible"),
        ("hierarchical:intra=rign", r"intra=rign is not possible: there is no collective 'rign' \(did you mean 'ring'"),
        ("hierarchical:inter=hierarchical", "hierarchical cannot be part of itself"),
        ("hierarchical:inter=hierarchical:group_size=2", "hierarchical cannot be part of itself"),
        ("hierarchical:inter=server:downlink=recode", "use downlink=dense or downlink=union"),
        (
            "hierarchical:inter=server:error_feedback=true",
            "use downlink=dense or downlink=union without error feedback",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_is_near(text: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        options.build("collectives", Collective, text)


def test_a_hierarchy_can_be_made_of_every_other_collective() -> None:
    for name in options.component_names("collectives", Collective):
        if name != "hierarchical":
            assert Hierarchical(intra=name, inter=name).within.component_name == name


def test_a_hierarchy_asks_its_parts_whether_so_many_ranks_are_possible() -> None:
    among = options.build("collectives", Collective, "hierarchical:inter=server:root=2")
    refuse(among.rank_refusals, 6)
    with pytest.raises(Incompatible, match="among leaders, server: root=2 is none of the 2 ranks"):
        refuse(among.rank_refusals, 4)
    with pytest.raises(Incompatible, match="among leaders"):
        refuse(among.rank_refusals, 2)
    within = options.build("collectives", Collective, "hierarchical:group_size=3,intra=server:root=1")
    possible = [incompatibility(refuse, within.rank_refusals, n) is None for n in (1, 2, 3, 4, 5, 6)]
    assert possible == [False, True, True, False, True, True]
    for each, world_size in itertools.product((among, within), range(1, 8)):
        refused = [refuses_to_bind(each, transport) for transport in ranks_of(MemoryWires(world_size))]
        assert any(refused) is (incompatibility(refuse, each.rank_refusals, world_size) is not None)


def ranks_of(wires: MemoryWires) -> list[MemoryTransport]:
    return [wires.transport(rank) for rank in range(wires.world_size)]


def refuses_to_bind(collective: Collective, transport: Transport) -> bool:
    try:
        collective.bind(transport).close()
    except OptionError:
        return True
    return False
