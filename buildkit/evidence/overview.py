"""What is attached to an image, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from buildkit.deploy.evidence import EVIDENCE_TYPE, Evidence
from buildkit.errors import FormatError, one_line
from buildkit.evidence.artifact import Attached, rfc3339
from buildkit.evidence.store import list_artifacts, read_evidence
from buildkit.model import Reference
from buildkit.registry import RegistryClient
from buildkit.units import format_size

MOST_EVIDENCE = 20
"""Evidence documents that are read for their verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """``evidence`` is the newest that can be read; ``verdicts`` those of each evidence artifact, by its digest;
    ``problems`` what could not be read, one line each."""

    image: Reference
    artifacts: tuple[Attached, ...]
    evidence: Evidence | None
    verdicts: Mapping[str, Mapping[str, str]]
    problems: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[str, ...]:
        """The steps that the newest evidence says the image failed."""
        verdicts = self.evidence.verdicts if self.evidence is not None else {}
        return tuple(step for step, verdict in verdicts.items() if verdict == "fail")

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": bool(self.artifacts) and not self.failed,
            "schema": "buildkit/attached/1",
            "image": str(self.image),
            "evidence": self.evidence.to_json() if self.evidence is not None else None,
            "artifacts": [
                {
                    "kind": artifact.name,
                    "artifactType": artifact.kind,
                    "created": rfc3339(artifact.created) if artifact.created else None,
                    "digest": str(artifact.digest),
                    "size": artifact.size,
                    "files": [
                        {"name": name, "mediaType": d.media_type, "digest": str(d.digest), "size": d.size}
                        for name, d in artifact.files
                    ],
                    "verdicts": dict(self.verdicts[str(artifact.digest)])
                    if str(artifact.digest) in self.verdicts
                    else None,
                }
                for artifact in self.artifacts
            ],
            "problems": list(self.problems),
        }

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """kind, created, size, digest, verdicts or files."""
        return [
            (
                one_line(artifact.name, 60),
                artifact.created.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if artifact.created else "-",
                format_size(artifact.size),
                artifact.digest.short,
                self._about(artifact),
            )
            for artifact in self.artifacts
        ]

    def lines(self) -> list[str]:
        """What the table does not say: the newest evidence's verdicts with their reasons, and what is missing."""
        out = []
        if not self.artifacts:
            out.append(f"{self.image}: nothing is attached to this image")
        elif self.evidence is None:
            out.append(f"{self.image}: no evidence is attached that says what was checked")
        else:
            out.append(f"newest evidence, of {rfc3339(self.evidence.created)}:")
            for step, verdict in self.evidence.verdicts.items():
                reason = self.evidence.reasons.get(step)
                out.append(f"  {step}: {_WORDS[verdict]}" + (f" ({one_line(reason, 200)})" if reason else ""))
            if self.evidence.architectures:
                out.append(f"  proven for: {one_line(', '.join(self.evidence.architectures), 200)}")
        return [*out, *(f"problem: {problem}" for problem in self.problems)]

    def _about(self, artifact: Attached) -> str:
        verdicts = self.verdicts.get(str(artifact.digest))
        if verdicts is not None:
            return one_line(", ".join(f"{step} {_WORDS.get(v, v)}" for step, v in verdicts.items()), 200)
        return one_line(", ".join(name for name, _ in artifact.files), 200)


_WORDS: Mapping[str, str] = {"pass": "pass", "fail": "FAILED", "not-run": "NOT RUN"}


def overview(client: RegistryClient, image: Reference) -> Overview:
    """All that is attached to ``image`` (by digest), with the verdicts of its evidence. Raises RegistryError."""
    artifacts = list_artifacts(client, image)
    found: list[Evidence] = []
    verdicts: dict[str, Mapping[str, str]] = {}
    problems: list[str] = []
    for artifact in [a for a in artifacts if a.kind == EVIDENCE_TYPE][:MOST_EVIDENCE]:
        try:
            evidence = read_evidence(client, artifact)
        except FormatError as error:
            problems.append(error.message)
            continue
        if evidence is None:
            problems.append(f"{artifact.digest.short}: holds no evidence about this image")
            continue
        found.append(evidence)
        verdicts[str(artifact.digest)] = evidence.verdicts
    return Overview(
        image=image,
        artifacts=artifacts,
        evidence=max(found, key=lambda e: e.created, default=None),
        verdicts=verdicts,
        problems=tuple(problems),
    )
