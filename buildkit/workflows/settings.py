"""What a run of a workflow was told, read from its environment. Pure.

Inputs of a manual run and the repository's variables arrive as texts of several forms: Gitea gives a boolean as true,
"true" or nothing, and a run that nobody started by hand has no inputs at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from buildkit.errors import UsageError
from buildkit.model import Reference
from buildkit.recipe import Recipe, push_target

REGISTRY = "BUILDKIT_REGISTRY"
"""The variable that recipes name in ``push.target``: HOST[:PORT]/OWNER."""
BUILD_STAGES = "build,check,split,push,verify,attach"
"""Of ``buildkit pipeline``: before anything moves. ``split`` does nothing where nobody asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``target`` has neither tag nor digest. ``promote``: the plain tags may move. ``allow_missing_gpu``: no runner
    with a GPU was named, so the smoke test is left out, visibly. ``notes`` say what was decided, and why."""

    recipe: str
    registry: str
    target: Reference
    promote: bool
    split: bool
    allow_missing_gpu: bool
    notes: tuple[str, ...]

    @property
    def environment(self) -> Mapping[str, str]:
        """For the steps that follow. Flags are 1 or empty, so that the shell can write ``${SPLIT_LAYERS:+--split}``."""
        return {
            REGISTRY: self.registry,
            "TARGET": self.target.name,
            "BUILD_STAGES": BUILD_STAGES,
            "PUBLISH_STAGES": "verify,promote,attach" if self.promote else "verify,attach",
            "SPLIT_LAYERS": "1" if self.split else "",
            "ALLOW_MISSING_GPU": "1" if self.allow_missing_gpu else "",
        }


def parse_flag(text: str, *, default: bool, name: str) -> bool:
    """A boolean as forges pass it; ``default`` where nothing was said. Raises UsageError."""
    match text.strip().lower():
        case "":
            return default
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise UsageError(f"{name} is {text!r}, which is neither true nor false")


def read_settings(environ: Mapping[str, str], load: Callable[[str], Recipe]) -> Settings:
    """The settings of this run. ``load`` reads a recipe by its name.

    Raises UsageError or RecipeError, with all problems of the environment at once.
    """
    problems: list[str] = []
    notes: list[str] = []

    def flag(name: str, default: bool) -> bool:
        try:
            return parse_flag(environ.get(name, ""), default=default, name=name)
        except UsageError as error:
            problems.append(error.message)
            return default

    promote, split = flag("PROMOTE", True), flag("SPLIT", False)
    registry = ""
    try:
        registry = registry_of(environ)
    except UsageError as error:
        problems.append(str(error))
    name = environ.get("RECIPE", "").strip()
    if not name:
        problems.append("RECIPE is empty: it names the recipe that is built")
    if problems:
        raise UsageError("; ".join(problems), hint="the workflow's env: and the repository's variables")
    recipe = load(name)
    target = _target(recipe, environ, registry)
    notes.append(f"recipe {recipe.name}, pushed to {target.name}")
    main = environ.get("MAIN_BRANCH", "").strip() or "main"
    ref = environ.get("GITHUB_REF", "")
    if promote and ref != f"refs/heads/{main}":
        promote = False
        notes.append(f"plain tags stay where they are: this run is for {ref or 'no branch'}, not for {main}")
    elif not promote:
        notes.append("plain tags stay where they are, as asked for")
    needs_gpu = bool(recipe.cuda.require) and bool(recipe.smoke.levels)
    missing = needs_gpu and not environ.get("GPU_RUNNER", "").strip()
    if missing:
        notes.append("the smoke test will be NOT RUN: the variable GPU_RUNNER names no runner with a GPU")
    return Settings(
        recipe=recipe.name,
        registry=registry,
        target=target,
        promote=promote,
        split=split,
        allow_missing_gpu=missing,
        notes=tuple(notes),
    )


def registry_of(environ: Mapping[str, str]) -> str:
    """HOST[:PORT]/OWNER: from the variables REGISTRY and REGISTRY_OWNER, else from the forge that runs this.

    REGISTRY may have the owner in it. Where it is given and nobody names an owner, it is taken as it is: plain
    registries have none. Repositories' names are in lower case (distribution-spec 1.1, "Pulling
    manifests"), owners' need not be.
    """
    given = environ.get("REGISTRY", "").strip().rstrip("/")
    given = re.sub(r"^https://", "", given)
    if "://" in given:
        raise UsageError("REGISTRY has a scheme in it", hint="write HOST[:PORT] or HOST[:PORT]/OWNER")
    host, _, path = (given or _own_registry(environ.get("GITHUB_SERVER_URL", ""))).partition("/")
    if not host:
        raise UsageError(
            "no registry is known: REGISTRY is empty, and so is GITHUB_SERVER_URL", hint="set the variable REGISTRY"
        )
    owner = environ.get("REGISTRY_OWNER", "").strip().strip("/")
    if path and owner:
        raise UsageError("REGISTRY has an owner in it, and REGISTRY_OWNER is set too", hint="unset one of them")
    owner = path or owner or environ.get("GITHUB_REPOSITORY_OWNER", "").strip()
    if not owner and not given:
        raise UsageError("no owner is known, whose packages these are", hint="set the variable REGISTRY_OWNER")
    whole = f"{host}/{owner.lower()}" if owner else host
    try:
        Reference.parse(f"{whole}/image", default_tag=None)
    except UsageError as error:
        raise UsageError(f"the registry and its owner (REGISTRY, REGISTRY_OWNER): {error.message}") from error
    return whole


def _own_registry(server: str) -> str:
    """The registry that belongs to a forge: Gitea's is the forge itself."""
    parts = urlsplit(server)
    return "ghcr.io" if parts.hostname == "github.com" else parts.netloc.rpartition("@")[2]


def _target(recipe: Recipe, environ: Mapping[str, str], registry: str) -> Reference:
    image = environ.get("IMAGE", "").strip()
    if image:
        target = Reference.parse(image, default_tag=None)
        if target.tag or target.digest:
            raise UsageError(f"IMAGE is {image}, with a tag or digest", hint="the recipe names the tags")
        return target
    if recipe.push.target is None:
        return Reference.parse(f"{registry}/{recipe.image}", default_tag=None)
    return push_target(recipe, {**environ, REGISTRY: registry})
