"""Does a file run on a device? The verdict, and what a recipe says about it. Pure.

A fatbin runs on a device if one of its entries does: machine code for it, or PTX that its driver can compile. A file
runs natively if every unit of code that it may load has machine code; where some have nothing, the program works
until it calls one of their kernels, which is worse than not working at all: that is ``partial``.

Libraries that choose their kernels by device themselves (cuBLAS has kernels for sm_80 alone, used on sm_80 alone) are
partial by design. ``DISPATCHING`` names those for which NVIDIA's documentation says which devices they support; all
else needs an exception with a reason, in the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from buildkit.cuda.arch import Arch, cubin_runs_on, ptx_runs_on
from buildkit.cuda.fatbin import KIND_ELF, KIND_PTX
from buildkit.cuda.scan import FileScan, Unit
from buildkit.errors import UsageError

DISPATCHING: Mapping[str, str] = MappingProxyType(
    {
        f"*/{name}{ending}": "an NVIDIA library that chooses its kernels by device"
        for name in (
            "libcublas",
            "libcublasLt",
            "libcudnn",
            "libcudnn_*",
            "libcufft",
            "libcupti",
            "libcurand",
            "libcusolver",
            "libcusolverMg",
            "libcusparse",
            "libcusparseLt",
            "libcutensor",
            "libcutensorMg",
            "libnccl",
            "libnpp*",
            "libnvidia-*",
            "libnvjpeg",
            "libnvinfer*",
            "libnvshmem*",
        )
        for ending in (".so", ".so.*", "_static.a", "_static_*.a")
    }
)


class Verdict(StrEnum):
    """What a file's code means for one required architecture, worst first."""

    MISSING = "missing"
    """No unit runs there."""
    NOT_UNDERSTOOD = "not understood"
    """Part of the file does not parse: what it holds is not known."""
    PARTIAL = "partial"
    """Some units run there, some do not."""
    JIT = "ptx jit"
    """Every unit runs there, some only after the driver has compiled PTX."""
    NATIVE = "native"
    """Every unit has machine code for it."""
    NOT_CUDA = "not cuda"
    """There is no device code in it."""

    @property
    def severity(self) -> int:
        """0 is the worst."""
        return list(Verdict).index(self)


class Support(StrEnum):
    """What one unit of code has for a device."""

    NATIVE = "native"
    JIT = "ptx jit"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one file for one device. ``lacking`` are the units with nothing for it, in order of offset."""

    arch: Arch
    verdict: Verdict
    native: int = 0
    jit: int = 0
    total: int = 0
    lacking: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathException:
    """Files whose verdict is accepted whatever it is; ``path`` is a glob over the whole path (``*`` crosses ``/``)."""

    path: str
    reason: str

    def matches(self, path: str) -> bool:
        return fnmatchcase(_absolute(path), _absolute(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """``<13``, ``>=11.8,<13``, ``==12.9``: comparisons that must all hold. ``==12`` holds for 12.9, too."""

    terms: tuple[tuple[str, tuple[int, ...]], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Raises UsageError for anything but comparisons of numeric versions, joined by commas."""
        terms = []
        for term in text.split(","):
            match = re.fullmatch(r"\s*(<=|>=|==|!=|<|>)\s*(\d{1,4}(?:\.\d{1,4}){0,3})\s*", term)
            if match is None:
                raise UsageError(f"{text!r} is not a range of versions", hint="write it like <13 or >=11.8,<13")
            terms.append((match[1], tuple(int(part) for part in match[2].split("."))))
        return cls(terms=tuple(terms), text=text)

    def __contains__(self, version: tuple[int, ...]) -> bool:
        return all(_holds(operator, version, limit) for operator, limit in self.terms)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an image must satisfy. Without ``require`` nothing is demanded of architectures, only reported.

    ``runtime`` bounds the CUDA versions that the image carries; ``allow_jit`` accepts code that runs by PTX JIT;
    ``offline`` demands that the start needs no network, but for what ``start_exceptions`` names; ``dispatching`` are
    globs of libraries of which ``partial`` is accepted, with the reason.
    """

    require: tuple[Arch, ...] = ()
    runtime: VersionRange | None = None
    exceptions: tuple[PathException, ...] = ()
    allow_jit: bool = True
    offline: bool = True
    start_exceptions: tuple[PathException, ...] = ()
    dispatching: Mapping[str, str] = field(default_factory=lambda: DISPATCHING, hash=False)

    def excuse(self, path: str, verdict: Verdict) -> str | None:
        """Why ``verdict`` is accepted for the file at ``path``; None where it is not, or needs no excuse."""
        if self.accepts(verdict):
            return None
        for exception in self.exceptions:
            if exception.matches(path):
                return exception.reason
        if verdict is Verdict.PARTIAL:
            for pattern, reason in self.dispatching.items():
                if fnmatchcase(_absolute(path), pattern):
                    return reason
        return None

    def accepts(self, verdict: Verdict) -> bool:
        """Whether ``verdict`` is good without an excuse."""
        return verdict in (Verdict.NATIVE, Verdict.NOT_CUDA) or (verdict is Verdict.JIT and self.allow_jit)


def judge(scan: FileScan, arch: Arch) -> Judgement:
    """The verdict on what was found in a file, for a device of capability ``arch``."""
    units = scan.loadable
    support = [unit_support(unit, arch) for unit in units]
    lacking = tuple(u for u, s in zip(units, support, strict=True) if s is Support.NONE)
    native, jit = support.count(Support.NATIVE), support.count(Support.JIT)
    if scan.problems:
        verdict = Verdict.NOT_UNDERSTOOD
    elif not units:
        verdict = Verdict.NOT_CUDA
    elif not lacking:
        verdict = Verdict.JIT if jit else Verdict.NATIVE
    else:
        verdict = Verdict.PARTIAL if native or jit else Verdict.MISSING
    return Judgement(arch=arch, verdict=verdict, native=native, jit=jit, total=len(units), lacking=lacking)


def unit_support(unit: Unit, arch: Arch) -> Support:
    """The best that a unit's entries offer a device: machine code, else PTX, else nothing.

    LTO code and kinds of entries that are not known offer nothing: they need a linker first.
    """
    if any(e.kind == KIND_ELF and cubin_runs_on(e.arch, arch) for e in unit.entries):
        return Support.NATIVE
    if any(e.kind == KIND_PTX and ptx_runs_on(e.arch, arch, _ptx_version(e.version)) for e in unit.entries):
        return Support.JIT
    return Support.NONE


def _ptx_version(version: tuple[int, int]) -> tuple[int, int] | None:
    return version if version > (0, 0) else None


def _absolute(path: str) -> str:
    return "/" + path.lstrip("/")


def _holds(operator: str, version: tuple[int, ...], limit: tuple[int, ...]) -> bool:
    """Compared to the length of ``limit``: 12.9 is not above 12."""
    head = (version + (0,) * len(limit))[: len(limit)]
    match operator:
        case "<":
            return head < limit
        case "<=":
            return head <= limit
        case ">":
            return head > limit
        case ">=":
            return head >= limit
        case "==":
            return head == limit
        case _:
            return head != limit
