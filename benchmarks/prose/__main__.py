"""Compare the figures of all pages with the rows: ``python -m benchmarks.prose --help``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.prose import __doc__ as description
from benchmarks.prose.pages import PAGES, sentences_of
from benchmarks.prose.sentences import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prose", description=description)
    parser.add_argument("--write", action="store_true", help="put the figures of the rows in their place")
    options = parser.parse_args()
    faults = []
    for name in PAGES:
        path = ROOT / name
        for sentence in sentences_of(name):
            page = path.read_text(encoding="utf-8")
            if options.write and sentence.fault(page):
                page = sentence.corrected(page)
                path.write_text(page, encoding="utf-8")
            faults += filter(None, [sentence.fault(page)])
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
