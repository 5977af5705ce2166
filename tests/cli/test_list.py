"""`bench list`: every component and option is shown, as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from bench.core import registry
from bench.core.registry import KINDS
from tests.testing.invoke import invoke


def section(text: str, name: str) -> list[str]:
    """Return the lines of one component in the long listing, up to the next empty line."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{name}  "))
    return lines[start : lines.index("", start)]


def test_without_a_kind_every_component_is_named_with_its_description() -> None:
    answer = invoke("list")
    assert answer.code == 0
    for kind in KINDS:
        for entry in registry.entries(kind).values():
            assert f"  {entry.name} " in answer.out
            assert entry.description in answer.out


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_lists_nothing_else(kind: str) -> None:
    listed = json.loads(invoke("list", kind, "--json").out)
    assert list(listed) == [kind]
    assert [component["name"] for component in listed[kind]] == list(registry.entries(kind))
    assert all(set(component) == {"name", "description"} for component in listed[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_long_shows_every_option_with_type_default_range_and_meaning(kind: str) -> None:
    text = invoke("list", kind, "--long").out
    listed = json.loads(invoke("list", kind, "--long", "--json").out)[kind]
    for component in listed:
        known = registry.load(kind, component["name"])
        assert [option["name"] for option in component["options"]] == known.option_names()
        for option in component["options"]:
            assert option["type"]
            assert option["meaning"], f"{component['name']}: {option['name']} has no meaning"
            (row,) = [line for line in section(text, component["name"]) if line.startswith(f"  {option['name']} ")]
            assert {option[key] for key in ("type", "default", "range")} <= {"", *re.split(r"\s{2,}", row)}
        assert component["notes"].keys() <= {"source", "differs", "bytes"}


def test_long_tells_what_a_compressor_is() -> None:
    listed = json.loads(invoke("list", "compressors", "--long", "--json").out)["compressors"]
    facts = {component["name"]: component["facts"] for component in listed}
    assert facts["topk"]["biased"] is True
    assert facts["topk"]["emits"] == ["Sparse"]
    assert facts["none"]["biased"] is False
    (topk,) = (component for component in listed if component["name"] == "topk")
    (ratio,) = (option for option in topk["options"] if option["name"] == "ratio")
    assert ratio == {
        "name": "ratio",
        "type": "float",
        "default": "0.01",
        "range": "(0, 1]",
        "meaning": "sent entries / all entries",
    }
    assert topk["notes"]["source"].startswith("Aji, Heafield 2017")


def test_models_tell_their_size_and_data_sets_theirs() -> None:
    models = {m["name"]: m["facts"] for m in json.loads(invoke("list", "models", "--long", "--json").out)["models"]}
    assert models["linear"] == {"num_parameters": 10 * 3 * 32 * 32 + 10}
    data_sets = json.loads(invoke("list", "datasets", "--long", "--json").out)["datasets"]
    sizes = {d["name"]: (d["facts"]["train_size"], d["facts"]["test_size"]) for d in data_sets}
    assert sizes["digits"] == (1347, 450)


def test_pairs_is_the_matrix_of_what_works_together() -> None:
    pairs = json.loads(invoke("list", "pairs", "--json").out)["pairs"]
    refusals = {(pair["compressor"], pair["collective"]): pair["refusal"] for pair in pairs}
    assert len(pairs) == len(registry.entries("compressors")) * len(registry.entries("collectives"))
    assert refusals["none", "native"] is None
    assert refusals["topk", "allgather"] is None
    assert "Sparse" in refusals["topk", "native"]


def test_long_pairs_give_the_reason_of_every_refusal() -> None:
    short, long = invoke("list", "pairs").out, invoke("list", "pairs", "--long").out
    pairs = json.loads(invoke("list", "pairs", "--json").out)["pairs"]
    for pair in pairs:
        line = f"{pair['compressor']} + {pair['collective']}: {pair['refusal']}"
        assert (line in " ".join(long.split())) == (pair["refusal"] is not None)
        assert line not in short


def test_an_unknown_kind_is_refused_with_the_nearest_one() -> None:
    answer = invoke("list", "colectives")
    assert answer.code == 2
    assert answer.error.startswith("there is no kind 'colectives' (did you mean 'collectives'?)")
    assert "pairs" in answer.error
