"""Write one table to the terminal, or as Markdown, LaTeX, HTML, CSV or JSON.

A cell has a text for people and raw values for programs. The terminal, Markdown, LaTeX and HTML show the texts; CSV and
JSON contain the raw values in base units (seconds, bytes, shares).
"""

import csv
import dataclasses
import html
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from rich.console import Console
from rich.text import Text

from bench.core.columns import to_cell
from bench.report.columns import NOTHING

_GAP = "  "  # between columns
_NARROWEST_NAME = 2  # smallest width of a column of names; a longer name is printed above its row
_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    | {"≥": r"$\geq$", "±": r"$\pm$", "|": r"\textbar{}", "[": "{[}", "µ": r"\textmu{}", "\n": " "}
)

T = TypeVar("T")
Raw = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class TableColumn:
    """The heading and layout of one column.

    Attributes:
        heading: the heading; its line breaks appear only in the terminal.
        align: "right" for numbers, "left" for texts.
        priority: 0 for columns that name the row; if the table is split into blocks, every block repeats these columns.
            If the other columns do not all fit side by side, columns with lower priority numbers are shown first.
    """

    heading: str
    align: Literal["left", "right"] = "right"
    priority: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of a table, with a text for people and raw values for programs.

    Attributes:
        text: the text for people; ``-`` if there is no value.
        raw: the values for programs by name, in base units; a cell that shows a mean with its interval has several.
        style: style of the text in the terminal, as Rich writes it, such as ``bold red``.
    """

    text: str = NOTHING
    raw: Mapping[str, Raw] = dataclasses.field(default_factory=dict)
    style: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table with the texts above and below it.

    Attributes:
        cautions: warnings shown above everything else.
        answer: the verdict in a few sentences.
        title: the subject of the table.
        subtitle: the settings that all rows share.
        columns: the headings.
        rows: the cells of each row, one per column.
        notes: explanations of how to read the table.
    """

    cautions: Sequence[str] = ()
    answer: Sequence[str] = ()
    title: str
    subtitle: str = ""
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str] = ()

    def without_empty_columns(self) -> Self:
        """Return the table without the columns whose cells are all ``-``."""
        kept = [i for i in range(len(self.columns)) if any(row[i].text != NOTHING for row in self.rows)]
        return dataclasses.replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )


def table_of(
    declared: Sequence[tuple[TableColumn, Callable[[T], TableCell]]], items: Sequence[T], **texts: Any
) -> Table:
    """Return a table with one row per item.

    Args:
        declared: for each column, its heading and the function that makes its cell from an item.
        items: the items.
        texts: values for the other fields of `Table`, such as ``title``.
    """
    return Table(
        columns=[column for column, _ in declared],
        rows=[[cell_of(item) for _, cell_of in declared] for item in items],
        **texts,
    )


def records(table: Table) -> list[dict[str, Raw]]:
    """Return the raw values of each row by name; None replaces infinity and NaN."""
    return [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for cell in row
            for name, value in cell.raw.items()
        }
        for row in table.rows
    ]


def to_csv(table: Table) -> str:
    """Return the raw values of a table as CSV; a missing value is an empty cell."""
    rows = records(table)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(dict.fromkeys(k for r in rows for k in r)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: to_cell(value) for key, value in record.items()} for record in rows)
    return buffer.getvalue()


def to_json(table: Table, **more: object) -> str:
    """Return the raw values of a table as JSON of the form ``{"title": ..., "rows": [{...}]}``.

    Args:
        table: the table.
        more: further keys and values, which come between the title and the rows.
    """
    return json.dumps({"title": table.title, **more, "rows": records(table)}, indent=2, ensure_ascii=False) + "\n"


def to_markdown(table: Table) -> str:
    """Return the texts as a Markdown table, with the title, cautions and answer above it and the notes below it."""
    shown = table.without_empty_columns()
    rows = [
        [column.heading for column in shown.columns],
        ["---:" if column.align == "right" else ":---" for column in shown.columns],
        *([cell.text for cell in row] for row in shown.rows),
    ]
    return "\n".join(
        [
            f"**{shown.title}**",
            *(f"\n{settings}" for settings in filter(None, [shown.subtitle])),
            *(f"\n**Caution:** {caution}" for caution in shown.cautions),
            *(f"\n{sentence}" for sentence in shown.answer),
            "",
            *("| " + " | ".join(text.replace("\n", " ").replace("|", r"\|") for text in row) + " |" for row in rows),
            *(f"\n{note}" for note in shown.notes),
            "",
        ]
    )


def to_latex(table: Table) -> str:
    """Return the texts as LaTeX source of a table, which needs the packages booktabs and graphicx.

    A table that is wider than the text is scaled to its width. The label is ``tab:`` and the title up to its colon.
    """
    shown = table.without_empty_columns()
    above = [shown.title, shown.subtitle, *(f"Caution: {caution}" for caution in shown.cautions)]
    label = re.sub(r"[^a-z0-9]+", "-", shown.title.partition(":")[0].lower()).strip("-")
    headings = [
        rf"\shortstack[{column.align[0]}]{{" + column.heading.translate(_LATEX | {ord("\n"): r" \\ "}) + "}"
        for column in shown.columns
    ]
    rows = [[cell.text.translate(_LATEX) for cell in row] for row in shown.rows]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs,graphicx}",
            r"\begin{table}[htbp]",
            r"\centering",
            rf"\caption{{{'. '.join(filter(None, above)).translate(_LATEX)}.}}",
            rf"\label{{tab:{label}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{''.join(column.align[0] for column in shown.columns)}}}",
            r"\toprule",
            " & ".join(headings) + r" \\",
            r"\midrule",
            *(" & ".join(texts) + r" \\" for texts in rows),
            r"\bottomrule",
            r"\end{tabular}}",
            *(rf"\par\smallskip{{\footnotesize {note.translate(_LATEX)}\par}}" for note in shown.notes),
            r"\end{table}",
            "",
        ]
    )


def to_html(table: Table, warnings: Sequence[str] = ()) -> str:
    """Return the texts as part of an HTML page: cautions and answer, the table, then notes and these warnings."""
    shown = table.without_empty_columns()

    def row(tag: str, texts: Sequence[str]) -> str:
        cells = [
            f'<{tag} style="text-align: {column.align}; white-space: pre-line">{html.escape(text)}</{tag}>'
            for column, text in zip(shown.columns, texts, strict=True)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    return "\n".join(
        [
            *(f"<p><b>Caution:</b> {html.escape(caution)}</p>" for caution in shown.cautions),
            *(f"<p><b>{html.escape(sentence)}</b></p>" for sentence in shown.answer),
            '<table style="border-spacing: 0.8em 0.2em">',
            f'<caption style="text-align: left">{"<br>".join(map(html.escape, filter(None, above)))}</caption>'
            if any(above := (shown.title, shown.subtitle))
            else "",
            row("th", [column.heading for column in shown.columns]),
            *(row("td", [cell.text for cell in cells]) for cells in shown.rows),
            "</table>",
            *(f"<p>{html.escape(note)}</p>" for note in [*shown.notes, *(f"warning: {each}" for each in warnings)]),
        ]
    )


def to_text(table: Table, width: int = 120) -> str:
    """Return the table as plain text without colours, as `print_rich` lays it out on ``width`` terminal columns."""
    buffer = io.StringIO()
    print_rich(table, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def print_rich(table: Table, console: Console) -> None:
    """Print the table on a terminal.

    If a row's numbers fit side by side, the table is one block, in which a long name is printed above its row.
    Otherwise the columns are split into several blocks, each of which repeats the columns that name the row. No cell is
    ever cut.
    """
    shown = table.without_empty_columns()
    answer = [*shown.answer, ""] if shown.answer else []
    above = [
        *(Text(f"caution: {caution}", style="yellow") for caution in shown.cautions),
        *(Text(sentence, style="bold") for sentence in [*answer, shown.title]),
        *(Text(settings, style="dim") for settings in filter(None, [shown.subtitle])),
    ]
    console.print(*above, sep="\n")
    for block in _blocks(shown, console.width):
        # The block is already laid out, so rich must not wrap it. One print is faster than one per line.
        console.print("", block, sep="\n", soft_wrap=True)
    if shown.notes:
        console.print("", *(Text(note, style="dim") for note in shown.notes), sep="\n")


def _blocks(table: Table, width: int) -> Iterator[Text]:
    names = [i for i, column in enumerate(table.columns) if column.priority == 0]
    figures = [i for i in range(len(table.columns)) if i not in names]
    available = width - sum(_width(table, i) + len(_GAP) for i in figures)
    if len(names) == 1 and figures and available >= _NARROWEST_NAME:
        widths = [_width(table, i, available if i in names else None) for i in range(len(table.columns))]
        yield _block(table, range(len(table.columns)), widths, width)
        return
    # Break names at commas if they would take more than half of the width.
    widest = {i: max(len(row[i].text) for row in table.rows) for i in names}
    total = sum(widest.values())
    if total > width // 2:
        allowed = {i: max(8, widest[i] * (width // 2) // total) for i in names}
        rows = [list(row) for row in table.rows]
        for row, (i, room) in itertools.product(rows, allowed.items()):
            row[i] = dataclasses.replace(row[i], text=_broken(row[i].text, room))
        table = dataclasses.replace(table, rows=rows)
    widths = [_width(table, i) for i in range(len(table.columns))]
    block: list[int] = []
    for i in sorted(figures, key=lambda i: (table.columns[i].priority, i)):
        # A block has at least one column, even if it is too wide, so that every column is shown.
        if block and sum(widths[j] + len(_GAP) for j in [*names, *block, i]) - len(_GAP) > width:
            yield _block(table, [*names, *sorted(block)], widths, width)
            block = []
        block.append(i)
    yield _block(table, [*names, *sorted(block)], widths, width)


def _width(table: Table, index: int, most: int | None = None) -> int:
    # Return the width of a column, ignoring cells that are wider than ``most``.
    texts = [row[index].text for row in table.rows if most is None or len(row[index].text) <= most]
    return max(len(line) for text in (table.columns[index].heading, *texts) for line in text.split("\n"))


def _block(table: Table, indices: Sequence[int], widths: Sequence[int], width: int) -> Text:
    # Lay out these columns side by side; a name wider than its column is printed above the rest of its row.
    columns = [(table.columns[i], widths[i]) for i in indices]
    height = max(column.heading.count("\n") for column, _ in columns)
    headings = ["\n" * (height - column.heading.count("\n")) + column.heading for column, _ in columns]
    text = Text()
    _append_row(text, [TableCell(text=heading, style="bold") for heading in headings], columns)
    text.append("─" * (sum(widths[i] for i in indices) + len(_GAP) * (len(columns) - 1)) + "\n")
    for row in table.rows:
        name, *others = [row[i] for i in indices]
        if max(map(len, name.text.split("\n"))) > columns[0][1]:
            text.append(f"{_broken(name.text, width)}\n")
            name = TableCell(text="")
        _append_row(text, [name, *others], columns)
    text.rstrip()
    return text


def _append_row(text: Text, cells: Sequence[TableCell], columns: Sequence[tuple[TableColumn, int]]) -> None:
    lines = [cell.text.split("\n") for cell in cells]
    for line in itertools.zip_longest(*lines, fillvalue=""):
        for part, cell, (column, width) in zip(line, cells, columns, strict=True):
            text.append(part.ljust(width) if column.align == "left" else part.rjust(width), style=cell.style)
            text.append(_GAP)
        text.append("\n")


def _broken(spec: str, width: int) -> str:
    # Break ``name:a=1,b=2`` into lines of at most ``width`` characters, if possible at its commas and colon.
    lines = [""]
    for part in spec.replace(",", ",\0").replace(":", ":\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(line[i : i + width] for line in lines for i in range(0, len(line), width))
