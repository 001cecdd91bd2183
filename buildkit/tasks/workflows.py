"""``workflows.install``, ``.check`` and ``.new``; ``.settings`` and ``.summary`` are for the jobs themselves."""

from __future__ import annotations

import json as jsonlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from buildkit import workflows
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.errors import RegistryError, UsageError, one_line
from buildkit.evidence import fetch_report
from buildkit.model import Reference
from buildkit.progress import inert
from buildkit.recipe import images_folder, load
from buildkit.registry import RegistryClient
from buildkit.report import Report, to_markdown
from buildkit.tasks import actions, flags

_FORGES = "gitea, github or both"


@command(
    name="install",
    help={"for": f"{_FORGES} (default: both)", "to": "repository to write into (default: this one)"},
)
def install(context: Any, for_: str = "both", to: str = "", json: bool = False, quiet: bool = False) -> None:
    """Copy the workflows of `workflows/` to where Gitea and GitHub look for them."""
    root = workflows.repository()
    target = Path(to).absolute() if to else root
    if not target.is_dir():
        raise UsageError(f"--to {to} is not a folder")
    written = workflows.install(root, workflows.forges(for_), target)
    _show(written, json=json, quiet=quiet)
    if (unread := workflows.hidden(target)) and not json and not quiet:
        names = inert(one_line(", ".join(unread)))
        print(f"note: Gitea reads .gitea/workflows alone, now that it is there, and no longer runs: {names}")


@command(
    name="check",
    help={"for": f"{_FORGES} (default: those that something is installed for)"},
)
def check(context: Any, for_: str = "", json: bool = False, quiet: bool = False) -> None:
    """Find what keeps the workflows from running on both forges, and copies that differ from their source."""
    findings = workflows.check(workflows.repository(), workflows.forges(for_) if for_ else None)
    if json:
        emit_json({"ok": not findings, "findings": [finding.to_json() for finding in findings]})
    else:
        for finding in findings:
            print(finding)
    if findings:
        raise ReportedFailure(f"workflows: {len(findings)} findings")
    if not json and not quiet:
        print("workflows: nothing to report")


@command(
    name="new",
    positional=["name"],
    help={
        "name": "the workflow's name",
        "recipe": "the recipe that it builds (default: the workflow's name)",
        "image": "HOST[:PORT]/REPOSITORY to push to, instead of the recipe's target",
        "branch": "branch whose pushes start it, and on which the plain tags move",
        "install": "what pip installs on the runners: 'buildkit @ git+URL@COMMIT' or buildkit==VERSION "
        "(default: this very installation, where it came from a commit)",
    },
)
def new(
    context: Any,
    name: str = "",
    recipe: str = "",
    image: str = "",
    branch: str = "main",
    install: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Write a workflow for a recipe, and the script that its jobs call, into this repository."""
    if not name:
        raise UsageError("workflows.new needs a name", hint="buildkit workflows.new NAME --recipe RECIPE")
    folder = images_folder()
    root = workflows.repository(folder)
    wish = workflows.Wish(
        name=name,
        recipe=load(recipe or name, folder),
        root=root,
        install=install or _installed(root),
        image=image or None,
        branch=branch,
    )
    _show(workflows.create(wish), json=json, quiet=quiet)
    if not json and not quiet:
        print("next: buildkit workflows.install, commit, and set the secret REGISTRY_TOKEN")


@command(name="settings", help={})
def settings(context: Any, json: bool = False, quiet: bool = False) -> None:
    """In a job: read the run's inputs and variables, and hand them to the steps that follow."""
    found = workflows.read_settings(os.environ, lambda name: load(name, images_folder()))
    actions.write_environment(found.environment)
    if json:
        emit_json({"ok": True, "notes": list(found.notes), "environment": dict(found.environment)})
    elif not quiet:
        print("\n".join(inert(one_line(note)) for note in found.notes))


@command(
    name="summary",
    positional=["image"],
    help={"image": "HOST[:PORT]/REPOSITORY@DIGEST", **flags.REGISTRY},
)
def summary(
    context: Any,
    image: str = "",
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
) -> None:
    """In the last job: put the report that is attached to the image onto the run's summary page."""
    where = Reference.parse(image, default_tag=None)
    if where.digest is None:
        raise UsageError(f"{image} has no digest", hint="HOST[:PORT]/REPOSITORY@sha256:…")
    options = flags.registry_options(None, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle)
    who = flags.credentials(where.registry, username=username, password_stdin=password_stdin)
    try:
        with RegistryClient(where.registry, credentials=who, options=options) as client:
            raw = fetch_report(client, where)
        text = (
            to_markdown(Report.parse(raw, where=f"the report attached to {where.name}"))
            if raw is not None
            else f"No report is attached to `{where}`."
        )
    except RegistryError as error:
        # The page is about what happened, and this belongs to it; the jobs before have their own results.
        text = f"The report cannot be read: {error}"
    print("\n".join(inert(line) for line in text.splitlines()))
    actions.append_summary(text)


def _show(written: tuple[workflows.Written, ...], *, json: bool, quiet: bool) -> None:
    if json:
        emit_json({"ok": True, "files": [entry.to_json() for entry in written]})
    elif not quiet:
        for entry in written:
            print(f"{entry.state}: {entry.path}")


def _installed(root: Path) -> str:
    """Where this installation came from, as pip can install it again (PEP 610). Raises UsageError."""
    project = root / "pyproject.toml"
    if project.is_file() and re.search(r'^name = "buildkit"$', project.read_text(errors="replace"), re.MULTILINE):
        return workflows.SELF
    try:
        origin = jsonlib.loads(metadata.distribution("buildkit").read_text("direct_url.json") or "{}")
        text = f"buildkit @ git+{origin['url']}@{origin['vcs_info']['commit_id']}"
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        text = ""
    if not workflows.pinned(text):
        raise UsageError(
            "how do the runners get buildkit? This installation came from no commit of a repository",
            hint="--install 'buildkit @ git+https://HOST/OWNER/buildkit@COMMIT'",
        )
    return text
