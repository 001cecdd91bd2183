"""Where workflows lie: one source in ``workflows/``, copies where the forges look, and the script that jobs call."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buildkit.disk import write_atomic
from buildkit.errors import StorageError, UsageError
from buildkit.workflows import tree
from buildkit.workflows.rules import Finding, lint, lint_foreign
from buildkit.workflows.template import Wish, packaged, render
from buildkit.workflows.triggers import matches

SOURCE = "workflows"
SETUP = Path("scripts") / "ci-setup"
FORGES: Mapping[str, Path] = {"gitea": Path(".gitea") / "workflows", "github": Path(".github") / "workflows"}
"""Gitea reads the second folder only where the first is not there, so both together start nothing twice."""
MARK = b"# The one source is workflows/"
"""In every workflow that ``install`` copies, made by ``create`` or by hand."""
MADE = b": builds, checks and publishes the image of the recipe "
"""In the first line of those that ``create`` has made."""
SCRIPT_MARK = b"# `buildkit workflows.new` writes this file"
"""In every ``ci-setup`` that ``create`` has written."""
_ACTIONS = tuple(re.compile(rb"^[\"']?%b[\"']?[ \t]*:" % key, re.MULTILINE) for key in (b"on", b"jobs"))
"""Keys of every workflow of Actions, also where the file does not parse. Other tools have workflows, too."""
State = Literal["written", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file, relative to the repository, and whether it had to be written."""

    path: Path
    state: State

    def to_json(self) -> dict[str, str]:
        return {"path": str(self.path), "state": self.state}


def repository(start: Path | None = None) -> Path:
    """The repository's folder: the first with ``.git`` from here upwards, else this one."""
    here = (start or Path.cwd()).absolute()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def forges(text: str) -> tuple[str, ...]:
    """``gitea``, ``github`` or ``both``. Raises UsageError."""
    if text == "both":
        return tuple(FORGES)
    if text not in FORGES:
        raise UsageError(f"--for {text!r} is not known", hint="gitea, github or both")
    return (text,)


def sources(root: Path) -> tuple[Path, ...]:
    """The workflows in ``root``, sorted. Raises UsageError where there are none, StorageError."""
    folder = root / SOURCE
    files = sorted(path for path in folder.glob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    found = tuple(path for path in files if _is_workflow(_read(path)))
    if not found:
        raise UsageError(f"no workflow in {folder}", hint="buildkit workflows.new NAME --recipe RECIPE makes one")
    return found


def _is_workflow(data: bytes) -> bool:
    """Whether a file is one that Actions runs: what other engines have in a folder of this name is theirs."""
    return MARK in data or all(key.search(data) for key in _ACTIONS)


def install(root: Path, wanted: tuple[str, ...], to: Path) -> tuple[Written, ...]:
    """Copy every workflow of ``root`` to where the forges look, below ``to``. Others there are left alone.

    Safe to run again. A file that is there, differs, and is not known for a copy is kept: then nothing is written.
    Raises UsageError, StorageError.
    """
    copies = [(FORGES[name] / path.name, _read(path)) for path in sources(root) for name in wanted]
    for copy, data in copies:
        path = to / copy
        if path.exists() and MARK not in (held := _read(path)) and held != data:
            raise UsageError(
                f"{path} is there, and is no copy of {SOURCE}/{path.name}",
                hint=f"rename one of them, or remove it; '{MARK.decode()}{path.name}' in the source marks its copies",
            )
    return tuple(_write(to, copy, data) for copy, data in copies)


def hidden(root: Path) -> tuple[str, ...]:
    """Workflows in ``root`` that GitHub runs and Gitea does not: it reads ``.github/workflows`` only where there is no
    ``.gitea/workflows``."""
    names = [
        {path.name for path in (root / FORGES[forge]).glob("*") if path.suffix in (".yaml", ".yml")}
        for forge in ("github", "gitea")
    ]
    return tuple(sorted(names[0] - names[1])) if names[1] else ()


def create(wish: Wish) -> tuple[Written, ...]:
    """Write the workflow that is wished for, and the script that its jobs call.

    A file that is there and differs is only written anew where it is ours: what was made by hand is kept, and then
    nothing is written.
    Raises UsageError, StorageError.
    """
    text = render(wish).encode()
    path = wish.root / SOURCE / f"{wish.name}.yaml"
    if path.exists() and MADE not in _read(path).partition(b"\n")[0]:
        raise UsageError(f"{path} is there, and was not made by this command", hint="choose another name, or remove it")
    script = wish.root / SETUP
    if script.exists() and SCRIPT_MARK not in _read(script):
        raise UsageError(f"{script} is there, and was not made by this command", hint="the jobs need it: rename yours")
    return (
        _write(wish.root, Path(SOURCE) / path.name, text),
        _write(wish.root, SETUP, packaged("ci-setup"), mode=0o755),
    )


def check(root: Path, wanted: tuple[str, ...] | None) -> tuple[Finding, ...]:
    """All that is wrong: broken rules; copies that differ, are missing, or lost their source; a script that is missing;
    and in others' workflows, what gives secrets away or fails on the forge that reads them.

    ``wanted`` None means the forges that something is installed for, of which there must be one.
    Raises UsageError, StorageError.
    """
    found: list[Finding] = []
    files = sources(root)
    known = {path.name for path in files}
    chosen = wanted or tuple(name for name, folder in FORGES.items() if _holds_ours(root / folder, known))
    tracked = _tracked(root)
    for path in files:
        shown = f"{SOURCE}/{path.name}"
        data = _read(path)
        found += lint(data, shown)
        found += _dead_filters(data, shown, tracked)
        if b"scripts/ci-setup" in data:
            found += _setup_script(root, data, shown)
        for name in chosen:
            found += _copy(root, FORGES[name] / path.name, data, shown)
        if not chosen:
            found.append(
                Finding(
                    path=shown, line=1, rule="copy", message="is installed for no forge", remedy="workflows.install"
                )
            )
    for forge, folder in FORGES.items():
        for path in sorted((root / folder).glob("*.y*ml")):
            if path.name not in known and path.is_file():
                found += _stray(folder / path.name, _read(path), forge)
    return tuple(dict.fromkeys(found))


def _holds_ours(folder: Path, known: set[str]) -> bool:
    """Whether a forge's folder has a copy; others' workflows alone do not mean that anything is installed there."""
    return any(path.name in known or MARK in _read(path) for path in folder.glob("*.y*ml") if path.is_file())


def _copy(root: Path, copy: Path, data: bytes, source: str) -> list[Finding]:
    path = root / copy
    if not path.is_file():
        return [Finding(path=str(copy), line=1, rule="copy", message="is not there", remedy="workflows.install")]
    held = _read(path)
    if held == data:
        return []
    ours, theirs = data.splitlines(), held.splitlines()
    same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return [
        Finding(
            path=str(copy),
            line=same + 1,
            rule="copy",
            message=f"differs from {source}",
            remedy="change the source, then workflows.install",
        )
    ]


def _stray(path: Path, data: bytes, forge: str) -> tuple[Finding, ...]:
    """A workflow that a forge runs and that has no source here: somebody else's."""
    if MARK in data:
        what = f"its source {SOURCE}/{path.name} is gone"
        return (Finding(path=str(path), line=1, rule="copy", message=what, remedy="remove it"),)
    return lint_foreign(data, str(path), forge)


def _setup_script(root: Path, data: bytes, shown: str) -> list[Finding]:
    path = root / SETUP
    line = next(n for n, row in enumerate(data.splitlines(), 1) if b"scripts/ci-setup" in row)
    if not path.is_file():
        what = f"calls {SETUP}, which is not there"
        return [Finding(path=shown, line=line, rule="setup", message=what, remedy="workflows.new writes it")]
    if _read(path) != packaged("ci-setup"):
        what = "is not this version's"
        return [Finding(path=str(SETUP), line=1, rule="setup", message=what, remedy="workflows.new writes it anew")]
    return []


def _dead_filters(data: bytes, shown: str, tracked: tuple[str, ...] | None) -> list[Finding]:
    """Path filters that no file of the repository meets: a folder was renamed, and the workflow never runs again."""
    if tracked is None:
        return []
    try:
        top = tree.parse(data)
    except tree.BrokenWorkflow:
        return []  # which the rules have told
    return [
        Finding(
            path=shown,
            line=pattern.line,
            rule="dead-filter",
            message=f"no file here is called {pattern.value}",
            remedy="correct the path, or commit the files",
        )
        for event in ("push", "pull_request")
        for pattern in tree.texts(tree.get(top, "on", event, "paths"))
        if not any(matches(pattern.value.removeprefix("!"), name) for name in tracked)
    ]


def _tracked(root: Path) -> tuple[str, ...] | None:
    """The files that git knows or would add; None where there is no git or no repository."""
    try:
        done = subprocess.run(
            [
                "git",
                "-c",
                "safe.directory=*",
                "-C",
                root,
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ],
            capture_output=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def _write(root: Path, name: Path, data: bytes, *, mode: int = 0o644) -> Written:
    """In one step, so that a copy is never half of one."""
    path = root / name
    try:
        if path.is_file() and path.read_bytes() == data and os.access(path, os.X_OK) == bool(mode & 0o100):
            return Written(path=name, state="unchanged")
        write_atomic(path, data, mode=mode, durable=False, parents=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    return Written(path=name, state="written")
