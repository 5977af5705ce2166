"""Third-party components, one file each and found by entry points, train together; each needs few concepts."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pandas
import pytest

from bench.core.columns import to_cell
from tests.testing import third_party
from tests.testing.fake_rows import fake_seeds, topk_seeds
from tests.testing.invoke import execute, only_run, rows
from tests.testing.plugins import install_entry_points

FOLDER = Path(third_party.__file__).parent
COMPONENTS = {
    "compressors": ("every_nth", "EveryNth"),
    "collectives": ("star", "Star"),
    "optimizers": ("sign_momentum", "SignMomentum"),
    "strategies": ("averaging", "Averaging"),
    "models": ("tiny", "Tiny"),
}
OTHERS = {
    "bench.columns": {"stranger": "stranger.columns:COLUMNS"},
    "bench.metrics": {"distance": "stranger.extras:DISTANCE"},
    "bench.commands": {"wave": "stranger.extras:wave"},
}
STEPS, EVERY = 12, 4


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """Install the package, and return its PYTHONPATH."""
    shutil.copytree(FOLDER, tmp_path / "stranger")
    points = {f"bench.{room}": {module: f"stranger.{module}:{name}"} for room, (module, name) in COMPONENTS.items()}
    install_entry_points(tmp_path, "stranger", points | OTHERS)
    return str(tmp_path)


def test_they_are_listed_beside_those_of_the_house(installed: str) -> None:
    listed = json.loads(execute("list", "--json", PYTHONPATH=installed).out)
    for room, (module, _) in COMPONENTS.items():
        assert module in [entry["name"] for entry in listed[room]]


def test_a_compressor_a_collective_and_an_optimizer_train_together(installed: str, tmp_path: Path) -> None:
    answer = execute(
        "run", "--model", "linear", "--compressor", "every_nth:n=4,error_feedback=true", "--collective", "star",
        "--optimizer", "sign_momentum", "--steps", str(STEPS), "--world-size", "3", "--out", str(tmp_path / "out"),
        PYTHONPATH=installed,
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(tmp_path / "out"))
    assert (row["compressor"], row["collective"], row["optimizer"]) == (
        "every_nth:error_feedback=true,n=4",
        "star",
        "sign_momentum",
    )
    assert row["replicas_in_sync"] == "true"
    assert float(row["effective_density"]) == pytest.approx(1 / 4, rel=0.01)


def test_a_strategy_trains(installed: str, tmp_path: Path) -> None:
    run = (
        "run", "--model", "tiny", "--strategy", f"averaging:every={EVERY}", "--collective", "ring",
        "--steps", str(STEPS), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    refused = execute(*run, "--compressor", "fp16", PYTHONPATH=installed)
    assert refused.code == 2
    assert "averaging sends parameters as they are" in refused.error
    answer = execute(*run, PYTHONPATH=installed)
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(tmp_path / "out"))
    assert (row["strategy"], row["replicas_in_sync"]) == (f"averaging:every={EVERY}", "true")
    assert 0 < float(row["test_distance"]) < 100
    # of two ranks in a ring, each sends half a tensor twice
    assert float(row["payload_bytes_per_step"]) == float(row["dense_bytes_per_step"]) / EVERY


def test_a_metric_with_a_column_of_its_own_is_compared(installed: str, tmp_path: Path) -> None:
    own = [4.01, 4.02, 4.03, 2.01, 2.02, 2.03]
    listed = [
        {name: to_cell(value) for name, value in row.items() if "accuracy" not in name} | {"test_distance": distance}
        for distance, row in zip(own, fake_seeds([1.0] * 3) + topk_seeds([1.0] * 3), strict=True)
    ]
    file = tmp_path / "rows.csv"
    pandas.DataFrame(listed).to_csv(file, index=False)
    shown = execute("compare", str(file), "--metric", "test_distance", PYTHONPATH=installed)
    assert shown.code == 0, shown.error
    assert shown.out.startswith("Lower distance: topk -49.8 %")


def test_a_command_is_called(installed: str) -> None:
    assert execute("wave", PYTHONPATH=installed).out == "hello\n"


def test_a_strategy_needs_few_concepts() -> None:
    """The methods that the training object defines besides its constructor are those of the interface."""
    tree = ast.parse((FOLDER / "averaging.py").read_text(encoding="utf-8"))
    (_, trained) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    defined = {node.name for node in trained.body if isinstance(node, ast.FunctionDef)} - {"__init__"}
    assert defined == {"train_step", "synchronize", "columns", "state_dict", "load_state_dict"}


@pytest.mark.parametrize(("room", "most"), [("compressors", 7), ("collectives", 5), ("optimizers", 3)])
def test_it_needs_few_concepts(room: str, most: int) -> None:
    """Counts the names that a component imports from this project, and the names of its base class that it defines."""
    module, name = COMPONENTS[room]
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    concepts = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("bench", "collectives", "compressors"))
        for alias in node.names
    }
    (component,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    concepts |= {node.name for node in component.body if isinstance(node, ast.FunctionDef)}
    concepts |= {target.id for node in component.body if isinstance(node, ast.Assign) for target in node.targets}
    assert len(concepts) <= most, sorted(concepts)
