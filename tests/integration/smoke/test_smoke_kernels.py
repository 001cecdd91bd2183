"""The kernel level with the probe kernels built for the processor: the whole way from the library to the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from smokeworld.emulate import KERNELS, build_kernels

from buildkit.errors import NotFoundError
from buildkit.gdn.cases import all_cases
from buildkit.gdn.compare import Verdict
from buildkit.gdn.faults import Fault
from buildkit.gdn.harness import KernelReport, run_kernel_level

pytestmark = pytest.mark.usefixtures("gpu")

IN_KERNELS = tuple(re.findall(r"GDN_FAULT_([A-Z0-9_]+)\b(?!>)", KERNELS.read_text(encoding="utf-8")))
FAULTS = tuple(f for f in Fault if f.value.upper().replace("-", "_") in IN_KERNELS)
USUAL = (Fault.KEY_BAND_ZEROED, Fault.L2_NORM_OTHERS_RAW)
# The kernels swap what they are given; for those that get q scaled, that is the swap after scaling.
ALSO = {Fault.QK_SWAPPED: {Fault.QK_SWAPPED_SCALED}}


def run(library: Path, **options: object) -> KernelReport:
    return run_kernel_level(library, dtypes=("f32",), **options)  # type: ignore[arg-type]


def test_the_faults_that_live_in_kernels_are_all_there() -> None:
    assert len(FAULTS) == 15
    assert not set(Fault) - set(FAULTS) - {Fault.STATE_NOT_RESET, Fault.QK_SWAPPED_SCALED}


def test_the_good_build_passes_every_stage_by_the_contract_that_is_probed(kernels: Path) -> None:
    report = run_kernel_level(kernels)
    assert report.verdict is Verdict.PASS, report.reason
    assert len(report.cases) == len(all_cases("f32")) + len(all_cases("f16"))
    assert report.contract is not None
    assert report.contract.reason == "probed: as log"
    assert report.contract.contract.describe().startswith("gates io, gating parameters io, gating writes the log decay")
    assert report.device is not None
    assert report.device.name == "Emulated GPU"


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.value, marks=() if f in USUAL else pytest.mark.slow) for f in FAULTS]
)
def test_each_fault_fails_and_is_named_in_every_case_that_shows_it(fault: Fault, tmp_path: Path) -> None:
    report = run(build_kernels(tmp_path / "faulty.so", fault=fault.value), contract="log")
    failed = [case for case in report.cases if case.verdict is Verdict.FAIL]
    assert failed
    assert all({fault, *ALSO.get(fault, ())} & set(case.faults) for case in failed)
    assert report.diagnosis


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "decay-twice", "decay-raw"])
def test_the_later_contract_is_probed_and_left_in_doubt_without_a_revision(fault: str, tmp_path: Path) -> None:
    library = build_kernels(tmp_path / "later.so", fault=fault, contract="decay")
    declared = run_kernel_level(library, contract="decay")
    probed = run_kernel_level(library)
    assert declared.verdict is (Verdict.PASS if fault == "none" else Verdict.FAIL)
    assert probed.contract is not None
    assert probed.verdict is (Verdict.FAIL if fault == "decay-raw" else Verdict.UNKNOWN)
    if fault == "none":
        assert "name the source revision" in probed.reason
    if fault == "decay-twice":  # the same as a library that reads the log decay
        assert "no known revision is called like this" in probed.reason


def broken(source: str) -> str:
    """One library with one thing wrong in each of four kernels: crash, missing, never written, NaN."""
    for entry, body in (
        ("run_l2_norm(const T *in, T *out, int rows, int dim, float eps, int64_t stream) {", "__builtin_trap();"),
        ("run_gating(", ""),
    ):
        assert entry in source
        source = source.replace(entry, f"{entry}\n    {body}", 1) if body else source
    source = source.replace("g[i] = store<G>(", "if (i < 0) g[i] = store<G>(")
    source = source.replace("beta[i] = store<G>(", "if (i < 0) beta[i] = store<G>(")
    source = source.replace("causal_conv1d_update_slots_##SUFFIX", "renamed_##SUFFIX")
    source = source.replace("causal_conv1d_update_slots_f32", "renamed_f32")
    return source.replace("const float scale = rsqrtf(sums[0] / group + eps);", "const float scale = sqrtf(-1.0f);")


def test_crash_missing_symbol_unwritten_and_nan_outputs_each_have_their_verdict(tmp_path: Path) -> None:
    source = broken(KERNELS.read_text(encoding="utf-8"))
    report = run(build_kernels(tmp_path / "broken.so", source=source), contract="log")
    notes = {case.stage: case.note for case in report.cases if case.verdict is Verdict.FAIL}
    passed = {case.stage for case in report.cases if case.verdict is Verdict.PASS}
    assert report.verdict is Verdict.FAIL
    assert "SIG" in notes["l2_norm"]
    assert notes["conv_decode"] == "no symbol causal_conv1d_update_slots_f32, which contract 'log' expects"
    assert "was never written" in notes["gating"]
    assert "not finite" in notes["gated_norm"]
    assert passed == {"conv_prefill", "recurrence", "recurrence_gqa", "decode", "decode_gqa"}


@pytest.mark.slow  # waits for the time-out
def test_a_kernel_that_hangs_is_ended(tmp_path: Path) -> None:
    entry = "run_l2_norm(const T *in, T *out, int rows, int dim, float eps, int64_t stream) {"
    source = KERNELS.read_text(encoding="utf-8").replace(entry, f"{entry}\n    for (volatile int i = 0;; i = 1) {{}}")
    report = run(build_kernels(tmp_path / "hangs.so", source=source), contract="log", timeout=10.0)
    notes = {case.stage: case.note for case in report.cases if case.verdict is Verdict.FAIL}
    assert notes["l2_norm"] == "the worker did not finish within 10 s and was ended in this call"


def test_code_that_the_card_cannot_run_is_not_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Launches fail, outputs stay poisoned, and the driver refuses the library's fatbin.
    monkeypatch.setenv("EMULATED_LOAD", "209")
    source = re.sub(r"(\w+<[^;{}]*?>)<<<.*?>>>\(\s*.*?\);", ";", KERNELS.read_text(encoding="utf-8"), flags=re.DOTALL)
    library = build_kernels(tmp_path / "silent.so", source=source)
    with library.open("ab") as file:
        file.write(
            b"\0" * (-file.tell() % 8) + b"\x50\xed\x55\xba\x01\x00\x10\x00" + (8).to_bytes(8, "little") + b"\0" * 8
        )
    report = run(library, contract="log")
    assert report.verdict is Verdict.CANNOT_RUN
    assert report.reason == (
        "Emulated GPU (capability 7.0) cannot run this code: CUDA error 209 (CUDA_ERROR_NO_BINARY_FOR_GPU)"
    )


def test_no_gpu_is_not_run_and_a_file_that_is_no_library_fails(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.so").write_text("no library")
    report = run(tmp_path / "text.so", contract="log")
    assert report.verdict is Verdict.FAIL
    assert "text.so cannot be loaded" in report.reason
    monkeypatch.setenv("EMULATED_GPUS", "0")
    report = run(kernels, contract="log")
    assert report.verdict is Verdict.NOT_RUN
    assert "finds no usable GPU: CUDA error 100 (CUDA_ERROR_NO_DEVICE)" in report.reason
    with pytest.raises(NotFoundError, match="no library"):
        run(tmp_path / "none.so")
