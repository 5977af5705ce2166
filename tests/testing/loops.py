"""Native loops in tests."""

from __future__ import annotations

import pytest

from collectives.kernels import library

needs_loops = pytest.mark.skipif(library.library() is None, reason=f"no native loops: {library.found().finding}")
