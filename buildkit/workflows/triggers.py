"""Does an event start a workflow? The filters of ``on:``, as GitHub documents them and Gitea follows. Pure.

Source: "Workflow syntax", "Filter pattern cheat sheet": ``*`` matches anything but a slash, ``**`` anything, ``?`` and
``+`` repeat the character before them, ``[]`` is a class; patterns are read in order, and ``!`` takes out again. A push
that changes at least one file that the paths name starts the workflow.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import yaml

from buildkit.workflows.tree import get, items, texts


def matches(pattern: str, name: str) -> bool:
    """One pattern, without ``!``, against a whole name."""
    return _compiled(pattern).fullmatch(name) is not None


def starts(top: yaml.MappingNode, event: str, *, ref: str = "refs/heads/main", changed: Sequence[str] = ()) -> bool:
    """Whether ``event`` on ``ref`` starts the workflow; ``changed`` are a push's files, as paths from the root.

    Path filters do not apply to tags on GitHub; Gitea applies them all the same, which is why a push has to name its
    branches. Without ``branches`` this answers as GitHub does.
    """
    node = get(top, "on")
    names = {text.value for text in texts(node)} | {key.value for key, _ in items(node)}
    if event not in names:
        return False
    trigger = get(node, event)
    kind, _, name = ref.removeprefix("refs/").partition("/")
    mine, other = ("branches", "tags") if kind == "heads" else ("tags", "branches")
    if not _passes(trigger, mine, name, other=other):
        return False
    if kind != "heads":
        return True
    wanted, unwanted = texts(get(trigger, "paths")), texts(get(trigger, "paths-ignore"))
    if wanted:
        return any(_selected([text.value for text in wanted], path) for path in changed)
    if unwanted:
        return any(not _selected([text.value for text in unwanted], path) for path in changed)
    return True


def _passes(trigger: yaml.Node | None, key: str, name: str, *, other: str) -> bool:
    wanted, unwanted = texts(get(trigger, key)), texts(get(trigger, f"{key}-ignore"))
    if wanted:
        return _selected([text.value for text in wanted], name)
    if unwanted:
        return not _selected([text.value for text in unwanted], name)
    # Filters for branches alone leave tags out, and the other way round.
    return get(trigger, other) is None and get(trigger, f"{other}-ignore") is None


def _selected(patterns: Sequence[str], name: str) -> bool:
    chosen = False
    for pattern in patterns:
        if pattern.startswith("!"):
            chosen = chosen and not matches(pattern[1:], name)
        else:
            chosen = chosen or matches(pattern, name)
    return chosen


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    out = ""
    rest = pattern
    while rest:
        if rest.startswith("**/"):
            out, rest = out + "(?:.*/)?", rest[3:]
        elif rest.startswith("**"):
            out, rest = out + ".*", rest[2:]
        elif rest[0] == "*":
            out, rest = out + "[^/]*", rest[1:]
        elif rest[0] in "?+" and out:
            out, rest = out + rest[0], rest[1:]
        elif rest[0] == "[" and "]" in rest[2:]:
            end = rest.index("]", 2)
            out, rest = (
                f"{out}[{re.escape(rest[1:end]).replace(r'-', '-').replace(chr(92) + '-', '-')}]",
                rest[end + 1 :],
            )
        elif rest[0] == "\\" and len(rest) > 1:
            out, rest = out + re.escape(rest[1]), rest[2:]
        else:
            out, rest = out + re.escape(rest[0]), rest[1:]
    return re.compile(out, re.DOTALL)
