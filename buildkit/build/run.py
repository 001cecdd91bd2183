"""``build``: from a recipe to an image in the engine, or to an OCI archive where a named builder makes it."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildkit.build import base as bases
from buildkit.build import git
from buildkit.build.clients import Chosen, choose, find_clients
from buildkit.build.plan import BuildOptions, BuildPlan, command, needs_buildkit, plan
from buildkit.build.process import run
from buildkit.build.secrets import SecretPlaces, places
from buildkit.engine import Engine
from buildkit.errors import EngineError, FormatError, RecipeError, StorageError, one_line
from buildkit.model import Digest, load_json_object
from buildkit.recipe import Recipe
from buildkit.units import format_duration, format_size

Say = Callable[[str], None]
_ID_FILE_LIMIT = 4096
_NO_SPACE = "no space left on device"
"""What the C library calls ENOSPC, in every program's words."""
_METADATA_LIMIT = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What came out.

    ``image_id`` is the engine's id, or the config's digest where the image is in the archive ``output``. ``names`` are
    the image's names in the engine (in the archive: the tags it is meant to get). ``source`` is how other tasks name
    it. ``backend`` and ``reason`` say what built it and why that; ``seconds`` how long it took.
    """

    recipe: str
    image_id: Digest
    names: tuple[str, ...]
    labels: Mapping[str, str]
    backend: str
    reason: str
    builder: str | None
    seconds: float
    revision: str | None
    dirty: bool
    base: str | None
    output: Path | None = None

    @property
    def source(self) -> str:
        """The image as a SOURCE of other tasks."""
        return f"oci-archive:{self.output}" if self.output else f"docker-daemon:{self.names[0]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "recipe": self.recipe,
            "image_id": str(self.image_id),
            "names": list(self.names),
            "source": self.source,
            "labels": dict(self.labels),
            "backend": self.backend,
            "reason": self.reason,
            "builder": self.builder,
            "seconds": round(self.seconds, 3),
            "revision": self.revision,
            "dirty": self.dirty,
            "base": self.base,
            "output": str(self.output) if self.output else None,
        }


def build(
    recipe: Recipe,
    engine: Engine | None,
    options: BuildOptions,
    say: Say,
    *,
    environ: Mapping[str, str] = os.environ,
) -> BuildResult:
    """Build ``recipe``; ``say`` gets every line of the builder's output, without secrets.

    ``engine`` may be None only with a named builder. Running it again builds again, as far as the builder's cache lets
    it. Raises UsageError or RecipeError (before anything is started), MissingComponentError, StorageError (too little
    disk), EngineError (the build failed or took too long).
    """
    started = time.monotonic()
    builder = options.builder or recipe.build.builder
    secret_places = places(recipe, environ=environ)
    try:
        dockerfile = recipe.dockerfile_path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{recipe.dockerfile_path}: cannot be read") from error
    chosen = choose(
        find_clients(environ), backend=options.backend, builder=builder, needs=needs_buildkit(recipe, dockerfile)
    )
    facts = git.facts([recipe.folder, recipe.context_path], environ=environ)
    plan(recipe, facts, None, options)  # what is wrong in the recipe is said before a base is made
    check_disk(recipe, None if builder else engine, options, say)
    base = bases.prepare(recipe, None if builder else engine, rebuild=options.rebuild, say=say)
    planned = plan(recipe, facts, base, options)
    say(f"building {recipe.name} with {chosen.description}" + (f": {chosen.reason}" if chosen.reason else ""))
    if facts.dirty:
        say(f"note: the files of {recipe.name} differ from commit {(facts.revision or '')[:12]}")
    output = None
    with _FullDisk(recipe.name, say) as heard:
        if builder is not None:
            output = (options.output or Path(".buildkit") / f"{recipe.name}.oci.tar").absolute()
            image_id = _build_with_builder(planned, chosen, builder, output, secret_places, heard.say, environ)
        else:
            assert engine is not None, "an engine is needed without a builder"
            if chosen.client is None:
                image_id = _build_classic(planned, engine, heard.say)
            else:
                image_id = _build_with_client(planned, chosen, engine, secret_places, heard.say, environ)
            image_id = engine.inspect(str(image_id)).id  # it is there, under the id that the engine uses
    result = BuildResult(
        recipe=recipe.name,
        image_id=image_id,
        names=planned.names,
        labels=planned.labels,
        backend=chosen.description,
        reason=chosen.reason,
        builder=builder,
        seconds=time.monotonic() - started,
        revision=options.revision or facts.revision,
        dirty=facts.dirty,
        base=base.name if base else None,
        output=output,
    )
    say(f"built {image_id} in {format_duration(result.seconds)}: {', '.join(planned.names)}")
    return result


class _FullDisk:
    """Listens to a build. Builders end with "executor failed" where a disk is full; the reason is lines above it."""

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._line = ""

    def say(self, line: str) -> None:
        if _NO_SPACE in line.lower():
            self._line = line
        self._say(line)

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, EngineError):
            return
        line = self._line or (error.message if _NO_SPACE in error.message.lower() else "")
        if line:
            raise StorageError(
                f"building {self._name} failed, a disk is full: {one_line(line, 200)}",
                hint="make room where the engine keeps its data (docker system df), or in the step that filled it",
            ) from error


def check_disk(recipe: Recipe, engine: Engine | None, options: BuildOptions, say: Say) -> None:
    """Raise StorageError where the engine's disk has less room than the recipe asks for."""
    need = recipe.build.min_disk
    if need is None or engine is None or options.ignore_disk:
        return
    root, free = engine.info.data_root, free_disk(engine)
    if free is None:
        say(f"disk: the engine is not on this machine, so its {format_size(need)} of free space are not checked")
        return
    if free < need:
        raise StorageError(
            f"{root} has {format_size(free)} free, and building {recipe.name} needs {format_size(need)}",
            hint="`docker system prune` frees space; --ignore-disk builds all the same",
        )
    say(f"disk: {format_size(free)} free at {root}")


def free_disk(engine: Engine) -> int | None:
    """Bytes free at the engine's data root; None where that is on another machine."""
    if not engine.local:
        return None
    root = engine.info.data_root
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    return shutil.disk_usage(place).free


def _build_with_client(
    plan: BuildPlan, chosen: Chosen, engine: Engine, secrets: SecretPlaces, say: Say, environ: Mapping[str, str]
) -> Digest:
    """BuildKit in the engine, through a client; the id comes from the file that the client writes."""
    assert chosen.client is not None
    with tempfile.TemporaryDirectory(prefix="buildkit-build-") as folder:
        id_file = Path(folder) / "id"
        words = [chosen.client.path]
        environment = {**environ, "DOCKER_HOST": engine.host, "DOCKER_BUILDKIT": "1"}
        if chosen.backend == "buildx":
            # "default" is the engine itself (driver docker), whatever builder the user has made the current one.
            words += ["buildx", "build", "--builder=default", "--load", "--provenance=false", "--sbom=false"]
            environment.pop("BUILDX_BUILDER", None)
        else:
            words += ["build"]
        words += [*command(plan, secrets.options), f"--iidfile={id_file}", str(plan.recipe.context_path)]
        _run(plan, words, secrets, say, environment)
        return _read_id(id_file)


def _build_with_builder(
    plan: BuildPlan,
    chosen: Chosen,
    builder: str,
    output: Path,
    secrets: SecretPlaces,
    say: Say,
    environ: Mapping[str, str],
) -> Digest:
    """A named builder; it sends the image back as an OCI archive, so no local engine is needed."""
    assert chosen.client is not None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{output.parent}: cannot be made: {error.strerror}") from error
    partial = output.with_name(f".{output.name}.partial")
    words = [
        chosen.client.path,
        "buildx",
        "build",
        f"--builder={builder}",
        "--provenance=false",
        "--sbom=false",
        f"--output=type=oci,dest={partial}",
    ]
    if plan.recipe.build.network == "host":
        words.append("--allow=network.host")
    words += [*command(plan, secrets.options), str(plan.recipe.context_path)]
    try:
        _run(plan, words, secrets, say, environ)
        image_id = archive_config(partial)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return image_id


def _run(plan: BuildPlan, words: list[str], secrets: SecretPlaces, say: Say, environ: Mapping[str, str]) -> None:
    environment = {**environ, "BUILDKIT_PROGRESS": "plain", "NO_COLOR": "1"}
    if plan.epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(plan.epoch)
    ended = run(
        words,
        say=lambda line: say(secrets.blot(line)),
        timeout=plan.timeout,
        environment=environment,
        what=f"building {plan.recipe.name}",
    )
    if ended.code:
        last = secrets.blot(ended.tail[-1]) if ended.tail else "it printed nothing"
        raise EngineError(
            f"building {plan.recipe.name} failed with exit code {ended.code}: {last}",
            hint="the builder's output above says where",
        )


def _build_classic(plan: BuildPlan, engine: Engine, say: Say) -> Digest:
    recipe = plan.recipe
    return engine.build_classic(
        context=recipe.context_path,
        dockerfile=recipe.dockerfile_path,
        names=plan.names,
        arguments=plan.arguments,
        labels=plan.labels,
        platform=plan.platform,
        target=recipe.target,
        network=None if recipe.build.network == "default" else recipe.build.network,
        no_cache=plan.rebuild,
        timeout=plan.timeout,
        say=say,
    )


def _read_id(path: Path) -> Digest:
    try:
        text = path.read_text(encoding="ascii")[:_ID_FILE_LIMIT].strip()
        return Digest.parse(text)
    except (OSError, ValueError, FormatError) as error:
        raise EngineError("the builder ended well but named no image", hint="is its output turned off?") from error


def archive_config(path: Path) -> Digest:
    """The config's digest of the only image in an OCI archive (image-layout.md). Raises FormatError."""
    where = str(path)
    try:
        with tarfile.open(path) as archive:
            index = load_json_object(_member(archive, "index.json"), where="index.json", limit=_METADATA_LIMIT)
            manifests = index.get("manifests")
            if not isinstance(manifests, list) or len(manifests) != 1:
                raise FormatError("does not hold exactly one image", where=where)
            digest = Digest.parse(manifests[0].get("digest"))
            raw = _member(archive, f"blobs/{digest.algorithm}/{digest.hex}")
            digest.check(raw, "the manifest")
            config = load_json_object(raw, where="the manifest", limit=_METADATA_LIMIT).get("config")
            return Digest.parse(config.get("digest") if isinstance(config, dict) else None)
    except (tarfile.TarError, KeyError, AttributeError, OSError, json.JSONDecodeError) as error:
        raise FormatError("is not an OCI archive of one image", where=where) from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    with file:
        return file.read(_METADATA_LIMIT + 1)
