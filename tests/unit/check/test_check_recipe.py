"""The recipes of this repository give policies."""

from __future__ import annotations

from pathlib import Path

from buildkit.check.recipe import policy_of
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException
from buildkit.recipe import Cuda, Recipe, Start
from buildkit.recipe import PathException as RecipeException


def test_every_demand_of_a_recipe_arrives() -> None:
    recipe = Recipe(
        name="x",
        folder=Path("x"),
        image="x",
        tags=("1",),
        cuda=Cuda(
            require=("sm_70", "sm_90a"), runtime=">=12,<13", exceptions=(RecipeException(path="/opt/*", reason="a"),)
        ),
        start=Start(
            command=("server",),
            port=80,
            health="/h",
            expect="e",
            exceptions=(RecipeException(path="/e.sh", reason="b"),),
        ),
    )
    policy = policy_of(recipe)
    assert policy.require == (Arch(70), Arch(90, "a"))
    assert policy.runtime is not None
    assert (12, 9) in policy.runtime
    assert policy.exceptions == (PathException(path="/opt/*", reason="a"),)
    assert policy.start_exceptions == (PathException(path="/e.sh", reason="b"),)


def test_a_recipe_without_demands_demands_nothing() -> None:
    recipe = Recipe(name="x", folder=Path("x"), image="x", tags=("1",))
    assert policy_of(recipe).require == ()
    assert policy_of(recipe).runtime is None
