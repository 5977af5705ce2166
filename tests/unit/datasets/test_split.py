"""Which files of a text are held out: copies and families stay together, licences and idioms join nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bench.datasets import split
from bench.datasets.split import groups_among, held_out_among

LICENCE = "".join(f"# {word} may be used, copied and changed by anyone who keeps this notice\n" for word in range(9))
IDIOM = "def main(arguments):\n    for argument in arguments:\n        check(argument)\n"


def prose(seed: int, lines: int = 40) -> str:
    """Return lines that no other seed has."""
    generator = random.Random(seed)
    return "".join(f"    value_{generator.getrandbits(60)} = call({generator.getrandbits(60)})\n" for _ in range(lines))


def with_changes(text: str) -> str:
    """Return a text in which every 20th line is another."""
    return "".join(
        f"    changed({number})\n" if number % 20 == 9 else line
        for number, line in enumerate(text.splitlines(keepends=True))
    )


def from_template(number: int) -> str:
    """Return a file of a family: runs of three shared lines between lines of its own."""
    shared = [f"    table[{row}] = 'a letter of the old alphabet'\n" for row in range(60)]
    own = [f"    # {row} of {number}: {row * number + 7**number}\n" for row in range(60)]
    return "".join(line + (own[row] if row % 3 == 2 else "") for row, line in enumerate(shared))


def grouped(files: dict[str, str]) -> list[list[str]]:
    """Return the groups of more than one file."""
    contents = {name: text.encode() for name, text in files.items()}
    groups = groups_among({name: len(content) for name, content in contents.items()}, contents.__getitem__)
    return [group for group in groups if len(group) > 1]


@pytest.fixture
def files() -> dict[str, str]:
    """Files with a licence and an idiom in common, among them copies and a family."""
    texts = {f"{number}.py": prose(number) for number in range(6)} | {"1.py": prose(1, 300)}
    texts |= {"copy.py": texts["0.py"], "part.py": prose(90, 300) + texts["1.py"][:600], "near.py": texts["2.py"]}
    texts["near.py"] = with_changes(texts["near.py"])
    texts |= {f"table{number}.py": from_template(number) for number in range(4)}
    return {name: LICENCE + "\n" + text + IDIOM for name, text in texts.items()}


def test_copies_and_families_are_groups_and_licences_and_idioms_join_nothing(files: dict[str, str]) -> None:
    tables = [f"table{number}.py" for number in range(4)]
    assert grouped(files) == [["0.py", "copy.py"], ["1.py", "part.py"], ["2.py", "near.py"], tables]
    # nothing but a comment
    assert grouped({"a": LICENCE, "b": LICENCE, "c": LICENCE + prose(1), "d": "# another\n"}) == [["a", "b"]]
    assert grouped({"a": "x = 1\n", "b": "x = 1\n", "c": "x = 2\n"}) == [["a", "b"]]
    long = [f"{{{'x' * 300}{number}{'y' * 900}}}" for number in range(2)]  # in one line
    assert grouped({"a": long[0], "b": long[1], "c": "z" * 900}) == [["a", "b"]]


def test_several_passes_find_the_same_groups(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = grouped(files)
    monkeypatch.setattr(split, "PASS_BYTES", 1000)
    assert grouped(files) == expected


def sides(texts: dict[str, str]) -> set[str]:
    contents = {name: text.encode() for name, text in texts.items()}
    return held_out_among({name: len(content) for name, content in contents.items()}, contents.__getitem__)


def test_a_14th_is_held_out_in_whole_groups_and_another_file_changes_no_side() -> None:
    texts = {f"{number}.py": prose(number, 8) for number in range(600)}
    texts |= {f"{number}-copy.py": texts[f"{number}.py"] for number in range(0, 600, 2)}
    texts["0.py"] += prose(900, 60)  # the largest is never held out
    held_out = sides(texts)
    assert 0.04 < len(held_out) / len(texts) < 0.11
    assert all((f"{number}.py" in held_out) == (f"{number}-copy.py" in held_out) for number in range(0, 600, 2))
    for removed in ("1.py", "2-copy.py", "333.py", *sorted(held_out)[:2]):
        fewer = {name: text for name, text in texts.items() if name != removed}
        number = removed.partition(".")[0].partition("-")[0]
        assert sides(fewer) ^ (held_out - {removed}) <= {f"{number}.py", f"{number}-copy.py"}  # of the same group


@pytest.mark.parametrize("name", [lambda number: f"{number}", lambda number: f"a{number}.txt"])
def test_each_side_has_a_group_unless_there_is_only_one(name: Callable[[int], str]) -> None:
    for count in (2, 3):
        assert 1 <= len(sides({name(number): prose(number) for number in range(count)})) < count
    assert sides({name(number): prose(1) for number in range(3)}) == sides({}) == set()
