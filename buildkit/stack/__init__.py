"""A small world on loopback to try everything in: an engine, a registry, and an edge that refuses large bodies.

``up`` starts them, ``down`` ends what ``up`` started, ``status`` looks. Each stack lives in a data folder of its own;
several can run side by side.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from buildkit.stack.local import down, status, up
from buildkit.stack.plan import EDGE_LIMIT, Credentials, StackOptions
from buildkit.stack.state import Component, StackState

__all__ = [
    "EDGE_LIMIT",
    "Component",
    "Credentials",
    "StackOptions",
    "StackState",
    "default_folder",
    "down",
    "status",
    "up",
]


def default_folder() -> Path:
    """The data folder where none is given: ``$BUILDKIT_STACK``, else ``stack`` in the user's state folder."""
    given = os.environ.get("BUILDKIT_STACK")
    return Path(given).absolute() if given else platformdirs.user_state_path("buildkit") / "stack"
