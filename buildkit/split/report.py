"""What a split did, or would do: values, and the same as JSON, Markdown and text for a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from buildkit.model import Digest
from buildkit.units import format_size

MAX_NAMED = 5
"""Paths named of an indivisible cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indivisible:
    """What exceeds the limit and stays whole: its largest paths, how many entries they are, and why they are bound.

    ``tar_size`` and ``size`` are bytes before and after compression.
    """

    paths: tuple[str, ...]
    entries: int
    tar_size: int
    size: int

    @property
    def reason(self) -> str:
        return "one file" if self.entries == 1 else f"{self.entries} entries that are bound to each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """One layer of the new image that was cut from a layer. Sizes in bytes.

    ``predicted`` is the compressed size as a sample foretells it, ``size`` the exact one (None in a quick dry run).
    ``digest`` and ``diff_id`` are None in a dry run. ``carried``: directories repeated from other parts.
    """

    entries: int
    carried: int
    tar_size: int
    predicted: int
    size: int | None
    digest: Digest | None = None
    diff_id: Digest | None = None
    indivisible: Indivisible | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer of the source, numbered from 1. ``parts`` is empty where it passes through as it is.

    ``size`` is the compressed size in bytes of what passes through, where it is known.
    """

    number: int
    diff_id: Digest
    size: int | None
    tar_size: int | None
    entries: int | None
    parts: tuple[PartReport, ...] = ()

    @property
    def divided(self) -> bool:
        return bool(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """``dry`` is ``quick`` (predicted sizes), ``exact`` (exact sizes, nothing kept) or None (done)."""

    source: str
    method: str
    limit: int
    codec: str
    stable: bool
    dry: Literal["quick", "exact"] | None
    layers: tuple[LayerReport, ...]
    image_id: Digest
    new_image_id: Digest | None
    manifest: Digest | None
    new_manifest: Digest | None
    warnings: tuple[str, ...]
    invalidated: tuple[str, ...]

    @property
    def layers_before(self) -> int:
        return len(self.layers)

    @property
    def layers_after(self) -> int:
        return sum(len(layer.parts) or 1 for layer in self.layers)

    @property
    def divided(self) -> int:
        return sum(layer.divided for layer in self.layers)

    @property
    def indivisible(self) -> tuple[tuple[LayerReport, PartReport, Indivisible], ...]:
        return tuple(
            (layer, part, part.indivisible)
            for layer in self.layers
            for part in layer.parts
            if part.indivisible is not None
        )

    @property
    def too_large(self) -> tuple[tuple[str, int], ...]:
        """What exceeds the limit and needs the chunked upload: name and bytes."""
        return tuple(
            (f"layer {layer.number}: {found.paths[0]}", part.size or part.predicted)
            for layer, part, found in self.indivisible
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; keys are stable."""
        return {
            "source": self.source,
            "method": self.method,
            "limit": self.limit,
            "codec": self.codec,
            "stable": self.stable,
            "dry_run": self.dry,
            "image_id": str(self.image_id),
            "new_image_id": _text(self.new_image_id),
            "manifest": _text(self.manifest),
            "new_manifest": _text(self.new_manifest),
            "layers_before": self.layers_before,
            "layers_after": self.layers_after,
            "layers": [_layer_json(layer) for layer in self.layers],
            "chunked_upload": [
                {"what": what, "size": size, "requests": math.ceil(size / self.limit)} for what, size in self.too_large
            ],
            "warnings": list(self.warnings),
            "invalidated": list(self.invalidated),
        }

    def to_markdown(self) -> str:
        """For a job summary."""
        lines = [f"### {_title(self)}", ""]
        header, rows = _table(self)
        lines += ["| " + " | ".join(header) + " |", "| --- | " + " | ".join(["---:"] * (len(header) - 1)) + " |"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines.append("")
        lines += [f"- {note}" for note in notes(self)]
        return "\n".join(lines) + "\n"

    def __rich__(self) -> RenderableType:
        header, rows = _table(self)
        table = Table(box=box.SIMPLE, title=_title(self), title_justify="left", title_style="bold")
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table, *(Text(note) for note in notes(self)))


def notes(report: SplitReport) -> Iterator[str]:
    """One line for each thing that a person should know."""
    yield f"layers: {report.layers_before} before, {report.layers_after} after; {report.divided} divided"
    for layer, part, found in report.indivisible:
        more = f" and {found.entries - 1} more" if found.entries > 1 else ""
        yield (
            f"indivisible: layer {layer.number}, {found.paths[0]}{more}: {format_size(found.tar_size)}, "
            f"compressed {format_size(part.size or part.predicted)} ({found.reason}); a layer of its own"
        )
    for what, size in report.too_large:
        requests = math.ceil(size / report.limit)
        yield f"chunked upload must carry {what}: {format_size(size)} in {requests} requests"
    for warning in report.warnings:
        yield f"warning: {warning}"
    for text in report.invalidated:
        yield f"invalidated: {text}"
    if report.new_manifest:
        yield f"manifest: {report.new_manifest}"


def _title(report: SplitReport) -> str:
    kind = {"quick": "Dry run (sizes are predicted)", "exact": "Dry run", None: "Split"}[report.dry]
    return f"{kind}: {report.source}, limit {format_size(report.limit)}, {report.codec}"


def _table(report: SplitReport) -> tuple[list[str], list[list[str]]]:
    header = ["layer", "part", "entries", "uncompressed", "predicted", "exact", "of limit"]
    rows = []
    for layer in report.layers:
        if not layer.parts:
            exact = format_size(layer.size) if layer.size is not None else "-"
            rows.append(
                [
                    f"{layer.number} {layer.diff_id.short}",
                    "unchanged",
                    "-" if layer.entries is None else str(layer.entries),
                    "-" if layer.tar_size is None else format_size(layer.tar_size),
                    "-",
                    exact,
                    "-" if layer.size is None else f"{layer.size / report.limit:.0%}",
                ]
            )
        for number, part in enumerate(layer.parts, 1):
            rows.append(
                [
                    f"{layer.number} {layer.diff_id.short}" if number == 1 else "",
                    f"{number}/{len(layer.parts)}" + (" indivisible" if part.indivisible else ""),
                    f"{part.entries}+{part.carried}",
                    format_size(part.tar_size),
                    format_size(part.predicted),
                    "-" if part.size is None else format_size(part.size),
                    f"{(part.size or part.predicted) / report.limit:.0%}",
                ]
            )
    return header, rows


def _layer_json(layer: LayerReport) -> dict[str, Any]:
    return {
        "number": layer.number,
        "diff_id": str(layer.diff_id),
        "divided": layer.divided,
        "size": layer.size,
        "tar_size": layer.tar_size,
        "entries": layer.entries,
        "parts": [
            {
                "diff_id": _text(part.diff_id),
                "digest": _text(part.digest),
                "entries": part.entries,
                "carried": part.carried,
                "tar_size": part.tar_size,
                "predicted": part.predicted,
                "size": part.size,
                "indivisible": None
                if part.indivisible is None
                else {
                    "paths": list(part.indivisible.paths),
                    "entries": part.indivisible.entries,
                    "tar_size": part.indivisible.tar_size,
                    "size": part.indivisible.size,
                },
            }
            for part in layer.parts
        ],
    }


def _text(digest: Digest | None) -> str | None:
    return str(digest) if digest else None


def total(parts: Sequence[PartReport]) -> int:
    """Compressed bytes of all parts, predicted where that is all that is known."""
    return sum(part.size if part.size is not None else part.predicted for part in parts)
