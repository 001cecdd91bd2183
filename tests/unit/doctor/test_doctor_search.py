"""The search for the body limit: it never costs more than it may, and never says what is not so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.doctor.search import BOUNDARIES, MB, MIB, Interval, next_size, resolution

WANTED = 95 * MB


def searched(
    limit: int | None, *, budget: int, cost: float = 1.0, wanted: int = WANTED, largest: int | None = None, low: int = 0
) -> tuple[Interval, int, list[int]]:
    """Against an edge with this limit that lets the fraction ``cost`` of a refused body in before it says so."""
    known, spent, tried = Interval(accepted=low), 0, []
    while (size := next_size(known, left=budget - spent, wanted=wanted, largest=largest)) is not None:
        tried.append(size)
        assert len(tried) < 100, "it does not end"
        fits = limit is None or size <= limit
        spent += size if fits else int(size * cost)
        known = known.with_accepted(size) if fits else known.with_refused(size)
    return known, spent, tried


LIMITS = st.one_of(
    st.none(),
    st.integers(1, 3 * 10**9),
    st.sampled_from(BOUNDARIES),
    st.sampled_from(BOUNDARIES).map(lambda size: size + 1),
    st.sampled_from(BOUNDARIES).map(lambda size: size - 1),
)


@settings(deadline=None)
@given(
    limit=LIMITS,
    budget=st.one_of(st.integers(0, 2 * 10**9), st.integers(0, 10**5)),
    cost=st.floats(0, 1),
    wanted=st.integers(2, 10**9),
    largest=st.one_of(st.none(), st.integers(1, 10**9)),
)
def test_no_budget_is_exceeded_and_the_interval_holds_the_truth(
    limit: int | None, budget: int, cost: float, wanted: int, largest: int | None
) -> None:
    known, spent, tried = searched(limit, budget=budget, cost=cost, wanted=wanted, largest=largest)
    assert spent <= budget
    assert all(0 < size <= (largest or size) for size in tried)
    assert len(set(tried)) == len(tried), "nothing is asked twice"
    if limit is None:
        assert known.refused is None
    else:
        assert known.accepted <= limit
        assert known.refused is None or limit < known.refused


@settings(deadline=None)
@given(limit=st.integers(1, 500 * MB))
def test_an_edge_that_refuses_at_once_is_measured_well_by_a_small_fortune(limit: int) -> None:
    known, _, _ = searched(limit, budget=10_000 * MB, cost=0.0)
    assert known.refused is not None
    assert known.refused - known.accepted <= resolution(known.refused)


@pytest.mark.parametrize(
    "limit",
    [100 * MIB, MIB, 10 * MIB, 30 * MB, 4_500_000],
    ids=["nginx 100m", "nginx's default", "10m", "30 MB", "4.5 MB"],
)
def test_usual_limits_are_found_to_the_byte_even_if_every_body_is_sent_in_full(limit: int) -> None:
    known, spent, _ = searched(limit, budget=400 * MB)
    assert (known.accepted, known.refused) == (limit, limit + 1)
    assert spent <= 400 * MB


@pytest.mark.parametrize("limit", [95 * MB, 97 * MB, 99 * MB, 100 * MB, 50 * MB])
def test_limits_near_a_hundred_megabytes_are_found_within_a_few_by_the_default_budget(limit: int) -> None:
    known, _, _ = searched(limit, budget=400 * MB)
    assert known.refused is not None
    assert known.refused - known.accepted <= 5 * MB


def test_without_a_limit_it_climbs_as_far_as_the_budget_goes() -> None:
    known, spent, tried = searched(None, budget=400 * MB)
    assert known == Interval(accepted=195 * MB)
    assert spent <= 400 * MB
    assert tried[0] == 100 * MB


def test_what_a_registry_asks_for_is_not_exceeded() -> None:
    known, _, tried = searched(None, budget=400 * MB, largest=20 * MB)
    assert tried == [20 * MB]
    assert known.accepted == 20 * MB


def test_the_size_that_pushes_use_comes_first_where_it_is_larger() -> None:
    assert searched(None, budget=400 * MB, wanted=190 * MB)[2][0] == 190 * MB


def test_a_larger_body_that_goes_through_takes_a_refusal_back() -> None:
    assert Interval(accepted=1, refused=10).with_accepted(20) == Interval(accepted=20)
    assert Interval(accepted=15).with_refused(10) == Interval(accepted=9, refused=10)
