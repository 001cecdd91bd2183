"""A folder of exactly the wheels that a lock file names: fetched once, every hash verified, and looked into.

The lock is a requirements file with hashes (``uv pip compile --generate-hashes``, ``pip-compile``). Fetching is left to
pip, with whatever index it is configured for; the wheels are chosen for the image's Python, not for this one. What an
image installs from the folder with ``--no-index`` needs no network, and what is too large for the edge or has no code
for the GPU is known before the image is built.

Sources: pip's documentation on hash-checking mode and ``pip download``, PEP 427 and PEP 425 for wheels and their tags.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from buildkit.check.offline import installed_packages
from buildkit.check.tree import Tree, Want
from buildkit.check.walk import walk_image, walk_wheel
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException, Policy, Verdict, judge
from buildkit.errors import BuildkitError, MissingComponentError, StorageError, UsageError, one_line
from buildkit.image.source import ImageSource
from buildkit.units import format_size

DEFAULT_LIMIT = 95_000_000
"""Bytes of a request body that the strictest edge surely lets through."""
SITE_PACKAGES = "/opt/clef/lib/python3.11/site-packages"
"""Where the image installs the wheels; exceptions of a recipe name paths there."""
MAX_LOCK = 8 * 2**20
_CHUNK = 2**20
_HASH = re.compile(r"--hash=(\S+)")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_DOWNLOAD_SECONDS = 2 * 3600.0

FindingKind = Literal["missing", "hash", "extra", "resolve", "input", "baked", "wheel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The Python that the wheels are for: ``python`` as ``3.11``, ``glibc`` the newest that its base has."""

    python: str = "3.11"
    machine: str = "x86_64"
    glibc: tuple[int, int] = (2, 36)

    @property
    def arguments(self) -> tuple[str, ...]:
        """pip's options that choose wheels for it."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc[1], 4, -1)]
        tags += [f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
        digits = self.python.replace(".", "")
        platforms = [part for tag in tags for part in ("--platform", tag)]
        return (
            *platforms,
            *("--python-version", self.python, "--implementation", "cp", "--abi", f"cp{digits}"),
            *("--abi", "abi3", "--abi", "none", "--only-binary", ":all:"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """One package of a lock: ``name`` in its canonical form, the accepted sha256 hashes, and its line."""

    name: str
    version: str
    hashes: frozenset[str]
    line: int

    @property
    def pinned(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A requirements file in which every package has one version and its hashes."""

    path: Path
    packages: tuple[Locked, ...]

    def __getitem__(self, name: str) -> Locked:
        return next(p for p in self.packages if p.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel on disk. ``size`` in bytes, ``sha256`` in hex."""

    path: Path
    name: str
    version: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeFile:
    """A file of a wheel that is above the limit even when compressed: no layer can hold it below the limit."""

    path: str
    size: int
    compressed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFile:
    """A file with CUDA code and what it means for the required architecture; ``excuse`` where that is accepted."""

    path: str
    verdict: Verdict
    covered: int
    total: int
    excuse: str | None = None

    @property
    def good(self) -> bool:
        return self.verdict in (Verdict.NATIVE, Verdict.JIT, Verdict.NOT_CUDA) or self.excuse is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelReport:
    """What is in a wheel: ``installed`` bytes on disk, files above the limit, files with CUDA code."""

    wheel: Wheel
    installed: int
    over_limit: bool
    large_files: tuple[LargeFile, ...] = ()
    cuda_files: tuple[CudaFile, ...] = ()

    @property
    def lacking(self) -> tuple[CudaFile, ...]:
        return tuple(f for f in self.cuda_files if not f.good)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFinding:
    """Something that does not fit: between lock and wheels, lock and inputs, or lock and image."""

    kind: FindingKind
    subject: str
    message: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "subject": self.subject, "message": self.message, "remedy": self.remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelhouseReport:
    """``ok`` is false where a finding stands, or a wheel lacks the architecture without an excuse."""

    lock: Path
    folder: Path
    limit: int
    arch: Arch | None
    wheels: tuple[WheelReport, ...]
    findings: tuple[WheelFinding, ...]
    fetched: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings and not any(w.lacking for w in self.wheels)

    def to_json(self) -> dict[str, Any]:
        """``{"schema": "buildkit/wheelhouse/1", "ok", "lock", "limit", "arch", "fetched", "wheels", "findings"}``."""
        return {
            "schema": "buildkit/wheelhouse/1",
            "ok": self.ok,
            "lock": self.lock.name,
            "limit": self.limit,
            "arch": self.arch.sm if self.arch else None,
            "fetched": list(self.fetched),
            "wheels": [_wheel_json(w) for w in self.wheels],
            "findings": [f.to_json() for f in self.findings],
        }

    def render(self) -> str:
        """A table for people, largest first, then what is wrong."""
        lines = []
        for report in sorted(self.wheels, key=lambda w: -w.wheel.size):
            notes = ["above the limit"] if report.over_limit else []
            notes += [f"{f.path} alone is {format_size(f.compressed)} compressed" for f in report.large_files]
            notes += [f"{f.path}: {f.verdict} ({f.covered}/{f.total})" for f in report.lacking]
            covered = [f for f in report.cuda_files if f.good]
            if covered and self.arch:
                notes.append(f"{self.arch.sm} in {len(covered)} of {len(report.cuda_files)} CUDA files")
            shown = f"{report.wheel.name} {report.wheel.version}"
            lines.append(f"{format_size(report.wheel.size):>10}  {shown:<40} {'; '.join(notes)}".rstrip())
        total = sum(w.wheel.size for w in self.wheels)
        unpacked = sum(w.installed for w in self.wheels)
        lines.append(f"{format_size(total):>10}  {len(self.wheels)} wheels, {format_size(unpacked)} installed")
        lines += [f"{f.kind}: {f.subject}: {f.message} -> {f.remedy}" for f in self.findings]
        lines.append("PASS" if self.ok else "FAIL")
        return "\n".join(lines)


# Story ---------------------------------------------------------------------------------------------------------------


def wheelhouse(
    lock_path: Path,
    folder: Path,
    *,
    fetch: bool = True,
    check: bool = False,
    limit: int = DEFAULT_LIMIT,
    arch: Arch | None = None,
    exceptions: Sequence[PathException] = (),
    baked: Mapping[str, str] | None = None,
    target: Target | None = None,
) -> WheelhouseReport:
    """Fetch what is missing of a lock into ``folder`` (unless ``check``, which changes nothing), and look into it.

    ``baked`` are the packages of an image by name, to be compared with the lock. Idempotent: a complete folder costs
    no request. Raises UsageError for a lock that is none, MissingComponentError without pip, BuildkitError where pip
    cannot fetch.
    """
    target = target or Target()
    lock = read_lock(lock_path)
    fetched: tuple[str, ...] = ()
    if fetch and not check:
        fetched = fetch_missing(lock, folder, target=target)
    wheels, findings = verify(lock, folder)
    if check:
        if not findings:
            findings += resolve_offline(lock, folder, target=target)
        findings += check_inputs(lock)
    if baked is not None:
        findings += check_baked(lock, baked)
    return WheelhouseReport(
        lock=lock_path,
        folder=folder,
        limit=limit,
        arch=arch,
        wheels=tuple(examine(wheel, limit=limit, arch=arch, exceptions=exceptions) for wheel in wheels),
        findings=tuple(findings),
        fetched=fetched,
    )


# Lock ----------------------------------------------------------------------------------------------------------------


def read_lock(path: Path) -> Lock:
    """A requirements file of ``name==version --hash=sha256:…`` entries only.

    Raises UsageError with file and line for anything that ``pip install --require-hashes`` would not take, and for what
    would bring in something unlocked: options, URLs, other files.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_LOCK:
        raise UsageError(f"{path} is larger than {MAX_LOCK} bytes, too large for a lock file")
    found: dict[str, Locked] = {}
    for line, text in _entries(raw.decode("utf-8", "replace")):
        entry = _locked(text, f"{path}:{line}", line)
        if entry is None:
            continue
        if entry.name in found:
            raise UsageError(f"{path}:{line}: {entry.name} is there twice")
        found[entry.name] = entry
    if not found:
        raise UsageError(f"{path} locks no package", hint="make it with uv pip compile --generate-hashes")
    return Lock(path=path, packages=tuple(found.values()))


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines with the number of their first physical one; comments are taken out."""
    start, joined = 0, ""
    for number, row in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*$", "", row).rstrip()
        if not joined:
            start = number
        if bare.endswith("\\"):
            joined += bare[:-1] + " "
            continue
        joined += bare
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _locked(text: str, where: str, line: int) -> Locked | None:
    body = _HASH.sub("", text).strip()
    if body.startswith("-"):
        raise UsageError(
            f"{where}: option {body.split()[0]!r} in a lock", hint="give pip's options to pip, not to the lock"
        )
    try:
        requirement = Requirement(body)
    except InvalidRequirement as error:
        raise UsageError(f"{where}: {one_line(body)[:80]!r} is no requirement") from error
    pins = [s for s in requirement.specifier if s.operator == "==" and "*" not in s.version]
    if requirement.url or len(pins) != 1 or len(list(requirement.specifier)) != 1:
        raise UsageError(f"{where}: {requirement.name} is not locked to one version", hint="write NAME==VERSION")
    if requirement.marker is not None and not requirement.marker.evaluate(_ENVIRONMENT):
        return None
    hashes = _HASH.findall(text)
    accepted = frozenset(m[1] for h in hashes if (m := _SHA256.fullmatch(h)))
    if not accepted:
        raise UsageError(f"{where}: {requirement.name} has no sha256 hash", hint="make the lock with --generate-hashes")
    return Locked(name=canonicalize_name(requirement.name), version=pins[0].version, hashes=accepted, line=line)


_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_version": "3.11",
    "python_full_version": "3.11.2",
    "sys_platform": "linux",
}


# Wheels --------------------------------------------------------------------------------------------------------------


def fetch_missing(lock: Lock, folder: Path, *, target: Target) -> tuple[str, ...]:
    """Let pip download the wheels that are not there with a right hash; returns what was fetched, as ``name==version``.

    Wheels appear in ``folder`` only complete and verified. pip's own configuration names the index.
    """
    present, _ = verify(lock, folder)
    have = {w.name for w in present}
    missing = [p for p in lock.packages if p.name not in have]
    if not missing:
        return ()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wanted = Path(scratch) / "requirements.txt"
            wanted.write_text("".join(_requirement(p) for p in missing), "utf-8")
            into = Path(scratch) / "wheels"
            _pip("download", "--require-hashes", "--no-deps", *target.arguments, "-d", str(into), "-r", str(wanted))
            for wheel in sorted(into.iterdir()):
                wheel.replace(folder / wheel.name)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error
    return tuple(p.pinned for p in missing)


def verify(lock: Lock, folder: Path) -> tuple[list[Wheel], list[WheelFinding]]:
    """The wheels in ``folder`` with a hash of the lock, in the lock's order; and what does not fit."""
    by_name: dict[str, list[Wheel]] = {}
    findings: list[WheelFinding] = []
    for path in sorted(folder.glob("*.whl")) if folder.is_dir() else ():
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except (InvalidWheelFilename, InvalidVersion):
            findings.append(_finding("wheel", path.name, "is not named as a wheel must be", "remove it"))
            continue
        try:
            wheel = Wheel(path=path, name=name, version=str(version), size=path.stat().st_size, sha256=_sha256(path))
        except OSError as error:  # a folder of that name, a link that leads nowhere, a file of someone else's
            findings.append(_finding("wheel", path.name, f"cannot be read: {error.strerror}", "remove it"))
            continue
        by_name.setdefault(name, []).append(wheel)
    good = []
    for package in lock.packages:
        candidates = by_name.pop(package.name, [])
        right = [w for w in candidates if w.sha256 in package.hashes]
        good += right[:1]
        for wheel in candidates:
            if wheel not in right:
                same = Version(wheel.version) == Version(package.version)
                kind: FindingKind = "hash" if same else "extra"
                message = "has a hash that the lock does not have" if same else f"the lock names {package.version}"
                findings.append(_finding(kind, wheel.path.name, message, "remove it and fetch again"))
        for wheel in right[1:]:
            findings.append(_finding("extra", wheel.path.name, "a second wheel of this package", "remove it"))
        if not right:
            findings.append(_finding("missing", package.pinned, "no wheel of it is in the folder", "fetch it"))
    for wheel in (w for wheels in by_name.values() for w in wheels):
        findings.append(_finding("extra", wheel.path.name, "is not in the lock", "remove it"))
    return good, findings


def examine(wheel: Wheel, *, limit: int, arch: Arch | None, exceptions: Sequence[PathException] = ()) -> WheelReport:
    """Sizes of a wheel and its files against ``limit``, and its CUDA code against ``arch`` (not looked at for None).

    Raises UsageError for a file that is no zip archive. The size that deflate gave a file in the wheel stands for what
    a layer's gzip will give it: the same algorithm.
    """
    try:
        with zipfile.ZipFile(wheel.path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel.path.name} is no wheel: {error}") from error
    large = tuple(
        LargeFile(path=m.filename, size=m.file_size, compressed=m.compress_size)
        for m in sorted(members, key=lambda m: -m.compress_size)
        if m.compress_size > limit
    )
    return WheelReport(
        wheel=wheel,
        installed=sum(m.file_size for m in members),
        over_limit=wheel.size > limit,
        large_files=large,
        cuda_files=tuple(_cuda_files(wheel.path, arch, exceptions)) if arch else (),
    )


def _cuda_files(path: Path, arch: Arch, exceptions: Sequence[PathException]) -> Iterator[CudaFile]:
    policy = Policy(require=(arch,), exceptions=tuple(exceptions))
    for file in walk_wheel(path, Want()).scanned():
        assert file.scan is not None
        found = judge(file.scan, arch)
        if found.verdict is Verdict.NOT_CUDA:
            continue
        place = f"{SITE_PACKAGES}/{file.path.lstrip('/')}"
        yield CudaFile(
            path=file.path.lstrip("/"),
            verdict=found.verdict,
            covered=found.native + found.jit,
            total=found.total,
            excuse=policy.excuse(place, found.verdict),
        )


# Checks --------------------------------------------------------------------------------------------------------------


def resolve_offline(lock: Lock, folder: Path, *, target: Target) -> list[WheelFinding]:
    """Whether pip, with nothing but ``folder``, installs exactly what the lock names: complete and without conflict."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("".join(_requirement(p) for p in lock.packages), "utf-8")
        try:
            _pip(
                *("install", "--dry-run", "--quiet", "--no-index", "--find-links", str(folder), "--require-hashes"),
                *(
                    *target.arguments,
                    "--target",
                    str(Path(scratch) / "site"),
                    "--report",
                    str(report),
                    "-r",
                    str(wanted),
                ),
            )
            document = json.loads(report.read_text("utf-8"))
        except BuildkitError as error:
            if isinstance(error, MissingComponentError):
                raise
            return [_finding("resolve", lock.path.name, error.message, "make the lock anew, then fetch")]
    got: dict[str, str] = {
        canonicalize_name(i["metadata"]["name"]): i["metadata"]["version"] for i in document["install"]
    }
    return check_baked(lock, got, kind="resolve")


def check_inputs(lock: Lock) -> list[WheelFinding]:
    """Whether the lock still satisfies the ``.in`` file of its name, where there is one (and those it refers to)."""
    findings = []
    locked = {p.name: p for p in lock.packages}
    for where, requirement in _inputs(lock.path.with_suffix(".in"), set()):
        if requirement.marker is not None and not requirement.marker.evaluate(_ENVIRONMENT):
            continue
        package = locked.get(canonicalize_name(requirement.name))
        if package is None:
            problem = "is asked for, but not locked"
        elif not requirement.specifier.contains(package.version, prereleases=True):
            problem = f"is locked to {package.version}, which {requirement.specifier} excludes"
        else:
            continue
        findings.append(_finding("input", f"{where}: {requirement.name}", problem, "make the lock anew"))
    return findings


def check_baked(lock: Lock, baked: Mapping[str, str], *, kind: FindingKind = "baked") -> list[WheelFinding]:
    """Differences between the lock and the packages by name that an image (or a resolution) has."""
    locked: dict[str, str] = {p.name: p.version for p in lock.packages}
    have: dict[str, str] = {canonicalize_name(name): version for name, version in baked.items()}
    findings = []
    for name in sorted(locked.keys() | have.keys()):
        wanted, got = locked.get(name), have.get(name)
        if wanted is None:
            problem = f"{got} is installed, but not in the lock"
        elif got is None:
            problem = f"{wanted} is locked, but not installed"
        elif _version(wanted) != _version(got):
            problem = f"{got} is installed, the lock names {wanted}"
        else:
            continue
        findings.append(_finding(kind, name, problem, "build the image again from this lock"))
    return findings


def baked_packages(image: ImageSource) -> dict[str, str]:
    """Name and version of every package that an image has where these wheels are installed. Reads the image once.

    Raises UsageError for an image without any.
    """
    tree = walk_image(image, Want())
    # Not what a package brings inside itself, as setuptools does.
    inside = frozenset(p for p in tree.paths if re.match(rf"{re.escape(SITE_PACKAGES)}/[^/]+\.dist-info(?:/|$)", p))
    found = installed_packages(Tree(files={}, paths=inside))
    if not found:
        raise UsageError(f"the image has no Python packages in {SITE_PACKAGES}", hint="name an image of the recipe")
    return found


def _inputs(path: Path, seen: set[Path]) -> Iterator[tuple[str, Requirement]]:
    if path in seen or not path.is_file():
        return
    seen.add(path)
    try:
        content = path.read_text("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    for line, text in _entries(content):
        included = re.fullmatch(r"(?:-r|--requirement)[= ]\s*(\S+)", text)
        if included:
            yield from _inputs((path.parent / included[1]).resolve(), seen)
            continue
        try:
            yield f"{path.name}:{line}", Requirement(text)
        except InvalidRequirement as error:
            raise UsageError(f"{path}:{line}: {one_line(text)[:80]!r} is no requirement") from error


def _version(text: str) -> Version | str:
    try:
        return Version(text)
    except InvalidVersion:
        return text


# Small helpers -------------------------------------------------------------------------------------------------------


def _pip(*arguments: str) -> None:
    """Run pip. Raises BuildkitError with pip's own reason; its ERROR lines name the package."""
    if shutil.which(sys.executable) is None:
        raise MissingComponentError("this Python has no executable to run pip with")
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DOWNLOAD_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildkitError(
            f"pip took longer than {_DOWNLOAD_SECONDS:.0f} s", hint="is the index reachable?"
        ) from error
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise MissingComponentError("pip is not installed for this Python", hint="python -m ensurepip")
        errors = [row.partition(":")[2].strip() for row in done.stderr.splitlines() if row.startswith("ERROR")]
        reason = " ".join(errors) or done.stderr.strip() or done.stdout.strip() or "no reason given"
        raise BuildkitError(f"pip {arguments[0]} failed: {_without_urls(reason)}", hint="see pip's configuration")


def _without_urls(text: str) -> str:
    """Index addresses can hold credentials: only their host stays."""
    return re.sub(r"(https?://)(?:[^/\s@]*@)?([^/\s]*)\S*", r"\1\2/…", text)


def _requirement(package: Locked) -> str:
    return package.pinned + "".join(f" --hash=sha256:{h}" for h in sorted(package.hashes)) + "\n"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _finding(kind: FindingKind, subject: str, message: str, remedy: str) -> WheelFinding:
    return WheelFinding(kind=kind, subject=subject, message=one_line(message), remedy=remedy)


def _wheel_json(report: WheelReport) -> dict[str, Any]:
    return {
        "file": report.wheel.path.name,
        "name": report.wheel.name,
        "version": report.wheel.version,
        "size": report.wheel.size,
        "sha256": report.wheel.sha256,
        "installed": report.installed,
        "over_limit": report.over_limit,
        "large_files": [{"path": f.path, "size": f.size, "compressed": f.compressed} for f in report.large_files],
        "cuda_files": [
            {"path": f.path, "verdict": str(f.verdict), "covered": f.covered, "total": f.total, "excuse": f.excuse}
            for f in report.cuda_files
        ],
    }
