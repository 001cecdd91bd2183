"""Which image a tag is to stand for; and that it ends with the newest, in whatever order runs look and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interleave import Kind, interleave

from buildkit.errors import RegistryError, UnreachableError
from buildkit.model import Digest
from buildkit.promote import Decision, Look, Promotion, Provenance, Put, Wait, decide, promotion

NOON = datetime(2026, 7, 22, 12, tzinfo=UTC)


def image(number: int, *, hour: int | None = None, salt: str = "", revision: bool = True) -> Provenance:
    """The image of commit ``number`` of a straight history; commit times are an hour apart."""
    return Provenance(
        digest=Digest.of(f"{number} {salt}".encode()),
        revision=f"{number:040x}" if revision else None,
        created=NOON + timedelta(hours=number if hour is None else hour),
    )


def straight(older: str, newer: str) -> bool | None:
    return int(older, 16) <= int(newer, 16)


def unknown(older: str, newer: str) -> bool | None:
    return None


def diverged(older: str, newer: str) -> bool | None:
    return False


BARE = Provenance(digest=Digest.of(b"bare"))


@pytest.mark.parametrize(
    ("ours", "held", "ancestry", "verdict", "words"),
    [
        (image(1), None, unknown, "move", "new"),
        (image(1), image(1), unknown, "keep", "already"),
        (image(2), image(1), straight, "move", "comes after"),
        (image(1), image(2), straight, "keep", "which comes after"),
        (image(1), image(1, salt="rebuilt"), unknown, "move", "rebuild"),
        (image(2, hour=0), image(1, hour=5), straight, "move", "comes after"),
        (image(1, hour=5), image(2, hour=0), straight, "keep", "comes after"),
        (image(2), image(1), unknown, "move", "by their times"),
        (image(1), image(2), unknown, "keep", "newer than"),
        (image(2), image(1), diverged, "move", "by their times"),
        (image(1), image(2), diverged, "keep", "newer than"),
        (image(1, hour=3), image(2, hour=3), unknown, "unclear", "no order"),
        (image(2, revision=False), image(1), unknown, "move", "by their times"),
        (image(1), BARE, unknown, "move", "name no commit"),
        (BARE, image(1), unknown, "unclear", "a label is missing"),
        (BARE, replace(BARE, digest=Digest.of(b"other")), unknown, "unclear", "names a commit"),
        (replace(image(2), created=None), image(1), unknown, "unclear", "a label is missing"),
        (replace(image(2), created=None), image(1), straight, "move", "comes after"),
        (image(2), replace(image(1), created=None), unknown, "unclear", "a label is missing"),
    ],
)
def test_what_is_newer(ours: Provenance, held: Provenance | None, ancestry: Any, verdict: str, words: str) -> None:
    found = decide(ours, held, ancestry)
    assert (found.verdict, words in found.reason) == (verdict, True), found
    forced = decide(ours, held, ancestry, force=True)
    assert forced.verdict == ("keep" if held == ours else "move")


images = st.builds(
    Provenance,
    digest=st.integers(0, 20).map(lambda n: Digest.of(str(n).encode())),
    revision=st.none() | st.integers(0, 5).map(lambda n: f"{n:040x}"),
    created=st.none() | st.integers(0, 5).map(lambda n: NOON + timedelta(hours=n)),
)


@given(one=images, other=images, ancestry=st.sampled_from([straight, unknown, diverged]))
def test_of_two_images_at_most_one_displaces_the_other(one: Provenance, other: Provenance, ancestry: Any) -> None:
    """But for rebuilds of one commit, and images that name none."""
    if one.digest == other.digest or (one.revision is not None and one.revision == other.revision):
        return
    assert [decide(one, other, ancestry).verdict, decide(other, one, ancestry).verdict].count("move") <= 1


# Runs at once --------------------------------------------------------------------------------------------------------


class Tag:
    """A tag in a registry; ``failures`` of the PUTs end in an error, stored or not."""

    def __init__(self, held: Provenance | None, owners: Sequence[Provenance]) -> None:
        self.held = held
        self.owners = owners
        self.history = [held]
        self.failures: list[tuple[bool, bool]] = []

    def carry_out(self, number: int, step: Any) -> Any:
        if isinstance(step, Look):
            return self.held
        assert isinstance(step, Put)
        fails, stored = self.failures.pop() if self.failures else (False, True)
        if stored:
            self.held = self.owners[number]
            self.history.append(self.held)
        return UnreachableError("503") if fails else None


def kind_of(step: Any) -> Kind:
    return "wait" if isinstance(step, Wait) else "write" if isinstance(step, Put) else "read"


def run(machine: Promotion, tag: Tag) -> tuple[Decision, Digest | None, Digest | None]:
    [result] = interleave([machine], tag.carry_out, kind_of, min)
    assert isinstance(result, tuple)
    return result


@settings(max_examples=600, deadline=None)
@given(
    data=st.data(),
    numbers=st.lists(st.integers(1, 6), min_size=2, max_size=4, unique=True),
    before=st.none() | st.integers(0, 7),
    ancestry=st.sampled_from([straight, unknown, diverged]),
)
def test_in_any_order_the_newest_holds_the_tag_in_the_end(
    data: st.DataObject, numbers: list[int], before: int | None, ancestry: Any
) -> None:
    owners = [image(number) for number in numbers]
    tag = Tag(image(before) if before is not None else None, owners)
    machines = [promotion(owner, ancestry) for owner in owners]
    results = interleave(machines, tag.carry_out, kind_of, lambda ready: data.draw(st.sampled_from(ready)))
    newest = max([*numbers, *([before] if before is not None else [])])
    assert tag.held is not None
    assert tag.held.revision == image(newest).revision
    for number, (decision, _, _) in zip(numbers, results, strict=True):
        if number == newest and before != newest:
            assert decision.verdict == "move"


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(2, 3))
def test_rebuilds_of_one_commit_at_once_come_to_an_end(data: st.DataObject, count: int) -> None:
    owners = [image(1, salt=str(n)) for n in range(count)]
    tag = Tag(None, owners)
    machines = [promotion(owner, straight) for owner in owners]
    results = interleave(machines, tag.carry_out, kind_of, lambda ready: data.draw(st.sampled_from(ready)))
    assert tag.held in owners
    assert sum(current == tag.held.digest for _, _, current in results if tag.held) >= 1


@given(failures=st.lists(st.tuples(st.just(True), st.booleans()), max_size=7), held=st.none() | st.just(image(1)))
def test_a_put_that_fails_in_passing_is_tried_again(failures: list[tuple[bool, bool]], held: Provenance | None) -> None:
    tag = Tag(held, [image(2)])
    tag.failures = list(failures)
    decision, previous, current = run(promotion(image(2), unknown), tag)
    assert decision.verdict == "move"
    assert previous == (held.digest if held else None)
    assert current == image(2).digest


def test_a_put_that_always_fails_ends_in_its_own_error() -> None:
    tag = Tag(None, [image(2)])
    tag.failures = [(True, False)] * 100
    with pytest.raises(RegistryError, match="503"):
        run(promotion(image(2), unknown), tag)


def test_a_tag_that_is_another_at_every_look_ends_in_an_error() -> None:
    tag = Tag(None, [image(9)])

    def restless(number: int, step: Any) -> Any:
        tag.held = image(1) if tag.held is None else None
        return tag.held

    with pytest.raises(RegistryError, match="all the time"):
        interleave([promotion(image(9), unknown)], restless, kind_of, min)


@pytest.mark.parametrize("held", [None, image(1), image(2), image(3)])
def test_a_dry_run_looks_once_and_says_what_would_be(held: Provenance | None) -> None:
    tag = Tag(held, [image(2)])
    decision, _, _ = run(promotion(image(2), unknown, dry=True), tag)
    assert tag.history == [held]
    assert decision.verdict == ("keep" if held in (image(2), image(3)) else "move")


def test_force_moves_backwards_once_and_fights_nobody() -> None:
    tag = Tag(image(3), [image(2)])
    decision, _, current = run(promotion(image(2), unknown, force=True), tag)
    assert (decision.verdict, current) == ("move", image(2).digest)
    assert "forced, although" in decision.reason
    assert tag.history == [image(3), image(2)]
