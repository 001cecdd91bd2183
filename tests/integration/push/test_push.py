"""Images arrive complete and right, through a door that refuses bodies above 100 MiB."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.images import digest, layer_tar, noise, write_archive, write_layout
from support.world import World

BIG = 130 * 10**6


@pytest.fixture(scope="module")
def big_layer() -> bytes:
    """More than the edge lets through in one request, compressed or not."""
    return layer_tar({"big": noise(BIG), "small": b"x"})


def _layers(count: int = 3) -> list[bytes]:
    return [layer_tar({f"file-{n}": noise(200_000, seed=n), "text": b"text " * 10_000}) for n in range(count)]


def test_a_layer_above_the_limit_arrives_through_the_edge(world: World, big_layer: bytes) -> None:
    archive = write_archive(world.folder / "image.tar", [layer_tar({"etc": b"base"}), big_layer])
    report = world.push(f"docker-archive:{archive}")

    manifest = world.manifest()
    assert manifest.headers["Docker-Content-Digest"] == report["digest"] == digest(manifest.content)
    document = manifest.json()
    assert document["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    assert [hashlib.sha256(gzip.decompress(world.blob(d["digest"]))).hexdigest() for d in document["layers"]] == [
        hashlib.sha256(layer).hexdigest() for layer in (layer_tar({"etc": b"base"}), big_layer)
    ]
    big = next(upload for upload in report["uploads"] if upload["size"] > 100 * 2**20)
    assert big["chunks"] == 2
    assert big["chunk_size"] <= 95_000_000
    check = world.run("pull-check", f"{world.edge}/{world.name}:x", "--deep", "--json")
    assert check.code == 0
    assert check.json["ok"] is True


def test_without_chunked_a_blob_above_the_limit_is_chunked_all_the_same(world: World, big_layer: bytes) -> None:
    archive = write_archive(world.folder / "image.tar", [big_layer, *_layers(1)])
    result = world.run("push", f"docker-archive:{archive}", "--to", world.to, "--json")
    assert result.code == 0, result.err
    assert sorted(upload["chunks"] > 1 for upload in result.json["uploads"]) == [False, False, True]


def test_an_unchanged_image_sends_and_compresses_nothing(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    first = world.push(f"docker-archive:{archive}")
    second = world.push(f"docker-archive:{archive}")
    assert second["up_to_date"] is True
    assert second["digest"] == first["digest"]
    assert (second["bytes_sent"], second["bytes_compressed"], second["uploads"]) == (0, 0, [])


def test_only_a_changed_layer_is_read_and_sent(world: World) -> None:
    layers = _layers()
    write_archive(world.folder / "one.tar", layers)
    top = layer_tar({"new": b"new"})
    write_archive(world.folder / "two.tar", [*layers, top])
    world.push(f"docker-archive:{world.folder}/one.tar")
    report = world.push(f"docker-archive:{world.folder}/two.tar")
    assert {upload["label"] for upload in report["uploads"]} == {"layer 4/4", "config"}
    assert report["bytes_compressed"] == len(top)


def test_a_second_registry_costs_no_compression(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    world.push(f"docker-archive:{archive}")
    other = world.run("push", f"docker-archive:{archive}", "--to", f"{world.edge}/{world.name}-two:x", "--json")
    assert other.json["bytes_compressed"] == 0
    assert other.json["digest"] == world.manifest().headers["Docker-Content-Digest"]


def test_compression_does_not_depend_on_threads_or_the_cache(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", [layer_tar({"a": noise(9_000_000)}), *_layers(2)])
    digests = set()
    for number, threads in enumerate(("1", "2", "5")):
        digests.add(
            world.push(
                f"docker-archive:{archive}", "--threads", threads, "--no-cache",
                BUILDKIT_CACHE_DIR=str(world.folder / f"cache-{number}"),
            )["digest"]
        )  # fmt: skip
    assert len(digests) == 1


def test_a_layout_is_passed_on_byte_for_byte(world: World) -> None:
    wanted = write_layout(world.folder / "layout", _layers())
    report = world.push(f"oci:{world.folder}/layout:latest")
    assert report["digest"] == wanted["digest"] == digest(world.manifest().content)
    assert report["bytes_compressed"] == 0
    for layer in wanted["layers"]:
        assert digest(world.blob(layer["digest"])) == layer["digest"]


def test_from_registry_to_registry(world: World) -> None:
    write_layout(world.folder / "layout", _layers())
    first = world.push(f"oci:{world.folder}/layout")
    result = world.run("push", f"docker://{world.to}", "--to", f"{world.registry}/{world.name}-copy:x", "--json")
    assert result.code == 0, result.err
    assert result.json["digest"] == first["digest"]


def test_a_layer_that_repeats_is_sent_once(world: World) -> None:
    same, other = _layers(2)
    archive = write_archive(world.folder / "image.tar", [same, other, same])
    report = world.push(f"docker-archive:{archive}")
    assert len(report["uploads"]) == 3  # two layers and the config
    layers = world.manifest().json()["layers"]
    assert layers[0] == layers[2] != layers[1]


def test_zstd_layers_come_with_oci_media_types(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    world.push(f"docker-archive:{archive}", "--compression", "zstd")
    document = world.manifest().json()
    assert document["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert {d["mediaType"] for d in document["layers"]} == {"application/vnd.oci.image.layer.v1.tar+zstd"}


def test_a_dry_run_sends_nothing_and_tells_the_plan(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    result = world.run("push", f"docker-archive:{archive}", "--to", world.to, "--dry-run", "--json")
    assert result.code == 0, result.err
    assert [blob["action"] for blob in result.json["blobs"]] == ["compress", "compress", "compress", "upload"]
    assert world.manifest().status_code == 404
    assert not list((world.folder / "cache" / "images" / "blobs").iterdir())
    world.push(f"docker-archive:{archive}")
    after = world.run("push", f"docker-archive:{archive}", "--to", world.to, "--dry-run", "--json")
    assert after.json["up_to_date"] is True
    assert {blob["action"] for blob in after.json["blobs"]} == {"exists"}


def test_the_digest_is_an_output_of_the_step(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers(1))
    output = world.folder / "output"
    output.write_text("before=1\n")
    report = world.push(f"docker-archive:{archive}", GITHUB_OUTPUT=str(output))
    assert output.read_text().splitlines() == ["before=1", f"digest={report['digest']}", f"image={report['pull']}"]


def test_quiet_prints_the_digest_alone(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers(1))
    result = world.run("push", f"docker-archive:{archive}", "--to", world.to, "--quiet")
    assert (result.out, result.err) == (world.manifest().headers["Docker-Content-Digest"] + "\n", "")


# Damage --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_cache_costs_a_second_look_at_the_source(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers())
    first = world.push(f"docker-archive:{archive}")
    for blob in (world.folder / "cache" / "images" / "blobs").iterdir():
        _flip(blob)
    result = world.run("push", f"docker-archive:{archive}", "--to", f"{world.edge}/{world.name}-two:x", "--json")
    assert result.code == 0, result.err
    assert result.json["digest"] == first["digest"]
    assert result.json["bytes_compressed"] > 0
    assert "damaged" in result.err


def test_a_flipped_bit_in_a_layout_is_an_error_and_no_tag(world: World) -> None:
    wanted = write_layout(world.folder / "layout", _layers())
    blob = world.folder / "layout" / "blobs" / "sha256" / wanted["layers"][1]["digest"].removeprefix("sha256:")
    _flip(blob)
    result = world.run("push", f"oci:{world.folder}/layout", "--to", world.to, "--chunked")
    assert result.code == 1
    assert len([line for line in result.err.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in result.err
    assert blob.name in result.err
    assert world.manifest().status_code == 404


@pytest.mark.parametrize("cut", ["layer", "manifest", "config"])
def test_a_manifest_that_lies_about_sizes(world: World, cut: str) -> None:
    write_layout(world.folder / "layout", _layers())
    index = json.loads((world.folder / "layout" / "index.json").read_text())
    blobs = world.folder / "layout" / "blobs" / "sha256"
    entry = index["manifests"][0]
    document = json.loads((blobs / entry["digest"].removeprefix("sha256:")).read_text())
    match cut:
        case "layer":
            document["layers"][0]["size"] += 7
        case "config":
            document["config"]["size"] -= 1
    raw = json.dumps(document).encode()
    (blobs / digest(raw).removeprefix("sha256:")).write_bytes(raw)
    entry.update(digest=digest(raw), size=len(raw) + (5 if cut == "manifest" else 0))
    (world.folder / "layout" / "index.json").write_text(json.dumps(index))
    _fails(world, f"oci:{world.folder}/layout", code=1)


def test_an_archive_cut_at_every_64_kib(world: World) -> None:
    whole = write_archive(world.folder / "whole.tar", _layers(2)).read_bytes()
    cut = world.folder / "cut.tar"
    for size in range(0, len(whole) - 10240, 65536):
        cut.write_bytes(whole[:size])
        _fails(world, f"docker-archive:{cut}", code=(1, 2))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _fails(world: World, source: str, *words: str, code: int | tuple[int, ...], to: str = "", **environ: str) -> str:
    """One line of error, the right exit code, and no tag."""
    result = world.run("push", source, "--to", to or world.to, "--chunked", *words, **environ)
    assert result.code in ((code,) if isinstance(code, int) else code), result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert "Traceback" not in result.err
    assert "internal error" not in result.err
    assert world.manifest().status_code == 404
    return errors[0]


# Wrong usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words", "code", "says"),
    [
        ("ftp://example.org/x", [], 2, "ftp"),
        ("sif:image", [], 2, "sif"),
        ("oci:nowhere", [], 2, "nowhere"),
        ("docker-archive:nowhere.tar", [], 2, "nowhere.tar"),
        ("docker-archive:image.tar:other", [], (1, 2), "other"),
        ("docker-archive:image.tar", ["--to", "no-registry:x"], 2, "no-registry"),
        ("docker-archive:image.tar", ["--to", "localhost:5000/UPPER:x"], 2, "UPPER"),
        ("docker-archive:image.tar", ["--chunk-size", "95 parsecs"], 2, "parsecs"),
        ("docker-archive:image.tar", ["--limit", "0"], 2, "--limit"),
        ("docker-archive:image.tar", ["--edge", "moon"], 2, "moon"),
        ("docker-archive:image.tar", ["--compression", "lzma"], 2, "lzma"),
        ("docker-archive:image.tar", ["--source", "sideways"], 2, "sideways"),
        ("docker-archive:image.tar", ["--source", "direct"], 2, "direct"),
        ("docker-archive:image.tar", ["--verify", "never"], 2, "never"),
        ("docker-archive:image.tar", ["--quirks", "haunted"], 2, "haunted"),
        ("docker-archive:image.tar", ["--platform", "penguin"], 2, "penguin"),
        ("docker-archive:image.tar", ["--username", "me"], 2, "--password-stdin"),
        ("some-image", ["--engine", "unix:///nowhere.sock"], 3, "nowhere.sock"),
    ],
)
def test_wrong_usage_is_one_line_and_its_exit_code(
    world: World, source: str, words: list[str], code: int | tuple[int, ...], says: str
) -> None:
    write_archive(world.folder / "image.tar", _layers(1))
    assert says in _fails(world, source, *words, code=code)


def test_an_unreachable_registry_is_named(world: World) -> None:
    archive = write_archive(world.folder / "image.tar", _layers(1))
    result = world.run("push", f"docker-archive:{archive}", "--to", "127.0.0.1:9/a:x", "--retries", "0")
    assert result.code == 1, result.err
    assert "127.0.0.1:9" in result.err
    assert "Traceback" not in result.err


# Interruption --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_push_moves_no_tag_and_goes_on(world: World, big_layer: bytes, how: signal.Signals) -> None:
    archive = write_archive(world.folder / "image.tar", [big_layer])
    command = world.command("push", f"docker-archive:{archive}", "--to", world.to, "--chunked", "--chunk-size", "1MB")
    child = subprocess.Popen(
        command,
        env=world.environ,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    uploads = world.folder / "state"
    while child.poll() is None and not list(uploads.rglob("*.json")):
        time.sleep(0.01)  # until the first chunk is acknowledged and noted
    child.send_signal(how)
    _, err = child.communicate(timeout=60)
    assert "Traceback" not in err
    assert child.returncode == (-how if how is signal.SIGKILL else 130), err
    assert world.manifest().status_code == 404
    if how is not signal.SIGKILL:
        assert "again" in err
    report = world.push(f"docker-archive:{archive}", "--chunk-size", "1MB")
    assert report["digest"] == world.manifest().headers["Docker-Content-Digest"]
    layer = world.manifest().json()["layers"][0]
    assert hashlib.sha256(gzip.decompress(world.blob(layer["digest"]))).digest() == hashlib.sha256(big_layer).digest()
