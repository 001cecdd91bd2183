"""The smoke test's report: as JSON, as Markdown and as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from buildkit.gdn.compare import OutputFigures, Verdict
from buildkit.gdn.harness import CaseResult, KernelReport
from buildkit.gdn.plain import plain
from buildkit.smoke.server import Question, ServerReport
from buildkit.units import format_duration

Level = Literal["kernel", "server"]
COLOURS = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.NOT_RUN: "yellow",
    Verdict.CANNOT_RUN: "bold yellow",
    Verdict.UNKNOWN: "yellow",
}
_WORST = (Verdict.FAIL, Verdict.CANNOT_RUN, Verdict.UNKNOWN, Verdict.NOT_RUN, Verdict.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
    """One level. ``same`` says where else in the image the library's kernels are, byte for byte."""

    level: Level
    verdict: Verdict
    reason: str
    seconds: float = 0.0
    same: str = ""
    kernel: KernelReport | None = None
    server: ServerReport | None = None

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """What explains a failure, one sentence each."""
        return (*(self.kernel.diagnosis if self.kernel else ()), *(self.server.diagnosis if self.server else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """All levels that were asked for. A level that was not run never counts as passed, allowed or not."""

    name: str
    levels: tuple[LevelReport, ...]
    missing_gpu_allowed: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst of all levels."""
        return next(verdict for verdict in _WORST if any(level.verdict is verdict for level in self.levels))

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed or not judged, 3 not run for want of a GPU (0 where that is allowed)."""
        if self.verdict is Verdict.PASS:
            return 0
        if self.verdict is Verdict.NOT_RUN:
            return 0 if self.missing_gpu_allowed else 3
        return 1

    @property
    def ok(self) -> bool:
        """Whether every level was run and passed."""
        return self.verdict is Verdict.PASS

    def summary(self) -> str:
        """One line."""
        parts = [f"{level.level} level {level.verdict.value}: {level.reason}" for level in self.levels]
        return f"{self.name}: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "missing_gpu_allowed": self.missing_gpu_allowed,
            "levels": [{**plain(level), "diagnosis": list(level.diagnosis)} for level in self.levels],
        }

    def to_markdown(self) -> str:
        """For a job's summary page."""
        lines = [f"## Smoke test of {_cell(self.name)}: {self.verdict.value}", ""]
        for level in self.levels:
            lines += [f"### {level.level.capitalize()} level: {level.verdict.value}", "", _cell(level.reason), ""]
            lines += [f"- **{_cell(sentence)}**" for sentence in level.diagnosis]
            lines += [""] if level.diagnosis else []
            if level.same:
                lines += [_cell(level.same), ""]
            for title, header, rows in _tables(level):
                lines += [title, "", "| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
                lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row, _ in rows]
                lines.append("")
        if self.verdict is Verdict.NOT_RUN and self.missing_gpu_allowed:
            lines += ["A missing GPU was allowed. **Nothing was tested by the levels that were not run.**", ""]
        return "\n".join(lines)

    def render(self) -> Group:
        """For a terminal."""
        parts: list[Any] = []
        for level in self.levels:
            for title, header, rows in _tables(level):
                table = Table(*header, title=title, title_justify="left")
                for row, verdict in rows:
                    table.add_row(
                        *(Text(cell) for cell in row), style="" if verdict is Verdict.PASS else COLOURS[verdict]
                    )
                parts.append(table)
            parts += [Text(f"  {sentence}", style="bold red") for sentence in level.diagnosis]
            if level.same:
                parts.append(Text(level.same))
            line = f"{level.level} level {level.verdict.value}: {level.reason} ({format_duration(level.seconds)})"
            parts.append(Text(line, style=COLOURS[level.verdict]))
        if self.verdict is Verdict.NOT_RUN and self.missing_gpu_allowed:
            parts.append(Text("a missing GPU was allowed; nothing was tested by the levels that were not run"))
        return Group(*parts)


Rows = Sequence[tuple[Sequence[str], Verdict]]


def _tables(level: LevelReport) -> Iterator[tuple[str, Sequence[str], Rows]]:
    """Title, header and rows of each table of a level."""
    if level.kernel is not None and level.kernel.cases:
        kernel = level.kernel
        device = kernel.device
        on = f" on {device.name}, capability {device.capability[0]}.{device.capability[1]}" if device else ""
        driver = f", driver {device.driver} (CUDA {device.cuda})" if device else ""
        contract = kernel.contract
        called = f", contract {contract.contract.name} ({contract.reason})" if contract else ""
        columns = (
            "case", "output", "sum", "wanted", "absmax", "wanted", "abs. error", "at", "rel. error", "at",
            "energy q/k/v", "verdict",
        )  # fmt: skip
        rows = [row for case in kernel.cases for row in _case_rows(case)]
        yield f"Kernels of {kernel.library}{on}{driver}{called}", columns, rows
        if kernel.absent:
            yield "Not exported, and not needed", ("entry point",), [((name,), Verdict.PASS) for name in kernel.absent]
    if level.server is not None and level.server.questions:
        server = level.server
        header = ("question", "answer", "reference", "identical", "near-ties", "logprob error", "verdict", "note")
        yield f"Answers of {server.url} in {server.dtype}", header, [_question_row(q) for q in server.questions]


def _case_rows(case: CaseResult) -> Iterator[tuple[Sequence[str], Verdict]]:
    name = f"{case.stage} {case.case} {case.dtype}"
    if not case.outputs:
        yield (name, "", "", "", "", "", "", "", "", "", "", f"{case.verdict.value} {case.note}"), case.verdict
    for output in case.outputs:
        yield (name, *_output_cells(output)), output.verdict


def _output_cells(output: OutputFigures) -> tuple[str, ...]:
    energy = " ".join(f"{got / want:.6f}" if want else "-" for got, want in output.energy.values())
    return (
        output.name,
        f"{output.sum:.6g}",
        f"{output.want_sum:.6g}",
        f"{output.absmax:.6f}",
        f"{output.want_absmax:.6f}",
        f"{output.absolute:.2e}",
        ",".join(map(str, output.index)),
        f"{output.relative:.2e}",
        ",".join(map(str, output.relative_index)),
        energy,
        f"{output.verdict.value} {output.note}".strip(),
    )


def _question_row(question: Question) -> tuple[Sequence[str], Verdict]:
    error = "-" if question.logprob_error is None else f"{question.logprob_error:.1e}"
    identical = f"{question.identical}/{question.tokens}" if question.tokens else "-"
    cells = (question.name, question.text, question.wanted, identical, str(question.ties), error)
    return (*cells, question.verdict.value, question.note), question.verdict


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
