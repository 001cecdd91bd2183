"""A push as a user runs it: the command line against Debian's registry, behind nginx with its limit of 100 MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from buildkit.stack import StackState


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class World:
    """One repository name, one cache and one state folder for one test."""

    def __init__(self, stack: StackState, folder: Path, name: str) -> None:
        self.registry = stack.registry
        self.edge = stack.edge
        self.folder = folder
        self.name = name
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("REGISTRY_", "GITHUB_"))},
            "BUILDKIT_CACHE_DIR": str(folder / "cache"),
            "BUILDKIT_STATE_DIR": str(folder / "state"),
            "BUILDKIT_STACK": str(folder / "no-stack"),
            "DOCKER_CONFIG": str(folder / "docker"),
            "PYTHONWARNINGS": "error",
        }

    @property
    def to(self) -> str:
        return f"{self.edge}/{self.name}:x"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "buildkit", *words]

    def run(self, *words: str, stdin: str = "", **environ: str) -> Result:
        done = subprocess.run(
            self.command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            env={**self.environ, **environ},
            cwd=self.folder,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def push(self, source: str, *words: str, **environ: str) -> Any:
        """A push that must work; its JSON report."""
        result = self.run("push", source, "--to", self.to, "--chunked", "--json", *words, **environ)
        assert result.code == 0, result.err + result.out
        return result.json

    def manifest(self, name: str | None = None, tag: str = "x") -> requests.Response:
        """Straight from the registry, by a client that is not ours."""
        accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
        url = f"http://{self.registry}/v2/{name or self.name}/manifests/{tag}"
        return requests.get(url, headers={"Accept": accept}, timeout=10)

    def blob(self, digest: str) -> bytes:
        return requests.get(f"http://{self.registry}/v2/{self.name}/blobs/{digest}", timeout=60).content
