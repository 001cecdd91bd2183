"""Cubins: the ELF files that hold machine code for one architecture (``e_machine`` 190, EM_CUDA).

No public specification; seen in ``ptxas`` output of CUDA 11.8, 12.9 and 13.0, and the flags named in LLVM's
``BinaryFormat/ELF.h`` (``EF_CUDA_SM``, ``EF_CUDA_ACCELERATORS``):

- ABI version 7 and before: the architecture is the lowest byte of ``e_flags``; 0x800 marks the suffix ``a`` (on sm_90
  and later: older cubins have the bit with another meaning).
- ABI version 8: the architecture is bits 8 to 15; 0x8 marks ``a`` in early compilers. ``ptxas`` 13.0 writes no mark at
  all: the suffix then stands only in its own command line (``-arch sm_100f``), kept in ``.note.nv.tkinfo``, and, on
  sm_100 and later, in ``.nv.compat``.
- Kernels are functions in ``.symtab`` with bit 0x10 of ``st_other`` (STO_CUDA_ENTRY).
"""

from __future__ import annotations

import re

from buildkit.cuda import elf
from buildkit.cuda.arch import Arch, Suffix
from buildkit.cuda.readat import ReadAt
from buildkit.errors import FormatError

MAX_KERNELS = 1 << 16
_STT_FUNC = 2
_STO_ENTRY = 0x10
_MAX_NOTE = 64 * 1024
_TARGET = re.compile(rb"(?:^|[\s\0])(?:-arch|--gpu-name)[= ]\"?sm_(\d{2,3})([a-z]?)\b")
_FIRST_WITH_SUFFIX = 90
_CONTENT = (".text", ".nv.global", ".nv.constant")


def read_arch(handle: ReadAt, header: elf.Header) -> Arch:
    """The architecture of the cubin at offset 0. Raises FormatError where its flags name none."""
    if header.abi_version >= 8:
        number, accelerated = header.flags >> 8 & 0xFF, bool(header.flags & 0x8)
    else:
        number, accelerated = header.flags & 0xFF, bool(header.flags & 0x800)
    if number < 10:
        raise FormatError(f"a cubin's flags {header.flags:#x} name no architecture", offset=48)
    if number < _FIRST_WITH_SUFFIX:
        return Arch(number)
    return Arch(number, "a" if accelerated else _suffix(handle, header, number))


def kernels(handle: ReadAt) -> list[str]:
    """Mangled names of the kernels of the cubin at offset 0, sorted. Raises FormatError for anything but a cubin."""
    header = elf.read_header(handle)
    if header.machine != elf.EM_CUDA:
        raise FormatError(f"is for {header.machine_name}, not a cubin", offset=18)
    names: set[str] = set()
    for symbol in elf.iter_symbols(handle, header, elf.read_sections(handle, header)):
        if symbol.type == _STT_FUNC and symbol.other & _STO_ENTRY and symbol.section:
            names.add(symbol.name)
            if len(names) > MAX_KERNELS:
                raise FormatError(f"has more than {MAX_KERNELS} kernels")
    return sorted(names)


def extent(header: elf.Header, sections: tuple[elf.Section, ...]) -> int:
    """Bytes up to the end of the last table or section: how far an embedded cubin reaches, or claims to."""
    ends = [header.sections_at + header.section_size * header.section_count]
    ends.append(header.segments_at + header.segment_size * header.segment_count)
    ends.extend(s.offset + s.size for s in sections if s.type not in (0, elf.SHT_NOBITS))
    return max(ends)


def has_content(sections: tuple[elf.Section, ...]) -> bool:
    """Whether a cubin with these sections holds code, variables or constants.

    ``nvcc`` links an empty cubin for its default architecture (sm_52 until CUDA 12) into whatever it links with
    relocatable device code on; nothing can fail to run in it.
    """
    return any(s.name.startswith(_CONTENT) for s in sections)


def _suffix(handle: ReadAt, header: elf.Header, number: int) -> Suffix:
    """From the notes of the compiler. Code that could have a suffix and does not say so gets ``?``: not the plain."""
    for section in elf.read_sections(handle, header):
        if section.name != ".note.nv.tkinfo":
            continue
        for match in _TARGET.finditer(handle.read(section.offset, min(section.size, _MAX_NOTE))):
            if int(match[1]) == number:
                letter = match[2].decode()
                return "" if letter == "" else "a" if letter == "a" else "f" if letter == "f" else "?"
    # The mark of ABI version 7 is in e_flags, and was not set.
    return "?" if header.abi_version >= 8 else ""
