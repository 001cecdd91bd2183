"""What a push is going to do, as values. Pure: made from what the source, the cache and the registry have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from buildkit.errors import UsageError
from buildkit.model import Descriptor, Digest, Reference
from buildkit.units import format_size


class Action(StrEnum):
    """What happens to one blob."""

    EXISTS = "exists"
    """The registry has it."""

    UPLOAD = "upload"
    """Its bytes are at hand: in the cache, in a layout's file, in memory."""

    COPY = "copy"
    """The source holds it as a blob, which is passed on byte for byte while it is read."""

    COMPRESS = "compress"
    """The source holds a plain tar: read, compressed and uploaded at the same time."""

    FOREIGN = "foreign"
    """A nondistributable layer: clients fetch it elsewhere, and it is never uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to: a repository and the tags that will point at the image."""

    repository: Reference
    tags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, default_tags: Sequence[str] = ("latest",)) -> Target:
        """A reference with a tag means that tag; without one, ``default_tags``. UsageError for a digest."""
        reference = Reference.parse(text, default_tag=None)
        if reference.digest is not None:
            raise UsageError(f"{text!r} is a digest: a push cannot choose it", hint="write HOST[:PORT]/REPOSITORY:TAG")
        tags = (reference.tag,) if reference.tag else tuple(default_tags)
        bare = Reference(registry=reference.registry, repository=reference.repository)
        return cls(repository=bare, tags=tags)

    def __str__(self) -> str:
        return f"{self.repository}:{','.join(self.tags)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlob:
    """``index`` is the layer's (its first, where layers repeat); None for the config. Sizes in bytes."""

    label: str
    action: Action
    index: int | None = None
    diff_id: Digest | None = None
    descriptor: Descriptor | None = None
    tar_size: int | None = None

    def requests(self, chunk: int, *, chunked: bool) -> int | None:
        """HTTP requests that its upload takes when nothing goes wrong; None while the size is not known."""
        if self.action in (Action.EXISTS, Action.FOREIGN):
            return 0
        if self.descriptor is None:
            return None
        if not chunked and self.descriptor.size <= chunk:
            return 2
        return 2 + -(-self.descriptor.size // chunk)

    def to_json(self, chunk: int, *, chunked: bool) -> dict[str, Any]:
        return {
            "label": self.label,
            "action": str(self.action),
            "diff_id": str(self.diff_id) if self.diff_id else None,
            "digest": str(self.descriptor.digest) if self.descriptor else None,
            "size": self.descriptor.size if self.descriptor else None,
            "tar_size": self.tar_size,
            "requests": self.requests(chunk, chunked=chunked),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """The whole of it. ``chunk`` is the largest body in bytes; ``disk`` the most that may be written locally, None
    where it cannot be told before compressing."""

    source: str
    method: str
    reason: str
    target: Target
    blobs: tuple[PlannedBlob, ...]
    chunk: int
    chunked: bool
    disk: int | None
    up_to_date: bool
    """Every blob is there and every tag points at this very image already."""

    @property
    def known_bytes(self) -> int:
        """Bytes of blobs that are to be sent and whose size is known."""
        return sum(
            blob.descriptor.size
            for blob in self.blobs
            if blob.descriptor and blob.action not in (Action.EXISTS, Action.FOREIGN)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "source": self.source,
            "method": self.method,
            "reason": self.reason,
            "repository": str(self.target.repository),
            "tags": list(self.target.tags),
            "chunk": self.chunk,
            "chunked": self.chunked,
            "disk": self.disk,
            "bytes_known": self.known_bytes,
            "up_to_date": self.up_to_date,
            "blobs": [blob.to_json(self.chunk, chunked=self.chunked) for blob in self.blobs],
        }

    def lines(self) -> list[str]:
        """For people."""
        how = f"read by {self.method}" + (f": {self.reason}" if self.reason else "")
        out = [f"{self.source} → {self.target} ({how})"]
        for blob in self.blobs:
            out.append(f"  {blob.label}: {_sentence(blob, self.chunk, chunked=self.chunked)}")
        if self.up_to_date:
            out.append("  nothing to do: the registry has this very image under every tag")
            return out
        out.append(f"  then the manifest, as {', '.join(self.target.tags)}")
        if self.disk is None:
            out.append("  local disk: as much as the compressed layers need, which is not known before compressing")
        else:
            out.append(f"  local disk: at most {format_size(self.disk)}")
        return out


def _sentence(blob: PlannedBlob, chunk: int, *, chunked: bool) -> str:
    if blob.descriptor:
        size = format_size(blob.descriptor.size)
    elif blob.tar_size is not None:
        size = f"{format_size(blob.tar_size)} before compression"
    else:
        size = "size not known yet"
    requests = blob.requests(chunk, chunked=chunked)
    count = "" if not requests else f", {requests} requests of at most {format_size(chunk)}"
    match blob.action:
        case Action.EXISTS:
            return f"already there ({size})"
        case Action.FOREIGN:
            return "nondistributable: not uploaded"
        case Action.UPLOAD:
            return f"upload, bytes at hand ({size}{count})"
        case Action.COPY:
            return f"copy as it is ({size}{count})"
        case Action.COMPRESS:
            return f"read, compress and upload ({size})"


def disk_need(blobs: Sequence[PlannedBlob]) -> int | None:
    """The most bytes that a push with these blobs writes locally, in bytes."""
    need = 0
    for blob in blobs:
        if blob.action is Action.COPY and blob.descriptor:
            need += blob.descriptor.size
        elif blob.action is Action.COMPRESS:
            if blob.tar_size is None:
                return None
            # Deflate adds five bytes to each 64 KiB that it cannot compress, and gzip 18 bytes (RFC 1951, 3.2.4).
            need += blob.tar_size + blob.tar_size // 4096 + 4096
    return need
