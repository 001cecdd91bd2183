"""CUDA architectures: ``sm_70``, ``sm_90a``, ``sm_100f``, and what runs where.

Sources: CUDA C++ Programming Guide, "Compute Capabilities", "Application Compatibility" and "Feature Set Compiler
Targets" (binary code runs within a major version on the same or a newer minor one; PTX on the same or a newer
capability; architecture-specific targets run on exactly their own capability, family-specific ones within their
family); PTX ISA, "Release Notes" and ``.target``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from buildkit.errors import UsageError

Suffix = Literal["", "a", "f", "?"]
_FAMILIES = {100: (100, 103), 101: (101,), 103: (103,), 110: (110,), 120: (120, 121), 121: (121,)}
"""Capabilities on which a family-specific target runs ("Feature Set Compiler Targets", table of families)."""
_NAME = re.compile(r"(?:sm_|compute_)(?P<number>\d{2,4})(?P<suffix>[af]?)|(?P<major>\d{1,2})\.(?P<minor>\d)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """A compute capability, ten times major plus minor, and a suffix.

    ``a`` is architecture-specific (``sm_90a``), ``f`` family-specific (``sm_100f``), ``?`` an unknown kind of
    restriction: such code is known to exist and not known to run anywhere.
    """

    number: int
    suffix: Suffix = ""

    @classmethod
    def parse(cls, text: str) -> Arch:
        """From ``sm_70``, ``compute_70``, ``sm_90a`` or ``7.0``. Raises UsageError for anything else."""
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a CUDA architecture", hint="write it like sm_70, sm_90a or 7.0")
        if match["major"]:
            return cls(int(match["major"]) * 10 + int(match["minor"]))
        suffix: Suffix = "a" if match["suffix"] == "a" else "f" if match["suffix"] == "f" else ""
        return cls(int(match["number"]), suffix)

    @property
    def major(self) -> int:
        return self.number // 10

    @property
    def minor(self) -> int:
        return self.number % 10

    @property
    def sm(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        return f"compute_{self.number}{self.suffix}"

    def __str__(self) -> str:
        return self.sm


def cubin_runs_on(code: Arch, device: Arch) -> bool:
    """Whether machine code for ``code`` runs on a device of capability ``device`` (its suffix says nothing here).

    Plain code for X.Z runs on X.Y with Y >= Z; code with a suffix where ``_restricted`` says so.
    """
    if code.suffix:
        return _restricted(code, device)
    return code.major == device.major and code.minor <= device.minor


def ptx_runs_on(code: Arch, device: Arch, version: tuple[int, int] | None) -> bool:
    """Whether a driver can compile PTX for ``code``, of PTX ISA ``version``, for a device of capability ``device``.

    A version that is unknown (None) is taken for good: it is the text that says it, and a compressed entry's header.
    """
    newest = newest_ptx(device)
    if version is not None and newest is not None and version > newest:
        return False
    return _restricted(code, device) if code.suffix else code.number <= device.number


def _restricted(code: Arch, device: Arch) -> bool:
    """Architecture-specific code runs on its own capability alone, family-specific code within its family."""
    if code.suffix == "f":
        return device.number in _FAMILIES.get(code.number, (code.number,))
    return code.suffix == "a" and code.number == device.number


def newest_ptx(device: Arch) -> tuple[int, int] | None:
    """The newest PTX ISA version that any driver for ``device`` will ever know; None where drivers still come.

    R580 (CUDA 13.0, PTX ISA 9.0) is the last driver branch for Maxwell, Pascal and Volta (driver release notes 580);
    R470 (CUDA 11.4, PTX ISA 7.4) the last for Kepler. Source for the pairs: PTX ISA, table "PTX Release History".
    """
    if device.number < 50:
        return (7, 4)
    if device.number < 75:
        return (9, 0)
    return None
