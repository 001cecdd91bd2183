"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True, parents: bool = False) -> None:
    """Replace ``path`` by ``data``: other processes see the old content or the new, never a part.

    ``durable``: after a power failure as well, once this returns; without it whoever cares calls ``flush`` later.
    ``parents``: make the folders above it. Raises OSError, and leaves no temporary file behind when it does.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        # The rename itself is durable only once the folder is.
        _sync(path.parent, os.O_DIRECTORY)


def flush(path: Path) -> None:
    """Make what ``write_atomic`` wrote survive a power failure. Raises OSError."""
    _sync(path, 0)
    _sync(path.parent, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
