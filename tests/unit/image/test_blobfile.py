"""Blobs in files: windows, waiting for a growing blob, and disks that refuse."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from buildkit.errors import DigestMismatchError, FormatError, StorageError
from buildkit.image.blobfile import FileBlob, GrowingBlob
from buildkit.model import OCI_LAYER_GZIP, Descriptor, Digest


def descriptor(data: bytes) -> Descriptor:
    return Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(data), size=len(data))


def growing(path: Path) -> GrowingBlob:
    return GrowingBlob(os.open(path, os.O_RDWR | os.O_CREAT), path, label="layer 1/1")


def test_windows_are_seekable_and_independent(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"--0123456789--")
    with FileBlob.open(tmp_path / "f", descriptor(b"0123456789"), label="x", offset=2) as blob:
        one, two = blob.window(2, 6), blob.window(0, 10)
        assert (one.read(), two.read(3), one.read(1)) == (b"2345", b"012", b"")
        one.seek(1)
        assert one.read(2) == b"34"
        assert one.seek(-1, os.SEEK_END) == 3
        assert one.read() == b"5"
        with pytest.raises(ValueError):
            blob.window(0, 11)
        blob.verify()
    assert two.read() == b"3456789", "a window outlives the blob's closing"
    one.close()
    two.close()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    bad = bytearray(data)
    bad[12345] ^= 1
    (tmp_path / "f").write_bytes(bad)
    with (
        FileBlob.open(tmp_path / "f", descriptor(data), label="x") as blob,
        pytest.raises(DigestMismatchError, match="has digest"),
    ):
        blob.verify()
    with pytest.raises(FormatError, match="too short"):
        FileBlob.open(tmp_path / "f", descriptor(data + b"x"), label="x")


def test_a_file_cut_short_while_it_is_read_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with (
        FileBlob.open(tmp_path / "f", descriptor(b"0123456789"), label="x") as blob,
        blob.window(0, 10) as window,
    ):
        os.truncate(tmp_path / "f", 4)
        with pytest.raises(FormatError, match="cut short"):
            window.read()


def test_readers_follow_the_writer(tmp_path: Path) -> None:
    pieces = [os.urandom(1000) for _ in range(50)]
    whole = b"".join(pieces)
    with growing(tmp_path / "f") as blob:
        got: list[bytes] = []

        def read() -> None:
            at = 0
            while True:
                state = blob.wait(at + 1, 10)
                with blob.window(at, state.available) as window:
                    got.append(window.read())
                at = state.available
                if state.descriptor is not None and at == state.descriptor.size:
                    return

        reader = threading.Thread(target=read)
        reader.start()
        for piece in pieces:
            blob.write(piece)
        blob.finish(descriptor(whole))
        reader.join()
        assert b"".join(got) == whole
        assert blob.state().ended


def test_wait_gives_up_in_time_and_ends_with_the_error(tmp_path: Path) -> None:
    with growing(tmp_path / "f") as blob:
        assert not blob.wait(1, 0).ended
        blob.fail(StorageError("gone"))
        blob.fail(StorageError("a later one does not count"))
        assert str(blob.wait(1, 60).error) == "gone"


def test_closing_an_unfinished_blob_fails_its_readers(tmp_path: Path) -> None:
    blob = growing(tmp_path / "f")
    blob.write(b"x")
    blob.close()
    assert isinstance(blob.state().error, StorageError)


def test_a_descriptor_of_another_size_is_refused(tmp_path: Path) -> None:
    with growing(tmp_path / "f") as blob:
        blob.write(b"xy")
        with pytest.raises(DigestMismatchError, match="2 bytes were written"):
            blob.finish(descriptor(b"xyz"))


FULL = """
import os, resource, sys
from pathlib import Path
from buildkit.errors import StorageError
from buildkit.image.blobfile import GrowingBlob
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
path = Path(sys.argv[1])
blob = GrowingBlob(os.open(path, os.O_RDWR | os.O_CREAT), path, label="x")
blob.write(bytes(60_000))
try:
    blob.write(bytes(60_000))
except StorageError as error:
    print(error)
    assert blob.state().available == 60_000
"""


def test_a_full_disk_names_path_and_free_space(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "blob")], capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "blob") in done.stdout
    assert "are free there" in done.stdout
