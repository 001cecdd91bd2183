"""``split``, ``push --split`` and ``check`` as a user runs them."""

from __future__ import annotations

import json

import pytest
from support.images import layer_tar, noise, write_archive, write_layout
from support.world import World

LIMIT = 2_000_000


def _layers() -> list[bytes]:
    big = {f"dir-{n % 7}/file-{n}": noise(150_000, seed=n) for n in range(60)}
    return [layer_tar({"etc/base": b"base"}), layer_tar({**big, "whole": noise(3_000_000, seed=99)})]


def test_a_split_image_is_verified_and_pushed_within_the_limit(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    result = world.run(
        "split", f"docker-archive:{archive}", "oci:divided:x", "--limit", str(LIMIT), "--verify", "--json"
    )
    assert result.code == 0, result.err
    report = result.json
    assert report["ok"] is True
    assert report["verified"]["passed"] is True
    assert report["layers_after"] > report["layers_before"] == 2
    assert [entry["what"] for entry in report["chunked_upload"]] == ["layer 2: /whole"]
    world.push("oci:divided:x")
    sizes = sorted(layer["size"] for layer in world.manifest().json()["layers"])
    assert sizes[-2] <= LIMIT < sizes[-1]  # all but the one file that no layer format can divide


def test_push_splits_on_the_way(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    world.push(f"docker-archive:{archive}", "--split", "--limit", str(LIMIT))
    layers = world.manifest().json()["layers"]
    assert len(layers) > 4
    assert world.run("pull-check", world.to, "--deep").code == 0


def test_a_dry_run_writes_nothing(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    before = set(world.folder.iterdir())
    result = world.run("split", f"docker-archive:{archive}", "oci:divided", "--limit", "2MB", "--dry-run", "--json")
    assert result.code == 0, result.err
    assert result.json["dry_run"] == "exact"
    assert set(world.folder.iterdir()) - before <= {world.folder / "cache", world.folder / "state"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["docker-archive:image.tar"], "destination"),
        (["docker-archive:image.tar", "docker-archive:image.tar"], "source itself"),
        (["docker-archive:image.tar", "docker-archive:./other/../image.tar"], "source itself"),
        (["docker-archive:image.tar", "oci:full"], "not empty"),
        (["docker-archive:image.tar", "docker-archive:full"], "folder"),
        (["docker-archive:image.tar", "docker://localhost:1/a:b"], "registry"),
        (["docker-archive:image.tar", "docker-archive:nowhere/x.tar"], "nowhere"),
        (["docker-archive:image.tar", "oci:new", "--quick"], "--dry-run"),
        (["docker-archive:image.tar", "oci:new", "--dry-run", "--verify"], "--verify"),
        (["docker-archive:image.tar", "oci:new", "--oversize", "melt"], "melt"),
        (["docker-archive:image.tar", "oci:new", "--threads", "-1"], "threads"),
    ],
)
def test_wrong_usage_is_told_before_any_work(world: World, words: list[str], says: str) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    whole = archive.read_bytes()
    (world.folder / "other").mkdir()
    (world.folder / "full").mkdir()
    (world.folder / "full" / "file").write_text("x")
    result = world.run("split", *words)
    assert (result.code, len([line for line in result.err.splitlines() if line.startswith("error: ")])) == (2, 1)
    assert says in result.err
    assert archive.read_bytes() == whole
    assert not (world.folder / "new").exists()


def test_check_reads_images_and_names_that_are_no_unicode_stay_json(world: World) -> None:
    write_layout(world.folder / "layout", _layers())
    result = world.run("check", "oci:layout", "--require", "sm_70", "--json")
    assert result.json["kind"] == "image"
    folder = world.folder / "odd"
    folder.mkdir()
    (folder / "\udcff.so").write_bytes(b"\x7fELF" + bytes(60))
    result = world.run("check", "odd", "--require", "sm_70", "--json")
    json.loads(result.out)


@pytest.mark.parametrize("words", [["--require", ","], ["--same", "x.so", "--require", "sm_70"], ["--in", "layout"]])
def test_check_ignores_no_flag(world: World, words: list[str]) -> None:
    write_layout(world.folder / "layout", _layers())
    assert world.run("check", "oci:layout", *words).code == 2
