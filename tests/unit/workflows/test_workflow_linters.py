"""The workflows by the linters of their own world; each linter is seen to fail at something of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = Path(sys.executable).parent
SOURCES = sorted(path.name for path in (ROOT / "workflows").glob("*.yaml"))
FOLDERS = ("workflows", ".gitea/workflows", ".github/workflows")
Linter = Callable[[Path], tuple[int, str]]


def _run(*words: str | Path, cwd: Path = ROOT) -> tuple[int, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "GH_"))}
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def schema(path: Path) -> tuple[int, str]:
    return _run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)


def actionlint(path: Path) -> tuple[int, str]:
    return _run(TOOLS / "actionlint", "-no-color", "-shellcheck", TOOLS / "shellcheck", path)


def zizmor(path: Path) -> tuple[int, str]:
    return _run(TOOLS / "zizmor", "--offline", "--no-progress", "--color=never", path)


def act(path: Path) -> tuple[int, str]:
    return _run(TOOLS / "act", "--validate", "--strict", "-W", path)


LINTERS = (schema, actionlint, zizmor, act)
MINIMAL = """\
name: minimal
on:
  push:
    branches: [main]
permissions: {}
jobs:
  one:
    runs-on: ubuntu-latest
    steps:
      - name: Say something
        run: echo "$GITHUB_SHA"
"""
BROKEN: list[tuple[Linter, str, str, str]] = [
    (schema, "    runs-on: ubuntu-latest\n", "", "runs-on"),
    (schema, "branches: [main]", "branches: {main: yes}", "branches"),
    (actionlint, 'echo "$GITHUB_SHA"', "echo ${{ needs.nobody.result }}", "nobody"),
    (actionlint, 'echo "$GITHUB_SHA"', "for x in $(ls *.txt); do echo $x; done", "shellcheck"),
    (actionlint, "runs-on: ubuntu-latest", "runs-on: gpu-v1oo", "gpu-v1oo"),
    (zizmor, 'echo "$GITHUB_SHA"', "echo ${{ github.event.head_commit.message }}", "template-injection"),
    (zizmor, "  push:\n", "  pull_request_target:\n", "dangerous-triggers"),
    (zizmor, 'run: echo "$GITHUB_SHA"', "uses: actions/checkout@v4", "unpinned-uses"),
    (act, 'run: echo "$GITHUB_SHA"', "rum: echo", "rum"),
    (act, 'echo "$GITHUB_SHA"', "echo ${{ gitea.sha }}", "gitea"),
]


@pytest.mark.parametrize("linter", LINTERS, ids=lambda linter: linter.__name__)
@pytest.mark.parametrize("name", SOURCES)
def test_our_workflows(linter: Linter, name: str) -> None:
    code, output = linter(ROOT / "workflows" / name)
    assert code == 0, output


def test_the_copies_are_the_sources() -> None:
    assert len(SOURCES) >= 4
    for folder in FOLDERS:
        assert sorted(path.name for path in (ROOT / folder).iterdir()) == SOURCES
        for name in SOURCES:
            assert (ROOT / folder / name).read_bytes() == (ROOT / "workflows" / name).read_bytes()


@pytest.mark.parametrize("linter", LINTERS, ids=lambda linter: linter.__name__)
def test_a_minimal_workflow_passes(linter: Linter, tmp_path: Path) -> None:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    code, output = linter(path)
    assert code == 0, output


@pytest.mark.parametrize(("linter", "old", "new", "named"), BROKEN)
def test_each_linter_fails_at_what_is_its_own(linter: Linter, old: str, new: str, named: str, tmp_path: Path) -> None:
    assert old in MINIMAL
    path = tmp_path / "broken.yaml"
    path.write_text(MINIMAL.replace(old, new))
    code, output = linter(path)
    assert code != 0
    assert named in output


def test_hadolint_fails_at_what_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:latest\nRUN cd /tmp && sudo apt-get install x\n")
    code, output = _run(TOOLS / "hadolint", path)
    assert code != 0
    assert "DL3004" in output
