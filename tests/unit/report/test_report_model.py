"""``report.json``: what goes out comes back, fits its schema, and what does not fit is refused with its place."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from support import reports

from buildkit.errors import FormatError
from buildkit.model import Digest
from buildkit.report import STAGES, Layer, Report, RunInfo, Stage, TimelineEvent

SCHEMA: dict[str, Any] = json.loads(resources.files("buildkit.report").joinpath("schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA, format_checker=FormatChecker())
SAMPLES = {
    make.__name__: make
    for make in (reports.good, reports.failed, reports.untested, reports.broken_at_once, reports.hostile)
}

texts = st.text(max_size=40)
sizes = st.none() | st.integers(0, 2**63 - 1)
digests = st.binary(max_size=4).map(Digest.of)
times = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)).map(
    lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)
)
seconds = st.integers(0, 10**9).map(lambda n: n / 1000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
layers = st.builds(
    Layer, label=texts, digest=st.none() | digests, size=sizes, tar_size=sizes, created_by=st.none() | texts
)
stages = st.builds(
    Stage,
    name=st.sampled_from([*STAGES, "other"]) | texts,
    verdict=st.sampled_from(["pass", "fail", "not-run", "skipped"]),
    reason=texts,
    started=st.none() | times,
    seconds=seconds,
    data=st.none() | st.dictionaries(st.text(max_size=5), json_values, max_size=3),
)
timeline_events = st.builds(
    TimelineEvent,
    at=seconds,
    blob=texts,
    event=st.sampled_from(["started", "acknowledged", "retrying", "restarted", "limit", "finished", "skipped"]),
    offset=sizes,
    size=sizes,
    sent=sizes,
    seconds=st.none() | seconds,
    text=texts,
)
runs = st.builds(
    RunInfo,
    started=times,
    host=st.none() | texts,
    stages=st.lists(texts, max_size=3).map(tuple),
    url=st.none() | texts,
)


@st.composite
def whole_reports(draw: st.DrawFn) -> Report:
    report = Report(
        tool=draw(texts),
        name=draw(texts),
        started=draw(times),
        finished=draw(times),
        revision=draw(st.none() | texts),
        target=draw(st.none() | texts),
        tags=tuple(draw(st.lists(texts, max_size=3))),
        digest=draw(st.none() | digests),
        limit=draw(sizes),
        before=tuple(draw(st.lists(layers, max_size=3))),
        after=draw(st.none() | st.lists(layers, max_size=3).map(tuple)),
        timeline=tuple(draw(st.lists(timeline_events, max_size=6))),
        runs=tuple(draw(st.lists(runs, max_size=2))),
    )
    for stage in draw(st.lists(stages, max_size=5)):
        report = report.with_stage(stage)
    return report


@given(whole_reports())
def test_what_is_written_fits_the_schema_and_comes_back(report: Report) -> None:
    raw = report.dump()
    VALIDATOR.validate(json.loads(raw))
    again = Report.parse(raw, where="report.json")
    assert again == report
    assert again.dump() == raw


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_fit_the_schema(name: str) -> None:
    report = SAMPLES[name]()
    VALIDATOR.validate(json.loads(report.dump()))
    assert Report.parse(report.dump(), where="report.json").dump() == report.dump()


def test_the_schema_is_one_and_describes_every_member() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    document = json.loads(reports.good().dump())
    for name, value in (
        ("", document),
        ("layers", document["layers"]),
        *((key, document[key][0]) for key in ("stages", "timeline", "runs")),
    ):
        described = SCHEMA if not name else SCHEMA["properties"][name]
        described = SCHEMA["$defs"][described["items"]["$ref"].split("/")[-1]] if "items" in described else described
        assert set(value) == set(described["properties"]) == set(described["required"]), name


def _members(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all members outside of ``data``, of each list only the first item."""
    out = []
    if isinstance(value, dict):
        for key, item in value.items():
            out.append((*path, key))
            if key != "data":
                out += _members(item, (*path, key))
    elif isinstance(value, list) and value:
        out += _members(value[0], (*path, 0))
    return out


DOCUMENT = json.loads(reports.good().dump())
DERIVED = {("verdict",), ("reason",), ("pull",), ("seconds",)}
"""Written for other readers; they follow from the rest."""


@pytest.mark.parametrize(
    "path", [p for p in _members(DOCUMENT) if p not in DERIVED], ids=lambda p: ".".join(map(str, p))
)
@pytest.mark.parametrize("wrong", [object, -1.5, True, [7], "\x00", {"a": 1}], ids=repr)
def test_what_is_not_right_is_refused_with_its_place(path: tuple[Any, ...], wrong: Any) -> None:
    """Either the value is one that the member may have, or the error names the member; never another exception."""
    document = json.loads(json.dumps(DOCUMENT))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if wrong is object:
        del parent[path[-1]]
    else:
        parent[path[-1]] = wrong
    outcome = _parse(json.dumps(document).encode())
    if isinstance(outcome, Report):
        VALIDATOR.validate(json.loads(outcome.dump()))
    else:
        place = next(str(key) for key in reversed(path) if isinstance(key, str))
        assert outcome.startswith("report.json: ")
        assert place in outcome
        assert "\n" not in outcome


def _parse(raw: bytes) -> Report | str:
    """The report, or the error's words."""
    try:
        return Report.parse(raw, where="report.json")
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b"null", b'{"schema": "buildkit/report/2"}', b'{"schema": 1}', b"\xff\xfe", b"[" * 100_000],
    ids=lambda raw: repr(raw[:20]),
)
def test_what_is_no_report_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"report\.json"):
        Report.parse(raw, where="report.json")


def test_two_stages_of_one_name_are_refused() -> None:
    document = json.loads(reports.failed().dump())
    document["stages"].append(document["stages"][0])
    with pytest.raises(FormatError, match="two stages"):
        Report.parse(json.dumps(document).encode(), where="report.json")


def test_members_that_are_not_known_are_ignored() -> None:
    document = json.loads(reports.good().dump())
    for part in (document, document["layers"], document["stages"][0], document["timeline"][0], document["runs"][0]):
        part["of a later version"] = {"a": [1]}
    VALIDATOR.validate(document)
    assert Report.parse(json.dumps(document).encode(), where="report.json") == reports.good()


def test_a_verdict_that_was_written_is_not_believed() -> None:
    document = json.loads(reports.failed().dump()) | {"verdict": "pass", "reason": "all is well"}
    assert Report.parse(json.dumps(document).encode(), where="report.json").verdict == "fail"


def test_any_failed_stage_fails_the_whole() -> None:
    for name in (*STAGES, "other"):
        report = reports.good().with_stage(Stage(name=name, verdict="fail", reason="why\nnot"))
        assert (report.verdict, report.reason) == ("fail", f"{name} failed: why not")


@pytest.mark.parametrize("name", ["check", "smoke"])
@pytest.mark.parametrize("verdict", ["not-run", "skipped", None])
def test_without_check_and_smoke_nothing_passes(name: str, verdict: Any) -> None:
    report = reports.begun()
    for stage in reports.good().stages:
        if stage.name != name:
            report = report.with_stage(stage)
    if verdict:
        report = report.with_stage(Stage(name=name, verdict=verdict, reason="no GPU"))
    assert report.verdict == "not-run"
    assert report.reason.startswith(f"{name} was not run")


def test_a_failure_weighs_more_than_what_was_not_run() -> None:
    assert reports.untested().with_stage(Stage(name="push", verdict="fail")).verdict == "fail"


def test_a_stage_that_is_run_again_takes_the_place_of_the_first() -> None:
    report = reports.untested().with_stage(Stage(name="smoke", verdict="pass"))
    assert report.verdict == "pass"
    assert [stage.name for stage in report.stages] == list(STAGES)


def test_stages_stand_in_their_order_whatever_the_order_of_the_runs() -> None:
    report = reports.begun()
    for stage in reversed(reports.good().stages):
        report = report.with_stage(stage)
    assert [stage.name for stage in report.stages] == list(STAGES)


def test_times_are_written_in_utc() -> None:
    report = reports.begun(started=datetime(2026, 7, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))))
    assert report.to_json()["started"] == "2026-07-01T00:03:00.000Z"


def test_times_without_offset_are_refused() -> None:
    document = json.loads(reports.good().dump()) | {"started": "2026-07-01T00:03:00"}
    with pytest.raises(FormatError, match="started"):
        Report.parse(json.dumps(document).encode(), where="report.json")


def test_what_json_cannot_hold_does_not_stop_a_report_from_being_written() -> None:
    data = {"error": float("inf"), "list": (float("nan"),), "name": "\ud800"}
    report = reports.begun().with_stage(Stage(name="smoke", verdict="fail", data=data, seconds=float("nan")))
    stage = Report.parse(report.dump(), where="report.json").stages[0]
    assert stage.data == {"error": "inf", "list": ["nan"], "name": "\ud800"}
    assert stage.seconds == 0


def test_data_without_a_bottom_is_refused_and_not_carried_on() -> None:
    document = reports.good().to_json()
    data: dict[str, Any] = {}
    for _ in range(900):  # more than json.dumps can write, less than json.loads can read
        data = {"a": data}
    document["stages"][0]["data"] = data
    with pytest.raises(FormatError, match=r"stages\[0\]\.data: is nested more than"):
        Report.parse(json.dumps(document).encode(), where="report")
