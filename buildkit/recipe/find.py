"""Where recipes lie: in ``images/NAME/recipe.yaml``, of this repository or of any other that uses this package."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from buildkit.errors import RecipeError, UsageError
from buildkit.recipe.schema import Recipe, parse

FOLDER = "images"
FILE = "recipe.yaml"
VARIABLE = "BUILDKIT_IMAGES"


def images_folder(given: Path | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds the recipes: ``given``, else ``$BUILDKIT_IMAGES``, else the first ``images`` folder with a
    recipe in it, from the current folder upwards. Raises UsageError where there is none."""
    chosen = given or (Path(environ[VARIABLE]) if environ.get(VARIABLE) else None)
    if chosen is not None:
        folder = chosen.absolute()
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", hint=f"it was given as the place of the recipes ({VARIABLE})")
        return folder
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / FOLDER).glob(f"*/{FILE}")):
            return folder / FOLDER
    raise UsageError(
        f"no {FOLDER}/NAME/{FILE} here or in a folder above ({here})",
        hint=f"change to the repository's folder, or set {VARIABLE}",
    )


def find_recipes(folder: Path) -> tuple[str, ...]:
    """The names of the recipes in ``folder``, sorted; they are not read."""
    return tuple(sorted(path.parent.name for path in folder.glob(f"*/{FILE}")))


def load(name: str, folder: Path) -> Recipe:
    """The recipe ``name`` in ``folder``.

    Raises UsageError where there is no such recipe, and RecipeError with all that is wrong in it; its Dockerfile and
    context must be there.
    """
    known = find_recipes(folder)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        listed = ", ".join(known) or "none"
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no recipe {name!r} in {folder}", hint=f"{meant}there is: {listed}")
    path = folder / name / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    recipe = parse(text, folder=folder / name, name=name)
    for key, place, there in (
        ("dockerfile", recipe.dockerfile_path, recipe.dockerfile_path.is_file()),
        ("context", recipe.context_path, recipe.context_path.is_dir()),
    ):
        if not there:
            line = next((n for n, row in enumerate(text.splitlines(), 1) if re.match(rf"{key}\s*:".encode(), row)), 1)
            raise RecipeError(f"{path}:{line}: {key}: {place} is not there")
    return recipe
