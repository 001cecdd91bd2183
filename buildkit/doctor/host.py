"""This machine: the engine, the programs that a recipe needs, the disks, the credential."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from buildkit.build import choose, facts, find_clients, free_disk
from buildkit.build.plan import needs_buildkit
from buildkit.build.secrets import places
from buildkit.doctor.bounded import Late, within
from buildkit.doctor.seen import CredentialSeen, DiskSeen, EngineSeen, ImageSeen, LayerSeen, ToolsSeen
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, MissingComponentError
from buildkit.image.cache import BlobCache
from buildkit.image.compress import Codec
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location
from buildkit.recipe import Recipe
from buildkit.registry import Credential, Credentials

ENGINE_SECONDS = 20.0
LOOKUP_SECONDS = 40.0
"""A credential helper has 30 s of its own."""
_AUTOMATIC = ("GITHUB_TOKEN", "GITEA_TOKEN", "ACTIONS_RUNTIME_TOKEN")


def engine(host: str | None, recipe: Recipe | None, *, needed: bool) -> EngineSeen:
    """What the engine says of itself; the connection is not kept."""
    wants_gpu = recipe is not None and bool(recipe.smoke.levels)
    try:
        connected = within(ENGINE_SECONDS, lambda: Engine.connect(host))
    except Late:
        late = MissingComponentError(
            f"the container engine does not answer within {ENGINE_SECONDS:.0f} s",
            hint="restart it, or name another with --engine or DOCKER_HOST",
        )
        return EngineSeen(needed=needed, wants_gpu=wants_gpu, error=late)
    except BuildkitError as error:
        return EngineSeen(needed=needed, wants_gpu=wants_gpu, error=error)
    with connected:
        info = connected.info
        minimum = recipe.build.min_disk if recipe is not None else None
        gpu = [name for name in info.runtimes if "nvidia" in name]
        gpu += [name for name in info.devices if name.startswith("nvidia.com/gpu")]
        return EngineSeen(
            needed=needed,
            wants_gpu=wants_gpu,
            host=connected.host,
            version=info.version,
            storage="containerd's store" if info.containerd_store else info.storage_driver,
            gpu=tuple(gpu),
            disk=DiskSeen(
                place=str(info.data_root),
                free=free_disk(connected),
                needed=minimum,
                for_what=f"building {recipe.name}" if recipe is not None else "",
            ),
        )


def local_disk(place: Path) -> DiskSeen:
    """The disk that compressed layers are kept on."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    return DiskSeen(place=str(place), free=free)


def tools(recipe: Recipe | None, environ: Mapping[str, str]) -> ToolsSeen:
    """Git, Docker's clients, and what the recipe needs beyond them."""
    # Asked for its own version, a client asks the engine for its, too: one that hangs would hold up each of them.
    found = find_clients({**environ, "DOCKER_HOST": "unix:///nonexistent/engine.sock"})
    described = tuple(
        f"{client.path}" + (f" {'.'.join(map(str, client.version))}" if client.version else "")
        + (f" with buildx {client.buildx}" if client.buildx else "")
        for client in found
    )  # fmt: skip
    git = shutil.which("git", path=environ.get("PATH")) is not None
    if recipe is None:
        return ToolsSeen(git=git, clients=described)
    known = facts([recipe.folder, recipe.context_path], environ=environ)
    builder, builder_error, secret_error = "", None, None
    try:
        text = recipe.dockerfile_path.read_text(encoding="utf-8", errors="replace")
        builder = choose(
            found, backend="auto", builder=recipe.build.builder, needs=needs_buildkit(recipe, text)
        ).description
    except BuildkitError as error:
        builder_error = error
    except OSError as error:
        builder_error = BuildkitError(f"{recipe.dockerfile_path}: {error.strerror}")
    try:
        places(recipe, environ=environ)
    except BuildkitError as error:
        secret_error = error
    missing = []
    if recipe.base is not None and recipe.base.debootstrap is not None and not _program("debootstrap", environ):
        missing.append("debootstrap")
    return ToolsSeen(
        recipe=recipe.name,
        git=git,
        revision=known.revision,
        dirty=known.dirty,
        clients=described,
        builder=builder,
        builder_error=builder_error,
        secret_error=secret_error,
        missing=tuple(missing),
    )


def _program(name: str, environ: Mapping[str, str]) -> bool:
    return bool(shutil.which(name, path=environ.get("PATH")) or shutil.which(name, path="/usr/sbin:/sbin"))


def credential(
    registry: str, credentials: Credentials, environ: Mapping[str, str] = os.environ
) -> tuple[Credential | None, CredentialSeen]:
    """What there is to log in with, and what may be told of it."""
    try:
        found = within(LOOKUP_SECONDS, lambda: credentials.lookup(registry))
    except Late:
        late = BuildkitError("the credential helper does not answer", hint="try it by hand, or set REGISTRY_TOKEN")
        return None, CredentialSeen(error=late)
    except BuildkitError as error:
        return None, CredentialSeen(error=error)
    if found is None:
        return None, CredentialSeen()
    automatic = found.password is not None and found.password in {environ.get(name) for name in _AUTOMATIC}
    return found, CredentialSeen(source=found.source, username=found.username, automatic=automatic)


def image(source: ImageSource, cache: BlobCache, codec: Codec, engine_host: str | None) -> ImageSeen:
    """The sizes of an image's layers as a push would send them, from its manifest or the cache, as far as they are
    known before anything is compressed. Reads no layer."""
    layers = []
    tar_sizes: list[int | None] = [layer.tar_size for layer in source.layers]
    place = Location.parse(source.name)
    if place.kind == "docker-daemon" and not all(tar_sizes):
        tar_sizes = _from_history(place.name or "", len(source.layers), engine_host) or tar_sizes
    for number, (layer, tar_size) in enumerate(zip(source.layers, tar_sizes, strict=True), 1):
        label = f"layer {number}/{len(source.layers)}"
        size = layer.blob.size if layer.blob is not None else None
        if size is None and (hit := cache.find(layer.diff_id, codec.id, label=label)) is not None:
            size = hit.descriptor.size
            if hit.blob is not None:
                hit.blob.close()
        layers.append(LayerSeen(label=label, size=size, tar_size=tar_size))
    return ImageSeen(name=source.name, layers=tuple(layers))


def _from_history(name: str, count: int, engine_host: str | None) -> list[int | None] | None:
    """What the engine says that each instruction added: its sum of file sizes, a little less than a tar has."""
    with Engine.connect(engine_host) as connected:
        sizes = connected.layer_sizes(name)
    filled = [size for size in sizes if size]
    if len(sizes) == count:
        return list(sizes)
    return list(filled) if len(filled) == count else None
