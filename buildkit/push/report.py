"""What a push has done: the digest, and the story of each blob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from buildkit.model import Descriptor
from buildkit.push.plan import Target
from buildkit.registry.events import UploadReport
from buildkit.units import format_duration, format_rate, format_size

SCHEMA = 1
"""Version of the JSON form; raised when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """``present`` are labels of blobs that the registry had before; ``uploads`` the rest. Seconds are wall-clock.

    ``compressed`` is the number of uncompressed bytes that were read and compressed in this run.
    """

    source: str
    method: str
    reason: str
    target: Target
    manifest: Descriptor
    platform: str
    present: tuple[str, ...]
    uploads: tuple[UploadReport, ...]
    compressed: int
    seconds: float
    up_to_date: bool
    verified: str
    """``manifest and blobs`` or ``every byte``: what the verification after the push covered."""
    warnings: tuple[str, ...] = ()

    @property
    def pull(self) -> str:
        return f"{self.target.repository}@{self.manifest.digest}"

    @property
    def bytes_sent(self) -> int:
        return sum(upload.bytes_sent for upload in self.uploads)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "schema": SCHEMA,
            "source": self.source,
            "method": self.method,
            "reason": self.reason,
            "repository": str(self.target.repository),
            "tags": list(self.target.tags),
            "digest": str(self.manifest.digest),
            "media_type": self.manifest.media_type,
            "platform": self.platform,
            "pull": self.pull,
            "up_to_date": self.up_to_date,
            "verified": self.verified,
            "seconds": round(self.seconds, 3),
            "bytes_compressed": self.compressed,
            "bytes_sent": self.bytes_sent,
            "bytes_resent": sum(upload.bytes_resent for upload in self.uploads),
            "present": list(self.present),
            "uploads": [upload.to_json() for upload in self.uploads],
            "warnings": list(self.warnings),
        }

    def table(self) -> Table:
        """One row per blob that was uploaded."""
        table = Table(box=None, pad_edge=False)
        for name in ("blob", "digest", "size", "how", "chunks", "re-sent", "time", "rate", "remarks"):
            right = name in ("size", "chunks", "re-sent", "time", "rate")
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "remarks")
        for upload in self.uploads:
            table.add_row(
                upload.label,
                upload.digest.short,
                format_size(upload.size),
                str(upload.outcome),
                str(upload.chunks),
                format_size(upload.bytes_resent),
                format_duration(upload.seconds),
                format_rate(upload.bytes_sent, upload.seconds) if upload.bytes_sent else "-",
                _remarks(upload),
            )
        return table

    def lines(self) -> list[str]:
        """For people, under the table."""
        out = []
        if self.present and not self.up_to_date:
            out.append(f"already there: {', '.join(self.present)}")
        out.append(f"source: {self.source}, read by {self.method}" + (f" ({self.reason})" if self.reason else ""))
        out += [f"warning: {warning}" for warning in self.warnings]
        what = "is up to date: checked" if self.up_to_date else f"pushed: {format_size(self.bytes_sent)} sent"
        out.append(f"{self.target} {what} in {format_duration(self.seconds)}, verified: {self.verified}")
        out.append(f"digest: {self.manifest.digest}")
        out.append(f"pull:   {self.pull}")
        return out


def _remarks(upload: UploadReport) -> str:
    parts = []
    if upload.resumed_at:
        parts.append(f"resumed at {format_size(upload.resumed_at)}")
    if upload.retries:
        parts.append(f"{len(upload.retries)} retries: {'; '.join(dict.fromkeys(upload.retries))}")
    parts += [f"restarted: {why}" for why in upload.restarts]
    if upload.limit_learned:
        parts.append(f"limit learned: {format_size(upload.limit_learned)}")
    parts += [f"quirk: {quirk}" for quirk in upload.quirks]
    return "; ".join(parts)
