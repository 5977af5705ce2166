"""The registry finds components by their files alone, and by entry points."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.registry import KINDS
from collectives.options import Options

KNOWN = {
    "compressors": {"none", "fp16", "bf16", "topk", "group_topk"},
    "collectives": {"native", "ring", "allgather"},
    "strategies": {"ddp", "local"},
    "optimizers": {"sgd", "adam", "adamw"},
    "models": {"linear", "small_cnn", "resnet18", "resnet20"},
    "datasets": {"digits", "synthetic", "cifar10", "cifar100"},
}

FILES = {
    "base.py": "class Compressor: ...",
    "_helper.py": "from base import Compressor\nclass Middle(Compressor): ...",
    "two_words.py": """'''Finds itself.

More.
'''
from _helper import Middle
class Two: ...
class TwoWords(Middle): ...
""",
    "generic.py": "import base\nclass Generic(base.Compressor[int]): ...",
    "undocumented.py": "from base import Compressor\nclass Undocumented(Compressor): ...",
    "stranger.py": "class Stranger(dict): ...",
    "misnamed.py": "from base import Compressor\nclass SomethingElse(Compressor): ...",
    "_private.py": "from base import Compressor\nclass Private(Compressor): ...",
    "functions.py": "def functions(): ...",
    "explosive.py": "from base import Compressor\nclass Explosive(Compressor): ...\nraise SystemExit('imported')",
}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the kind of a folder of components that consists of `FILES`."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(registry, "_folder", lambda _package: tmp_path)
    registry.entries.cache_clear()
    registry._added.cache_clear()
    yield "compressors"
    registry.entries.cache_clear()
    registry._added.cache_clear()


def test_the_rooms_are_the_six_parts_of_a_run() -> None:
    assert set(KINDS) == set(KNOWN)
    assert (KINDS["datasets"].singular, KINDS["strategies"].singular) == ("dataset", "strategy")


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_is_described_in_a_sentence_and_can_be_built_without_options(kind: str) -> None:
    entries = registry.entries(kind)
    assert set(entries) >= KNOWN[kind]
    assert list(entries) == sorted(entries)
    for name, entry in entries.items():
        assert entry.name == name
        assert entry.description.endswith("."), f"{name}: '{entry.description}'"
        component = registry.load(kind, name)
        assert issubclass(component, Options)
        built = component()
        assert built.component_name == name
        # ranks build it again from the text in config.json
        assert spec.build(kind, spec.full_text(built)).option_texts() == built.option_texts()


def test_a_component_is_a_class_named_after_its_file_that_derives_from_the_rooms_base(room: str) -> None:
    assert list(registry.entries(room)) == ["explosive", "generic", "two_words", "undocumented"]


def test_names_and_descriptions_come_from_the_text_alone(room: str) -> None:
    entries = registry.entries(room)
    assert entries["two_words"].description == "Finds itself."
    assert entries["two_words"].target == "compressors.two_words:TwoWords"
    assert entries["undocumented"].description == ""


def test_an_entry_point_adds_a_component_but_never_replaces_a_built_in_one(
    room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name=name, value="collections:OrderedDict", group="bench.compressors")
        for name in ("theirs", "generic")
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: points)
    entries = registry.entries(room)
    assert entries["theirs"].target == "collections:OrderedDict"
    assert entries["theirs"].description
    assert entries["generic"].target == "compressors.generic:Generic"


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"no optimizer 'sgdd' \(did you mean 'sgd'\?\); `bench list optimizers`"):
        registry.load("optimizers", "sgdd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_preset_is_no_component_and_its_name_is_explained(kind: str) -> None:
    for name, entry in registry.entries(kind).items():
        component = registry.load(kind, name)
        presets = component.presets.keys() - {"none"}
        if entry.target.startswith("bench.extensions."):  # its presets are those of the component that it derives from
            continue
        assert entry.presets == presets
        for preset in presets:
            with pytest.raises(UsageError, match=rf"{preset} is a preset of .*: {name}:preset={preset}\)"):
                registry.load(kind, preset)


def test_nothing_near_means_no_guess() -> None:
    with pytest.raises(UsageError, match=r"^there is no model 'zzzzzz'; `bench list models` shows them all$"):
        registry.load("models", "zzzzzz")


def test_finding_every_component_imports_no_torch() -> None:
    code = (
        "import sys; from bench.core import registry; [registry.entries(kind) for kind in registry.KINDS];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
