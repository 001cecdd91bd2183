"""From observations to lines: what is a problem, what is not, and that each problem comes with a way out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from buildkit.doctor import judge
from buildkit.doctor.findings import Area, Finding, Level
from buildkit.doctor.report import DoctorReport, in_order
from buildkit.doctor.search import Interval
from buildkit.doctor.seen import (
    Connect,
    DiskSeen,
    EngineSeen,
    ImageSeen,
    LayerSeen,
    LimitSeen,
    SessionsSeen,
    ToolsSeen,
    WaySeen,
)
from buildkit.errors import ImageError, MissingComponentError, UsageError
from buildkit.registry.limits import LearnedLimit
from buildkit.registry.options import MB, RegistryOptions

OPTIONS = RegistryOptions()
GONE = MissingComponentError("no container engine answers", hint="start it")


def levels(lines: object) -> list[str]:
    return [str(line.level) for line in lines]  # type: ignore[attr-defined]


def test_an_engine_is_a_problem_only_where_it_is_needed() -> None:
    needed, other = (list(judge.engine(EngineSeen(needed=needed, error=GONE))) for needed in (True, False))
    assert [(line.level, line.missing, line.remedy) for line in needed] == [(Level.PROBLEM, True, "start it")]
    assert levels(other) == ["note"]


def test_a_gpu_is_missed_only_where_a_smoke_test_wants_one() -> None:
    seen = EngineSeen(needed=True, host="unix:///x", version="28.1")
    assert levels(judge.engine(seen)) == ["ok"]
    assert levels(judge.engine(replace(seen, wants_gpu=True))) == ["ok", "note"]
    assert levels(judge.engine(replace(seen, wants_gpu=True, gpu=("nvidia",)))) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("free", "needed", "level"),
    [(50, 40, "ok"), (39, 40, "problem"), (9, None, "warning"), (11, None, "ok"), (None, 40, "not-run")],
)
def test_disks(free: int | None, needed: int | None, level: str) -> None:
    gigabytes = [None if size is None else size * 10**9 for size in (free, needed)]
    seen = DiskSeen(place="/data", free=gigabytes[0], needed=gigabytes[1], for_what="building x")
    assert levels(judge.disk(seen)) == [level]


def test_tools_of_a_recipe() -> None:
    good = ToolsSeen(recipe="app", git=True, revision="ab" * 20, builder="buildx 0.20")
    assert levels(judge.tools(good)) == ["ok", "ok"]
    bad = ToolsSeen(
        recipe="app",
        builder_error=MissingComponentError("no BuildKit", hint="install it"),
        secret_error=UsageError("build secret token: not set"),
        missing=("debootstrap",),
    )
    lines = list(judge.tools(bad))
    assert levels(lines) == ["problem", "problem", "problem", "warning"]
    assert [line.missing for line in lines] == [True, False, True, False]


def test_one_dead_address_of_two_is_a_warning() -> None:
    dead = Connect(address="2001:db8::1", family="IPv6", error="network is unreachable")
    alive = Connect(address="192.0.2.1", family="IPv4")
    seen = WaySeen(origin="http://a.example", host="a.example", now=0.0, connects=(alive, dead))
    assert levels(judge.way(seen)) == ["ok", "warning", "ok"]
    assert levels(judge.way(replace(seen, connects=(dead,)))) == ["problem"]


LAYERS = (
    LayerSeen(label="layer 1/3", size=200 * MB),
    LayerSeen(label="layer 2/3", size=None, tar_size=5000 * MB),
    LayerSeen(label="layer 3/3", size=None, tar_size=150 * MB),
)


def test_docker_push_against_a_measured_a_learned_an_assumed_and_no_limit() -> None:
    image = ImageSeen(name="oci:x", layers=LAYERS)
    measured = LimitSeen(known=Interval(accepted=100 * MB, refused=100 * MB + 1), tries=(), stopped="settled")
    sure, doubtful = judge.docker_push(image, OPTIONS, measured, None)
    assert sure.level is Level.WARNING
    assert "layer 1/3 (200.0 MB), layer 2/3 (5.00 GB before compression)" in sure.seen
    assert "layer 3/3 (150.0 MB before compression)" in doubtful.seen
    learned = LearnedLimit(accepted=300 * MB, refused=600 * MB, at=0.0)
    lines = list(judge.docker_push(image, OPTIONS, None, learned))
    assert "layer 1/3" not in " ".join(line.seen for line in lines), "it fits"
    assert "learned" in lines[0].means
    assumed = list(judge.docker_push(image, OPTIONS, None, None))
    assert "not measured" in assumed[0].means
    free = list(judge.docker_push(image, replace(OPTIONS, limit=None), None, None))
    assert levels(free) == ["ok"]


def test_an_image_that_fits_and_one_that_cannot_be_read() -> None:
    small = ImageSeen(name="oci:x", layers=(LayerSeen(label="layer 1/1", size=5),))
    assert levels(judge.docker_push(small, OPTIONS, None, None)) == ["ok"]
    broken = ImageSeen(name="", error=ImageError("oci:x is no image"))
    assert levels(judge.docker_push(broken, OPTIONS, None, None)) == ["problem"]
    unknown = ImageSeen(name="x", layers=(LayerSeen(label="layer 1/1", size=None),))
    assert levels(judge.docker_push(unknown, OPTIONS, None, None)) == ["note"]


@pytest.mark.parametrize(
    ("accepted", "refused", "level"),
    [(100, 101, "ok"), (195, None, "ok"), (50, 51, "warning"), (50, None, "note"), (90, 100, "note")],
)
def test_limits_beside_the_chunk_that_pushes_use(accepted: int, refused: int | None, level: str) -> None:
    known = Interval(accepted=accepted * MB, refused=refused * MB if refused else None)
    seen = LimitSeen(known=known, tries=(), stopped="budget")
    assert levels(judge.limit(seen, OPTIONS)) == [level]


def test_a_way_that_lets_no_chunk_through_is_a_problem() -> None:
    seen = LimitSeen(known=Interval(accepted=9000, refused=20_000), tries=(), stopped="settled")
    assert levels(judge.limit(seen, OPTIONS)) == ["problem"]


def test_uploads_that_stay_are_told() -> None:
    assert not list(judge.sessions(SessionsSeen(opened=3, cancelled=3)))
    assert levels(judge.sessions(SessionsSeen(opened=3, cancelled=2, left=("405",)))) == ["warning"]


def _report(*lines: Finding) -> DoctorReport:
    return DoctorReport(subject="a/b:c", lines=in_order(lines))


def test_only_missing_is_about_all_problems() -> None:
    missing = Finding(area=Area.ENGINE, level=Level.PROBLEM, seen="no engine", missing=True)
    wrong = Finding(area=Area.WAY, level=Level.PROBLEM, seen="no way")
    fine = Finding(area=Area.RECIPE, level=Level.OK, seen="fine")
    assert _report(fine).ok
    assert not _report(fine).only_missing
    assert _report(missing, fine).only_missing
    assert not _report(missing, wrong).only_missing
    assert [line.area for line in _report(wrong, missing, fine).lines] == [Area.RECIPE, Area.ENGINE, Area.WAY]


def test_a_servers_words_are_no_markup_in_the_summary_page() -> None:
    evil = Finding(area=Area.WAY, level=Level.PROBLEM, seen="<img src=x> | `a` [b](http://c)", remedy="*do*")
    text = _report(evil).to_markdown()
    row = next(line for line in text.splitlines() if "img" in line)
    assert "<img" not in row.replace("\\<", "")
    assert row.replace("\\|", "").count("|") == 6
    assert "pushes will fail" in text


def test_the_json_says_what_the_lines_say() -> None:
    line = Finding(area=Area.LIMIT, level=Level.WARNING, seen="a", means="b", remedy="c")
    document = json.loads(json.dumps(_report(line).to_json()))
    assert document["schema"] == 1
    assert document["ok"] is True
    assert document["lines"] == [{"area": "limit", "level": "warning", "seen": "a", "means": "b", "do": "c"}]
