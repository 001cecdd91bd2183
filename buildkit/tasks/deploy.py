"""``deploy.check``, ``deploy.plan``, ``deploy.pin`` and ``wheelhouse``: manifests that cannot starve or lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from buildkit.check.recipe import policy_of
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.deploy import Settings, check_manifests, plan_cards
from buildkit.deploy.attached import AttachedEvidence, default_policy
from buildkit.deploy.documents import MAX_FILE
from buildkit.deploy.pin import pin as pin_image
from buildkit.errors import UsageError, one_line
from buildkit.image.transports import open_source
from buildkit.model import Reference
from buildkit.tasks import flags, resolve
from buildkit.units import parse_size
from buildkit.wheelhouse import DEFAULT_LIMIT, baked_packages
from buildkit.wheelhouse import wheelhouse as fill

_FOLDER = "folder or file with manifests, or - for standard input (default: deploy)"
_NOT_GIVEN = -1
_NODES = "file with Node objects or parameters that say how many cards each node has"


@command(
    positional=["folder"],
    help={
        "folder": _FOLDER,
        "node-gpus": "cards of each node",
        "nodes": _NODES,
        "evidence": "read the evidence that is attached to the images, from their registries",
        "allow-not-run": "levels of the smoke test that may be missing from the evidence, by commas",
        "kubernetes": "version whose schemas apply (default 1.32)",
    },
)
def check(
    context: Any,
    folder: str = "",
    node_gpus: int = _NOT_GIVEN,
    nodes: str = "",
    evidence: bool = False,
    allow_not_run: str = "",
    kubernetes: str = "1.32",
    json: bool = False,
) -> None:
    """Find in manifests what would stay pending, point at nothing, or run an image that nobody has proven."""
    allowed = tuple(part.strip() for part in allow_not_run.split(",") if part.strip())
    policy = replace(default_policy(), allow_not_run=allowed)
    paths, text = _manifests(folder)
    report = check_manifests(
        paths,
        node_gpus=_cards(node_gpus),
        nodes=Path(nodes) if nodes else None,
        settings=Settings(kubernetes=kubernetes, evidence=policy),
        evidence=AttachedEvidence() if evidence else None,
        text=text,
    )
    emit_json(report.to_json()) if json else print(report.render())
    if not report.ok:
        raise ReportedFailure(f"{_shown(folder)}: {len(report.findings)} findings")


@command(positional=["folder"], help={"folder": _FOLDER, "node-gpus": "cards of each node", "nodes": _NODES})
def plan(context: Any, folder: str = "", node_gpus: int = _NOT_GIVEN, nodes: str = "", json: bool = False) -> None:
    """Show who gets which card, and who would wait."""
    paths, text = _manifests(folder)
    result = plan_cards(
        paths,
        node_gpus=_cards(node_gpus),
        nodes=Path(nodes) if nodes else None,
        text=text,
    )
    emit_json(result.to_json()) if json else print(result.render())


@command(
    positional=["name"],
    help={
        "name": "the image's name in the kustomization",
        "from": "HOST[:PORT]/REPOSITORY:TAG or @DIGEST to pin",
        "folder": "folder of the kustomization (default: deploy)",
    },
)
def pin(context: Any, name: str = "", from_: str = "", folder: str = "", json: bool = False) -> None:
    """Write an image's digest into the kustomization, if the evidence attached to the image passes."""
    if not name or not from_:
        raise UsageError("deploy.pin needs a name and --from REFERENCE")
    reader = AttachedEvidence()
    image = reader.resolve(Reference.parse(from_))
    result = pin_image(name, image, folder=Path(folder or "deploy"), reader=reader, policy=default_policy())
    emit_json({"ok": True, **result.to_json()}) if json else print(result.render())


@command(
    positional=["name"],
    help={
        "name": "recipe with locked requirements (default: clef-serve)",
        "variant": "which lock: requirements-VARIANT.txt of the recipe (default cuda)",
        "check": "fetch nothing; tell whether the lock still resolves to what is there",
        "limit": "what a single upload may have, like 95MB",
        "folder": "where the wheels lie (default: wheelhouse/VARIANT in the recipe's folder)",
        "image": "with --check: also hold the lock against the packages in this image",
        "engine": flags.ENGINE,
    },
)
def wheelhouse(
    context: Any,
    name: str = "clef-serve",
    variant: str = "cuda",
    check: bool = False,
    limit: str = "",
    folder: str = "",
    image: str = "",
    engine: str = "",
    json: bool = False,
) -> None:
    """Fetch a recipe's locked wheels once, hashes verified, and look into them."""
    if image and not check:
        raise UsageError("--image is compared by --check", hint="invoke wheelhouse NAME --check --image IMAGE")
    recipe = resolve.recipe_named(name)
    policy = policy_of(recipe)
    baked = None
    if image:
        with open_source(
            image, engine_host=flags.engine_host(engine), registry_client_factory=flags.registry_reader()
        ) as source:
            baked = baked_packages(source)
    lock = recipe.folder / f"requirements-{variant}.txt"
    report = fill(
        lock,
        Path(folder) if folder else recipe.folder / "wheelhouse" / variant,
        check=check,
        limit=parse_size(limit, what="--limit") if limit else DEFAULT_LIMIT,
        arch=policy.require[0] if policy.require and variant != "cpu" else None,
        exceptions=policy.exceptions,
        baked=baked,
    )
    emit_json(report.to_json()) if json else print(report.render())
    if not report.ok:
        raise ReportedFailure(f"{lock}: the wheelhouse has findings")


def _cards(node_gpus: int) -> int | None:
    """What --node-gpus says; None where it is not given. What makes no sense is refused further down."""
    return None if node_gpus == _NOT_GIVEN else node_gpus


def _shown(folder: str) -> str:
    return "<stdin>" if folder == "-" else one_line(folder or "deploy", 200)


def _manifests(folder: str) -> tuple[list[Path | str], bytes | None]:
    """The paths to read, or standard input: as bytes, whatever its encoding is thought to be here."""
    if folder == "-":
        return [], sys.stdin.buffer.read(MAX_FILE + 1)
    return [Path(folder or "deploy")], None
