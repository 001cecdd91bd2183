"""``docs/cli.md`` is what the tasks say of themselves, and what the page adds to that is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from invoke.collection import Collection

from buildkit.cli import command, program
from buildkit.tasks import namespace
from buildkit.tasks.reference import COMMAND, ENVIRONMENT, NOTES, IncompleteError, Note, documented, page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
NOTE = Note(example="invoke make", failed="it failed")


def test_the_page_is_what_the_tasks_say() -> None:
    assert page(documented(namespace, NOTES)) == PAGE, f"make it again: {COMMAND}"


def test_the_command_that_makes_it_is_named_where_one_looks() -> None:
    assert COMMAND in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("name", [name for name, note in NOTES.items() if note.needs])
def test_what_is_told_to_be_needed_is_needed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program().run(["buildkit", name])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_variable_of_ours_is_on_the_page() -> None:
    files = [*(ROOT / "buildkit").rglob("*.py"), *(ROOT / "images").glob("*/recipe.yaml")]
    named = {
        name
        for file in files
        for name in re.findall(r"[\"{](BUILDKIT_[A-Z_]+|REGISTRY_(?:USERNAME|TOKEN))[\"}]", file.read_text())
    }
    assert named - {"BUILDKIT_PROGRESS"} <= set(ENVIRONMENT)  # that one is docker's, and we set it


def _documented(note: Note = NOTE, **parameters: Any) -> str:
    """The page of one task ``make`` that was made of ``parameters``: name → (default, help)."""
    return page(documented(_collection(**parameters), {"make": note}))


def _collection(**parameters: Any) -> Collection:
    def body(context: Any, **given: Any) -> None:
        """Make it.

        What follows is not on the page.
        """

    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        + [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, (d, _) in parameters.items()]
    )
    texts = {name.strip("_").replace("_", "-"): text for name, (_, text) in parameters.items()}
    made = command(help=texts, positional=[name for name in parameters if name == "name"], name="make")(body)
    collection = Collection()
    collection.add_task(made)
    return collection


@pytest.mark.parametrize(
    ("name", "default", "text", "row"),
    [
        ("name", "", "what to make", "| `NAME`, `--name=NAME` | what to make |"),
        ("to", "", "where to", "| `--to=VALUE` | where to |"),
        ("in_", "", "where", "| `--in=VALUE` | where |"),
        ("chunk_size", "", "like 95MB", "| `--chunk-size=VALUE` | like 95MB |"),
        ("count", 4, "how many", "| `--count=N` | how many (default `4`) |"),
        ("count", 4, "how many (default 4)", "| `--count=N` | how many (default 4) |"),
        ("count", 0, "how many (default: all)", "| `--count=N` | how many (default: all) |"),
        ("count", -1, "how many", "| `--count=N` | how many |"),
        ("deep", False, "all of it", "| `--deep` | all of it |"),
        ("deep", True, "all of it", "| `--deep`, `--no-deep` | all of it |"),
        ("no_same", False, "leave it out", "| `--no-same` | leave it out |"),
        ("tag", [], "may be given several times", "| `--tag=VALUE` … | may be given several times |"),
        ("how", "auto", "auto|never", r"| `--how=VALUE` | auto\|never (default `auto`) |"),
        ("runtime", "", "like '<13', with --how", r"| `--runtime=VALUE` | like '\<13', with `--how` |"),
    ],
)
def test_every_kind_of_argument(name: str, default: object, text: str, row: str) -> None:
    given: Any = {name: (default, text)}
    assert row in _documented(**given).splitlines()


def test_a_usage_line_says_what_is_needed() -> None:
    given: dict[str, Any] = {"name": ("", "what"), "to": ("", "where"), "deep": (False, "all")}
    assert "invoke make [NAME] [FLAGS]" in _documented(**given).splitlines()
    needed = Note(example="invoke make", failed="it failed", needs=("name", "to"))
    assert "invoke make NAME --to=TO [FLAGS]" in _documented(needed, **given).splitlines()


def test_only_the_first_paragraph_is_the_summary() -> None:
    text = _documented()
    assert "| [make](#make) | Make it. |" in text
    assert "What follows" not in text


@pytest.mark.parametrize(
    ("parameters", "notes", "problem"),
    [
        ({}, {}, "make: add a note"),
        ({}, {"make": NOTE, "bake": NOTE}, "bake: there is a note, and no such task"),
        ({"deep": (False, "")}, {"make": NOTE}, "--deep has no help"),
        ({"count": (4, "how many (default 5)")}, {"make": NOTE}, "says that the default is 5, and it is 4"),
        ({"tag": ([], "a tag")}, {"make": NOTE}, "--tag: its help does not say that it may be given several times"),
        ({}, {"make": Note(example="", failed="", needs=("to",))}, "it needs to, which is no argument"),
    ],
)
def test_an_incomplete_page_is_not_made(parameters: Any, notes: dict[str, Note], problem: str) -> None:
    with pytest.raises(IncompleteError, match=re.escape(problem)):
        documented(_collection(**parameters), notes)


def test_nothing_on_the_page_is_an_artefact() -> None:
    for line in PAGE.splitlines():
        assert line == line.rstrip()
        assert not re.search(r"[a-z]- [a-z]| None|\[\]|STRING|<Argument", line), line
