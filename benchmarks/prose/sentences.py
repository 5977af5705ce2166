"""Find sentences in a page, and compare their figures with those that were computed from rows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FIELD = re.compile(r"\{[^{}]*\}")


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A part of a sentence, or a row of a table, as rows say that it must read.

    Attributes:
        page: path of the page, relative to the repository.
        template: the words, with a format field for each figure: "{:.1f} times sooner than". Any space stands for any
            white space, so the sentence may be broken into lines anywhere. The last words are no figure.
        figures: the values of the fields.
    """

    page: str
    template: str
    figures: tuple[Any, ...]

    @property
    def text(self) -> str:
        return self.template.format(*self.figures)

    def places(self, page: str) -> list[re.Match[str]]:
        """Return the places in the page's text that have these words, whatever the figures; a group for each figure."""
        found = list(re.finditer(r"(\S+?)".join(map(_words, _FIELD.split(self.template))), page))
        return found or list(re.finditer(_words(self.text), page))  # figures of several words

    def fault(self, page: str) -> str | None:
        """Return what is wrong with the figures in the page's text; None if they are those of the rows."""
        places = self.places(page)
        if not places:
            return f"{self.page}: no sentence reads '{self.text}', as the rows say"
        for place in places:
            if not re.fullmatch(_words(self.text), place[0]):
                line = page.count("\n", 0, place.start()) + 1
                return f"{self.page}:{line}: '{' '.join(place[0].split())}', but the rows say '{self.text}'"
        return None

    def corrected(self, page: str) -> str:
        """Return the page's text with the figures of the rows."""
        figures = [field.format(self.figures[index]) for index, field in enumerate(_FIELD.findall(self.template))]
        for place in reversed(self.places(page)):
            for index in reversed(range(len(place.groups()))):
                page = page[: place.start(index + 1)] + figures[index] + page[place.end(index + 1) :]
        return page


def _words(text: str) -> str:
    """Return a pattern of these words with any white space between them."""
    return r"\s+".join(map(re.escape, re.split(" +", text)))
