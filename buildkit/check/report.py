"""What a check found, as values: to JSON (``schema.json`` beside this file), to Markdown, to a terminal. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from buildkit.check.knownbad import RevisionFinding
from buildkit.check.libraries import CudaVersion, Needs
from buildkit.check.offline import StartAnalysis
from buildkit.check.tree import Kernel
from buildkit.cuda.arch import Arch
from buildkit.cuda.fatbin import KIND_ELF, KIND_LTO, KIND_PTX
from buildkit.cuda.policy import Judgement, Policy, Verdict
from buildkit.cuda.scan import FileScan, Unit, coverage
from buildkit.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from buildkit.check.start import StartProof

SCHEMA_VERSION = 1
SHOWN_LACKING = 20
"""Units without code for a required architecture that are listed of one file."""
SHOWN_ROWS = 60
"""Rows of a Markdown table; a step summary has a limit of 1 MiB."""

Level = Literal["violation", "warning", "note"]
_ORDER: Mapping[Level, int] = {"violation": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to say. A ``violation`` makes the check fail; ``rule`` names what was checked."""

    level: Level
    rule: str
    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file with device code, or that needs CUDA's libraries, or that was not understood.

    ``excuses`` say, per required architecture, why a bad verdict is accepted.
    """

    path: str
    size: int
    layer: int | None
    scan: FileScan
    judgements: tuple[Judgement, ...]
    excuses: tuple[tuple[Arch, str], ...]
    needs: Needs
    kernels: tuple[Kernel, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst over the required architectures; without those, whether there is device code at all."""
        if self.judgements:
            return min((j.verdict for j in self.judgements), key=lambda v: v.severity)
        if self.scan.problems:
            return Verdict.NOT_UNDERSTOOD
        return Verdict.NATIVE if self.scan.loadable else Verdict.NOT_CUDA

    @property
    def excused(self) -> bool:
        return bool(self.excuses)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of ``run_check``. ``ok`` is False where any finding is a violation.

    ``looked_at`` counts files with the form of an ELF file, archive, fatbin or PTX; ``files`` are those among them that
    have device code, need CUDA libraries or were not understood, worst first.
    """

    source: str
    kind: Literal["image", "folder", "wheel", "file"]
    image_id: str | None
    policy: Policy
    files: tuple[FileReport, ...]
    findings: tuple[Finding, ...]
    looked_at: int
    paths: int
    versions: tuple[CudaVersion, ...] = ()
    revisions: tuple[RevisionFinding, ...] = ()
    start: StartAnalysis | None = None
    proof: StartProof | None = None
    kernel_patterns: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return not any(f.level == "violation" for f in self.findings)

    @property
    def violations(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "violation")

    def summary(self) -> str:
        """One line."""
        cuda = [f for f in self.files if f.scan.loadable]
        bad = len(self.violations)
        what = f"{len(cuda)} of {self.looked_at} files have CUDA code"
        return f"{self.source}: {what}; " + (f"{bad} violations" if bad > 1 else "1 violation" if bad else "ok")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the form is ``buildkit/check/schema.json``, version ``SCHEMA_VERSION``."""
        return {
            "schema": SCHEMA_VERSION,
            "ok": self.ok,
            "source": self.source,
            "kind": self.kind,
            "imageId": self.image_id,
            "seconds": round(self.seconds, 3),
            "policy": {
                "require": [arch.sm for arch in self.policy.require],
                "runtime": str(self.policy.runtime) if self.policy.runtime else None,
                "allowJit": self.policy.allow_jit,
                "exceptions": [{"path": e.path, "reason": e.reason} for e in self.policy.exceptions],
            },
            "lookedAt": self.looked_at,
            "paths": self.paths,
            "findings": [
                {"level": f.level, "rule": f.rule, "path": _clean(f.path), "message": _clean(f.message)}
                for f in self.findings
            ],
            "files": [_file_json(f) for f in self.files],
            "cudaVersions": [
                {"component": v.component, "version": v.text, "where": _clean(v.where)} for v in self.versions
            ],
            "revisions": [
                {
                    "project": r.project,
                    "state": r.state.value,
                    "revision": r.revision,
                    "where": _clean(r.where),
                    "message": r.message,
                }
                for r in self.revisions
            ],
            "start": _start_json(self.start) if self.start else None,
            "proof": self.proof.to_json() if self.proof else None,
            "kernelPatterns": list(self.kernel_patterns),
        }

    def to_markdown(self) -> str:
        """For a step summary."""
        lines = [f"### Check of `{_code(self.source)}`: {'passed' if self.ok else 'failed'}", ""]
        lines += [f"{_md(self.summary())}.", ""]
        shown = [f for f in self.findings if f.level != "note"]
        if shown:
            lines += ["| | rule | where | what |", "| --- | --- | --- | --- |"]
            lines += [
                f"| {'❌' if f.level == 'violation' else '⚠️'} | {_md(f.rule)} | `{_code(f.path)}` | {_md(f.message)} |"
                for f in shown[:SHOWN_ROWS]
            ]
            if len(shown) > SHOWN_ROWS:
                lines.append(f"| | | | and {len(shown) - SHOWN_ROWS} more |")
            lines.append("")
        rows = [f for f in self.files if f.scan.units or f.scan.problems]
        if rows:
            lines += ["| file | verdict | coverage | architectures |", "| --- | --- | --- | --- |"]
            for f in rows[:SHOWN_ROWS]:
                lines.append(
                    f"| `{_code(f.path)}` | {_verdict_text(f)} | {_coverage_text(f)} | {_md(architectures(f.scan))} |"
                )
            if len(rows) > SHOWN_ROWS:
                lines.append(f"| and {len(rows) - SHOWN_ROWS} more | | | |")
            lines.append("")
        if self.versions:
            found = sorted({f"{v.component} {v.text}" for v in self.versions})
            lines += [f"CUDA in it: {_md(', '.join(found))}.", ""]
        for revision in self.revisions:
            lines.append(f"- {_md(revision.project)}: **{revision.state}** {_md(revision.message)}")
        for path, kernel in self.found_kernels():
            lines.append(f"- `{_code(kernel.name)}` in `{_code(path)}`: {', '.join(kernel.targets)}")
        return "\n".join(lines).rstrip() + "\n"

    def found_kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Path and kernel, for what ``kernel_patterns`` asked for."""
        for f in self.files:
            for kernel in f.kernels:
                yield f.path, kernel

    def render(self, console: Console) -> None:
        """Tables for people, worst first."""
        from rich.table import Table  # deferred: JSON output needs no terminal library
        from rich.text import Text

        rows = [f for f in self.files if f.scan.units or f.scan.problems]
        if rows:
            table = Table(title=Text(self.source), title_justify="left", pad_edge=False)
            for name in ("verdict", "file", "coverage", "architectures", "size"):
                table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
            for f in rows:
                table.add_row(
                    Text(_verdict_text(f), style=_STYLES[f.verdict] if not f.excused else "dim"),
                    Text(_clean(f.path)),
                    _coverage_text(f),
                    Text(architectures(f.scan)),
                    format_size(f.size),
                )
            console.print(table)
        for path, kernel in self.found_kernels():
            console.print(Text(f"{kernel.name}  {', '.join(kernel.targets)}  {_clean(path)}"))
        for version in self.versions:
            console.print(Text(f"CUDA {version.text}: {version.component}, {_clean(version.where)}"))
        for finding in self.findings:
            style = {"violation": "bold red", "warning": "yellow", "note": "dim"}[finding.level]
            line = Text(f"{finding.level}: ", style=style)
            line.append(f"{_clean(finding.path)}: {_clean(finding.message)}" if finding.path else finding.message)
            console.print(line)
        console.print(Text(self.summary(), style="green" if self.ok else "bold red"))


_MARKUP = re.compile(r"[\\`*{}\[\]<>#|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_STYLES: Mapping[Verdict, str] = {
    Verdict.MISSING: "bold red",
    Verdict.NOT_UNDERSTOOD: "bold red",
    Verdict.PARTIAL: "red",
    Verdict.JIT: "yellow",
    Verdict.NATIVE: "green",
    Verdict.NOT_CUDA: "dim",
}


def order_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Violations first, then by rule and place."""
    return tuple(sorted(findings, key=lambda f: (_ORDER[f.level], f.rule, f.path, f.message)))


def architectures(scan: FileScan) -> str:
    """``sm_70, sm_80 3/4, compute_90``: what the units that count hold, with coverage where it is not all of them."""
    units = scan.loadable
    counts = coverage(units)
    rank = {KIND_ELF: 0, KIND_PTX: 1, KIND_LTO: 2}
    parts = []
    for (kind, arch), count in sorted(counts.items(), key=lambda item: (rank.get(item[0][0], 3), item[0])):
        name = _target(kind, arch)
        parts.append(name if count == len(units) else f"{name} {count}/{len(units)}")
    return ", ".join(parts)


def describe_unit(unit: Unit) -> str:
    """``fatbin at byte 64 of .nv_fatbin (sm_80)``."""
    targets = ", ".join(dict.fromkeys(e.target for e in unit.entries)) or "empty"
    place = f" of {unit.place}" if unit.place else ""
    return f"{unit.form} at byte {unit.offset}{place} ({targets})"


def _target(kind: int, arch: Arch) -> str:
    if kind == KIND_ELF:
        return arch.sm
    name = "lto" if kind == KIND_LTO else f"kind {kind}"
    return arch.compute if kind == KIND_PTX else f"{name}_{arch.number}{arch.suffix}"


def _verdict_text(f: FileReport) -> str:
    if not f.judgements and f.verdict is Verdict.NATIVE:
        return "-"
    return f"{f.verdict} (accepted)" if f.excused else str(f.verdict)


def _coverage_text(f: FileReport) -> str:
    if not f.judgements:
        return str(len(f.scan.loadable))
    return ", ".join(f"{j.arch.sm} {j.native + j.jit}/{j.total}" for j in f.judgements)


def _file_json(f: FileReport) -> dict[str, Any]:
    units = f.scan.loadable
    return {
        "path": _clean(f.path),
        "size": f.size,
        "layer": f.layer,
        "kind": f.scan.kind,
        "machine": f.scan.machine,
        "type": f.scan.type,
        "members": f.scan.members,
        "verdict": f.verdict.value,
        "units": {form: sum(u.form == form for u in f.scan.units) for form in ("fatbin", "cubin", "ptx")}
        | {
            "counted": len(units),
            "linkable": sum(u.linkable for u in f.scan.units),
            "empty": sum(u.empty for u in f.scan.units),
        },
        "architectures": [
            {
                "target": _target(kind, arch),
                "kind": {KIND_PTX: "ptx", KIND_ELF: "elf", KIND_LTO: "lto"}.get(kind, f"kind {kind}"),
                "units": count,
            }
            for (kind, arch), count in sorted(coverage(units).items())
        ],
        "compressed": sorted({e.compression for u in f.scan.units for e in u.entries if e.compression}),
        "places": sorted({_clean(u.place.rpartition(": ")[2]) for u in f.scan.units}),
        "judgements": [
            {
                "arch": j.arch.sm,
                "verdict": j.verdict.value,
                "native": j.native,
                "jit": j.jit,
                "total": j.total,
                "lacking": [_unit_json(u) for u in j.lacking[:SHOWN_LACKING]],
                "lackingTotal": len(j.lacking),
                "accepted": next((reason for arch, reason in f.excuses if arch == j.arch), None),
            }
            for j in f.judgements
        ],
        "needs": {
            "present": list(f.needs.present),
            "driver": list(f.needs.driver),
            "missing": list(f.needs.missing),
        },
        "kernels": [{"name": k.name, "targets": list(k.targets)} for k in f.kernels],
        "problems": [{"offset": p.offset, "message": _clean(p.message)} for p in f.scan.problems],
    }


def _unit_json(unit: Unit) -> dict[str, Any]:
    return {
        "form": unit.form,
        "offset": unit.offset,
        "place": _clean(unit.place),
        "targets": list(dict.fromkeys(e.target for e in unit.entries)),
    }


def _start_json(start: StartAnalysis) -> dict[str, Any]:
    return {
        "command": [_clean(word) for word in start.command],
        "scripts": [_clean(path) for path in start.scripts],
        "unread": [_clean(path) for path in start.unread],
        "environment": dict(start.environment),
        "findings": [
            {
                "level": f.level,
                "path": _clean(f.path),
                "line": f.line,
                "what": f.what,
                "text": _clean(f.text),
            }
            for f in start.findings
        ],
        "requirements": [
            {"path": _clean(r.path), "name": r.name, "wanted": r.wanted, "installed": r.installed}
            for r in start.requirements
        ],
    }


def _clean(text: str) -> str:
    """Text out of a file, printable: no control characters, no lone surrogates."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in safe)


def _code(text: str) -> str:
    return _clean(text).replace("`", "'").replace("|", "\\|")


def _md(text: str) -> str:
    """Text in a Markdown table: nothing in it is markup. An underscore within a word is none anyway."""
    return _MARKUP.sub(r"\\\g<0>", _clean(text))
