"""PTX as text: the three directives that begin a module, and the kernels in it.

Source: PTX ISA, "PTX Module Directives": a module begins with ``.version``, then ``.target``; comments and blank space
may stand before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from buildkit.cuda.arch import Arch, Suffix

NEEDLE = b".target"
HEAD = 4096
"""Bytes around ``.target`` in which the module's other directives are looked for: comments stand between them."""

_VERSION = re.compile(rb"\.version\s+(\d{1,3})\.(\d{1,3})\s")
_TARGET = re.compile(rb"\.target\s+(sm_|compute_)(\d{2,4})([a-z]?)(?=[\s,;]|$)")
_ENTRY = re.compile(rb"\.entry\s+([A-Za-z_$%][A-Za-z0-9_$]*)")
_CONTENT = re.compile(rb"\.(?:entry|func|global|const)\b")
_BODY = re.compile(rb"\.(?:entry|func|global|const|extern|visible|weak|address_size)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxHead:
    """``target`` and ``version`` of a module; ``offset`` of its ``.version`` in the text that was looked at."""

    target: Arch
    version: tuple[int, int]
    offset: int


def parse_head(text: bytes, *, at: int | None = None) -> PtxHead | None:
    """The module whose ``.target`` is at ``at`` in ``text`` (None: the first one); None where that is no module.

    Programs that write PTX hold the directives as formats (``.target sm_%d``), and compilers hold lists of them: what
    has no number, no ``.version`` shortly before it or nothing of a module's body after it is not a module.
    """
    target = _TARGET.search(text) if at is None else _TARGET.match(text, at)
    if target is None:
        return None
    begin = max(0, target.start() - HEAD)
    # NUL ends a C string: what stands before it belongs to something else.
    begin = max(begin, text.rfind(b"\0", begin, target.start()) + 1)
    versions = list(_VERSION.finditer(text, begin, target.start()))
    if not versions:
        return None
    stop = text.find(b"\0", target.end(), target.end() + HEAD)
    if not _BODY.search(text, target.end(), stop if stop >= 0 else target.end() + HEAD):
        return None
    letter = target[3].decode()
    suffix: Suffix = "" if letter == "" else "a" if letter == "a" else "f" if letter == "f" else "?"
    return PtxHead(
        target=Arch(int(target[2]), suffix),
        version=(int(versions[-1][1]), int(versions[-1][2])),
        offset=versions[-1].start(),
    )


def has_content(text: bytes) -> bool:
    """Whether a module has a kernel, a function or a variable, or only the directives that begin it."""
    return _CONTENT.search(text) is not None


def kernels(text: bytes) -> Iterator[str]:
    """Names of the kernels (``.entry``) in a module's text, as written: mangled."""
    for match in _ENTRY.finditer(text):
        yield match[1].decode("ascii")
