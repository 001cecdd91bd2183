"""What the evidence says of an image, and what the rules of deploy.check make of it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.build import labels
from buildkit.deploy.evidence import Evidence, EvidencePolicy, judge
from buildkit.evidence.artifact import parse_time, rfc3339
from buildkit.model import Digest, Platform
from buildkit.pipeline.evidence import check_json, evidence_of, later
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
        Stage(name="check", verdict="pass", data={"policy": {"require": 7}, "revisions": [None, {"project": 1}]}),
        Stage(name="build", verdict="pass", data={"labels": []}),
    )
    evidence = evidence_of(
        Report(tool="t", name="app", started=AT, finished=AT, stages=stages), DIGEST, Platform(), known_bad=None
    )
    assert evidence.architectures == ()
    assert dict(evidence.revisions) == {}


def test_numbers_that_json_does_not_have_are_attached_as_text() -> None:
    attached = check_json(
        Report(
            tool="t",
            name="app",
            started=AT,
            finished=AT,
            stages=(Stage(name="check", verdict="pass", data={"seconds": math.nan, "files": [{"size": math.inf}]}),),
        )
    )
    assert attached is not None
    assert json.loads(attached) == {"seconds": "nan", "files": [{"size": "inf"}]}


@given(
    at=st.datetimes(timezones=st.just(UTC), max_value=datetime(9999, 12, 31)),
    others=st.lists(st.none() | st.datetimes(timezones=st.just(UTC), max_value=datetime(9999, 12, 31))),
)
def test_what_is_attached_last_is_the_newest_whatever_the_clocks_say(
    at: datetime, others: list[datetime | None]
) -> None:
    found = later(at, others)
    written = {parse_time(rfc3339(found)), *(parse_time(rfc3339(other)) for other in others if other is not None)}
    assert parse_time(rfc3339(found)) == max(moment for moment in written if moment is not None)
    assert all(rfc3339(found) != rfc3339(other) for other in others if other is not None)


def test_after_the_last_moment_of_all_nothing_comes() -> None:
    assert later(AT, [datetime.max.replace(tzinfo=UTC)]) == AT
