"""The recipe: what an image is made of and what is asked of it, as frozen values.

Each class is one table of the file; a key of the file is a field here, but ``args`` (``arguments``), ``env``
(``environment``) and ``arg`` (``argument``).
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal, get_args

from buildkit.errors import UsageError
from buildkit.image.compress import Codec
from buildkit.model import Digest, Platform, Reference, split_name
from buildkit.recipe.reader import Table, read
from buildkit.registry.options import RegistryOptions

PLACEHOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "name": "the recipe's name",
        "version": "the recipe's version",
        "revision": "the commit that is built, of the repository that holds the recipe",
        "short_revision": "its first 12 digits",
        "date": "that commit's date in UTC, like 20260131",
        "source_url": "where the packaged source comes from (source.url)",
        "source_revision": "which revision of it (source.revision)",
        "short_source_revision": "its first 12 characters",
        "sm": "the first architecture that cuda.require names, without sm_",
        "cuda": "the CUDA version (cuda.version)",
    }
)
"""What may stand in braces in tags, labels and build arguments."""

_NAME = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"
_ARCHITECTURE = r"sm_[1-9][0-9]{1,2}[af]?"
_VERSION = r"[0-9]+(?:\.[0-9]+)*"
_CONSTRAINT = rf"(?:<|<=|>|>=|==){_VERSION}(?:,\s*(?:<|<=|>|>=|==){_VERSION})*"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_MOUNT_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_DAY = 86400.0

SmokeLevel = Literal["kernel", "server"]
Dtype = Literal["f32", "f16", "bf16"]
_PLATFORM = Platform()
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The packaged software's own source: where from, and which revision (a full commit, or a tag)."""

    url: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Debootstrap:
    """A base image made from the distribution's packages, where no registry can be reached.

    ``suite`` None is the host's own release; its default mirror is used. ``include`` are packages beyond the variant.
    """

    suite: str | None = None
    variant: str = "minbase"
    components: tuple[str, ...] = ("main",)
    include: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The image that the last stage starts from.

    ``image`` is its name, ``digest`` what it is pinned to, ``argument`` the build argument that carries both to the
    Dockerfile. With ``debootstrap`` the build makes the base itself and gives it a name.
    """

    argument: str = "BASE"
    image: str | None = None
    digest: Digest | None = None
    debootstrap: Debootstrap | None = None

    @property
    def pinned(self) -> str | None:
        """``image@digest`` where there is a digest, else ``image``."""
        return f"{self.image}@{self.digest}" if self.image and self.digest else self.image


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A build secret, mounted under ``id``: from a variable, a file, or the host's bundle of CA certificates."""

    id: str
    env: str | None = None
    file: str | None = None
    ca_bundle: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PathException:
    """Files (a glob over absolute paths in the image) that a check lets pass, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What the image's CUDA code must offer.

    ``require``: architectures like ``sm_70``. ``runtime``: a constraint on the CUDA version inside, like ``<13``.
    ``version``: the CUDA version that it is built with, for labels.
    """

    require: tuple[str, ...] = ()
    runtime: str | None = None
    version: str | None = None
    exceptions: tuple[PathException, ...] = ()

    @property
    def sm(self) -> str | None:
        """``70`` for ``sm_70``: the first required architecture, for labels and tags."""
        return self.require[0].removeprefix("sm_") if self.require else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How to see that the image starts without a network, on a read-only root.

    ``command`` replaces the image's own; it must end with 0, or answer ``health`` on ``port`` where that is given.
    ``expect`` is a regular expression for its output; ``writable`` are folders that get a tmpfs. ``timeout`` is in
    seconds. ``exceptions`` are files whose downloads at start are known and accepted.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    port: int | None = None
    health: str | None = None
    expect: str | None = None
    writable: tuple[str, ...] = ("/tmp",)  # noqa: S108 - a path in the image
    timeout: float = 60.0
    exceptions: tuple[PathException, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeServer:
    """How to start the server for a smoke test: arguments, port, health path, and where its model lies in the image.

    ``{model}`` and ``{port}`` in the arguments are replaced. ``timeout`` in seconds, until it is healthy.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    port: int = 8000
    health: str = "/health"
    model: str = "/models/probe"
    timeout: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """What the smoke test runs. ``library`` is the path of the kernels' shared library in the image."""

    library: str | None = None
    dtype: Dtype = "f16"
    levels: tuple[SmokeLevel, ...] = ()
    server: SmokeServer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Where to push and how.

    ``target`` is a reference without a tag; ``${VARIABLE}`` in it is taken from the environment. Sizes in bytes;
    None leaves the choice to ``edge``, the preset of what stands before the registry.
    """

    target: str | None = None
    chunk_size: int | None = None
    limit: int | None = None
    edge: str | None = None
    split: bool = False
    codec: Codec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Settings of the build itself. ``timeout`` in seconds; ``min_disk`` in bytes free at the engine's data root."""

    builder: str | None = None
    network: Literal["default", "host", "none"] = "default"
    timeout: float = 2 * 3600.0
    min_disk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One image. Texts in ``tags``, ``labels`` and ``arguments`` may hold PLACEHOLDERS.

    ``folder`` is where the recipe lies; ``dockerfile`` and ``context`` are relative to it.
    """

    name: str
    folder: Path
    image: str
    tags: tuple[str, ...]
    description: str = ""
    version: str | None = None
    licenses: str | None = None
    platform: Platform = _PLATFORM
    dockerfile: str = "Dockerfile"
    context: str = "."
    target: str | None = None
    source: Source = Source()
    base: Base | None = None
    arguments: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    secrets: tuple[Secret, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    build: Build = Build()
    cuda: Cuda = Cuda()
    start: Start = Start()
    smoke: Smoke = Smoke()
    push: Push = Push()

    @property
    def context_path(self) -> Path:
        return (self.folder / self.context).resolve()

    @property
    def dockerfile_path(self) -> Path:
        return (self.folder / self.dockerfile).resolve()


def parse(text: bytes, *, folder: Path, name: str | None = None) -> Recipe:
    """A recipe from its text. ``folder`` is where its files lie; they are not looked at here.

    ``name`` is the one that the recipe must bear (its folder's). Raises one RecipeError with all that is wrong.
    """
    where = str(folder / "recipe.yaml")
    top, problems = read(text, where)
    recipe_name = top.text("name", "unnamed", required=True, pattern=_NAME, what="a name: a-z, 0-9, and . _ - between")
    if name is not None and "name" in top and recipe_name not in (name, "unnamed"):
        top.wrong("name", f"{recipe_name} must be the name of the recipe's folder, {name}")
    description = top.text("description")
    image = top.parsed("image", _repository, recipe_name)
    version = top.optional("version")
    tags = top.texts("tags", lambda tag: _tag(tag, version is not None), required=True, filled=True)
    result = Recipe(
        name=recipe_name,
        folder=folder,
        image=image,
        tags=tags,
        description=description,
        version=version,
        licenses=top.optional("licenses"),
        platform=top.parsed("platform", Platform.parse, Platform()),
        dockerfile=top.parsed("dockerfile", _relative, "Dockerfile"),
        context=top.parsed("context", _relative, "."),
        target=top.optional("target", pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]*", what="a build stage's name"),
        source=_source(top.table("source")),
        base=_base(top.table("base")) if "base" in top else None,
        arguments=top.mapping("args", _template, pattern=_VARIABLE, what="a build argument's name"),
        secrets=_secrets(top),
        labels=top.mapping("labels", _template, pattern=r"[A-Za-z0-9][A-Za-z0-9._/-]*", what="a label's name"),
        build=_build(top.table("build")),
        cuda=_cuda(top.table("cuda")),
        start=_start(top.table("start")),
        smoke=_smoke(top.table("smoke")),
        push=_push(top.table("push")),
    )
    top.close()
    problems.check(where)
    return result


def expand(template: str, values: Mapping[str, str | None], *, what: str) -> str:
    """``template`` with its placeholders replaced. Raises UsageError where a value is not known; ``what`` is named."""
    for name in placeholders(template):
        if not values.get(name):
            meaning = PLACEHOLDERS.get(name, "unknown")
            way = "; commit first" if "revision" in name and "source" not in name else ""
            raise UsageError(f"{what}: {{{name}}} has no value here", hint=f"it is {meaning}{way}")
    return template.format_map({name: value for name, value in values.items() if value})


def placeholders(template: str) -> tuple[str, ...]:
    """The names in braces. Raises UsageError for a template that is not one, or a name that is not known."""
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"{template!r}: {error}", hint="write {{ and }} for braces themselves") from error
    names = []
    for _, name, specification, conversion in fields:
        if name is None:
            continue
        if name not in PLACEHOLDERS or specification or conversion:
            raise UsageError(f"{{{name}}} is not a placeholder", hint=f"known: {', '.join(PLACEHOLDERS)}")
        names.append(name)
    return tuple(names)


def push_target(recipe: Recipe, environment: Mapping[str, str]) -> Reference:
    """The reference to push to, without tag. Raises UsageError where the recipe has none or a variable is not set."""
    template = recipe.push.target
    if template is None:
        raise UsageError(f"recipe {recipe.name} has no push.target", hint="name one with --to HOST/REPOSITORY:TAG")

    def value(match: re.Match[str]) -> str:
        found = environment.get(match[1], "").strip()
        if not found:
            raise UsageError(
                f"push.target of recipe {recipe.name} needs the variable {match[1]}, which is not set",
                hint=f"set it, or name the target with --to HOST/REPOSITORY:TAG ({template})",
            )
        return found

    return Reference.parse(re.sub(_ENVIRONMENT, value, template), default_tag=None)


# The parts -----------------------------------------------------------------------------------------------------------

_ENVIRONMENT = rf"\$\{{({_VARIABLE})\}}"


def _source(table: Table) -> Source:
    result = Source(
        url=table.optional("url", pattern=r"(?:https?|ssh|git|file)://[^\s@]+", what="a URL without credentials"),
        revision=table.optional("revision", pattern=r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,127}", what="a commit or a tag"),
    )
    table.close()
    return result


def _base(table: Table) -> Base:
    argument = table.text("arg", "BASE", pattern=_VARIABLE, what="a build argument's name")
    image = table.parsed("image", _image_name, None)
    digest = table.parsed("digest", Digest.parse, None)
    debootstrap = None
    if "debootstrap" in table:
        inner = table.table("debootstrap")
        words = r"[a-z0-9][a-z0-9.+-]*"
        suite = inner.text("suite", "host", pattern=words, what="a release's code name")
        debootstrap = Debootstrap(
            suite=None if suite == "host" else suite,
            variant=inner.text("variant", "minbase", pattern=words, what="a variant of debootstrap"),
            components=inner.texts("components", _matching(words, "a component")) or ("main",),
            include=inner.texts("include", _matching(words, "a package")),
        )
        inner.close()
        if image is not None:
            table.wrong("image", "cannot stand beside base.debootstrap: the build names that base itself")
        if digest is not None:
            table.wrong("digest", "cannot stand beside base.debootstrap")
    else:
        table.table("debootstrap")
        if "image" not in table and not table.broken:
            table.wrong("image", "is missing (or base.debootstrap)")
    table.close()
    return Base(argument=argument, image=image, digest=digest, debootstrap=debootstrap)


def _secrets(top: Table) -> tuple[Secret, ...]:
    found: dict[str, Secret] = {}
    for table in top.tables("secrets"):
        secret = Secret(
            id=table.text("id", required=True, pattern=_MOUNT_ID, what="a secret's id"),
            env=table.optional("env", pattern=_VARIABLE, what="a variable's name"),
            file=table.optional("file"),
            ca_bundle=table.flag("ca_bundle", False),
            optional=table.flag("optional", False),
        )
        if not table.broken and sum(("env" in table, "file" in table, secret.ca_bundle)) != 1:
            table.wrong("id", "needs exactly one of env, file and ca_bundle: true beside it")
        if secret.id in found and secret.id:
            table.wrong("id", f"{secret.id} is there twice")
        found[secret.id] = secret
        table.close()
    return tuple(found.values())


def _build(table: Table) -> Build:
    network = table.text("network", "default")
    if network not in ("default", "host", "none"):
        table.wrong("network", f"{network} is not one of default, host, none")
        network = "default"
    timeout = table.duration("timeout", Build().timeout)
    if timeout > 7 * _DAY:
        table.wrong("timeout", "is longer than 7 days")
    result = Build(
        builder=table.optional("builder", pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]*", what="a builder's name"),
        network=network,  # type: ignore[arg-type]
        timeout=timeout,
        min_disk=table.size("min_disk"),
    )
    table.close()
    return result


def _cuda(table: Table) -> Cuda:
    result = Cuda(
        require=table.texts("require", _matching(_ARCHITECTURE, "an architecture such as sm_70"), filled=True),
        runtime=table.optional("runtime", pattern=_CONSTRAINT, what='a constraint on versions such as "<13"'),
        version=table.optional("version", pattern=_VERSION, what='a version such as "12.9"'),
        exceptions=_exceptions(table),
    )
    table.close()
    return result


def _exceptions(table: Table) -> tuple[PathException, ...]:
    found = []
    for entry in table.tables("exceptions"):
        found.append(
            PathException(
                path=entry.text("path", required=True, pattern=r"/.+", what="an absolute path (* and ** match)"),
                reason=entry.text("reason", required=True),
            )
        )
        entry.close()
    return tuple(found)


def _start(table: Table) -> Start:
    default = Start()
    result = Start(
        command=table.texts("command", str, filled=True),
        environment=table.mapping("env", pattern=_VARIABLE, what="a variable's name"),
        port=table.integer("port", None, least=1, most=65535),
        health=table.optional("health", pattern=r"/\S*", what="a path such as /health"),
        expect=table.parsed("expect", _regular_expression, None),
        writable=table.texts("writable", _absolute) if "writable" in table else default.writable,
        timeout=table.duration("timeout", default.timeout),
        exceptions=_exceptions(table),
    )
    if "writable" not in table:
        table.texts("writable", _absolute)
    if ("health" in table) != ("port" in table):
        table.wrong("health" if "health" in table else "port", "health and port go together")
    table.close()
    return result


def _smoke(table: Table) -> Smoke:
    dtype = table.text("dtype", "f16")
    if dtype not in get_args(Dtype):
        table.wrong("dtype", f"{dtype} is not one of {', '.join(get_args(Dtype))}")
        dtype = "f16"
    library = table.parsed("library", _absolute, None)
    server = None
    inner = table.table("server")
    if "server" in table:
        default = SmokeServer()
        server = SmokeServer(
            command=inner.texts("command", str, filled=True),
            environment=inner.mapping("env", pattern=_VARIABLE, what="a variable's name"),
            port=inner.integer("port", default.port, least=1, most=65535) or default.port,
            health=inner.text("health", default.health, pattern=r"/\S*", what="a path such as /health"),
            model=inner.parsed("model", _absolute, default.model),
            timeout=inner.duration("timeout", default.timeout),
        )
        inner.close()
    levels = table.texts("levels", _level)
    if "kernel" in levels and "library" not in table:
        table.wrong("levels", "kernel needs smoke.library, the path of the kernels' library in the image")
    if "server" in levels and server is None:
        table.wrong("levels", "server needs smoke.server")
    table.close()
    return Smoke(library=library, dtype=dtype, levels=levels, server=server)  # type: ignore[arg-type]


def _push(table: Table) -> Push:
    edge = table.optional("edge")
    if edge is not None:
        edge = _checked(table, "edge", edge, RegistryOptions().with_edge)
    result = Push(
        target=table.parsed("target", _target, None),
        chunk_size=table.size("chunk_size"),
        limit=table.size("limit"),
        edge=edge,
        split=table.flag("split", False),
        codec=table.parsed("codec", Codec.parse, None),
    )
    if result.chunk_size and result.limit and result.chunk_size > result.limit:
        table.wrong("chunk_size", "is larger than push.limit")
    table.close()
    return result


# Single values -------------------------------------------------------------------------------------------------------


def _checked(table: Table, key: str, value: str, check: Callable[[str], object]) -> str | None:
    try:
        check(value)
    except UsageError as error:
        table.wrong(key, str(error))
        return None
    return value


def _matching(pattern: str, what: str) -> Callable[[str], str]:
    def parse_one(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise UsageError(f"{text} is not {what}")
        return text

    return parse_one


def _template(text: str) -> str:
    placeholders(text)
    return text


def _tag(text: str, has_version: bool) -> str:
    names = placeholders(text)
    if "version" in names and not has_version:
        raise UsageError("{version} needs the recipe to have a version")
    example = text.format_map(dict.fromkeys(PLACEHOLDERS, "0"))
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", example, re.ASCII):
        raise UsageError(f"{text} does not make a tag", hint="letters, digits, and . _ - after the first one")
    if "source_url" in names:
        raise UsageError("{source_url} cannot be in a tag: it has slashes")
    return text


def _repository(text: str) -> str:
    repository, tag, digest = split_name(text, text)
    if tag is not None or digest is not None:
        raise UsageError(f"{text} must be a name without tag or digest", hint="tags are listed under tags")
    return repository


def _image_name(text: str) -> str | None:
    """An image's name with a tag, its registry optional."""
    host, slash, rest = text.partition("/")
    named_host = slash and ("." in host or ":" in host or host == "localhost")
    _, tag, digest = split_name(rest if named_host else text, text)
    if digest is not None:
        raise UsageError(f"{text} has a digest in it", hint="put it under base.digest")
    if tag is None or tag == "latest":
        raise UsageError(f"{text} is not pinned to a version", hint="name a tag other than latest")
    return text


def _target(text: str) -> str:
    filled = re.sub(_ENVIRONMENT, "example.org", text)
    if "${" in filled:
        raise UsageError(f"{text} has a ${{…}} that is not a variable's name")
    reference = Reference.parse(filled, default_tag=None)
    if reference.tag is not None or reference.digest is not None:
        raise UsageError(f"{text} must be without tag and digest", hint="tags are listed under tags")
    return text


def _relative(text: str) -> str:
    if text.startswith(("/", "~")):
        raise UsageError(f"{text} must be relative to the recipe's folder")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or ".." in PurePosixPath(text).parts:
        raise UsageError(f"{text} is not an absolute path in the image")
    return text


def _level(text: str) -> SmokeLevel:
    if text not in get_args(SmokeLevel):
        raise UsageError(f"{text} is not one of {', '.join(get_args(SmokeLevel))}")
    return text  # type: ignore[return-value]


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"{text} is not a regular expression: {error}") from error
    return text
