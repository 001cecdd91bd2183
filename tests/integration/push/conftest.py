"""One repository name, cache and state folder for each test, against one registry behind one edge."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import World

from buildkit.stack import StackState


@pytest.fixture
def world(registry: StackState, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-")
    while "--" in name:
        name = name.replace("--", "-")
    return World(registry, tmp_path, f"push/{name[:80].strip('-')}")
