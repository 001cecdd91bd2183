"""A workflow for a recipe, made from the template that comes with this package.

``workflows/candle-vllm-sm70.yaml`` and its neighbours are what this makes for their recipes, to the byte.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

import yaml

from buildkit.errors import UsageError
from buildkit.model import Reference
from buildkit.recipe import Recipe
from buildkit.units import format_duration

CHECKOUT = "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2"
"""The newest line of it that runners with Node 20 run, which Gitea's are."""
LONGEST_BUILD = 170
"""Minutes for build, check and push in one job; the job has five more, and runners end it after 180."""
SELF = "."
"""What pip installs where the workflow belongs to buildkit's own repository."""
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*", re.ASCII)
_NAME_MAX = 100
_BRANCH = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9_-])?", re.ASCII)
"""What git takes for a branch (git-check-ref-format), without characters that mean something in a filter."""
_PINNED = re.compile(
    r"buildkit(?:\[[a-z,]+\])?(?: @ git\+(?:https://|ssh://git@)[^\s@'\"]+@[0-9a-f]{40}|==[0-9][0-9A-Za-z.+!]*)",
    re.ASCII,
)
"""A full commit (without anybody's password before the host), or a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to make: ``name`` is the workflow's, and its file's. ``root`` is the repository's folder, which the recipe
    lies in. ``install`` is what pip is given on the runner; ``image`` replaces the recipe's push target."""

    name: str
    recipe: Recipe
    root: Path
    install: str
    image: str | None = None
    branch: str = "main"


def packaged(name: str) -> bytes:
    """A file that comes with this package: ``ci-setup`` or ``image.yaml``."""
    return (resources.files("buildkit.workflows") / "files" / name).read_bytes()


def render(wish: Wish) -> str:
    """The workflow's text. Raises UsageError for a name, branch, image or installation that cannot be used."""
    recipe = wish.recipe
    _check(wish)
    gpu = bool(recipe.cuda.require)
    values = {
        "name": wish.name,
        "recipe": recipe.name,
        "branch": wish.branch,
        "quoted_name": _quoted(wish.name),
        "quoted_recipe": _quoted(recipe.name),
        "quoted_branch": _quoted(wish.branch),
        "install": json.dumps(wish.install),
        "image": f"  IMAGE: {json.dumps(wish.image)}\n" if wish.image else "",
        "paths": "\n".join(f"      - {json.dumps(path)}" for path in path_filters(wish)),
        "gpu_note": _GPU_NOTE if gpu else "",
        "gpu_variable": "  GPU_RUNNER: ${{ vars.GPU_RUNNER }}\n" if gpu else "",
        "smoke_runner": f"${{{{ vars.{'GPU' if gpu else 'BUILD'}_RUNNER || 'ubuntu-latest' }}}}",
        "limit": str(LONGEST_BUILD),
        "setup": _setup("docker registry", ""),
        "light_setup": _setup("registry", ""),
        "late_setup": _setup("registry", "        if: startsWith(needs.build.outputs.digest, 'sha256:')\n"),
        "credentials": _CREDENTIALS,
        "secrets": "".join(
            f"          {name}: ${{{{ secrets.{name} }}}}\n"
            for name in dict.fromkeys(secret.env for secret in recipe.secrets)
            if name and name not in ("REGISTRY_USERNAME", "REGISTRY_TOKEN")  # which are there already
        ),
    }
    text = packaged("image.yaml").decode()
    return re.sub(r"@([a-z_]+)@\n?", lambda match: _filled(match, values), text)


def path_filters(wish: Wish) -> tuple[str, ...]:
    """What a push must change to start the workflow: the recipe, what it builds from, and the workflow itself."""
    recipe = wish.recipe
    found = [_inside(wish.root, folder) for folder in (recipe.folder, recipe.context_path)]
    filters = [f"{path}/**" if path != "." else "**" for path in found]
    dockerfile = _inside(wish.root, recipe.dockerfile_path)
    if not any(dockerfile == path or dockerfile.startswith(f"{path}/") or path == "." for path in found):
        filters.append(dockerfile)
    return tuple(dict.fromkeys((*filters, f"workflows/{wish.name}.yaml")))


def pinned(install: str) -> bool:
    """Whether an installation always brings the same code: this repository's own, a full commit, or a version."""
    return install == SELF or _PINNED.fullmatch(install) is not None


def _check(wish: Wish) -> None:
    if not _NAME.fullmatch(wish.name) or len(wish.name) > _NAME_MAX:
        raise UsageError(
            f"{wish.name!r} is no name for a workflow", hint=f"a-z, 0-9, and . _ - between, at most {_NAME_MAX}"
        )
    if not _BRANCH.fullmatch(wish.branch):
        raise UsageError(f"{wish.branch!r} is no name of a branch")
    if not pinned(wish.install):
        raise UsageError(
            f"{wish.install!r} is not pinned: the runners would install whatever is there that day",
            hint="--install 'buildkit @ git+https://HOST/OWNER/buildkit@COMMIT', with the full commit",
        )
    if wish.image is not None:
        image = Reference.parse(wish.image, default_tag=None)
        if image.tag or image.digest:
            raise UsageError(f"--image {wish.image} has a tag or digest", hint="the recipe names the tags")
    timeout = wish.recipe.build.timeout
    if timeout > (LONGEST_BUILD - 5) * 60:
        raise UsageError(
            f"recipe {wish.recipe.name} may build for {format_duration(timeout)}, and runners end a job after 3 hours",
            hint=f"build.timeout: at most {LONGEST_BUILD - 5}m, so that the push has its time too",
        )


def _quoted(name: str) -> str:
    """A name as YAML reads it as a text: ``on``, ``1e3`` and their like need quotes."""
    return name if yaml.safe_load(name) == name else json.dumps(name)


def _inside(root: Path, path: Path) -> str:
    try:
        return str(PurePosixPath(path.resolve().relative_to(root.resolve())))
    except ValueError:
        raise UsageError(f"{path} is not in the repository {root}, so no push can change it") from None


def _filled(match: re.Match[str], values: dict[str, str]) -> str:
    """A value; one that is made of whole lines brings its own line break, or takes the line with it."""
    value = values[match[1]]
    alone = match[0].endswith("\n")
    return value + ("\n" if alone and value and not value.endswith("\n") else "")


def _setup(needs: str, condition: str) -> str:
    return (
        f"      - name: Check out the commit\n{condition}"
        f"        uses: {CHECKOUT}\n"
        "        with:\n"
        "          fetch-depth: 0 # the history tells which of two commits is the newer one\n"
        "          persist-credentials: false\n"
        f"      - name: Set up buildkit\n{condition}"
        f"        run: bash scripts/ci-setup {needs}\n"
        f"      - name: Read the settings\n{condition}"
        "        run: buildkit workflows.settings"
    )


_WHO = "vars.REGISTRY_USERNAME || secrets.REGISTRY_USERNAME || github.repository_owner || github.actor"
_BY = "secrets.REGISTRY_TOKEN || (vars.REGISTRY == 'ghcr.io' && github.token) || ''"
_CREDENTIALS = f"""\
          REGISTRY_USERNAME: ${{{{ {_WHO} }}}}
          REGISTRY_TOKEN: ${{{{ {_BY} }}}}"""
_GPU_NOTE = (
    "#   variable GPU_RUNNER         label of runners with a GPU; without one the smoke test is visibly NOT RUN\n"
)
