"""The main tasks: build an image, push it, check what the registry holds."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from buildkit.build import Backend, BuildOptions
from buildkit.build import build as build_image
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.engine import Engine
from buildkit.errors import UsageError, one_line
from buildkit.image.cache import BlobCache, cache_limit, cache_root
from buildkit.image.compress import DEFAULT_CODEC, Codec
from buildkit.image.source import ImageSource
from buildkit.image.transports import open_source
from buildkit.model import Platform, Reference
from buildkit.progress import display
from buildkit.push import PushOptions, plan_push
from buildkit.push import push as push_image
from buildkit.registry import CancelToken, RegistryClient
from buildkit.split.rewrite import DEFAULT_LIMIT, SplitOptions, split_image
from buildkit.tasks import actions, flags, resolve
from buildkit.tasks.split import Progress
from buildkit.units import format_duration, parse_duration
from buildkit.verify import pull_check as check_pull


@command(
    positional=["name"],
    help={
        "name": f"recipe (default: {resolve.DEFAULT_RECIPE})",
        "builder": "hand the build to this buildx builder (a remote or Kubernetes one, say); the result is an archive",
        "output": "with a builder: the OCI archive to write (default: .buildkit/NAME.oci.tar)",
        "backend": "auto, buildx, docker (a client with BuildKit built in) or classic (the engine's own builder)",
        "build-arg": "NAME=VALUE for the Dockerfile; may be given several times",
        "source-url": "build this source instead of the recipe's (a fork)",
        "source-revision": "build this revision of the source instead of the recipe's",
        "revision": "commit to note in the labels, where there is no git to ask",
        "tag": "tag to give instead of the recipe's; may be given several times",
        "timeout": "end the build after this time, like 2h",
        "rebuild": "use no cache, and make the base anew",
        "ignore-disk": "build even where the disk looks too small",
        "engine": flags.ENGINE,
    },
)
def build(
    context: Any,
    name: str = "",
    builder: str = "",
    output: str = "",
    backend: str = "auto",
    build_arg: list[str] = [],  # noqa: B006  # invoke tells a list flag by its default
    source_url: str = "",
    source_revision: str = "",
    revision: str = "",
    tag: list[str] = [],  # noqa: B006
    timeout: str = "",
    rebuild: bool = False,
    ignore_disk: bool = False,
    engine: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Build the image of a recipe."""
    recipe = resolve.recipe_named(name)
    options = BuildOptions(
        backend=parse_backend(backend),
        builder=builder or None,
        output=Path(output) if output else None,
        arguments=parse_arguments(build_arg),
        source_url=source_url or None,
        source_revision=source_revision or None,
        revision=revision or None,
        tags=tuple(tag),
        timeout=parse_timeout(timeout),
        rebuild=rebuild,
        ignore_disk=ignore_disk,
    )
    with ExitStack() as stack, display(quiet=quiet) as shown:
        needs_engine = not (options.builder or recipe.build.builder)
        connected = stack.enter_context(Engine.connect(flags.engine_host(engine))) if needs_engine else None
        result = build_image(recipe, connected, options, shown.say)
    if json:
        emit_json(result.to_json())
        return
    names = ", ".join(result.names)
    print(f"built {result.recipe} as {names} in {format_duration(result.seconds)} with {result.backend}")
    print(f"image: {result.image_id}")


@command(
    positional=["image"],
    help={
        "image": f"{flags.SOURCE} (default: the recipe {resolve.DEFAULT_RECIPE})",
        "to": "HOST[:PORT]/REPOSITORY[:TAG] (default: the recipe's target and tags)",
        "chunked": "send every blob in chunks; without it only those above the limit",
        "chunk-size": "bytes of one chunk, like 95MB or 64MiB",
        "limit": "largest request body that the way to the registry lets through, like 100MB",
        "edge": "preset of limits: cloudflare-free, business, enterprise or none",
        "parallel": "uploads at once (default 4)",
        "retries": "failures in a row that are forgiven (default 8); acknowledged bytes refill them",
        "compression": "gzip[:LEVEL] or zstd[:LEVEL] for layers that are plain tars (default gzip:1)",
        "threads": "threads that compress (default: all processors)",
        "source": "how to read the engine's image: auto, direct (its data root) or save",
        "mount-from": "repositories on the same registry that may hold the layers, by commas",
        "verify": "after the push: quick (manifest and sizes) or deep (read every byte back)",
        "split": "divide layers above the limit first, so that any client can pull and push them (recipe: push.split)",
        "no-cache": "keep no compressed layer after the push",
        "quirks": "registry quirks that are known: NAME, or no:NAME to forbid one; by commas",
        "dry-run": "print the plan and send nothing",
        "platform": flags.PLATFORM,
        "engine": flags.ENGINE,
        **flags.REGISTRY,
    },
)
def push(
    context: Any,
    image: str = "",
    to: str = "",
    chunked: bool = False,
    chunk_size: str = "",
    limit: str = "",
    edge: str = "",
    parallel: int = flags.PARALLEL,
    retries: int = flags.RETRIES,
    compression: str = "",
    threads: int = 0,
    source: str = "auto",
    mount_from: str = "",
    verify: str = "quick",
    split: bool = False,
    no_cache: bool = False,
    quirks: str = "",
    dry_run: bool = False,
    platform: str = "",
    engine: str = "",
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Push an image to a registry, in chunks that fit through the edge before it."""
    if verify not in ("quick", "deep"):
        raise UsageError(f"--verify {verify!r} is not known", hint="quick or deep")
    host = flags.engine_host(engine)
    chosen = resolve.choose(image, engine_host=host)
    target = resolve.target(to, chosen)
    options = flags.registry_options(
        chosen.recipe,
        chunked=chunked,
        chunk_size=chunk_size,
        limit=limit,
        edge=edge,
        parallel=parallel,
        retries=retries,
        quirks=quirks,
        plain_http=plain_http,
        insecure=insecure,
        ca_bundle=ca_bundle,
    )
    wished = chosen.recipe.push.codec if chosen.recipe else None
    settings = PushOptions(
        codec=Codec.parse(compression) if compression else wished or DEFAULT_CODEC,
        threads=flags.threads(threads),
        mount_from=flags.repositories(mount_from),
        deep=verify == "deep",
    )
    who = flags.credentials(target.repository.registry, username=username, password_stdin=password_stdin)
    cancel = CancelToken()
    dry = dry_run or bool(context.config.run.dry)
    wants_split = split or (chosen.recipe is not None and chosen.recipe.push.split)
    with ExitStack() as stack:
        shown = stack.enter_context(display(quiet=quiet))
        client = stack.enter_context(
            RegistryClient(target.repository.registry, credentials=who, options=options, observer=shown, cancel=cancel)
        )
        cache = BlobCache(cache_root(), limit=cache_limit(), keep=not no_cache)
        opened: ImageSource = stack.enter_context(
            open_source(
                chosen.source,
                engine_host=host,
                method=source,
                platform=Platform.parse(platform) if platform else None,
                registry_client_factory=lambda host: RegistryClient(
                    host, credentials=who, options=options, observer=shown, cancel=cancel
                ),
            )
        )
        opened = flags.opened_for(opened, platform)
        if wants_split:
            divide = SplitOptions(limit=options.limit or DEFAULT_LIMIT, codec=settings.codec, threads=settings.threads)
            done = stack.enter_context(split_image(opened, divide, progress=Progress(shown, opened.name)))
            for warning in (*done.report.warnings, *done.report.invalidated):
                shown.say(f"note: {warning}")
            opened = done.image
        if dry:
            plan = plan_push(opened, target, client=client, cache=cache, options=settings)
            report = None
        else:
            report = push_image(
                opened, target, client=client, cache=cache, options=settings, display=shown, cancel=cancel
            )
    if report is None:
        emit_json(plan.to_json()) if json else print("\n".join(one_line(line, 1000) for line in plan.lines()))
        return
    outputs = {"digest": str(report.manifest.digest), "image": report.pull}
    actions.write_outputs(outputs, done=f"pushed {report.pull}")
    if json:
        emit_json(report.to_json())
        return
    if report.uploads and not quiet:
        Console(stderr=True).print(report.table())
    print("\n".join(report.lines()) if not quiet else str(report.manifest.digest))


@command(
    positional=["reference"],
    help={
        "reference": "HOST[:PORT]/REPOSITORY[:TAG][@DIGEST] (default: the recipe's target)",
        "deep": "read every blob and compare its digest",
        "platform": "only this image of an index, like linux/amd64",
        "parallel": "requests at once (default 4)",
        **flags.REGISTRY,
    },
)
def pull_check(
    context: Any,
    reference: str = "",
    deep: bool = False,
    platform: str = "",
    parallel: int = flags.PARALLEL,
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Check that a registry holds an image completely: the manifest, and every blob by size or by digest."""
    where = Reference.parse(reference) if reference else resolve.default_reference()
    options = flags.registry_options(
        None, parallel=parallel, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle
    )
    who = flags.credentials(where.registry, username=username, password_stdin=password_stdin)
    with (
        display(quiet=quiet) as shown,
        RegistryClient(where.registry, credentials=who, options=options, observer=shown) as client,
    ):
        report = check_pull(
            where,
            client=client,
            deep=deep,
            platform=Platform.parse(platform) if platform else None,
            say=shown.say,
        )
    if json:
        emit_json(report.to_json())
    else:
        print("\n".join(report.lines()))
    if not report.ok:
        raise ReportedFailure(f"{where} is not complete: {sum(not blob.ok for blob in report.blobs)} blobs failed")


def parse_timeout(text: str) -> float | None:
    seconds = parse_duration(text, what="--timeout") if text else None
    if seconds == 0:
        raise UsageError("--timeout must be more than nothing")
    return seconds


def parse_backend(text: str) -> Backend:
    match text:
        case "auto" | "buildx" | "docker" | "classic":
            return text
    raise UsageError(f"--backend {text!r} is not known", hint="auto, buildx, docker or classic")


def parse_arguments(pairs: list[str]) -> dict[str, str]:
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--build-arg {name!r} is not NAME=VALUE", hint="--build-arg NAME=VALUE")
        out[name] = value
    return out
