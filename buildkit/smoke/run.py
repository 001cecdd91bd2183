"""The smoke test as a story: find what is tested, run the levels asked for, report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from buildkit.check import same_fatbins
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, EngineError, NotFoundError, UsageError
from buildkit.gdn import probe
from buildkit.gdn.compare import Verdict
from buildkit.gdn.contracts import CONTRACTS, Dtype
from buildkit.gdn.harness import run_kernel_level
from buildkit.image.source import ImageSource
from buildkit.recipe import SmokeServer
from buildkit.smoke.client import ASK_SECONDS, Completions
from buildkit.smoke.container import Started, cause_of, copy_out, serving
from buildkit.smoke.http import check_timeout
from buildkit.smoke.report import Level, LevelReport, SmokeReport
from buildkit.smoke.server import ServerReport, check_server

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is tested.

    ``image`` is a name or id in the engine. ``library`` is where the kernels' shared library lies: a path in the image,
    or, without an image, a file here. ``server`` says how the image's server is started; ``url`` is one that runs
    already, with the probe checkpoint. ``gpu``: whether the server needs one. ``revision`` is the kernels' source
    revision, where it is known.
    """

    name: str
    image: str | None = None
    library: str | None = None
    server: SmokeServer | None = None
    url: str | None = None
    gpu: bool = True
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOptions:
    """``levels`` in the order in which they run. ``dtype`` is what the server computes in; the kernels are tested in
    f32 and f16 in any case. ``contract`` is a name from ``gdn.contracts``, or ``auto``. ``ordinal`` of the GPU.
    ``timeout`` in seconds for one answer. ``same``: prove that the library's kernels are the server's."""

    levels: tuple[Level, ...] = ("kernel",)
    dtype: str = "f16"
    contract: str = "auto"
    ordinal: int = 0
    timeout: float = ASK_SECONDS
    allow_missing_gpu: bool = False
    same: bool = True


def run_smoke(
    subject: Subject,
    options: SmokeOptions,
    *,
    engine: Engine | None = None,
    open_image: Callable[[str], ImageSource] | None = None,
    say: Say = lambda _: None,
) -> SmokeReport:
    """Run the levels and report. What is wrong with the image is in the report.

    Raises UsageError where a level cannot be run for want of something to test or of an option that is known, and
    EngineError where the engine itself fails.
    """
    _check(subject, options, engine)
    levels = []
    for level in options.levels:
        begun = time.monotonic()
        if level == "kernel":
            report = _kernel_level(subject, options, engine, open_image, say)
        else:
            report = _server_level(subject, options, engine, say)
        levels.append(replace(report, seconds=time.monotonic() - begun))
    return SmokeReport(name=subject.name, levels=tuple(levels), missing_gpu_allowed=options.allow_missing_gpu)


def _check(subject: Subject, options: SmokeOptions, engine: Engine | None) -> None:
    if not options.levels or set(options.levels) - set(get_args(Level)):
        raise UsageError("no level to run", hint="--level kernel or --level server, or smoke.levels in the recipe")
    check_timeout(options.timeout)
    if options.ordinal < 0:
        raise UsageError(f"{options.ordinal} is not the number of a GPU", hint="0 is the first one")
    if options.dtype not in ("f32", "f16", "bf16"):
        raise UsageError(f"dtype {options.dtype!r} is not known", hint="f32, f16 or bf16")
    if options.contract != "auto" and options.contract not in CONTRACTS:
        raise UsageError(f"contract {options.contract!r} is not known", hint=f"auto, {', '.join(CONTRACTS)}")
    if "kernel" in options.levels and subject.library is None:
        raise UsageError(
            f"{subject.name} names no library with kernels", hint="--library PATH, or smoke.library in its recipe"
        )
    if "server" in options.levels and subject.url is None and (subject.image is None or subject.server is None):
        raise UsageError(
            f"it is not known how {subject.name} is started as a server", hint="--url, or smoke.server in its recipe"
        )
    needs = ("kernel" in options.levels and subject.image) or ("server" in options.levels and not subject.url)
    if needs and engine is None:
        raise UsageError(f"{subject.name} is an image, and no engine was given to take it from")


# Kernels -------------------------------------------------------------------------------------------------------------


def _kernel_level(
    subject: Subject,
    options: SmokeOptions,
    engine: Engine | None,
    open_image: Callable[[str], ImageSource] | None,
    say: Say,
) -> LevelReport:
    assert subject.library is not None
    if subject.image is None:
        return _kernels(Path(subject.library), subject, options, say)
    assert engine is not None
    with tempfile.TemporaryDirectory(prefix="buildkit-smoke-") as folder:
        library = Path(folder) / Path(subject.library).name
        say(f"taking {subject.library} out of {subject.image}")
        try:
            copy_out(engine, subject.image, subject.library, library)
        except NotFoundError as error:
            return LevelReport(level="kernel", verdict=Verdict.FAIL, reason=str(error))
        report = _kernels(library, subject, options, say)
        if not (options.same and subject.server is not None):
            return report
        say(f"looking for its kernels in {subject.image}")
        return _with_proof(report, subject, open_image)


def _kernels(library: Path, subject: Subject, options: SmokeOptions, say: Say) -> LevelReport:
    say(f"calling the kernels of {library.name}")
    dtypes: tuple[Dtype, ...] = ("f32", "f16")
    report = run_kernel_level(
        library, dtypes=dtypes, contract=options.contract, revision=subject.revision, ordinal=options.ordinal
    )
    return LevelReport(level="kernel", verdict=report.verdict, reason=report.reason, kernel=report)


def _with_proof(report: LevelReport, subject: Subject, open_image: Callable[[str], ImageSource] | None) -> LevelReport:
    """The report with the proof that the server has the library's kernels, and a FAIL where it has not."""
    assert subject.library is not None
    assert subject.image is not None
    try:
        proof = same_fatbins(subject.library, f"docker-daemon:{subject.image}", open_image=open_image)
    except (NotFoundError, UsageError) as error:
        return replace(report, verdict=Verdict.FAIL, reason=error.message, same=error.message)
    if proof.ok:
        return replace(report, same=proof.summary())
    return replace(
        report,
        verdict=Verdict.FAIL,
        reason=f"what was tested is not what is served: {proof.summary()}",
        same=proof.summary(),
    )


# Server --------------------------------------------------------------------------------------------------------------


def _server_level(subject: Subject, options: SmokeOptions, engine: Engine | None, say: Say) -> LevelReport:
    if subject.url is not None:
        client = Completions(subject.url, timeout=options.timeout)
        return _asked(check_server(client, options.dtype, say=say))
    assert engine is not None
    assert subject.image is not None
    assert subject.server is not None
    say(f"starting {subject.image} with the probe checkpoint")
    try:
        with serving(engine, subject.image, subject.server, probe.files(options.dtype), gpu=subject.gpu) as started:
            return _ask_started(started, subject.server, options, say)
    except EngineError as error:
        if cause_of(error.message) == "no gpu":
            return LevelReport(level="server", verdict=Verdict.NOT_RUN, reason=error.message)
        # No such program, a port in use: the image's or the machine's fault, told with the engine's words.
        return LevelReport(level="server", verdict=Verdict.FAIL, reason=error.message)


def _ask_started(started: Started, server: SmokeServer, options: SmokeOptions, say: Say) -> LevelReport:
    client = Completions(started.url, timeout=options.timeout)
    say(f"waiting for {server.health}")
    problem = client.wait(server.health, server.timeout, ended=started.ended)
    if problem:
        return _not_served(problem, started.output())
    report = check_server(client, options.dtype, say=say)
    if report.verdict is Verdict.FAIL and not report.explanations:
        ended = _ended(started)
        cause = cause_of(started.output())
        if cause == "cannot run":
            return _not_served(report.reason, started.output(), report)
        if ended:
            return replace(_asked(report), reason=f"{ended}; {report.reason}")
    return _asked(report)


def _ended(started: Started) -> str:
    try:
        return started.ended()
    except BuildkitError:
        return ""


def _not_served(problem: str, output: str, report: ServerReport | None = None) -> LevelReport:
    """Not healthy, or unable to compute: is it the image, or is there no GPU that could run it?"""
    cause = cause_of(output)
    verdict = {"no gpu": Verdict.NOT_RUN, "cannot run": Verdict.CANNOT_RUN}.get(cause, Verdict.FAIL)
    words = {"no gpu": "there is no GPU: ", "cannot run": "the GPU cannot run this code: "}.get(cause, "")
    return LevelReport(level="server", verdict=verdict, reason=words + problem, server=report)


def _asked(report: ServerReport) -> LevelReport:
    return LevelReport(level="server", verdict=report.verdict, reason=report.reason, server=report)
