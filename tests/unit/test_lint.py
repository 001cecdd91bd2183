"""Dockerfiles and shell scripts, by the linters of their own worlds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


DOCKERFILES = _names(sorted((ROOT / "images").glob("*/Dockerfile*")))
SCRIPTS = _names(
    [
        path
        for folder in (ROOT / "scripts", ROOT / ".ci", *(ROOT / "images").glob("*"), ROOT / "images/cuda-probe/kernels")
        for path in sorted(folder.iterdir())
        if path.is_file() and path.read_bytes()[:2] == b"#!" and b"sh\n" in path.read_bytes()[:40]
    ]
)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(name: str) -> None:
    done = subprocess.run([TOOLS / "hadolint", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts(name: str) -> None:
    done = subprocess.run([TOOLS / "shellcheck", "-x", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_something_to_lint() -> None:
    assert len(DOCKERFILES) >= 2
    assert len(SCRIPTS) >= 3
