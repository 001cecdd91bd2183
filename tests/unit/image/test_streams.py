"""A stream proves its content before it reports its end."""

from __future__ import annotations

import gzip
import io

import pytest

from buildkit.errors import DigestMismatchError, FormatError
from buildkit.image.source import SourceLayer
from buildkit.image.streams import HashingReader, VerifiedStream, tar_of
from buildkit.model import OCI_LAYER_GZIP, Descriptor, Digest


def drain(stream: object, step: int) -> bytes:
    out = b""
    while data := stream.read(step):  # type: ignore[attr-defined]
        out += data
    return out


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_good_content_passes_by_either_way_of_reading(step: int) -> None:
    data = b"some content"
    reader = HashingReader(io.BytesIO(data), digest=Digest.of(data), size=len(data), what="x")
    assert drain(reader, step) == data
    assert reader.verified
    reader = HashingReader(io.BytesIO(data), digest=Digest.of(data), what="x")
    buffer = bytearray(step)
    out = b""
    while count := reader.readinto(buffer):
        out += buffer[:count]
    assert out == data


def test_asking_for_nothing_is_not_the_end() -> None:
    reader = HashingReader(io.BytesIO(b"abc"), digest=Digest.of(b"abc"), what="x")
    assert reader.read(0) == b""
    assert reader.readinto(bytearray()) == 0
    assert not reader.verified


@pytest.mark.parametrize(
    ("data", "size", "error"),
    [
        (b"abd", 3, DigestMismatchError),
        (b"abd", None, DigestMismatchError),
        (b"abcd", 3, DigestMismatchError),
        (b"ab", 3, FormatError),
        (b"", 3, FormatError),
        (b"", None, DigestMismatchError),
    ],
)
def test_other_content_never_reaches_its_end(data: bytes, size: int | None, error: type[Exception]) -> None:
    reader = HashingReader(io.BytesIO(data), digest=Digest.of(b"abc"), size=size, what="the layer")
    with pytest.raises(error, match="the layer"):
        drain(reader, 1)


def blob_stream(packed: bytes, tar: bytes) -> VerifiedStream:
    layer = SourceLayer(
        diff_id=Digest.of(tar),
        blob=Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(packed), size=len(packed)),
    )
    return VerifiedStream(io.BytesIO(packed), index=0, layer=layer, kind="blob", what="blob")


def test_the_tar_of_a_blob_is_proven_on_both_sides() -> None:
    tar = b"tar bytes" * 1000
    packed = gzip.compress(tar)
    assert drain(tar_of(blob_stream(packed, tar)), 1000) == tar
    with pytest.raises(DigestMismatchError, match="layer 1"):
        drain(tar_of(blob_stream(packed, tar + b"x")), 1000)


def test_close_releases_once() -> None:
    calls: list[int] = []
    layer = SourceLayer(diff_id=Digest.of(b""))
    stream = VerifiedStream(io.BytesIO(), index=0, layer=layer, kind="tar", what="x", release=lambda: calls.append(1))
    with stream:
        stream.close()
    assert calls == [1]
