"""Format and parse numbers with a unit: bytes, seconds and bits per second."""

import math
import re
from collections.abc import Mapping

from bench.core.errors import UsageError

# `tc` stores the length of a queue as a 32-bit number, which overflows above 170 Gbit/s.
MAX_RATE_BPS = 1e11
MAX_SIZE_BYTES = 1e12
MAX_DURATION_S = 1000 * 86_400.0

_STEPS = {
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "bit/s": ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")),
}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]{1,2})?)\s*"
_RATE = re.compile(_NUMBER + r"([kmg]?)bit(?:/s)?\s*", re.IGNORECASE)
_BITS_OR_BYTES = re.compile(_NUMBER + r"((?:[kmg]i?)?)bps\s*", re.IGNORECASE)  # `tc` reads mbps as megabytes
_SIZE = re.compile(_NUMBER + r"((?:[kmg]i?)?)b?\s*", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"(us|ms|s|min|m|h|d)\s*", re.IGNORECASE)
_COUNT = re.compile(_NUMBER + r"([kmb]?)\s*", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_BINARY = {"ki": 1024.0, "mi": 1024.0**2, "gi": 1024.0**3}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with decimal prefixes, like rates of links: ``1_234_567`` -> ``1.23 MB``."""
    return _format(num_bytes, "bytes", f"{num_bytes:.0f} B")


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds: ``0.0123`` -> ``12.3 ms``, and from two minutes on ``200`` -> ``3 min 20 s``."""
    if 120 <= seconds < math.inf:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return _format(seconds, "s", f"{_three_digits(seconds / 1e-6)} us" if seconds else "0 s")


def format_rate(bits_per_s: float) -> str:
    """Format a rate in bits per second: ``1e8`` -> ``100 Mbit/s``."""
    return _format(bits_per_s, "bit/s", f"{bits_per_s:.0f} bit/s")


def _format(value: float, unit: str, small: str) -> str:
    """Format a value in its largest fitting unit; return `small` if no unit fits, "-" for infinity and NaN."""
    if not math.isfinite(value):
        return "-"
    steps = (f"{_three_digits(value / factor)} {name}" for factor, name in _STEPS[unit] if abs(value) >= factor)
    return next(steps, small)


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """Return the divisor and the unit with which to show numbers up to ``largest``: ("bytes", 3e7) -> (1e6, "MB")."""
    return next((step for step in _STEPS.get(unit, ()) if largest >= step[0]), (1.0, unit))


def _three_digits(value: float) -> str:
    """Format a number with three digits, from 1000 on with all digits before the point: 0.123, 12.3, 1234."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def parse_rate(text: str, most: float = MAX_RATE_BPS) -> float:
    """Parse a rate such as ``100mbit`` or ``1gbit`` to bits per second.

    Raises:
        UsageError: the text is not a rate above 0 and up to `most`, or could mean bits as well as bytes.
    """
    if match := _BITS_OR_BYTES.fullmatch(text):
        prefix = match[2][:1].lower()
        number = float(match[1]) * (_PREFIX | _BINARY)[match[2].lower()] / _PREFIX[prefix]
        raise UsageError(
            f"'{text}' may mean bits or bytes per second; write {number:.10g}{prefix}bit for bits, or "
            f"{8 * number:.10g}{prefix}bit for bytes"
        )
    hint = f"a bandwidth; write it like 100mbit, 1gbit or 800kbit, up to {most / 1e9:.0f}gbit"
    return _quantity(text, _RATE, _PREFIX, most, hint, may_be_zero=False)


def parse_size(text: str) -> int:
    """Parse a size to a number of bytes: ``10MB`` -> 10 000 000, ``1MiB`` -> 1 048 576, ``512`` -> 512.

    Raises:
        UsageError: the text is not a size, or is more than `MAX_SIZE_BYTES`.
    """
    hint = "a size; write it like 10kB, 1MiB or 4096, up to 1000GB"
    return int(_quantity(text, _SIZE, _PREFIX | _BINARY, MAX_SIZE_BYTES, hint))


def parse_sizes(text: str) -> list[int]:
    """Parse a list of sizes to bytes, without repeats: ``10kB,1MB`` -> [10 000, 1 000 000].

    A range of sizes is the first size, doubled repeatedly up to the last size: ``1KiB:4KiB`` -> [1024, 2048, 4096].

    Raises:
        UsageError: an item is not a size, or a range begins below one byte or ends before it begins.
    """
    sizes: list[int] = []
    for item in text.split(","):
        first, colon, last = item.partition(":")
        size, limit = parse_size(first), parse_size(last if colon else first)
        if colon and not 0 < size <= limit:
            raise UsageError(f"'{item}' is not a range of sizes; write it like 1KiB:64MiB, the smaller one first")
        while size <= limit:
            sizes.append(size)
            size = 2 * size if colon else limit + 1
    return list(dict.fromkeys(sizes))


def parse_duration(text: str) -> float:
    """Parse a duration to seconds: ``20ms`` -> 0.02.

    Raises:
        UsageError: the text is not a duration, or is more than `MAX_DURATION_S`.
    """
    return _quantity(
        text, _DURATION, _SECONDS, MAX_DURATION_S, "a duration; write it like 20ms, 1.5s or 10m, up to 1000d"
    )


def parse_count(text: str, most: float) -> int:
    """Parse a number of things, such as parameters: ``124M`` -> 124 000 000, ``1.5B`` -> 1 500 000 000.

    Raises:
        UsageError: the text is not a number from 1 to `most`.
    """
    hint = f"a number from 1 to {most / 1e9:.0f}B; write it like 124M, 1.5B or 60000"
    return int(_quantity(text, _COUNT, _THOUSANDS, most, hint, may_be_zero=False)) or 1


def duration(text: str) -> str:
    """Return the text, after checking that it is a duration that `parse_duration` can parse.

    Raises:
        UsageError: the text is not a duration, or is more than `MAX_DURATION_S`.
    """
    parse_duration(text)
    return text


def _quantity(
    text: str,
    form: re.Pattern[str],
    factors: Mapping[str, float],
    most: float,
    hint: str,
    *,
    may_be_zero: bool = True,
) -> float:
    """Return the number in a text times the factor of its unit; refuse text of another form and values above `most`."""
    match = form.fullmatch(text)
    value = float(match[1]) * factors[match[2].lower()] if match else math.inf
    if value > most or not (value or may_be_zero):
        raise UsageError(f"'{text}' is not {hint}")
    return value
