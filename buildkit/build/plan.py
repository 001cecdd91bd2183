"""From a recipe to what a builder is told: names, arguments, labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from buildkit.build import labels
from buildkit.build.git import GitFacts
from buildkit.errors import UsageError
from buildkit.model import Digest, Platform
from buildkit.recipe import Recipe, expand, placeholders

Backend = Literal["auto", "buildx", "docker", "classic"]
"""``docker``: a client with BuildKit built in. ``classic``: the engine's own builder, by its API."""

_NOTHING: Mapping[str, str] = MappingProxyType({})
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,127}", re.ASCII)
_URL = re.compile(r"(?:https?|ssh|git|file)://[^\s@?#]+", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What the caller asks for beyond the recipe; None leaves it to the recipe.

    ``builder`` names a buildx builder, whose result is written to the OCI archive ``output``. ``arguments``,
    ``source_url`` and ``source_revision`` override the recipe's, so that a fork can be built. ``revision`` is the
    commit where there is no git to ask. ``tags`` replace the recipe's. ``timeout`` is in seconds. ``rebuild`` uses no
    cache, and makes the base anew.
    """

    backend: Backend = "auto"
    builder: str | None = None
    output: Path | None = None
    arguments: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    source_url: str | None = None
    source_revision: str | None = None
    revision: str | None = None
    tags: tuple[str, ...] = ()
    timeout: float | None = None
    rebuild: bool = False
    ignore_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """The base as it is used: ``name`` for the Dockerfile, ``digest`` where one is known."""

    name: str
    digest: Digest | None = None
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """Everything a builder needs but the secrets' values.

    ``names`` are ``repository:tag``. ``epoch`` is SOURCE_DATE_EPOCH (seconds after 1970), None where it is not known.
    """

    recipe: Recipe
    names: tuple[str, ...]
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    platform: Platform
    base: BaseImage | None
    epoch: int | None
    timeout: float
    rebuild: bool


def plan(recipe: Recipe, facts: GitFacts, base: BaseImage | None, options: BuildOptions) -> BuildPlan:
    """Raises UsageError where a placeholder has no value, or an override names no argument."""
    _check_overrides(recipe, options)
    revision = options.revision or facts.revision
    source_url = options.source_url or recipe.source.url
    source_revision = options.source_revision or recipe.source.revision
    values: dict[str, str | None] = {
        "name": recipe.name,
        "version": recipe.version,
        "revision": revision,
        "short_revision": revision[:12] if revision else None,
        "date": facts.date,
        "source_url": source_url,
        "source_revision": source_revision,
        "short_source_revision": source_revision[:12] if source_revision else None,
        "sm": recipe.cuda.sm,
        "cuda": recipe.cuda.version,
    }
    arguments = {
        name: expand(text, values, what=f"args.{name} of recipe {recipe.name}")
        for name, text in recipe.arguments.items()
    }
    arguments.update(options.arguments)
    if recipe.base is not None and base is not None:
        arguments.setdefault(recipe.base.argument, base.name)
    if facts.time is not None:
        arguments.setdefault("SOURCE_DATE_EPOCH", str(facts.time))
    written: dict[str, str | None] = {
        labels.TITLE: recipe.name,
        labels.DESCRIPTION: recipe.description,
        labels.LICENSES: recipe.licenses,
        labels.CREATED: facts.created,
        labels.SOURCE: facts.url,
        labels.REVISION: revision,
        labels.VERSION: recipe.version or (revision[:12] if revision else None),
        labels.BASE_NAME: base.name.partition("@")[0] if base else None,
        labels.BASE_DIGEST: str(base.digest) if base and base.digest else None,
        labels.RECIPE: recipe.name,
        labels.SM: recipe.cuda.sm,
        labels.CUDA: recipe.cuda.version,
        labels.SOURCE_URL: source_url,
        labels.SOURCE_REVISION: source_revision,
        labels.DIRTY: "true" if facts.dirty else None,
    }
    own = {
        name: expand(text, values, what=f"labels.{name} of recipe {recipe.name}")
        for name, text in recipe.labels.items()
    }
    epoch_text = arguments.get("SOURCE_DATE_EPOCH", "")
    return BuildPlan(
        recipe=recipe,
        names=tuple(f"{recipe.image}:{tag}" for tag in tags(recipe, options, values | _unclean(values, facts))),
        arguments=MappingProxyType(arguments),
        labels=MappingProxyType({k: v for k, v in written.items() if v} | own),
        platform=recipe.platform,
        base=base,
        epoch=int(epoch_text) if epoch_text.isdecimal() else None,
        timeout=options.timeout or recipe.build.timeout,
        rebuild=options.rebuild,
    )


def _unclean(values: Mapping[str, str | None], facts: GitFacts) -> dict[str, str | None]:
    """A tag with a commit in it stands for that commit's own files; other files must not take its place."""
    names = ("revision", "short_revision") if facts.dirty else ()
    return {name: f"{values[name]}-dirty" for name in names if values[name]}


def _check_overrides(recipe: Recipe, options: BuildOptions) -> None:
    """What comes from a command line and ends in labels, which whoever has the image can read."""
    for name, value in (("source revision", options.source_revision), ("revision", options.revision)):
        if value is not None and not _REVISION.fullmatch(value):
            raise UsageError(f"the {name} {value[:60]!r} is not a commit or a tag")
    if options.source_url is not None and ("@" in options.source_url or not _URL.fullmatch(options.source_url)):
        # Not shown: what stands before the @ may be a password.
        raise UsageError(
            "the source URL must be a URL without credentials", hint="give a token as a build secret of the recipe"
        )
    used = {name for text in (*recipe.arguments.values(), *recipe.labels.values()) for name in placeholders(text)}
    for name, value in (("source_url", options.source_url), ("source_revision", options.source_revision)):
        if value is not None and name not in used:
            raise UsageError(f"recipe {recipe.name} takes no {name}", hint=f"its args do not use {{{name}}}")


def tags(recipe: Recipe, options: BuildOptions, values: Mapping[str, str | None]) -> tuple[str, ...]:
    """The tags to give. Raises UsageError for one without a value, or that does not make a tag."""
    found: dict[str, None] = {}
    for template in options.tags or recipe.tags:
        tag = expand(template, values, what=f"tag {template} of recipe {recipe.name}")
        if not _TAG.fullmatch(tag):
            raise UsageError(f"tag {template} of recipe {recipe.name} becomes {tag!r}, which is not a tag")
        found[tag] = None
    return tuple(found)


def command(plan: BuildPlan, secrets: tuple[str, ...], *, progress: str = "plain") -> tuple[str, ...]:
    """The arguments that ``docker build`` and ``docker buildx build`` share, up to the context at the end.

    ``secrets`` are their ``--secret`` texts: places, never values.
    """
    recipe = plan.recipe
    words = [f"--progress={progress}", f"--file={recipe.dockerfile_path}", f"--platform={plan.platform}"]
    words += [f"--tag={name}" for name in plan.names]
    words += [f"--build-arg={name}={value}" for name, value in plan.arguments.items()]
    words += [f"--label={name}={value}" for name, value in plan.labels.items()]
    words += [f"--secret={text}" for text in secrets]
    if recipe.target:
        words.append(f"--target={recipe.target}")
    if recipe.build.network != "default":
        words.append(f"--network={recipe.build.network}")
    if plan.rebuild:
        words.append("--no-cache")
    if plan.rebuild and plan.base is not None and not plan.base.local:
        words.append("--pull")
    return tuple(words)


_OPTIONS = r"(--\w+\S*\s+)*"
_BUILDKIT_ONLY = (
    (re.compile(rf"^\s*RUN\s+{_OPTIONS}--(mount|security)\b", re.IGNORECASE), "RUN --mount"),
    (
        re.compile(rf"^\s*(COPY|ADD)\s+{_OPTIONS}--(link|chmod|exclude|parents|checksum)\b", re.IGNORECASE),
        "an option of COPY or ADD",
    ),
    (re.compile(r"^\s*(RUN|COPY|ADD)\b.*<<-?['\"]?[A-Za-z_]", re.IGNORECASE), "a here-document"),
)


def needs_buildkit(recipe: Recipe, dockerfile: str) -> str | None:
    """What of this recipe the classic builder lacks, in words; None where it will do."""
    required = [secret.id for secret in recipe.secrets if not secret.optional]
    if required:
        return f"the build secret {required[0]}"
    for number, line in enumerate(dockerfile.splitlines(), 1):
        for pattern, what in _BUILDKIT_ONLY:
            if pattern.match(line):
                return f"{what} in {recipe.dockerfile}, line {number}"
    return None
