"""Sources: every form of an image gives the same layers and config, and damage is an error that names the thing."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.image.image_samples import (
    FakeEngine,
    Sample,
    compact,
    layout_members,
    legacy_members,
    make_tar,
    sample,
    serving,
    sha,
    tar_members,
    write_data_root,
    write_layout,
)

from buildkit.engine import Engine
from buildkit.errors import (
    BuildkitError,
    DigestMismatchError,
    EngineError,
    FormatError,
    ImageError,
    MissingComponentError,
    NotFoundError,
    UsageError,
)
from buildkit.image.direct import DirectSource, NotDirectError
from buildkit.image.fallback import FallbackSource
from buildkit.image.save import SaveSource
from buildkit.image.source import ImageSource, LayerStream
from buildkit.image.streams import tar_of
from buildkit.image.transports import Location, open_source
from buildkit.model import Digest, Platform

Members = list[tuple[str, bytes | str]]


def drain(stream: LayerStream, step: int = 10_007) -> bytes:
    out = bytearray()
    while data := stream.read(step):
        out += data
    return bytes(out)


def read_all(source: ImageSource, wanted: Sequence[int] | None = None) -> dict[int, bytes]:
    """Tars by index, each by way of ``stream``."""
    out = {}
    for stream in source.stream(range(len(source.layers)) if wanted is None else wanted):
        with tar_of(stream) as tar:
            assert stream.index not in out
            out[stream.index] = drain(tar)
    return out


def expect(source: ImageSource, image: Sample, wanted: Sequence[int] | None = None) -> None:
    got = read_all(source, wanted)
    places = range(len(image.layers)) if wanted is None else sorted(wanted)
    distinct: dict[bytes, int] = {}
    for index in places:
        distinct.setdefault(image.layers[index], index)
    assert {index: sha(data) for index, data in got.items()} == {i: sha(data) for data, i in distinct.items()}
    assert source.config().raw == image.config
    assert source.image_id.hex == image.image_id
    if source.random_access:
        for index in range(len(image.layers)):
            with tar_of(source.open(index)) as tar:
                assert drain(tar) == image.layers[index]


def with_gzip(members: Members) -> Members:
    """Layers compressed in place, as some writers of docker-archives do."""
    return [(n, gzip.compress(d, 1) if n.endswith("layer.tar") and isinstance(d, bytes) else d) for n, d in members]


FORMS: dict[str, tuple[str, Callable[[Sample], Members]]] = {
    "docker 20.10": ("docker-archive", legacy_members),
    "docker 20.10 with compressed layers": ("docker-archive", lambda i: with_gzip(legacy_members(i))),
    "docker 25, graph driver": ("docker-archive", lambda i: layout_members(i, compressed=False)),
    "docker 25, containerd": ("docker-archive", lambda i: layout_members(i, compressed=True)),
    "manifest first": ("docker-archive", lambda i: legacy_members(i)[::-1]),
    "oci": ("oci-archive", lambda i: layout_members(i, compressed=True, docker=False)),
    "oci, plain layers": ("oci-archive", lambda i: layout_members(i, compressed=False, docker=False)),
    "oci, nested index": ("oci-archive", lambda i: layout_members(i, compressed=True, nested=True)),
    "oci, no tag": ("oci-archive", lambda i: layout_members(i, compressed=True, tag=None)),
}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("name", FORMS)
def test_every_archive_form_gives_the_same_image(name: str, form: int, tmp_path: Path) -> None:
    transport, make = FORMS[name]
    image = sample()
    (tmp_path / "a.tar").write_bytes(tar_members(make(image), form=form))
    with open_source(f"{transport}:{tmp_path / 'a.tar'}") as source:
        expect(source, image)
        expect(source, image, [2])
        expect(source, image, [])


def test_what_is_passed_on_and_what_is_compressed(tmp_path: Path) -> None:
    image = sample()
    kinds = {}
    for name, (transport, make) in FORMS.items():
        (tmp_path / "a.tar").write_bytes(tar_members(make(image)))
        with open_source(f"{transport}:{tmp_path / 'a.tar'}") as source, source.open(1) as stream:
            kinds[name] = (stream.kind, source.manifest is not None)
    assert kinds["docker 25, containerd"] == ("blob", True), "compressed blobs go on byte for byte"
    assert kinds["docker 25, graph driver"] == ("tar", False), "plain layers are compressed first"
    assert kinds["docker 20.10 with compressed layers"] == ("tar", False), "nothing describes those blobs"
    assert kinds["oci"] == kinds["oci, plain layers"] == ("blob", True), "a layout keeps its manifest"


def test_a_layout_in_a_folder_offers_its_blobs_where_they_lie(tmp_path: Path) -> None:
    image = sample()
    write_layout(tmp_path / "layout", layout_members(image, compressed=True, docker=False))
    with open_source(f"oci:{tmp_path / 'layout'}:one") as source:
        expect(source, image)
        with source.local_blob(1) as blob:  # type: ignore[attr-defined]
            blob.verify()
            assert blob.state().descriptor == source.layers[1].blob
    with pytest.raises(UsageError, match="has no image 'two'"):
        open_source(f"oci:{tmp_path / 'layout'}:two")
    digest = json.loads((tmp_path / "layout" / "index.json").read_bytes())["manifests"][0]["digest"]
    with open_source(f"oci:{tmp_path / 'layout'}:{digest}") as source:
        expect(source, image)


# Several images and platforms ----------------------------------------------------------------------------------------


def two_images() -> Members:
    one, two = sample(tags=("app:one",)), sample(tags=("example.org:5000/team/app:two", "app:three"), seed=7)
    first, second = legacy_members(one), legacy_members(two)
    listing = [json.loads(m[-2][1])[0] for m in (first, second)]
    members = dict(first[:-2] + second[:-2])
    return [*members.items(), ("manifest.json", compact(listing))]


def test_an_archive_with_several_images_needs_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_members(two_images()))
    with pytest.raises(UsageError, match=r"several images.*app:one; example.org:5000/team/app:two, app:three"):
        open_source(f"docker-archive:{tmp_path}/a.tar")
    two = sample(seed=7)
    for name in ("example.org:5000/team/app:two", "app:three", "docker.io/library/app:three", "@1"):
        with open_source(f"docker-archive:{tmp_path}/a.tar:{name}") as source:
            expect(source, two)
    for name in ("app", "app:four", "@2", "@-1", "@x"):
        with pytest.raises(UsageError, match="has no image"):
            open_source(f"docker-archive:{tmp_path}/a.tar:{name}")


def platforms(tag: str | None = "one") -> Members:
    """A multi-platform image as buildx writes it, with an attestation."""
    amd, arm = sample(), sample(seed=9)
    blobs: dict[str, bytes | str] = {}
    entries = []
    for image, platform in ((amd, "amd64"), (arm, "arm64")):
        members = layout_members(
            image, compressed=True, docker=False, tag=None, platform={"os": "linux", "architecture": platform}
        )
        index = json.loads(dict(members)["index.json"])
        entries += index["manifests"]
        blobs |= {n: d for n, d in members if n.startswith("blobs/")}
    unknown = entries[0] | {
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    inner = compact({"schemaVersion": 2, "manifests": [*entries, unknown]})
    blobs[f"blobs/sha256/{sha(inner)}"] = inner
    top: dict[str, Any] = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": f"sha256:{sha(inner)}",
        "size": len(inner),
    }
    if tag:
        top["annotations"] = {"org.opencontainers.image.ref.name": tag}
    return [*blobs.items(), ("index.json", compact({"schemaVersion": 2, "manifests": [top]})), ("oci-layout", b"{}")]


def test_a_platform_is_chosen_from_a_nested_index(tmp_path: Path) -> None:
    write_layout(tmp_path / "l", platforms())
    with open_source(f"oci:{tmp_path / 'l'}") as source:
        expect(source, sample())
    with open_source(f"oci:{tmp_path / 'l'}", platform=Platform.parse("linux/arm64")) as source:
        expect(source, sample(seed=9))
    with pytest.raises(UsageError, match=r"no image for linux/s390x.*linux/amd64, linux/arm64"):
        open_source(f"oci:{tmp_path / 'l'}", platform=Platform.parse("linux/s390x"))


def test_an_index_that_contains_itself_ends(tmp_path: Path) -> None:
    members = platforms()
    inner = compact({"schemaVersion": 2, "manifests": []})
    for _ in range(10):
        inner = compact(
            {
                "schemaVersion": 2,
                "manifests": [
                    {
                        "mediaType": "application/vnd.oci.image.index.v1+json",
                        "digest": f"sha256:{sha(inner)}",
                        "size": len(inner),
                    }
                ],
            }
        )
        members.append((f"blobs/sha256/{sha(inner)}", inner))
    members = [m for m in members if m[0] != "index.json"] + [("index.json", inner)]
    write_layout(tmp_path / "l", members)
    with pytest.raises(FormatError, match="within each other"):
        open_source(f"oci:{tmp_path / 'l'}")


# Damage --------------------------------------------------------------------------------------------------------------


def attempt(text: str, image: Sample, **options: Any) -> bool:
    """Whether the image was read completely and right; damage must be a BuildkitError of one line."""
    try:
        with open_source(text, **options) as source:
            expect(source, image)
    except BuildkitError as error:
        message = str(error)
    else:
        return True
    assert "\n" not in message
    return False


@pytest.mark.parametrize("name", FORMS)
def test_an_archive_truncated_at_any_64_kib_boundary_is_an_error(name: str, tmp_path: Path) -> None:
    transport, make = FORMS[name]
    image = sample(size=400_000)
    whole = tar_members(make(image))
    end = len(whole.rstrip(b"\0")) + 512
    path = tmp_path / "a.tar"
    for cut in [*range(0, len(whole), 65536), 1, 511, 512, 513, 1024, end - 1000]:
        path.write_bytes(whole[:cut])
        assert attempt(f"{transport}:{path}", image) is False, cut
    path.write_bytes(whole)
    assert attempt(f"{transport}:{path}", image)


@pytest.mark.parametrize("name", ["docker 20.10", "docker 25, graph driver", "docker 25, containerd", "oci"])
@given(at=st.floats(0, 0.9999), value=st.integers(1, 255))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_an_error_or_changes_nothing(name: str, at: float, value: int, tmp_path: Path) -> None:
    transport, make = FORMS[name]
    image = sample(size=3000)
    raw = bytearray(tar_members(make(image)))
    raw[int(at * len(raw))] ^= value
    (tmp_path / "a.tar").write_bytes(raw)
    attempt(f"{transport}:{tmp_path}/a.tar", image)  # raises AssertionError for content that differs


def changed(members: Members, change: Callable[[str, bytes | str], tuple[str, bytes | str] | None]) -> Members:
    return [new for name, data in members if (new := change(name, data)) is not None]


def test_traversal_in_an_archive_is_refused(tmp_path: Path) -> None:
    for bad in ("../evil", "/etc/evil", "a/../../evil", ".."):
        (tmp_path / "a.tar").write_bytes(tar_members([*legacy_members(sample()), (bad, b"x")]))
        with pytest.raises(FormatError, match="outside the archive"):
            open_source(f"docker-archive:{tmp_path}/a.tar")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "layer.tar", "../nowhere/layer.tar"])
def test_links_that_lead_out_or_in_circles_or_nowhere_are_errors(target: str, tmp_path: Path) -> None:
    members = changed(legacy_members(sample()), lambda n, d: (n, target) if n.endswith("layer.tar") else (n, d))
    (tmp_path / "a.tar").write_bytes(tar_members(members))
    with pytest.raises(ImageError):
        open_source(f"docker-archive:{tmp_path}/a.tar")


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    image = sample()
    members = [m for m in legacy_members(image) if m[1] != image.layers[1]]
    (tmp_path / "a.tar").write_bytes(tar_members(members))
    with pytest.raises(NotFoundError, match="lacks layer 2"):
        open_source(f"docker-archive:{tmp_path}/a.tar")
    layout = layout_members(image, compressed=False, docker=False)
    write_layout(tmp_path / "l", [m for m in layout if m[1] != image.layers[1]])
    with open_source(f"oci:{tmp_path}/l") as source, pytest.raises(NotFoundError, match="lacks layer 2"):
        source.open(1)


def test_a_diff_id_that_does_not_match_is_an_error(tmp_path: Path) -> None:
    image = sample()
    other = Sample(layers=(*image.layers[:3], make_tar({"c": b"changed"})), config=image.config)
    for name, (transport, make) in FORMS.items():
        (tmp_path / "a.tar").write_bytes(tar_members(make(other)))
        with (
            open_source(f"{transport}:{tmp_path}/a.tar") as source,
            pytest.raises(DigestMismatchError, match="layer 4"),
        ):
            read_all(source)
        assert name


def test_a_manifest_that_lies_about_sizes_or_counts_is_an_error(tmp_path: Path) -> None:
    image = sample()

    def lie(change: Callable[[dict[str, Any]], None]) -> Path:
        members = dict(layout_members(image, compressed=True, docker=False))
        index = json.loads(members["index.json"])
        entry = index["manifests"][0]
        manifest = json.loads(members.pop("blobs/sha256/" + entry["digest"][7:]))
        change(manifest)
        raw = compact(manifest)
        members["blobs/sha256/" + sha(raw)] = raw
        entry |= {"digest": f"sha256:{sha(raw)}", "size": len(raw)}
        members["index.json"] = compact(index)
        shutil.rmtree(tmp_path / "l", ignore_errors=True)
        return write_layout(tmp_path / "l", list(members.items()))

    for wrong in (0, 1, 10**6, 2**62):
        lie(lambda m, wrong=wrong: m["layers"][1].update(size=wrong))  # type: ignore[misc]
        with open_source(f"oci:{tmp_path}/l") as source, pytest.raises(FormatError, match="its descriptor says"):
            source.open(1)
        lie(lambda m, wrong=wrong: m["config"].update(size=wrong))  # type: ignore[misc]
        with pytest.raises(FormatError, match="its descriptor says"):
            open_source(f"oci:{tmp_path}/l")
    for bad in (-1, 2**63, "7", None, True, 1.5):
        lie(lambda m, bad=bad: m["layers"][1].update(size=bad))  # type: ignore[misc]
        with pytest.raises(FormatError, match="size"):
            open_source(f"oci:{tmp_path}/l")
    lie(lambda m: m["layers"].pop())
    with pytest.raises(FormatError, match="3 layers, config has 4"):
        open_source(f"oci:{tmp_path}/l")
    lie(lambda m: m["layers"][0].update(digest="sha256:../../etc/passwd"))
    with pytest.raises(FormatError, match="is not a digest"):
        open_source(f"oci:{tmp_path}/l")


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"[{}]",
    b"[" * 200_000,
    b'[{"Config": 1}]',
    b'[{"Config": "x", "Layers": [1]}]',
    b'[{"Config": "../../etc/passwd", "Layers": []}]',
    b'[{"Config": "/etc/passwd", "Layers": []}]',
    b'[{"Config": "", "Layers": []}]',
    b'[{"Config": "manifest.json", "Layers": ["manifest.json"], "RepoTags": "x"}]',
    b"\xff\xfe\x00",
    b'{"schemaVersion": 2, "manifests": [{}]}',
    b'{"schemaVersion": 2, "manifests": {"a": 1}}',
    b'{"schemaVersion": 2, "manifests": [{"mediaType": "x", "size": 1, "digest": "sha256:' + b"0" * 64 + b'"}]}',
]


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_json_is_an_error_of_one_line(raw: bytes, tmp_path: Path) -> None:
    image = sample()
    for form, file in (
        ("docker-archive", "manifest.json"),
        ("docker-archive", "index.json"),
        ("oci-archive", "index.json"),
    ):
        members = layout_members(image, compressed=False)
        members = changed(members, lambda n, d, file=file: (n, raw) if n == file else (n, d))  # type: ignore[misc]
        (tmp_path / "a.tar").write_bytes(tar_members(members))
        usable = attempt(f"{form}:{tmp_path}/a.tar", image)
        # A docker-archive whose index points at nothing is still whole by its manifest.json.
        assert not usable or (form, file) == ("docker-archive", "index.json")


def test_a_fifo_in_a_layout_does_not_hang(tmp_path: Path) -> None:
    import os

    write_layout(tmp_path / "l", layout_members(sample(), compressed=True, docker=False))
    (tmp_path / "l" / "index.json").unlink()
    os.mkfifo(tmp_path / "l" / "index.json")
    with pytest.raises(FormatError, match="not a regular file"):
        open_source(f"oci:{tmp_path}/l")


def test_compressed_archives_are_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_members(legacy_members(sample()))))
    with pytest.raises(UsageError, match="gunzip"):
        open_source(f"docker-archive:{tmp_path}/a.tar.gz")


# The engine's stream -------------------------------------------------------------------------------------------------

STREAMS: dict[str, Callable[[Sample], Members]] = {
    "20.10": legacy_members,
    "20.10, unknown ids": lambda i: legacy_members(i, ids="random"),
    "20.10, compressed": lambda i: with_gzip(legacy_members(i)),
    "20.10, json last": lambda i: sorted(legacy_members(i), key=lambda m: m[0].endswith("/json")),
    "25": lambda i: layout_members(i, compressed=False),
    "25, reversed": lambda i: layout_members(i, compressed=False)[::-1],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_save_stream_gives_the_image_in_any_order_of_members(name: str) -> None:
    image = sample()
    with serving(FakeEngine()) as fake:
        fake.add("sample:one", image, tar_members(STREAMS[name](image)))
        for wanted in (None, [0, 1, 2, 3], [1], [2], [3, 0], []):
            with open_source("sample:one", engine_host=fake.host) as source:
                assert source.method == "save"
                assert "is not on this machine" in source.reason
                assert not source.random_access
                expect(source, image, wanted)


def test_containerd_s_store_is_passed_on_as_blobs() -> None:
    image = sample()
    members = layout_members(image, compressed=True)
    manifest = json.loads(dict(members)["index.json"])["manifests"][0]["digest"].removeprefix("sha256:")
    for order in (members, members[::-1]):
        with serving(FakeEngine(containerd=True)) as fake:
            fake.add("sample:one", image, tar_members(order), identity=manifest)
            with open_source("sample:one", engine_host=fake.host) as source:
                assert source.manifest is not None
                assert source.manifest.digest.hex == manifest
                assert all(layer.blob for layer in source.layers)
                expect(source, image)


@pytest.mark.parametrize("plain", [(0, 2), (1,), (1, 3), (0, 1, 2, 3)])
def test_plain_and_compressed_layers_may_be_mixed(plain: tuple[int, ...], tmp_path: Path, socket_path: Path) -> None:
    image = sample()
    members = layout_members(image, compressed=True, plain=plain)
    manifest = json.loads(dict(members)["index.json"])["manifests"][0]["digest"].removeprefix("sha256:")
    write_layout(tmp_path / "containerd" / "daemon" / "io.containerd.content.v1.content", members)
    (tmp_path / "a.tar").write_bytes(tar_members(members))
    with serving(FakeEngine(containerd=True, data_root=str(tmp_path)), unix=socket_path) as fake:
        fake.add("sample:one", image, tar_members(members), identity=manifest)
        for text, method in (
            ("sample:one", "save"),
            ("sample:one", "direct"),
            (f"docker-archive:{tmp_path}/a.tar", "auto"),
        ):
            with open_source(text, engine_host=fake.host, method=method) as source:
                assert [layer.blob is None for layer in source.layers] == [index in plain for index in range(4)]
                assert source.manifest is None
                expect(source, image)


@pytest.mark.parametrize("name", STREAMS)
def test_a_save_stream_that_breaks_off_is_an_error(name: str) -> None:
    image = sample(size=200_000)
    archive = tar_members(STREAMS[name](image))
    with serving(FakeEngine()) as fake:
        fake.add("sample:one", image, archive)
        needed = len(archive.rstrip(b"\0")) - 2500  # what lies behind (manifest.json, repositories) may not be needed
        for cut in range(0, needed, 65536):
            fake.cut = cut
            assert attempt("sample:one", image, engine_host=fake.host) is False, cut
        fake.cut = None
        for end in range(0, needed, 65536):
            fake.archives["sample:one"] = lambda end=end: archive[:end]  # type: ignore[misc]
            assert attempt("sample:one", image, engine_host=fake.host) is False, end


def test_a_layer_that_the_stream_lacks_is_named() -> None:
    image = sample()
    with serving(FakeEngine()) as fake:
        fake.add("sample:one", image, tar_members([m for m in legacy_members(image) if m[1] != image.layers[1]]))
        with (
            open_source("sample:one", engine_host=fake.host) as source,
            pytest.raises(NotFoundError, match="lacks layer 2"),
        ):
            read_all(source)


def test_a_wrong_layer_in_the_stream_is_found() -> None:
    image = sample()
    for make in STREAMS.values():
        wrong = changed(make(image), lambda n, d: (n, b"x" * 20_000) if d == image.layers[3] else (n, d))
        with serving(FakeEngine()) as fake:
            fake.add("sample:one", image, tar_members(wrong))
            if wrong != make(image):
                assert attempt("sample:one", image, engine_host=fake.host) is False


def test_engine_errors_are_ours() -> None:
    with serving(FakeEngine()) as fake:
        with pytest.raises(UsageError, match=r"no image 'nope'.*oci:DIR"):
            open_source("nope", engine_host=fake.host)
        fake.add("sample:one", sample(), b"")
        with pytest.raises(NotDirectError, match="not on this machine"):
            open_source("sample:one", engine_host=fake.host, method="direct")
        with pytest.raises(UsageError, match="is for linux/amd64"):
            open_source("sample:one", engine_host=fake.host, platform=Platform.parse("linux/arm64"))
        fake.answer = lambda path: (502, b"<html>bad gateway</html>", "text/html")  # type: ignore[method-assign]
        with pytest.raises(MissingComponentError, match="no container engine"):
            open_source("sample:one", engine_host=fake.host)
    with pytest.raises(MissingComponentError, match="no container engine answers"):
        open_source("sample:one", engine_host="unix:///nonexistent.sock")


# The engine's data root ----------------------------------------------------------------------------------------------


def direct(root: Path, image: Sample) -> DirectSource:
    return DirectSource(root, Digest("sha256", image.image_id), name="docker-daemon:sample:one")


def test_layers_are_put_together_byte_for_byte(tmp_path: Path) -> None:
    image = sample(
        layers=[make_tar({"a/": b"", "a/b/": b"", "a/b/c": b"1" * 5000, "a/d": b"", "z": b"2"}), make_tar({})]
    )
    with direct(write_data_root(tmp_path, image), image) as source:
        expect(source, image)
        with source.open(0) as stream:
            assert drain(stream, 7) == image.layers[0]
    shutil.rmtree(tmp_path / "overlay2")
    with pytest.raises(FileNotFoundError):
        direct(tmp_path, image)


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    image = sample(layers=[make_tar({"x": b"content"})])
    root = write_data_root(tmp_path, image)
    split = next(root.rglob("tar-split.json.gz"))
    lines = gzip.decompress(split.read_bytes()).replace(b'"name":"x"', b'"name_raw":"/w=="')
    split.write_bytes(gzip.compress(lines))
    folder = next(root.glob("overlay2/*/diff"))
    (folder / "x").rename(str(folder) + "/\udcff")
    with direct(root, image) as source:
        expect(source, image)


def harm_missing(folder: Path, split: Path) -> None:
    (folder / "dir" / "big").unlink()


def harm_shorter(folder: Path, split: Path) -> None:
    (folder / "dir" / "big").write_bytes(b"x")


def harm_content(folder: Path, split: Path) -> None:
    (folder / "dir" / "small").write_bytes(b"y" * 513)


def harm_symlink(folder: Path, split: Path) -> None:
    (folder / "dir" / "small").unlink()
    (folder / "dir" / "small").symlink_to("/etc/hostname")


def harm_symlinked_folder(folder: Path, split: Path) -> None:
    shutil.move(folder / "dir", folder.parent / "elsewhere")
    (folder / "dir").symlink_to("../elsewhere")


def harm_fifo(folder: Path, split: Path) -> None:
    import os

    (folder / "dir" / "small").unlink()
    os.mkfifo(folder / "dir" / "small")


def harm_split(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda folder, split: split.write_bytes(gzip.compress(change(gzip.decompress(split.read_bytes()))))


HARM: dict[str, Callable[[Path, Path], object]] = {
    "a file is gone": harm_missing,
    "a file is shorter": harm_shorter,
    "a file has other content": harm_content,
    "a file is a symlink": harm_symlink,
    "a folder is a symlink": harm_symlinked_folder,
    "a file is a fifo": harm_fifo,
    "a name leaves the folder": harm_split(lambda d: d.replace(b'"dir/small"', b'"dir/../../../../etc/hostname"')),
    "an absolute name": harm_split(lambda d: d.replace(b'"dir/small"', b'"/etc/hostname"')),
    "no JSON": harm_split(lambda d: d.replace(b'{"type":1', b'{"type":')),
    "another type": harm_split(lambda d: d.replace(b'{"type":1', b'{"type":3')),
    "a negative size": harm_split(lambda d: d.replace(b'"size":513', b'"size":-1')),
    "a line is not an object": harm_split(lambda d: b"[]\n" + d),
    "bad base64": harm_split(lambda d: d.replace(b'"payload":"', b'"payload":"?', 1)),
    "deep JSON": harm_split(lambda d: b"[" * 100_000 + b"\n" + d),
    "lines are missing": harm_split(lambda d: b"".join(d.splitlines(True)[:-1])),
    "nothing": harm_split(lambda d: b""),
    "no gzip": lambda folder, split: split.write_bytes(b"\x1f\x8bxx"),
    "cut gzip": lambda folder, split: split.write_bytes(split.read_bytes()[:-9]),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_harmed_data_root_is_not_read_directly_and_docker_save_takes_over(harm: str, tmp_path: Path) -> None:
    image = sample()
    root = write_data_root(tmp_path, image)
    folder = next(p for p in root.glob("overlay2/*/diff") if (p / "dir").exists())
    cache_id = folder.parent.name
    split = next(p for p in root.rglob("tar-split.json.gz") if (p.parent / "cache-id").read_text() == cache_id)
    HARM[harm](folder, split)
    with direct(root, image) as source, pytest.raises(NotDirectError, match="layer 2"):
        read_all(source)
    with serving(FakeEngine()) as fake:
        fake.add("sample:one", image, tar_members(legacy_members(image)))

        def reopen() -> SaveSource:
            engine = Engine.connect(fake.host)
            return SaveSource(engine, engine.inspect("sample:one"), name="sample:one", release=engine.close)

        with FallbackSource(direct(root, image), reopen) as rescued:
            if harm == "a file has other content":
                # It is noticed at the end, when wrong bytes have been handed out: then nothing can be saved.
                with pytest.raises(NotDirectError, match="differs from what docker save gives"):
                    expect(rescued, image)
            else:
                expect(rescued, image)
                assert "then docker save, because" in rescued.reason


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("cache-id", "../../../etc"),
        ("cache-id", ""),
        ("cache-id", "x" * 300),
        ("diff", "sha256:" + "0" * 64),
        ("diff", ""),
    ],
)
def test_a_layer_entry_of_another_form_is_not_read(file: str, content: str, tmp_path: Path) -> None:
    image = sample()
    root = write_data_root(tmp_path, image)
    next(root.rglob(f"layerdb/sha256/*/{file}")).write_text(content)
    with pytest.raises(NotDirectError):
        direct(root, image)


def test_a_config_of_another_image_is_not_read(tmp_path: Path) -> None:
    image = sample()
    root = write_data_root(tmp_path, image)
    next(root.rglob("imagedb/content/sha256/*")).write_bytes(image.config + b" ")
    with pytest.raises(DigestMismatchError):
        direct(root, image)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are too long for a socket's name
        yield Path(folder) / "engine.sock"


def test_an_engine_of_this_machine_is_read_directly_or_the_reason_is_told(tmp_path: Path, socket_path: Path) -> None:
    image = sample()
    archive = tar_members(legacy_members(image))
    root = write_data_root(tmp_path, image)
    with serving(FakeEngine(data_root=str(root)), unix=socket_path) as fake:
        fake.add("sample:one", image, archive)
        for method in ("auto", "direct"):
            with open_source("sample:one", engine_host=fake.host, method=method) as source:
                assert source.method == "direct"
                expect(source, image)
        with open_source("sample:one", engine_host=fake.host, method="save") as source:
            assert (source.method, source.reason) == ("save", "asked for")
            expect(source, image)
        fake.driver = "btrfs"
        with open_source("sample:one", engine_host=fake.host) as source:
            assert (source.method, source.reason) == ("save", "the engine's storage driver is btrfs, not overlay2")
            expect(source, image)
        with pytest.raises(NotDirectError, match="btrfs"):
            open_source("sample:one", engine_host=fake.host, method="direct")
        fake.driver = "overlay2"
        shutil.rmtree(root / "image" / "overlay2" / "layerdb")
        with open_source("sample:one", engine_host=fake.host) as source:
            assert source.method == "save"
            assert "cannot be read: No such file or directory" in source.reason
            expect(source, image)


def test_containerd_s_content_store_is_read_directly(tmp_path: Path, socket_path: Path) -> None:
    image = sample()
    for compressed in (True, False):
        members = layout_members(image, compressed=compressed, docker=False)
        manifest = json.loads(dict(members)["index.json"])["manifests"][0]["digest"].removeprefix("sha256:")
        store = tmp_path / str(compressed) / "containerd" / "daemon" / "io.containerd.content.v1.content"
        write_layout(store, [m for m in members if m[0].startswith("blobs/")])
        with serving(FakeEngine(containerd=True, data_root=str(tmp_path / str(compressed))), unix=socket_path) as fake:
            fake.add("sample:one", image, tar_members(layout_members(image, compressed=compressed)), identity=manifest)
            with open_source("sample:one", engine_host=fake.host) as source:
                assert source.method == "direct"
                assert (source.manifest is not None) == compressed, "plain layers are compressed first"
                expect(source, image)
            next(p for p in store.rglob("*") if p.is_file() and p.stat().st_size > 100_000).unlink()
            with open_source("sample:one", engine_host=fake.host) as source:
                assert source.method == "save"
                assert "lacks layer" in source.reason
                expect(source, image)
        socket_path.unlink()


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    import os

    image = sample()
    root = write_data_root(tmp_path, image)
    before = len(os.listdir("/proc/self/fd"))
    with direct(root, image) as source:
        for _ in range(3):
            with source.open(1) as stream:
                stream.read(200)
            with source.open(1) as stream:
                drain(stream)
    assert len(os.listdir("/proc/self/fd")) == before


# Names of places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("app", "docker-daemon:app"),
        ("app:sm70", "docker-daemon:app:sm70"),
        ("localhost:5000/app", "docker-daemon:localhost:5000/app"),
        ("git.example.org/team/app:sm70", "docker-daemon:git.example.org/team/app:sm70"),
        ("docker-daemon:app:x", "docker-daemon:app:x"),
        ("c11ca6c5c5ff", "docker-daemon:c11ca6c5c5ff"),
        ("sha256:" + "0" * 64, "docker-daemon:sha256:" + "0" * 64),
        ("docker-archive:/x/a.tar", "docker-archive:/x/a.tar"),
        ("docker-archive:/x/a.tar:host:5000/app:tag", "docker-archive:/x/a.tar:host:5000/app:tag"),
        ("docker-archive:-", "docker-archive:-"),
        ("oci:dir:tag", "oci:dir:tag"),
        ("oci-archive:a.tar:tag", "oci-archive:a.tar:tag"),
        ("docker://example.org/app", "docker://example.org/app:latest"),
    ],
)
def test_places_parse(text: str, shown: str) -> None:
    assert str(Location.parse(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        *(
            "http://x/y",
            "https://x",
            "dir:/x",
            "containers-storage:x",
            "docker:x",
            "foo:bar:baz",
            "x://y",
            "tarball:/x",
        ),
        *("oci:", "oci:dir:", "oci-archive:", "docker-archive:", "docker-daemon:", "foo:./bar"),
    ],
)
def test_unknown_places_are_named_with_the_list_of_transports(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse(text)
    assert text in str(caught.value)
    assert "oci-archive:FILE.tar" in str(caught.value)


@pytest.mark.parametrize("text", ["", "UPPER", "a b", "app:", "app:tag with space", "-", "a//b", "app@sha256:1"])
def test_impossible_names_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        Location.parse(text)


def test_missing_files_are_usage_errors(tmp_path: Path) -> None:
    for text in ("oci:{}/no", "oci-archive:{}/no", "docker-archive:{}/no", "docker-archive:{}", "oci-archive:{}"):
        with pytest.raises(UsageError, match=str(tmp_path)):
            open_source(text.format(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not an OCI layout"):
        open_source(f"oci:{tmp_path}/empty")
    with pytest.raises(UsageError, match="is for the engine's images"):
        open_source(f"oci:{tmp_path}/empty", method="direct")
    with pytest.raises(UsageError, match="is not known"):
        open_source("app", method="fast")


def test_a_colon_belongs_to_the_path_where_such_a_file_exists(tmp_path: Path) -> None:
    write_layout(tmp_path / "a:b", layout_members(sample(), compressed=True, docker=False))
    with open_source(f"oci:{tmp_path}/a:b") as source:
        expect(source, sample())


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = sample()

    class Stdin:
        buffer = io.BytesIO(tar_members(legacy_members(image)))

    monkeypatch.setattr("sys.stdin", Stdin)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with open_source("docker-archive:-") as source:
        expect(source, image)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_save_is_read_once(tmp_path: Path) -> None:
    image = sample()
    with serving(FakeEngine()) as fake:
        fake.add("sample:one", image, tar_members(legacy_members(image)))
        with open_source("sample:one", engine_host=fake.host) as source:
            with pytest.raises(EngineError, match="was not read to its end"):
                source.config()
            with pytest.raises(EngineError, match="cannot be opened on its own"):
                source.open(0)
