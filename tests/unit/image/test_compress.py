"""Segmented compression: one set of bytes whatever the threads, readable by everyone, and safe to read back."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import subprocess
import threading
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.errors import FormatError, UsageError
from buildkit.image.compress import (
    Codec,
    Compressor,
    Joiner,
    compress_bytes,
    compress_segment,
    decompressed,
    sniff,
)
from buildkit.model import DOCKER_LAYER_GZIP, OCI_LAYER_ZSTD, Digest

SMALL = 4096
CODECS = [
    Codec(algorithm="gzip", level=1, segment=SMALL),
    Codec(algorithm="gzip", level=3, segment=SMALL),
    Codec(algorithm="gzip", level=6, segment=SMALL),
    Codec(algorithm="zstd", level=3, segment=SMALL),
]


def sample(size: int, seed: int = 1) -> bytes:
    """Bytes of which half compress well."""
    source = random.Random(seed)
    out = bytearray()
    while len(out) < size:
        out += source.randbytes(700) + b"text that repeats " * 40
    return bytes(out[:size])


def unpack(blob: bytes, **options: int) -> bytes:
    reader = decompressed(io.BytesIO(blob), where="test", **options)
    out = bytearray()
    while data := reader.read(1000):
        out += data
    return bytes(out)


def compress(data: bytes, codec: Codec, threads: int) -> tuple[bytes, object]:
    out = bytearray()
    with Compressor(threads) as compressor:
        result = compressor.run(io.BytesIO(data), out.extend, codec)
    return bytes(out), result


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, 10 * SMALL, 100_003])
def test_same_bytes_for_any_number_of_threads_and_both_digests_in_one_pass(codec: Codec, size: int) -> None:
    data = sample(size)
    expected = compress_bytes(data, codec)
    for threads in (1, 2, 5):
        blob, result = compress(data, codec, threads)
        assert blob == expected
        assert result == type(result)(
            digest=Digest.of(blob),
            size=len(blob),
            tar_size=size,
            diff_id=Digest.of(data),  # type: ignore[call-arg]
        )
    assert unpack(expected) == data


@given(st.binary(max_size=3 * SMALL + 10), st.sampled_from(CODECS))
@settings(max_examples=60, deadline=None)
def test_what_is_packed_unpacks_to_the_same(data: bytes, codec: Codec) -> None:
    blob = compress_bytes(data, codec)
    assert unpack(blob) == data
    if codec.algorithm == "gzip":
        assert gzip.decompress(blob) == data
        member = zlib.decompressobj(31)
        assert member.decompress(blob) == data
        assert member.eof
        assert not member.unused_data, "one member only"


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sizes_of_segments_add_up(codec: Codec) -> None:
    data = sample(10 * SMALL + 7)
    pieces = [data[i : i + SMALL] for i in range(0, len(data), SMALL)]
    segments = [compress_segment(codec, piece) for piece in pieces]
    assert sum(s.size for s in segments) + codec.overhead == len(compress_bytes(data, codec))
    joiner = Joiner(codec)
    joined = joiner.header() + b"".join(b"".join(joiner.add(s)) for s in segments) + joiner.trailer()
    assert joined == compress_bytes(data, codec)


def test_header_has_no_time_no_name_and_os_255() -> None:
    assert compress_bytes(b"x")[:10] == bytes.fromhex("1f8b08000000000000ff")


def test_gzip_and_zstd_programs_accept_it() -> None:
    data = sample(200_000)
    for codec, program in ((CODECS[0], "gzip"), (CODECS[2], "gzip")):
        done = subprocess.run([program, "-dc"], input=compress_bytes(data, codec), capture_output=True, check=True)
        assert done.stdout == data
    frames = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(compress_bytes(data, CODECS[3])), read_across_frames=True
    )
    assert frames.read() == data


class Failing(io.RawIOBase):
    def __init__(self, after: int) -> None:
        self.left = after

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk went away")
        return len(memoryview(buffer))  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [0, 1, 3, 20])
def test_an_error_of_the_source_or_the_sink_is_raised_and_leaves_the_pool_usable(after: int) -> None:
    data = sample(20 * SMALL)
    calls = 0

    def full(_: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError("no space left")

    threads = threading.active_count()
    with Compressor(2) as compressor:
        for _ in range(10):
            with pytest.raises(OSError, match="went away"):
                compressor.run(Failing(after), lambda _: None, CODECS[0])
            calls = 0
            with pytest.raises(OSError, match="no space"):
                compressor.run(io.BytesIO(data), full, CODECS[0])
        out = bytearray()
        compressor.run(io.BytesIO(data), out.extend, CODECS[0])
        assert bytes(out) == compress_bytes(data, CODECS[0])
    assert threading.active_count() == threads


def test_several_runs_share_a_pool() -> None:
    inputs = [sample(50 * SMALL, seed) for seed in range(6)]
    outputs = [bytearray() for _ in inputs]
    with Compressor(2) as compressor:

        def work(i: int) -> None:
            compressor.run(io.BytesIO(inputs[i]), outputs[i].extend, CODECS[1])

        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [bytes(o) for o in outputs] == [compress_bytes(d, CODECS[1]) for d in inputs]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_truncation_is_an_error(codec: Codec) -> None:
    blob = compress_bytes(sample(3 * SMALL), codec)
    starts = {0, *_frame_starts(blob)} if codec.algorithm == "zstd" else {0}
    for cut in range(len(blob)):
        if cut in starts or cut < (2 if codec.algorithm == "gzip" else 4):
            continue  # whole frames, or too short for a magic number: here only the digest tells
        with pytest.raises(FormatError):
            unpack(blob[:cut])


def _frame_starts(blob: bytes) -> list[int]:
    return [i for i in range(len(blob)) if blob[i : i + 4] == b"\x28\xb5\x2f\xfd"]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_flipped_byte_is_an_error_or_another_content(codec: Codec) -> None:
    data = sample(2 * SMALL)
    blob = compress_bytes(data, codec)
    for at in range(0, len(blob), 7):
        bad = bytearray(blob)
        bad[at] ^= 0x10
        try:
            out = unpack(bytes(bad))
        except FormatError:
            continue
        # Header fields that carry no content (time, OS) may change unseen; anything else must have been caught.
        assert out == data or at < 10


def test_readers_take_several_members_and_zero_padding_but_no_garbage() -> None:
    two = gzip.compress(b"one") + gzip.compress(b"two")
    assert unpack(two) == b"onetwo"
    assert unpack(two + b"\0" * 1000) == b"onetwo"
    with pytest.raises(FormatError, match="garbage"):
        unpack(two + b"x")
    frames = zstandard.compress(b"one") + b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + zstandard.compress(b"two")
    assert unpack(frames) == b"onetwo"
    with pytest.raises(FormatError):
        unpack(frames + b"garbage")


def test_a_bomb_is_stopped_and_takes_no_memory() -> None:
    bomb = gzip.compress(bytes(1 << 24))
    with pytest.raises(FormatError, match="unpacks to more than"):
        unpack(bomb, limit=1 << 20)
    bomb = zstandard.compress(bytes(1 << 24))
    with pytest.raises(FormatError, match="unpacks to more than"):
        unpack(bomb, limit=1 << 20)


def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused() -> None:
    frame = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(FormatError):
        unpack(frame)


def test_plain_tar_passes_and_other_compressions_are_named() -> None:
    assert unpack(b"usr/bin\0" * 100) == b"usr/bin\0" * 100
    assert unpack(b"ab") == b"ab"
    with pytest.raises(FormatError, match="xz"):
        sniff(b"\xfd7zXZ\x00", where="x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("gzip", "gzip:1"), ("gzip:0", "gzip:0"), ("gzip:9", "gzip:9"), ("zstd", "zstd:3"), (" zstd:19 ", "zstd:19")],
)
def test_codecs_parse(text: str, shown: str) -> None:
    assert str(Codec.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "gz", "gzip:10", "gzip:-1", "zstd:0", "zstd:20", "gzip:", "gzip:1:2", "GZIP"])
def test_other_codecs_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        Codec.parse(text)


def test_id_tells_library_level_and_segment_apart() -> None:
    ids = {Codec.parse(t).id for t in ("gzip:1", "gzip:2", "gzip:6", "zstd:1", "zstd:3")} | {CODECS[0].id}
    assert len(ids) == 6


def test_zstd_has_no_docker_media_type() -> None:
    assert Codec.parse("gzip").media_type(docker=True) == DOCKER_LAYER_GZIP
    assert Codec.parse("zstd").media_type(docker=False) == OCI_LAYER_ZSTD
    with pytest.raises(UsageError):
        Codec.parse("zstd").media_type(docker=True)


def test_input_is_hashed_only_when_asked() -> None:
    with Compressor(1) as compressor:
        sink = bytearray()
        result = compressor.run(io.BytesIO(b"abc"), sink.extend, hash_input=False)
    assert result.diff_id is None
    assert result.digest.hex == hashlib.sha256(sink).hexdigest()
