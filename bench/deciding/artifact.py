"""Let other commands find the folder of a decision, and show its report, its pictures and its table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core.errors import UsageError
from bench.core.run_folder import read_json, write_json
from bench.deciding.study import ANSWER, FILE, is_finished
from bench.report.artifacts import Artifact, ArtifactKind, Views

if TYPE_CHECKING:  # otherwise imported only when they are needed, because they take long
    from bench.report.page import Page
    from bench.report.plots.style import Picture
    from bench.report.tables import Table


def _read(folder: Path) -> Artifact | None:
    if "methods" not in (read_json(folder / FILE) or {}):
        return None
    from bench.report.page import environments  # takes long

    status = "unfinished"
    if is_finished(folder):
        decided = (read_json(folder / ANSWER) or {}).get("decisions", [])
        status = "open" if any(each["verdict"] == "open" for each in decided) else "ok"
    _, commands, _ = environments(sorted(folder.glob(".*/*/environment.json")))
    return Artifact(path=folder, status=status, command=commands[0] if commands else f"bench decide {folder}")


def _again(folder: Path) -> list[str]:
    """Copy the study to a new folder beside the old one, and return the command that decides there."""
    study = read_json(folder / FILE)
    if study is None:
        raise UsageError(f"{folder / FILE} cannot be read; start the decision again with bench decide")
    stem = str(folder.resolve())
    new = next(path for number in itertools.count(2) if not (path := Path(f"{stem}-{number}")).exists())
    new.mkdir()
    write_json(new / FILE, study)
    limits = {f"--{name.replace('_', '-')}": str(value) for name, value in study.get("limits", {}).items()}
    return ["decide", str(new), *itertools.chain(*limits.items())]


def _page(folder: Path) -> Page:
    from bench.deciding.folder import read
    from bench.deciding.page import page_of

    return page_of(read(folder))


def _pictures(folder: Path) -> Mapping[str, Picture]:
    from bench.deciding.folder import read
    from bench.deciding.pictures import pictures_of

    return {name: picture for name, (picture, _) in pictures_of(read(folder)).items()}


def _table(folder: Path) -> Table:
    from bench.deciding.folder import read
    from bench.deciding.tables import decision_table

    return decision_table(read(folder))


KIND = ArtifactKind(
    name="decision",
    marker=FILE,
    read=_read,
    again=_again,
    views=Views(page=_page, pictures=_pictures, table=_table),
)
