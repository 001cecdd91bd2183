"""Flags that several tasks share: their help, and the values that they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from buildkit import stack as local_stack
from buildkit.errors import UsageError
from buildkit.image.source import ImageSource
from buildkit.model import Platform, split_name
from buildkit.recipe import Push, Recipe
from buildkit.registry import Credentials, DefaultCredentials, FixedCredentials, RegistryClient, RegistryOptions
from buildkit.registry.credentials import Credential, read_secret
from buildkit.registry.quirks import Quirk
from buildkit.units import parse_size

SOURCE = "recipe's name, or docker-daemon:NAME, docker-archive:FILE, oci:DIR[:TAG], oci-archive:FILE, docker://REF"
ENGINE = "address of the container engine (default: DOCKER_HOST, then the usual socket)"
PLATFORM = "which image of a multi-platform source, like linux/amd64"

PARALLEL = RegistryOptions().parallel
RETRIES = RegistryOptions().retries

REGISTRY: Mapping[str, str] = {
    "plain-http": "speak http to a registry that is not on this machine's loopback",
    "insecure": "do not verify the TLS certificate of this HOST[:PORT] (may be a list, by commas)",
    "ca-bundle": "file with the CA certificates to trust",
    "username": "user at the registry (default: REGISTRY_USERNAME, then Docker's configuration)",
    "password-stdin": "read the password or token from standard input",
}
"""Flags of every task that speaks to a registry."""


def registry_options(
    recipe: Recipe | None,
    *,
    chunked: bool = True,
    chunk_size: str = "",
    limit: str = "",
    edge: str = "",
    parallel: int = PARALLEL,
    retries: int = RETRIES,
    quirks: str = "",
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
) -> RegistryOptions:
    """The flags over the recipe's settings over the defaults. Raises UsageError."""
    wish = recipe.push if recipe is not None else Push()
    options = RegistryOptions(
        chunked=chunked,
        plain_http=True if plain_http else None,
        insecure_hosts=frozenset(host.strip() for host in insecure.split(",") if host.strip()),
        ca_bundle=ca_bundle or None,
    )
    if ca_bundle and not os.path.isfile(ca_bundle):
        raise UsageError(f"--ca-bundle {ca_bundle} is not a file")
    preset = edge or wish.edge
    if preset:
        options = options.with_edge(preset)
    bound = parse_size(limit, what="--limit") if limit else wish.limit if not edge else None
    wished = None if edge or limit else wish.chunk_size
    piece = parse_size(chunk_size, what="--chunk-size") if chunk_size else wished
    if bound is not None:
        options = replace(options, limit=bound, chunk_size=min(options.chunk_size, bound))
    if piece is not None:
        if limit and bound is not None and piece > bound:
            raise UsageError(f"--chunk-size {chunk_size} is above --limit {limit}")
        # A chunk above the default limit is a limit that the user vouches for.
        vouched = options.limit if bound or preset else max(options.body_limit, piece)
        options = replace(options, chunk_size=piece, limit=vouched)
    present, absent = _quirks(quirks)
    return replace(
        options,
        parallel=parallel,
        retries=retries,
        quirks=present,
        not_quirks=absent,
    )


def credentials(registry: str, *, username: str = "", password_stdin: bool = False) -> Credentials:
    """From standard input where that is asked for, else from the environment and Docker's configuration."""
    if not password_stdin:
        if username:
            raise UsageError("--username needs --password-stdin", hint="or set REGISTRY_USERNAME and REGISTRY_TOKEN")
        # REGISTRY_TOKEN is meant for the target, and goes to no other host.
        return DefaultCredentials(env_registry=registry)
    name = username or os.environ.get("REGISTRY_USERNAME", "")
    if not name:
        raise UsageError("--password-stdin needs --username", hint="or set REGISTRY_USERNAME")
    if sys.stdin.isatty():
        raise UsageError("--password-stdin reads from a pipe, not from a terminal", hint="… < token-file")
    secret = read_secret(sys.stdin)
    if not secret:
        raise UsageError("--password-stdin: standard input is empty", hint="… < token-file")
    return FixedCredentials(
        registry=registry, credential=Credential(source="standard input", username=name, password=secret)
    )


def opened_for(source: ImageSource, platform: str) -> ImageSource:
    """``source``, which must be for ``platform`` where that was asked for: a single image has no choice to offer."""
    if platform and source.random_access:
        wanted, has = Platform.parse(platform), source.config().platform
        if (wanted.os, wanted.architecture) != (has.os, has.architecture):
            raise UsageError(f"{source.name} is for {has}, not for {wanted}")
    return source


def threads(count: int) -> int | None:
    """``--threads``: 0 stands for all processors."""
    if not 0 <= count <= 1024:
        raise UsageError(f"{count} threads make no sense", hint="choose 1 to 1024, or leave --threads out")
    return count or None


def repositories(text: str) -> tuple[str, ...]:
    """``--mount-from``: names of repositories, by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        _, tag, digest = split_name(name, name)
        if tag or digest:
            raise UsageError(f"{name!r} in --mount-from has a tag or digest", hint="name the repository alone")
    return names


def engine_host(text: str, *, environ: Mapping[str, str] = os.environ) -> str | None:
    """The engine's address: the flag's, else the environment's, else the local stack's own engine where the usual
    socket is not there; None leaves it to Docker's own rules."""
    if text or environ.get("DOCKER_HOST") or environ.get("DOCKER_CONTEXT"):
        return text or None
    if os.path.exists("/var/run/docker.sock"):
        return None
    engine = local_stack.status(local_stack.default_folder()).components.get("engine")
    return engine.address if engine is not None and engine.owned and engine.condition == "running" else None


def registry_reader() -> Callable[[str], RegistryClient]:
    """Makes clients to read ``docker://`` sources with, by the user's own credentials. ``REGISTRY_TOKEN`` is meant for
    the push target and is not sent to them."""
    return lambda host: RegistryClient(host, credentials=DefaultCredentials(env_registry=""))


def _quirks(text: str) -> tuple[frozenset[Quirk], frozenset[Quirk]]:
    """``equal-parts,no:no-status``: quirks that are known to be there, and known not to be."""
    present: set[Quirk] = set()
    absent: set[Quirk] = set()
    for word in (part.strip() for part in text.split(",")):
        if not word:
            continue
        name = word.removeprefix("no:")
        try:
            quirk = Quirk(name)
        except ValueError:
            raise UsageError(f"unknown quirk {name!r}", hint=f"known: {', '.join(Quirk)}") from None
        (absent if word != name else present).add(quirk)
    return frozenset(present), frozenset(absent)
