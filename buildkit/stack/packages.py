"""Which programs the stack needs, which Debian packages bring them, and their installation when it is asked for."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from buildkit.errors import BuildkitError, MissingComponentError
from buildkit.stack.process import find_program

PACKAGES: dict[str, tuple[str, ...]] = {
    "dockerd": ("docker.io",),
    "docker": ("docker-cli", "docker.io"),  # Debian 13 has the client in a package of its own
    "docker-registry": ("docker-registry",),
    "nginx": ("nginx",),
    "debootstrap": ("debootstrap",),
}
"""Program → the packages that bring it, the first one that the distribution has."""

COMPANIONS: dict[str, tuple[str, ...]] = {"dockerd": ("iptables",), "docker": ("docker-buildx",)}
"""Installed along where the distribution has them: nothing fails without, but they are worth having."""

_PUBLIC_SERVICES = ("docker-registry", "nginx")
"""Units that listen on every address once enabled; ours run on loopback, by hand."""

_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_programs(programs: Iterable[str]) -> tuple[str, ...]:
    """Those that are neither on PATH nor in the system's usual folders."""
    return tuple(name for name in programs if find_program(name) is None)


def require(programs: Iterable[str], *, install: bool, say: Callable[[str], None]) -> None:
    """Make sure that ``programs`` are there; install their Debian packages if ``install``.

    Raises MissingComponentError naming programs and packages: not there and ``install`` not given, no apt here, not
    root, or apt failed. Services that the packages bring are not started.
    """
    missing = missing_programs(programs)
    if not missing:
        return
    names = ", ".join(missing)
    verb = "is" if len(missing) == 1 else "are"
    apt = find_program("apt-get")
    if apt is None:
        raise MissingComponentError(f"{names} {verb} not installed, and there is no apt-get here to install from")
    if not install:
        packages = " ".join(dict.fromkeys(PACKAGES[name][-1] for name in missing))
        raise MissingComponentError(
            f"{names} {verb} not installed", hint=f"run again with --install, or: apt-get install {packages}"
        )
    if os.geteuid() != 0:
        raise MissingComponentError(f"{names} {verb} not installed, and installing needs root", hint="run as root")
    install_packages(missing, apt=apt, say=say)
    still = missing_programs(missing)
    if still:
        raise MissingComponentError(f"{', '.join(still)} not there even after installing the packages")


def install_packages(programs: Iterable[str], *, apt: str, say: Callable[[str], None]) -> None:
    """Install the packages of ``programs`` without starting their services. Raises MissingComponentError."""
    say("updating the package lists")
    _apt(apt, "update", "-q")
    wanted: list[str] = []
    for name in programs:
        found = next((p for p in PACKAGES[name] if _available(p)), None)
        if found is None:
            raise MissingComponentError(
                f"no package for {name} in this system's package sources",
                hint=f"looked for {' and '.join(PACKAGES[name])}",
            )
        wanted += [found, *(p for p in COMPANIONS.get(name, ()) if _available(p))]
    packages = list(dict.fromkeys(wanted))
    say(f"installing {' '.join(packages)}")
    with _no_services():
        _apt(apt, "install", "-q", "-y", "--no-install-recommends", *packages)
    if Path("/run/systemd/system").is_dir() and (systemctl := find_program("systemctl")):
        for unit in _PUBLIC_SERVICES:
            if unit in packages:
                say(f"the service {unit} stays off: the stack runs its own on loopback")
                subprocess.run([systemctl, "disable", unit], check=False, capture_output=True, timeout=60)


class _no_services:
    """Keeps packages from starting their services while they are installed (invoke-rc.d(8), policy-rc.d)."""

    def __enter__(self) -> None:
        self.ours = not _POLICY.exists()
        if self.ours:
            _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
            _POLICY.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            _POLICY.unlink(missing_ok=True)


def _available(package: str) -> bool:
    """Whether apt has a version of ``package`` to install."""
    answer = subprocess.run(
        ["apt-cache", "policy", package],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        env=os.environ | {"LC_ALL": "C"},
    )
    candidate = answer.stdout.partition("Candidate:")[2].split("\n")[0].strip()
    return candidate not in ("", "(none)")


def _apt(program: str, *arguments: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    options = ("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                [program, *options, *arguments],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=1800,
                env=environment,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(arguments, str(error)) from error
        if code:
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").splitlines()
            errors = [line for line in lines if line.startswith("E:")] or lines[-2:]
            raise _failed(arguments, " ".join(errors[:3]) or f"exit code {code}")


def _failed(arguments: tuple[str, ...], why: str) -> BuildkitError:
    return MissingComponentError(f"apt-get {arguments[0]} failed: {why}")
