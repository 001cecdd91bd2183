"""A git repository of its own with one small recipe, and the command line in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from buildkit.stack import StackState
from support.rootfs import root_tar
from support.world import Result, World

GOLDEN = Path(__file__).parents[1] / "golden" / "cuda"

RECIPE = """\
name: bk-pipe
tags: [sm70, "sm70-{short_revision}"]
licenses: MIT
cuda: {require: [sm_70]}
start: {command: [/bin/sh, -c, "echo ready"], expect: ready}
"""
DOCKERFILE = 'FROM scratch\nADD root.tar /\nCOPY code.so /srv/code.so\nCMD ["/bin/sh"]\n'


class Repository(World):
    """A git repository with the recipe ``bk-pipe``, and the command line in it."""

    image = "bk-pipe"

    def __init__(self, stack: StackState, folder: Path, name: str) -> None:
        super().__init__(stack, folder, name)
        assert stack.engine is not None
        self.environ |= {
            "DOCKER_HOST": stack.engine,
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
        }
        self.folder = folder / "repository"
        self.recipe = self.folder / "images" / self.image
        self.recipe.mkdir(parents=True)
        (self.folder / ".gitignore").write_text(".buildkit/\n")
        self.write("recipe.yaml", RECIPE.encode())
        self.write("Dockerfile", DOCKERFILE.encode())
        self.write("root.tar", root_tar(["sh"], {"tmp/.keep": (b"", 0o644)}))
        self.write("code.so", (GOLDEN / "cuda11-sm70.so").read_bytes())
        self.git("init", "-q", "-b", "main")
        self.commit("first", "2026-01-01T00:00:00Z")

    @property
    def to(self) -> str:
        return f"{self.edge}/{self.name}:sm70"

    def write(self, name: str, data: bytes) -> None:
        (self.recipe / name).write_bytes(data)

    def git(self, *words: str, **environ: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.folder), *words],
            env={**os.environ, **self.environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, message: str, date: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", message, "--allow-empty", GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        return self.git("rev-parse", "HEAD")

    def pipeline(self, *words: str, **environ: str) -> Result:
        return self.run("pipeline", self.image, "--to", self.to, "--json", *words, **environ)

    def report(self, *words: str, code: int = 0, **environ: str) -> Any:
        """The JSON report of a run that must end with ``code``."""
        result = self.pipeline(*words, **environ)
        assert result.code == code, result.err + result.out
        return result.json
