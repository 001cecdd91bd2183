"""Whatever stages are run, and whatever becomes of them: exit code, report and what was done to the registry agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import AuthError, BuildkitError, CancelledError, StorageError
from buildkit.model import Digest, Reference
from buildkit.pipeline import STAGES, Job, Outcome, PipelineResult, World, run_pipeline
from buildkit.pipeline import run as story
from buildkit.pipeline.timeline import Recorder
from buildkit.progress import Quiet
from buildkit.recipe import load
from buildkit.registry import RegistryOptions
from buildkit.report import Report
from buildkit.report.model import Verdict
from buildkit.smoke import SmokeOptions
from buildkit.tasks.pipeline import _Saved

IMAGES = Path(__file__).parents[3] / "images"
PUSHED = Digest.of(b"pushed")
KNOWN = Digest.of(b"of an earlier run")
Script = dict[str, Outcome | BaseException]


@dataclass
class Registry:
    """What lies there: the reports that were attached, and whether the tag was moved."""

    attached: list[Report] = field(default_factory=list)
    moved: bool = False


class Scripted:
    """Stages that end as a script says; what passes acts on the registry."""

    script: Script
    registry: Registry

    def __init__(self, job: Job, world: World, *, digest: Digest | None = None) -> None:
        self.job, self.world, self.digest = job, world, digest
        self.tags: tuple[str, ...] = ()
        self.before: tuple[Any, ...] = ()
        self.after = None
        self.revision = "a" * 40

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Outcome]:
        if name not in STAGES:
            raise AttributeError(name)

        def stage(*given: Report) -> Outcome:
            end = self.script.get(name, Outcome(verdict="pass", reason=""))
            if isinstance(end, BaseException):
                raise end
            if end.verdict == "pass":
                match name:
                    case "push":
                        self.digest = PUSHED
                    case "promote":
                        if self.digest is None:
                            raise BuildkitError("nothing has been pushed")
                        self.registry.moved = True
                    case "attach":
                        if self.digest is None:
                            raise BuildkitError("nothing has been pushed")
                        self.registry.attached.append(given[0])
            return end

        return stage


def go(
    script: Script,
    stages: tuple[str, ...] = STAGES,
    *,
    levels: bool = False,
    kept: list[Report] | None = None,
    kind: type[Scripted] = Scripted,
    **more: Any,
) -> tuple[PipelineResult, Registry, list[Report]]:
    registry, saved = Registry(), [] if kept is None else kept
    scripted = type("Stages", (kind,), {"script": script, "registry": registry})
    recipe = load("cuda-probe", IMAGES)
    job = Job(
        recipe=recipe,
        repository=Reference.parse("registry.example/a/b", default_tag=None),
        smoke=SmokeOptions(levels=("kernel",) if levels else ()),
    )
    world = cast(
        World, SimpleNamespace(client=SimpleNamespace(options=RegistryOptions()), shown=Recorder(Quiet(), lambda: 0.0))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "Stages", scripted)
        result = run_pipeline(job, world, stages=stages, save=saved.append, clock=lambda: 0.0, **more)
    return result, registry, saved


_ENDS = st.one_of(
    st.builds(Outcome, verdict=st.sampled_from(["pass", "fail", "not-run", "skipped"]), reason=st.just("why")),
    st.builds(BuildkitError, st.just("went wrong")),
    st.builds(AuthError, st.just("denied")),
    st.builds(OSError, st.just(28), st.just("No space left on device"), st.just("/a/file")),
)


@given(
    script=st.dictionaries(st.sampled_from(STAGES), _ENDS, max_size=4),
    chosen=st.sets(st.sampled_from(STAGES), min_size=1),
    levels=st.booleans(),
    allowed=st.booleans(),
    resumed=st.booleans(),
)
def test_exit_code_report_and_registry_agree_for_every_subset_of_the_stages(
    script: Script, chosen: set[str], levels: bool, allowed: bool, resumed: bool
) -> None:
    stages = tuple(name for name in STAGES if name in chosen)
    result, registry, saved = go(
        script, stages, levels=levels, allow_missing_gpu=allowed, digest=KNOWN if resumed else None
    )
    report = result.report
    verdicts = {stage.name: stage.verdict for stage in report.stages}
    assert saved[-1] == report
    assert set(verdicts) == chosen
    assert (report.verdict == "fail") == ("fail" in verdicts.values())
    if result.exit_code == 0:
        assert report.verdict != "fail"
        assert allowed or "not-run" not in verdicts.values()
    else:
        assert report.failed or result.blocked
    if registry.moved:
        assert verdicts["check"] == "pass"
        assert "fail" not in [v for name, v in verdicts.items() if name not in ("promote", "attach")]
        assert not levels or allowed or verdicts.get("smoke") == "pass"
    if registry.attached and verdicts.get("promote") in ("pass", "fail"):
        known = registry.attached[-1].stage("promote")
        assert known is not None
        assert known.verdict == verdicts["promote"]


def test_a_promotion_that_failed_is_in_the_report_that_is_attached() -> None:
    result, registry, _ = go({"promote": AuthError("denied", hint="ask")})
    assert result.exit_code == 1
    assert result.report.reason == "promote failed: denied (ask)"
    assert registry.attached[-1].verdict == "fail"


def test_what_could_not_be_attached_after_the_promotion_is_a_failure_with_its_reason() -> None:
    class Full(Scripted):
        def __getattr__(self, name: str) -> Callable[..., Outcome]:
            if name == "attach" and self.registry.moved:
                raise AuthError("quota is used up")
            return super().__getattr__(name)

    result, registry, saved = go({}, kind=Full)
    assert registry.moved
    assert result.exit_code == 1
    assert result.report.reason == "attach failed: once more, after promote: quota is used up"
    assert saved[-1].verdict == "fail"


@pytest.mark.parametrize("verdict", ["skipped", "not-run"])
def test_an_earlier_report_whose_check_was_not_run_moves_no_tag(verdict: Verdict) -> None:
    earlier = go({"check": Outcome(verdict=verdict, reason="preflight failed")}, ("check",))[0].report
    result, registry, _ = go({}, ("promote",), earlier=earlier, digest=KNOWN)
    assert not registry.moved
    assert result.exit_code == 1
    assert "not checked" in result.report.reason


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), CancelledError("stop"), RuntimeError("a\nbug")])
@pytest.mark.parametrize("name", STAGES)
def test_whatever_ends_a_stage_is_in_the_report_before_it_ends_the_run(interruption: BaseException, name: str) -> None:
    saved: list[Report] = []
    with pytest.raises(type(interruption)):
        go({name: interruption}, kept=saved)
    assert saved[-1].failed is not None
    assert saved[-1].failed.name == name
    assert "\n" not in saved[-1].failed.reason


def test_nothing_of_an_earlier_run_stays_in_the_folder(tmp_path: Path) -> None:
    for name in ("report.json", "report.html", "summary.md"):
        (tmp_path / name).write_text("of an earlier run")
    (tmp_path / "notes.txt").write_text("mine")
    saved = _Saved(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    saved.save(go({})[0].report)
    assert (tmp_path / "report.json").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--report FOLDER"):
        _Saved(tmp_path / "file" / "below")
