"""A clone of this repository with a small image in place of candle-vllm, a registry that asks for a password behind its
edge, and act to run the workflow in them."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.act import Act, clone, commit, interpreter
from support.forge import DOCKERFILE, GOLDEN, RECIPE, TOKEN, USER, Forge, remove_images
from support.rootfs import root_tar

from buildkit.engine import Engine
from buildkit.stack import Credentials, StackOptions, StackState


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clone that all others are made from; its last commit puts the small image in the place of candle-vllm."""
    repository = clone(tmp_path_factory.mktemp("original") / "clone")
    recipe = repository / "images" / "candle-vllm"
    shutil.rmtree(recipe)
    recipe.mkdir()
    (recipe / "recipe.yaml").write_text(RECIPE)
    (recipe / "Dockerfile").write_text(DOCKERFILE)
    (recipe / "root.tar").write_bytes(root_tar(["sh", "cat"], {"tmp/.keep": (b"", 0o644)}))
    shutil.copyfile(GOLDEN / "cuda11-sm70.so", recipe / "code.so")
    commit(repository, "a small image in its place", "2026-01-02T00:00:00Z")
    return repository


@pytest.fixture(scope="session")
def python(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runner brings: an interpreter with the clone's own buildkit."""
    return interpreter(tmp_path_factory.mktemp("runner") / "environment", original)


@pytest.fixture(scope="session")
def guarded(stack_factory: Callable[[StackOptions], StackState]) -> StackState:
    """A registry that asks for the token, behind an edge with a limit of 100 MiB."""
    return stack_factory(StackOptions(engine="none", auth=Credentials(user=USER, password=TOKEN)))


@pytest.fixture
def forge(
    original: Path,
    python: Path,
    guarded: StackState,
    engine: Engine,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Forge]:
    """A clone of its own, an owner of its own, and a runner that has everything. Images that it built are removed."""
    repository = tmp_path / "repository"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", original, repository], check=True)
    subprocess.run(["git", "-C", repository, "remote", "remove", "origin"], check=True)
    owner = f"team-{secrets.token_hex(4)}"
    act = Act(
        home=tmp_path / "home",
        environ={
            "BUILDKIT_PYTHON": str(python),
            "BUILDKIT_CACHE_DIR": str(tmp_path / "cache"),
            "BUILDKIT_STATE_DIR": str(tmp_path / "state"),
            "DOCKER_CONFIG": str(tmp_path / "docker"),
            "DOCKER_HOST": engine.host,
        },
        variables={"REGISTRY": guarded.edge or "", "REGISTRY_OWNER": owner, "REGISTRY_USERNAME": USER},
        secrets={"REGISTRY_TOKEN": TOKEN},
    )
    assert guarded.registry is not None
    yield Forge(repository=repository, owner=owner, registry=guarded.registry, act=act)
    remove_images(engine, owner)


@pytest.fixture
def behind() -> Callable[[Forge, str], Forge]:
    """The same forge, with its registry at another address."""

    def at(forge: Forge, address: str) -> Forge:
        return replace(forge, act=replace(forge.act, variables={**forge.act.variables, "REGISTRY": address}))

    return at
