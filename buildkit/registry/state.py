"""Where this package remembers things between runs, and how it writes them: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs

ENVIRONMENT = "BUILDKIT_STATE_DIR"


def state_dir(override: str | os.PathLike[str] | None = None) -> Path:
    """``override``, else ``$BUILDKIT_STATE_DIR``, else the user's state folder; not created here."""
    chosen = override or os.environ.get(ENVIRONMENT)
    return Path(chosen) if chosen else Path(platformdirs.user_state_dir("buildkit", appauthor=False))


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: after a crash there is the old content or the new, never a part.

    Raises OSError, and leaves no temporary file behind when it does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # The rename itself is durable only once the folder is.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty where the file is missing, unreadable, or not what we wrote.

    What is remembered saves time and is never needed: anything doubtful counts as not there.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
