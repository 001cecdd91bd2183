"""Bases made here, by debootstrap from the distribution's packages, for where no registry can be reached.

A base is made once and found again by its key: what it was made from. Its name in the engine is
``buildkit-base/SUITE:KEY``. What debootstrap copies from the host, or what changes with every run (host name, resolver,
caches, logs, device nodes), does not get into it; file times are cut to those of the newest package.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from buildkit.build import labels
from buildkit.build.plan import BaseImage
from buildkit.build.process import run
from buildkit.engine import Engine
from buildkit.errors import EngineError, MissingComponentError, NotFoundError, StorageError, UsageError
from buildkit.model import Platform
from buildkit.recipe import Debootstrap, Recipe

_FORMAT = 1  # of what this module does to a tree; part of the key
_TIMEOUT = 1800.0
_PLACE = "/var/tmp"  # noqa: S108 - /tmp is often mounted without device nodes, or lies in memory
_EXCLUDED = (
    "./dev/*",
    "./proc/*",
    "./sys/*",
    "./run/*",
    "./tmp/*",
    "./debootstrap",
    "./etc/hostname",
    "./etc/resolv.conf",
    "./etc/machine-id",
    "./var/cache/apt/archives/*.deb",
    "./var/cache/apt/*.bin",
    "./var/cache/ldconfig/aux-cache",
    "./var/lib/apt/lists/*",
    "./var/log/*",
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def prepare(
    recipe: Recipe,
    engine: Engine | None,
    *,
    rebuild: bool,
    say: Callable[[str], None],
) -> BaseImage | None:
    """The recipe's base: its name, made first where it is made here. ``rebuild`` makes it anew.

    Raises MissingComponentError without debootstrap, root or an engine, EngineError where debootstrap fails.
    """
    base = recipe.base
    if base is None:
        return None
    if base.debootstrap is None:
        name = base.pinned
        assert name is not None  # the recipe was checked
        return BaseImage(name=name, digest=base.digest)
    if engine is None:
        raise UsageError(
            f"recipe {recipe.name} makes its base in the local engine, where a remote builder cannot see it",
            hint="give the recipe a base.image for such builders, or build with the local engine",
        )
    suite = base.debootstrap.suite or host_suite()
    key = base_key(base.debootstrap, suite, recipe.platform)
    name = f"buildkit-base/{suite}:{key}"
    if not rebuild:
        try:
            found = engine.inspect(name)
        except NotFoundError:
            pass
        else:
            say(f"base: {name} is there already")
            return BaseImage(name=name, digest=found.id, local=True)
    _make(base.debootstrap, suite, key, name, recipe.platform, engine, say)
    return BaseImage(name=name, digest=engine.inspect(name).id, local=True)


def base_key(spec: Debootstrap, suite: str, platform: Platform) -> str:
    """Names what the base is made from: 12 hex digits. The order of packages and components does not matter."""
    parts = [_FORMAT, suite, spec.variant, sorted(spec.components), sorted(spec.include), str(platform)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def host_suite(release: Path = Path("/etc/os-release")) -> str:
    """The code name of this machine's Debian or Ubuntu release (os-release(5)). Raises MissingComponentError."""
    try:
        text = release.read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^VERSION_CODENAME=[\"']?([a-z]+)[\"']?\s*$", text, re.MULTILINE)
    if found is None:
        raise MissingComponentError(
            "this machine's release has no code name, so debootstrap cannot follow it",
            hint="name a suite in the recipe: base.debootstrap.suite",
        )
    return found[1]


def _make(
    spec: Debootstrap,
    suite: str,
    key: str,
    name: str,
    platform_: Platform,
    engine: Engine,
    say: Callable[[str], None],
) -> None:
    program = shutil.which("debootstrap") or shutil.which("debootstrap", path="/usr/sbin:/sbin")
    if program is None:
        raise MissingComponentError(
            "debootstrap is not installed, and the recipe makes its base with it", hint="apt-get install debootstrap"
        )
    if os.geteuid() != 0:
        raise MissingComponentError("debootstrap needs root", hint="run as root, or give the recipe a base.image")
    machine = _MACHINES.get(platform.machine(), platform.machine())
    if platform_.architecture != machine:
        raise UsageError(f"a base for {platform_} cannot be made on a {machine} machine by debootstrap")
    with tempfile.TemporaryDirectory(
        prefix="buildkit-base-", dir=_PLACE if os.access(_PLACE, os.W_OK) else None
    ) as folder:
        root = Path(folder) / "root"
        arguments = [program, f"--variant={spec.variant}", f"--components={','.join(spec.components)}"]
        if spec.include:
            arguments.append(f"--include={','.join(spec.include)}")
        say(f"base: making {name} by debootstrap {suite}")
        environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        try:
            ended = run(
                [*arguments, suite, str(root)],
                say=lambda line: say(f"base: {line}"),
                timeout=_TIMEOUT,
                environment=environment,
                what="debootstrap",
            )
            if ended.code:
                raise EngineError(
                    f"debootstrap {suite} failed with exit code {ended.code}: {ended.tail[-1] if ended.tail else ''}",
                    hint="it needs a mirror that answers, and the right to make device nodes and to chroot",
                )
            _import(root, key, name, engine)
        finally:
            _unmount_below(root)
    say(f"base: imported {name}")


def _import(root: Path, key: str, name: str, engine: Engine) -> None:
    """Import the tree as an image, streamed: sorted names, times no later than the packages' own."""
    (root / "etc").mkdir(exist_ok=True)
    newest = max((int(p.stat().st_mtime) for p in (root / "usr/share/doc").glob("*/changelog*.gz")), default=0)
    command = [
        "tar",
        f"--directory={root}",
        "--create",
        "--sort=name",
        "--format=posix",
        "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",
        "--numeric-owner",
        "--xattrs",
        f"--mtime=@{newest}",
        "--clamp-mtime",
        *(f"--exclude={pattern}" for pattern in _EXCLUDED),
        ".",
    ]
    changes = ["ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 'CMD ["/bin/sh"]']
    engine.import_tar(_output(command), name, changes=[*changes, f"LABEL {labels.BASE_KEY}={key}"])


def _output(command: list[str]) -> Iterator[bytes]:
    """What the command prints. A failure is raised instead of the end, so that nobody takes a part for the whole."""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise MissingComponentError(f"{command[0]} cannot be started: {error.strerror}") from error
        assert process.stdout is not None
        with process:
            try:
                while chunk := process.stdout.read(1 << 20):
                    yield chunk
            except BaseException:
                process.kill()
                raise
            if process.wait():
                errors.seek(0)
                raise StorageError(f"packing the base failed: {errors.read(4096).decode('utf-8', 'replace')}")


def _unmount_below(root: Path) -> None:
    """An interrupted debootstrap leaves proc and sys mounted; nothing may be removed through them."""
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    points = [Path(line.split(" ")[4]) for line in text.splitlines()]
    for point in sorted((p for p in points if p.is_relative_to(root)), reverse=True):
        subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True, timeout=30)
