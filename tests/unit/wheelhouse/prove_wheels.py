"""Fetches the wheels of the GPU lock, scans them all for sm_70 and prints what was found, as JSON.

After a change of the lock (4.2 GB to fetch, three minutes)::

    python tests/unit/wheelhouse/prove_wheels.py FOLDER > tests/unit/wheelhouse/proven.json

The suite compares the lock with that file; the slow test repeats the scan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException
from buildkit.recipe import load
from buildkit.wheelhouse import WheelhouseReport, wheelhouse

REPOSITORY = Path(__file__).resolve().parents[3]
LOCK = REPOSITORY / "images" / "clef-serve" / "requirements-cuda.txt"


def scan(folder: Path) -> WheelhouseReport:
    recipe = load("clef-serve", REPOSITORY / "images")
    exceptions = [PathException(path=e.path, reason=e.reason) for e in recipe.cuda.exceptions]
    return wheelhouse(LOCK, folder, arch=Arch.parse(recipe.cuda.require[0]), exceptions=exceptions)


def summary(report: WheelhouseReport) -> dict[str, Any]:
    """Every wheel with CUDA code: its worst file, how much of it has the architecture, and the excuse."""
    wheels = []
    for found in report.wheels:
        if not found.cuda_files:
            continue
        worst = min(found.cuda_files, key=lambda f: (f.good, f.covered / f.total if f.total else 0.0, -f.total))
        wheels.append(
            {
                "name": found.wheel.name,
                "version": found.wheel.version,
                "sha256": found.wheel.sha256,
                "files": len(found.cuda_files),
                "worst": worst.path,
                "verdict": str(worst.verdict),
                "covered": worst.covered,
                "total": worst.total,
                "excuse": worst.excuse,
            }
        )
    return {"architecture": "sm_70", "ok": report.ok, "wheels": wheels}


if __name__ == "__main__":
    result = scan(Path(sys.argv[1]))
    print(result.render(), file=sys.stderr)
    print(json.dumps(summary(result), indent=1))
    sys.exit(0 if result.ok else 1)
