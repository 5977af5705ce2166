"""The four systems, in the order of their documents."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.published import algc, group_topk, heterogeneous, hylo
from benchmarks.published.parts import System

SYSTEMS: Mapping[str, System] = {page.SYSTEM.name: page.SYSTEM for page in (group_topk, heterogeneous, algc, hylo)}
