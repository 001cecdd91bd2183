"""Writing images: what is written reads back as the same image, and a failure leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import BinaryIO

import pytest
from unit.image.image_samples import legacy_members, sample, tar_members

from buildkit.errors import DigestMismatchError, ImageError, StorageError, UsageError
from buildkit.image.compress import Codec, compress_bytes
from buildkit.image.transports import open_source
from buildkit.image.write import OutputImage, write_image
from buildkit.model import (
    DOCKER_CONFIG,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    Digest,
    ImageConfig,
    Manifest,
)


def output(*, seed: int = 0, docker: bool = False, damage: bool = False) -> OutputImage:
    image = sample(seed=seed)
    blobs = {}
    layers = []
    for tar in image.layers:
        blob = compress_bytes(tar, Codec(level=1))
        digest = Digest.of(blob)
        blobs[digest] = blob[:-1] + b"\xff" if damage and tar == image.layers[-1] else blob
        media_type = DOCKER_LAYER_GZIP if docker else OCI_LAYER_GZIP
        layers.append(Descriptor(media_type=media_type, digest=digest, size=len(blob)))
    config = Descriptor(
        media_type=DOCKER_CONFIG if docker else OCI_CONFIG, digest=Digest.of(image.config), size=len(image.config)
    )
    manifest = Manifest.build(config=config, layers=layers, media_type=DOCKER_MANIFEST if docker else OCI_MANIFEST)

    def opener(descriptor: Descriptor) -> BinaryIO:
        return io.BytesIO(blobs[descriptor.digest])

    return OutputImage(manifest=manifest, config=ImageConfig.parse(image.config, where="t"), open_blob=opener)


@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize(
    "form", ["oci:{}/x:tag", "oci:{}/x", "oci-archive:{}/x.tar:tag", "docker-archive:{}/x.tar:app:1"]
)
def test_what_is_written_reads_back_with_the_same_manifest(form: str, docker: bool, tmp_path: Path) -> None:
    image = output(docker=docker)
    place = form.format(tmp_path)
    assert write_image(place, image) == place
    assert write_image(place, image) == place, "twice is fine"
    with open_source(place) as source:
        assert source.manifest is not None
        assert source.manifest.raw == image.manifest.raw
        assert source.config().raw == image.config.raw
        for stream in source.stream(range(len(source.layers))):
            with stream:
                while stream.read(1 << 16):
                    pass


def test_a_docker_archive_has_names_and_members_that_old_engines_read(tmp_path: Path) -> None:
    image = output()
    write_image(f"docker-archive:{tmp_path}/a.tar:example.org/team/app", image)
    with tarfile.open(tmp_path / "a.tar") as tar:
        file = tar.extractfile("manifest.json")
        assert file is not None
        [entry] = json.load(file)
        assert entry["RepoTags"] == ["example.org/team/app:latest"]
        assert all(tar.getmember(name).isreg() for name in [entry["Config"], *entry["Layers"]])
        assert len(tar.getnames()) == len(set(tar.getnames()))


def test_a_layout_keeps_its_other_tags(tmp_path: Path) -> None:
    one, two = output(), output(seed=5)
    write_image(f"oci:{tmp_path}/x:one", one)
    write_image(f"oci:{tmp_path}/x:two", two)
    write_image(f"oci:{tmp_path}/x:one", two)
    for tag in ("one", "two"):
        with open_source(f"oci:{tmp_path}/x:{tag}") as source:
            assert source.image_id == two.config.digest


@pytest.mark.parametrize("form", ["oci:{}/x:tag", "oci-archive:{}/x.tar:tag", "docker-archive:{}/x.tar:app:1"])
def test_a_damaged_blob_leaves_no_image(form: str, tmp_path: Path) -> None:
    with pytest.raises(DigestMismatchError):
        write_image(form.format(tmp_path), output(damage=True))
    assert not (tmp_path / "x.tar").exists()
    assert not (tmp_path / "x" / "index.json").exists()
    left = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [name for name in left if name.startswith(".")]


def test_an_archive_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    write_image(f"oci-archive:{tmp_path}/x.tar:t", output())
    before = (tmp_path / "x.tar").read_bytes()
    with pytest.raises(ImageError):
        write_image(f"oci-archive:{tmp_path}/x.tar:t", output(seed=3, damage=True))
    assert (tmp_path / "x.tar").read_bytes() == before


def test_places_that_cannot_be_written_to_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"")
    for place in (
        f"oci:{tmp_path}/full",
        f"oci-archive:{tmp_path}",
        f"oci-archive:{tmp_path}/no/x.tar",
        "docker://example.org/app:x",
        "docker-archive:-",
    ):
        with pytest.raises(UsageError):
            write_image(place, output())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        write_image(f"oci:{tmp_path}/file/x", output())


def test_an_archive_does_not_take_the_place_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        write_image(f"docker-archive:{tmp_path / 'pipe'}", output())
    assert (tmp_path / "pipe").is_fifo()


def test_archives_are_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(f"oci-archive:{tmp_path}/{name}.tar:t", output())
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_reading_a_written_archive_is_no_special_case(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_members(legacy_members(sample())))
    with open_source(f"docker-archive:{tmp_path}/a.tar") as source:
        assert source.image_id == output().config.digest
