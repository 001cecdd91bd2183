"""Where this package remembers things between runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import platformdirs

ENVIRONMENT = "BUILDKIT_STATE_DIR"


def state_dir(override: str | os.PathLike[str] | None = None) -> Path:
    """``override``, else ``$BUILDKIT_STATE_DIR``, else the user's state folder; not created here."""
    chosen = override or os.environ.get(ENVIRONMENT)
    return Path(chosen) if chosen else Path(platformdirs.user_state_dir("buildkit", appauthor=False))


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty where the file is missing, unreadable, or not what we wrote.

    What is remembered saves time and is never needed: anything doubtful counts as not there.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
