"""The recipe cuda-probe, built for real: base from debootstrap, NVIDIA's libraries from the distribution's packages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildkit.build import BuildOptions, BuildResult, build
from buildkit.build import labels as label
from buildkit.engine import Engine
from buildkit.errors import NotFoundError
from buildkit.recipe import load

IMAGES = Path(__file__).parents[3] / "images"


@pytest.fixture(scope="module")
def probe(engine: Engine) -> Iterator[BuildResult]:
    """The image under a name of the test's own; the base goes with it, unless it was there before."""
    lines: list[str] = []
    result = build(load("cuda-probe", IMAGES), engine, BuildOptions(tags=("bk-test",)), lines.append)
    yield result
    engine.remove(result.names[0])
    if not any(line.startswith("base: ") and line.endswith("is there already") for line in lines):
        assert result.base is not None
        with contextlib.suppress(NotFoundError):
            engine.remove(result.base)


def run(engine: Engine, image: str, *command: str) -> str:
    """The output of a container without network, on a read-only root, as the image's own user."""
    output = engine.client.containers.run(
        image, list(command) or None, network_mode="none", read_only=True, remove=True
    )
    return bytes(output).decode()


def test_the_image_carries_the_libraries_and_loads_them_offline(probe: BuildResult, engine: Engine) -> None:
    output = run(engine, probe.names[0])
    sizes = {name: int(size) for name, size in re.findall(r"^(\S+) /\S+ (\d+) bytes$", output, re.MULTILINE)}
    assert set(sizes) == {"libcudart", "libcublasLt", "libcublas"}
    assert sizes["libcublasLt"] > 200_000_000  # what a body of 100 MB cannot hold, compressed or not


def test_the_image_is_labelled_and_runs_as_nobody_in_particular(probe: BuildResult, engine: Engine) -> None:
    image = engine.inspect(probe.names[0])
    assert image.id == probe.image_id
    assert image.labels[label.SM] == "70"
    assert image.labels[label.BASE_NAME] == probe.base
    assert image.labels[label.BASE_DIGEST].startswith("sha256:")
    assert run(engine, probe.names[0], "id", "-u").strip() == "65532"


def test_nothing_of_the_build_stays_in_the_image(probe: BuildResult, engine: Engine) -> None:
    left = "/var/lib/apt/lists /var/cache/apt/archives /var/log/apt /run/secrets /mnt /etc/machine-id /src"
    output = run(engine, probe.names[0], "sh", "-c", f"find {left} -type f 2>/dev/null | grep -v lock$ || true")
    assert output == ""
    assert run(engine, probe.names[0], "sh", "-c", "command -v nvcc gcc || true") == ""
