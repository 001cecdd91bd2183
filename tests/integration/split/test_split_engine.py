"""Split images in the hands of others: a real engine loads, exports and pushes them, skopeo pulls, umoci unpacks."""

from __future__ import annotations

import io
import os
import random
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from golden.split.cases import CASES, Case
from golden.split.sources import TarsSource
from golden.split.tars import directory, file, hardlink, pax, symlink, tar

from buildkit.engine import Engine
from buildkit.image.transports import open_source
from buildkit.image.write import write_image
from buildkit.split.flatten import Node, compare, flatten, layer_tree
from buildkit.split.rewrite import SplitOptions, SplitResult, split_image
from buildkit.split.verify import verify
from buildkit.stack import StackOptions, StackState

LIMIT = 300_000
EDGE = 1_000_000

BEYOND_ENGINES = {
    "hard link to a lower layer": "overlay stores extract every layer on its own",
    "entry below a file, which no extractor can place": "not a directory",
    "duplicates of files and directories": "duplicates of file paths not supported",
    "directory replaced by a symbolic link, and the reverse, in one layer": "duplicates of file paths not supported",
    "a name deleted and brought back in one layer": "the whiteout of an entry that is there is 'file exists'",
    "sparse files, old GNU and PAX 0.0, 0.1, 1.0": "unhandled tar header type 83",
    "PAX globals that change": "global headers of one name count as duplicates",
}
"""Golden images that an engine refuses, divided or not, and why."""


def layers() -> list[bytes]:
    """Two layers like those of a package manager: a few megabytes, links, modes, whiteouts, a capability."""
    draw = random.Random(4)
    capability = b"\1\0\0\2\0\x20\0\0" + bytes(12)
    low = [directory(b"usr"), directory(b"usr/bin"), directory(b"var"), directory(b"var/cache", 0o700)]
    low += [file(b"usr/bin/%03d" % n, draw.randbytes(draw.randrange(30_000)), mode=0o755) for n in range(60)]
    low += [file(b"var/cache/%03d" % n, b"cached") for n in range(30)]
    up = [directory(b"tmp", 0o1777), directory(b"usr", mtime=5), directory(b"usr/bin", 0o711, mtime=6)]
    for n in range(150):
        folder = b"usr/share/%02d" % (n % 20)
        up.append(directory(folder, 0o750, gid=n) if n < 20 else b"")
        up.append(file(folder + b"/%03d" % n, draw.randbytes(draw.randrange(40_000)), uid=n, mtime=n))
    up += [
        hardlink(b"usr/bin/linked", b"usr/share/03/003", uid=3, mtime=3),
        symlink(b"usr/lib", b"share/01"),
        pax({b"SCHILY.xattr.security.capability": capability, b"mtime": b"7.123456789"})
        + file(b"usr/bin/ping", draw.randbytes(9000), mode=0o755),
        file(b"usr/bin/su", b"su", mode=0o4755),
        directory(b"var", mtime=7),
        directory(b"var/cache", 0o700, mtime=7),
        file(b"var/cache/.wh..wh..opq"),
        file(b"usr/bin/.wh.000"),
        file(b"usr/bin/.wh.059"),
        file(b"usr/big", draw.randbytes(700_000)),
    ]
    return [tar(*low), tar(*up)]


@pytest.fixture(scope="module")
def source() -> TarsSource:
    return TarsSource(layers())


@pytest.fixture(scope="module", params=[True, False], ids=["stable", "sequential"])
def split(source: TarsSource, request: pytest.FixtureRequest) -> Iterator[SplitResult]:
    with split_image(source, SplitOptions(limit=LIMIT, stable=request.param)) as result:
        assert len(result.report.indivisible) == 1
        assert result.report.layers_after > 10
        yield result


@pytest.fixture
def load(engine: Engine, engine_host: str) -> Iterator[Callable[[SplitResult | TarsSource], str]]:
    """Loads an image into the engine under a name of its own, which is gone afterwards."""
    names: list[str] = []

    def run(image: SplitResult | TarsSource) -> str:
        name = f"split-test-{uuid.uuid4().hex[:12]}:x"
        if isinstance(image, TarsSource):
            with split_image(image, SplitOptions(limit=10**9)) as whole:
                write_image(f"docker-daemon:{name}", whole.image.output(), engine_host=engine_host)
        else:
            write_image(f"docker-daemon:{name}", image.image.output(), engine_host=engine_host)
        names.append(name)
        return name

    yield run
    for name in names:
        engine.remove(name)


def seen_by_engine(engine: Engine, name: str, source: TarsSource) -> dict[bytes, Node]:
    """The engine's own view of the tree: a container's file system, without what the engine puts there itself.

    Directories that no entry describes have the time at which they were made.
    """
    container = engine.client.containers.create(name, command="none")
    try:
        data = b"".join(cast(Iterable[bytes], container.export()))
    finally:
        container.remove()
    implied = {path for path, node in flatten(source).nodes().items() if node.implied}
    mounted = (b"", b"dev", b"etc", b"proc", b"sys", b".dockerenv")
    return {
        path: replace(node, mtime_ns=0) if path in implied else node
        for path, node in layer_tree(io.BytesIO(data), where="export").nodes().items()
        if path.partition(b"/")[0] not in mounted
    }


def test_engine_shows_the_same_tree(
    engine: Engine, source: TarsSource, split: SplitResult, load: Callable[[SplitResult | TarsSource], str]
) -> None:
    whole, divided = (seen_by_engine(engine, load(image), source) for image in (source, split))
    assert divided == whole
    assert len(whole) > 230


def test_engine_gives_back_what_was_loaded(
    engine_host: str, split: SplitResult, load: Callable[[SplitResult | TarsSource], str]
) -> None:
    name = load(split)
    with open_source(f"docker-daemon:{name}", engine_host=engine_host) as back:
        assert back.image_id == split.image.image_id
        assert verify(split.image, back).passed


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in BEYOND_ENGINES], ids=lambda case: case.name
)
def test_engine_shows_golden_images_the_same(
    engine: Engine, case: Case, load: Callable[[SplitResult | TarsSource], str]
) -> None:
    source = TarsSource(case.layers)
    with split_image(source, SplitOptions(limit=20_000)) as result:
        whole, divided = (seen_by_engine(engine, load(image), source) for image in (source, result))
    assert divided == whole


@pytest.fixture(scope="module")
def narrow(stack_factory: Callable[[StackOptions], StackState]) -> StackState:
    """Registry and edge that lets a megabyte through."""
    return stack_factory(StackOptions(engine="none", edge_limit=EDGE))


def test_docker_pushes_the_split_image_through_the_edge_and_others_pull_it(
    engine: Engine,
    narrow: StackState,
    source: TarsSource,
    split: SplitResult,
    load: Callable[[SplitResult | TarsSource], str],
    tmp_path: Path,
) -> None:
    def push(name: str, target: str) -> str:
        assert engine.client.images.get(name).tag(target)
        try:
            return "".join(str(line) for line in engine.client.images.push(target, stream=True, decode=True))
        finally:
            engine.remove(target)

    repository = f"{narrow.edge}/split/{uuid.uuid4().hex[:8]}"
    assert "413" in push(load(source), f"{repository}:whole")
    answer = push(load(split), f"{repository}:split")
    assert "errorDetail" not in answer
    assert "digest: sha256:" in answer

    pulled = tmp_path / "pulled"
    run("skopeo", "copy", "--src-tls-verify=false", f"docker://{repository}:split", f"oci:{pulled}:x")
    with open_source(f"oci:{pulled}:x") as back:
        # skopeo writes the config anew in OCI's form; the layers are the split's.
        assert [layer.diff_id for layer in back.layers] == [layer.diff_id for layer in split.image.layers]
        assert compare(flatten(source), flatten(back)).equal

    run("umoci", "unpack", "--image", f"{pulled}:x", str(tmp_path / "bundle"))
    check_unpacked(tmp_path / "bundle" / "rootfs", source)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_unpacked(root: Path, source: TarsSource) -> None:
    """What lies on the disk is the flattened tree, attribute by attribute."""
    nodes = flatten(source).nodes()
    seen = {b""}
    for folder, directories, files in os.walk(os.fsencode(root)):
        seen |= {os.path.relpath(os.path.join(folder, n), os.fsencode(root)) for n in [*directories, *files]}
    assert seen == nodes.keys()
    inodes: dict[int, set[bytes]] = {}
    for path, node in nodes.items():
        if node.implied:
            continue
        full = os.path.join(os.fsencode(root), path)
        found = os.lstat(full)
        kind = {"5": stat.S_ISDIR, "2": stat.S_ISLNK, "0": stat.S_ISREG}[node.kind]
        assert kind(found.st_mode), path
        if node.kind != "2":
            assert stat.S_IMODE(found.st_mode) == node.mode, path
        assert (found.st_uid, found.st_gid, found.st_mtime_ns) == (node.uid, node.gid, node.mtime_ns), path
        if node.kind == "0":
            assert found.st_size == node.size
            inodes.setdefault(found.st_ino, set()).add(path)
        if os.path.islink(full):
            assert os.readlink(full) == node.link
    links = {frozenset(paths) for paths in inodes.values() if len(paths) > 1}
    assert links == flatten(source).link_groups()
    assert os.getxattr(os.path.join(os.fsencode(root), b"usr/bin/ping"), b"security.capability")
