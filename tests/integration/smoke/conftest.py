"""A driver and kernels for the processor, and an image of the probe server with them in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from smokeworld.emulate import build_driver, build_kernels
from smokeworld.image import IMAGE, LIBRARY, PYTHON, root_tar

from buildkit.engine import Engine
from buildkit.errors import NotFoundError

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a ``libcuda.so.1`` whose GPU is the host's memory."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers that are started find an emulated GPU."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    return driver


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good build of the probe kernels, for the processor."""
    return build_kernels(tmp_path_factory.mktemp("kernels") / "libgdn.so")


@pytest.fixture(scope="session")
def probe_image(engine: Engine, kernels: Path) -> Iterator[str]:
    """An image whose Python can serve the probe, with the kernels' library behind a link."""
    extra = {LIBRARY: Path("libgdn.so.1"), f"{LIBRARY}.1": kernels}
    engine.import_tar(root_tar(extra), IMAGE, changes=["ENV PYTHONPATH=/app", f'CMD ["{PYTHON}", "-V"]'])
    yield IMAGE
    with contextlib.suppress(NotFoundError):
        engine.remove(IMAGE)
