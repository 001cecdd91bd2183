"""The pages keep their word: links and anchors resolve, commands name tasks and flags that there are, scripts exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from invoke.exceptions import ParseError
from invoke.parser.parser import Parser

from buildkit.cli import program
from buildkit.recipe import Recipe, load
from buildkit.tasks import namespace

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("", "sh", "console")
"""Languages of the blocks that hold commands. Output stands in blocks of the language ``text``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """``prose`` without its code blocks; ``blocks`` are (language, lines)."""

    prose: str
    blocks: tuple[tuple[str, tuple[str, ...]], ...]


def _parsed(text: str) -> Page:
    prose: list[str] = []
    blocks: list[tuple[str, tuple[str, ...]]] = []
    inside: list[str] | None = None
    language = fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+)\s*(\w*)", line)
        if inside is None and mark:
            inside, fence, language = [], mark[1], mark[2]
        elif inside is not None and line.strip() == fence:
            blocks.append((language, tuple(inside)))
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            prose.append(line)
    assert inside is None, "a code block has no end"
    return Page(prose="\n".join(prose), blocks=tuple(blocks))


@cache
def _page(path: Path) -> Page:
    return _parsed(path.read_text())


@cache
def _anchors(path: Path) -> frozenset[str]:
    """Anchors of a page's headings, as forges make them: lower case, no punctuation but dashes, numbers for repeats."""
    seen: dict[str, int] = {}
    out = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _page(path).prose, re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w -]", "", plain).replace(" ", "-")
        out.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return frozenset(out)


def _broken_links(path: Path, page: Page) -> Iterator[str]:
    without_code = re.sub(r"`[^`\n]*`", "`code`", page.prose)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.is_relative_to(ROOT) or file.startswith("/"):
            yield f"{target}: outside of the repository"
        elif not place.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in (_anchors(place) if file else _anchors_of(page, path)):
            yield f"{target}: no such heading"


def _anchors_of(page: Page, path: Path) -> frozenset[str]:
    return _anchors(path) if page is _page(path) else frozenset()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_and_anchors_resolve(path: Path) -> None:
    assert list(_broken_links(path, _page(path))) == []


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_scripts_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"(?<![\w/.-])(?:scripts|benchmarks)/[\w-]+(?:\.py)?", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def _lines(page: Page) -> Iterator[str]:
    """Lines of shell: in blocks (continued lines joined), in ``run:`` of workflows, and in single backquotes."""
    for language, lines in page.blocks:
        if language in SHELL:
            for line in "\n".join(lines).replace("\\\n", " ").splitlines():
                if re.search(r"\b(?:invoke|buildkit) ", line):
                    yield line.removeprefix("$ ")
        elif language in ("yaml", "yml"):
            for line in lines:
                if found := re.match(r"\s*(?:- )?run: *([^|>].*)", line):
                    yield found[1]
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.prose):
        text = " ".join(span.split())
        if re.match(r"(?:invoke|buildkit) [a-z-]", text) and "…" not in text:
            yield text


def _commands(line: str) -> Iterator[list[str]]:
    """The words after ``invoke`` or ``buildkit``, for each such command of a line. Operators stand between blanks."""
    command: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word not in ("&&", "||", "|", "&", ";"):
            command.append(word)
            continue
        redirected = next((i for i, part in enumerate(command) if part in ("<", ">", ">>", "2>")), len(command))
        words = list(dropwhile(lambda part: re.match(r"[A-Z_]+=", part), command[:redirected]))
        if words and words[0].rpartition("/")[2] in ("invoke", "buildkit"):
            # What is in brackets may be left out: it is there to be read.
            yield [part.strip("[]") for part in words[1:] if part != "[FLAGS]"]
        command = []


def _wrong(words: list[str]) -> str | None:
    """What invoke's own parser, with ours for arguments that may be left out, says against a command."""
    core = program().initial_context
    try:
        # As invoke does it: its own flags first, then the tasks and theirs.
        first = Parser(initial=core, ignore_unknown=True).parse_argv(words)
        rest = Parser(initial=core, contexts=namespace.to_contexts()).parse_argv(first.unparsed)
    except ParseError as error:
        return str(error)
    shown = first[0].args.help.value
    if isinstance(shown, str) and shown not in _names():
        return f"no task {shown}"
    return f"not understood: {rest.unparsed}" if rest.unparsed else None


@cache
def _names() -> frozenset[str]:
    return frozenset(namespace.task_names) | {"TASK"}


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_commands_name_tasks_and_flags_that_there_are(path: Path) -> None:
    found = [(words, _wrong(words)) for line in _lines(_page(path)) for words in _commands(line)]
    assert [f"{' '.join(words)}: {problem}" for words, problem in found if problem] == []


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_recipes_and_parts_of_them_can_be_used(path: Path, tmp_path: Path) -> None:
    """Blocks of YAML whose keys are a recipe's; what must be there and is not of interest on the page is added."""
    keys = {field.name for field in dataclasses.fields(Recipe)}
    for language, lines in _page(path).blocks:
        block = yaml.safe_load("\n".join(lines)) if language == "yaml" else None
        if isinstance(block, dict) and set(block) <= keys:
            whole: dict[str, Any] = {"name": "app", "tags": ["sm70"], "base": {"image": "docker.io/debian:12"}}
            whole |= block
            folder = tmp_path / whole["name"]
            folder.mkdir(exist_ok=True)
            (folder / "Dockerfile").touch()
            (folder / "recipe.yaml").write_text(yaml.safe_dump(whole))
            assert load(whole["name"], tmp_path).name == whole["name"]


def test_commands_are_found_at_all() -> None:
    pages = [_name(path) for path in PAGES if any(list(_commands(line)) for line in _lines(_page(path)))]
    assert {"README.md", "docs/cli.md", "docs/smoke.md"} <= set(pages)


# The test's own proof: what is wrong is found, what is right is not.

LOGIN = ("--username", "ci", "--password-stdin")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("invoke build            # the recipe", [["build"]]),
        ("A=b invoke build && buildkit check x", [["build"], ["check", "x"]]),
        ("invoke login host --username ci --password-stdin < token", [["login", "host", *LOGIN]]),
        ("buildkit check --json | python -m json.tool", [["check", "--json"]]),
        ("invoke check --runtime '<13'", [["check", "--runtime", "<13"]]),
        ("invoke push [IMAGE] [FLAGS]", [["push", "IMAGE"]]),
        (".venv/bin/buildkit push docker://h:5000/a:b@sha256:00 -e", [["push", "docker://h:5000/a:b@sha256:00", "-e"]]),
        ("cat x | invoke deploy.check -", [["deploy.check", "-"]]),
        ("docker push invoke", []),
    ],
)  # fmt: skip
def test_commands_are_taken_out_of_a_line(line: str, expected: list[list[str]]) -> None:
    assert list(_commands(line)) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("build cuda-probe", None),
        ("build check", None),
        ("--list", None),
        ("--help TASK", None),
        ("--help push", None),
        ("--help nothing", "no task nothing"),
        ("push IMAGE --to=HOST/NAME:TAG --chunked", None),
        ("push --too X", "--too"),
        ("push --parallel many", "--parallel takes a number"),
        ("pushes", "pushes"),
        ("deploy.nothing", "deploy.nothing"),
        ("build a b", "b"),
    ],
)
def test_a_wrong_command_is_found(words: str, problem: str | None) -> None:
    told = _wrong(words.split())
    assert told is None if problem is None else problem in (told or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](README.md#two-commands) [b](https://example.org/x) [c](docs)", []),
        ("[a](READ.md)", ["READ.md: no such file"]),
        ("[a](README.md#nothing)", ["README.md#nothing: no such heading"]),
        ("[a](/etc/hosts)", ["/etc/hosts: outside of the repository"]),
        ("[a](../x)", ["../x: outside of the repository"]),
        ("`[a](x.md)`\n```\n[a](x.md)\n```\n", []),
    ],
)
def test_a_broken_link_is_found(text: str, expected: list[str]) -> None:
    assert list(_broken_links(ROOT / "README.md", _parsed(text))) == expected


def test_lines_come_from_blocks_workflows_and_prose() -> None:
    text = """Say `invoke build` or `buildkit …`.

```
invoke push a \\
  --to b
```

```text
invoke nothing
```

```yaml
    - run: buildkit check x
```
"""
    assert list(_lines(_parsed(text))) == ["invoke push a    --to b", "buildkit check x", "invoke build"]


def test_anchors_are_those_of_forges() -> None:
    assert {"deploycheck", "pull-check", "exit-codes", "build"} <= _anchors(ROOT / "docs" / "cli.md")
    assert "source-the-packaged-software" in _anchors(ROOT / "docs" / "recipe.md")
