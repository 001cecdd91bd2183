"""A recipe's demands as the check's own values."""

from __future__ import annotations

from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException, Policy, VersionRange
from buildkit.recipe import Recipe


def policy_of(recipe: Recipe) -> Policy:
    """``cuda.require``, ``cuda.runtime`` and both lists of exceptions."""
    return Policy(
        require=tuple(Arch.parse(text) for text in recipe.cuda.require),
        runtime=VersionRange.parse(recipe.cuda.runtime) if recipe.cuda.runtime else None,
        exceptions=tuple(PathException(path=e.path, reason=e.reason) for e in recipe.cuda.exceptions),
        start_exceptions=tuple(PathException(path=e.path, reason=e.reason) for e in recipe.start.exceptions),
    )
