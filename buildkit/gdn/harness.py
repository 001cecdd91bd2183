"""The kernel level: run the cases against a shared library on a GPU, compare, and name the fault.

The library is loaded by ``buildkit.gdn.worker`` in a process of its own; when that dies, the call it was in is a FAIL
with the reason, and a new process does the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buildkit.errors import FormatError, NotFoundError, UsageError, one_line
from buildkit.gdn.cases import Case, all_cases, expected, inputs
from buildkit.gdn.compare import OutputFigures, Verdict, explains, figures, tolerance
from buildkit.gdn.contracts import CONTRACTS, LOG, OPTIONAL, Contract, Dtype, contract_of_revision, entry
from buildkit.gdn.driver import Device
from buildkit.gdn.faults import Fault
from buildkit.gdn.library import exports
from buildkit.gdn.worker import EXIT_CANNOT_LOAD, EXIT_NO_GPU

WORKER_TIMEOUT = 120.0
"""Seconds that one worker may take: a kernel that hangs is killed, with its process."""

MAX_RESTARTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case: the figures of each output, or why there are none. ``faults``: what explains a FAIL.

    ``tolerance``: the largest relative error that passes.
    """

    stage: str
    case: str
    dtype: str
    verdict: Verdict
    outputs: tuple[OutputFigures, ...] = ()
    note: str = ""
    faults: tuple[Fault, ...] = ()
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractChoice:
    """The contract in use, and why. ``certain``: declared, or of a known revision, or probed without doubt."""

    contract: Contract
    reason: str
    certain: bool = True
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The kernel level's outcome. ``digest`` is the library's sha256; ``absent`` optional entry points not exported."""

    library: str
    digest: str
    verdict: Verdict
    reason: str
    device: Device | None = None
    contract: ContractChoice | None = None
    cases: tuple[CaseResult, ...] = ()
    absent: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    case: Case
    contract: Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a call left: its arrays, or the ``problem`` (``missing`` names a symbol that is not exported)."""

    arrays: dict[str, NDArray[Any]] | None = None
    guards: dict[str, bool] | None = None
    problem: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    answers: tuple[_Answer, ...]
    device: Device | None
    no_gpu: str = ""
    cannot_load: str = ""
    output: str = ""


def run_kernel_level(
    library: Path,
    *,
    dtypes: Sequence[Dtype] = ("f32", "f16"),
    contract: str = "auto",
    revision: str | None = None,
    ordinal: int = 0,
    timeout: float = WORKER_TIMEOUT,
) -> KernelReport:
    """Run every case of ``dtypes`` on GPU ``ordinal``.

    ``contract`` is a name from ``contracts.CONTRACTS``, or ``auto``: the one of ``revision`` where that is known, else
    what probing finds. Without a GPU the report says NOT RUN of a library that could be run, and FAIL of another.
    Raises NotFoundError where there is no library, UsageError for a GPU's number that is none.
    """
    if ordinal < 0:
        raise UsageError(f"{ordinal} is not the number of a GPU", hint="0 is the first one")
    choice = declared(contract, revision)
    digest = _digest(library)
    report = KernelReport(library=one_line(library.name), digest=digest, verdict=Verdict.NOT_RUN, reason="")
    try:
        found = exports(library)
    except FormatError as error:
        reason = f"{library.name} cannot be loaded: {error.message}"
        return replace(report, verdict=Verdict.FAIL, reason=one_line(reason), contract=choice)
    missing, whole = _missing(found, choice, dtypes)
    if missing and not whole:
        return replace(report, verdict=Verdict.FAIL, reason=one_line(f"{library.name} {missing}"), contract=choice)
    if choice is None:
        choice, session = probe(library, dtypes, ordinal, timeout)
        if session.no_gpu:
            return _without_gpu(report, missing, session.no_gpu)
        if choice is None:
            return replace(report, verdict=Verdict.FAIL, reason=session.cannot_load, output=session.output)
    cases = [case for dtype in dtypes for case in all_cases(dtype)]
    session = _run(library, [_Call(case=case, contract=choice.contract) for case in cases], ordinal, timeout)
    if session.no_gpu:
        return _without_gpu(replace(report, contract=choice), missing, session.no_gpu)
    report = replace(report, device=session.device, contract=choice, output=session.output)
    if session.cannot_load:
        return replace(report, verdict=Verdict.FAIL, reason=session.cannot_load)
    results, absent = [], []
    for case, answer in zip(cases, session.answers, strict=True):
        if answer.missing and case.stage in OPTIONAL:
            absent.append(answer.missing)
            continue
        results.append(_judge(case, choice.contract, answer))
    report = replace(report, cases=tuple(results), absent=tuple(dict.fromkeys(absent)))
    ran = [result for result in results if result.outputs]
    if ran and all(_silent(result) for result in ran):
        refusal = _loadable(library, ordinal, timeout)
        if refusal:
            capability = ".".join(map(str, session.device.capability)) if session.device else "unknown"
            name = session.device.name if session.device else "the GPU"
            return replace(
                report,
                verdict=Verdict.CANNOT_RUN,
                reason=f"{name} (capability {capability}) cannot run this code: {refusal}",
            )
    return replace(report, **_conclude(results, choice))


def _digest(library: Path) -> str:
    if not library.is_file():  # a FIFO would be waited for, a device may have no end
        raise NotFoundError(f"no library at {library}")
    try:
        with library.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NotFoundError(f"no library at {library}: {error.strerror}") from error


def _missing(found: frozenset[str] | None, choice: ContractChoice | None, dtypes: Sequence[Dtype]) -> tuple[str, bool]:
    """Which entry points are not exported, in words, and whether any is: where the contract is not known yet, by the
    one that lacks least."""
    if found is None:
        return "", True
    contracts = (choice.contract,) if choice else tuple(CONTRACTS.values())
    wanted, lacking = min(
        (
            (names, [name for name in names if name not in found])
            for names in (symbols(contract, dtypes) for contract in contracts)
        ),
        key=lambda pair: len(pair[1]),
    )
    if not lacking:
        return "", True
    shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
    return f"lacks {len(lacking)} of {len(wanted)} entry points: {shown}", len(lacking) < len(wanted)


def _without_gpu(report: KernelReport, missing: str, no_gpu: str) -> KernelReport:
    """NOT RUN, unless the library is known to be wrong as it lies there."""
    if missing:
        return replace(
            report, verdict=Verdict.FAIL, reason=f"{report.library} {missing}; the rest was not run: {no_gpu}"
        )
    return replace(report, reason=no_gpu)


def _silent(result: CaseResult) -> bool:
    """Whether a call left nothing behind; states hold what they held before."""
    return all(output.unwritten == output.size for output in result.outputs if not output.name.endswith("state"))


def declared(contract: str, revision: str | None) -> ContractChoice | None:
    """The contract that is named or that the revision has; None where it must be probed. Raises NotFoundError."""
    if contract != "auto":
        if contract not in CONTRACTS:
            raise NotFoundError(f"no contract {contract!r}", hint=f"one of {', '.join(CONTRACTS)}, or auto")
        return ContractChoice(contract=CONTRACTS[contract], reason="declared")
    known = contract_of_revision(revision) if revision else None
    if known is not None:
        return ContractChoice(contract=known, reason=f"of source revision {revision}")
    return None


def _conclude(results: Sequence[CaseResult], choice: ContractChoice) -> dict[str, Any]:
    failed = [result for result in results if result.verdict is Verdict.FAIL]
    stages = list(dict.fromkeys(result.stage for result in failed))
    diagnosis = []
    for stage in stages:
        of_stage = [set(result.faults) for result in failed if result.stage == stage]
        common = set.intersection(*of_stage)
        for fault in Fault:
            if fault in common:
                diagnosis.append(f"{stage}: as with {fault.sentence}: {fault.consequence}")
    if failed:
        reason = f"{len(failed)} of {len(results)} cases fail, first in {stages[0]}"
        return {"verdict": Verdict.FAIL, "reason": reason, "diagnosis": tuple(diagnosis)}
    if not choice.certain:
        return {"verdict": Verdict.UNKNOWN, "reason": choice.doubt}
    return {"verdict": Verdict.PASS, "reason": f"{len(results)} of {len(results)} cases within tolerance"}


def _judge(case: Case, contract: Contract, answer: _Answer) -> CaseResult:
    result = CaseResult(
        stage=case.stage, case=case.name, dtype=case.dtype, verdict=Verdict.FAIL, tolerance=tolerance(case)
    )
    if answer.missing:
        return replace(result, note=f"no symbol {answer.missing}, which contract {contract.name!r} expects", outputs=())
    if answer.arrays is None:
        return replace(result, note=answer.problem)
    given = inputs(case, contract)
    want = expected(case, given, contract)
    assert want is not None
    guards = answer.guards or {}
    outputs = tuple(
        figures(case, name, answer.arrays[name], array, guard=guards.get(name, True)) for name, array in want.items()
    )
    note = "; ".join(filter(None, (output.note for output in outputs)))
    if all(output.verdict is Verdict.PASS for output in outputs):
        return replace(result, verdict=Verdict.PASS, outputs=outputs)
    found = []
    for fault in Fault:
        faulty = expected(case, given, contract, fault)
        if faulty is not None and not _same(faulty, want) and explains(case, answer.arrays, faulty):
            found.append(fault)
    return replace(result, outputs=outputs, note=note, faults=tuple(found))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


# Probing -------------------------------------------------------------------------------------------------------------


def probe(
    library: Path, dtypes: Sequence[Dtype], ordinal: int = 0, timeout: float = WORKER_TIMEOUT
) -> tuple[ContractChoice | None, _Session]:
    """Settle each question of the contract by calling with every answer and seeing which fits.

    Questions about types show in f16 only. Returns no choice where nothing could be run.
    """
    dtype: Dtype = "f16" if "f16" in dtypes else "f32"
    cases = {case.id: case for case in all_cases(dtype)}
    contract = replace(LOG, name="probed")
    types = ("io", "f32") if dtype == "f16" else ("io",)
    questions: tuple[tuple[str, dict[str, Sequence[object]]], ...] = (
        (f"conv_prefill/continued/{dtype}", {"conv_state": types, "conv_snapshots": (False, True)}),
        (f"gating/extremes/{dtype}", {"parameters": types, "gates": types, "writes": ("log", "decay")}),
        (
            f"recurrence/wide-value/{dtype}",
            {"recurrence_snapshots": (False, True), "state": ("vk", "kv"), "reads": ("log", "decay")},
        ),
    )
    doubts = []
    session = _Session(answers=(), device=None)
    for case_id, fields in questions:
        case = cases[case_id]
        candidates = [
            replace(contract, **dict(zip(fields, answers, strict=True)))  # type: ignore[arg-type]
            for answers in product(*fields.values())
        ]
        session = _run(library, [_Call(case=case, contract=c) for c in candidates], ordinal, timeout)
        if session.no_gpu or session.cannot_load:
            return None, session
        scored = [
            (_score(case, candidate, answer), -number, candidate)
            for number, (candidate, answer) in enumerate(zip(candidates, session.answers, strict=True))
        ]
        best, _, contract = max(scored, key=lambda item: item[:2])
        if best[0] < 2:
            doubts.append(f"no reading fits {case.stage} wholly")
    known = _known(contract, dtype)
    if known is None:
        # Such a library may be a new revision's. Or a known one's with a fault that looks like another way of calling:
        # kernels that exponentiate a decay once too often read the log decay without a flaw.
        doubts.append(f"no known revision is called like this ({contract.describe()}); name the contract to decide")
    elif contract.reads != contract.writes:
        doubts.append(
            f"gating writes the {_name(contract.writes)} and the recurrence reads the {_name(contract.reads)}: right "
            "only if the server's host code converts in between; name the source revision or the contract to decide"
        )
    return (
        ContractChoice(
            contract=contract,
            reason=f"probed: as {known.name}" if known else "probed",
            certain=known is not None and contract.reads == contract.writes,
            doubt="; ".join(doubts),
        ),
        session,
    )


def _known(contract: Contract, dtype: Dtype) -> Contract | None:
    """The known contract with these answers; in f32 those about types are left out, which cannot show there."""
    same: dict[str, Any] = {"name": contract.name}
    for known in CONTRACTS.values():
        if dtype == "f32":
            same |= {field: getattr(contract, field) for field in ("gates", "parameters", "conv_state")}
        if replace(known, **same) == contract:
            return known
    return None


def _name(convention: str) -> str:
    return "log decay" if convention == "log" else "decay itself"


def _score(case: Case, contract: Contract, answer: _Answer) -> tuple[int, float]:
    """2 where the answer fits, 1 where it fits with a known fault, 0 else; then the share of elements that fit."""
    if answer.arrays is None:
        return 0, -1.0
    result = _judge(case, contract, answer)
    rank = 2 if result.verdict is Verdict.PASS else 1 if result.faults else 0
    return rank, float(np.mean([output.within for output in result.outputs])) if result.outputs else -1.0


# Processes -----------------------------------------------------------------------------------------------------------


def _run(library: Path, calls: Sequence[_Call], ordinal: int, timeout: float) -> _Session:
    """All calls, in as many workers as it takes."""
    answers: dict[int, _Answer] = {}
    device: Device | None = None
    output = ""
    for _ in range(MAX_RESTARTS):
        left = [number for number in range(len(calls)) if number not in answers]
        if not left:
            break
        with tempfile.TemporaryDirectory(prefix="buildkit-gdn-") as folder:
            out = Path(folder)
            status, printed = _spawn(
                {
                    "library": str(library.resolve()),
                    "out": str(out),
                    "ordinal": ordinal,
                    "calls": [[n, calls[n].case.id, asdict(calls[n].contract)] for n in left],
                },
                timeout,
            )
            output = output or printed
            if status == EXIT_NO_GPU and (out / "no-gpu").exists():
                return _Session(answers=(), device=None, no_gpu=(out / "no-gpu").read_text(encoding="utf-8"))
            if status == EXIT_CANNOT_LOAD and (out / "cannot-load").exists():
                reason = (out / "cannot-load").read_text(encoding="utf-8")
                return _Session(answers=(), device=None, cannot_load=reason)
            if (out / "device.json").exists():
                device = _device(json.loads((out / "device.json").read_text(encoding="utf-8")))
            done = _collect(out, status, timeout)
            if not done:
                reason = f"the library cannot be loaded: {_ending(status, timeout)} before the first call"
                return _Session(answers=(), device=device, cannot_load=reason, output=output)
            answers.update(done)
    else:
        for number in range(len(calls)):
            answers.setdefault(number, _Answer(problem=f"not tried: the library ended {MAX_RESTARTS} workers"))
    return _Session(answers=tuple(answers[n] for n in range(len(calls))), device=device, output=output)


def _collect(out: Path, status: int | None, timeout: float) -> dict[int, _Answer]:
    answers: dict[int, _Answer] = {}
    begun: int | None = None
    for number, what, text in _journal(out / "journal"):
        if what == "begin":
            begun = number
            continue
        begun = None
        if what == "missing":
            answers[number] = _Answer(problem=f"no symbol {text}", missing=text)
        elif what == "error":
            answers[number] = _Answer(problem=text)
        else:
            with np.load(out / f"{number}.npz") as stored:
                arrays = {name: stored[name] for name in stored.files}
            guards = {
                name.removesuffix(":guard"): bool(held) for name, held in arrays.items() if name.endswith(":guard")
            }
            answers[number] = _Answer(
                arrays={name: array for name, array in arrays.items() if not name.endswith(":guard")}, guards=guards
            )
    if begun is not None:
        answers[begun] = _Answer(problem=f"the worker {_ending(status, timeout)} in this call")
    return answers


def _journal(path: Path) -> Iterable[tuple[int, str, str]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            number, what, text = json.loads(line)
        except ValueError:
            return  # cut off in the middle of a line: what was to be said there is not known
        yield number, what, text


def _ending(status: int | None, timeout: float) -> str:
    if status is None:
        return f"did not finish within {timeout:g} s and was ended"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _spawn(job: dict[str, Any], timeout: float) -> tuple[int | None, str]:
    """Exit status (negative: the signal; None: timed out) and what was printed, cut to one line."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "buildkit.gdn.worker"],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
        status: int | None
        try:
            process.communicate(json.dumps(job).encode(), timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            status = None
        printed.seek(0)
        return status, one_line(printed.read(4096).decode("utf-8", "replace"), limit=300)


def _loadable(library: Path, ordinal: int, timeout: float) -> str:
    with tempfile.TemporaryDirectory(prefix="buildkit-gdn-") as folder:
        job = {"library": str(library.resolve()), "out": folder, "ordinal": ordinal, "calls": [], "loadable": True}
        _spawn(job, timeout)
        answer = Path(folder) / "loadable"
        return answer.read_text(encoding="utf-8") if answer.exists() else ""


def _device(value: dict[str, Any]) -> Device:
    major, minor = value["capability"]
    return Device(name=value["name"], capability=(major, minor), driver=value["driver"], cuda=value["cuda"])


def symbols(contract: Contract, dtypes: Sequence[Dtype]) -> tuple[str, ...]:
    """The entry points that a library must export under ``contract``, without the optional ones."""
    stages = [stage for stage in dict.fromkeys(case.stage for case in all_cases("f32")) if stage != "chain"]
    return tuple(entry(stage, dtype, contract).symbol for dtype in dtypes for stage in stages if stage not in OPTIONAL)
