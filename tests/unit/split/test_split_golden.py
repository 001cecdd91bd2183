"""Every golden image: its tree is what was written down, and dividing it at any limit changes nothing."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from golden.split.cases import CASES, Case
from golden.split.sources import TarsSource

from buildkit.image.compress import DEFAULT_CODEC, compress_segment
from buildkit.image.tarspan import TRAILER
from buildkit.split.bonds import find_bonds
from buildkit.split.flatten import compare, flatten, layer_tree
from buildkit.split.invariants import check_plan
from buildkit.split.measure import measure
from buildkit.split.planner import Budget, plan, recut
from buildkit.split.rewrite import SplitOptions, split_image
from buildkit.split.spool import Spool

LIMITS = (1024, 2048, 7_000, 20_000)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_tree_is_what_was_written_down(case: Case) -> None:
    tree = flatten(TarsSource(case.layers))
    assert tree.nodes() == case.whole
    assert tree.link_groups() == case.links


@each_case
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("stable", [True, False], ids=["stable", "sequential"])
def test_divided_tree_is_the_same(case: Case, limit: int, stable: bool) -> None:
    options = SplitOptions(limit=limit, stable=stable, max_layers=10**6, threads=2)
    with split_image(TarsSource(case.layers), options) as result:
        tree = flatten(result.image)
        assert tree.nodes() == case.whole
        assert tree.link_groups() == case.links
        excused = {part.digest for _, part, _ in result.report.indivisible}
        for layer in result.image.layers:
            assert layer.blob is not None
            assert layer.blob.size <= limit or layer.blob.digest in excused


@each_case
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("stable", [True, False], ids=["stable", "sequential"])
def test_plan_keeps_the_rules(case: Case, limit: int, stable: bool) -> None:
    overhead = DEFAULT_CODEC.overhead + compress_segment(DEFAULT_CODEC, TRAILER).size
    budget = Budget(limit=limit, overhead=overhead, stable=stable)
    for tar in case.layers:
        with Spool(None) as spool, ThreadPoolExecutor(2) as pool:
            measured = measure(
                io.BytesIO(tar), where="t", codec=DEFAULT_CODEC, budget=budget, pool=pool, threads=2, spool=spool
            )
            store = measured.store
            bonds = find_bonds(store.inventory)
            store.recut(recut(store.table.atoms, bonds, budget, store.table.sizes))
            sizes = store.sizes()
            parts = plan(store.inventory, store.table.atoms, bonds, budget, sizes)
            assert check_plan(store.inventory, store.table.atoms, parts, budget, sizes) == ()


@each_case
def test_layer_under_the_limit_keeps_its_blob(case: Case) -> None:
    source = TarsSource(case.layers, blobs=True)
    with split_image(source, SplitOptions(limit=10**7)) as result:
        assert result.image.manifest == source.manifest
        assert result.image.config().raw == source.config().raw
        assert source.reads == 0
        assert compare(flatten(source), flatten(result.image)).equal


@each_case
def test_whatever_is_cut_off_is_an_error_or_a_smaller_tree(case: Case) -> None:
    tar = case.layers[-1]
    whole = len(tar.rstrip(b"\0"))
    for end in range(0, whole, max(512, whole // 40 // 512 * 512)):
        cut = tar[: end + 7]
        with pytest.raises(Exception, match=r"layer at byte \d+: "):
            layer_tree(io.BytesIO(cut), where="layer")
