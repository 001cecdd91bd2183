"""Proof of the kernel level on a GPU: run it against the probe library's builds, good and with each fault.

    python benchmarks/gdn_evidence.py run --libraries FOLDER --commit HASH --out FILE.json
    python benchmarks/gdn_evidence.py table FILE.json > docs/evidence/gdn-kernels.md

FOLDER holds what ``images/cuda-probe/kernels/build.sh`` made: ``none.so`` is the good build, ``<fault>.so`` one with a
fault, ``<fault>.decay.so`` under the later contract, ``none.no-ptx.so`` without PTX. Needs Python, NumPy and a GPU; a
file named ``docs/evidence/gdn-kernels.json`` is held against the current cases by a test. Exit status 1 when an outcome
is not the one that the build must have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from buildkit.gdn.cases import all_cases, expected, inputs  # noqa: E402
from buildkit.gdn.compare import Verdict, explains  # noqa: E402
from buildkit.gdn.contracts import CONTRACTS  # noqa: E402
from buildkit.gdn.faults import Fault  # noqa: E402
from buildkit.gdn.harness import CaseResult, KernelReport, run_kernel_level  # noqa: E402
from buildkit.gdn.plain import plain  # noqa: E402

# The kernels swap what they are given; for those that get q scaled, that is the swap after scaling.
SAME = {Fault.QK_SWAPPED: (Fault.QK_SWAPPED_SCALED,)}

SOURCE = ROOT / "images/cuda-probe/kernels/gdn.cu"


def source_digest() -> str:
    """Of the kernels' source, as it is now."""
    return "sha256:" + hashlib.sha256(SOURCE.read_bytes()).hexdigest()


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


def condensed(case: CaseResult) -> dict[str, Any]:
    """A case in one line: of one that passed, what must be there to compare it with the reference; all of the rest."""
    document: dict[str, Any] = plain(case)
    for output in document["outputs"]:
        for key in ("within", "size", "overrun", "unwritten", "nonfinite"):
            if case.verdict is Verdict.PASS or not output[key]:
                del output[key]
        if not output["energy"]:
            del output["energy"]
    return {key: value for key, value in document.items() if value not in ("", [], {})}


def run(libraries: Path, commit: str, out: Path) -> int:
    """Run every build in ``libraries`` and write the report."""
    builds, wrong = {}, 0
    for path in sorted(libraries.glob("*.so")):
        name = path.name.removesuffix(".so")
        variant = name.partition(".")[2]
        start = time.monotonic()
        report = run_kernel_level(path, contract="decay" if variant == "decay" else "log")
        seconds = time.monotonic() - start
        problem = outcome(name, report, report.device.capability if report.device else None)
        wrong += bool(problem)
        builds[name] = {"seconds": round(seconds, 1), "as_expected": not problem, "problem": problem, **plain(report)}
        builds[name]["cases"] = [condensed(case) for case in report.cases]
        print(f"{name:28} {report.verdict.value:10} {seconds:5.1f} s  {problem or 'as expected'}", flush=True)
        for line in report.diagnosis:
            print(f"{'':28} {line}", flush=True)
    probed = {}
    for name in ("none", "none.decay"):
        if not (libraries / f"{name}.so").exists():
            continue
        start = time.monotonic()
        report = run_kernel_level(libraries / f"{name}.so")
        probed[name] = {"seconds": round(time.monotonic() - start, 1), **plain(report)}
        probed[name].pop("cases")
        print(f"probed {name:21} {report.verdict.value:10} {report.contract}", flush=True)
    document = {"commit": commit, "kernels": source_digest(), "builds": builds, "probed": probed}
    out.write_text(dump(document), encoding="utf-8")
    return 1 if wrong else 0


def dump(document: dict[str, Any]) -> str:
    """JSON with a line for each case, so that a new run can be compared with an old one."""
    text = json.dumps({**document, "builds": None, "probed": document["probed"]}, indent=1)
    builds = []
    for name, build in document["builds"].items():
        cases = ",\n   ".join(json.dumps(case) for case in build["cases"])
        head = json.dumps({key: value for key, value in build.items() if key != "cases"})
        builds.append(f'  {json.dumps(name)}: {head[:-1]}, "cases": [\n   {cases}\n  ]}}')
    return text.replace('"builds": null', '"builds": {\n' + ",\n".join(builds) + "\n }") + "\n"


def table(document: dict[str, Any]) -> Iterator[str]:
    """The report for people, as Markdown."""
    builds = document["builds"]
    device = builds["none"]["device"]
    yield "# The kernel level on a GPU"
    yield ""
    yield (
        f"{device['name']}, capability {device['capability'][0]}.{device['capability'][1]}, driver {device['driver']} "
        f"(CUDA {device['cuda']}); commit `{document['commit']}`, kernels `{document['kernels'][:19]}…`, built by nvcc "
        "11.8 for sm_70 with compute_70 PTX, which the driver compiles for a newer card."
    )
    yield ""
    yield "Written by `benchmarks/gdn_evidence.py`; the figures are in `gdn-kernels.json`."
    yield ""
    yield "| build | verdict | cases that fail | named | seconds |"
    yield "| --- | --- | --- | --- | --- |"
    for name, build in builds.items():
        failed = [case for case in build["cases"] if case["verdict"] == "FAIL"]
        if build["verdict"] == "CANNOT RUN":
            failed = []
        stages = ", ".join(dict.fromkeys(case["stage"] for case in failed)) or "-"
        named = ", ".join(dict.fromkeys(fault for case in failed for fault in case.get("faults", ()))) or "-"
        count = f"{len(failed)} of {len(build['cases'])}: {stages}" if failed else build["reason"]
        yield f"| {name} | {build['verdict']} | {count} | {named} | {build['seconds']} |"
    for name, probed in document["probed"].items():
        reason = probed["contract"]["doubt"] or probed["reason"]
        yield f"| {name}, contract probed | {probed['verdict']} | {reason} | - | {probed['seconds']} |"
    yield ""
    yield "## The good build, stage by stage"
    yield ""
    yield "| case | output | sum | reference | absmax | reference | worst absolute | worst relative | at |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in builds["none"]["cases"]:
        for output in case["outputs"]:
            at = ",".join(map(str, output["relative_index"]))
            yield (
                f"| {case['stage']} {case['case']} {case['dtype']} | {output['name']} | {output['sum']:.6g} | "
                f"{output['want_sum']:.6g} | {output['absmax']:.6f} | {output['want_absmax']:.6f} | "
                f"{output['absolute']:.1e} | {output['relative']:.1e} | {at} |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("--libraries", type=Path, required=True)
    one.add_argument("--commit", required=True)
    one.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table(json.loads(options.file.read_text(encoding="utf-8")))))
        return 0
    return run(options.libraries, options.commit, options.out)


if __name__ == "__main__":
    sys.exit(main())
