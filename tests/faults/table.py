"""The fault matrix as counts per profile. Run ``python tests/faults/table.py [PROFILE…]`` to print it."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from buildkit.errors import BuildkitError
from faults.model import PROFILES, Profile
from faults.pushing import check, push
from faults.server import FAULTS, Fault, FaultServer, Key

KINDS = ("token", "head", "start", "patch", "status", "close", "manifest-put", "manifest-head", "manifest-get")
SIZES = [2500]

_FINAL = frozenset({"400-before", "400-json", "401-before", "403-before", "404-before", "409-before", "416-before"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One push with one fault. ``problem`` is what must never be; an ``error`` is allowed."""

    played: bool
    error: BuildkitError | None
    problem: str


def cell(server: FaultServer, state: Path, kind: str, nth: int, fault: str) -> Cell:
    """A push in which the ``nth`` request of ``kind`` meets the fault. Kinds that only follow another fault get it:
    a status is asked after a dropped chunk, a manifest's HEAD after a dropped PUT."""
    script: dict[Key, Fault] = {(kind, nth): FAULTS[fault]}
    if kind == "status":
        script["patch", 1] = FAULTS["drop-before"]
    elif kind == "manifest-head":
        script["manifest-put", 0] = FAULTS["drop-after"]
    server.reset(script)
    with tempfile.TemporaryDirectory(dir=state) as folder:
        pushed = push(server, folder, sizes=SIZES)
    try:
        check(server, pushed)
    except AssertionError as problem:
        return Cell(played=True, error=pushed.error, problem=str(problem) or repr(problem))
    return Cell(played=(kind, nth) not in server.script, error=pushed.error, problem="")


def must_succeed(profile: Profile, kind: str, fault: str) -> bool:
    """Whether one such fault has to be overcome: passing failures, lost answers, odd headers, sizes."""
    if fault in _FINAL or fault in ("location-garbage", "location-missing"):
        return False
    if fault.startswith("413"):
        return kind == "patch" and not profile.equal_parts
    if fault == "location-other-host":
        return profile.auth == "none"
    return True


def main(names: list[str]) -> int:
    """Prints one line per profile; the exit code is 1 if anything is wrong."""
    wrong = 0
    columns = ("cells", "overcome", "error", "not met", "wrong")
    print(f"{'profile':30}" + "".join(f"{column:>10}" for column in columns))
    with tempfile.TemporaryDirectory() as folder:
        for profile in PROFILES:
            if names and profile.name not in names:
                continue
            counts: Counter[str] = Counter()
            with FaultServer(profile) as server:
                for kind in KINDS:
                    for fault in FAULTS:
                        result = cell(server, Path(folder), kind, 0, fault)
                        failed = result.error is not None
                        bad = result.problem or (result.played and failed and must_succeed(profile, kind, fault))
                        if bad:
                            print(f"  wrong: {profile.name} {kind} {fault}: {result.problem or result.error}")
                        name = "wrong" if bad else "not met" if not result.played else "error" if failed else "overcome"
                        counts[name] += 1
                        counts["cells"] += 1
            wrong += counts["wrong"]
            print(f"{profile.name:30}" + "".join(f"{counts[column]:>10}" for column in columns), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
