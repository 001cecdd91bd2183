"""The committed proof from a GPU against the cases and kernels of today: it cannot go stale unseen."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buildkit.gdn.cases import all_cases, expected, inputs
from buildkit.gdn.compare import _TOLERANCES, tolerance
from buildkit.gdn.contracts import CONTRACTS, Dtype
from buildkit.gdn.faults import Fault

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs/evidence/gdn-kernels.json"
DTYPES: tuple[Dtype, ...] = ("f32", "f16")
HINT = "run benchmarks/gdn_evidence.py on a GPU again"
EVIDENCE: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
BUILDS: dict[str, Any] = EVIDENCE["builds"]


def script(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gdn_evidence.py"), *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_kernels_are_those_that_were_run() -> None:
    source = ROOT / "images/cuda-probe/kernels/gdn.cu"
    assert EVIDENCE["kernels"] == "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest(), HINT


def test_the_report_names_card_driver_and_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", EVIDENCE["commit"])
    for build in BUILDS.values():
        assert build["device"]["name"].startswith("NVIDIA ")
        assert re.fullmatch(r"\d+\.\d+\.\d+", build["device"]["driver"])


def test_every_build_had_the_outcome_that_it_must_have() -> None:
    assert [name for name, build in BUILDS.items() if not build["as_expected"]] == []


def test_every_fault_that_lives_in_the_kernels_was_built_failed_and_was_named() -> None:
    source = (ROOT / "images/cuda-probe/kernels/gdn.cu").read_text(encoding="utf-8")
    there = {f for f in Fault if re.search(rf"GDN_FAULT_{f.value.upper().replace('-', '_')}\b", source)}
    assert {name for name in BUILDS if "." not in name} == {"none", *(fault.value for fault in there)}, HINT
    also = {Fault.QK_SWAPPED: {Fault.QK_SWAPPED_SCALED.value}}
    for fault in there:
        build = BUILDS[fault.value]
        failed = [case for case in build["cases"] if case["verdict"] == "FAIL"]
        assert build["verdict"] == "FAIL"
        assert failed
        for case in failed:
            assert {fault.value, *also.get(fault, ())} & set(case.get("faults", ())), (fault, case["stage"])
        assert any(fault.sentence in line for line in build["diagnosis"]), fault


def test_a_card_without_code_for_it_was_told_from_a_wrong_result() -> None:
    assert BUILDS["none.no-ptx"]["verdict"] == "CANNOT RUN"
    assert "209" in BUILDS["none.no-ptx"]["reason"]


@pytest.mark.parametrize("contract", ["log", "decay"])
def test_the_good_build_passed_every_case_of_today_with_the_reference_of_today(contract: str) -> None:
    build = BUILDS["none" if contract == "log" else "none.decay"]
    assert build["verdict"] == "PASS"
    done = {f"{case['stage']}/{case['case']}/{case['dtype']}": case for case in build["cases"]}
    cases = [case for dtype in DTYPES for case in all_cases(dtype)]
    assert list(done) == [case.id for case in cases], HINT
    for case in cases:
        want = expected(case, inputs(case, CONTRACTS[contract]), CONTRACTS[contract])
        assert want is not None
        for output in done[case.id]["outputs"]:
            array = want[output["name"]]
            scale = float(np.sum(np.abs(array))) or 1.0
            assert abs(output["want_sum"] - float(np.sum(array))) <= 1e-9 * scale, (case.id, HINT)
            assert output["want_absmax"] == pytest.approx(float(np.max(np.abs(array))), rel=1e-9), (case.id, HINT)
            assert output["relative"] <= tolerance(case)


def test_tolerances_leave_room_and_not_more() -> None:
    # What a right kernel had is below the tolerance, and in each stage within three orders of magnitude of it.
    for dtype in ("f32", "f16"):
        for stage in {case.stage for case in all_cases(dtype)}:
            worst = max(
                output["relative"]
                for case in BUILDS["none"]["cases"]
                if case["stage"] == stage and case["dtype"] == dtype
                for output in case["outputs"]
            )
            limit = _TOLERANCES[dtype].get(stage, 2e-5 if dtype == "f32" else 1e-3)
            assert limit / 1000 < worst <= limit, (stage, dtype)


def test_the_table_is_written_from_the_report() -> None:
    page = (ROOT / "docs/evidence/gdn-kernels.md").read_text(encoding="utf-8")
    assert script("table", str(FILE)) == page


def test_the_kernel_level_is_fast_enough() -> None:
    assert all(build["seconds"] <= 30 for build in BUILDS.values())
