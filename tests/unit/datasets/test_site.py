"""The source text of installed packages: which files it has, its versions, and packages that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.site import Site

pytestmark = pytest.mark.usefixtures("own_cache")


def build(text: str) -> Site:
    return cast(Site, spec.build("datasets", text))


def install(folder: Path, name: str, files: dict[str, str], version: str = "1.0+cpu") -> None:
    """Install a package as pip does: its files, and a list of them."""
    described = folder / f"{name}-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    unused = ("../bin/script.py", "__editable___finder.py", *(path.replace("a.py", "gone.py") for path in files))
    (described / "RECORD").write_text("".join(f"{path},,\n" for path in (*files, *unused)))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "one")
    monkeypatch.syspath_prepend(tmp_path / "two")
    text = "".join(f"word {number}\n" for number in range(200))
    tests = {"alpha_made/tests/a.py": text, "alpha_made/test_b.py": text, "alpha_made/b_test.py": text}
    install(tmp_path / "one", "Alpha_Made", {"alpha_made/a.py": text, "alpha_made/c.so": text} | tests)
    install(tmp_path / "two", "betabeta", {"beta/__init__.py": "", "beta/b.py": text.replace("word", "number")}, "2")
    install(tmp_path / "two", "compiled", {"compiled.so": text})


def test_files_are_those_of_the_packages_without_tests(tmp_path: Path) -> None:
    dataset = build("site:packages=betabeta+alpha.made+betabeta,context=8")
    assert set(dataset.corpus.sizes) == {
        "alpha_made/a.py",
        os.path.relpath(tmp_path / "two/beta/b.py", tmp_path / "one"),
    }
    assert (dataset.packages, dataset.versions) == (("alpha-made", "betabeta"), "1.0+cpu/2")
    whole = spec.full_text(dataset)
    assert spec.full_text(build(whole)) == whole
    assert f"hash={dataset.hash},packages=alpha-made+betabeta,versions=1.0+cpu/2" in whole
    train, test = dataset.load(tmp_path, seed=1)
    assert (len(train), len(test)) == dataset.sizes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("packages=betabete", r"no package betabete is installed \(did you mean 'betabeta'\?\); install it$"),
        ("packages=sklearn", r"no package sklearn is installed \(did you mean 'scikit-learn'\?\); install it$"),
        (
            "packages=alpha-made+compiled",
            "the package compiled has no list of Python files, because it is compiled, or",
        ),
        ("packages=none", "no packages are named; name installed ones, such as site:packages=torch"),
        (
            "packages=betabeta,versions=1",
            "the packages betabeta have the versions 2 instead of 1; install those, or le",
        ),
    ],
)
def test_packages_that_cannot_be_used_are_named(options: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(f"site:{options}").resolve_sizes(None, None)
