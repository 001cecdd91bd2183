"""``split``: an image whose layers all fit through the door, with nothing lost."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rich.console import Console

from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.errors import UsageError
from buildkit.image.compress import DEFAULT_CODEC, Codec
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location, open_source
from buildkit.image.write import OutputImage, check_destination, write_image
from buildkit.model import Platform
from buildkit.progress import Display, display
from buildkit.split.rewrite import DEFAULT_LIMIT, Oversize, SplitOptions, split_image
from buildkit.split.rewrite import dry_run as plan_split
from buildkit.split.verify import Verification
from buildkit.split.verify import verify as verify_split
from buildkit.tasks import flags, resolve
from buildkit.units import format_size, parse_size

_STEP = 500_000_000
"""Bytes between two lines of progress."""


@command(
    positional=["image", "destination"],
    help={
        "image": f"{flags.SOURCE} (default: the recipe {resolve.DEFAULT_RECIPE})",
        "destination": "where to: an engine's image name, docker-archive:FILE, oci:DIR[:TAG] or oci-archive:FILE",
        "limit": "most compressed bytes of a layer, like 95MB",
        "dry-run": "tell what would be done, exactly, and keep nothing",
        "quick": "with --dry-run: predict the sizes from a sample instead of compressing everything",
        "oversize": "a file that alone is above the limit: isolate (a layer of its own) or error",
        "verify": "prove that the trees of both images are equal",
        "compression": "gzip[:LEVEL] or zstd[:LEVEL] (default gzip:1)",
        "threads": "threads that compress (default: all processors)",
        "packed": "fill the layers in order, instead of cutting where a small change moves few boundaries",
        "source": "how to read the engine's image: auto, direct (its data root) or save",
        "platform": flags.PLATFORM,
        "engine": flags.ENGINE,
    },
)
def split(
    context: Any,
    image: str = "",
    destination: str = "",
    limit: str = "",
    dry_run: bool = False,
    quick: bool = False,
    oversize: str = "isolate",
    verify: bool = False,
    compression: str = "",
    threads: int = 0,
    packed: bool = False,
    source: str = "auto",
    platform: str = "",
    engine: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Divide the layers of an image that are above a limit, losslessly."""
    dry = dry_run or bool(context.config.run.dry)
    if not dry and not destination:
        raise UsageError(
            "split needs a destination: invoke split SOURCE DEST", hint="oci:DIR, say; --dry-run needs none"
        )
    if quick and not dry:
        raise UsageError("--quick is for --dry-run alone: a split compresses everything")
    if verify and dry:
        raise UsageError("--verify needs the divided image, which --dry-run does not make")
    host = flags.engine_host(engine)
    chosen = resolve.choose(image, engine_host=host)
    if not dry:
        check_destination(destination)
        _check_apart(chosen.source, destination)
    wished = chosen.recipe.push.codec if chosen.recipe else None
    options = SplitOptions(
        limit=parse_size(limit, what="--limit") if limit else DEFAULT_LIMIT,
        codec=Codec.parse(compression) if compression else wished or DEFAULT_CODEC,
        oversize=parse_oversize(oversize),
        stable=not packed,
        threads=flags.threads(threads),
    )
    verified: Verification | None = None
    with ExitStack() as stack:
        shown = stack.enter_context(display(quiet=quiet))

        def opened(text: str, method: str = "auto") -> ImageSource:
            return stack.enter_context(
                open_source(
                    text,
                    engine_host=host,
                    method=method,
                    platform=Platform.parse(platform) if platform else None,
                    registry_client_factory=flags.registry_reader(),
                )
            )

        before = opened(chosen.source, source)
        flags.opened_for(before, platform)
        told = Progress(shown, before.name)
        if dry:
            report = plan_split(before, options, exact=not quick, progress=told)
        else:
            result = stack.enter_context(split_image(before, options, progress=told))
            report = result.report
            assert result.image.manifest is not None
            place = Location.parse(destination)
            if place.kind == "oci" and place.path is not None:
                result.image.link_blobs(place.path)
            shown.say(f"writing {place}")
            output = OutputImage(
                manifest=result.image.manifest, config=result.image.config(), open_blob=result.image.open_blob
            )
            written = write_image(destination, output, engine_host=host)
            if verify:
                # Both are read again from where they lie: what is proven is what is there.
                shown.say(f"verifying {written} against {before.name}")
                verified = verify_split(
                    opened(chosen.source, source),
                    opened(written),
                    limit=options.limit,
                    reported=[part.digest for _, part, _ in report.indivisible if part.digest],
                )
    if json:
        emit_json(
            report.to_json()
            | {"ok": verified is None or verified.passed, "verified": verified.to_json() if verified else None}
        )
    else:
        console = Console(soft_wrap=True)
        if not quiet:
            console.print(report)
        if verified is not None:
            console.print(verified)
    if verified is not None and not verified.passed:
        raise ReportedFailure(f"{destination} is not the same image", hint="delete it, and report this")


def _check_apart(source: str, destination: str) -> None:
    """Dividing an image onto itself would leave nothing to verify against, and nothing to go back to."""
    old, new = Location.parse(source), Location.parse(destination)
    if old.path is not None and new.path is not None:
        same = old.path.absolute() == new.path.absolute() or (
            old.path.exists() and new.path.exists() and old.path.samefile(new.path)
        )
        if same and (old.kind != "oci" or old.name == new.name or None in (old.name, new.name)):
            raise UsageError(f"{destination} is the source itself", hint="name another destination")
    elif old.kind == new.kind == "docker-daemon" and old.name == new.name:
        raise UsageError(f"{destination} is the source itself", hint="name another destination")


def parse_oversize(text: str) -> Oversize:
    match text:
        case "isolate" | "error":
            return text
    raise UsageError(f"--oversize {text!r} is not known", hint="isolate or error")


class Progress:
    """A line for every half gigabyte that was read."""

    def __init__(self, shown: Display, name: str) -> None:
        self._shown = shown
        self._name = name
        self._bytes = 0

    def __call__(self, count: int) -> None:
        before = self._bytes // _STEP
        self._bytes += count
        if self._bytes // _STEP != before:
            self._shown.say(f"{self._name}: {format_size(self._bytes)} read and compressed")
