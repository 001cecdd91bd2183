"""The pipeline as a story: the stages in their order, and a report that is saved after each of them.

A failed stage stops those behind it; only the evidence of the failure is still attached, where the image lies in the
registry already. A stage that could not be run (no GPU) stops them too, unless that is allowed; it is never taken for
one that passed. A run on another machine goes on from the report that is attached to the image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from buildkit import __version__
from buildkit.errors import BuildkitError, CancelledError
from buildkit.model import Digest
from buildkit.pipeline.stages import Job, Outcome, Stages, World
from buildkit.report import STAGES, Report, RunInfo, Stage

GATES = ("check", "smoke", "verify")
"""What must not have failed, in this run or an earlier one, before a tag moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """``error`` is what ended a stage, where it was no verdict about the image; ``blocked`` is the stage that could not
    be run and had to be."""

    report: Report
    error: BuildkitError | None = None
    blocked: str | None = None

    @property
    def exit_code(self) -> int:
        """0 done, 1 failed, 3 something is missing that was needed; or that of the error."""
        if self.error is not None:
            return self.error.exit_code
        if self.report.failed:
            return 1
        return 3 if self.blocked else 0


def run_pipeline(
    job: Job,
    world: World,
    *,
    stages: Sequence[str] = STAGES,
    earlier: Report | None = None,
    digest: Digest | None = None,
    allow_missing_gpu: bool = False,
    url: str | None = None,
    host: str | None = None,
    save: Callable[[Report], object] = lambda _: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    clock: Callable[[], float] = time.monotonic,
) -> PipelineResult:
    """Run ``stages``, which are some of ``STAGES`` in that order.

    ``earlier`` is the report to go on from and ``digest`` the image that it is about. ``url`` is the CI run's page and
    ``host`` the runner's name, for the report. ``save`` is called with the report after each stage. What goes wrong in
    a stage is in the report. Raises CancelledError, after saving.
    """
    begun = now()
    report = _begin(job, world, earlier, digest, begun).with_run(
        RunInfo(started=begun, host=host, stages=tuple(stages), url=url)
    )
    error: BuildkitError | None = None
    blocked: str | None = None
    stopped = ""
    with Stages(job, world, digest=digest) as work:
        for name in stages:
            started, since = now(), clock()
            try:
                outcome = _skipped(name, stopped, report) or _run(name, work, report, allow_missing_gpu)
            except (KeyboardInterrupt, CancelledError):
                stopped_at = Outcome(verdict="fail", reason="interrupted")
                save(_noted(report, work, name, stopped_at, started, clock() - since, now()))
                raise
            except BuildkitError as problem:
                error = error or problem
                outcome = Outcome(verdict="fail", reason=str(problem))
            error = error or outcome.error
            report = _noted(report, work, name, outcome, started, clock() - since, now())
            save(report)
            world.shown.say(f"{name}: {outcome.verdict}" + (f": {outcome.reason}" if outcome.reason else ""))
            if outcome.verdict == "fail":
                stopped = stopped or f"{name} failed"
            elif outcome.verdict == "not-run" and not allow_missing_gpu:
                blocked, stopped = blocked or name, stopped or f"{name} was not run"
        if "promote" in stages and "attach" in stages and not stopped:
            # Attached once more: the first one had to be there before the tag moved, and could not tell of that.
            try:
                work.attach(report)
            except BuildkitError as problem:
                error = problem
    return PipelineResult(report=report, error=error, blocked=blocked)


def _begin(job: Job, world: World, earlier: Report | None, digest: Digest | None, at: datetime) -> Report:
    if earlier is not None:
        return replace(earlier, digest=digest, target=job.repository.name)
    return Report(
        tool=f"buildkit {__version__}",
        name=job.recipe.name,
        started=at,
        finished=at,
        target=job.repository.name,
        digest=digest,
        limit=world.client.options.limit,
    )


def _skipped(name: str, stopped: str, report: Report) -> Outcome | None:
    """The outcome of a stage that is not run because of one before it; None for one that is."""
    if name == "attach" and report.digest is None and stopped:
        return Outcome(verdict="skipped", reason="nothing was pushed that it could be attached to")
    if stopped and name != "attach":
        return Outcome(verdict="skipped", reason=stopped)
    return None


def _run(name: str, work: Stages, report: Report, allow_missing_gpu: bool) -> Outcome:
    match name:
        case "preflight":
            return work.preflight()
        case "build":
            return work.build()
        case "check":
            return work.check()
        case "smoke":
            return work.smoke()
        case "split":
            return work.split()
        case "push":
            return work.push()
        case "verify":
            return work.verify()
        case "attach":
            return work.attach(report)
        case "promote":
            held = _held_back(report, allow_missing_gpu)
            return Outcome(verdict="fail", reason=held) if held else work.promote()
    raise AssertionError(name)


def _held_back(report: Report, allow_missing_gpu: bool) -> str:
    """Why no tag may move to this image; empty where one may."""
    if report.stage("check") is None:
        return "no tag moves to an image that was not checked: run the stage check"
    for name in GATES:
        stage = report.stage(name)
        if stage is None:
            continue
        if stage.verdict == "fail":
            return f"no tag moves to an image that failed {name}: {stage.reason}"
        if stage.verdict == "not-run" and not allow_missing_gpu:
            return f"no tag moves: {name} was not run ({stage.reason}); --allow-missing-gpu lets it pass, untested"
    return ""


def _noted(
    report: Report, work: Stages, name: str, outcome: Outcome, started: datetime, seconds: float, at: datetime
) -> Report:
    """The report with one more stage, and with what the work has found out about the image by now."""
    stage = Stage(
        name=name,
        verdict=outcome.verdict,
        reason=outcome.reason,
        started=started,
        seconds=seconds,
        data=outcome.data,
    )
    return replace(
        report.with_stage(stage),
        finished=at,
        revision=report.revision or work.revision,
        digest=work.digest or report.digest,
        tags=tuple(dict.fromkeys((*report.tags, *work.tags))),
        before=work.before or report.before,
        after=work.after if work.after is not None else report.after,
        timeline=work.world.shown.events or report.timeline,
    )
