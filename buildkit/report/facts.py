"""What the stages' own JSON says, read for people: whatever is missing or strange in it counts as not told.

A report may come from an older version, from a stage that broke off, or have been made by other hands; it is shown
as far as it goes. So nothing here raises, whatever the JSON is. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from buildkit.cuda.policy import Verdict as FileVerdict
from buildkit.report.model import Report

Status = Literal["pass", "fail", "not-run", "skipped"]


@dataclass(frozen=True, slots=True)
class Node:
    """A JSON value of any kind, that can be asked for what it should hold."""

    value: Any

    def get(self, name: str) -> Node:
        return Node(self.value.get(name) if isinstance(self.value, Mapping) else None)

    def text(self, name: str) -> str:
        """Empty where there is none; numbers as they are written."""
        found = self.get(name).value
        if isinstance(found, str):
            return found
        return str(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else ""

    def number(self, name: str) -> float | None:
        """Also what JSON cannot hold and is written as a text: inf and nan."""
        found = self.get(name).value
        if found in ("inf", "-inf", "nan"):
            return float(found)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            return None
        try:
            return float(found)
        except OverflowError:
            return math.inf

    def count(self, name: str) -> int | None:
        """A whole number from 0 up, below 2**63."""
        found = self.get(name).value
        whole = isinstance(found, int) and not isinstance(found, bool)
        return found if whole and 0 <= found < 2**63 else None

    def yes(self, name: str) -> bool:
        return self.get(name).value is True

    def items(self, name: str) -> tuple[Node, ...]:
        """The objects of a list."""
        found = self.get(name).value
        return tuple(Node(item) for item in found if isinstance(item, Mapping)) if isinstance(found, list) else ()

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.get(name).value
        return tuple(item for item in found if isinstance(item, str)) if isinstance(found, list) else ()

    def pairs(self, name: str) -> tuple[tuple[str, Any], ...]:
        found = self.get(name).value
        return tuple((str(key), value) for key, value in found.items()) if isinstance(found, Mapping) else ()

    def __bool__(self) -> bool:
        return isinstance(self.value, Mapping)


def data_of(report: Report, stage: str) -> Node:
    """The stage's JSON; a Node that is False where there is none."""
    found = report.stage(stage)
    return Node(found.data if found else None)


# The check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: str
    rule: str
    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One file for one required architecture: ``native`` and ``jit`` units of ``total`` run there."""

    arch: str
    verdict: str
    native: int
    jit: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A file with CUDA code. ``units``: how many of ``total`` units hold code for each target (``sm_70``).

    ``accepted``: why a bad verdict is accepted; empty where it is not.
    """

    path: str
    size: int | None
    verdict: str
    total: int
    units: Mapping[str, int]
    judgements: tuple[Judgement, ...]
    accepted: str
    problems: tuple[str, ...]

    @property
    def rank(self) -> int:
        """0 is the worst. What is accepted comes after what is not, before what is good."""
        try:
            severity = FileVerdict(self.verdict).severity
        except ValueError:
            return 0
        return max(severity, FileVerdict.JIT.severity) if self.accepted else severity

    @property
    def status(self) -> Status:
        """``not-run`` where it runs, but not as it should."""
        if self.accepted or self.verdict == FileVerdict.JIT:
            return "not-run"
        return "pass" if self.verdict in (FileVerdict.NATIVE, FileVerdict.NOT_CUDA) else "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``files`` are those with code, worst first; ``targets`` all that any of them has, the required ones first."""

    ok: bool
    looked_at: int
    required: tuple[str, ...]
    findings: tuple[Finding, ...]
    files: tuple[CodeFile, ...]
    targets: tuple[str, ...]
    versions: tuple[str, ...]
    revisions: tuple[Finding, ...]

    def level(self, *levels: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level in levels)


def check_of(report: Report) -> Check | None:
    data = data_of(report, "check")
    if not data:
        return None
    files = sorted((f for f in map(_code_file, data.items("files")) if f.total or f.problems), key=lambda f: f.rank)
    required = tuple(dict.fromkeys(data.get("policy").texts("require")))
    held = {target for file in files for target in file.units}
    versions = {f"{v.text('component')} {v.text('version')}".strip() for v in data.items("cudaVersions")}
    return Check(
        ok=data.yes("ok"),
        looked_at=data.count("lookedAt") or 0,
        required=required,
        findings=tuple(
            Finding(level=f.text("level"), rule=f.text("rule"), path=f.text("path"), message=f.text("message"))
            for f in data.items("findings")
        ),
        files=tuple(files),
        targets=(*required, *sorted(held.difference(required), key=_target_order)),
        versions=tuple(sorted(versions - {""})),
        revisions=tuple(
            Finding(level=r.text("state"), rule=r.text("project"), path=r.text("where"), message=r.text("message"))
            for r in data.items("revisions")
        ),
    )


def _code_file(node: Node) -> CodeFile:
    judgements = tuple(
        Judgement(
            arch=j.text("arch"),
            verdict=j.text("verdict"),
            native=j.count("native") or 0,
            jit=j.count("jit") or 0,
            total=j.count("total") or 0,
        )
        for j in node.items("judgements")
    )
    accepted = (j.text("accepted") for j in node.items("judgements"))
    return CodeFile(
        path=node.text("path"),
        size=node.count("size"),
        verdict=node.text("verdict"),
        total=node.get("units").count("counted") or 0,
        units={a.text("target"): a.count("units") or 0 for a in node.items("architectures")},
        judgements=judgements,
        accepted="; ".join(dict.fromkeys(filter(None, accepted))),
        problems=tuple(p.text("message") for p in node.items("problems")),
    )


def _target_order(target: str) -> tuple[bool, int, str]:
    """Machine code before PTX and the rest, older before newer: sm_70, sm_80, sm_100, compute_70."""
    kind, _, number = target.partition("_")
    digits = "".join(c for c in number if c in "0123456789")
    return kind != "sm", int(digits[:9] or 0), target


# The smoke test ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output array against the reference; ``energy`` is Σx² of each band, got and wanted."""

    name: str
    verdict: str
    relative: float | None
    absolute: float | None
    sum: float | None
    want_sum: float | None
    absmax: float | None
    want_absmax: float | None
    relative_at: str
    energy: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """``tolerance``: the largest relative error that passes, None where it is not told."""

    stage: str
    case: str
    dtype: str
    verdict: str
    note: str
    faults: tuple[str, ...]
    tolerance: float | None
    outputs: tuple[Output, ...]

    @property
    def status(self) -> Status:
        return status_of(self.verdict)

    @property
    def worst(self) -> float | None:
        """The largest relative error; inf where any is not finite; None where nothing was compared."""
        errors = [output.relative for output in self.outputs if output.relative is not None]
        return max((math.inf if math.isnan(e) else e for e in errors), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    library: str
    digest: str
    device: str
    contract: str
    cases: tuple[KernelCase, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``identical`` of ``tokens`` tokens are the reference's; ``ties`` of those that differ are near-ties."""

    name: str
    text: str
    wanted: str
    verdict: str
    tokens: int
    identical: int
    ties: int
    first_wrong: int | None
    logprob_error: float | None
    note: str

    @property
    def status(self) -> Status:
        return status_of(self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    dtype: str
    model: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """``kernel`` or ``server`` level."""

    name: str
    verdict: str
    reason: str
    seconds: float
    same: str
    diagnosis: tuple[str, ...]
    kernels: Kernels | None
    server: Server | None

    @property
    def status(self) -> Status:
        return status_of(self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    verdict: str
    levels: tuple[Level, ...]
    missing_gpu_allowed: bool

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """What explains the failure, of all levels, each sentence once."""
        return tuple(dict.fromkeys(sentence for level in self.levels for sentence in level.diagnosis))


def status_of(verdict: str) -> Status:
    """Of a level, case, output or question. What is neither a pass nor a failure proves nothing."""
    return "pass" if verdict == "PASS" else "fail" if verdict == "FAIL" else "not-run"


def smoke_of(report: Report) -> Smoke | None:
    data = data_of(report, "smoke")
    if not data:
        return None
    return Smoke(
        verdict=data.text("verdict"),
        levels=tuple(map(_level, data.items("levels"))),
        missing_gpu_allowed=data.yes("missing_gpu_allowed"),
    )


def _level(node: Node) -> Level:
    kernel, server = node.get("kernel"), node.get("server")
    return Level(
        name=node.text("level"),
        verdict=node.text("verdict"),
        reason=node.text("reason"),
        seconds=_seconds(node),
        same=node.text("same"),
        diagnosis=node.texts("diagnosis"),
        kernels=_kernels(kernel) if kernel else None,
        server=_server(server) if server else None,
    )


def _kernels(node: Node) -> Kernels:
    device, choice = node.get("device"), node.get("contract")
    capability = device.get("capability").value
    parts = [device.text("name")]
    if isinstance(capability, list):
        parts.append(f"capability {'.'.join(map(str, capability))}")
    if device.text("driver"):
        parts.append(f"driver {device.text('driver')} (CUDA {device.text('cuda')})")
    contract = choice.get("contract").text("name")
    return Kernels(
        library=node.text("library"),
        digest=node.text("digest"),
        device=", ".join(parts) if device else "",
        contract=f"{contract} ({choice.text('reason')})" if contract else "",
        cases=tuple(map(_case, node.items("cases"))),
        absent=node.texts("absent"),
    )


def _case(node: Node) -> KernelCase:
    tolerance = node.number("tolerance")
    return KernelCase(
        stage=node.text("stage"),
        case=node.text("case"),
        dtype=node.text("dtype"),
        verdict=node.text("verdict"),
        note=node.text("note"),
        faults=node.texts("faults"),
        tolerance=tolerance if tolerance is not None and 0 < tolerance < math.inf else None,
        outputs=tuple(map(_output, node.items("outputs"))),
    )


def _output(node: Node) -> Output:
    at = node.get("relative_index").value
    energy = []
    for band, pair in node.pairs("energy"):
        if isinstance(pair, list) and len(pair) == 2:
            both = Node({"got": pair[0], "want": pair[1]})
            got, want = both.number("got"), both.number("want")
            if got is not None and want is not None:
                energy.append((band, got, want))
    return Output(
        name=node.text("name"),
        verdict=node.text("verdict"),
        relative=node.number("relative"),
        absolute=node.number("absolute"),
        sum=node.number("sum"),
        want_sum=node.number("want_sum"),
        absmax=node.number("absmax"),
        want_absmax=node.number("want_absmax"),
        relative_at=", ".join(map(str, at)) if isinstance(at, list) else "",
        energy=tuple(energy),
    )


def _server(node: Node) -> Server:
    return Server(
        url=node.text("url"),
        dtype=node.text("dtype"),
        model=node.text("model"),
        questions=tuple(
            Question(
                name=q.text("name"),
                text=q.text("text"),
                wanted=q.text("wanted"),
                verdict=q.text("verdict"),
                tokens=q.count("tokens") or 0,
                identical=q.count("identical") or 0,
                ties=q.count("ties") or 0,
                first_wrong=q.count("first_wrong"),
                logprob_error=q.number("logprob_error"),
                note=q.text("note"),
            )
            for q in node.items("questions")
        ),
    )


# Build, split, push, verify ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    image_id: str
    names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]
    backend: str
    why: str
    base: str
    revision: str
    dirty: bool


def build_of(report: Report) -> Build | None:
    data = data_of(report, "build")
    if not data:
        return None
    return Build(
        image_id=data.text("image_id"),
        names=data.texts("names"),
        labels=tuple(sorted((key, str(value)) for key, value in data.pairs("labels"))),
        backend=data.text("backend"),
        why=data.text("reason"),
        base=data.text("base"),
        revision=data.text("revision"),
        dirty=data.yes("dirty"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversized:
    """What is above the limit and cannot be divided: the chunked upload carries it, in ``requests`` requests."""

    what: str
    size: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    limit: int | None
    codec: str
    oversized: tuple[Oversized, ...]
    warnings: tuple[str, ...]


def split_of(report: Report) -> Split | None:
    data = data_of(report, "split")
    if not data:
        return None
    return Split(
        limit=data.count("limit"),
        codec=data.text("codec"),
        oversized=tuple(
            Oversized(what=o.text("what"), size=o.count("size") or 0, requests=o.count("requests") or 0)
            for o in data.items("chunked_upload")
        ),
        warnings=(*data.texts("warnings"), *(f"invalidated: {text}" for text in data.texts("invalidated"))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One blob that was sent (or found). ``sent`` and ``resent`` are bytes of request bodies."""

    label: str
    digest: str
    size: int
    outcome: str
    chunks: int
    sent: int
    resent: int
    resumed_at: int
    retries: tuple[str, ...]
    restarts: tuple[str, ...]
    limit_learned: int | None
    quirks: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    source: str
    method: str
    sent: int
    resent: int
    compressed: int
    seconds: float
    present: tuple[str, ...]
    uploads: tuple[Upload, ...]
    up_to_date: bool
    verified: str
    warnings: tuple[str, ...]

    @property
    def retries(self) -> int:
        return sum(len(upload.retries) for upload in self.uploads)

    @property
    def restarts(self) -> int:
        return sum(len(upload.restarts) for upload in self.uploads)

    @property
    def limit_learned(self) -> int | None:
        """The smallest limit that was met on the way, in bytes."""
        return min((u.limit_learned for u in self.uploads if u.limit_learned is not None), default=None)


def push_of(report: Report) -> Push | None:
    data = data_of(report, "push")
    if not data:
        return None
    return Push(
        source=data.text("source"),
        method=data.text("method"),
        sent=data.count("bytes_sent") or 0,
        resent=data.count("bytes_resent") or 0,
        compressed=data.count("bytes_compressed") or 0,
        seconds=_seconds(data),
        present=data.texts("present"),
        uploads=tuple(map(_upload, data.items("uploads"))),
        up_to_date=data.yes("up_to_date"),
        verified=data.text("verified"),
        warnings=data.texts("warnings"),
    )


def _upload(node: Node) -> Upload:
    return Upload(
        label=node.text("label"),
        digest=node.text("digest"),
        size=node.count("size") or 0,
        outcome=node.text("outcome"),
        chunks=node.count("chunks") or 0,
        sent=node.count("bytes_sent") or 0,
        resent=node.count("bytes_resent") or 0,
        resumed_at=node.count("resumed_at") or 0,
        retries=node.texts("retries"),
        restarts=node.texts("restarts"),
        limit_learned=node.count("limit_learned"),
        quirks=node.texts("quirks"),
        seconds=_seconds(node),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the registry gave back. ``bad``: blobs that are missing or wrong, with what is wrong; ``size`` in bytes."""

    blobs: int
    size: int
    deep: bool
    bad: tuple[tuple[str, str], ...]


def verify_of(report: Report) -> Verification | None:
    data = data_of(report, "verify")
    if not data:
        return None
    blobs = data.items("blobs")
    return Verification(
        blobs=len(blobs),
        size=data.count("size") or 0,
        deep=data.yes("deep"),
        bad=tuple((b.text("label"), b.text("detail")) for b in blobs if not b.yes("ok")),
    )


# All of it -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all stages say; None of a stage that left nothing."""

    build: Build | None
    check: Check | None
    smoke: Smoke | None
    split: Split | None
    push: Push | None
    verify: Verification | None

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Stage and text of everything that went well enough and that someone should know of."""
        out = []
        if self.build and self.build.dirty:
            out.append(("build", "built from a working tree with changes that are not committed"))
        for finding in self.check.level("warning") if self.check else ():
            out.append(("check", f"{finding.path}: {finding.message}" if finding.path else finding.message))
        out += [("split", text) for text in (self.split.warnings if self.split else ())]
        out += [("push", text) for text in (self.push.warnings if self.push else ())]
        return tuple(out)

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """Stage and sentence of what explains a failure, most telling first."""
        out = [("smoke", sentence) for sentence in (self.smoke.diagnosis if self.smoke else ())]
        for finding in self.check.level("violation") if self.check else ():
            out.append(("check", f"{finding.path}: {finding.message}" if finding.path else finding.message))
        out += [("verify", f"{label}: {detail}") for label, detail in (self.verify.bad if self.verify else ())]
        return tuple(out)


def read(report: Report) -> Facts:
    """All stages' JSON, read once."""
    return Facts(
        build=build_of(report),
        check=check_of(report),
        smoke=smoke_of(report),
        split=split_of(report),
        push=push_of(report),
        verify=verify_of(report),
    )


def _seconds(node: Node) -> float:
    found = node.number("seconds")
    return found if found is not None and 0 <= found < math.inf else 0.0
