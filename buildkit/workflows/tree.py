"""A workflow file as nodes that know their lines, and the few questions that rules ask of it. Pure.

Source: the workflow syntax that GitHub documents and that Gitea follows. YAML 1.1 reads the key ``on`` as a boolean;
here keys are the text that stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

MAX_BYTES = 512 * 1024
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_LITERAL = re.compile(r"'(?:[^']|'')*'")


class BrokenWorkflow(Exception):
    """The text is no workflow at all: ``line`` (from 1) and ``text`` say why."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A scalar: ``value``, and the line on which its content begins (that after the ``|`` of a block)."""

    value: str
    line: int

    def line_at(self, offset: int) -> int:
        """The line of a character of ``value``; folded scalars make it the first line at worst."""
        return self.line + self.value.count("\n", 0, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """What stands in ``${{ }}``, without its string literals, which name nothing."""

    code: str
    line: int
    owner: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a job. ``node`` is its mapping."""

    node: yaml.MappingNode
    line: int

    def text(self, key: str) -> Text | None:
        return text_of(get(self.node, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: its id, its mapping, the line of its id, and its steps."""

    id: str
    node: yaml.MappingNode
    line: int
    steps: tuple[Step, ...]


def parse(text: bytes) -> yaml.MappingNode:
    """The document's top mapping. Raises BrokenWorkflow."""
    if len(text) > MAX_BYTES:
        raise BrokenWorkflow(1, f"is {len(text)} bytes, more than the {MAX_BYTES} that a workflow may have")
    try:
        node = yaml.compose(text.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise BrokenWorkflow(text.count(b"\n", 0, error.start) + 1, "is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BrokenWorkflow(mark.line + 1 if mark else 1, f"is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BrokenWorkflow(1, f"is not YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise BrokenWorkflow(1, "must be a table of keys")
    return node


def items(node: yaml.Node | None) -> Iterator[tuple[Text, yaml.Node]]:
    """The entries of a mapping; nothing for any other node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield Text(value=key.value, line=key.start_mark.line + 1), value


def get(node: yaml.Node | None, *path: str) -> yaml.Node | None:
    """The value under a path of keys, None where there is none."""
    for name in path:
        node = next((value for key, value in items(node) if key.value == name), None)
    return node


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def text_of(node: yaml.Node | None) -> Text | None:
    if not isinstance(node, yaml.ScalarNode):
        return None
    return Text(value=node.value, line=line_of(node) + (1 if node.style in ("|", ">") else 0))


def texts(node: yaml.Node | None) -> tuple[Text, ...]:
    """A text, or a list of them: both forms are allowed in many places."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return tuple(found for found in map(text_of, nodes) if found is not None)


def jobs(top: yaml.MappingNode) -> tuple[Job, ...]:
    found = []
    for key, node in items(get(top, "jobs")):
        if isinstance(node, yaml.MappingNode):
            listed = get(node, "steps")
            steps = listed.value if isinstance(listed, yaml.SequenceNode) else []
            found.append(
                Job(
                    id=key.value,
                    node=node,
                    line=key.line,
                    steps=tuple(
                        Step(node=step, line=line_of(step)) for step in steps if isinstance(step, yaml.MappingNode)
                    ),
                )
            )
    return tuple(found)


def scalars(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Text]]:
    """Every text below a node, with the path of keys that leads to it; an aliased node once."""
    seen: set[int] = set()

    def walk(at: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Text]]:
        if at is None or id(at) in seen:
            return
        seen.add(id(at))
        if isinstance(at, yaml.ScalarNode):
            found = text_of(at)
            assert found is not None
            yield path, found
        elif isinstance(at, yaml.SequenceNode):
            for entry in at.value:
                yield from walk(entry, path)
        else:
            for key, value in items(at):
                yield from walk(value, (*path, key.value))

    yield from walk(node, path)


def expressions(text: Text, *, bare: bool = False) -> tuple[Expression, ...]:
    """The expressions in a text. ``bare``: the whole text is one even without braces, as in ``if``."""
    found = [
        Expression(code=_LITERAL.sub("''", match[1]), line=text.line_at(match.start()), owner=text)
        for match in _EXPRESSION.finditer(text.value)
    ]
    if bare and not found:
        found.append(Expression(code=_LITERAL.sub("''", text.value), line=text.line, owner=text))
    return tuple(found)


def repeated_keys(top: yaml.Node) -> Iterator[Text]:
    """Keys that stand twice in one mapping: forges differ in which of them counts."""
    seen: set[int] = set()
    todo = [top]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in items(node):
                if key.value in names:
                    yield key
                names.add(key.value)
                todo.append(value)
