"""Fatbins written by hand, and what may be wrong with them."""

from __future__ import annotations

import struct

import cudafiles as make
import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from buildkit.cuda import fatbin
from buildkit.cuda.arch import Arch
from buildkit.cuda.fatbin import Problem
from buildkit.cuda.readat import MemoryReader
from buildkit.errors import FormatError

BUDGET = 1000


def walk(data: bytes, *, budget: int = BUDGET) -> tuple[list[fatbin.Fatbin], list[Problem]]:
    problems: list[Problem] = []
    return list(fatbin.walk(MemoryReader(data), 0, len(data), problems, budget=budget)), problems


def test_fatbins_follow_each_other_with_padding_between() -> None:
    one = make.fatbin(make.entry(make.CUBIN, 70, b"x" * 40), make.entry(make.PTX, 70, b"y" * 24))
    found, problems = walk(bytes(8) + one + bytes(24) + one + bytes(8))
    assert problems == []
    assert [f.offset for f in found] == [8, 8 + len(one) + 24]
    assert [[e.target for e in f.entries] for f in found] == [["sm_70", "compute_70"]] * 2


@pytest.mark.parametrize(
    ("flags", "arch"),
    [
        (0x11, Arch(90)),
        (0x100011, Arch(90, "a")),
        (0x200011, Arch(90, "f")),
        (0x1000011, Arch(90)),
        (0x400011, Arch(90, "?")),
    ],
)
def test_the_suffix_comes_from_the_flags_and_an_unknown_one_is_never_plain(flags: int, arch: Arch) -> None:
    found, _ = walk(make.fatbin(make.entry(make.CUBIN, 90, b"x" * 8, flags=flags)))
    assert found[0].entries[0].arch == arch


@pytest.mark.parametrize("flags", [0x11, 0x11 | make.LZ4, 0x11 | make.ZSTD])
@given(data=st.binary(min_size=1, max_size=5000))
def test_a_payload_is_what_was_put_in(flags: int, data: bytes) -> None:
    raw = make.fatbin(make.entry(make.CUBIN, 70, data, flags=flags))
    found, problems = walk(raw)
    assert problems == []
    payload = fatbin.payload(MemoryReader(raw), found[0].entries[0])
    assert payload[: len(data)] == data
    assert not payload[len(data) :].strip(b"\0")


def test_every_truncation_is_a_problem_and_whole_entries_are_kept() -> None:
    raw = make.fatbin(make.entry(make.CUBIN, 70, b"x" * 40), make.entry(make.CUBIN, 80, b"y" * 40, header=112))
    for length in range(1, len(raw)):
        found, problems = walk(raw[:length])
        assert problems, length
        entries = [e for f in found for e in f.entries]
        assert len(entries) == (length >= 16 + 104) + (length >= len(raw))


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (4, struct.pack("<H", 2), "version 2"),
        (6, struct.pack("<H", 32), "header size 32"),
        (8, struct.pack("<Q", 2**63), "beyond the end"),
        (8, struct.pack("<Q", 2**64 - 1), "beyond the end"),
        (16 + 4, struct.pack("<I", 0), "header of 0 bytes"),
        (16 + 4, struct.pack("<I", 2**32 - 1), "header of 4294967295 bytes"),
        (16 + 8, struct.pack("<Q", 2**64 - 8), "bytes of payload"),
        (16 + 28, struct.pack("<I", 70000), "architecture 70000"),
    ],
)
def test_nonsense_in_a_header_is_a_problem_with_its_offset(offset: int, value: bytes, words: str) -> None:
    raw = bytearray(make.fatbin(make.entry(make.CUBIN, 70, b"x" * 40)))
    raw[offset : offset + len(value)] = value
    _, problems = walk(bytes(raw))
    assert any(words in p.message for p in problems)
    assert all(0 <= p.offset <= len(raw) for p in problems)


def test_compressed_size_above_the_stored_one_is_a_problem() -> None:
    raw = bytearray(make.fatbin(make.entry(make.CUBIN, 70, b"x" * 400, flags=0x11 | make.LZ4)))
    raw[16 + 16 : 16 + 20] = struct.pack("<I", 2**31)
    found, problems = walk(bytes(raw))
    assert found[0].entries == ()
    assert "compressed bytes in" in problems[0].message


def test_the_walk_goes_on_after_bytes_that_are_no_fatbin() -> None:
    good = make.fatbin(make.entry(make.CUBIN, 70, b"x" * 40))
    found, problems = walk(good + b"rubbish!" * 3 + good)
    assert len(found) == 2
    assert [p.offset for p in problems] == [len(good)]


def test_millions_of_empty_entries_are_not_kept() -> None:
    raw = make.fatbin(*[make.entry(make.CUBIN, 70, b"")] * 5000)
    found, problems = walk(raw, budget=100)
    assert sum(len(f.entries) for f in found) == 100
    assert "more entries" in problems[-1].message


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    zeros = bytes(1 << 20)
    for flags in (make.LZ4, make.ZSTD):
        raw = make.fatbin(make.entry(make.CUBIN, 70, zeros, flags=0x11 | flags))
        item = walk(raw)[0][0].entries[0]
        with pytest.raises(FormatError, match="above the 65536 read"):
            fatbin.payload(MemoryReader(raw), item, limit=65536)


@pytest.mark.parametrize("flags", [make.LZ4, make.ZSTD])
@pytest.mark.parametrize("claim", [1, 10, 2**20, 2**27])
def test_a_false_uncompressed_size_is_an_error(flags: int, claim: int) -> None:
    raw = bytearray(make.fatbin(make.entry(make.CUBIN, 70, b"abc" * 1000, flags=0x11 | flags)))
    raw[16 + 56 : 16 + 64] = struct.pack("<Q", claim)
    item = walk(bytes(raw))[0][0].entries[0]
    with pytest.raises(FormatError):
        fatbin.payload(MemoryReader(bytes(raw)), item)


def test_a_zstd_frame_that_hides_its_size_is_read_no_further_than_its_entry_says() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False)
    stored = packer.compress(bytes(1 << 20))
    plain = make.fatbin(make.entry(make.CUBIN, 70, stored + bytes(-len(stored) % 8)))
    raw = bytearray(plain)
    raw[16 + 16 : 16 + 20] = struct.pack("<I", len(stored))
    raw[16 + 40 : 16 + 48] = struct.pack("<Q", 0x11 | make.ZSTD)
    raw[16 + 56 : 16 + 64] = struct.pack("<Q", 4096)
    item = walk(bytes(raw))[0][0].entries[0]
    assert fatbin.payload(MemoryReader(bytes(raw)), item) == bytes(4096)


@given(data=st.binary(max_size=200), flags=st.sampled_from([make.LZ4, make.ZSTD]), size=st.integers(0, 2**64 - 1))
def test_payloads_of_noise_raise_one_kind_of_error(data: bytes, flags: int, size: int) -> None:
    item = fatbin.Entry(2, Arch(70), (1, 7), 0, 0, len(data), size, "lz4" if flags == make.LZ4 else "zstd", flags)
    try:
        result = fatbin.payload(MemoryReader(data), item, limit=1 << 20)
    except FormatError:
        return
    assert len(result) == size


def test_lz4_block_of_the_most_extreme_ratio_is_within_the_bound() -> None:
    for size in (1 << 10, 1 << 20):
        assert size <= 255 * len(lz4.block.compress(bytes(size), store_size=False)) + 64
