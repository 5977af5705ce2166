"""A process of `bench compressors` that never says anything."""

from __future__ import annotations

import signal


def main(folder: str) -> int:
    """Wait for a signal; none that is handled comes."""
    while True:
        signal.pause()
