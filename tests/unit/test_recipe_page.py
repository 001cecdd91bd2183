"""``docs/recipe.md`` lists every key of a recipe, and no key that there is not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from buildkit import recipe
from buildkit.recipe import PLACEHOLDERS

PAGE = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
WRITTEN = {"arguments": "args", "environment": "env", "argument": "arg"}
TABLES = {
    "": recipe.Recipe,
    "source.": recipe.Source,
    "base.": recipe.Base,
    "base.debootstrap.": recipe.Debootstrap,
    "secrets.": recipe.Secret,
    "build.": recipe.Build,
    "cuda.": recipe.Cuda,
    "cuda.exceptions.": recipe.PathException,
    "start.": recipe.Start,
    "start.exceptions.": recipe.PathException,
    "smoke.": recipe.Smoke,
    "smoke.server.": recipe.SmokeServer,
    "push.": recipe.Push,
}


def _keys() -> set[str]:
    found = {
        prefix + WRITTEN.get(field.name, field.name)
        for prefix, kind in TABLES.items()
        for field in dataclasses.fields(kind)
    }
    return found - {"folder"}  # where the recipe lies, no key of it


def _on_the_page() -> set[str]:
    return set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:: ?\n?true)?`", PAGE))


def test_every_key_is_on_the_page() -> None:
    tables = {prefix.rstrip(".") for prefix in TABLES if prefix}
    assert _keys() - tables <= _on_the_page()


def test_every_dotted_word_on_the_page_is_a_key() -> None:
    other = ("buildkit.", "org.", "recipe.yaml")
    dotted = {word for word in _on_the_page() if "." in word and not word.startswith(other)}
    assert dotted <= _keys()


def test_every_placeholder_is_on_the_page() -> None:
    assert {f"{{{name}}}" for name in PLACEHOLDERS} <= set(re.findall(r"`(\{[a-z_]+\})`", PAGE))
