"""Methods and studies as users write them."""

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.extensions.decide.study import Study, parse_method, read_methods, short_names


def test_a_method_names_a_compressor_and_perhaps_a_collective() -> None:
    assert parse_method("topk:ratio=0.01@allgather") == {"compressor": "topk:ratio=0.01", "collective": "allgather"}
    assert parse_method("powersgd") == {"compressor": "powersgd"}
    for wrong in ("", "@ring", "topk@"):
        with pytest.raises(UsageError, match="is not a method; write COMPRESSOR or COMPRESSOR@COLLECTIVE"):
            parse_method(wrong)


def test_a_file_names_methods_as_a_sweep_file_does(tmp_path: Path) -> None:
    path = tmp_path / "methods.toml"
    path.write_text('[base]\nepochs = 3\n[[method]]\ncompressor = "topk"\nlr = 0.1\n', encoding="utf-8")
    assert read_methods(path) == ({"epochs": 3}, [{"compressor": "topk", "lr": 0.1}])
    path.write_text('[base]\nseeds = "1-3"\n[[method]]\ncompressor = "topk"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="names seeds, but bench decide adds seeds"):
        read_methods(path)


def test_the_link_does_not_change_the_digest_of_a_study(tmp_path: Path) -> None:
    methods = [{"compressor": "bf16"}, {"compressor": "topk"}]
    here, there = (
        Study(base={"epochs": 3, "hosts": 2, "bandwidth": rate}, methods=methods) for rate in ("1mbit", "2mbit")
    )
    assert here.digest == there.digest != Study(base={"epochs": 4}, methods=methods).digest
    here.store(tmp_path)
    assert Study.read(tmp_path) == here
    with pytest.raises(UsageError, match=r"holds no study\.json; give a folder that bench decide has written"):
        Study.read(tmp_path / "other")


@pytest.mark.parametrize(
    ("components", "names"),
    [
        ([("bf16", "native"), ("topk:ratio=0.05", "ring")], ["bf16", "topk"]),
        ([("topk:ratio=0.1", "ring"), ("topk:ratio=0.2", "ring")], ["topk:ratio=0.1", "topk:ratio=0.2"]),
        ([("topk", "ring"), ("topk", "tree")], ["topk + ring", "topk + tree"]),
        ([("topk", "ring"), ("topk", "ring")], ["lr = 0.1", "lr = 0.2"]),
    ],
)
def test_a_method_has_the_shortest_name_that_is_unique(components: list[tuple[str, str]], names: list[str]) -> None:
    assert short_names(components, [{"lr": 0.1}, {"lr": 0.2}]) == names
