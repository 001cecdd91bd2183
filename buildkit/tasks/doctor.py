"""``doctor``: why do pushes fail? One command, also as the first step of a CI job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.doctor import DEFAULT_BUDGET, Area, DoctorOptions, DoctorReport, Finding, Level, diagnose, of_error, plan
from buildkit.errors import BuildkitError, MissingComponentError, UsageError
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location, open_source
from buildkit.model import Reference, is_registry_host
from buildkit.progress import display
from buildkit.recipe import Recipe, push_target
from buildkit.registry import DefaultCredentials
from buildkit.tasks import actions, flags, resolve
from buildkit.units import format_size, parse_size


class ReportedMissing(ReportedFailure):
    """All that is wrong is that something is not installed or does not run."""

    exit_code = MissingComponentError.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """``registry`` alone where no repository is known."""

    reference: Reference | None = None
    registry: str | None = None


@command(
    positional=["reference"],
    help={
        "reference": "HOST[:PORT]/REPOSITORY[:TAG], or a HOST alone (default: the recipe's target)",
        "recipe": "what is to be built and pushed: its needs are looked at, too",
        "image": f"would this image get through? {flags.SOURCE} (default: the recipe's, where it is built)",
        "quick": "send nothing larger than a megabyte: the body limit is not measured",
        "budget": f"most bytes that all measurements together may send (default {format_size(DEFAULT_BUDGET)})",
        "limit": "largest request body that pushes are set to, like 100MB (default: the recipe's)",
        "edge": "preset of limits: cloudflare-free, business, enterprise or none",
        "dry-run": "say what would be sent, and send nothing",
        "engine": flags.ENGINE,
        **flags.REGISTRY,
    },
)
def doctor(
    context: Any,
    reference: str = "",
    recipe: str = "",
    image: str = "",
    quick: bool = False,
    budget: str = "",
    limit: str = "",
    edge: str = "",
    dry_run: bool = False,
    engine: str = "",
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Find out why pushes fail: engine, disk, way, credential, chunks and the body limit, with what to do."""
    also: list[Finding] = []
    host = flags.engine_host(engine)
    chosen = _recipe(recipe, also)
    where = _where(reference, chosen, also)
    target = where.reference.registry if where.reference is not None else where.registry
    options = DoctorOptions(
        registry=flags.registry_options(
            chosen, limit=limit, edge=edge, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle
        ),
        credentials=(
            flags.credentials(target, username=username, password_stdin=password_stdin)
            if target is not None
            else DefaultCredentials()
        ),
        recipe=chosen,
        engine_host=host,
        needs_engine=bool(recipe or engine or not reference) or _is_engines(image),
        quick=quick,
        budget=parse_size(budget, what="--budget") if budget else DEFAULT_BUDGET,
    )
    if dry_run or context.config.run.dry:
        steps = plan(where.reference, options, registry=where.registry)
        emit_json({"ok": True, "would": list(steps)}) if json else print("\n".join(steps))
        return
    wanted = image or (chosen.name if chosen is not None else "")
    with display(quiet=quiet) as shown:
        report = diagnose(
            where.reference,
            options,
            shown.say,
            registry=where.registry,
            open_image=(lambda: _open(wanted, host)) if wanted else None,
            image_optional=not image,
            also=also,
        )
    actions.append_summary(report.to_markdown())
    if json:
        emit_json(report.to_json())
    else:
        print(report.summary() if quiet else report.render())
    _verdict(report)


def _verdict(report: DoctorReport) -> None:
    if report.ok:
        return
    first = report.problems[0]
    more = f", and {len(report.problems) - 1} more" if len(report.problems) > 1 else ""
    means = f": {first.means}" if first.means and len(first.seen) + len(first.means) < 160 else ""
    text = f"{first.area}: {first.seen}{means}{more}"
    raise (ReportedMissing if report.only_missing else ReportedFailure)(text, hint=first.remedy or None)


def _recipe(name: str, also: list[Finding]) -> Recipe | None:
    """The recipe that was named. One that cannot be used is a finding: the rest is looked at all the same."""
    if not name:
        return None
    try:
        found = resolve.recipe_named(name)
    except BuildkitError as error:
        also.append(of_error(Area.RECIPE, error, means="it cannot be built"))
        return None
    also.append(Finding(area=Area.RECIPE, level=Level.OK, seen=f"recipe {found.name} is complete"))
    return found


def _where(text: str, recipe: Recipe | None, also: list[Finding]) -> _Where:
    """What was named, else where the recipe (or the default one) is pushed to. Raises UsageError for a wrong name."""
    if text and is_registry_host(text) and ("." in text or ":" in text or text == "localhost"):
        return _Where(registry=text)
    if text:
        return _Where(reference=Reference.parse(text))
    try:
        return _Where(reference=push_target(recipe, os.environ) if recipe is not None else resolve.default_reference())
    except BuildkitError as error:
        # Without a recipe nobody has asked for a target.
        level = Level.PROBLEM if recipe is not None else Level.NOT_RUN
        also.append(of_error(Area.RECIPE, error, level=level, means="where to push is not known"))
        return _Where()


def _is_engines(image: str) -> bool:
    """Whether the image is one of the engine's, as far as its name tells."""
    try:
        return bool(image) and Location.parse(image).kind == "docker-daemon"
    except UsageError:
        return False


def _open(text: str, host: str | None) -> ImageSource:
    chosen = resolve.choose(text, engine_host=host)
    return open_source(chosen.source, engine_host=host, registry_client_factory=flags.registry_reader())
