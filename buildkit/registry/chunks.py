"""How a blob is cut into request bodies. Pure arithmetic, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from buildkit.errors import ProtocolError, SizeRefusedError
from buildkit.units import format_size

MAX_PARTS = 10_000
"""Parts of one multipart upload in S3 and R2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRules:
    """What one session asks for, in bytes. ``smallest`` does not bind the last chunk; ``largest`` binds every body.
    ``equal``: all but the last of one size."""

    size: int
    smallest: int = 1
    largest: int = 2**63 - 1
    equal: bool = False


def settle(
    wanted: int, *, limit: int, smallest: int | None, largest: int | None, equal: bool, total: int | None
) -> ChunkRules:
    """The chunk size of a session from what is wanted, what the way allows and what the registry demands.

    ``smallest`` and ``largest`` are OCI-Chunk-Min-Length and OCI-Chunk-Max-Length. ``total`` is the blob's size where
    known. Raises SizeRefusedError where the demands leave nothing.
    """
    least = max(1, smallest or 1)
    most = min(limit, largest) if largest else limit
    if least > most:
        raise SizeRefusedError(
            f"the registry wants chunks of at least {format_size(least)}, the way there allows {format_size(most)}",
            hint="raise --limit if the edge allows it, or push from inside the edge",
        )
    size = min(max(wanted, least), most)
    if equal and total is not None:
        size = min(max(size, -(-total // MAX_PARTS)), most)
        # A last part of one byte has first == last, which the Workers registry refuses as an empty range.
        while total % size == 1 and total > 1 and size > max(least, 2):
            size -= 1
    return ChunkRules(size=size, smallest=least, largest=most, equal=equal)


def next_chunk(rules: ChunkRules, *, start: int, available: int, total: int | None) -> tuple[int, int] | None:
    """The next body ``[start, end)``; None while too few bytes are there, or when all are sent.

    While ``total`` is unknown a chunk is cut only with two more bytes behind it, so that none of one byte can remain:
    some registries take ``Content-Range: n-n`` for empty. Where parts need not be equal, the chunk before a last byte
    gives up one of its own.
    """
    end = start + rules.size
    if total is None:
        return (start, end) if available >= end + 2 else None
    if start > total:
        raise ProtocolError(f"the registry claims {start} bytes of a blob of {total}")
    if start == total:
        return None
    if end >= total:
        return start, total
    if total - end == 1 and not rules.equal and rules.size > max(2, rules.smallest):
        return start, end - 1
    return start, end


def needed(rules: ChunkRules, start: int) -> int:
    """How many bytes of a growing blob must be there before ``next_chunk`` gives one."""
    return start + rules.size + 2
