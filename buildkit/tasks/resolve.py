"""What SOURCE and ``--to`` mean: a recipe's name or a transport, and the recipe's target where none is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildkit.build import BuildOptions, facts, plan
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, NotFoundError, UsageError
from buildkit.model import Reference
from buildkit.push import Target
from buildkit.recipe import Recipe, find_recipes, images_folder, load, placeholders, push_target

DEFAULT_RECIPE = "candle-vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """``source`` is a transport's text (or an engine's image name); ``tags`` are what the recipe calls the image."""

    source: str
    recipe: Recipe | None
    tags: tuple[str, ...]


def recipe_named(name: str) -> Recipe:
    """The recipe ``name``, or the default one. Raises UsageError or RecipeError."""
    return load(name or DEFAULT_RECIPE, images_folder())


def choose(text: str, *, engine_host: str | None) -> Chosen:
    """A recipe's name wins over an image's; ``docker-daemon:NAME`` names the image all the same."""
    recipe = _recipe_or_none(text)
    if recipe is None:
        return Chosen(source=text, recipe=None, tags=())
    if recipe.build.builder:
        archive = Path(".buildkit") / f"{recipe.name}.oci.tar"
        if not archive.exists():
            raise NotFoundError(f"recipe {recipe.name} is not built: no {archive}", hint=f"invoke build {recipe.name}")
        return Chosen(source=f"oci-archive:{archive}", recipe=recipe, tags=_tags_of(recipe))
    name = f"{recipe.image}:{_first_tag(recipe)}"
    with Engine.connect(engine_host) as engine:
        try:
            image = engine.inspect(name)
        except NotFoundError as error:
            raise NotFoundError(
                f"recipe {recipe.name} is not built: the engine has no image {name}", hint=f"invoke build {recipe.name}"
            ) from error
    # The tags that the build gave it, not those that a build would give now: they name the revision inside.
    own = tuple(tag.rpartition(":")[2] for tag in image.tags if tag.rpartition(":")[0] == recipe.image)
    first = name.rpartition(":")[2]
    return Chosen(source=f"docker-daemon:{name}", recipe=recipe, tags=(first, *(tag for tag in own if tag != first)))


def target(to: str, chosen: Chosen, *, environ: Mapping[str, str] = os.environ) -> Target:
    """``to``, else the recipe's target; the recipe's tags where the reference has none."""
    tags = chosen.tags or ("latest",)
    if to:
        return Target.parse(to, tags)
    if chosen.recipe is None:
        raise UsageError("no target: where is the image to go?", hint="name it with --to HOST[:PORT]/REPOSITORY:TAG")
    return Target(repository=push_target(chosen.recipe, environ), tags=tags)


def default_reference(environ: Mapping[str, str] = os.environ) -> Reference:
    """Where the default recipe's image is pushed to, under its first tag."""
    recipe = recipe_named("")
    return push_target(recipe, environ).with_tag(_first_tag(recipe))


def _recipe_or_none(text: str) -> Recipe | None:
    if not text:
        return recipe_named("")
    try:
        folder = images_folder()
    except UsageError:
        if os.environ.get("BUILDKIT_IMAGES"):
            raise
        return None
    return load(text, folder) if text in find_recipes(folder) else None


def _first_tag(recipe: Recipe) -> str:
    """The tag by which the engine's image is found: one that stays the same from build to build, if there is one."""
    for tag in recipe.tags:
        if not placeholders(tag):
            return tag
    return _tags_of(recipe)[0]


def _tags_of(recipe: Recipe) -> tuple[str, ...]:
    try:
        names = plan(recipe, facts([recipe.folder, recipe.context_path]), None, BuildOptions()).names
    except BuildkitError as error:
        raise UsageError(f"the tags of recipe {recipe.name}: {error.message}", hint=error.hint) from error
    return tuple(name.rpartition(":")[2] for name in names)
