"""One small recipe in a repository of its own, the local engine, and a registry behind its edge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.repository import Repository

from buildkit.engine import Engine
from buildkit.errors import NotFoundError
from buildkit.stack import StackState


@pytest.fixture
def repository(
    stack: StackState, engine: Engine, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Repository]:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())
    made = Repository(stack, tmp_path, f"pipe/{'-'.join(part for part in name.split('-') if part)[:80]}")
    yield made
    with contextlib.suppress(NotFoundError):
        for tag in engine.inspect(f"{made.image}:sm70").tags:
            engine.remove(tag)
