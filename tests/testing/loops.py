"""The tests that hold native loops against the reference path are marked `loops`, and skipped where there are none."""

from __future__ import annotations

import pytest

from collectives.kernels import library

needs_loops = [
    pytest.mark.loops,
    pytest.mark.skipif(library.library() is None, reason=f"no native loops: {library.found().finding}"),
]
