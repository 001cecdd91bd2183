"""YAML manifests as plain values that remember the line each of them stands on.

Manifests come from anywhere, so nothing is taken for granted: a document that does not parse, a bomb of aliases, a
template that was never rendered or a key of the wrong type becomes a finding with file and line, and the documents
around it are still read. The events are PyYAML's (YAML 1.1); scalars are resolved as Kubernetes' own reader does it: no
dates, no sexagesimal numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from buildkit.deploy.findings import Finding, Severity

MAX_FILE = 16 * 2**20
"""Bytes. etcd refuses objects above 1.5 MiB; a file of sixteen times that is no manifest."""
MAX_NODES = 400_000
"""YAML nodes per file after aliases are followed; ends an alias bomb."""
MAX_DEPTH = 100
"""Levels of nesting; a JSON schema with a pod template in it needs about 40."""

Path_ = tuple[str | int, ...]
_INT = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset(form(word) for word in ("true", "yes", "on", "y") for form in (str.lower, str.capitalize, str.upper))
_FALSE = frozenset(
    form(word) for word in ("false", "no", "off", "n") for form in (str.lower, str.capitalize, str.upper)
)
"""As goyaml v2 has them, by which Kubernetes reads: y and n too."""
_TAG = "tag:yaml.org,2002:"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where PyYAML was built with it: the same events, ten times faster."""
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One YAML document. ``lines`` maps the path of every value to its line in ``file`` (from 1)."""

    file: str
    value: Any
    lines: Mapping[Path_, int]

    @property
    def root(self) -> Field:
        return Field(document=self, path=(), value=self.value)

    def line(self, path: Path_) -> int:
        """The line of ``path``, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Field:
    """A place in a document and what stands there; ``value`` is None where nothing does.

    Reading never raises: a value of another type than asked for reads as absent, because the schema check reports it.
    """

    document: Document
    path: Path_
    value: Any

    def at(self, *keys: str | int) -> Field:
        value = self.value
        for key in keys:
            if isinstance(value, dict) and isinstance(key, str):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                value = None
        return Field(document=self.document, path=self.path + keys, value=value)

    @property
    def present(self) -> bool:
        return self.value is not None

    @property
    def line(self) -> int:
        return self.document.line(self.path)

    @property
    def file(self) -> str:
        return self.document.file

    @property
    def text(self) -> str | None:
        """A string; numbers and booleans are not taken for one."""
        return self.value if isinstance(self.value, str) else None

    @property
    def integer(self) -> int | None:
        return self.value if isinstance(self.value, int) and not isinstance(self.value, bool) else None

    @property
    def boolean(self) -> bool | None:
        return self.value if isinstance(self.value, bool) else None

    @property
    def items(self) -> tuple[Field, ...]:
        """The elements of a list; empty for anything else."""
        return tuple(self.at(i) for i in range(len(self.value))) if isinstance(self.value, list) else ()

    @property
    def fields(self) -> Iterator[tuple[str, Field]]:
        """The members of a mapping; empty for anything else."""
        if isinstance(self.value, dict):
            for key in self.value:
                yield key, self.at(key)

    @property
    def strings(self) -> dict[str, str]:
        """The members of a mapping that are strings: labels, selectors."""
        return {k: f.value for k, f in self.fields if isinstance(f.value, str)}

    @property
    def texts(self) -> tuple[str, ...]:
        """The elements of a list that are strings: command and args."""
        return tuple(f.value for f in self.items if isinstance(f.value, str))


@dataclass(slots=True, eq=False)
class _Node:
    """A YAML node before aliases are written out: ``value`` is a resolved scalar, a list of nodes, or of pairs."""

    kind: Literal["scalar", "list", "mapping"]
    line: int
    value: Any
    text: str = ""
    plain: bool = False


class _TooMuchError(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def _compose(text: str, resolver: Resolver) -> Iterator[_Node]:
    """The root node of each document, built from the parser's events on a stack of our own.

    PyYAML's composer recurses once per level, so a hostile file could end the process; here depth is a number. An
    alias is the node itself, which keeps a bomb of aliases small until it is written out (and counted).
    """
    anchors: dict[str, _Node] = {}
    stack: list[_Node] = []
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.DocumentStartEvent):
            anchors.clear()
            continue
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            done = stack.pop()
            if done.kind == "mapping":
                done.value = list(zip(done.value[::2], done.value[1::2], strict=True))
            if not stack:
                yield done
            continue
        if isinstance(event, yaml.AliasEvent):
            found = anchors.get(event.anchor or "")
            if found is None:
                raise _TooMuchError(f"alias *{event.anchor} has no anchor before it", line)
            node = found
        elif isinstance(event, yaml.ScalarEvent):
            node = _Node("scalar", line, resolver(event), text=event.value, plain=event.implicit[0])
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            node = _Node("list" if isinstance(event, yaml.SequenceStartEvent) else "mapping", line, [])
        else:
            continue
        if not isinstance(event, yaml.AliasEvent) and event.anchor:
            anchors[event.anchor] = node
        if stack:
            stack[-1].value.append(node)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) > MAX_DEPTH:
                raise _TooMuchError(f"nested deeper than {MAX_DEPTH} levels", line)
            stack.append(node)
        elif not stack:
            yield node


@dataclass(slots=True)
class _Builder:
    """Turns the nodes of one document into values, within the budget of nodes and depth."""

    file: str
    budget: int
    lines: dict[Path_, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def build(self, node: _Node, path: Path_, depth: int = 0) -> Any:
        self.budget -= 1
        if self.budget < 0:
            raise _TooMuchError(f"more than {MAX_NODES} values after aliases are followed", node.line)
        if depth > MAX_DEPTH:
            raise _TooMuchError(f"nested deeper than {MAX_DEPTH} levels, or an alias in its own anchor", node.line)
        self.lines.setdefault(path, node.line)
        if node.kind == "mapping":
            return self._mapping(node, path, depth)
        if node.kind == "list":
            return [self.build(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        return node.value

    def _mapping(self, node: _Node, path: Path_, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.kind == "scalar" and key_node.plain and key_node.text == "<<":
                merged = self._merge(value_node, path, depth) | merged
                continue
            if key_node.kind != "scalar":
                self._report("yaml-key", key_node.line, "a key is itself a list or mapping", _UNRENDERED)
                continue
            key = key_node.text
            if key in out:
                self._report(
                    "yaml-duplicate-key",
                    key_node.line,
                    f"key {key!r} is given twice in one mapping; readers differ in which one they take",
                    "keep one of them",
                )
            self.lines[(*path, key)] = key_node.line
            out[key] = self.build(value_node, (*path, key), depth + 1)
        return merged | out if merged else out

    def _merge(self, node: _Node, path: Path_, depth: int) -> dict[str, Any]:
        """What ``<<`` brings in; the first of several wins (YAML 1.1, merge key)."""
        out: dict[str, Any] = {}
        for part in node.value if node.kind == "list" else [node]:
            if part.kind == "mapping":
                out = self.build(part, path, depth + 1) | out
        return out

    def _report(self, rule: str, line: int, message: str, remedy: str) -> None:
        self.findings.append(
            Finding(rule=rule, severity=Severity.ERROR, file=self.file, line=line, message=message, remedy=remedy)
        )


Resolver = Callable[[yaml.ScalarEvent], Any]
_UNRENDERED = "render the template first (helm template, kustomize build) and check its output"


def resolve(event: yaml.ScalarEvent) -> Any:
    """The value of a scalar: null, boolean, integer, float or string; a quoted or tagged one is what it says."""
    text: str = event.value
    tag = (event.tag or "").removeprefix(_TAG)
    if not event.implicit[0] and tag not in ("null", "bool", "int", "float"):
        return text
    if tag == "null" or text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    bare = text.replace("_", "")
    if _INT.fullmatch(text):
        return _integer(bare)
    if _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        return float(bare)
    return text


def resolve_kustomize(event: yaml.ScalarEvent) -> Any:
    """The same as kustomize reads the resources that it takes in (kyaml): only true and false are booleans."""
    if event.implicit[0] and event.value.lower() not in ("true", "false") and event.value in _TRUE | _FALSE:
        return event.value
    return resolve(event)


def _integer(text: str) -> int | str:
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text.removeprefix("+"))
    if len(digits) > 40:
        return text
    for prefix, base in (("0b", 2), ("0x", 16), ("0o", 8)):
        if digits.startswith(prefix):
            return sign * int(digits[2:], base)
    return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)


def read_documents(text: str, file: str, resolver: Resolver = resolve) -> tuple[list[Document], list[Finding]]:
    """All documents of a file, and what is wrong with it; never raises for what the text says."""
    documents: list[Document] = []
    findings: list[Finding] = []
    budget = MAX_NODES
    for start, chunk in _parts(text):
        # Blank lines in front keep the marks right for a document that is parsed alone.
        document, found, budget = _read_one("\n" * start + chunk, file, start + 1, budget, resolver)
        findings += found
        documents += document
        if budget < 0:
            break
    return documents, findings


def read_file(
    path: Path, shown: str | None = None, resolver: Resolver = resolve
) -> tuple[list[Document], list[Finding]]:
    """The documents of a file on disk. A file that cannot be read is a finding too."""
    name = shown or str(path)
    try:
        with path.open("rb") as handle:
            raw = handle.read(MAX_FILE + 1)
    except OSError as error:
        return [], [_unreadable(name, f"cannot be read: {error.strerror or error}", "check the path and its rights")]
    return read_bytes(raw, name, resolver)


def read_bytes(raw: bytes, name: str, resolver: Resolver = resolve) -> tuple[list[Document], list[Finding]]:
    """The documents in the bytes of a file, or of a stream that is shown as ``name``."""
    if len(raw) > MAX_FILE:
        return [], [_unreadable(name, f"is larger than {MAX_FILE} bytes", "a manifest has a few kilobytes")]
    try:
        return read_documents(raw.decode("utf-8-sig"), name, resolver)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        return [], [_unreadable(name, f"is not UTF-8 at byte {error.start}", "save it as UTF-8", line)]


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Each document of a stream with the number of lines before it.

    ``---`` at the start of a line ends a document wherever it stands, even in a block scalar (YAML 1.2, 9.1.2), so
    one that does not parse cannot hide its neighbours. Directives belong to the document after them.
    """
    cuts = [0, *(m.start() for m in _SEPARATOR.finditer(text) if m.start()), len(text)]
    carried = ""
    line = 0
    for start, end in pairwise(cuts):
        chunk = text[start:end]
        if chunk.lstrip().startswith("%") and all(c.startswith(("%", "#")) or not c for c in chunk.splitlines()):
            carried += chunk
            continue
        yield line, carried + chunk
        line += (carried + chunk).count("\n")
        carried = ""


def _read_one(
    text: str, file: str, line: int, budget: int, resolver: Resolver
) -> tuple[list[Document], list[Finding], int]:
    """One part of a stream; the budget that is left comes back, below zero where it is used up."""
    documents: list[Document] = []
    findings: list[Finding] = []
    try:
        for node in _compose(text, resolver):
            builder = _Builder(file=file, budget=budget)
            try:
                value = builder.build(node, ())
            finally:
                budget = builder.budget
                findings += builder.findings
            if value is not None:
                documents.append(Document(file=file, value=value, lines=builder.lines))
    except yaml.YAMLError as error:
        findings.append(_syntax(error, text, file, line))
    except _TooMuchError as error:
        findings.append(_unreadable(file, error.message, "write it flatter, and with fewer aliases", error.line))
    return documents, findings, budget


def _syntax(error: yaml.YAMLError, text: str, file: str, line: int) -> Finding:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = getattr(error, "position", None)
    if mark is not None:
        line = mark.line + 1
    elif isinstance(position, int):
        line = text[:position].count("\n") + 1
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "is not YAML")
    marked = next((n for n, row in enumerate(text.splitlines(), 1) if "{{" in row or "<%" in row), None)
    if marked is not None:
        line = min(line, marked)
        return Finding(
            rule="template",
            severity=Severity.ERROR,
            file=file,
            line=line,
            message=f"a template that was not rendered does not parse as YAML: {problem}",
            remedy=_UNRENDERED,
        )
    return _unreadable(file, f"does not parse: {problem}", "correct the YAML", line)


def _unreadable(file: str, message: str, remedy: str, line: int = 1) -> Finding:
    return Finding(rule="yaml", severity=Severity.ERROR, file=file, line=line, message=message, remedy=remedy)
