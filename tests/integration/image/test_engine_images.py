"""Images of a real engine: its data root, its save stream and its load, against layers whose every byte is known."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from buildkit.engine import Engine
from buildkit.errors import BuildkitError, EngineError, NotFoundError, UsageError
from buildkit.image.compress import DEFAULT_CODEC, Compressor, compress_bytes
from buildkit.image.direct import DirectSource, NotDirectError
from buildkit.image.fallback import FallbackSource
from buildkit.image.source import ImageSource, LayerStream
from buildkit.image.streams import tar_of
from buildkit.image.transports import open_source
from buildkit.image.write import OutputImage, write_image
from buildkit.model import OCI_CONFIG, OCI_LAYER_GZIP, Descriptor, Digest, ImageConfig, Manifest


def entry(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mtime = 1_700_000_000
    for key, value in fields.items():
        setattr(member, key, value)
    return member, data


def layer(entries: Sequence[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as tar:
        for member, data in entries:
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def odd_layers() -> list[bytes]:
    """What real layers have beside plain files; the third repeats the first."""
    block = hashlib.sha256(b"x").digest() * 4096
    first = layer(
        [
            entry("bin/", type=tarfile.DIRTYPE, mode=0o755),
            entry("bin/tool", block, mode=0o4755),
            entry("bin/link", type=tarfile.SYMTYPE, linkname="tool"),
            entry("bin/hard", type=tarfile.LNKTYPE, linkname="bin/tool"),
            entry("bin/empty"),
            entry("pipe", type=tarfile.FIFOTYPE),
            entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("sticky/", type=tarfile.DIRTYPE, mode=0o1777, uid=3_000_000, gid=7),
            entry("sticky/" + "long" * 30 + "/", type=tarfile.DIRTYPE),
            entry("sticky/" + "long" * 30 + "/" + "name" * 50, b"deep"),
            entry("naïve", b"utf-8", pax_headers={"mtime": "1700000000.123456789"}),
            entry("attr", b"x", pax_headers={"SCHILY.xattr.user.test": "value"}),
        ]
    )
    second = layer(
        [
            entry("bin/.wh.link"),
            entry("sticky/.wh..wh..opq"),
            entry("\udcff\udcfe", b"not utf-8"),
            entry("many/", type=tarfile.DIRTYPE),
            *(entry(f"many/{n:04}", b"%d" % n * (n % 300)) for n in range(500)),
        ],
        tarfile.GNU_FORMAT,
    )
    return [first, second, first, layer([])]


def archive(layers: Sequence[bytes], name: str) -> tuple[bytes, bytes]:
    """A docker-archive and the config in it."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {"Cmd": ["/bin/tool"], "Labels": {"unique": name}},
            "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(data)) for data in layers]},
        }
    ).encode()
    members = [("config.json", config)] + [(f"{n}/layer.tar", data) for n, data in enumerate(layers)]
    listing = [{"Config": "config.json", "RepoTags": [name], "Layers": [name for name, _ in members[1:]]}]
    return layer([entry(n, data) for n, data in [*members, ("manifest.json", json.dumps(listing).encode())]]), config


@pytest.fixture
def name(engine: Engine) -> Iterator[str]:
    """A name that is free, and free again afterwards."""
    chosen = f"buildkit-test-{uuid.uuid4().hex[:12]}:one"
    yield chosen
    try:
        engine.remove(chosen)
    except NotFoundError:
        return


def drain(stream: LayerStream) -> bytes:
    data = bytearray()
    while piece := stream.read(1 << 20):
        data += piece
    return bytes(data)


def tars(source: ImageSource, wanted: Sequence[int]) -> dict[int, bytes]:
    out = {}
    for stream in source.stream(wanted):
        with tar_of(stream) as tar:
            out[stream.index] = drain(tar)
    return out


def test_direct_and_save_give_the_layers_that_were_loaded_byte_for_byte(
    engine: Engine, engine_host: str, name: str
) -> None:
    layers = odd_layers()
    packed, config = archive(layers, name)
    engine.load(io.BytesIO(packed))
    image = engine.inspect(name)
    assert image.diff_ids == tuple(Digest.of(data) for data in layers)
    assert image.labels == {"unique": name}
    for method in ("direct", "save", "auto"):
        with open_source(name, engine_host=engine_host, method=method) as source:
            assert source.method == ("direct" if method == "auto" else method)
            assert tars(source, range(4)) == {0: layers[0], 1: layers[1], 3: layers[3]}
            assert source.config().raw == config
            assert source.image_id == Digest.of(config)
        with open_source(name, engine_host=engine_host, method=method) as source:
            assert tars(source, [2]) == {2: layers[2]}


def test_an_image_is_found_by_its_id_too(engine: Engine, engine_host: str, name: str) -> None:
    packed, config = archive(odd_layers(), name)
    engine.load(io.BytesIO(packed))
    image = engine.inspect(name)
    assert engine.info.containerd_store or image.id == Digest.of(config)
    for text in (str(image.id), image.id.hex, image.id.short, f"docker-daemon:{name}"):
        with open_source(text, engine_host=engine_host) as source:
            assert source.image_id == Digest.of(config), "the same id in every transport and store"


def test_layers_are_compressed_to_the_same_blobs_by_both_ways(engine: Engine, engine_host: str, name: str) -> None:
    layers = odd_layers()
    engine.load(io.BytesIO(archive(layers, name)[0]))
    expected = {index: compress_bytes(data) for index, data in enumerate(layers) if index != 2}
    for method in ("direct", "save"):
        got = {}
        with open_source(name, engine_host=engine_host, method=method) as source, Compressor(2) as compressor:
            for stream in source.stream(range(4)):
                with stream:
                    blob = bytearray()
                    result = compressor.run(stream, blob.extend, DEFAULT_CODEC, hash_input=False)
                    assert result.digest == Digest.of(bytes(blob))
                    got[stream.index] = bytes(blob)
        assert got == expected


def test_an_image_removed_in_mid_read_is_an_error_and_not_a_wrong_layer(
    engine: Engine, engine_host: str, name: str
) -> None:
    # Nothing of it may be shared with another test's image, or the engine would keep the layer.
    unique = layer([entry(f"{n}", f"{name} {n}".encode() * 2000) for n in range(200)])
    engine.load(io.BytesIO(archive([unique], name)[0]))
    with open_source(name, engine_host=engine_host) as source, source.open(0) as stream:
        start = stream.read(100_000)
        engine.remove(name)
        if not engine.info.containerd_store:
            with pytest.raises((NotFoundError, EngineError)):
                drain(stream)
            return
        # A layer that is one file can be read to its end, open as it is.
        rest = drain(stream)
    assert gzip.decompress(start + rest) == unique if stream.kind == "blob" else start + rest == unique


def test_docker_save_takes_over_where_the_data_root_is_not_what_it_was(
    engine: Engine, engine_host: str, name: str, tmp_path: Path
) -> None:
    layers = odd_layers()
    engine.load(io.BytesIO(archive(layers, name)[0]))
    image = engine.inspect(name)
    if engine.info.containerd_store:
        with open_source(name, engine_host=engine_host, method="direct") as stored:
            assert tars(stored, [1]) == {1: layers[1]}
        return  # such layers are whole files; that a missing one leads to docker save is a unit test's
    root = copy_of_data_root(engine.info.data_root, image.id, tmp_path)
    with DirectSource(root, image.id, name=name) as direct:
        assert tars(direct, [1]) == {1: layers[1]}
    next(root.glob("overlay2/*/diff/many/0250")).unlink()
    with DirectSource(root, image.id, name=name) as direct:
        with pytest.raises(NotDirectError, match="No such file"):
            tars(direct, [1])

        def reopen() -> ImageSource:
            return open_source(name, engine_host=engine_host, method="save")

        with FallbackSource(direct, reopen) as source:  # type: ignore[arg-type]
            assert tars(source, range(4)) == {0: layers[0], 1: layers[1], 3: layers[3]}
            assert "then docker save, because" in source.reason


def copy_of_data_root(root: Path, image_id: Digest, target: Path) -> Path:
    """The parts that one image needs, files by content and everything else left out."""
    config = root / "image/overlay2/imagedb/content/sha256" / image_id.hex
    (target / config.relative_to(root)).parent.mkdir(parents=True)
    (target / config.relative_to(root)).write_bytes(config.read_bytes())
    chain = ""
    for diff_id in ImageConfig.parse(config.read_bytes(), where="t").diff_ids:
        chain = str(diff_id) if not chain else str(Digest.of(f"{chain} {diff_id}".encode()))
        entry_ = root / "image/overlay2/layerdb/sha256" / chain.removeprefix("sha256:")
        copy = target / entry_.relative_to(root)
        copy.mkdir(parents=True)
        for file in ("diff", "cache-id", "tar-split.json.gz"):
            (copy / file).write_bytes((entry_ / file).read_bytes())
        folder = root / "overlay2" / (entry_ / "cache-id").read_text() / "diff"
        for path in [folder, *folder.rglob("*")]:
            to = target / path.relative_to(root)
            if path.is_dir() and not path.is_symlink():
                to.mkdir(parents=True, exist_ok=True)
            elif path.is_file() and not path.is_symlink():
                to.write_bytes(path.read_bytes())
    return target


def output(layers: Sequence[bytes], name: str) -> OutputImage:
    blobs = {Digest.of(blob): blob for blob in (compress_bytes(data) for data in layers)}
    config = ImageConfig.parse(archive(layers, name)[1], where="t")
    manifest = Manifest.build(
        config=Descriptor(media_type=OCI_CONFIG, digest=config.digest, size=len(config.raw)),
        layers=[
            Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(blob), size=len(blob))
            for blob in (compress_bytes(data) for data in layers)
        ],
    )

    def opener(descriptor: Descriptor) -> BinaryIO:
        return io.BytesIO(blobs[descriptor.digest])

    return OutputImage(manifest=manifest, config=config, open_blob=opener)


def test_an_image_is_loaded_into_the_engine_and_comes_back_the_same(
    engine: Engine, engine_host: str, name: str
) -> None:
    layers = odd_layers()
    image = output(layers, name)
    assert write_image(f"docker-daemon:{name}", image, engine_host=engine_host) == f"docker-daemon:{name}"
    with open_source(name, engine_host=engine_host) as source:
        assert source.image_id == image.config.digest
        assert tars(source, range(4)) == {0: layers[0], 1: layers[1], 3: layers[3]}


def test_a_load_that_fails_in_the_middle_leaves_no_image(engine: Engine, engine_host: str, name: str) -> None:
    image = output(odd_layers(), name)

    def broken(descriptor: Descriptor) -> BinaryIO:
        data = image.open_blob(descriptor).read()
        return io.BytesIO(data[: len(data) // 2])

    with pytest.raises(BuildkitError):
        write_image(
            name, OutputImage(manifest=image.manifest, config=image.config, open_blob=broken), engine_host=engine_host
        )
    with pytest.raises(NotFoundError):
        engine.inspect(name)


def test_the_engine_s_refusals_are_ours(engine: Engine, engine_host: str) -> None:
    for garbage in (b"garbage", gzip.compress(b"garbage"), b""):
        with pytest.raises(EngineError):
            engine.load([garbage] if garbage else io.BytesIO(layer([entry("manifest.json", b"[{")])))
    with pytest.raises(NotFoundError):
        engine.remove("buildkit-test-no-such-image")
    with pytest.raises(UsageError, match="buildkit-test-no-such-image"):
        open_source("buildkit-test-no-such-image", engine_host=engine_host)


def test_names_are_given_and_taken(engine: Engine, name: str) -> None:
    engine.load(io.BytesIO(archive(odd_layers(), name)[0]))
    other = name.replace(":one", ":two")
    engine.tag(engine.inspect(name).id, other)
    assert engine.inspect(other).id == engine.inspect(name).id
    engine.remove(other)
    with pytest.raises(NotFoundError):
        engine.inspect(other)
