"""Writes tars block by block, with everything that the formats allow and library writers do not.

Sources: POSIX.1-2017 ``pax``, GNU tar manual ("Basic Tar Format", "Storing Sparse Files").
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

END = bytes(1024)


def number(value: int, width: int) -> bytes:
    """Octal digits where they fit, base-256 otherwise."""
    digits = width - 1
    if 0 <= value < 8**digits:
        return f"{value:0{digits}o}".encode() + b"\0"
    return (value + (1 << 8 * width) if value < 0 else value | 1 << (8 * width - 1)).to_bytes(width, "big")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def header(
    name: bytes,
    kind: str = "0",
    *,
    size: int = 0,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 1,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
    magic: bytes = b"ustar\x0000",
    tail: bytes = b"",
) -> bytes:
    """One header block; ``tail`` fills bytes 345 to 512 (prefix, or GNU's own fields)."""
    block = b"".join(
        (
            name[:100].ljust(100, b"\0"),
            number(mode, 8),
            number(uid, 8),
            number(gid, 8),
            number(size, 12),
            number(mtime, 12),
            b" " * 8,
            kind.encode(),
            link[:100].ljust(100, b"\0"),
            magic,
            bytes(64),
            number(device[0], 8),
            number(device[1], 8),
            tail.ljust(167, b"\0"),
        )
    )
    assert len(block) == 512
    return block[:148] + f"{sum(block):06o}\0 ".encode() + block[156:]


def records(pairs: Sequence[tuple[bytes, bytes]] | Mapping[bytes, bytes]) -> bytes:
    """PAX records."""
    out = b""
    for key, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
        body = b" " + key + b"=" + value + b"\n"
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        out += str(length).encode() + body
    return out


def pax(pairs: Sequence[tuple[bytes, bytes]] | Mapping[bytes, bytes], kind: str = "x") -> bytes:
    """An extended header for the next entry (``x``) or for all that follow (``g``)."""
    data = records(pairs)
    return header(b"././@PaxHeader", kind, size=len(data)) + padded(data)


def gnu_long(text: bytes, kind: str = "L") -> bytes:
    """GNU's header for a long name (``L``) or link (``K``)."""
    return header(b"././@LongLink", kind, size=len(text) + 1, magic=b"ustar  \0") + padded(text + b"\0")


def file(name: bytes, data: bytes = b"", **more: int) -> bytes:
    return header(name, size=len(data), **more) + padded(data)  # type: ignore[arg-type]


def directory(name: bytes, mode: int = 0o755, **more: int) -> bytes:
    return header(name.rstrip(b"/") + b"/", "5", mode=mode, **more)  # type: ignore[arg-type]


def hardlink(name: bytes, target: bytes, **more: int) -> bytes:
    return header(name, "1", link=target, **more)  # type: ignore[arg-type]


def symlink(name: bytes, target: bytes, **more: int) -> bytes:
    return header(name, "2", link=target, mode=0o777, **more)  # type: ignore[arg-type]


def gnu_sparse(name: bytes, fragments: Sequence[tuple[int, int]], data: bytes, real: int) -> bytes:
    """An old GNU sparse file; its map goes on in extension blocks beyond four fragments."""
    pairs = [number(offset, 12) + number(length, 12) for offset, length in (*fragments, (real, 0))]
    own, rest = pairs[:4], pairs[4:]
    tail = bytes(41) + b"".join(own).ljust(96, b"\0") + bytes([bool(rest)]) + number(real, 12)
    out = header(name, "S", size=len(data), magic=b"ustar  \0", tail=tail)
    while rest:
        block, rest = rest[:21], rest[21:]
        out += b"".join(block).ljust(504, b"\0") + struct.pack("?7x", bool(rest))
    return out + padded(data)


def tar(*parts: bytes) -> bytes:
    return b"".join(parts) + END
