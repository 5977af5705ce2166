"""`make docs` fails on each fault that a page can have; the real site's rules are applied to a small one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # a make that runs the tests must not speak through another
SITE = f"""
INHERIT: {ROOT}/mkdocs.yml
theme: {{name: mkdocs}}
hooks: ["{ROOT}/docs/hooks.py"]
plugins: []
nav: [index.md]
"""


@pytest.mark.parametrize(
    ("text", "page", "complaint"),
    [
        ("[a heading](#a-heading)", None, ""),
        ("[a page](nowhere.md)", None, "nowhere.md"),
        ("[a heading](#nowhere)", None, "#nowhere"),
        ("[a heading](index.md#nowhere)", None, "#nowhere"),
        ("[the server's root](/nowhere/)", None, "/nowhere/"),
        ("[a page](other.md)", "other.md", "other.md"),
    ],
    ids=["well", "no such page", "no such heading", "no such heading of a page", "absolute", "not in the navigation"],
)
def test_make_docs_fails_on_a_fault_and_is_silent_otherwise(
    tmp_path: Path, text: str, page: str | None, complaint: str
) -> None:
    (tmp_path / "mkdocs.yml").write_text(SITE, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A heading\n\n{text}\n", encoding="utf-8")
    if page:
        (tmp_path / "docs" / page).write_text("# A page\n", encoding="utf-8")
    made = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "-o", ".venv/.ready", "docs", f"BIN={Path(sys.executable).parent}"],
        cwd=tmp_path, env={name: os.environ[name] for name in os.environ.keys() - OF_MAKE},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (made.returncode == 0) == (not complaint)
    assert (made.stdout, made.stderr) == ("", "") if not complaint else complaint in made.stderr
    if not complaint:  # the links of a page that a server shows for every missing one
        missing = (tmp_path / "build/site/404.html").read_text(encoding="utf-8")
        assert 'href="css/' in missing
        assert '="/' not in missing
