"""Where is the limit for one request body? The next size to try, from what is known. Pure.

Most limits are round: presets of edges, defaults of proxies. Those are asked for first, just at the limit and just
above it, so that two answers settle the matter; bisection is for what lies between. A body is only tried if the budget
holds all of it, because behind TLS and buffering edges all of it is sent before it is refused; where an edge refuses at
once, what was not sent is still there to be spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MB, MIB = 10**6, 2**20

BOUNDARIES: tuple[int, ...] = tuple(
    sorted(
        {
            *(count * MB for count in (1, 2, 5, 8, 10, 16, 20, 25, 30, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512)),
            *(count * MIB for count in (1, 2, 5, 8, 10, 16, 20, 25, 30, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512)),
            4_500_000,  # serverless platforms
            1000 * MB,
            2**30,
            2**31 - 1,
        }
    )
)
"""Limits that people configure, in bytes: 1 MiB is nginx's default, 100 MB, 200 MB and 500 MB are Cloudflare's."""

CLIMB: tuple[int, ...] = (100 * MB, 100 * MIB + 1, 200 * MB, 200 * MIB + 1, 500 * MB, 500 * MIB + 1, 1000 * MB, 2**31)
"""What is tried, upward, while nothing has been refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """``accepted`` bytes went through (0: nothing yet), ``refused`` did not (None: nothing was refused)."""

    accepted: int = 0
    refused: int | None = None

    def with_accepted(self, size: int) -> Interval:
        """A larger body than the one refused went through: then that refusal was not about the size."""
        refused = self.refused if self.refused is not None and size < self.refused else None
        return Interval(accepted=max(self.accepted, size), refused=refused)

    def with_refused(self, size: int) -> Interval:
        smaller = size if self.refused is None else min(size, self.refused)
        return Interval(accepted=min(self.accepted, smaller - 1), refused=smaller)

    @property
    def settled(self) -> bool:
        """Whether knowing it more precisely would change nothing that anyone does."""
        return self.refused is not None and self.refused - self.accepted <= resolution(self.refused)


def resolution(size: int) -> int:
    """Bytes: about a megabyte, or one hundredth, and finer where the limit itself is small."""
    return max(min(MB, size // 20), size // 100, 1)


def next_size(known: Interval, *, left: int, wanted: int, largest: int | None = None) -> int | None:
    """The body to try next; None when it is settled, or when ``left`` bytes do not buy more knowledge.

    ``wanted`` is the size of body that pushes use, the one that matters most. ``largest`` is what the registry itself
    says that it takes.
    """
    top = left if largest is None else min(left, largest)
    if known.refused is None:
        return _climb(known.accepted, top, wanted if largest is None else min(wanted, largest), spare=left - top)
    if known.settled:
        return None
    low, high = known.accepted, known.refused
    for size in _guesses(low, high, wanted):
        if low < size < high and size <= top:
            return size
    middle = math.isqrt(max(low, 1) * high) if high > 2 * max(low, 1) else (low + high) // 2
    if low < middle <= top:
        return middle
    # The budget does not reach the middle: what it reaches, if that is worth a try.
    return top if low + resolution(high) // 2 < top < high else None


def _climb(accepted: int, top: int, wanted: int, *, spare: int) -> int | None:
    first = max(CLIMB[0], wanted)
    if accepted < first <= top:
        return first
    larger = [size for size in CLIMB if accepted < size <= top]
    if larger:
        # Where the first step is too far for the budget: as far as it goes, in one step.
        return larger[0] if accepted >= first else larger[-1]
    # All of it only where a refusal would leave something known all the same.
    step = top if 4 * accepted >= top or spare >= top else top // 2
    round_top = step - step % MB if step > 10 * MB else step
    return round_top if round_top > accepted + resolution(max(round_top, 1)) else None


def _guesses(low: int, high: int, wanted: int) -> list[int]:
    """Sizes that would settle the most, best first; not all lie between."""
    guesses = [wanted]
    if high - 1 in BOUNDARIES:
        guesses.append(high - 1)
    middle = math.log(max(low, 1) * high) / 2
    inside = sorted((size for size in BOUNDARIES if low < size < high), key=lambda size: abs(math.log(size) - middle))
    if low not in BOUNDARIES:
        return guesses + inside
    # Just above a round number that went through: at once where that costs little, else when no other is left.
    return [*guesses, low + 1, *inside] if 20 * low < high else [*guesses, *inside, low + 1]
