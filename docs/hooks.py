"""Hook of mkdocs that decides where lines of a page may break."""

from __future__ import annotations

import re

OPTION = re.compile(r"(?<![\w-])(--?[a-z][\w-]*)(?![^<>]*>)")
SENTENCE = re.compile(r'<span class="go">(?=[^<]+</span>)(?![^<]*(?:  |─))')
CELL = re.compile(r"<td.*?</td>")
WITHIN_VALUE = re.compile(r"(?<=\w)([:=,+])(?=\w)(?![^<>]*>)")
CODE_OR_UNIT = re.compile(r"<(pre|code)\b.*?</\1>|(?<=\d) (?=(?:%|[kMGmu]?[Bs]|[kMG]?bit/s|GB/s)(?!\w))", re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    """Keep options, and numbers with units, on one line; let printed sentences and long values in tables break."""
    html = CODE_OR_UNIT.sub(lambda found: found[0] if found[1] else "&nbsp;", html)
    html = SENTENCE.sub('<span class="go sentence">', html)
    html = OPTION.sub(r'<span class="option">\1</span>', html)
    return CELL.sub(lambda cell: WITHIN_VALUE.sub(r"\1<wbr>", cell[0]), html)
