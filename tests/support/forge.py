"""A repository on a forge, its runner and its registry: the world in which a workflow is run."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from buildkit.engine import Engine
from buildkit.errors import NotFoundError
from support.act import ROOT, Act, Run, commit

WORKFLOW = ".gitea/workflows/candle-vllm-sm70.yaml"
GOLDEN = ROOT / "tests" / "golden" / "cuda"
USER, TOKEN = "robot", f"tok-{secrets.token_hex(16)}"
IMAGE = "bk-act"
RECIPE = f"""\
name: candle-vllm
image: {IMAGE}
tags: [sm70, "sm70-{{short_revision}}"]
licenses: MIT
build: {{network: none, timeout: 10m}}
cuda: {{require: [sm_70]}}
start: {{command: [/bin/sh, -c, "echo ready"], expect: ready}}
smoke:
  levels: [server]
  server:  # what a loader says where there is no driver: NOT RUN, whatever this machine has
    command: [/bin/sh, -c, "echo 'libcuda.so.1: cannot open shared object file'; exit 127"]
push: {{target: "${{BUILDKIT_REGISTRY}}/candle-vllm", edge: cloudflare-free}}
"""
DOCKERFILE = 'FROM scratch\nADD root.tar /\nCOPY code.so /srv/libgdn.so\nCMD ["/bin/sh"]\n'
_ACCEPT = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, " \
    "application/vnd.docker.distribution.manifest.v2+json"  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Forge:
    """One repository of the forge, its owner's name in the registry, and its runner."""

    repository: Path
    owner: str
    registry: str
    act: Act

    def push(self, workflow: str = WORKFLOW, **options: Any) -> Run:
        """Run the push event. No secret may be anywhere in what comes out."""
        run = self.act.push(self.repository, workflow, **options)
        assert TOKEN not in run.text
        print(run.table)  # with a failure, and for whoever asks by -rP
        return run

    @property
    def recipe(self) -> Path:
        return self.repository / "images" / "candle-vllm"

    def commit(self, message: str, day: int) -> str:
        return commit(self.repository, message, f"2026-01-{day:02}T00:00:00Z")

    def checkout(self, revision: str) -> None:
        subprocess.run(["git", "-C", self.repository, "checkout", "-q", "-B", "main", revision], check=True)

    # What the registry holds, asked by a client that is not ours ------------------------------------------------------

    def get(self, path: str) -> requests.Response:
        return requests.get(
            f"http://{self.registry}/v2/{self.owner}/candle-vllm/{path}",
            auth=(USER, TOKEN),
            headers={"Accept": _ACCEPT},
            timeout=10,
        )

    def digest(self, tag: str) -> str | None:
        answer = self.get(f"manifests/{tag}")
        return answer.headers["Docker-Content-Digest"] if answer.ok else None

    @property
    def tags(self) -> set[str]:
        answer = self.get("tags/list")
        return set(answer.json()["tags"] or ()) if answer.ok else set()

    def labels(self, reference: str) -> Mapping[str, str]:
        config = self.get(f"manifests/{reference}").json()["config"]["digest"]
        labels: Mapping[str, str] = self.get(f"blobs/{config}").json()["config"]["Labels"]
        return labels

    def attached(self, digest: str) -> dict[str, Any]:
        """Artifact type → its first file, from the index that stands in where a registry lists no referrers."""
        index = self.get(f"manifests/{digest.replace(':', '-')}").json()
        found = {}
        for entry in sorted(index["manifests"], key=lambda e: e["annotations"]["org.opencontainers.image.created"]):
            manifest = self.get(f"manifests/{entry['digest']}").json()
            found[entry["artifactType"]] = json.loads(self.get(f"blobs/{manifest['layers'][0]['digest']}").content)
        return found

    def report(self, digest: str) -> Any:
        return self.attached(digest)["application/vnd.buildkit.report.v1+json"]


def stages(report: Any) -> dict[str, str]:
    return {stage["name"]: stage["verdict"] for stage in report["stages"]}


def remove_images(engine: Engine, owner: str = "") -> None:
    """What was built here under ``IMAGE``, and what was fetched from ``owner``'s repositories."""
    for image in engine.client.images.list():
        fetched = any(f"/{owner}/" in name for name in (*image.tags, *image.attrs["RepoDigests"])) if owner else False
        names = [*(tag for tag in image.tags if tag.startswith(f"{IMAGE}:")), *([str(image.id)] if fetched else [])]
        for name in names:
            with contextlib.suppress(NotFoundError):
                engine.remove(name)
