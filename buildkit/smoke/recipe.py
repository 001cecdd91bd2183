"""A recipe's wishes as the smoke test's own values."""

from __future__ import annotations

from buildkit.recipe import Recipe
from buildkit.smoke.run import Subject


def subject_of(recipe: Recipe, image: str, *, revision: str | None = None) -> Subject:
    """The engine's image ``image``, tested as its recipe says. ``revision`` is that of the kernels' source.

    A recipe that requires no architecture is of an image for the processor: its server is started without a GPU.
    """
    return Subject(
        name=recipe.name,
        image=image,
        library=recipe.smoke.library,
        server=recipe.smoke.server,
        gpu=bool(recipe.cuda.require),
        revision=revision,
    )
