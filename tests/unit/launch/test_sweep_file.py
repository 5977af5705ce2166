"""The sweep file: its configurations, and the error message for each unreadable one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.launch.sweep_file import SweepFile, read_sweep

ROOT = Path(__file__).parents[3]


def sweep_of(folder: Path, text: str, *further: str) -> SweepFile:
    path = folder / "grid.toml"
    path.write_text(text, encoding="utf-8")
    return read_sweep(path, *further)


def test_every_combination_of_the_matrix_is_a_configuration(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        """
        [base]
        batch-size = 16
        timeout = 20
        [matrix]
        compressor = ["none", "topk"]
        world_size = [1, 2, 3]
        """,
    )
    assert sweep.base == {"batch_size": 16, "timeout_s": 20}
    assert sweep.configurations() == [
        {"compressor": compressor, "world_size": world_size}
        for compressor in ("none", "topk")
        for world_size in (1, 2, 3)
    ]


def test_include_adds_and_exclude_takes_away(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        """
        [base]
        model = "linear"
        [matrix]
        compressor = ["none", "topk"]
        collective = ["ring", "tree"]
        [[include]]
        model = "small_cnn"
        [[exclude]]
        compressor = "topk"
        collective = "tree"
        [[exclude]]
        model = "linear"
        compressor = "none"
        """,
    )
    assert sweep.configurations() == [{"compressor": "topk", "collective": "ring"}, {"model": "small_cnn"}]


def test_without_a_matrix_the_base_is_the_configuration_or_the_includes_are(tmp_path: Path) -> None:
    assert sweep_of(tmp_path, "").configurations() == [{}]
    assert sweep_of(tmp_path, "[[include]]\nlr = 0.1").configurations() == [{"lr": 0.1}]


def test_a_method_is_combined_with_all_of_the_matrix(tmp_path: Path) -> None:
    methods = """
        [[method]]
        compressor = "none"
        lr = 0.1
        [[method]]
        compressor = "topk"
        """
    dense, sparse = {"compressor": "none", "lr": 0.1}, {"compressor": "topk"}
    assert sweep_of(tmp_path, methods).configurations() == [dense, sparse]
    sweep = sweep_of(tmp_path, f"[matrix]\nbandwidth = ['1mbit', '2mbit']\n[[include]]\nlr = 1.0\n{methods}")
    links = [{"bandwidth": "1mbit"}, {"bandwidth": "2mbit"}]
    assert sweep.configurations() == [link | method for link in links for method in (dense, sparse)] + [{"lr": 1.0}]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ('[base]\nseeds = "2-4"', [2, 3, 4]),
        ("[base]\nseed = 7", [7]),
        ("[matrix]\nseeds = [3, 1]", [3, 1]),
        ("[matrix]\nseed = [3, 1]", [3, 1]),
        ("", []),
    ],
)
def test_seeds(text: str, seeds: list[int], tmp_path: Path) -> None:
    assert sweep_of(tmp_path, text).seeds == seeds


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[basis]", r"there is no 'basis' \(did you mean 'base'\?\)"),
        ("[base]\ncompresor = 'topk'", r"grid.toml \[base\]: there is no 'compresor' \(did you mean 'compressor'\?\)"),
        ("[matrix]\nepoch = [1]", r"\[matrix\]: there is no 'epoch' \(did you mean 'epochs'\?\)"),
        ("[base]\nnnodes = 2", "there is no 'nnodes'"),
        ("[base]\nlr = [0.1, 0.2]", r"\[base\]: lr = \[0.1, 0.2\] is not a single value; write lists under \[matrix\]"),
        ("[matrix]\nlr = 0.1", r"\[matrix\]: lr = 0.1 is not a list of values"),
        ("[matrix]\nlr = []", r"lr = \[\] is not a list of values"),
        ("base = 3", r"write base as a table"),
        ("[base]\nlr = 1\n[matrix]\nlr = [2]", r"gives lr both in \[base\] and in \[matrix\]; leave out one"),
        ("[matrix]\nlr = [2]\n[[method]]\nlr = 1", r"gives lr both in \[matrix\] and in \[\[method\]\]; leave out one"),
        ("[base]\nseed = 1\nseeds = '2'", "gives seed and seeds; give one of them"),
        ("[base]\nseed = 1\n[matrix]\nseed = [2]", "gives seeds in .base. and in .matrix.; give them once"),
        ("[base]\nseeds = '3-1'", "has a range that ends before it begins"),
        ("[base]\nseeds = true", "seeds = true|seeds = True is not a list of seeds"),
        ("[tune]\nlr = [1]", "there is no 'tune'"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence) as refusal:
        sweep_of(tmp_path, text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[matrix]\nlr = [1]\n[[exclude]]\nlr = 2", r"\[\[exclude\]\]: lr = 2 matches no configuration; correct it"),
        ("[matrix]\nlr = [1]\n[[exclude]]\nlr = 1", "excludes every configuration; remove an"),
    ],
)
def test_an_exclude_that_cannot_be_meant_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        sweep_of(tmp_path, text).configurations()


def test_the_digest_follows_what_the_file_says_and_not_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = sweep_of(tmp_path, "[base]\nlr = 1")
    assert one.digest == sweep_of(tmp_path / "other", "# the same\n[base]\nlr = 1").digest
    assert one.digest != sweep_of(tmp_path, "[base]\nlr = 2").digest


@pytest.mark.parametrize(("name", "configurations"), [("sweep", 4), ("five-methods", 5), ("tune", 10)])
def test_the_examples_are_sweeps(name: str, configurations: int) -> None:
    sweep = read_sweep(ROOT / "examples" / f"{name}.toml", "tune")
    assert len(sweep.configurations()) == configurations
    assert len(sweep.seeds) == 3
