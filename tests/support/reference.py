"""A Python environment with torch and transformers, for what is compared with them: the very one of clef-serve-cpu.

The suite's own environment has no torch. This one is made once per lock, by the product's own means: the locked wheels
are fetched and verified, then installed without an index. It is kept in the user's cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from buildkit.wheelhouse import Locked, Target, fetch_missing, read_lock

LOCK = Path(__file__).resolve().parents[2] / "images" / "clef-serve" / "requirements-cpu.txt"


def reference_python() -> Path:
    """The interpreter of that environment, made now where it is not there yet (half a minute, 250 MB to fetch).

    ``$BUILDKIT_REFERENCE_PYTHON`` names another one that has what the lock names.
    """
    given = os.environ.get("BUILDKIT_REFERENCE_PYTHON")
    if given:
        return Path(given)
    lock = read_lock(LOCK)
    name = f"{_key(lock.packages)}-{sys.version_info.major}.{sys.version_info.minor}"
    home = user_cache_path("buildkit-tests") / f"reference-{name}"
    home.parent.mkdir(parents=True, exist_ok=True)
    python = home / "bin" / "python"
    with FileLock(home.with_suffix(".lock")):
        if not (home / "complete").is_file():
            wheels = home / "wheels"
            target = Target(python=f"{sys.version_info.major}.{sys.version_info.minor}")
            fetch_missing(lock, wheels, target=target)
            venv.create(home, with_pip=True)
            install = [str(python), "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
            subprocess.run([*install, "--require-hashes", "--no-deps", "-r", str(LOCK)], check=True)
            for wheel in wheels.iterdir():
                wheel.unlink()
            (home / "complete").touch()
    return python


def _key(packages: tuple[Locked, ...]) -> str:
    import hashlib

    return hashlib.sha256(" ".join(p.pinned for p in packages).encode()).hexdigest()[:12]
