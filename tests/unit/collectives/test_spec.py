"""Specs: reading `name:key=value,key=value` and building the components, without the rest of the program."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import options
from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.options import Incompatible, OptionError, Spec, incompatibility
from collectives.refusals import refuse
from collectives.server import Server
from collectives.transport.base import Transport
from tests.testing.memory_transport import MemoryTransport, MemoryWires

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
    with pytest.raises(OptionError) as refused:
        Spec.parse(text)
    assert sentence in str(refused.value)


@given(WORDS, st.dictionaries(WORDS, VALUES, max_size=4))
def test_reading_what_was_written_gives_the_same_spec(name: str, options: dict[str, str]) -> None:
    assert Spec.parse(str(Spec(name, options))) == Spec(name, options)


def test_options_are_written_in_alphabetical_order() -> None:
    assert str(Spec("a", {"z": "1", "b": "2"})) == "a:b=2,z=1"


def test_building_validates_and_converts() -> None:
    built = options.build("collectives", Collective, "server:placement=sharded,split_numel=7")
    assert isinstance(built, Server)
    assert (built.placement, built.split_numel) == ("sharded", 7)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rign", r"there is no collective 'rign' \(did you mean 'ring'\?\)"),
        ("options", "there is no collective 'options'"),
        ("base", "there is no collective 'base'"),
        ("server:rot=1", "did you mean 'root'"),
        ("server:root=-1", "root=-1 is not possible"),
        ("hierarchical:intra=rign", r"intra=rign is not possible: there is no collective 'rign' \(did you mean 'ring'"),
        ("hierarchical:inter=hierarchical", "it is made of other collectives"),
        ("hierarchical:inter=hierarchical:group_size=2", "it is made of other collectives"),
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
