"""Run the kernel level against the probe library's builds (good, and with each fault) and write one report.

    python benchmarks/gdn_evidence.py --libraries FOLDER --commit HASH --out report.json

FOLDER holds what ``images/cuda-probe/kernels/build.sh`` made: ``none.so`` is the good build, ``<fault>.so`` one with a
fault, ``<fault>.decay.so`` under the later contract, ``none.no-ptx.so`` without PTX. Needs Python, NumPy and a GPU.
Exit status 1 when an outcome is not the one that the build must have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from buildkit.gdn.cases import all_cases, expected, inputs  # noqa: E402
from buildkit.gdn.compare import Verdict, explains  # noqa: E402
from buildkit.gdn.contracts import CONTRACTS  # noqa: E402
from buildkit.gdn.faults import Fault  # noqa: E402
from buildkit.gdn.harness import KernelReport, run_kernel_level  # noqa: E402
from buildkit.gdn.plain import plain  # noqa: E402

# The kernels swap what they are given; for those that get q scaled, that is the swap after scaling.
SAME = {Fault.QK_SWAPPED: (Fault.QK_SWAPPED_SCALED,)}

SOURCE = ROOT / "images/cuda-probe/kernels/gdn.cu"


def first_stage(fault: Fault, contract: str) -> str:
    """The first stage, in the order of the data, in which the fault shows."""
    for case in all_cases("f32"):
        given = inputs(case, CONTRACTS[contract])
        faulty = expected(case, given, CONTRACTS[contract], fault)
        good = expected(case, given, CONTRACTS[contract])
        if faulty is not None and good is not None and case.stage != "gating" and not explains(case, good, faulty):
            return case.stage
    raise ValueError(f"{fault.value} shows in no stage")


def outcome(name: str, report: KernelReport, capability: tuple[int, int] | None) -> str:
    """Empty where the build has the outcome that it must have; else what is wrong with it."""
    fault_name, _, variant = name.partition(".")
    if variant == "no-ptx" and capability and capability[0] != 7:
        return "" if report.verdict is Verdict.CANNOT_RUN else f"verdict {report.verdict.value}, not CANNOT RUN"
    if fault_name == "none":
        return "" if report.verdict is Verdict.PASS else f"verdict {report.verdict.value}: {report.reason}"
    fault = Fault(fault_name)
    names = {fault, *SAME.get(fault, ())}
    stage = first_stage(min(names, key=lambda f: f is fault), "decay" if variant == "decay" else "log")
    failed = [case for case in report.cases if case.verdict is Verdict.FAIL]
    if not failed or failed[0].stage != stage:
        return f"fails first in {failed[0].stage if failed else 'no stage'}, not in {stage}"
    missed = [f"{case.stage}/{case.case}/{case.dtype}" for case in failed if not names & set(case.faults)]
    if missed:
        return f"not named in {', '.join(missed)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the kernel level against the probe library's builds.")
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    builds, wrong = {}, 0
    for path in sorted(options.libraries.glob("*.so")):
        name = path.name.removesuffix(".so")
        variant = name.partition(".")[2]
        start = time.monotonic()
        report = run_kernel_level(path, contract="decay" if variant == "decay" else "log")
        seconds = time.monotonic() - start
        problem = outcome(name, report, report.device.capability if report.device else None)
        wrong += bool(problem)
        builds[name] = {"seconds": round(seconds, 1), "as_expected": not problem, "problem": problem, **plain(report)}
        print(f"{name:28} {report.verdict.value:10} {seconds:5.1f} s  {problem or 'as expected'}", flush=True)
        for line in report.diagnosis:
            print(f"{'':28} {line}", flush=True)
    probed = {}
    for name in ("none", "none.decay"):
        if not (options.libraries / f"{name}.so").exists():
            continue
        start = time.monotonic()
        report = run_kernel_level(options.libraries / f"{name}.so")
        probed[name] = {"seconds": round(time.monotonic() - start, 1), **plain(report)}
        probed[name].pop("cases")
        print(f"probed {name:21} {report.verdict.value:10} {report.contract}", flush=True)
    document = {
        "commit": options.commit,
        "kernels": "sha256:" + hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        "builds": builds,
        "probed": probed,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
