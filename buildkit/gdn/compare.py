"""What a kernel left in its outputs against what it should have: figures, verdict, and the fault that explains it.

Pure. An element's relative error is |got - want| / (|want| + rms(want)): the root mean square keeps values near zero
from deciding, and rounding in the dtype stays below the tolerance at every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buildkit.gdn.cases import Arrays, Case
from buildkit.gdn.reference import Array

_TOLERANCES = {
    "f32": {
        "conv_prefill": 2e-6,
        "conv_decode": 2e-6,
        "gating": 4e-6,
        "l2_norm": 2e-6,
        "gated_norm": 4e-6,
        "chain": 1e-4,
    },
    "f16": {
        "conv_prefill": 1e-3,
        "conv_decode": 1e-3,
        "gating": 1e-3,
        "l2_norm": 1e-3,
        "gated_norm": 1e-3,
        "chain": 2e-2,
    },
}
_RECURRENT = {"f32": 2e-5, "f16": 1e-3}

SEEN = 0.05
"""Share of an output that must be comparable (finite, in range) before a fault may be said to explain it."""


class Verdict(Enum):
    """PASS and FAIL are results. The rest are not: nothing was run, the GPU cannot run the code, or what is needed to
    judge is not known; none of them counts as a pass."""

    PASS = "PASS"  # noqa: S105 - a verdict, no password
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"
    CANNOT_RUN = "CANNOT RUN"
    UNKNOWN = "UNKNOWN"


def tolerance(case: Case) -> float:
    """The largest relative error of a right kernel, with room for another order of summation."""
    return _TOLERANCES[case.dtype].get(case.stage, _RECURRENT[case.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFigures:
    """One output array. ``index`` and ``relative_index`` point at the worst elements; ``energy`` is Σx² of each band,
    got and wanted (conv stages only); ``unwritten`` counts elements that still hold the poison."""

    name: str
    sum: float
    want_sum: float
    absmax: float
    want_absmax: float
    absolute: float
    index: tuple[int, ...]
    relative: float
    relative_index: tuple[int, ...]
    energy: dict[str, tuple[float, float]]
    unwritten: int
    nonfinite: int
    size: int
    within: float
    overrun: bool
    verdict: Verdict

    @property
    def note(self) -> str:
        """What stands out, for people; may be empty."""
        if self.unwritten == self.size:
            return f"{self.name} was never written"
        if self.unwritten:
            return f"{self.name}: {self.unwritten} of {self.size} elements never written"
        if self.nonfinite:
            return f"{self.name}: {self.nonfinite} of {self.size} elements are not finite"
        if self.overrun:
            return f"{self.name}: written beyond its end"
        for band, (got, want) in self.energy.items():
            if want > 0 and got < 1e-6 * want:
                return f"{self.name}: the {band} band is zero (energy {got:.3g}, should be {want:.6g})"
        return ""


def figures(case: Case, name: str, got: NDArray[Any], want: Array, *, guard: bool = True) -> OutputFigures:
    """Compare one output; ``got`` in its own dtype, as it came from the device; ``guard``: the bytes after it held."""
    if got.shape != want.shape:
        raise ValueError(f"{case.id}: {name} has shape {got.shape}, expected {want.shape}")
    poison = _poisoned(got)
    value = got.astype(np.float64)
    finite = np.isfinite(value)
    error = np.where(finite, np.abs(np.where(finite, value, 0.0) - want), np.inf)
    scale = np.abs(want) + float(np.sqrt(np.mean(want * want)))
    relative = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    limit = tolerance(case)
    absolute_at = np.unravel_index(int(np.argmax(error)), error.shape)
    relative_at = np.unravel_index(int(np.argmax(relative)), relative.shape)
    energy = {}
    if name == "out" and case.stage.startswith("conv"):
        for band, channels in case.shape.bands().items():
            seen = np.where(finite, value, 0.0)[:, channels]
            energy[band] = (float(np.sum(seen**2)), float(np.sum(want[:, channels] ** 2)))
    good = bool(np.all(relative <= limit)) and guard
    return OutputFigures(
        name=name,
        sum=float(np.sum(np.where(finite, value, 0.0))),
        want_sum=float(np.sum(want)),
        absmax=float(np.max(np.abs(np.where(finite, value, 0.0)))),
        want_absmax=float(np.max(np.abs(want))),
        absolute=float(error[absolute_at]),
        index=tuple(int(i) for i in absolute_at),
        relative=float(relative[relative_at]),
        relative_index=tuple(int(i) for i in relative_at),
        energy=energy,
        unwritten=int(np.count_nonzero(poison)),
        nonfinite=int(np.count_nonzero(~finite & ~poison)),
        size=int(want.size),
        within=float(np.mean(relative <= limit)),
        overrun=not guard,
        verdict=Verdict.PASS if good else Verdict.FAIL,
    )


def explains(case: Case, got: dict[str, NDArray[Any]], want: Arrays) -> bool:
    """Whether ``want`` (computed with a fault) is what the kernel gave, in every output.

    A fault that drives values out of the dtype's range leaves inf and NaN, which say nothing, and near them rounding
    that says little: then more than half of what is in range must agree, and be at least ``SEEN`` of the output. (No
    wrong fault reaches half on any case; the tests measure it.)
    """
    limits = {name: float(np.finfo(got[name].dtype).max) for name in want}
    overflows = any(bool(np.any(np.abs(array) > 0.1 * limits[name])) for name, array in want.items())
    for name, array in want.items():
        value, largest = got[name].astype(np.float64), limits[name]
        if np.any(np.isfinite(value) & (np.abs(array) > 10 * largest)):
            return False
        seen = np.isfinite(value) & (np.abs(array) < 0.1 * largest)
        if not overflows and not np.all(seen):
            return False
        if np.mean(seen) < SEEN and name == "out":
            return False
        if not np.any(seen):
            continue
        # next to values that explode, the root mean square would let everything else agree
        scale = np.abs(array[seen]) + (0.0 if overflows else float(np.sqrt(np.mean(array[seen] ** 2))))
        agree = np.abs(value[seen] - array[seen]) <= 4 * tolerance(case) * scale
        if np.mean(agree) <= 0.5 if overflows else not np.all(agree):
            return False
    return True


def _poisoned(array: NDArray[Any]) -> NDArray[np.bool_]:
    words = np.ascontiguousarray(array)
    if array.dtype == np.float16:
        return np.equal(words.view(np.uint16), np.uint16(0xFFFF))
    return np.equal(words.view(np.uint32), np.uint32(0xFFFFFFFF))
