"""A recipe's demands as the check's own values."""

from __future__ import annotations

from buildkit.check.start import StartSpec
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


def start_spec_of(recipe: Recipe) -> StartSpec:
    """``start``, for ``check --run``."""
    start = recipe.start
    return StartSpec(
        command=start.command,
        environment=start.environment,
        port=start.port,
        health=start.health,
        expect=start.expect,
        writable=start.writable,
        timeout=start.timeout,
    )
