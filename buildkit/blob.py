"""A blob's bytes on disk: complete, or still growing while a compressor writes them.

An upload reads windows of it and can read any of them again; it never holds a blob in memory. While the blob grows, its
digest and size are not known yet, which a chunked upload does not need before its closing request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Protocol

from buildkit.errors import BuildkitError
from buildkit.model import Descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobState:
    """``available`` bytes can be read now; ``descriptor`` is there once it is complete; ``error`` if it failed."""

    available: int
    descriptor: Descriptor | None = None
    error: BuildkitError | None = None

    @property
    def ended(self) -> bool:
        return self.descriptor is not None or self.error is not None


class Blob(Protocol):
    """Safe for use from several threads."""

    @property
    def label(self) -> str:
        """Names the blob to people before its digest is known: ``layer 3/7`` or ``config``."""
        ...

    def state(self) -> BlobState:
        """What can be read now; does not block."""
        ...

    def wait(self, available: int, timeout: float) -> BlobState:
        """Block until at least ``available`` bytes can be read or the blob ended, at most ``timeout`` seconds."""
        ...

    def window(self, start: int, end: int) -> BinaryIO:
        """A new seekable reader over bytes ``[start, end)``, all of which must be available; the caller closes it."""
        ...
