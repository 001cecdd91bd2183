"""Writes fatbins, ELF files and archives for the tests: from the format's description, not with the parser's code."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lz4.block
import zstandard

PTX, CUBIN, LTO = 1, 2, 8
LZ4, ZSTD, SUFFIX_A, SUFFIX_F = 0x2000, 0x8000, 0x100000, 0x200000


def ptx_text(target: str = "sm_70", kernel: str = "scale") -> bytes:
    return f".version 7.8\n.target {target}\n.address_size 64\n.visible .entry {kernel}() {{ ret; }}\n".encode()


def entry(
    kind: int, arch: int, payload: bytes, *, flags: int = 0x11, version: tuple[int, int] = (7, 8), header: int = 64
) -> bytes:
    """A fatbin entry; the payload is compressed as ``flags`` say."""
    stored, compressed, size = payload, 0, 0
    if flags & ZSTD:
        stored = zstandard.ZstdCompressor().compress(payload)
    elif flags & LZ4:
        stored = lz4.block.compress(payload, store_size=False)
    if stored is not payload:
        compressed, size = len(stored), len(payload)
    stored += bytes(-len(stored) % 8)
    fixed = struct.pack(
        "<HHIQIIHHIIIQQQ",
        kind,
        0x101,
        header,
        len(stored),
        compressed,
        0,
        version[1],
        version[0],
        arch,
        0,
        0,
        flags,
        0,
        size,
    )
    return fixed + bytes(header - 64) + stored


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section to be: its name, content, type and flags."""

    name: str
    data: bytes = b""
    type: int = 1
    flags: int = 2
    link: int = 0
    entry_size: int = 0


def elf(*parts: Part, machine: int = 62, type: int = 3, flags: int = 0, abi: tuple[int, int] = (0, 0)) -> bytes:
    """A 64-bit little-endian ELF file with sections and no segments: header, contents, names, section headers."""
    names = b"\0"
    body = bytearray(64)
    rows = [struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for part in (*parts, Part(name=".shstrtab", type=3, flags=0)):
        body += bytes(-len(body) % 8)
        at = len(names)
        names += part.name.encode() + b"\0"
        data = names if part.name == ".shstrtab" else part.data
        rows.append(
            struct.pack(
                "<IIQQQQIIQQ",
                at,
                part.type,
                part.flags,
                0,
                len(body),
                len(data),
                part.link,
                0,
                8,
                part.entry_size,
            )
        )
        body += data
    body += bytes(-len(body) % 8)
    table = len(body)
    ident = b"\x7fELF\x02\x01\x01" + bytes((abi[0], abi[1])) + bytes(7)
    header = struct.pack("<HHIQQQIHHHHHH", type, machine, 1, 0, 0, table, flags, 64, 0, 0, 64, len(rows), len(rows) - 1)
    body[:64] = ident + header
    return bytes(body) + b"".join(rows)


def cubin(arch: int = 70, kernels: tuple[str, ...] = ("scale",)) -> bytes:
    """A cubin of ELF ABI 7 with its symbols."""
    strings = b"\0"
    symbols = bytes(24)
    for index, name in enumerate(kernels):
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, 3 + index, 0, 16)
        strings += name.encode() + b"\0"
    return elf(
        Part(name=".symtab", data=symbols, type=2, flags=0, link=2, entry_size=24),
        Part(name=".strtab", data=strings, type=3, flags=0),
        *(Part(name=f".text.{name}", data=bytes(16), flags=6) for name in kernels),
        machine=190,
        type=2,
        flags=arch << 16 | 0x500 | arch,
        abi=(51, 7),
    )


def member(name: str, data: bytes) -> bytes:
    """A member of a static archive."""
    return f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)


def ar(*members: bytes) -> bytes:
    return b"!<arch>\n" + b"".join(members)
