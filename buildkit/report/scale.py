"""Axes of figures: where a value lies, in percent of the width, and where the ticks go. Pure.

Positions are percentages because an SVG without a viewBox takes them as they are: a figure is as wide as the page
lets it be, and its text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """``at``: percent of the width."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """From 0 to ``end``, which is above 0."""

    end: float
    ticks: tuple[Tick, ...]

    def at(self, value: float) -> float:
        """Percent of the width; what lies outside is put at the edge."""
        return _round(100 * min(max(value / self.end, 0.0), 1.0))


def bytes_scale(largest: float, count: int = 4) -> Linear:
    """Up to ``largest`` bytes or a little more, with at most ``count`` ticks after 0, in decimal units."""
    end = max(largest, 1.0)
    step = 10.0 ** math.floor(math.log10(end / count))
    step *= next((factor for factor in (1, 2, 5) if end / (step * factor) <= count), 10)
    return _linear(max(end, step), max(step, 1.0), _bytes)


def time_scale(longest: float, count: int = 5) -> Linear:
    """Up to ``longest`` seconds, with at most ``count`` ticks after 0, at times that people count in."""
    end = max(longest, 0.1)
    step = next((step for step in _SECONDS if end / step <= count), None)
    if step is None:
        days = math.ceil(end / 86400 / count)
        step = days * 86400.0
    return _linear(end, step, _seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logarithmic:
    """From ``10**low`` to ``10**high``. At its left, ``zero`` percent of the width are for what is exactly 0, and as
    much at its right for what is not finite."""

    low: int
    high: int
    ticks: tuple[Tick, ...]
    zero: float = 4.0

    def at(self, value: float) -> float:
        """Percent of the width."""
        if value <= 0:
            return _round(self.zero / 2)
        if not math.isfinite(value):
            return _round(100 - self.zero / 2)
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return _round(self.zero + (100 - 2 * self.zero) * min(max(share, 0.0), 1.0))


def log_scale(values: Sequence[float], *, low: int = -3, high: int = 1, count: int = 7) -> Logarithmic:
    """Holds ``values`` and at least ``10**low`` to ``10**high``; 24 decades at most, ``count`` ticks or so.

    0 and what is not finite have ticks of their own where they occur.
    """
    finite = [math.log10(value) for value in values if 0 < value < math.inf]
    low = max(min([low, *(math.floor(value) for value in finite)]), -12)
    high = min(max([high, *(math.ceil(value) for value in finite)]), 12)
    every = math.ceil((high - low) / count)
    bare = Logarithmic(low=low, high=high, ticks=())
    exponents = [exponent for exponent in range(low, high + 1) if exponent % every == 0]
    ticks = [Tick(at=bare.at(10.0**exponent), label=power(exponent)) for exponent in exponents]
    if any(value <= 0 for value in values):
        ticks = [Tick(at=bare.at(0), label="0"), *(tick for tick in ticks if tick.at > 2 * bare.zero)]
    if any(not math.isfinite(value) for value in values):
        ticks = [*(tick for tick in ticks if tick.at < 100 - 2 * bare.zero), Tick(at=bare.at(math.inf), label="∞")]
    return Logarithmic(low=low, high=high, ticks=tuple(ticks))


def power(exponent: int) -> str:
    """``10⁻³``; ``1`` and ``10`` as they are."""
    if exponent in (0, 1):
        return str(10**exponent)
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _linear(end: float, step: float, label: Callable[[float], str]) -> Linear:
    scale = Linear(end=end, ticks=())
    numbers = range(int(end / step * (1 + 1e-9)) + 1)
    return Linear(end=end, ticks=tuple(Tick(at=scale.at(n * step), label=label(n * step)) for n in numbers))


def _bytes(value: float) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} B" if value else "0"


def _seconds(value: float) -> str:
    """``30 s``, ``2 min``, ``1 h 30``."""
    if value < 60:
        return f"{value:g} s" if value else "0"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min" if not seconds else f"{minutes}:{seconds:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h" if not minutes else f"{hours} h {minutes:02d}"


def _round(percent: float) -> float:
    return round(percent, 2)
