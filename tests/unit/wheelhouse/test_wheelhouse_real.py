"""The real wheels of the GPU lock, 4.2 GB: complete without an index, and sm_70 in every one that counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from platformdirs import user_cache_path
from unit.wheelhouse.prove_wheels import LOCK, scan, summary

from buildkit.wheelhouse import Target, read_lock, resolve_offline

pytestmark = pytest.mark.slow


def test_the_gpu_lock_resolves_offline_and_has_sm_70_throughout() -> None:
    folder = user_cache_path("buildkit-tests") / "wheels-cuda"
    report = scan(folder)
    assert report.ok, report.render()
    assert resolve_offline(read_lock(LOCK), folder, target=Target()) == []
    assert summary(report) == json.loads((Path(__file__).parent / "proven.json").read_text())
