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
from buildkit.errors import BuildkitError, CancelledError, StorageError, one_line
from buildkit.model import Digest
from buildkit.pipeline.stages import Job, Outcome, Stages, World
from buildkit.report import STAGES, Layer, Report, RunInfo, Stage

GATES = ("check", "smoke", "verify")
"""What must not have failed, in this run or an earlier one, before a tag moves. ``check`` must have passed, and so must
``smoke`` where the recipe names levels, unless a missing GPU is allowed for."""


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
    a stage is in the report. Raises what interrupts it, and what is a mistake of ours, after saving.
    """
    begun = now()
    report = _begin(job, world, earlier, digest, begun).with_run(
        RunInfo(started=begun, host=host, stages=tuple(stages), url=url)
    )
    error: BuildkitError | None = None
    blocked: str | None = None
    stopped = ""
    save(report)  # what an earlier run has left there is not about this one
    done, started, since = 0, begun, clock()
    with Stages(job, world, digest=digest) as work:
        try:
            for name in stages:
                started, since = now(), clock()
                try:
                    outcome = _skipped(name, stopped, report) or _run(name, work, report, allow_missing_gpu)
                except CancelledError:
                    raise
                except (BuildkitError, OSError) as problem:
                    told = _told(problem)
                    error = error or told
                    outcome = Outcome(verdict="fail", reason=str(told))
                except Exception as problem:
                    text = one_line(f"internal error: {type(problem).__name__}: {problem}")
                    outcome = Outcome(verdict="fail", reason=text)
                    save(_noted(report, work, name, outcome, started, clock() - since, now()))
                    raise
                error = error or outcome.error
                report = _noted(report, work, name, outcome, started, clock() - since, now())
                done += 1
                save(report)
                world.shown.say(f"{name}: {outcome.verdict}" + (f": {outcome.reason}" if outcome.reason else ""))
                if outcome.verdict == "fail":
                    stopped = stopped or f"{name} failed"
                elif outcome.verdict == "not-run" and not allow_missing_gpu:
                    blocked, stopped = blocked or name, stopped or f"{name} was not run"
        except (KeyboardInterrupt, CancelledError):
            if done < len(stages):  # also between two stages: the next one is the one that was not done
                outcome = Outcome(verdict="fail", reason="interrupted")
                save(_noted(report, work, stages[done], outcome, started, clock() - since, now()))
            raise
        if _verdict(report, stages, "attach") == "pass" and _verdict(report, stages, "promote") in ("pass", "fail"):
            # Attached once more: the first one had to be there before a tag moved, and could not tell of that.
            started, since = now(), clock()
            try:
                work.attach(report)
            except CancelledError:
                raise
            except (BuildkitError, OSError) as problem:
                told = _told(problem)
                outcome = Outcome(verdict="fail", reason=f"once more, after promote: {told}")
                report = _noted(report, work, "attach", outcome, started, clock() - since, now())
                save(report)
                world.shown.say(f"attach: fail: {outcome.reason}")
                error = error or told
    return PipelineResult(report=report, error=error, blocked=blocked)


def _told(problem: BuildkitError | OSError) -> BuildkitError:
    """What is said of it in the report. A full disk may show anywhere, also where no module expects it."""
    if isinstance(problem, BuildkitError):
        return problem
    place = f"{problem.filename}: " if problem.filename else ""
    return StorageError(f"{place}{problem.strerror or problem}")


def _verdict(report: Report, stages: Sequence[str], name: str) -> str:
    """Of this run's stage; empty where this run has none of that name."""
    stage = report.stage(name) if name in stages else None
    return stage.verdict if stage is not None else ""


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
            held = _held_back(report, allow_missing_gpu, proving=bool(work.job.smoke.levels))
            return Outcome(verdict="fail", reason=held) if held else work.promote()
    raise AssertionError(name)


def _held_back(report: Report, allow_missing_gpu: bool, *, proving: bool) -> str:
    """Why no tag may move to this image; empty where one may. ``proving``: the recipe names what smoke is to run."""
    check = report.stage("check")
    if check is None or check.verdict in ("skipped", "not-run"):
        return "no tag moves to an image that was not checked: run the stage check"
    for name in GATES:
        stage = report.stage(name)
        verdict = stage.verdict if stage is not None else "skipped"
        reason = stage.reason if stage is not None else ""
        if verdict == "fail":
            return f"no tag moves to an image that failed {name}: {reason}"
        missing = verdict == "not-run" or (verdict == "skipped" and name == "smoke" and proving)
        if missing and not allow_missing_gpu:
            why = f" ({reason})" if reason else ""
            return f"no tag moves: {name} was not run{why}; --allow-missing-gpu lets it pass, untested"
    return ""


def _noted(
    report: Report, work: Stages, name: str, outcome: Outcome, started: datetime, seconds: float, at: datetime
) -> Report:
    """The report with one more stage, and with what the work has found out about the image by now."""
    mask = work.world.shown.masked

    def bare(layers: Sequence[Layer]) -> tuple[Layer, ...]:
        return tuple(replace(layer, created_by=mask(layer.created_by)) for layer in layers)

    stage = Stage(
        name=name,
        verdict=outcome.verdict,
        reason=mask(outcome.reason),
        started=started,
        seconds=seconds,
        data=mask(outcome.data),
    )
    return replace(
        report.with_stage(stage),
        finished=at,
        revision=report.revision or work.revision,
        digest=work.digest or report.digest,
        tags=tuple(dict.fromkeys((*report.tags, *work.tags))),
        before=bare(work.before) or report.before,
        after=bare(work.after) if work.after is not None else report.after,
        timeline=work.world.shown.events or report.timeline,
    )
