"""What a pipeline is asked to do, as values: its stages, and the tags that stay and that move. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from buildkit.errors import UsageError
from buildkit.recipe import placeholders
from buildkit.report import STAGES

MAX_TAG = 128
"""Characters of a tag (distribution-spec 1.1, "Pulling manifests")."""


def parse_stages(text: str) -> tuple[str, ...]:
    """``build,check`` in the order of ``STAGES``; empty means all. Raises UsageError for others."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in STAGES:
            raise UsageError(f"--stages {word!r} is not a stage", hint=", ".join(STAGES))
    if text.strip() and not words:
        raise UsageError("--stages names no stage", hint=", ".join(STAGES))
    return tuple(stage for stage in STAGES if not words or stage in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """``fixed`` name one commit's image and are pushed; ``moving`` follow the newest one and are promoted."""

    fixed: tuple[str, ...]
    moving: tuple[str, ...]


def divide_tags(templates: Sequence[str], expanded: Sequence[str], *, wanted: str | None, mark: str) -> Tags:
    """Which tags stay and which move.

    ``templates`` are the recipe's tags. Those with the commit in them (``sm70-{short_revision}``) name one commit's
    image; others with a placeholder (``v{version}``) are the same for many commits, and move as plain ones do.
    ``expanded`` are the image's own tags, in any order: what somebody else has called it is no concern of the
    registry's. ``wanted`` is the tag of the target, where it names one: it moves, and the recipe's other tags are only
    taken along where it is one of them. ``mark`` (the commit, or the image's id) makes a fixed tag where the recipe has
    none.
    """
    fixed = tuple(dict.fromkeys(tag for tag in expanded if _fits(tag, templates, of_commit=True)))
    plain = [text for text in templates if "{" not in text]
    plain += [tag for tag in expanded if tag not in fixed and _fits(tag, templates, of_commit=False)]
    if wanted is not None and wanted in fixed:
        return Tags(fixed=(wanted,), moving=())
    moving = tuple(dict.fromkeys(tag for tag in plain if tag not in fixed)) if wanted is None else (wanted,)
    if wanted is not None and wanted not in plain:
        fixed = ()
    if not fixed:
        stem = next(iter(moving), "build")
        fixed = (f"{stem[: MAX_TAG - 1 - len(mark)]}-{mark}",)
    return Tags(fixed=fixed, moving=moving)


def _fits(tag: str, templates: Sequence[str], *, of_commit: bool) -> bool:
    """Whether a template with a placeholder makes this tag; ``of_commit``: one that has the commit in it, or has not.
    No plain tag of the recipe is taken for one."""
    if tag in templates:
        return False
    for text in templates:
        names = placeholders(text)
        if not names or bool(_OF_COMMIT & set(names)) != of_commit:
            continue
        parts = string.Formatter().parse(text)
        pattern = "".join(re.escape(literal) + (_VALUE if name is not None else "") for literal, name, *_ in parts)
        if re.fullmatch(pattern, tag, re.ASCII):
            return True
    return False


_OF_COMMIT = {"revision", "short_revision"}
_VALUE = r"[A-Za-z0-9._-]+"
