"""The index of referrers that clients keep: nobody's entry is lost, in any order of several clients' requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from faults.model import DISTRIBUTION_3, RegistryModel
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interleave import against, interleave, request_kind

from buildkit.model import OCI_INDEX, OCI_MANIFEST, Descriptor, Digest, Reference
from buildkit.registry.location import Origin
from buildkit.registry.manifests import Patient
from buildkit.registry.referrers import AddToIndex, next_page, subject_tag

ORIGIN = Origin(scheme="http", host="127.0.0.1", port=5000)
SUBJECT = Reference(registry="127.0.0.1:5000", repository="app", digest=Digest.of(b"subject"))
TAG = subject_tag(Digest.of(b"subject"))


def model_with(names: Sequence[str]) -> tuple[RegistryModel, list[Descriptor]]:
    model = RegistryModel(DISTRIBUTION_3)
    found = []
    for name in names:
        raw = json.dumps({"name": name, "config": {}, "layers": []}).encode()
        digest = Digest.of(raw)
        model.manifests["app", str(digest)] = (raw, OCI_MANIFEST)
        found.append(Descriptor(media_type=OCI_MANIFEST, digest=digest, size=len(raw)))
    return model, found


def adder(added: Sequence[Descriptor], seed: int) -> AddToIndex:
    rng = Random(seed)
    return AddToIndex(
        origin=ORIGIN,
        subject=SUBJECT,
        added=tuple(added),
        patient=Patient.of("index", retries=3, rng=rng, max_wait=1.0),
        rng=rng,
    )


def listed(model: RegistryModel) -> list[str]:
    entries = json.loads(model.manifests["app", TAG][0])["manifests"]
    return [entry["digest"] for entry in entries]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), clients=st.integers(2, 4), before=st.integers(0, 2))
def test_in_any_order_of_requests_every_entry_is_listed_once(data: st.DataObject, clients: int, before: int) -> None:
    model, descriptors = model_with([f"entry {n}" for n in range(clients + before)])
    if before:
        entries = [d.to_json() for d in descriptors[:before]]
        raw = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()
        model.manifests["app", TAG] = (raw, OCI_INDEX)
    machines = [adder([d], n).run() for n, d in enumerate(descriptors[before:])]
    results = interleave(machines, against(model), request_kind, lambda ready: data.draw(st.sampled_from(ready)))
    assert results == [True] * clients
    assert sorted(listed(model)) == sorted(str(d.digest) for d in descriptors)


def test_an_entry_that_comes_and_goes_while_its_owner_waits_is_not_taken_for_safe() -> None:
    """Four clients: a third one's write hides the first's entry from the second, a fourth one's shows it again just as
    the first looks; then the second writes."""
    model, descriptors = model_with(["first", "second", "third", "fourth"])
    order = iter([2, 0, 0, 3, 2, 1, 3, 0, 0, 1])
    machines = [adder([d], n).run() for n, d in enumerate(descriptors)]
    interleave(machines, against(model), request_kind, lambda ready: next(order, ready[0]))
    assert sorted(listed(model)) == sorted(str(d.digest) for d in descriptors)


def test_what_is_listed_already_is_not_written() -> None:
    model, descriptors = model_with(["one", "two"])
    for added, wrote in ((descriptors, True), (descriptors[:1], False)):
        before = model.manifests.get(("app", TAG))
        assert interleave([adder(added, 0).run()], against(model), request_kind, min) == [wrote]
    assert model.manifests["app", TAG] == before


@pytest.mark.parametrize(
    ("header", "target"),
    [
        ("", None),
        ('</v2/app/referrers/x?n=2>; rel="next"', "/v2/app/referrers/x?n=2"),
        ("</a>; rel=next", "/a"),
        ('</a>; rel="prev", </b>; title="x"; rel="next last"', "/b"),
        ('</a,b>; rel="next"', "/a,b"),
        ('</a>; rel="nextish"', None),
        ("</a>", None),
        ("garbage; rel=next", None),
        ('</a>;REL="Next"', "/a"),
    ],
)
def test_the_next_page_is_read_as_rfc_8288_writes_it(header: str, target: str | None) -> None:
    assert next_page(header) == target


@given(st.text(max_size=300))
def test_any_link_header_is_read_without_an_error(header: str) -> None:
    next_page(header)


def test_a_long_hostile_link_header_takes_no_time() -> None:
    for text in ("<" * 20000, "<a>" + ";a" * 20000, '<a>;a="' * 5000, "<a>" + "; rel=" * 5000):
        next_page(text)


def test_the_tag_is_cut_as_the_specification_says() -> None:
    assert subject_tag(Digest("sha256", "a" * 64)) == "sha256-" + "a" * 64
    assert subject_tag(Digest("sha512", "b" * 128)) == "sha512-" + "b" * 64
