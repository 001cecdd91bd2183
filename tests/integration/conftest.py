"""The world that integration tests run in: one local stack for the whole session.

An engine that answers (DOCKER_HOST, the current context, the usual socket) is used and left alone; where none does, the
stack starts its own. What a test needs and cannot get is a failure, never a skip.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from buildkit import stack as local_stack
from buildkit.engine import Engine
from buildkit.stack import StackOptions, StackState

StackFactory = Callable[[StackOptions], StackState]


@pytest.fixture(scope="session")
def stack_factory() -> Iterator[StackFactory]:
    """Makes a stack of its own for each set of options, brought up; all of them are gone when the session ends."""
    with ExitStack() as undo:

        def make(options: StackOptions) -> StackState:
            # Not below pytest's folder: it keeps the last three, and an engine's data is large; sockets need it short.
            folder = Path(tempfile.mkdtemp(prefix="bk-stack-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            undo.callback(local_stack.down, folder, purge=True)
            return local_stack.up(folder, options)

        yield make


@pytest.fixture(scope="session")
def stack(stack_factory: StackFactory) -> StackState:
    """Engine, registry and an edge with a limit of 100 MiB: ``stack.engine``, ``stack.registry``, ``stack.edge``."""
    return stack_factory(StackOptions())


@pytest.fixture(scope="session")
def registry(stack_factory: StackFactory) -> StackState:
    """Registry and edge without an engine, for tests that need none: ``registry.registry``, ``registry.edge``."""
    return stack_factory(StackOptions(engine="none"))


@pytest.fixture(scope="session")
def engine_host(stack: StackState) -> str:
    """A DOCKER_HOST value of an engine that answers."""
    assert stack.engine is not None
    return stack.engine


@pytest.fixture(scope="session")
def engine(engine_host: str) -> Iterator[Engine]:
    """A connection to that engine."""
    with Engine.connect(engine_host) as connection:
        yield connection
