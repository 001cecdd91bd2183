"""Recipes: ``images/NAME/recipe.yaml`` as frozen values, every mistake with its dotted path and line."""

from __future__ import annotations

from buildkit.recipe.find import find_recipes, images_folder, load
from buildkit.recipe.schema import (
    PLACEHOLDERS,
    Base,
    Build,
    Cuda,
    Debootstrap,
    PathException,
    Push,
    Recipe,
    Secret,
    Smoke,
    SmokeServer,
    Source,
    Start,
    expand,
    parse,
    placeholders,
    push_target,
)

__all__ = [
    "PLACEHOLDERS",
    "Base",
    "Build",
    "Cuda",
    "Debootstrap",
    "PathException",
    "Push",
    "Recipe",
    "Secret",
    "Smoke",
    "SmokeServer",
    "Source",
    "Start",
    "expand",
    "find_recipes",
    "images_folder",
    "load",
    "parse",
    "placeholders",
    "push_target",
]
