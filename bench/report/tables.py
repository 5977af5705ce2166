"""Tables: one model, written for the terminal, as Markdown, LaTeX, CSV or JSON.

A cell has a text for people and raw numbers for programs; the terminal, Markdown and LaTeX show the texts, CSV and JSON
the raw numbers in base units (seconds, bytes, shares).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from bench.report.formats import NOTHING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP = "  "  # between columns
_NARROWEST_NAME = 2  # of a column of names, where they stand above their figures
_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    | {"≥": r"$\geq$", "±": r"$\pm$"}
)

Raw = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One column.

    Attributes:
        heading: may have line breaks, which only the terminal shows.
        align: numbers right, texts left.
        priority: 0 names the row and is repeated wherever the table is broken; the lower, the earlier it is shown
            where not all columns fit side by side.
    """

    heading: str
    align: Literal["left", "right"] = "right"
    priority: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        text: for people; ``-`` if there is nothing to say.
        raw: for programs, name -> value in base units; a mean with an interval has three.
        style: a Rich style for the terminal.
    """

    text: str = NOTHING
    raw: Mapping[str, Raw] = dataclasses.field(default_factory=dict)
    style: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table with what stands above and below it.

    Attributes:
        cautions: what must be known before looking at a number.
        answer: what the numbers say, for people who do not look at them.
        title: what is shown.
        subtitle: what all rows share.
        notes: how to read it.
    """

    cautions: Sequence[str] = ()
    answer: Sequence[str] = ()
    title: str
    subtitle: str = ""
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def without_empty_columns(self) -> Table:
        """The same table for people: columns with nothing in any row are left out."""
        kept = [i for i in range(len(self.columns)) if any(row[i].text != NOTHING for row in self.rows)]
        return dataclasses.replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )


def to_csv(table: Table) -> str:
    """Raw values, one line per row; empty cells where there is nothing."""
    records = _records(table)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(dict.fromkeys(k for r in records for k in r)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv_value(value) for key, value in record.items()} for record in records)
    return buffer.getvalue()


def to_json(table: Table, **more: object) -> str:
    """Raw values as ``{"title": ..., "rows": [{...}]}``; further keys come before the rows."""
    return json.dumps({"title": table.title, **more, "rows": _records(table)}, indent=2, ensure_ascii=False) + "\n"


def to_markdown(table: Table) -> str:
    """Texts as a Markdown table, with title and notes around it."""
    shown = table.without_empty_columns()
    lines = [f"**{shown.title}**", *([f"\n{shown.subtitle}"] if shown.subtitle else [])]
    lines += [*(f"\n**Caution:** {caution}" for caution in shown.cautions)]
    lines += [*(f"\n{sentence}" for sentence in shown.answer), ""]
    lines.append(_markdown_row(column.heading for column in shown.columns))
    lines.append(_markdown_row("---:" if column.align == "right" else ":---" for column in shown.columns))
    lines += [_markdown_row(cell.text for cell in row) for row in shown.rows]
    lines += [f"\n{note}" for note in shown.notes]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """Texts as a LaTeX table for the package booktabs."""
    shown = table.without_empty_columns()
    above = [shown.title, shown.subtitle, *(f"Caution: {caution}" for caution in shown.cautions)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_latex('. '.join(filter(None, above)))}}}",
            rf"\begin{{tabular}}{{{''.join(column.align[0] for column in shown.columns)}}}",
            r"\toprule",
            _latex_row(column.heading for column in shown.columns),
            r"\midrule",
            *(_latex_row(cell.text for cell in row) for row in shown.rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par {_latex(note)}" for note in shown.notes),
            r"\end{table}",
            "",
        ]
    )


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex, cells)) + r" \\"


def _latex(text: str) -> str:
    return text.replace("\n", " ").translate(_LATEX)


def to_text(table: Table, width: int = 120) -> str:
    """What ``print_rich`` prints, without colours."""
    from rich.console import Console

    buffer = io.StringIO()
    print_rich(table, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def print_rich(table: Table, console: Console) -> None:
    """Print for a terminal, in one block if the figures of a row fit side by side: long names stand above them.

    Where they do not, columns follow in further blocks below, and those that name a row are repeated in each. No cell
    is ever cut.
    """
    from rich.text import Text

    shown = table.without_empty_columns()
    for caution in shown.cautions:
        console.print(Text(f"caution: {caution}", style="yellow"))
    for sentence in shown.answer:
        console.print(Text(sentence, style="bold"))
    if shown.answer:
        console.print()
    console.print(Text(shown.title, style="bold"))
    if shown.subtitle:
        console.print(Text(shown.subtitle, style="dim"))
    for block in _blocks(shown, console.width):
        console.print()
        # What is laid out already is not broken again; in one piece, since rich takes its time for every piece.
        console.print(block, soft_wrap=True)
    if shown.notes:
        console.print()
    for note in shown.notes:
        console.print(Text(note, style="dim"))


def _blocks(table: Table, width: int) -> Iterator[Text]:
    names = [i for i, column in enumerate(table.columns) if column.priority == 0]
    figures = sum(_width(table, i) + len(_GAP) for i in range(len(table.columns)) if i not in names)
    if len(names) == 1 and figures and figures + _NARROWEST_NAME <= width:
        yield _block_with_names_above(table, names[0], width, width - figures)
        return
    table = _with_short_names(table, names, width)
    widths = [_width(table, i) for i in range(len(table.columns))]
    block: list[int] = []
    for i in sorted(set(range(len(table.columns))) - set(names), key=lambda i: (table.columns[i].priority, i)):
        # A block has at least one column, whatever its width, so that every column finds a place.
        if block and sum(widths[j] + len(_GAP) for j in [*names, *block, i]) - len(_GAP) > width:
            yield _block(table, [*names, *sorted(block)], widths)
            block = []
        block.append(i)
    yield _block(table, [*names, *sorted(block)], widths)


def _block_with_names_above(table: Table, name: int, width: int, room: int) -> Text:
    """All columns side by side; a name that has no room beside its figures stands on lines of its own above them."""
    names = [row[name].text for row in table.rows]
    above = ["" if len(text) <= room else _broken(text, width) for text in names]
    rows = [
        [dataclasses.replace(cell, text="") if i == name and text else cell for i, cell in enumerate(row)]
        for row, text in zip(table.rows, above, strict=True)
    ]
    shown = dataclasses.replace(table, rows=rows)
    indices = range(len(table.columns))
    return _block(shown, indices, [_width(shown, i) for i in indices], above)


def _width(table: Table, index: int) -> int:
    return max(len(line) for line in _column_lines(table, index))


def _column_lines(table: Table, index: int) -> Iterator[str]:
    yield from table.columns[index].heading.split("\n")
    for row in table.rows:
        yield from row[index].text.split("\n")


def _block(table: Table, indices: Sequence[int], widths: Sequence[int], above: Sequence[str] = ()) -> Text:
    """The columns with these indices side by side; `above`: what stands above each row, or nothing."""
    from rich.text import Text

    columns = [table.columns[i] for i in indices]
    height = max(column.heading.count("\n") for column in columns)
    headings = [Cell(text="\n" * (height - c.heading.count("\n")) + c.heading, style="bold") for c in columns]
    shown_widths = [widths[i] for i in indices]
    text = Text()
    _append_row(text, headings, columns, shown_widths)
    text.append("─" * (sum(shown_widths) + len(_GAP) * (len(columns) - 1)) + "\n")
    for row, heading in zip(table.rows, above or itertools.repeat(""), strict=False):
        if heading:
            text.append(f"{heading}\n")
        _append_row(text, [row[i] for i in indices], columns, shown_widths)
    text.rstrip()
    return text


def _append_row(text: Text, cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int]) -> None:
    lines = [cell.text.split("\n") for cell in cells]
    for line in itertools.zip_longest(*lines, fillvalue=""):
        for part, cell, column, width in zip(line, cells, columns, widths, strict=True):
            text.append(part.ljust(width) if column.align == "left" else part.rjust(width), style=cell.style)
            text.append(_GAP)
        text.append("\n")


def _with_short_names(table: Table, names: Sequence[int], width: int) -> Table:
    """The table with the cells that name its rows broken at commas where they would take over half of the width."""
    widest = {i: max(len(row[i].text) for row in table.rows) for i in names}
    total = sum(widest.values())
    if total <= width // 2:
        return table
    allowed = {i: max(8, widest[i] * (width // 2) // total) for i in names}
    return dataclasses.replace(
        table,
        rows=[
            [
                dataclasses.replace(cell, text=_broken(cell.text, allowed[i])) if i in allowed else cell
                for i, cell in enumerate(row)
            ]
            for row in table.rows
        ],
    )


def _broken(spec: str, width: int) -> str:
    """``name:a=1,b=2`` on lines of at most ``width`` characters, at its commas and its colon as far as these allow."""
    lines = [""]
    for part in spec.replace(",", ",\0").replace(":", ":\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(line[i : i + width] for line in lines for i in range(0, len(line), width))


def _records(table: Table) -> list[dict[str, Raw]]:
    return [{key: _finite(value) for cell in row for key, value in cell.raw.items()} for row in table.rows]


def _finite(value: Raw) -> Raw:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv_value(value: Raw) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _markdown_row(cells: Iterable[str]) -> str:
    texts = (cell.replace("\n", " ").replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(texts)} |"
