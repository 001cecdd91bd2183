"""What a shared library exports, read from the file: whether it can hold the kernels at all is known without a GPU.

Sources: System V ABI, "Object Files" (gABI 4.1), ``SHT_DYNSYM``; "Dynamic Linking" (gABI 5.1).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from buildkit.cuda import elf
from buildkit.cuda.readat import FileReader
from buildkit.errors import FormatError

_SHT_DYNSYM = 11
_SHN_UNDEF = 0
_GLOBAL, _WEAK, _UNIQUE = 1, 2, 10


def exports(path: Path) -> frozenset[str] | None:
    """The names that the library at ``path`` gives to others; None where its sections, which tell, were taken off.

    Raises FormatError for what no dynamic linker can load (no ELF file, no shared object, cut short), OSError.
    """
    with path.open("rb") as file:
        handle = FileReader(file)
        header = elf.read_header(handle)
        if header.type != elf.ET_DYN or header.bits != 64 or header.machine == elf.EM_CUDA:
            raise FormatError(f"is no shared library but {header.bits}-bit {header.type_name}, {header.machine_name}")
        segments = elf.read_segments(handle, header)
        if not any(segment.type == elf.PT_DYNAMIC for segment in segments):
            raise FormatError("is no shared library: it has nothing for the dynamic linker")
        for segment in segments:
            end = segment.offset + segment.file_size
            if segment.type == elf.PT_LOAD and end > handle.size:
                raise FormatError(f"is cut short: {handle.size} bytes of at least {end}")
        sections = elf.read_sections(handle, header)
        # The walk over symbols takes static tables, which stripped libraries lack; a dynamic one is laid out alike.
        dynamic = tuple(replace(s, type=elf.SHT_SYMTAB if s.type == _SHT_DYNSYM else elf.SHT_STRTAB) for s in sections)
        if not any(section.type == _SHT_DYNSYM for section in sections):
            return None
        return frozenset(
            symbol.name
            for symbol in elf.iter_symbols(handle, header, dynamic)
            if symbol.section != _SHN_UNDEF and symbol.binding in (_GLOBAL, _WEAK, _UNIQUE)
        )
