"""Geometry and facts: everything lies within its track, nothing is left out without being counted, nothing raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reports

from buildkit.report import Layer, Stage, TimelineEvent, facts, figures
from buildkit.report.figures import Limits, fold
from buildkit.report.scale import bytes_scale, log_scale, time_scale

LIMITS = Limits()


@given(st.floats(1, 1e15), st.floats(0, 1))
def test_a_share_of_the_bytes_is_the_same_share_of_the_width(end: float, share: float) -> None:
    scale = bytes_scale(end)
    assert scale.end >= end
    assert math.isclose(scale.at(share * scale.end), 100 * share, abs_tol=0.01)
    assert 2 <= len(scale.ticks) <= 6
    assert [t.at for t in scale.ticks] == sorted({t.at for t in scale.ticks})
    assert scale.ticks[0].label == "0"


@given(st.floats(0, 1e8))
def test_time_has_few_ticks_with_different_labels(longest: float) -> None:
    scale = time_scale(longest)
    labels = [tick.label for tick in scale.ticks]
    assert len(set(labels)) == len(labels) <= 7
    assert all(0 <= tick.at <= 100 for tick in scale.ticks)


@given(st.lists(st.floats(0, allow_nan=False), max_size=20))
def test_errors_keep_their_order_on_the_logarithmic_scale(values: list[float]) -> None:
    scale = log_scale(values)
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert all(0 <= tick.at <= 100 for tick in scale.ticks)
    assert len(scale.ticks) <= 11
    # the tolerance is between what is within it and what is not
    for value in values:
        if value <= 1:
            assert scale.at(value) <= scale.at(1.0)
        if value > 1:
            assert scale.at(value) >= scale.at(1.0)


@given(st.integers(0, 3000), st.integers(1, 50), st.integers(0, 500))
def test_a_fold_counts_everything_once(total: int, shown: int, folded: int) -> None:
    made = fold(range(total), Limits(shown=shown, folded=folded))
    assert made.total == total
    assert [*made.head, *made.more] == list(range(len(made.head) + len(made.more)))


def test_a_layer_above_the_limit_is_drawn_in_two_colours_that_meet_at_the_limit() -> None:
    figure = figures.layers_figure("x", reports.before(), reports.LIMIT, LIMITS)
    over = [row for row in figure.rows.head if row.over]
    assert len(over) == figure.over == 3
    for row in over:
        first, second = row.bars
        assert first.at + first.width == pytest.approx(figure.limit_at)
        assert second.at == figure.limit_at
    assert all(len(row.bars) == 1 for row in figure.rows.head if not row.over)


@given(st.lists(st.builds(Layer, label=st.text(max_size=5), size=st.none() | st.integers(0, 2**40)), max_size=80))
def test_bars_lie_within_the_track(layers: list[Layer]) -> None:
    for limit in (None, 0, 1, 10**8):
        figure = figures.layers_figure("x", layers, limit, LIMITS)
        assert figure.rows.total == len(layers)
        for row in (*figure.rows.head, *figure.rows.more):
            assert all(bar.at >= 0 and bar.at + bar.width <= 100.2 and bar.width >= 0 for bar in row.bars)


def test_the_matrix_has_the_worst_first_and_the_required_target_first() -> None:
    check = facts.check_of(reports.failed())
    assert check is not None
    matrix = figures.matrix(check, LIMITS)
    assert matrix.columns[0] == "sm_70"
    verdicts = [(row.file.verdict, bool(row.file.accepted)) for row in matrix.rows.head]
    assert verdicts[:5] == [
        ("missing", False), ("partial", False), ("partial", True), ("partial", True), ("native", False),
    ]  # fmt: skip
    assert matrix.rows.head[0].cells[0].kind == "none"
    assert matrix.rows.head[0].cells[0].required


def test_the_matrix_keeps_the_most_common_targets_and_names_the_rest() -> None:
    data = reports.check()
    data["files"] = [
        file | {"architectures": file["architectures"] + [{"target": f"lto_{50 + n}", "kind": "lto", "units": 1}]}
        for n, file in enumerate(data["files"])
    ]
    check = facts.check_of(reports.begun().with_stage(Stage(name="check", verdict="pass", data=data)))
    assert check is not None
    matrix = figures.matrix(check, LIMITS)
    assert {"sm_70", "sm_75", "sm_90", "compute_90"} <= set(matrix.columns)
    assert len(matrix.columns) == LIMITS.columns
    assert set(matrix.columns) | set(matrix.hidden) == set(check.targets)


def test_errors_within_the_tolerance_are_left_of_the_line_and_those_above_it_right() -> None:
    for report in (reports.good(), reports.failed()):
        smoke = facts.smoke_of(report)
        assert smoke is not None
        kernels = smoke.levels[0].kernels
        assert kernels is not None
        figure = figures.errors_figure(kernels, LIMITS)
        assert figure.rows.total == 20
        for row in figure.rows.head:
            assert any(mark.at > figure.limit_at for mark in row.marks) == (row.status == "fail")
            for mark in row.marks:
                assert ("above" in mark.kind) == (mark.at > figure.limit_at)


def test_a_case_without_tolerance_has_figures_and_no_mark() -> None:
    data = reports.smoke()
    for case in data["levels"][0]["kernel"]["cases"]:
        del case["tolerance"]
    smoke = facts.smoke_of(reports.begun().with_stage(Stage(name="smoke", verdict="pass", data=data)))
    assert smoke is not None
    assert smoke.levels[0].kernels is not None
    figure = figures.errors_figure(smoke.levels[0].kernels, LIMITS)
    assert figure.unplaced == 40
    assert not any(row.marks for row in figure.rows.head)
    assert figure.rows.head[0].figures[0].worst == "2.2e-07"


def test_the_timeline_shows_each_retry_restart_and_limit_at_its_time() -> None:
    report = reports.good()
    figure = figures.timeline_figure(report.timeline, LIMITS)
    assert figure is not None
    rows = {row.blob: row for row in (*figure.rows.head, *figure.rows.more)}
    assert figure.present == ("layer 1",)
    assert set(rows) == {e.blob for e in report.timeline} - {"layer 1"}
    for kind, name in (("retrying", "retry"), ("restarted", "restart"), ("limit", "limit"), ("resumed", "resume")):
        wanted = sorted(e.blob for e in report.timeline if e.event == kind)
        assert wanted == sorted(blob for blob, row in rows.items() for mark in row.marks if mark.kind == name)
        assert wanted, kind
    assert "1 retry, 1 restart" in rows["layer 22"].story
    begun = {e.blob: e.at for e in report.timeline if e.event == "started"}
    drawn = [*figure.rows.head, *figure.rows.more]
    assert [begun[row.blob] for row in drawn] == sorted(begun[row.blob] for row in drawn)


kinds = st.sampled_from(
    ["started", "acknowledged", "retrying", "resumed", "restarted", "limit", "finished", "failed", "skipped"]
)
moments = st.floats(0, 1e7)


@given(
    st.lists(
        st.builds(
            TimelineEvent,
            at=moments,
            blob=st.sampled_from(["a", "b", "c"]),
            event=kinds,
            size=st.none() | st.integers(0, 2**40),
            seconds=st.none() | moments,
        ),
        max_size=40,
    )
)
def test_any_order_of_events_is_drawn_within_the_track(events: list[TimelineEvent]) -> None:
    figure = figures.timeline_figure(events, Limits(marks=6))
    if figure is None:
        assert all(event.event == "skipped" for event in events)
        return
    for row in (*figure.rows.head, *figure.rows.more):
        assert len(row.bars) <= 7
        assert len(row.marks) <= 6
        assert all(bar.at >= 0 and bar.at + bar.width <= 100.01 for bar in row.bars)
        assert all(0 <= mark.at <= 100 for mark in row.marks)


def test_nothing_is_drawn_of_no_events() -> None:
    assert figures.timeline_figure((), LIMITS) is None


@pytest.mark.parametrize("strange", [None, 7, -1, 1e400, "text", "nan", [], [1], {}, {"a": 1}, True], ids=repr)
def test_strange_json_is_read_as_not_told(strange: Any) -> None:
    """Every member of every stage's JSON, in turn, replaced by something else."""
    for stage in reports.good().stages:
        for path in _paths(stage.data):
            data = _replaced(stage.data, path, strange)
            report = reports.begun().with_stage(Stage(name=stage.name, verdict="pass", data=data))
            known = facts.read(report)
            assert isinstance(known.warnings, tuple)
            assert isinstance(known.causes, tuple)
            if known.check:
                figures.matrix(known.check, LIMITS)
            for level in known.smoke.levels if known.smoke else ():
                if level.kernels:
                    figures.errors_figure(level.kernels, LIMITS)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            out += _paths(item, (*path, key))
    elif isinstance(value, list) and value:
        out += _paths(value[0], (*path, 0))
    return out


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: _replaced(value[path[0]], path[1:], new)}
    return [_replaced(value[0], path[1:], new), *value[1:]]
