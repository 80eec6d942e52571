"""Units: sizes, durations and shares as people write them, and back."""

from __future__ import annotations

import math
import re

SIZE_UNITS: dict[str, int] = {
    "": 1, "b": 1,
    "k": 1 << 10, "ki": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mi": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gi": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "ti": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
"""Units of a size, in lower case; a bare letter is binary."""

DURATION_UNITS: dict[str, float] = {
    "": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
"""Units of a duration, in seconds; a bare number is seconds."""

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``64MiB``, ``1.5 GiB`` or ``4096``; ValueError if it isn't one."""
    number, unit = _quantity(text)
    if unit.lower() not in SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size")
    return int(number * SIZE_UNITS[unit.lower()])


def parse_share(text: str) -> float:
    """A percentage such as ``20%`` as a fraction in (0, 1]; ValueError if it isn't one."""
    if not text.endswith("%"):
        raise ValueError(f"{text!r} is not a percentage")
    number, unit = _quantity(text[:-1])
    if unit or not 0 < number <= 100:
        raise ValueError(f"{text!r} is not a percentage above 0% and up to 100%")
    return number / 100


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``60``, ``500ms`` or ``5min``; ValueError if it isn't one."""
    number, unit = _quantity(text)
    if unit.lower() not in DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration")
    return number * DURATION_UNITS[unit.lower()]


def format_size(nbytes: float) -> str:
    """A size for people: three significant digits and a binary unit, ``1.25 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} TiB"


def format_exact_size(nbytes: int) -> str:
    """A size that parses back to the same bytes: ``64MiB``, or plain bytes."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def format_duration(seconds: float) -> str:
    """A duration for people: ``85 us``, ``1.2 ms``, ``3.4 s``, ``2 h 5 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_digits(seconds)} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _quantity(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    number = float(match[1])
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is too large a number")
    return number, match[2]
