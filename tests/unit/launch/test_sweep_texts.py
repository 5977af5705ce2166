"""Lists on a command line: sizes with ranges, and specs whose options use the separators of the list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.errors import UsageError
from bench.core.spec import Spec, split_list
from bench.core.units import parse_sizes

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9_.+/:-]{1,9}", fullmatch=True)
SPECS = st.builds(Spec, NAMES, st.dictionaries(NAMES, VALUES, max_size=3))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", [4096]),
        ("10kB,1MB, 10MB", [10_000, 1_000_000, 10_000_000]),
        ("1KiB:8KiB", [1024, 2048, 4096, 8192]),
        ("1KiB:7KiB", [1024, 2048, 4096]),
        ("1kB:1kB", [1000]),
        ("4kB,1kB:4kB", [4000, 1000, 2000]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1MB,", "1MB,big"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["0:1MB", "2MB:1MB"])
def test_a_range_that_does_not_ascend_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a range of sizes; write it like 1KiB:64MiB"):
        parse_sizes(text)


def test_options_belong_to_the_spec_before_them() -> None:
    text = "none, group_topk:ratio=0.01,value_dtype=fp32,ring"
    assert split_list(text) == ["none", "group_topk:ratio=0.01,value_dtype=fp32", "ring"]


def test_an_option_without_a_component_is_a_name_that_does_not_exist() -> None:
    assert split_list("topk,ratio=0.01") == ["topk", "ratio=0.01"]


def test_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="names no component"):
        split_list(" , ")


@pytest.mark.slow
@given(st.lists(SPECS, min_size=1))
def test_a_list_of_specs_comes_back(specs: list[Spec]) -> None:
    assert [Spec.parse(text) for text in split_list(",".join(map(str, specs)))] == specs
