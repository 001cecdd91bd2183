"""The figures of a report as geometry: what is drawn where, and what is left out and said to be. Pure.

Positions and widths are percent of a track's width (see ``scale``). Long lists are cut in three: ``head`` is shown,
``more`` is folded away, ``left`` more items are only in ``report.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from buildkit.cuda.policy import Verdict as FileVerdict
from buildkit.report.facts import Check, CodeFile, KernelCase, Kernels, Status
from buildkit.report.model import Layer, Report, Stage, TimelineEvent, Verdict
from buildkit.report.scale import Linear, Logarithmic, Tick, bytes_scale, log_scale, time_scale
from buildkit.report.text import counted
from buildkit.units import format_duration, format_size

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a long list is in the page: ``shown`` items open, ``folded`` more behind a fold; ``text`` characters
    of one text; ``columns`` of a matrix; ``marks`` in one row of a figure."""

    shown: int = 24
    folded: int = 400
    text: int = 400
    columns: int = 12
    marks: int = 120

    def smaller(self) -> Limits:
        return Limits(
            shown=max(self.shown * 3 // 4, 4),
            folded=self.folded // 2,
            text=max(self.text * 3 // 4, 40),
            columns=self.columns,
            marks=max(self.marks // 2, 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[T]):
    """A list that may be long. ``left`` counts what is in neither part."""

    head: tuple[T, ...]
    more: tuple[T, ...] = ()
    left: int = 0

    @property
    def total(self) -> int:
        return len(self.head) + len(self.more) + self.left


def fold(items: Iterable[T], limits: Limits, *, shown: int | None = None) -> Fold[T]:
    """A fold of a few rows is not worth its line: then all are shown."""
    every = tuple(items)
    head = limits.shown if shown is None else min(shown, limits.shown)
    if len(every) <= head + head // 4:
        return Fold(head=every)
    end = head + limits.folded
    return Fold(head=every[:head], more=every[head:end], left=max(len(every) - end, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """``kind`` is its CSS class."""

    at: float
    width: float
    kind: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point on a track; ``kind`` chooses its shape and colour, ``y`` is percent of the track's height."""

    at: float
    kind: str
    title: str = ""
    y: int = 50


# Stages --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """``verdict`` as it is shown, see ``Report.shown``."""

    stage: Stage
    verdict: Verdict
    bar: Bar | None
    time: str


def stage_rows(report: Report, limits: Limits) -> Fold[StageRow]:
    """One after another, without the waiting between jobs."""
    total = sum(stage.seconds for stage in report.stages)
    rows, begin = [], 0.0
    for stage in report.stages:
        ran = stage.verdict in ("pass", "fail") or stage.seconds > 0
        bar = None
        if total > 0 and ran:
            width = max(100 * stage.seconds / total, 0.6)
            bar = Bar(at=round(min(100 * begin / total, 100 - width), 2), width=round(width, 2), kind=stage.verdict)
        rows.append(
            StageRow(
                stage=stage, verdict=report.shown(stage), bar=bar, time=format_duration(stage.seconds) if ran else ""
            )
        )
        begin += stage.seconds
    return fold(rows, limits)


# Layers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """``bars``: up to the limit, and what is above it."""

    label: str
    detail: str
    digest: str
    size: str
    bars: tuple[Bar, ...]
    over: bool
    unpacked: bool
    """The size is the tar's: what is transferred is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersFigure:
    """``limit_at`` is None where no limit is known. ``sorted``: largest first, because there are many."""

    title: str
    summary: str
    ticks: tuple[Tick, ...]
    limit: str
    limit_at: float | None
    rows: Fold[LayerRow]
    sorted: bool
    over: int


def layers_figure(title: str, layers: Sequence[Layer], limit: int | None, limits: Limits) -> LayersFigure:
    largest = max((_extent(layer) for layer in layers), default=0)
    scale = bytes_scale(max(largest, (limit or 0) * 1.04))
    rows = [_layer_row(layer, scale, limit) for layer in layers]
    many = len(rows) > 24
    if many:
        order = sorted(range(len(rows)), key=lambda i: -_extent(layers[i]))
        rows = [rows[i] for i in order]
    over = sum(row.over for row in rows)
    known = [layer.size for layer in layers if layer.size is not None]
    parts = [counted(len(layers), "layer")]
    if known:
        parts.append(f"{format_size(sum(known))} to transfer" + ("" if len(known) == len(layers) else " where known"))
    if limit and layers:
        parts.append(f"{over} above the limit" if over else "none above the limit")
    return LayersFigure(
        title=title,
        summary=", ".join(parts),
        ticks=scale.ticks,
        limit=format_size(limit) if limit else "",
        limit_at=scale.at(limit) if limit else None,
        rows=fold(rows, limits, shown=16 if many else 24),
        sorted=many,
        over=over,
    )


def _extent(layer: Layer) -> int:
    """What is drawn: the size to transfer, or the tar's where that is all that is known."""
    return layer.size if layer.size is not None else layer.tar_size or 0


def _layer_row(layer: Layer, scale: Linear, limit: int | None) -> LayerRow:
    extent = _extent(layer)
    over = limit is not None and layer.size is not None and layer.size > limit
    kind = "known" if layer.size is not None else "unpacked"
    bars = [Bar(at=0, width=max(scale.at(min(extent, limit) if over and limit else extent), 0.15), kind=kind)]
    if over and limit:
        bars.append(Bar(at=scale.at(limit), width=round(scale.at(extent) - scale.at(limit), 2), kind="over"))
    return LayerRow(
        label=layer.label,
        detail=layer.created_by or "",
        digest=str(layer.digest) if layer.digest else "",
        size="not known" if layer.size is None and layer.tar_size is None else format_size(extent),
        bars=tuple(bars) if extent else (),
        over=over,
        unpacked=layer.size is None and layer.tar_size is not None,
    )


# Architectures -------------------------------------------------------------------------------------------------------

CellKind = Literal["full", "jit", "part", "none", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """``text`` is what is written in it, ``title`` the same in words."""

    target: str
    kind: CellKind
    text: str
    title: str
    required: bool = False
    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """``folder`` ends with a slash; it and ``name`` are the file's path."""

    file: CodeFile
    folder: str
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Files by architectures; the required and the most common ones. ``hidden`` are targets that have no column."""

    columns: tuple[str, ...]
    required: frozenset[str]
    rows: Fold[MatrixRow]
    hidden: tuple[str, ...]


def matrix(check: Check, limits: Limits) -> Matrix:
    required = frozenset(check.required)
    common = sorted(check.targets, key=lambda t: (t not in required, -sum(t in file.units for file in check.files)))
    kept = set(common[: limits.columns])
    telling = sum(file.status != "pass" for file in check.files)
    columns = tuple(target for target in check.targets if target in kept)
    return Matrix(
        columns=columns,
        required=required,
        rows=_map(
            fold(check.files, limits, shown=max(telling, 12)),
            lambda file: _matrix_row(file, columns, required),
        ),
        hidden=tuple(target for target in check.targets if target not in kept),
    )


def _matrix_row(file: CodeFile, columns: Sequence[str], required: frozenset[str]) -> MatrixRow:
    folder, slash, name = file.path.rpartition("/")
    return MatrixRow(
        file=file,
        folder=folder + slash,
        name=name,
        cells=tuple(_cell(file, target, target in required) for target in columns),
    )


def _cell(file: CodeFile, target: str, required: bool) -> Cell:
    judged = next((j for j in file.judgements if j.arch == target), None) if required else None
    units = file.units.get(target, 0)
    kind: CellKind
    if judged is None:
        kind = "none" if not units else "full" if units >= file.total else "part"
        has = units
    else:
        has = judged.native + judged.jit
        kind = "none" if not has else "part" if has < judged.total else "jit" if judged.jit else "full"
        if judged.verdict == FileVerdict.NOT_UNDERSTOOD:
            kind = "unknown"
    total = judged.total if judged else file.total
    part = f"{has}/{total}" if required and total < 1000 else _share(has, total)
    text = {"full": "all", "jit": "PTX", "part": part, "none": "none" if required else "–", "unknown": "?"}[kind]
    what = "not understood" if kind == "unknown" else f"{has} of {counted(total, 'unit')}"
    if kind == "jit":
        what += ", some only as PTX that the driver compiles"
    accepted = required and bool(file.accepted)
    return Cell(target=target, kind=kind, text=text, title=f"{target}: {what}", required=required, accepted=accepted)


MAX_DTYPES = 3
"""Each has a shape, a colour and a column of its own."""


def _share(part: int, whole: int) -> str:
    """In percent; never 0 % of something, never 100 % of less than all."""
    percent = 100 * part // max(whole, 1)
    return f"{min(percent, 99)} %" if percent else "<1 %"


# Kernels -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigure:
    """The worst error of one row's cases in one dtype, as text."""

    dtype: str
    worst: str
    tolerance: str
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One case, in all its dtypes."""

    stage: str
    case: str
    status: Status
    marks: tuple[Mark, ...]
    figures: tuple[ErrorFigure, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsFigure:
    """Errors as multiples of the tolerance, on a logarithmic scale; ``limit_at`` is where the tolerance is."""

    ticks: tuple[Tick, ...]
    limit_at: float
    dtypes: tuple[str, ...]
    rows: Fold[ErrorRow]
    unplaced: int
    """Cases whose tolerance is not told; they have figures and no mark."""
    undrawn: int
    """Cases in further dtypes."""


def errors_figure(kernels: Kernels, limits: Limits) -> ErrorsFigure:
    dtypes = tuple(dict.fromkeys(case.dtype for case in kernels.cases))[:MAX_DTYPES]
    cases = [case for case in kernels.cases if case.dtype in dtypes]
    groups: dict[tuple[str, str], list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((case.stage, case.case), []).append(case)
    ratios = [ratio for case in cases for _, ratio in _ratios(case)]
    scale = log_scale(ratios)
    rows = [_error_row(stage, name, cases, dtypes, scale, limits) for (stage, name), cases in groups.items()]
    return ErrorsFigure(
        ticks=scale.ticks,
        limit_at=scale.at(1.0),
        dtypes=dtypes,
        rows=fold(rows, limits, shown=60),
        unplaced=sum(case.tolerance is None and bool(case.outputs) for case in cases),
        undrawn=len(kernels.cases) - len(cases),
    )


def _ratios(case: KernelCase) -> list[tuple[str, float]]:
    """Each output's error as a multiple of the tolerance; inf for what is not a number."""
    if case.tolerance is None:
        return []
    return [
        (output.name, math.inf if math.isnan(output.relative) else output.relative / case.tolerance)
        for output in case.outputs
        if output.relative is not None
    ]


def _error_row(
    stage: str, name: str, cases: Sequence[KernelCase], dtypes: Sequence[str], scale: Logarithmic, limits: Limits
) -> ErrorRow:
    marks, figures = [], []
    for case in cases[:24]:
        tolerance = f"{case.tolerance:.0e}" if case.tolerance is not None else ""
        for output, ratio in _ratios(case):
            error = ratio * (case.tolerance or 1.0)
            lane = dtypes.index(case.dtype)
            kind = f"dtype{lane % 3}" + ("" if ratio <= 1 else " above")
            title = f"{case.dtype} {output}: {_error(error)}, tolerance {tolerance}"
            marks.append(
                Mark(at=scale.at(ratio), kind=kind, title=title, y=round(100 * (lane + 1) / (len(dtypes) + 1)))
            )
        worst = "" if case.worst is None else _error(case.worst)
        figures.append(ErrorFigure(dtype=case.dtype, worst=worst, tolerance=tolerance, status=case.status))
    worst_status: Status = "pass"
    for status in ("not-run", "fail"):
        if any(case.status == status for case in cases):
            worst_status = status
    return ErrorRow(
        stage=stage,
        case=name,
        status=worst_status,
        marks=tuple(marks[: limits.marks]),
        figures=tuple(figures),
        note="; ".join(dict.fromkeys(case.note for case in cases if case.note)),
    )


def _error(value: float) -> str:
    return "exact" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "not finite"


# The upload ----------------------------------------------------------------------------------------------------------

_MARKS = {"retrying": "retry", "resumed": "resume", "restarted": "restart", "limit": "limit", "failed": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRow:
    """One blob. ``bars``: from first to last (``span``), what was sent (``sent``) and waits (``wait``)."""

    blob: str
    size: str
    time: str
    status: Status
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    story: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineFigure:
    """``present``: blobs of which nothing had to be sent. ``kinds``: what is drawn, for the legend."""

    ticks: tuple[Tick, ...]
    rows: Fold[BlobRow]
    present: tuple[str, ...]
    kinds: frozenset[str]


def timeline_figure(events: Sequence[TimelineEvent], limits: Limits) -> TimelineFigure | None:
    """None where nothing was uploaded."""
    blobs: dict[str, list[TimelineEvent]] = {}
    for event in sorted(events, key=lambda e: e.at):
        blobs.setdefault(event.blob, []).append(event)
    present = tuple(blob for blob, story in blobs.items() if all(e.event == "skipped" for e in story))
    drawn = {blob: story for blob, story in blobs.items() if blob not in set(present)}
    if not drawn:
        return None
    scale = time_scale(max(event.at for story in drawn.values() for event in story))
    rows = sorted(drawn.items(), key=lambda item: _start(item[1]))
    made = [_blob_row(blob, story, scale, limits) for blob, story in rows]
    return TimelineFigure(
        ticks=scale.ticks,
        rows=fold(made, limits, shown=60),
        present=present,
        kinds=frozenset(mark.kind for row in made for mark in row.marks)
        | frozenset(bar.kind for row in made for bar in row.bars),
    )


def _start(story: Sequence[TimelineEvent]) -> float:
    first = story[0]
    return max(first.at - (first.seconds or 0.0), 0.0) if first.event == "acknowledged" else first.at


def _blob_row(blob: str, story: Sequence[TimelineEvent], scale: Linear, limits: Limits) -> BlobRow:
    start, end = _start(story), story[-1].at
    sizes = [e.size for e in story if e.size is not None and e.event != "limit"]
    last = story[-1].event
    status: Status = "pass" if last in ("finished", "skipped") else "fail" if last == "failed" else "not-run"
    marks = [
        Mark(at=scale.at(e.at), kind=_MARKS[e.event], title=f"{format_duration(e.at)}: {e.text or e.event}")
        for e in story
        if e.event in _MARKS
    ]
    troubles = [counted(sum(m.kind == kind for m in marks), *words) for kind, words in _WORDS.items()]
    told = ", ".join(text for text in troubles if not text.startswith("0 "))
    how = {"pass": "", "fail": "failed", "not-run": "not finished"}[status]
    return BlobRow(
        blob=blob,
        size=format_size(sizes[-1]) if sizes else "",
        time=format_duration(max(end - start, 0.0)),
        status=status,
        bars=(
            _bar(scale, start, end, "span"),
            *_spans(story, start, scale, limits.marks),
        ),
        marks=tuple(marks[-limits.marks :]),
        story=", ".join(filter(None, (how, told))),
    )


_WORDS = {
    "retry": ("retry", "retries"),
    "resume": ("time resumed", "times resumed"),
    "restart": ("restart",),
    "limit": ("limit met", "limits met"),
}


def _spans(story: Sequence[TimelineEvent], start: float, scale: Linear, most: int) -> list[Bar]:
    """What was on its way, chunk by chunk, and the waits before retries. More than ``most`` chunks flow together."""
    spans: list[tuple[float, float, str]] = []
    previous, end = start, story[-1].at
    for event in story:
        if event.event == "acknowledged":
            begin = event.at - event.seconds if event.seconds is not None else previous
            spans.append((max(begin, previous, start), event.at, "sent"))
        elif event.event == "retrying" and event.seconds:
            spans.append((event.at, min(event.at + event.seconds, max(end, event.at)), "wait"))
        previous = max(previous, event.at)
    if len(spans) > most:
        gap = (end - start) / most
        joined = [spans[0]]
        for span in spans[1:]:
            if span[2] == joined[-1][2] and (span[0] - joined[-1][1] < gap / 8 or span[1] - joined[-1][0] < gap):
                joined[-1] = (joined[-1][0], max(span[1], joined[-1][1]), span[2])
            else:
                joined.append(span)
        spans = joined[:most]
    return [_bar(scale, begin, stop, kind) for begin, stop, kind in spans]


def _bar(scale: Linear, begin: float, end: float, kind: str) -> Bar:
    """As wide as it must be to be seen, within the track."""
    width = round(max(scale.at(end) - scale.at(begin), 0.3), 2)
    return Bar(at=min(scale.at(begin), round(100 - width, 2)), width=width, kind=kind)


def _map(items: Fold[T], make: Callable[[T], U]) -> Fold[U]:
    return Fold(head=tuple(map(make, items.head)), more=tuple(map(make, items.more)), left=items.left)
