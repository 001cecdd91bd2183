"""Splitting whole images: what passes through, what is new, what is refused, and that it is the same every time."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from golden.split.cases import CASES, filler
from golden.split.sources import TarsSource
from golden.split.tars import directory, file, hardlink, tar
from rich.console import Console

from buildkit.errors import BuildkitError, DigestMismatchError, FormatError, ImageError, StorageError, UsageError
from buildkit.image.compress import Codec, compress_bytes
from buildkit.image.write import write_image
from buildkit.model import Digest
from buildkit.split.config import COMMENT
from buildkit.split.flatten import compare, flatten
from buildkit.split.image import SplitImage
from buildkit.split.report import SplitReport
from buildkit.split.rewrite import Oversize, SplitOptions, dry_run, split_image

SMALL = tar(directory(b"etc"), file(b"etc/hostname", b"host\n"))
HUGE = filler(7, 150_000)


def many(seed: int = 0, count: int = 60) -> bytes:
    draw = random.Random(seed)
    parts = [directory(b"usr"), directory(b"usr/lib", 0o711)]
    for n in range(count):
        parts.append(file(b"usr/lib/%d" % n, draw.randbytes(draw.randrange(6000)), mtime=n))
    return tar(*parts, file(b"usr/.wh.gone"), hardlink(b"usr/lib/again", b"usr/lib/3"))


def options(limit: int = 30_000, **more: Any) -> SplitOptions:
    return SplitOptions(**{"limit": limit, "threads": 2, "max_layers": 1000, **more})


def blobs_of(image: SplitImage) -> list[bytes]:
    out = []
    for index in range(len(image.layers)):
        with image.open(index) as stream:
            parts = []
            while data := stream.read(777):
                parts.append(data)
        out.append(b"".join(parts))
    return out


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("codec", ["gzip:1", "gzip:6", "zstd:3"])
def test_same_bytes_for_any_number_of_threads_and_any_source(stable: bool, codec: str) -> None:
    tars = [SMALL, many()]
    seen = set()
    for threads in (1, 2, 5):
        for random_access in (True, False):
            source = TarsSource(tars, random_access=random_access)
            with split_image(source, options(threads=threads, stable=stable, codec=Codec.parse(codec))) as result:
                assert result.image.manifest is not None
                seen.add((result.image.manifest.raw, tuple(blobs_of(result.image))))
    assert len(seen) == 1


def test_blobs_are_what_their_descriptors_and_diff_ids_say() -> None:
    with split_image(TarsSource([SMALL, many()]), options()) as result:
        image = result.image
        assert image.manifest is not None
        assert image.config().diff_ids == tuple(layer.diff_id for layer in image.layers)
        assert [layer.blob for layer in image.layers] == list(image.manifest.layers)
        for blob, layer in zip(blobs_of(image), image.layers, strict=True):
            assert layer.blob is not None
            assert (Digest.of(blob), len(blob)) == (layer.blob.digest, layer.blob.size)
            content = gzip.decompress(blob)
            assert (Digest.of(content), len(content)) == (layer.diff_id, layer.tar_size)


def test_small_layer_of_an_engine_has_the_blob_that_a_push_makes() -> None:
    with split_image(TarsSource([SMALL, many()]), options()) as result:
        assert blobs_of(result.image)[0] == compress_bytes(SMALL)
        assert result.image.layers[0].diff_id == Digest.of(SMALL)
        assert not result.report.layers[0].divided
        assert result.report.layers[1].divided


@pytest.mark.parametrize("random_access", [True, False])
def test_small_blob_passes_through_byte_for_byte(random_access: bool) -> None:
    source = TarsSource([SMALL, many()], blobs=True, random_access=random_access, annotations={"toc": "sha256:x"})
    assert source.blobs is not None
    with split_image(source, options()) as result:
        assert source.reads == (1 if random_access else 2)
        assert blobs_of(result.image)[0] == source.blobs[0]
        assert result.image.manifest is not None
        assert result.image.manifest.layers[0].annotations == {"toc": "sha256:x"}
        assert all(not layer.annotations for layer in result.image.manifest.layers[1:])


def test_layer_that_occurs_twice_is_divided_once() -> None:
    big = many()
    source = TarsSource([big, SMALL, big])
    with split_image(source, options()) as result:
        count = len(result.report.layers[0].parts)
        assert result.image.layers[:count] == result.image.layers[-count:]
        assert [layer.number for layer in result.report.layers] == [1, 2, 3]
        assert compare(flatten(source), flatten(result.image)).equal


def test_history_tells_of_every_part_and_everything_else_is_kept_byte_for_byte() -> None:
    config = {
        "architecture": "amd64",
        "os": "linux",
        "weird": 1.10e3,
        "config": {"Cmd": ["<&>", "\u2028é"]},
        "history": [
            {"created": "2024-01-01T00:00:00.123456789Z", "created_by": "ADD"},
            {"created_by": "ENV A=1", "empty_layer": True},
            {"created": "2024-01-02T00:00:00Z", "created_by": "RUN big", "comment": "c"},
            {"created_by": "CMD", "empty_layer": True},
        ],
    }
    source = TarsSource([SMALL, many()], config=config)
    with split_image(source, options()) as result:
        new = result.image.config()
        old, raw = source.config().raw, new.raw
        parts = len(result.report.layers[1].parts)
        history = json.loads(raw)["history"]
        assert history[:3] == config["history"][:3]  # type: ignore[index]
        assert history[-1] == {"created_by": "CMD", "empty_layer": True}
        added = history[3:-1]
        assert len(added) == parts - 1
        assert {(h["comment"], h["created"]) for h in added} == {(COMMENT, "2024-01-02T00:00:00Z")}
        assert raw.split(b'"history"')[0] == old.split(b'"history"')[0]
        assert result.image.image_id == Digest.of(raw) != source.image_id


@pytest.mark.parametrize(
    "history", [None, [], [{"created_by": "one"}], [{"created_by": "x", "empty_layer": True}] * 3, "text", [1, 2]]
)
def test_history_that_does_not_match_is_left_alone(history: object) -> None:
    config = {"architecture": "amd64", "os": "linux", "history": history}
    with split_image(TarsSource([SMALL, many()], config=config), options()) as result:
        assert json.loads(result.image.config().raw)["history"] == history


def test_nothing_to_divide_gives_the_same_image() -> None:
    source = TarsSource([SMALL, many()], blobs=True)
    with split_image(source, options(limit=10**7)) as result:
        assert result.image.manifest == source.manifest
        assert result.image.image_id == source.image_id
        assert result.report.invalidated == ()


def test_what_the_split_invalidates_is_said() -> None:
    source = TarsSource([many()], blobs=True, annotations={"toc": "x"})
    with split_image(source, options()) as result:
        text = " ".join(result.report.invalidated)
    assert source.manifest is not None
    assert str(source.manifest.digest) in text
    assert "sign the new image" in text
    assert "toc" in text


def test_oversize_file_is_isolated_and_reported() -> None:
    source = TarsSource(
        [tar(directory(b"opt", 0o700), file(b"opt/big", HUGE), *(file(b"opt/%d" % n) for n in range(9)))]
    )
    with split_image(source, options(limit=20_000)) as result:
        ((layer, part, found),) = result.report.indivisible
        assert (layer.number, found.paths, found.entries) == (1, ("/opt/big",), 1)
        assert part.size is not None
        assert part.size > 150_000
        assert part.carried == 1
        assert result.report.layers_after == 2
        assert compare(flatten(source), flatten(result.image)).equal


def test_oversize_error_names_every_file() -> None:
    source = TarsSource([tar(file(b"one", HUGE), file(b"two", HUGE), file(b"three", b"x"))])
    with pytest.raises(ImageError, match=r"above the limit of 20.0 kB and not divisible: .*/one .*/two") as caught:
        split_image(source, options(limit=20_000, oversize="error"))
    assert caught.value.hint is not None
    assert "--chunked" in caught.value.hint


@pytest.mark.parametrize("blobs", [True, False])
def test_layer_that_is_one_large_file_stays_as_it_is(blobs: bool) -> None:
    source = TarsSource([tar(file(b"big", HUGE))], blobs=blobs)
    with split_image(source, options(limit=20_000)) as result:
        assert [layer.diff_id for layer in result.image.layers] == [source.layers[0].diff_id]
        assert len(result.report.indivisible) == 1
        if blobs:
            assert result.image.manifest == source.manifest


def test_too_many_layers_are_refused_before_the_rest_is_read() -> None:
    source = TarsSource([many(), SMALL, many(1)])
    with pytest.raises(ImageError, match=r"would have at least \d+ layers; engines refuse more than 4"):
        split_image(source, options(limit=30_000, max_layers=4, stable=False))
    assert source.reads < 3


def test_many_layers_are_a_warning() -> None:
    with split_image(TarsSource([many(n, 20) for n in range(70)]), options()) as result:
        assert any("trouble above 64" in text for text in result.report.warnings)


@pytest.mark.parametrize("random_access", [True, False])
def test_tar_that_is_hardly_more_than_zeros_passes_through(random_access: bool) -> None:
    zeros = tar(file(b"zeros", bytes(20 * 2**20)))
    source = TarsSource([zeros], random_access=random_access)
    with split_image(source, options(limit=200_000)) as result:
        assert blobs_of(result.image)[0] == compress_bytes(zeros)
        assert result.image.image_id == source.image_id


def test_zstd_needs_oci_media_types() -> None:
    with split_image(TarsSource([many()]), options(codec=Codec.parse("zstd"))) as result:
        assert result.image.manifest is not None
        assert all(layer.media_type.endswith("tar+zstd") for layer in result.image.manifest.layers)
    with pytest.raises(UsageError, match="OCI media types"):
        split_image(TarsSource([many()], blobs=True), options(codec=Codec.parse("zstd")))


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("limit", [9_000, 30_000, 61_000, 150_000])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mixed", [True, False])
def test_files_of_many_segments(stable: bool, limit: int, seed: int, mixed: bool) -> None:
    """They are hashed before it is known which part they join; here a segment is 2 kB, not 4 MB."""
    draw = random.Random(seed)
    parts = [directory(b"d"), directory(b"d/e")]
    for n in range(40):
        size = draw.choice([100, 3000, 20_000, 60_000])
        # Compressible and not, in turns, so that what is expected of a file's size is wrong both ways.
        data = draw.randbytes(size) if not mixed or draw.random() < 0.5 else draw.randbytes(7) * (size // 7)
        parts.append(directory(b"d/e/%d" % n) + file(b"d/e/%d/f" % n, data))
    parts.append(hardlink(b"z", b"d/e/3/f") + file(b"d/.wh.gone"))
    source = TarsSource([tar(*parts)])
    with split_image(source, options(limit=limit, stable=stable, codec=Codec(segment=2048))) as result:
        assert compare(flatten(source), flatten(result.image)).equal
        local = 0
        for index, (layer, blob) in enumerate(zip(result.image.layers, blobs_of(result.image), strict=True)):
            assert layer.blob is not None
            assert (Digest.of(blob), len(blob)) == (layer.blob.digest, layer.blob.size)
            assert Digest.of(gzip.decompress(blob)) == layer.diff_id
            if (found := result.image.local_blob(index)) is not None:
                with found:
                    found.verify()
                    local += 1
        assert mixed or local > len(result.image.layers) // 2


def test_large_files_bring_their_directories_wherever_they_land() -> None:
    draw = random.Random(2)
    parts = []
    for n in range(14):
        parts += [directory(b"%02d" % n, 0o700 + n), file(b"%02d/small" % n, b"s")]
        parts.append(file(b"%02d/large" % n, draw.randbytes(draw.randrange(2**20, 2**21))))
    source = TarsSource([tar(*parts)])
    with split_image(source, options(limit=4_000_000, codec=Codec(segment=2**18))) as result:
        assert compare(flatten(source), flatten(result.image)).equal
        whole = [blob for n in range(len(result.image.layers)) if (blob := result.image.local_blob(n))]
        assert len(whole) > 5
        for blob in whole:
            with blob:
                blob.verify()


# The dry run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_dry_run_foretells_exactly_what_is_done(stable: bool) -> None:
    tars = [SMALL, many(), tar(file(b"big", HUGE), file(b"small", b"s"))]
    report = dry_run(TarsSource(tars), options(stable=stable))
    with split_image(TarsSource(tars), options(stable=stable)) as result:
        assert report.layers == result.report.layers
        assert report.new_manifest == result.report.new_manifest


def test_quick_dry_run_comes_close() -> None:
    tars = [SMALL, many(count=200), tar(file(b"big", HUGE), file(b"small", b"s"))]
    quick, exact = (dry_run(TarsSource(tars), options(), exact=e) for e in (False, True))
    assert quick.dry == "quick"
    assert abs(quick.layers_after - exact.layers_after) <= 2
    assert [f.paths for _, _, f in quick.indivisible] == [f.paths for _, _, f in exact.indivisible]
    assert all(part.size is None for layer in quick.layers for part in layer.parts)


def test_dry_run_tells_what_would_be_refused_instead_of_refusing() -> None:
    source = TarsSource([many(), tar(file(b"big", HUGE), file(b"x", b"x"))])
    report = dry_run(source, options(max_layers=3, oversize="error"))
    text = " ".join(report.warnings)
    assert "are refused: engines take no more than 3" in text
    assert "oversize: error" in text


def test_report_says_it_in_every_form() -> None:
    report: SplitReport = dry_run(
        TarsSource([SMALL, many(), tar(file(b"a|b", HUGE), file(b"x"))]), options(limit=30_000)
    )
    document = json.loads(json.dumps(report.to_json()))
    assert document["layers_after"] == report.layers_after
    assert document["chunked_upload"] == [{"what": "layer 3: /a|b", "size": report.too_large[0][1], "requests": 6}]
    out = io.StringIO()
    Console(file=out, width=160).print(report)
    for text in (out.getvalue(), report.to_markdown()):
        assert "chunked upload must carry layer 3: /a|b" in text
        assert "unchanged" in text
        assert "indivisible" in text
    rows = [line for line in report.to_markdown().splitlines() if line.startswith("|")]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


# Where the result goes -----------------------------------------------------------------------------------------------


def test_layout_takes_over_the_blobs_without_a_copy(tmp_path: Path) -> None:
    source = TarsSource([SMALL, many()])
    with split_image(source, options(spool=tmp_path / "out")) as result:
        image = result.image
        linked = image.link_blobs(tmp_path / "out")
        assert linked >= len(image.layers) - 2
        write_image(f"oci:{tmp_path}/out:x", image.output())
        blobs = blobs_of(image)
    for blob in blobs:
        assert (tmp_path / "out" / "blobs" / "sha256" / Digest.of(blob).hex).read_bytes() == blob
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"oci-layout", "index.json", "blobs"}


def test_local_blobs_are_the_layers() -> None:
    with split_image(TarsSource([SMALL, many()]), options()) as result:
        found = 0
        for index, blob in enumerate(blobs_of(result.image)):
            local = result.image.local_blob(index)
            if local is not None:
                with local, local.window(0, len(blob)) as window:
                    assert window.read() == blob
                    found += 1
        assert found >= len(result.image.layers) - 2


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with split_image(TarsSource([many()]), options(spool=tmp_path)):
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(FormatError):
        split_image(TarsSource([many()[:-3000]]), options(spool=tmp_path))
    assert list(tmp_path.iterdir()) == []


# What goes wrong -----------------------------------------------------------------------------------------------------


class _Lies(TarsSource):
    """Delivers one byte that the diff_id does not know."""

    def _open(self, index: int) -> Any:
        tar = bytearray(self.tars[index])
        tar[1000] ^= 1
        true, self.tars[index] = self.tars[index], bytes(tar)
        try:
            return super()._open(index)
        finally:
            self.tars[index] = true


@pytest.mark.parametrize("limit", [30_000, 10**7])
def test_layer_that_is_not_its_diff_id_is_refused(limit: int) -> None:
    with pytest.raises(DigestMismatchError):
        split_image(_Lies([many()]), options(limit=limit))


def test_temporary_file_that_rots_is_noticed() -> None:
    with split_image(TarsSource([many()]), options()) as result:
        local = result.image.local_blob(1)
        assert local is not None
        with local:
            os.pwrite(local._handle, b"rot", 50)
        with pytest.raises(DigestMismatchError, match="the disk changed it"):
            blobs_of(result.image)


def test_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        split_image(TarsSource([many()]), options(spool=tmp_path / "file" / "sub"))


def test_full_disk_is_one_line_and_ends_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.pwrite
    written = 0

    def full(handle: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 40_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        split_image(TarsSource([many(count=300)]), options())


@pytest.mark.parametrize("limit", [0, 1023, -5])
def test_limit_that_holds_nothing(limit: int) -> None:
    with pytest.raises(UsageError):
        SplitOptions(limit=limit)


def test_oversize_word_that_is_not_known() -> None:
    word: Oversize = "drop"  # type: ignore[assignment]
    with pytest.raises(UsageError, match="isolate or error"):
        SplitOptions(oversize=word)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("random_access", [True, False])
def test_damaged_layer_never_gives_an_image(case: Any, random_access: bool) -> None:
    """Whatever byte of a layer changes, its digest notices, if nothing did before."""
    draw = random.Random(case.name)
    for _ in range(5):
        tars = list(case.layers)
        index = draw.randrange(len(tars))
        if not tars[index]:
            continue
        source = TarsSource(tars, random_access=random_access)
        broken = bytearray(tars[index])
        broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        source.tars[index] = bytes(broken)
        with pytest.raises(BuildkitError):
            split_image(source, options(limit=5000))


# Stable boundaries ---------------------------------------------------------------------------------------------------


def package_tree(changed: frozenset[int] = frozenset(), first: bytes = b"") -> bytes:
    """Two hundred packages of a few files; ``changed`` ones are another build, ``first`` stands before everything."""
    parts = [first, directory(b"srv")]
    for package in range(200):
        draw = random.Random(package + (10_000 if package in changed else 0))
        sizes = [random.Random(package).randrange(4000) for _ in range(5)]
        parts.append(directory(b"srv/%03d" % package))
        parts += [file(b"srv/%03d/%d" % (package, n), draw.randbytes(size)) for n, size in enumerate(sizes)]
    return tar(*parts)


def parts_of(layer: bytes, stable: bool) -> dict[str, int]:
    report = dry_run(TarsSource([layer]), options(limit=100_000, stable=stable))
    return {str(part.digest): part.size or 0 for part in report.layers[0].parts}


def used_again(before: dict[str, int], after: dict[str, int]) -> float:
    return sum(size for digest, size in after.items() if digest in before) / sum(after.values())


def test_small_change_moves_few_boundaries() -> None:
    base, packed = (parts_of(package_tree(), stable) for stable in (True, False))
    assert len(packed) > 15
    assert len(base) < 1.4 * len(packed)
    for change in (
        {"first": file(b"new", b"a small file at the front")},
        {"first": file(b"new", filler(3, 9000))},
        {"changed": frozenset([50])},
        {"changed": frozenset([199])},
        {"changed": frozenset([7, 150])},
    ):
        again = used_again(base, parts_of(package_tree(**change), True))
        assert again > 0.8, change


def test_packing_in_order_moves_every_boundary_behind_a_change() -> None:
    """What the stable layout is for."""
    before = parts_of(package_tree(), False)
    after = parts_of(package_tree(first=file(b"new", filler(3, 9000))), False)
    assert used_again(before, after) < 0.3


@pytest.mark.parametrize("first", ["noise", "zeros"])
@pytest.mark.parametrize("random_access", [True, False])
def test_beginning_that_foretells_the_wrong_size_changes_nothing(first: str, random_access: bool) -> None:
    noise = [file(b"n%d" % n, filler(n, 9000)) for n in range(4)]
    zeros = [file(b"z%d" % n, bytes(9000)) for n in range(12)]
    codec = Codec(segment=4096)
    data = tar(*(noise + zeros if first == "noise" else zeros + noise))
    small = len(compress_bytes(data, codec))
    for limit in (small - 1, small, small + 1):
        source = TarsSource([data], random_access=random_access)
        with split_image(source, options(limit=limit, codec=codec)) as result:
            assert result.report.layers[0].divided == (limit < small)
            assert compare(flatten(TarsSource([data])), flatten(result.image)).equal
            if limit >= small:
                assert blobs_of(result.image) == [compress_bytes(data, codec)]
