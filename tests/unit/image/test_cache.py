"""The blob cache: whole or not at all, bounded, safe between processes, and never believed when damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.errors import DigestMismatchError, StorageError, UsageError
from buildkit.image.cache import BlobCache, cache_limit, cache_root
from buildkit.model import OCI_CONFIG, OCI_LAYER_GZIP, Descriptor, Digest, Manifest

CODEC = "gzip-1-test"


def diff_id(n: int) -> Digest:
    return Digest.of(b"tar %d" % n)


def content(n: int, size: int = 1000) -> bytes:
    return hashlib.sha256(b"%d" % n).digest() * (size // 32 + 1)


def put(cache: BlobCache, n: int, size: int = 1000) -> Descriptor:
    data = content(n, size)[:size]
    with cache.create(label=f"layer {n}") as blob:
        blob.write(data)
        descriptor = Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(data), size=len(data))
        blob.finish(descriptor)
        cache.commit(blob, diff_id=diff_id(n), codec_id=CODEC)
    os.utime(cache.root / "blobs" / f"sha256-{descriptor.digest.hex}", (n + 1, n + 1))
    return descriptor


def has_bytes(cache: BlobCache, n: int) -> bool | None:
    found = cache.find(diff_id(n), CODEC, label="x")
    if found is None:
        return None
    if found.blob:
        found.blob.close()
    return found.blob is not None


def files(cache: BlobCache) -> list[str]:
    return sorted(str(p.relative_to(cache.root)) for p in cache.root.rglob("*") if p.is_file())


def test_a_committed_blob_is_found_again_by_another_instance(tmp_path: Path) -> None:
    descriptor = put(BlobCache(tmp_path), 1)
    found = BlobCache(tmp_path).find(diff_id(1), CODEC, label="layer 1")
    assert found is not None
    assert found.blob is not None
    with found.blob as blob, blob.window(0, 1000) as window:
        assert found.descriptor == blob.state().descriptor == descriptor
        assert window.read() == content(1)[:1000]
        blob.verify()
    assert BlobCache(tmp_path).find(diff_id(1), "gzip-2-test", label="x") is None
    assert BlobCache(tmp_path).find(diff_id(2), CODEC, label="x") is None


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    with cache.create(label="x") as blob:
        blob.write(b"half")
        assert len(files(cache)) == 1
    assert files(cache) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from buildkit.image.cache import BlobCache
blob = BlobCache(Path(sys.argv[1])).create(label="x")
blob.write(b"half")
print("ready", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        assert len(files(BlobCache(tmp_path))) == 1
        child.stdin.write(b"x")
    assert files(BlobCache(tmp_path)) == []


def test_the_least_recently_used_go_first_and_their_digests_stay_known(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit=3000)
    for n in range(3):
        put(cache, n)
    assert has_bytes(cache, 0)  # touches it
    put(cache, 3)
    assert [has_bytes(cache, n) for n in range(4)] == [True, False, True, True]
    assert cache.size() == 3000


HOLDER = """
import sys
from pathlib import Path
from buildkit.image.cache import BlobCache
from buildkit.model import Digest
found = BlobCache(Path(sys.argv[1])).find(Digest.of(b"tar 0"), "gzip-1-test", label="x")
assert found.blob
print("ready", flush=True)
sys.stdin.read(1)
found.blob.verify()
"""


def test_eviction_never_takes_what_another_process_holds(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit=1000)
    put(cache, 0)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        os.utime(next((tmp_path / "blobs").iterdir()), (0, 0))
        for n in (1, 2, 3):
            put(cache, n)
        assert [has_bytes(cache, n) for n in range(4)] == [True, False, False, True], "3 was held while it was written"
        child.stdin.write(b"x")
    assert child.returncode == 0
    put(cache, 4)
    assert has_bytes(cache, 0) is False, "evictable again"


def test_a_blob_in_use_by_its_writer_is_kept_until_closed(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit=10)
    with cache.create(label="x") as blob:
        blob.write(b"y" * 100)
        blob.finish(Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(b"y" * 100), size=100))
        cache.commit(blob, diff_id=diff_id(1), codec_id=CODEC)
        assert has_bytes(cache, 1)
        put(cache, 2)
        assert has_bytes(cache, 1)


def test_without_keeping_no_file_is_ever_seen_but_the_digest_is_known(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, keep=False)
    with cache.create(label="x") as blob:
        blob.write(b"abc")
        assert files(cache) == []
        blob.finish(Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(b"abc"), size=3))
        cache.commit(blob, diff_id=diff_id(1), codec_id=CODEC)
        with blob.window(0, 3) as window:
            assert window.read() == b"abc"
    assert [f.split("/")[0] for f in files(cache)] == ["layers"]
    assert has_bytes(cache, 1) is False


def test_a_flipped_bit_in_a_blob_is_found_and_can_be_forgotten(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    descriptor = put(cache, 1)
    put(cache, 2)
    path = tmp_path / "blobs" / f"sha256-{descriptor.digest.hex}"
    raw = bytearray(path.read_bytes())
    raw[500] ^= 4
    path.write_bytes(raw)
    found = cache.find(diff_id(1), CODEC, label="x")
    assert found is not None
    assert found.blob is not None
    with found.blob as blob, pytest.raises(DigestMismatchError):
        blob.verify()
    cache.evict(descriptor.digest)
    assert (has_bytes(cache, 1), has_bytes(cache, 2)) == (None, True)


def test_a_blob_of_the_wrong_size_is_not_offered(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    descriptor = put(cache, 1)
    os.truncate(tmp_path / "blobs" / f"sha256-{descriptor.digest.hex}", 999)
    assert has_bytes(cache, 1) is False
    assert cache.size() == 0


@given(at=st.floats(0, 0.999), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_in_an_entry_makes_it_a_miss_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int
) -> None:
    cache = BlobCache(tmp_path_factory.mktemp("cache"))
    descriptor = put(cache, 1)
    path = next((cache.root / "layers").iterdir())
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    found = cache.find(diff_id(1), CODEC, label="x")
    assert found is None or found.descriptor == descriptor
    if found and found.blob:
        found.blob.close()


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{", b"[" * 100_000, b'{"check": 1e999}', b"\xff\xfe", b"{}"])
def test_a_hostile_entry_is_a_miss(tmp_path: Path, raw: bytes) -> None:
    cache = BlobCache(tmp_path)
    put(cache, 1)
    path = next((cache.root / "layers").iterdir())
    path.write_bytes(raw)
    assert has_bytes(cache, 1) is None
    assert not path.exists()


def image(n: int) -> tuple[Manifest, bytes]:
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [str(diff_id(n))]}}).encode()
    layer = Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(content(n)), size=len(content(n)))
    described = Descriptor(media_type=OCI_CONFIG, digest=Digest.of(config), size=len(config))
    return Manifest.build(config=described, layers=[layer]), config


def test_images_keep_their_exact_bytes_and_are_proven_against_the_id(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    manifest, config = image(1)
    cache.store_image(Digest.of(config), CODEC, manifest=manifest, config=config)
    found = cache.find_image(Digest.of(config), CODEC)
    assert found is not None
    assert (found.manifest.raw, found.config.raw) == (manifest.raw, config)
    assert cache.find_image(Digest.of(config), "other") is None
    other, _ = image(2)
    cache.store_image(Digest.of(config), CODEC, manifest=other, config=config)
    assert cache.find_image(Digest.of(config), CODEC) is None, "a manifest with another config"


def test_a_full_disk_gives_up_what_nobody_needs_before_it_fails(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    put(cache, 1)
    with cache.create(label="x") as blob:
        assert blob._on_full()  # what write() asks on ENOSPC
        assert has_bytes(cache, 1) is False
        assert not blob._on_full(), "nothing left to free: then the write fails"


def test_a_full_tmpfs_is_a_storage_error_with_path_and_free_bytes(tmp_path: Path) -> None:
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "buildkit-test", str(tmp_path)], capture_output=True
        ).returncode
    ):
        # Where no file system may be mounted, the file-size limit of test_blobfile stands for the full disk.
        assert os.strerror(errno.ENOSPC)
        return
    try:
        cache = BlobCache(tmp_path, keep=True)
        with cache.create(label="x") as blob, pytest.raises(StorageError, match=r"No space.* free there"):
            blob.write(os.urandom(2_000_000))
        assert files(cache) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_root_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(UsageError, match="not a folder"):
        BlobCache(tmp_path / "f")
    with pytest.raises(UsageError, match="not a folder"):
        BlobCache(tmp_path / "f" / "below")


def test_root_and_limit_come_from_the_environment(tmp_path: Path) -> None:
    assert cache_root({"BUILDKIT_CACHE_DIR": str(tmp_path)}) == tmp_path / "images"
    assert cache_root({}).parts[-2:] == ("buildkit", "images")
    assert [cache_limit({"BUILDKIT_CACHE_LIMIT": t}) for t in ("5GB", "0", "")] == [5 * 10**9, 0, 20 * 10**9]
    with pytest.raises(UsageError, match="BUILDKIT_CACHE_LIMIT"):
        cache_limit({"BUILDKIT_CACHE_LIMIT": "many"})
