"""Texts that come from images, servers and files, made safe to show. Pure.

Markup is kept away by whoever writes it (the HTML templates escape everything, ``to_markdown`` has ``escape``); this
is about what escaping does not help against: control characters, text that runs backwards (Unicode UAX #9), lone
surrogates (which cannot be written as UTF-8), and names without end.
"""

from __future__ import annotations

import re


def clean(text: str) -> str:
    """``text`` on one line; what cannot be printed, or changes how the rest is shown, as ``\\u202e``."""
    if text.isprintable():
        return text
    spaced = re.sub(r"[\t\n\r\f\v]+", " ", text)
    return "".join(c if c.isprintable() else _escaped(c) for c in spaced)


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters, the end left off."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def clip_path(path: str, limit: int) -> str:
    """At most ``limit`` characters; the middle is left out, because the file's name is what matters."""
    if len(path) <= limit:
        return path
    tail = max(limit * 2 // 3, 1)
    return path[: max(limit - tail - 1, 0)] + "…" + path[-tail:]


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 layer``, ``2 layers``, ``1,200 retries``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
