"""The one error that a payload raises."""

from __future__ import annotations


class PayloadError(ValueError):
    """A buffer that is not a valid packed payload, or payloads that do not belong together."""
