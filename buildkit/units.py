"""Sizes and durations as people write them, parsed once at the border.

Decimal units are powers of 1000 (``95MB`` is 95,000,000 bytes), ``KiB``/``MiB``/``GiB``/``TiB`` are powers of 1024,
as in IEC 80000-13; a bare number is bytes. No locale, no rounding surprises: ``1.5GB`` is exactly 1,500,000,000.
"""

from __future__ import annotations

import re
from decimal import Decimal

from buildkit.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(?P<number>\d{1,18}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]{0,3})\s*", re.ASCII)
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,6})?)(?P<unit>ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_size(text: str | int, *, what: str = "size") -> int:
    """Bytes from ``95MB``, ``100MiB``, ``150kB``, ``1.5 GB`` or ``95000000``.

    Raises UsageError for anything else: no unit that is known, a sign, a size of zero or of a fraction of a byte.
    """
    if isinstance(text, bool):
        raise UsageError(f"{what} {text!r} is not a size", hint="write it like 95MB, 100MiB or 150kB")
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{what} {str(text)!r} is not a size", hint="write it like 95MB, 100MiB or 150kB")
    exact = Decimal(match["number"]) * unit
    if exact != int(exact) or exact < 1:
        raise UsageError(f"{what} {str(text)!r} is not a whole, positive number of bytes")
    return int(exact)


def parse_duration(text: str | int | float, *, what: str = "duration") -> float:
    """Seconds from ``30``, ``1.5s``, ``200ms``, ``10m``, ``2h`` or ``7d``. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool):
        raise UsageError(f"{what} {str(text)!r} is not a duration", hint="write it like 30s, 10m or 2h")
    return float(match["number"]) * _SECONDS[match["unit"]]


def format_size(count: int) -> str:
    """``95.0 MB`` style, decimal units, for people; never parsed back."""
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{value:.2f} {unit}" if unit in ("GB", "TB") else f"{value:.1f} {unit}"


def format_rate(count: float, seconds: float) -> str:
    """Bytes per second for people; ``-`` where no time has passed."""
    return f"{format_size(int(count / seconds))}/s" if seconds > 0 else "-"


def format_duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 05 s`` or ``1 h 02 min``, for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
