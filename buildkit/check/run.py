"""The check, as a story: look at every file, judge it by the policy, say what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from buildkit.check.knownbad import Project, RevisionState, judge_revisions, load_known_bad
from buildkit.check.libraries import CudaVersion, Needs, cuda_needs, cuda_versions, library_names, needed_runtimes
from buildkit.check.offline import StartAnalysis, analyse, parse_environment
from buildkit.check.report import CheckReport, FileReport, Finding, Level, architectures, describe_unit, order_findings
from buildkit.check.sources import OpenImage, Walked, walk
from buildkit.check.tree import File, Want
from buildkit.check.walk import Progress
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Policy, Verdict, judge

if TYPE_CHECKING:
    from buildkit.check.start import StartProof
    from buildkit.image.source import ImageSource

SHOWN_PROBLEMS = 3


def run_check(
    source: str | Path | ImageSource,
    policy: Policy | None = None,
    *,
    kernels: Iterable[str] = (),
    open_image: OpenImage | None = None,
    known_bad: tuple[Project, ...] | None = None,
    prove: Callable[[], StartProof] | None = None,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CheckReport:
    """Check an image, a folder, a wheel or a file against a policy.

    ``source``: a path, or an image: open, or by the text that ``open_image`` takes (default:
    ``buildkit.image.transports.open_source``). A text that names an existing path is that path. ``kernels`` are globs
    of kernels to list; ``prove`` starts the image (``check --run``), last. ``progress`` is told the bytes read.

    Raises NotFoundError or UsageError for a source that is not there or no source at all, and ImageError for an image
    whose content is corrupt. What is wrong *in* the source is in the report.
    """
    begun = clock()
    policy = policy or Policy()
    patterns = tuple(kernels)
    projects = load_known_bad().projects if known_bad is None else known_bad
    walked = walk(source, Want(kernels=patterns), open_image=open_image, progress=progress)
    report = _report(walked, policy, projects)
    findings = list(report.findings)
    proof = prove() if prove is not None else None
    if proof is not None and not proof.ok:
        findings.append(Finding(level="violation", rule="start", path="", message=f"does not start: {proof.message}"))
    if patterns and not any(f.kernels for f in report.files):
        findings.append(
            Finding(level="warning", rule="kernels", path="", message=f"no kernel matches {', '.join(patterns)}")
        )
    return replace(
        report,
        findings=order_findings(findings),
        proof=proof,
        kernel_patterns=patterns,
        seconds=clock() - begun,
    )


def _report(walked: Walked, policy: Policy, projects: tuple[Project, ...]) -> CheckReport:
    """Judge what a walk has found."""
    tree = walked.tree
    runtime = walked.config.runtime if walked.config is not None else {}
    labels = walked.config.labels if walked.config is not None else {}
    image = walked.config is not None
    names = library_names(tree)
    reports = sorted((_judged(f, policy, names) for f in tree.scanned()), key=_worst_first)
    versions = cuda_versions(tree, parse_environment(runtime.get("Env")), labels)
    revisions = tuple(judge_revisions(projects, labels, tree)) if image else ()
    start = analyse(runtime, tree) if image else None
    findings = [finding for report in reports for finding in _file_findings(report, policy, image=image)]
    findings += [Finding(level="warning", rule="read", path="", message=problem) for problem in tree.problems]
    if tree.skipped_text:
        message = f"{tree.skipped_text} scripts were left unread: too many of them"
        findings.append(Finding(level="warning", rule="read", path="", message=message))
    findings += _runtime_findings(reports, versions, policy)
    for revision in revisions:
        if revision.state is not RevisionState.GOOD:
            bad = revision.state is RevisionState.BAD
            shown = f" revision {revision.revision[:12]}" if revision.revision else ""
            findings.append(
                Finding(
                    level="violation" if bad else "warning",
                    rule="known-bad",
                    path=revision.where,
                    message=f"{revision.project}{shown}: {'' if bad else 'unknown, '}{revision.message}",
                )
            )
    if start is not None:
        findings += _start_findings(start, policy)
    listed = [
        r for r in reports if r.scan.loadable or r.scan.problems or r.scan.units or r.needs != Needs() or r.kernels
    ]
    return CheckReport(
        source=walked.name,
        kind=walked.kind,
        image_id=str(walked.config.digest) if walked.config is not None else None,
        policy=policy,
        files=tuple(listed),
        findings=order_findings(findings),
        looked_at=len(reports),
        paths=len(tree.paths),
        versions=versions,
        revisions=revisions,
        start=start,
    )


def _judged(entry: File, policy: Policy, names: frozenset[str]) -> FileReport:
    assert entry.scan is not None
    judgements = tuple(judge(entry.scan, arch) for arch in policy.require)
    excuses: list[tuple[Arch, str]] = []
    for judgement in judgements:
        reason = policy.excuse(entry.path, judgement.verdict)
        if reason is not None:
            excuses.append((judgement.arch, reason))
    return FileReport(
        path=entry.path,
        size=entry.size,
        layer=entry.layer,
        scan=entry.scan,
        judgements=judgements,
        excuses=tuple(excuses),
        needs=cuda_needs(entry.scan.needed, names),
        kernels=entry.kernels,
    )


def _worst_first(report: FileReport) -> tuple[bool, int, str]:
    return (report.excused, report.verdict.severity, report.path)


def _file_findings(report: FileReport, policy: Policy, *, image: bool) -> Iterator[Finding]:
    excused = dict(report.excuses)
    for judgement in report.judgements:
        if policy.accepts(judgement.verdict):
            continue
        if judgement.arch in excused:
            yield Finding(
                level="note",
                rule="cuda.require",
                path=report.path,
                message=f"{judgement.arch}: {judgement.verdict}, accepted: {excused[judgement.arch]}",
            )
        elif judgement.verdict is not Verdict.NOT_UNDERSTOOD:
            yield Finding(
                level="violation",
                rule="cuda.require",
                path=report.path,
                message=_verdict_message(report, judgement.arch),
            )
    problems = report.scan.problems
    if problems:
        accepted = any(e.matches(report.path) for e in policy.exceptions)
        # Without a requirement there is nothing that an unread part could violate; still it is said.
        level: Level = "note" if accepted else "violation" if policy.require else "warning"
        said = [f"at byte {p.offset}: {p.message}" for p in problems[:SHOWN_PROBLEMS]]
        if len(problems) > SHOWN_PROBLEMS:
            said.append(f"and {len(problems) - SHOWN_PROBLEMS} more")
        yield Finding(level=level, rule="not understood", path=report.path, message="; ".join(said))
    if report.needs.missing:
        yield Finding(
            level="warning" if image else "note",
            rule="libraries",
            path=report.path,
            message=f"needs {', '.join(report.needs.missing)}, which {'the image lacks' if image else 'is not here'}",
        )


def _runtime_findings(
    reports: Iterable[FileReport], versions: Iterable[CudaVersion], policy: Policy
) -> Iterator[Finding]:
    """Versions outside ``cuda.runtime``: carried by the source, or asked for by a program in it."""
    limits = policy.runtime
    if limits is None:
        return
    found = [(v.where, f"{v.component} is CUDA {v.text}", v.version) for v in versions]
    for report in reports:
        for need in needed_runtimes(report.scan.needed):
            found.append((report.path, f"needs {need.where}, which is CUDA {need.text}", need.version))
    for where, message, version in found:
        if version not in limits and not any(e.matches(where) for e in policy.exceptions):
            yield Finding(
                level="violation",
                rule="cuda.runtime",
                path=where,
                message=f"{message}, and the policy asks for {limits}",
            )


def _verdict_message(report: FileReport, arch: Arch) -> str:
    judgement = next(j for j in report.judgements if j.arch == arch)
    match judgement.verdict:
        case Verdict.PARTIAL:
            some = "; ".join(describe_unit(u) for u in judgement.lacking[:2])
            more = len(judgement.lacking) - 2
            return (
                f"{len(judgement.lacking)} of {judgement.total} units of code have nothing for {arch}: {some}"
                + (f"; and {more} more" if more > 0 else "")
                + ". Calls into them fail with 'no kernel image is available'"
            )
        case Verdict.MISSING:
            return f"has no code for {arch} ({_have(report)}): its first kernel fails"
        case Verdict.JIT:
            return f"runs on {arch} only after the driver has compiled its PTX, and the policy asks for machine code"
        case _:
            return f"{arch}: {judgement.verdict}"


def _have(report: FileReport) -> str:
    text = architectures(report.scan)
    return text if len(text) <= 120 else text[:119] + "…"


def _start_findings(start: StartAnalysis, policy: Policy) -> Iterator[Finding]:
    for found in start.findings:
        reason = next((e.reason for e in policy.start_exceptions if e.matches(found.path)), None)
        level = found.level if policy.offline or found.level == "note" else "warning"
        place = f"{found.path}:{found.line}" if found.line else found.path
        yield Finding(
            level="note" if reason else level,
            rule="offline start",
            path=place,
            message=f"{found.what}: {found.text}" + (f" (accepted: {reason})" if reason else ""),
        )
    for requirement in start.requirements:
        have = f"{requirement.installed} is installed" if requirement.installed else "is not installed"
        yield Finding(
            level="warning",
            rule="requirements",
            path=requirement.path,
            message=f"{requirement.name}{requirement.wanted}: {have}",
        )
