"""YAML read as a strict document: every problem is found, and each has a dotted path and a line.

The text is parsed into nodes, which know their lines, and never turned into Python objects by tags. What the schema
does not ask for is not walked, so aliases cannot grow into anything large. Allowed: anchors, aliases, merge keys
(``<<``), and at the top keys that begin with ``x-``, as a place for anchors. Refused: duplicate keys, tags, more than
one document, anything but UTF-8, more than 256 KiB.

Source: YAML 1.1 as PyYAML reads it (there ``yes``, ``on`` and ``off`` are booleans, which the messages take care of).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard, TypeVar

import yaml

from buildkit.errors import FormatError, RecipeError, UsageError
from buildkit.units import parse_duration, parse_size

MAX_BYTES = 256 * 1024
_PREFIX = "tag:yaml.org,2002:"
_KINDS = {
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
    "map": "a table of keys",
    "seq": "a list",
    "timestamp": "a date",
    "binary": "binary data",
}
T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One thing that is wrong. ``line`` counts from 1; ``path`` is dotted, empty for the document itself."""

    line: int
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {self.path}: {self.text}" if self.path else f"{self.line}: {self.text}"


class Problems:
    """Collects problems while a document is read; ``check`` raises them all at once."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}
        self.merges_left = 100  # merges of merges could grow without bound

    def add(self, line: int, path: str, text: str) -> None:
        self._found[Problem(line=line, path=path, text=text)] = None

    def check(self, name: str) -> None:
        """Raise one RecipeError with all problems in the order of their lines, if there are any."""
        found = sorted(self._found)
        if not found:
            return
        shown = [f"{name}:{problem}" for problem in found]
        message = shown[0]
        for count, text in enumerate(shown[1:], 1):
            if len(message) + len(text) > 440:
                message += f"; and {len(shown) - count} more problems"
                break
            message += f"; {text}"
        raise RecipeError(message, problems=shown)


class Table:
    """A mapping that is being read: each key is taken once, by a method that says its type.

    A wrong value is noted, and the method returns its default, so that reading goes on. ``close`` notes what nobody
    asked for as unknown.
    """

    def __init__(
        self,
        path: str,
        line: int,
        entries: Mapping[str, tuple[int, yaml.Node]],
        problems: Problems,
        *,
        broken: bool = False,
    ) -> None:
        self.path = path
        self.line = line
        self.problems = problems
        self.broken = broken
        """Not a table at all, which has been noted; nothing in it is missing then."""
        self._entries = dict(entries)
        self._lines = {key: line for key, (line, _) in entries.items()}
        self._known: list[str] = []

    @classmethod
    def of(cls, node: yaml.Node, path: str, problems: Problems) -> Table:
        line = node.start_mark.line + 1
        if not _is_table(node):
            problems.add(line, path, f"must be a table of keys, not {_kind(node)}")
            return cls(path, line, {}, problems, broken=True)
        return cls(path, line, _entries(node, path, problems, frozenset()), problems)

    # What a key may hold ---------------------------------------------------------------------------------------------

    def text(self, key: str, default: str = "", *, required: bool = False, pattern: str = "", what: str = "") -> str:
        """A non-empty text on one line. ``pattern`` must match all of it; ``what`` says in words what it is."""
        node = self._take(key, required=required)
        value = None if node is None else self._scalar(node, self._at(key))
        if value is None or node is None:
            return default
        if pattern and not re.fullmatch(pattern, value, re.ASCII):
            self._wrong(node, self._at(key), f"{_shown(value)} is not {what or 'allowed here'}")
            return default
        return value

    def optional(self, key: str, *, pattern: str = "", what: str = "") -> str | None:
        """The same, None where the key is not there."""
        return self.text(key, pattern=pattern, what=what) or None

    def integer(self, key: str, default: int | None, *, least: int, most: int) -> int | None:
        node = self._take(key)
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode) or node.tag != f"{_PREFIX}int":
            self._wrong(node, self._at(key), f"must be a whole number, not {_kind(node)}")
            return default
        if not re.fullmatch(r"[0-9]{1,18}", node.value) or not least <= int(node.value) <= most:
            self._wrong(node, self._at(key), f"{_shown(node.value)} is not a number from {least} to {most}")
            return default
        return int(node.value)

    def flag(self, key: str, default: bool) -> bool:
        node = self._take(key)
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode) or node.tag != f"{_PREFIX}bool":
            self._wrong(node, self._at(key), f"must be true or false, not {_kind(node)}")
            return default
        return node.value.lower() in ("yes", "true", "on")

    def size(self, key: str) -> int | None:
        """Bytes, written like ``95MB`` or as a number."""
        return self.parsed(key, parse_size, None)

    def duration(self, key: str, default: float) -> float:
        """Seconds, written like ``30s`` or ``2h`` or as a number; more than none."""

        def positive(text: str) -> float:
            seconds = parse_duration(text)
            if seconds <= 0:
                raise UsageError("must be longer than no time")
            return seconds

        return self.parsed(key, positive, default)

    def parsed(self, key: str, parse: Callable[[str], T], default: D) -> T | D:
        """Whatever ``parse`` makes of the text; its UsageError or FormatError becomes a problem."""
        node = self._take(key)
        value = None if node is None else self._scalar(node, self._at(key), numbers=True)
        if value is None or node is None:
            return default
        return self._parsed(node, self._at(key), value, parse, default)

    def texts(
        self, key: str, parse: Callable[[str], T], *, required: bool = False, filled: bool = False
    ) -> tuple[T, ...]:
        """A list of texts, each made into a value by ``parse``. ``filled``: at least one if the key is there."""
        node = self._take(key, required=required)
        if node is None:
            return ()
        if not _is_list(node):
            self._wrong(node, self._at(key), f"must be a list, not {_kind(node)}")
            return ()
        if filled and not node.value:
            self._wrong(node, self._at(key), "must have at least one entry")
        found: list[T] = []
        for index, item in enumerate(node.value):
            at = f"{self._at(key)}[{index}]"
            text = self._scalar(item, at)
            if text is not None:
                value = self._parsed(item, at, text, parse, None)
                if value is not None:
                    found.append(value)
        return tuple(found)

    def mapping(
        self, key: str, parse: Callable[[str], str] = str, *, pattern: str = "", what: str = ""
    ) -> Mapping[str, str]:
        """A table from text to text. Numbers count as the text that stands there, booleans must be in quotes."""
        node = self._take(key)
        if node is None:
            return MappingProxyType({})
        if not _is_table(node):
            self._wrong(node, self._at(key), f"must be a table of keys, not {_kind(node)}")
            return MappingProxyType({})
        found: dict[str, str] = {}
        for name, (line, value_node) in _entries(node, self._at(key), self.problems, frozenset()).items():
            at = f"{self._at(key)}.{name}"
            if pattern and not re.fullmatch(pattern, name, re.ASCII):
                self.problems.add(line, at, f"{_shown(name)} is not {what}")
                continue
            text = self._scalar(value_node, at, numbers=True, empty=True)
            if text is not None:
                parsed = self._parsed(value_node, at, text, parse, None)
                if parsed is not None:
                    found[name] = parsed
        return MappingProxyType(found)

    def table(self, key: str) -> Table:
        """A table inside; an empty one where the key is not there."""
        node = self._take(key)
        if node is None:
            return Table(self._at(key), self.line, {}, self.problems)
        return Table.of(node, self._at(key), self.problems)

    def tables(self, key: str) -> tuple[Table, ...]:
        """A list of tables."""
        node = self._take(key)
        if node is None:
            return ()
        if not _is_list(node):
            self._wrong(node, self._at(key), f"must be a list, not {_kind(node)}")
            return ()
        return tuple(Table.of(item, f"{self._at(key)}[{i}]", self.problems) for i, item in enumerate(node.value))

    # The rest --------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def line_of(self, key: str) -> int:
        """The line of a key, that of the table where it is not there."""
        return self._lines.get(key, self.line)

    def wrong(self, key: str, text: str) -> None:
        """Note a problem with a key's value."""
        self.problems.add(self.line_of(key), self._at(key), text)

    def close(self) -> None:
        """Note the keys that nobody asked for."""
        for key, (line, _) in self._entries.items():
            if not self.path and key.startswith("x-"):
                continue
            near = difflib.get_close_matches(key, self._known, n=1, cutoff=0.6)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(self._known))}"
            self.problems.add(line, self._at(key), f"is not a known key ({known})")

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _take(self, key: str, *, required: bool = False) -> yaml.Node | None:
        self._known.append(key)
        entry = self._entries.pop(key, None)
        if entry is None:
            if required and not self.broken:
                self.problems.add(self.line, self._at(key), "is missing")
            return None
        return entry[1]

    def _wrong(self, node: yaml.Node, path: str, text: str) -> None:
        self.problems.add(node.start_mark.line + 1, path, text)

    def _scalar(self, node: yaml.Node, path: str, *, numbers: bool = False, empty: bool = False) -> str | None:
        """The text of a scalar, None and a problem where it is something else."""
        if not isinstance(node, yaml.ScalarNode):
            self._wrong(node, path, f"must be a text, not {_kind(node)}")
            return None
        kind = node.tag.removeprefix(_PREFIX)
        if kind not in ("str", "int", "float") if numbers else kind != "str":
            if kind == "null":
                self._wrong(node, path, "has no value (leave the key out, or give it one)")
            elif kind in _KINDS:
                self._wrong(node, path, f"must be a text: write it in quotes, {_shown(repr(node.value))}")
            else:
                self._wrong(node, path, f"has the tag {_shown(node.tag)}, and tags are not allowed")
            return None
        value: str = node.value
        if not value.strip() and not empty:
            self._wrong(node, path, "is empty")
            return None
        if not all(character.isprintable() for character in value):
            self._wrong(node, path, "has a line break or another control character in it")
            return None
        return value

    def _parsed(self, node: yaml.Node, path: str, text: str, parse: Callable[[str], T], default: D) -> T | D:
        try:
            return parse(text)
        except (UsageError, FormatError) as error:
            self._wrong(node, path, str(error))
            return default


def read(text: bytes, name: str) -> tuple[Table, Problems]:
    """The document's top table. Raises RecipeError where the text is no YAML mapping at all."""
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{name}: is {len(text)} bytes, more than the {MAX_BYTES} that a recipe may have")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{name}:{line}: is not UTF-8 text") from error
    problems = Problems()
    try:
        node = yaml.compose(decoded, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise RecipeError(f"{where}: is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{name}: is not YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{name}: is nested too deeply") from error
    if node is None:
        raise RecipeError(f"{name}: is empty", hint="a recipe has at least name and tags")
    if not _is_table(node):
        raise RecipeError(f"{name}:{node.start_mark.line + 1}: must be a table of keys, not {_kind(node)}")
    return Table.of(node, "", problems), problems


def _entries(
    node: yaml.MappingNode, path: str, problems: Problems, within: frozenset[int]
) -> dict[str, tuple[int, yaml.Node]]:
    """Keys with their lines and values. Own keys win over merged ones, earlier merges over later ones."""
    own: dict[str, tuple[int, yaml.Node]] = {}
    merges: list[yaml.Node] = []
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == f"{_PREFIX}merge":
            merges += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            continue
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_PREFIX}str":
            problems.add(
                line, path, f"has a key that is not a text ({_shown(str(key_node.value))}): write it in quotes"
            )
            continue
        key = key_node.value
        if key in own:
            problems.add(line, f"{path}.{key}" if path else key, f"is there twice (first on line {own[key][0]})")
            continue
        own[key] = (line, value_node)
    merged: dict[str, tuple[int, yaml.Node]] = {}
    for other in merges:
        if not _is_table(other):
            problems.add(other.start_mark.line + 1, path, f"merges (<<) {_kind(other)}, which is not a table")
        elif other is node or id(other) in within or not problems.merges_left:
            problems.add(other.start_mark.line + 1, path, "merges (<<) itself, or too much")
        else:
            problems.merges_left -= 1
            for key, entry in _entries(other, path, problems, within | {id(node)}).items():
                merged.setdefault(key, entry)
    return {**merged, **own}


def _is_table(node: yaml.Node) -> TypeGuard[yaml.MappingNode]:
    return isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map"


def _is_list(node: yaml.Node) -> TypeGuard[yaml.SequenceNode]:
    return isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq"


def _kind(node: yaml.Node) -> str:
    kind = node.tag.removeprefix(_PREFIX)
    return _KINDS.get(kind, f"something with the tag {_shown(node.tag)}")


def _shown(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
