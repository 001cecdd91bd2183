"""What runs where, and what a recipe may demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.cuda.arch import Arch, cubin_runs_on, ptx_runs_on
from buildkit.cuda.policy import PathException, Policy, Verdict, VersionRange
from buildkit.errors import UsageError

numbers = st.sampled_from([50, 52, 60, 61, 70, 72, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121])


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("sm_70", Arch(70)),
        ("compute_70", Arch(70)),
        ("7.0", Arch(70)),
        ("sm_90a", Arch(90, "a")),
        ("sm_100f", Arch(100, "f")),
        ("12.1", Arch(121)),
        (" sm_70 ", Arch(70)),
    ],
)
def test_architectures_are_read_as_people_write_them(text: str, arch: Arch) -> None:
    assert Arch.parse(text) == arch


@pytest.mark.parametrize("text", ["", "70", "sm70", "sm_7", "sm_90b", "sm_٧٠", "7", "7.00", "sm_70 sm_80", "v100"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="write it like sm_70"):
        Arch.parse(text)


@given(code=numbers, device=numbers)
def test_a_cubin_runs_within_its_major_version_on_the_same_or_a_newer_minor(code: int, device: int) -> None:
    assert cubin_runs_on(Arch(code), Arch(device)) == (code // 10 == device // 10 and code % 10 <= device % 10)


@given(code=numbers, device=numbers)
def test_ptx_runs_on_any_capability_that_is_not_older(code: int, device: int) -> None:
    assert ptx_runs_on(Arch(code), Arch(device), (6, 0)) == (code <= device)


@given(code=numbers, device=numbers)
def test_a_suffixed_target_is_never_taken_for_the_plain_one(code: int, device: int) -> None:
    for runs in (cubin_runs_on(Arch(code, "a"), Arch(device)), ptx_runs_on(Arch(code, "a"), Arch(device), None)):
        assert runs == (code == device)
    assert not cubin_runs_on(Arch(code, "?"), Arch(device))
    assert not ptx_runs_on(Arch(code, "?"), Arch(device), None)
    if cubin_runs_on(Arch(code, "f"), Arch(device)):
        assert code // 10 == device // 10


def test_families() -> None:
    assert cubin_runs_on(Arch(100, "f"), Arch(103))
    assert not cubin_runs_on(Arch(100, "f"), Arch(101))
    assert not cubin_runs_on(Arch(103, "f"), Arch(100))
    assert cubin_runs_on(Arch(120, "f"), Arch(121))
    assert not cubin_runs_on(Arch(90, "f"), Arch(91))


def test_ptx_that_no_driver_for_the_device_knows_does_not_run() -> None:
    assert ptx_runs_on(Arch(70), Arch(70), (9, 0))
    assert not ptx_runs_on(Arch(70), Arch(70), (9, 1))
    assert ptx_runs_on(Arch(75), Arch(75), (9, 9))
    assert not ptx_runs_on(Arch(35), Arch(37), (7, 8))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("<13", [(12, 9), (11, 8, 89), (12,)], [(13,), (13, 0), (14, 1)]),
        (">=11.8,<13", [(11, 8), (12, 0)], [(11, 7), (13, 0)]),
        ("==12", [(12, 9), (12,)], [(11, 8)]),
        ("<=12.8", [(12, 8, 57)], [(12, 9)]),
        ("!=12.7", [(12, 8)], [(12, 7, 1)]),
    ],
)
def test_version_ranges(text: str, inside: list[tuple[int, ...]], outside: list[tuple[int, ...]]) -> None:
    limits = VersionRange.parse(text)
    assert all(v in limits for v in inside)
    assert not any(v in limits for v in outside)


@pytest.mark.parametrize("text", ["", "13", "<", "<13,", "~=12", "<13 >11", "<x"])
def test_what_is_no_range_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="range of versions"):
        VersionRange.parse(text)


def test_excuses_need_a_path_and_partial_is_excused_for_libraries_that_choose_themselves() -> None:
    policy = Policy(require=(Arch(70),), exceptions=(PathException(path="/opt/tools/*", reason="not used"),))
    assert policy.excuse("usr/lib/libcublasLt.so.12", Verdict.PARTIAL)
    assert policy.excuse("usr/lib/libcublasLt.so.12", Verdict.MISSING) is None
    assert policy.excuse("usr/lib/libtorch_cuda.so", Verdict.PARTIAL) is None
    assert policy.excuse("opt/tools/a/b.so", Verdict.MISSING) == "not used"
    assert policy.excuse("opt/toolsx/b.so", Verdict.MISSING) is None
    assert policy.excuse("anything", Verdict.NATIVE) is None
    assert not Policy(allow_jit=False).accepts(Verdict.JIT)
