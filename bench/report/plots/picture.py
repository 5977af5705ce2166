"""Save a picture, a figure with its alternative text, to a file or embed it in a page."""

from __future__ import annotations

import dataclasses
import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.errors import UsageError
from bench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without date and version of matplotlib, so that equal rows give equal files.
_UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_DESCRIPTION = {"png": "Description", "svg": "Description", "pdf": "Subject"}
SUFFIXES = tuple(f".{name}" for name in _UNDATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, and a text for people who cannot see it."""

    figure: Figure
    alt: str


def save(picture: Picture, path: Path) -> None:
    """Write a picture as PNG, SVG or PDF, by the path's suffix, with its text as the file's description.

    Raises:
        UsageError: the file cannot be written.
    """
    form = path.suffix.lower().removeprefix(".")
    metadata = _UNDATED[form] | {_DESCRIPTION[form]: picture.alt}
    try:
        if form == "svg":
            path.write_text(_svg(picture, metadata=metadata), encoding="utf-8")
            return
        with style.applied():
            picture.figure.savefig(path, format=form, metadata=metadata)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None


def inline_svg(picture: Picture, name: str) -> str:
    """Return an ``svg`` element to embed in a page, labelled with the text; all its ids begin with ``name``."""
    svg = re.sub(r"<!--.*?-->", "", _svg(picture, metadata=_UNDATED["svg"], transparent=True), flags=re.DOTALL)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(picture.alt)}"', 1)


def _svg(picture: Picture, **options: Any) -> str:
    buffer = io.StringIO()
    with style.applied():
        picture.figure.savefig(buffer, format="svg", **options)
    return style.with_tooltips(picture.figure, buffer.getvalue())
