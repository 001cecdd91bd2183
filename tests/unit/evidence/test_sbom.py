"""The bill of materials: what is in it, that it is valid, and that it is the same for the same image."""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from cudafiles import Part, elf
from cudafiles.image import Item, MemoryImage, folder, symlink
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given, settings
from hypothesis import strategies as st
from packageurl import PackageURL

from buildkit.errors import DigestMismatchError
from buildkit.evidence import contents as contents_module
from buildkit.evidence import make_sbom, sbom_artifact
from buildkit.evidence.contents import read_contents
from buildkit.model import Digest, Reference

VALIDATOR = JsonStrictValidator(SchemaVersion.V1_6)
STATUS = b"Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36\n"
OS = b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12"\n'
SITE = "opt/venv/lib/python3.11/site-packages"


def metadata(name: str, version: str = "1", more: str = "") -> bytes:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\n".encode()


def bill(source: MemoryImage, **more: Any) -> dict[str, Any]:
    raw = make_sbom(source, **more)
    problem = VALIDATOR.validate_str(raw.decode())
    assert problem is None, problem
    document = json.loads(raw)
    assert isinstance(document, dict)
    return document


def purls(document: Mapping[str, Any]) -> set[str]:
    return {c["purl"] for c in document.get("components", ()) if "purl" in c}


Files = Mapping[str, bytes | Item]
BASE: Files = {
    "var/lib/dpkg/status": STATUS,
    "usr/lib/os-release": OS,
    "usr/share/doc/libc6/copyright": b"Format: x\nLicense: LGPL-2.1+\n",
}
PYTHON: Files = {
    f"{SITE}/numpy-2.0.dist-info/METADATA": metadata("numpy", "2.0", "License-Expression: BSD-3-Clause AND MIT\n"),
    f"{SITE}/old-1.egg-info/PKG-INFO": metadata("old"),
    "app/node_modules/@a/b/package.json": b'{"name":"@a/b","version":"1.0.0","license":"MIT"}',
    "usr/local/bin/server": Item(
        data=elf(
            Part(
                name=".dep-v0",
                data=zlib.compress(b'{"packages":[{"name":"serde","version":"1.0.1","source":"crates.io"}]}'),
            )
        )
    ),
}
LABELS = {
    "org.opencontainers.image.title": "candle-vllm",
    "org.opencontainers.image.created": "2026-07-22T10:00:00Z",
    "org.opencontainers.image.source": "https://git.example.org/team/images",
    "org.opencontainers.image.revision": "a" * 40,
    "org.opencontainers.image.licenses": "MIT",
    "org.opencontainers.image.base.name": "debian:bookworm",
    "org.opencontainers.image.base.digest": str(Digest.of(b"base")),
    "buildkit.source.url": "https://git.example.org/team/server.git",
    "buildkit.source.revision": "b" * 40,
    "buildkit.sm": "70",
}
CHECK = {
    "cudaVersions": [
        {"component": "libcudart", "version": "12.9.79", "where": "/usr/local/cuda/lib64/libcudart.so.12"},
        {"component": "libcudart", "version": "12.9.79", "where": "/opt/libcudart.so.12"},
        {"component": "libcublas", "version": "12.9.1", "where": "/usr/local/cuda/lib64/libcublas.so.12"},
        {"component": None},
    ]
}


def test_all_that_an_image_names_is_in_its_bill() -> None:
    image = MemoryImage(BASE, PYTHON, runtime={"Labels": LABELS})
    where = Reference(registry="git.example.org", repository="team/candle-vllm", digest=Digest.of(b"manifest"))
    document = bill(image, image=where, check=CHECK)
    assert purls(document) == {
        "pkg:deb/debian/libc6@2.36?arch=amd64&distro=debian-12",
        "pkg:pypi/numpy@2.0",
        "pkg:pypi/old@1",
        "pkg:npm/%40a/b@1.0.0",
        "pkg:cargo/serde@1.0.1",
        "pkg:generic/nvidia/libcudart@12.9.79",
        "pkg:generic/nvidia/libcublas@12.9.1",
        f"pkg:generic/server@{'b' * 40}?vcs_url=git%2Bhttps://git.example.org/team/server.git%40{'b' * 40}",
    }
    for purl in purls(document):
        PackageURL.from_string(purl)
    by_ref = {c["bom-ref"]: c for c in document["components"]}
    assert by_ref["base"]["name"] == "debian:bookworm"
    assert by_ref["pkg:pypi/numpy@2.0"]["licenses"] == [{"expression": "BSD-3-Clause AND MIT"}]
    assert by_ref["pkg:deb/debian/libc6@2.36?arch=amd64&distro=debian-12"]["licenses"] == [
        {"license": {"id": "LGPL-2.1+"}}
    ]
    assert by_ref["pkg:cargo/serde@1.0.1"]["evidence"]["occurrences"] == [{"location": "/usr/local/bin/server"}]
    assert len(by_ref["cuda:libcudart@12.9.79"]["evidence"]["occurrences"]) == 2
    root = document["metadata"]["component"]
    assert root["version"] == str(where.digest)
    assert root["purl"].startswith("pkg:oci/candle-vllm@sha256")
    assert document["metadata"]["timestamp"] == "2026-07-22T10:00:00+00:00"
    assert sbom_artifact(make_sbom(image)).all_annotations() == {
        "org.opencontainers.image.created": "2026-07-22T10:00:00.000Z"
    }


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_layers_in_any_order_give_the_same_bytes(order: tuple[int, ...]) -> None:
    layers: tuple[Files, ...] = (
        BASE,
        PYTHON,
        {f"{SITE}/numpy-2.0.dist-info/.wh.METADATA": b"", f"{SITE}/x.dist-info/METADATA": metadata("x")},
    )
    first = make_sbom(MemoryImage(*layers))
    assert make_sbom(MemoryImage(*layers, order=order)) == first
    found = purls(json.loads(first))
    assert "pkg:pypi/x@1" in found
    assert "pkg:pypi/numpy@2.0" not in found


def test_what_a_higher_layer_removes_hides_or_replaces_is_not_listed() -> None:
    image = MemoryImage(
        {
            "var/lib/dpkg/status": STATUS,
            f"{SITE}/a.dist-info/METADATA": metadata("a"),
            "one/b.dist-info/METADATA": metadata("b"),
            "two/c.dist-info/METADATA": metadata("c"),
            "three/d.dist-info/METADATA": metadata("d"),
            "four/e.dist-info/METADATA": metadata("e"),
        },
        {
            "var/lib/dpkg/status": STATUS + b"\nPackage: new\nStatus: install ok installed\nVersion: 3\n",
            f"{SITE}/.wh.a.dist-info": b"",
            "one": folder(),
            "one/.wh..wh..opq": b"",
            "two": b"now a file",
            "four": symlink("../elsewhere"),
        },
    )
    assert purls(bill(image)) == {
        "pkg:deb/debian/libc6@2.36?arch=amd64", "pkg:deb/debian/new@3", "pkg:pypi/d@1",
    }  # fmt: skip


def test_files_linked_out_of_a_cache_are_read() -> None:
    link = Item(type=tarfile.LNKTYPE, link="./root/.cache/uv/a/t.dist-info/METADATA")
    image = MemoryImage(
        {"root/.cache/uv/a/t.dist-info/METADATA": metadata("torch"), f"{SITE}/t.dist-info/METADATA": link},
        {"root/.wh..cache": b""},
    )
    [component] = bill(image)["components"]
    assert component["evidence"]["occurrences"] == [{"location": f"/{SITE}/t.dist-info/METADATA"}]


def test_what_was_not_read_is_said() -> None:
    image = MemoryImage(
        {
            "var/lib/rpm/rpmdb.sqlite": b"SQLite",
            f"{SITE}/a.dist-info/METADATA": b"\xff\xfe",
            "usr/bin/broken": Item(data=elf(Part(name=".dep-v0", data=b"no"))),
            "app/node_modules/a/package.json": b"{" * 100_000,
            "../outside/x.dist-info/METADATA": metadata("outside"),
            "usr/bin/\ud800.sh".encode("utf-8", "surrogatepass").decode("utf-8", "replace"): b"#!/bin/sh",
        }
    )
    document = bill(image)
    said = [p["value"] for p in document["metadata"]["component"]["properties"] if p["name"] == "buildkit:unread"]
    assert len(said) == 4
    assert any("RPM's database is not read" in line for line in said)
    assert purls(document) == set()


def test_an_image_without_anything_has_an_empty_bill() -> None:
    document = bill(MemoryImage({}))
    assert document.get("components", []) == []
    assert document["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"


def test_only_so_many_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "MAX_PACKAGES", 3)
    image = MemoryImage({f"{SITE}/p{n}.dist-info/METADATA": metadata(f"p{n}") for n in range(5)})
    found = read_contents(image)
    assert len(found.packages) == 3
    assert found.unread == ("2 packages above the 3 that are listed",)


def test_lists_beyond_all_reason_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "MAX_KEPT", 10)
    status = b"".join(b"Package: p%d\nVersion: 1\n\n" % n for n in range(50))
    found = read_contents(MemoryImage({f"var/lib/dpkg/status.d/{n}": status for n in range(3)}))
    assert len(found.packages) == 10
    assert len(found.unread) == 3
    assert all("too many packages" in line for line in found.unread)


def test_a_corrupt_layer_is_an_error_and_not_a_bill() -> None:
    with pytest.raises(DigestMismatchError):
        make_sbom(MemoryImage(BASE, corrupt=True))


def test_all_bytes_are_told_to_the_progress() -> None:
    image = MemoryImage(BASE, PYTHON)
    told: list[int] = []
    read_contents(image, progress=told.append)
    assert sum(told) == sum(len(image.open(n).read(10**9)) for n in range(2))


LABEL_TEXT = st.text(max_size=40) | st.sampled_from(["https://h/p.git", "git://h/%zz", "http://[::1", "a b", "MIT OR"])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(LABEL_TEXT, min_size=len(LABELS), max_size=len(LABELS)), licence=LABEL_TEXT, version=LABEL_TEXT)
def test_any_text_in_labels_and_metadata_gives_a_valid_bill(values: list[str], licence: str, version: str) -> None:
    text = metadata("a", "1", f"License: {licence}").decode() + f"\nVersion: {version}"
    image = MemoryImage(
        {"a.dist-info/METADATA": text.encode("utf-8", "surrogatepass"), "node_modules/b/package.json": json.dumps(
            {"name": "b", "version": version, "license": licence}
        ).encode()},
        runtime={"Labels": dict(zip(LABELS, values, strict=True))},
    )  # fmt: skip
    bill(image, check={"cudaVersions": [{"component": licence, "version": version, "where": licence}]})
