"""A process of `bench compressors` that never writes anything."""

from __future__ import annotations

import signal


def main(folder: str) -> int:
    """Wait for ever; no signal that it handles is sent."""
    while True:
        signal.pause()
