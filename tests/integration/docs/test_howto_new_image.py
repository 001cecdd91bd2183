"""``docs/howto/new-image.md``, followed to the letter: its recipe, its Dockerfile, its commands, in a new repository.

What the page takes from elsewhere is replaced: the base image (from a public registry there, from packages here), and
the names of a host and a commit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from buildkit.engine import Engine
from buildkit.stack import StackState

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "new-image.md").read_text()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BASE = {"debootstrap": {"suite": "host", "variant": "minbase", "include": ["ca-certificates"]}}
"""That of cuda-probe: made once for all of them."""


def _blocks(heading: str, language: str = "") -> list[str]:
    section = re.split(rf"^## {re.escape(heading)}\n", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with the page's recipe in it, and a remote to push to."""
    folder = tmp_path / "app"
    image = folder / "images" / "hello"
    image.mkdir(parents=True)
    recipe = yaml.safe_load(_blocks("2. The recipe", "yaml")[0])
    recipe |= {"base": BASE, "build": recipe["build"] | {"min_disk": "1GB"}}
    (image / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (image / "Dockerfile").write_text(_blocks("2. The recipe", "dockerfile")[0])
    (image / "hello").write_text("#!/bin/sh\necho usage: hello\n")
    (image / "hello").chmod(0o755)
    for command in (
        ["git", "init", "--quiet", "--bare", str(tmp_path / "origin.git")],
        ["git", "init", "--quiet", "--initial-branch=main", str(folder)],
        ["git", "-C", str(folder), "remote", "add", "origin", str(tmp_path / "origin.git")],
        ["git", "-C", str(folder), "config", "push.autoSetupRemote", "true"],
        ["git", "-C", str(folder), "config", "user.name", "A"],
        ["git", "-C", str(folder), "config", "user.email", "a@example.org"],
    ):
        subprocess.run(command, check=True)
    return folder


def test_the_page_works_as_written(repository: Path, stack: StackState, engine: Engine, tmp_path: Path) -> None:
    by_hand, (workflow, other) = _blocks("3. By hand, once"), _blocks("4. The workflow")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DOCKER_HOST": str(stack.engine),
        "BUILDKIT_CACHE_DIR": str(tmp_path / "cache"),
        "BUILDKIT_STATE_DIR": str(tmp_path / "state"),
        "GIT_CONFIG_GLOBAL": os.devnull,
    }

    def run(script: str) -> str:
        script = script.replace("git.example.org/team/hello", f"{stack.edge}/team/hello").replace("COMMIT", COMMIT)
        done = subprocess.run(
            ["sh", "-euxc", script], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        printed = run(by_hand[0])
        assert re.search(r"^built hello as hello:sm70, hello:sm70-[0-9a-f]{12} ", printed, re.MULTILINE)
        assert re.search(r"^\S+/team/hello:sm70,sm70-[0-9a-f]{12} pushed: ", printed, re.MULTILINE)
        # This installation comes from a checkout, not from a commit: the second block is for that.
        made, rest = workflow.splitlines()[0], "\n".join(workflow.splitlines()[1:])
        assert made == "buildkit workflows.new hello --recipe hello"
        printed = run(f"{other}\n{rest}")
        expected = [line for block in _blocks("4. The workflow", "text")[:1] for line in block.splitlines()]
        assert [line for line in printed.splitlines() if line in expected] == expected
        remote = subprocess.run(
            ["git", "-C", str(tmp_path / "origin.git"), "ls-tree", "-r", "--name-only", "main"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert {".gitea/workflows/hello.yaml", "workflows/hello.yaml", "scripts/ci-setup"} <= set(remote.stdout.split())
        assert run("buildkit workflows.check").strip() == "workflows: nothing to report"
    finally:
        for name in engine.inspect("hello:sm70").tags:
            engine.remove(name)
