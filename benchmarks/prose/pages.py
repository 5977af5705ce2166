"""The sentences of all pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.prose import docs, guides, heterogeneous, reference, text_links
from benchmarks.prose.sentences import Sentence

# What writes the templates and figures of each page: see `Sentence`.
PAGES: Mapping[str, tuple[Callable[[], Iterator[tuple[Any, ...]]], ...]] = {
    "README.md": (docs.demo, docs.training_images),
    "docs/auto.md": (docs.auto,),
    "docs/concepts.md": (docs.concepts,),
    "docs/index.md": (docs.answer,),
    "docs/measuring.md": (docs.measuring,),
    "docs/methods.md": (docs.methods,),
    "docs/predict.md": (docs.predict,),
    "docs/virtual-hosts.md": (docs.virtual_hosts,),
    "docs/workloads.md": (docs.workloads,),
    "results/reference/README.md": (reference.sentences,),
    "results/reference/guides.md": (guides.sentences,),
    "results/reference/heterogeneous.md": (heterogeneous.sentences,),
    "results/reference/text-links.md": (text_links.sentences,),
}


def sentences_of(page: str) -> Iterator[Sentence]:
    for parts in PAGES[page]:
        for template, *figures in parts():
            yield Sentence(page, template, tuple(figures))
