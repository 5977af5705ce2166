"""Claims of CONTRIBUTING.md and of the pages for contributors; their example is a real, working compressor."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import compressors.base
from bench.cli import reference_pages
from bench.core import registry, spec
from bench.core.errors import UsageError
from collectives.allreduce import Native, Ring
from collectives.base import BoundCollective
from collectives.options import Incompatible, Options
from compressors.base import Compressor, LossyCompressor
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at
from tests.testing.memory_transport import MemoryTransport

ROOT = Path(__file__).parents[3]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMPRESSOR = (ROOT / "docs/extend/compressor.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
EXTEND = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/extend").glob("*.md")))
# Functions that are long because each line is a parameter or a part of the set-up.
LONG = {
    ("bench/cli/run.py", "run"),
    ("bench/rank/worker.py", "run"),
    ("compressors/kernels/selection.py", "send_groups"),
}
PACKAGES = ("bench", "gradwire", "compressors", "collectives")
# Folders that can be removed without breaking anything else.
OF_EXTENSIONS = {"bench/extensions/", "compressors/auto/", "tests/extensions"}
LAYERS = layers_of_shapes((7, 10), (33,), (1,))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Compressor]]:
    """Yield the class that the page shows, found by the registry in a folder that contains it and the base class."""
    folder = tmp_path_factory.mktemp("compressors")
    shutil.copy(compressors.base.__file__, folder)
    file = folder / "round_robin.py"
    blocks = re.findall(r"```python\n(.*?)```", COMPRESSOR, re.DOTALL)
    (code,) = (block for block in blocks if "class RoundRobin" in block)
    file.write_text(code, encoding="utf-8")
    module_spec = importlib.util.spec_from_file_location("compressors.round_robin", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["compressors.round_robin"] = module
    module_spec.loader.exec_module(module)
    real_folder = registry._folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_folder", lambda name: folder if name == "compressors" else real_folder(name))
        registry.entries.cache_clear()
        registry._added.cache_clear()
        yield module.RoundRobin
    registry.entries.cache_clear()
    registry._added.cache_clear()
    del sys.modules["compressors.round_robin"]


def test_its_file_is_all_that_the_registry_needs(example: type[Compressor]) -> None:
    entry = registry.entries("compressors")["round_robin"]
    assert entry.description.startswith("Round robin: send another slice of every layer in each step")
    assert registry.load("compressors", "round_robin") is example


def test_it_is_written_in_the_common_style(example: type[Compressor]) -> None:
    file = sys.modules[example.__module__].__file__
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_its_options_are_checked_and_described(example: type[Compressor]) -> None:
    built = spec.build("compressors", "round_robin:slices=50,skip=norm")
    assert str(built) == "round_robin:skip=norm,slices=50"
    assert {"slices", "error_feedback", "min_numel", "skip", "dense_ends"} == set(example.option_names())
    with pytest.raises(UsageError, match=r"did you mean 'slices'"):
        spec.build("compressors", "round_robin:slice=50")


def test_the_pairs_are_derived(example: type[Compressor]) -> None:
    example().check_compatible(Ring())
    with pytest.raises(Incompatible, match="Sparse"):
        example().check_compatible(Native())


def test_a_round_sends_every_entry_once(example: type[Compressor]) -> None:
    reducer = reducer_for(example.from_text({"slices": "4", "error_feedback": "false"}))
    times_sent = [torch.zeros(layer.numel) for layer in LAYERS]
    for index in range(4):
        ones = [torch.ones(layer.numel) for layer in LAYERS]
        updates, _ = reduce_once(reducer, alone(), LAYERS, ones, step_at(index))
        for count, update in zip(times_sent, updates, strict=True):
            count += update
    for layer, count in zip(LAYERS, times_sent, strict=True):
        assert float(count.min()) >= 1
        assert float(count.sum()) == 4 * -(-layer.numel // 4)


def test_what_waits_is_sent_in_its_turn(example: type[Compressor]) -> None:
    reducer = reducer_for(example.from_text({"slices": "4"}))
    total = torch.zeros(LAYERS[0].numel)
    for index in range(4):
        gradients = [torch.full((LAYERS[0].numel,), float(index == 0))]
        updates, _ = reduce_once(reducer, alone(), LAYERS[:1], gradients, step_at(index))
        total += updates[0]
    assert torch.equal(total, torch.ones(LAYERS[0].numel))


@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_ranks_agree_on_the_mean(example: type[Compressor], name: str) -> None:
    def update(transport: MemoryTransport, collective: BoundCollective) -> list[torch.Tensor]:
        gradients = [gradient(layer, 0, transport.rank) for layer in LAYERS]
        step = step_at(0, transport.rank, transport.world_size)
        return reduce_once(reducer_for(example.from_text({"slices": "1"})), collective, LAYERS, gradients, step)[0]

    first, *others = on_ranks(3, name, update)
    for number, layer in enumerate(LAYERS):
        mean = torch.stack([gradient(layer, 0, rank) for rank in range(3)]).mean(0)
        torch.testing.assert_close(first[number], mean)
        assert all(torch.equal(first[number], other[number]) for other in others)


def test_its_bytes_are_the_closed_form(example: type[Compressor]) -> None:
    compressor = example.from_text({"slices": "10"})
    assert isinstance(compressor, LossyCompressor)
    for index in range(3):
        for layer in LAYERS:
            payload = compressor.encode(gradient(layer, index, 0), layer, step_at(index))
            assert payload.pack().numel() == payload.nbytes == compressor.expected_nbytes(layer)


def members_of(base: type) -> set[str]:
    """Return the names of the methods and class variables that a class below this one can define."""
    ours = [cls for cls in base.__mro__ if cls.__module__ not in ("abc", "builtins", Options.__module__)]
    named = {name for cls in ours for name in (*vars(cls), *inspect.get_annotations(cls))}
    options = {field.name for cls in ours if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)}
    return {name for name in named - options - vars(Options).keys() if not name.startswith("_")}


def test_the_table_says_what_must_be_written() -> None:
    rows = re.findall(r"^\| [a-z ]+ \| `([\w/]+)/` \| (.*) \| (.*) \| (.*) \|$", EXTEND, re.MULTILINE)
    assert {folder.replace("/", ".") for folder, *_ in rows} == {kind.package for kind in registry.KINDS.values()}
    for folder, derive_from, write, count in rows:
        bases = [
            getattr(importlib.import_module(module), name)
            for module, name in re.findall(r"`([\w.]+)\.(\w+)`", derive_from)
        ]
        always, _, sometimes = (re.findall(r"`([a-z_]+)`", part) for part in write.partition("("))
        members = [name for base in bases for name in members_of(base)]
        assert set(always) == set().union(*map(registry.required_of, bases)), folder
        assert set(sometimes) <= {*members, *members_of(BoundCollective)}, folder
        assert count == f"{len(always)} of {len(members)}", folder


def test_the_layers_name_every_folder() -> None:
    rows = re.findall(r"^\| (`[a-z.]+`.*?) \| (.*) \|$", DESIGN.partition("## How things flow")[0], re.MULTILINE)
    named = {"bench/"}
    for layers, content in rows:
        for layer in re.findall(r"`([a-z.]+)`", layers):
            folder = f"{layer.replace('.', '/')}/"
            named |= {folder, *(folder + within for within in re.findall(r"`([a-z_/]+/)`", content))}
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    folders = {f"{file.parent}/" for file in files}
    assert folders <= named
    assert {folder for folder in named - folders if not folder.startswith(tuple(OF_EXTENSIONS))} == set()


def test_every_file_that_is_named_exists() -> None:
    text = CONTRIBUTING + DESIGN + EXTEND
    names = set(re.findall(r"`((?:bench|compressors|collectives|tests|results|benchmarks|docs)/[\w./]*)`", text))
    made_by_the_reader = set(re.findall(r"Put this file into `(.*)`:", EXTEND))
    missing = {name for name in names - made_by_the_reader - OF_EXTENSIONS if not (ROOT / name).exists()}
    assert names > made_by_the_reader
    assert not missing


def test_the_command_that_writes_documents_is_the_real_one() -> None:
    assert f"python -m {reference_pages.__name__}" in CONTRIBUTING


@pytest.mark.parametrize(("whose", "most_stations", "most_files"), [("a gradient", 24, 16), ("an option", 24, 14)])
def test_a_way_is_as_drawn_and_short(whose: str, most_stations: int, most_files: int) -> None:
    (section,) = re.findall(rf"^#+ The path of {whose}$(.*?)^#", DESIGN, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(\S+)` \| (`.*?`) \|", section, re.MULTILINE)
    stations = {(file, name) for file, names in rows for name in re.findall(r"\w+", names)}
    assert 10 < len(stations) <= most_stations
    assert len({file for file, _ in stations}) <= most_files
    for file, name in stations:
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        assert found, f"{file} has no {name}"
        functions = [node for node in found if isinstance(node, ast.FunctionDef) and (file, name) not in LONG]
        assert all((node.end_lineno or 0) - node.lineno < 40 for node in functions), f"{name} is long"
