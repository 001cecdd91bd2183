"""``docs/architecture.md`` says which package may import which, and which modules are pure; this holds it to that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WORLD = {
    "asyncio", "docker", "os", "requests", "shutil", "socket", "ssl", "subprocess", "tempfile", "threading",
    "time", "urllib3",
}  # fmt: skip


def _block(heading: str) -> list[str]:
    match = re.search(rf"## {heading}\n.*?```\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def _ranks() -> dict[str, int]:
    """Package → its line in the list. Names end where the description begins: after three blanks."""
    ranks = {}
    for rank, line in enumerate(_block("Packages")):
        for name in re.split(r"\s{3,}", line)[0].split():
            ranks[name] = rank
    return ranks


def _imports(path: Path) -> Iterator[str]:
    """Modules that are imported when this one is, and those that its functions import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"buildkit.{a.name}" for a in node.names] if node.module == "buildkit" else [node.module])


def _files() -> list[Path]:
    return sorted((ROOT / "buildkit").rglob("*.py"))


def _package(path: Path) -> str:
    return path.relative_to(ROOT / "buildkit").with_suffix("").parts[0]


def test_every_package_is_on_the_page_and_no_other() -> None:
    assert {_package(path) for path in _files()} - {"__init__", "__main__"} == set(_ranks())


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_up_the_list(path: Path) -> None:
    ranks = _ranks()
    own = _package(path)
    if own.startswith("__"):
        return  # the package's own face, and the command: they may name anything
    for module in _imports(path):
        parts = module.split(".")
        if parts[0] != "buildkit" or len(parts) < 2 or parts[1] == own or parts[1].startswith("__"):
            continue
        both_ends = {own, parts[1]} == {"cli", "tasks"}
        assert both_ends or ranks[parts[1]] < ranks[own], f"{own} imports {module}"


@pytest.mark.parametrize("name", _block("Pure modules"))
def test_pure_modules_do_not_touch_the_world(name: str) -> None:
    path = ROOT / Path(*name.split(".")).with_suffix(".py")
    touched = {module.split(".")[0] for module in _imports(path)} & WORLD
    assert not touched, f"{name} imports {touched}"


def test_only_the_engine_imports_docker() -> None:
    for path in _files():
        if path.name != "engine.py":
            assert "docker" not in {module.split(".")[0] for module in _imports(path)}, path
