"""What the evidence says of an image, and what the rules of deploy.check make of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from buildkit.build import labels
from buildkit.deploy.evidence import Evidence, EvidencePolicy, judge
from buildkit.model import Digest, Platform
from buildkit.pipeline.evidence import check_json, evidence_of
from buildkit.report import Report, Stage
from buildkit.report.model import Verdict

DIGEST = Digest.of(b"an image")
AT = datetime(2026, 7, 22, 10, tzinfo=UTC)
CHECK: dict[str, Any] = {
    "policy": {"require": ["sm_70"]},
    "revisions": [{"project": "attention.rs", "revision": "b" * 40}, {"project": "other", "revision": None}],
}


def report(**verdicts: Verdict) -> Report:
    data = {"check": CHECK, "build": {"labels": {labels.SOURCE_REVISION: "a" * 40}}}
    stages = tuple(
        Stage(name=name, verdict=verdict, reason=f"why {name}", data=data.get(name))
        for name, verdict in verdicts.items()
    )
    return Report(tool="t", name="app", started=AT, finished=AT, stages=stages)


def objections(evidence: Evidence) -> set[str]:
    return {objection.rule for objection in judge(evidence, DIGEST, EvidencePolicy(architecture="sm_70"))}


def test_a_proven_image_passes_the_rules() -> None:
    evidence = evidence_of(report(build="pass", check="pass", smoke="pass"), DIGEST, Platform(), known_bad=AT)
    assert evidence.architectures == ("sm_70",)
    assert evidence.known_bad == AT
    assert dict(evidence.revisions) == {"app": "a" * 40, "attention.rs": "b" * 40}
    assert objections(evidence) == set()


@pytest.mark.parametrize("smoke", ["fail", "not-run", "skipped", None])
def test_whatever_was_not_run_and_passed_is_objected_to(smoke: Verdict | None) -> None:
    verdicts: dict[str, Verdict] = {"check": "pass"}
    if smoke:
        verdicts["smoke"] = smoke
    evidence = evidence_of(report(**verdicts), DIGEST, Platform(), known_bad=AT)
    assert evidence.verdicts["smoke"] == ("fail" if smoke == "fail" else "not-run")
    assert objections(evidence) == {"evidence-failed"}
    if smoke:
        assert evidence.reasons["smoke"] == "why smoke"


def test_a_failed_check_proves_no_architecture() -> None:
    evidence = evidence_of(report(check="fail", smoke="pass"), DIGEST, Platform(), known_bad=AT)
    assert evidence.architectures == ()
    assert objections(evidence) == {"evidence-failed", "evidence-architecture"}


def test_without_a_check_no_list_of_bad_revisions_was_looked_at() -> None:
    evidence = evidence_of(report(build="pass"), DIGEST, Platform(), known_bad=AT)
    assert evidence.known_bad is None
    assert check_json(report(build="pass")) is None


def test_damaged_data_of_an_earlier_run_does_no_harm() -> None:
    stages = (
        Stage(name="check", verdict="pass", data={"policy": 7, "revisions": [None, {"project": 1}]}),
        Stage(name="build", verdict="pass", data={"labels": []}),
    )
    evidence = evidence_of(
        Report(tool="t", name="app", started=AT, finished=AT, stages=stages), DIGEST, Platform(), known_bad=None
    )
    assert evidence.architectures == ()
    assert dict(evidence.revisions) == {}
