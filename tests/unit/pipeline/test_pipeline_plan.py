"""Which stages are run, and which tags stay and which move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import UsageError
from buildkit.pipeline import STAGES, divide_tags, parse_stages
from buildkit.pipeline.plan import MAX_TAG

TEMPLATES = ("sm70", "sm70-{short_revision}")
EXPANDED = ("sm70", "sm70-0123456789ab")


def test_stages_come_in_their_own_order() -> None:
    assert parse_stages("") == STAGES
    assert parse_stages("push, build") == ("build", "push")
    assert parse_stages("attach,attach") == ("attach",)


@pytest.mark.parametrize("text", ["bild", "build,publish", ",", " , "])
def test_other_stages_are_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_stages(text)
    assert caught.value.hint is not None
    assert "promote" in caught.value.hint


def test_the_commits_own_tag_is_pushed_and_the_plain_one_moves() -> None:
    tags = divide_tags(TEMPLATES, EXPANDED, wanted=None, mark="0123456789ab")
    assert tags.fixed == ("sm70-0123456789ab",)
    assert tags.moving == ("sm70",)
    assert divide_tags(TEMPLATES, EXPANDED, wanted="sm70", mark="0123456789ab") == tags


def test_the_order_of_the_images_tags_does_not_matter() -> None:
    assert divide_tags(TEMPLATES, EXPANDED[::-1], wanted=None, mark="m") == divide_tags(
        TEMPLATES, EXPANDED, wanted=None, mark="m"
    )


def test_a_tag_that_the_recipe_does_not_have_moves_alone() -> None:
    tags = divide_tags(TEMPLATES, EXPANDED, wanted="trial", mark="0123456789ab")
    assert tags.fixed == ("trial-0123456789ab",)
    assert tags.moving == ("trial",)


def test_the_commits_own_tag_as_target_is_pushed_and_nothing_moves() -> None:
    tags = divide_tags(TEMPLATES, EXPANDED, wanted="sm70-0123456789ab", mark="0123456789ab")
    assert tags.fixed == ("sm70-0123456789ab",)
    assert tags.moving == ()


def test_a_recipe_without_a_tag_of_its_commit_gets_one() -> None:
    tags = divide_tags(("latest",), ("latest",), wanted=None, mark="feedfacecafe")
    assert tags.fixed == ("latest-feedfacecafe",)
    assert tags.moving == ("latest",)


_TAG = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)


@given(plain=st.lists(_TAG, max_size=3), fixed=st.lists(_TAG, max_size=3), wanted=st.none() | _TAG)
def test_something_is_always_pushed_and_no_tag_both_stays_and_moves(
    plain: list[str], fixed: list[str], wanted: str | None
) -> None:
    templates = [*plain, *("x-{revision}" for _ in fixed)]
    tags = divide_tags(templates, [*plain, *fixed], wanted=wanted, mark="0123456789ab")
    assert tags.fixed
    assert not set(tags.fixed) & set(tags.moving)
    assert all(len(tag) <= MAX_TAG for tag in tags.fixed + tags.moving)
    if wanted is not None:
        assert wanted in tags.fixed + tags.moving


def test_only_a_tag_with_the_commit_in_it_stays() -> None:
    templates = ("sm70", "v{version}", "day-{date}", "sm70-{short_revision}")
    tags = divide_tags(
        templates, ("sm70", "v1.2", "day-20260101", "sm70-0123456789ab", "v1.2"), wanted=None, mark="0123456789ab"
    )
    assert tags.fixed == ("sm70-0123456789ab",)
    assert tags.moving == ("sm70", "v1.2", "day-20260101")  # the same for many commits: an older run must not take them


def test_what_somebody_has_called_the_image_in_the_engine_is_not_pushed() -> None:
    tags = divide_tags(TEMPLATES, (*EXPANDED, "stable", "latest"), wanted=None, mark="0123456789ab")
    assert tags.fixed == ("sm70-0123456789ab",)
    assert tags.moving == ("sm70",)
