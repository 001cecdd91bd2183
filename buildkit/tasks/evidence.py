"""``evidence`` and ``promote``: what is attached to an image, and a tag moved to one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from buildkit.build.git import is_ancestor
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.disk import write_atomic
from buildkit.errors import NotFoundError, StorageError, UsageError
from buildkit.evidence import KINDS, ArtifactFile, Overview, fetch, overview
from buildkit.evidence.artifact import is_file_name
from buildkit.model import Reference
from buildkit.progress import Display, display
from buildkit.promote import promote as promote_tag
from buildkit.registry import RegistryClient
from buildkit.tasks import flags, resolve


@command(
    positional=["reference"],
    help={
        "reference": "HOST[:PORT]/REPOSITORY[:TAG][@DIGEST] (default: the recipe's target)",
        "get": f"write the newest artifact of this kind: {', '.join(KINDS)}, or an artifact type",
        "out": "with --get: file for its first document, or an existing folder for all of them; - for standard output",
        **flags.REGISTRY,
    },
)
def evidence(
    context: Any,
    reference: str = "",
    get: str = "",
    out: str = "",
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Show what is attached to an image: reports, checks and their verdicts, the bill of materials."""
    if bool(get) != bool(out):
        raise UsageError("--get and --out belong together", hint="invoke evidence REF --get sbom --out sbom.json")
    if out == "-" and json:
        raise UsageError("--out - and --json both want standard output", hint="name a file with --out")
    where = Reference.parse(reference) if reference else resolve.default_reference()
    with (
        display(quiet=quiet) as shown,
        _client(
            where, shown, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle, username=username,
            password_stdin=password_stdin,
        ) as client,
    ):  # fmt: skip
        image = _by_digest(client, where)
        found = fetch(client, image, get) if get else None
        report = overview(client, image) if not get else None
    if report is not None:
        _show(report, json=json)
        return
    if found is None:
        raise NotFoundError(f"{image}: no {get} is attached", hint="invoke evidence REF shows what is")
    written = _write(found.files, out)
    if json:
        emit_json({"ok": True, "image": str(image), "digest": str(found.attached.digest), "files": written})


@command(
    positional=["reference"],
    help={
        "reference": "HOST[:PORT]/REPOSITORY@DIGEST, as the push printed it",
        "tag": "tag that is to stand for the image, like sm70",
        "force": "move the tag also where it stands for a newer image, or nothing shows which one is newer",
        "dry-run": "say what would be done, and change nothing",
        **flags.REGISTRY,
    },
)
def promote(
    context: Any,
    reference: str = "",
    tag: str = "",
    force: bool = False,
    dry_run: bool = False,
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Move a tag to an image that is in the registry, never backwards: a newer commit's image keeps the tag."""
    if not reference or not tag:
        raise UsageError("promote needs an image and a tag", hint="invoke promote HOST/REPOSITORY@sha256:… --tag sm70")
    image = Reference.parse(reference, default_tag=None)
    if image.digest is None:
        raise UsageError(f"{image} has no digest", hint="write REPOSITORY@sha256:…, as the push printed it")
    dry = dry_run or bool(context.config.run.dry)
    here = Path.cwd()
    with (
        display(quiet=quiet) as shown,
        _client(
            image, shown, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle, username=username,
            password_stdin=password_stdin,
        ) as client,
    ):  # fmt: skip
        result = promote_tag(
            client,
            image,
            tag,
            ancestry=lambda older, newer: is_ancestor(older, newer, here),
            say=shown.say,
            force=force,
            dry=dry,
        )
    emit_json(result.to_json()) if json else print(result.render())
    if not result.ok:
        raise ReportedFailure(f"{image.name}:{tag} was not moved: {result.reason} (--force moves it)")


@contextmanager
def _client(
    where: Reference,
    shown: Display,
    *,
    plain_http: bool,
    insecure: str,
    ca_bundle: str,
    username: str,
    password_stdin: bool,
) -> Iterator[RegistryClient]:
    options = flags.registry_options(None, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle)
    who = flags.credentials(where.registry, username=username, password_stdin=password_stdin)
    with RegistryClient(where.registry, credentials=who, options=options, observer=shown) as client:
        yield client


def _by_digest(client: RegistryClient, where: Reference) -> Reference:
    digest = where.digest or client.head_manifest(where)
    if digest is None:
        raise NotFoundError(f"{where} is not in the registry", hint="push it first")
    return where.with_digest(digest)


def _show(report: Overview, *, json: bool) -> None:
    if json:
        emit_json(report.to_json())
    else:
        if report.artifacts:
            table = Table(box=None, pad_edge=False)
            for heading in ("kind", "created", "size", "digest", "content"):
                table.add_column(heading, overflow="fold")
            for row in report.rows():
                table.add_row(*row)
            Console(highlight=False, markup=False).print(table)
        print("\n".join(report.lines()))
    if not report.artifacts:
        raise ReportedFailure(f"{report.image}: nothing is attached")
    if report.failed:
        raise ReportedFailure(f"{report.image} failed {', '.join(report.failed)}, says the newest evidence")


def _write(files: tuple[ArtifactFile, ...], out: str) -> list[str]:
    """The paths written. Files appear whole, or not at all."""
    if out == "-":
        sys.stdout.buffer.write(files[0].data)
        return []
    place = Path(out)
    wanted = [(place / _name(f, n), f) for n, f in enumerate(files, 1)] if place.is_dir() else [(place, files[0])]
    for path, file in wanted:
        try:
            write_atomic(path, file.data, mode=0o644, durable=False)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return [str(path) for path, _ in wanted]


def _name(file: ArtifactFile, number: int) -> str:
    """Names come from the registry: one that is no plain file name leads out of the folder that the user named."""
    return file.name if is_file_name(file.name) else f"file-{number}"
