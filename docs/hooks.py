"""Hooks of mkdocs that decide where lines of a page may break, and let 404.html work in any folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

WHOLE = re.compile(r"(?<![\w-])(--?[a-z][\w-]*|\d{4}-\d\d-\d\d)(?![^<>]*>)")
SENTENCE = re.compile(r'<span class="go">(?= {0,4}(?:[^\s<─]+ )*(?: +(?:[^\s<]+ ){3,})?[^\s<─]+\s*</span>)')
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>")
WITHIN_VALUE = re.compile(r"(?<=\w)([:=,+])(?=\w)(?![^<>]*>)")
LONG_NAME = re.compile(r"(?<!\w)\w{13,}(?!\w)(?![^<>]*>)")
DOTTED = re.compile(r"(?<![\w.])[A-Za-z]\w*(?:\.\w+){2,}(?![^<>]*>)")
LONG_CODE = re.compile(r"<pre\b.*?</pre>|<code>[^<]{20,}</code>", re.DOTALL)
WITHIN_PATH = re.compile(r"(?<=\w\w)/(?=\w\w)")
CODE_OR_UNIT = re.compile(r"<(pre|code)\b.*?</\1>|(?<=\d) (?=(?:%|[kMGmu]?[Bs]|[kMG]?bit/s|GB/s)(?!\w))", re.DOTALL)
TAG_OR_SIGN = re.compile(r"<[^>]*>|&\w+;")
WORD = re.compile(r"[A-Za-z]{2,}")
FROM_ROOT = re.compile(r'"/(?=[\w.])')
# A server answers every missing address with 404.html. Below a folder of the site, its links would begin there.
TO_TOP = """<head>
<script>
  var parts = location.pathname.split("/"), folder = parts.findIndex(part => %s.includes(part))
  if (folder > 0 && !parts.includes("404.html")) location.replace(parts.slice(0, folder).join("/") + "/404.html")
</script>"""


def on_page_content(html: str, **_: object) -> str:
    """Keep options, dates, and numbers with units on one line; let printed sentences, paths and long values break."""
    html = CODE_OR_UNIT.sub(lambda found: found[0] if found[1] else "&nbsp;", html)
    html = LONG_CODE.sub(lambda code: code[0] if code[0][1] == "p" else WITHIN_PATH.sub("/<wbr>", code[0]), html)
    html = SENTENCE.sub('<span class="go sentence">', html)
    html = WHOLE.sub(r'<span class="whole">\1</span>', html)
    return CELL.sub(lambda cell: _table_cell(cell[0]), html)


def on_post_template(html: str, template_name: str, config: Mapping[str, str]) -> str:
    """Make the links of 404.html relative, so that the site may lie in any folder, with or without a server."""
    if template_name != "404.html":
        return html
    folders = sorted(path.name for path in Path(config["docs_dir"]).iterdir() if path.is_dir())
    html = FROM_ROOT.sub('"', html).replace('"/"', '"."')
    return html.replace("<head>", TO_TOP % json.dumps(folders), 1)


def _table_cell(html: str) -> str:
    """Let long values, dotted names, links and the names of columns break; mark cells of many words for site.css."""
    is_prose = html.startswith("<td") and len(WORD.findall(TAG_OR_SIGN.sub(" ", html))) >= 5
    if html.startswith("<th") or "<a " in html:
        html = LONG_NAME.sub(lambda name: re.sub(r"_(?=\w{3})", "_<wbr>", name[0]), html)
    html = WITHIN_VALUE.sub(r"\1<wbr>", html)
    html = DOTTED.sub(lambda name: name[0].replace(".", ".<wbr>"), html)
    return html.replace("<td", '<td class="prose"', 1) if is_prose else html
