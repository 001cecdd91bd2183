"""What a pipeline is asked to do, as values: its stages, and the tags that stay and that move. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from buildkit.errors import UsageError
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

    ``templates`` are the recipe's tags, those with a placeholder (``sm70-{short_revision}``) name one commit;
    ``expanded`` are the image's own tags, in any order. ``wanted`` is the tag of the target, where it names one: it
    moves, and the recipe's other tags are only taken along where it is one of them. ``mark`` (the commit, or the
    image's id) makes a fixed tag where the recipe has none.
    """
    plain = tuple(dict.fromkeys(text for text in templates if "{" not in text))
    fixed = tuple(dict.fromkeys(tag for tag in expanded if tag not in plain))
    if wanted is not None and wanted in fixed:
        return Tags(fixed=(wanted,), moving=())
    moving = plain if wanted is None else (wanted,)
    if wanted is not None and wanted not in plain:
        fixed = ()
    if not fixed:
        stem = next(iter(moving), "build")
        fixed = (f"{stem[: MAX_TAG - 1 - len(mark)]}-{mark}",)
    return Tags(fixed=fixed, moving=moving)
