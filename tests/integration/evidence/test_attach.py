"""Artifacts attached to an image, on registries that list referrers and on those that do not."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from faults.doubles import FakeClock, Recorder
from faults.model import DISTRIBUTION_2_8, DISTRIBUTION_3, GITEA_1_26, SECRET, SHORT_TOKENS, WORKERS, ZOT, Profile
from faults.pushing import client_for
from faults.server import FAULTS, Fault, FaultServer, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from support.published import publish

from buildkit.deploy.attached import AttachedEvidence
from buildkit.deploy.evidence import EVIDENCE_TYPE, Evidence
from buildkit.errors import BuildkitError, NotFoundError, ProtocolError, RegistryError, UsageError
from buildkit.evidence import (
    REPORT_TYPE,
    Artifact,
    ArtifactFile,
    attach,
    attach_all,
    check_artifact,
    evidence_artifact,
    fetch,
    fetch_report,
    list_artifacts,
    report_artifact,
)
from buildkit.evidence.push import Pusher
from buildkit.model import OCI_INDEX, OCI_MANIFEST, Digest, Platform, Reference
from buildkit.registry import CancelToken, RegistryOptions, UploadFinished
from buildkit.registry import referrers as machines

NOW = datetime(2026, 7, 22, 10, tzinfo=UTC)
PROFILES = (DISTRIBUTION_3, GITEA_1_26, WORKERS, SHORT_TOKENS, ZOT, replace(ZOT, name="quiet", referrers="quiet"))


def evidence_for(image: Reference, created: datetime = NOW, verdict: str = "pass") -> Evidence:
    assert image.digest is not None
    return Evidence(
        digest=image.digest,
        platform=Platform(),
        created=created,
        verdicts={"check": verdict},  # type: ignore[dict-item]
        architectures=("sm_70",),
    )


def report_at(moment: datetime, text: str = "report") -> Artifact:
    return report_artifact(json.dumps({"text": text}).encode(), b"<!doctype html>", created=moment)


def index_of(server: FaultServer, image: Reference) -> list[dict[str, object]]:
    assert image.digest is not None
    raw = server.model.manifests[image.repository, machines.subject_tag(image.digest)][0]
    entries = json.loads(raw)["manifests"]
    assert isinstance(entries, list)
    return entries


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_what_is_attached_is_listed_once_and_read_back(profile: Profile, tmp_path: Path) -> None:
    with serving(profile) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        artifacts = [
            evidence_artifact(evidence_for(image)),
            report_at(NOW),
            report_at(NOW + timedelta(hours=1), "newer"),
            check_artifact(b"{}", created=NOW),
        ]
        first = attach_all(client, image, artifacts)
        held = dict(server.model.manifests)
        writes = server.seen["manifest-put"], server.seen["start"]
        assert attach_all(client, image, artifacts) == first
        assert attach(client, image, artifacts[1]) == first[1]
        assert (server.seen["manifest-put"], server.seen["start"]) == writes, "attached twice, sent once"
        assert server.model.manifests == held
        listed = list_artifacts(client, image)
        assert {a.digest for a in listed} == {d.digest for d in first}
        assert len(listed) == 4
        assert listed[0].name == "report"
        assert fetch_report(client, image) == b'{"text": "newer"}'
        found = fetch(client, image, "report")
        assert found is not None
        assert [(f.name, f.media_type) for f in found.files] == [
            ("report.json", REPORT_TYPE), ("report.html", "text/html"),
        ]  # fmt: skip
        assert fetch(client, image, "sbom") is None
        reader = AttachedEvidence(lambda host: client_for(server, tmp_path))
        assert reader.read(image) == replace(evidence_for(image), origin=f"{image.name}@{first[0].digest.short}")
        assert not server.model.problems
        assert not server.model.check_integrity()
        fallback = (image.repository, machines.subject_tag(image.digest)) in held  # type: ignore[arg-type]
        assert fallback == (profile.referrers == "none")


def test_the_artifact_is_what_the_specification_says(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        descriptor = attach(client, image, report_at(NOW))
        raw, media_type = server.model.manifests["team/app", str(descriptor.digest)]
        document = json.loads(raw)
        assert media_type == document["mediaType"] == OCI_MANIFEST
        assert document["artifactType"] == REPORT_TYPE
        assert document["config"] == {
            "mediaType": "application/vnd.oci.empty.v1+json",
            "size": 2,
            "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        }
        assert document["subject"]["digest"] == str(image.digest)
        assert document["subject"]["size"] == len(server.model.manifests["team/app", str(image.digest)][0])
        assert document["annotations"] == {"org.opencontainers.image.created": "2026-07-22T10:00:00.000Z"}
        [entry] = index_of(server, image)
        assert entry == {
            "mediaType": OCI_MANIFEST,
            "digest": str(descriptor.digest),
            "size": len(raw),
            "annotations": {"org.opencontainers.image.created": "2026-07-22T10:00:00.000Z"},
            "artifactType": REPORT_TYPE,
        }


def test_the_same_content_has_the_same_digest_everywhere(tmp_path: Path) -> None:
    found = set()
    for profile in (DISTRIBUTION_3, ZOT):
        with serving(profile) as server, client_for(server, tmp_path / profile.name) as client:
            found.add(attach(client, publish(client, "team/app"), report_at(NOW)).digest)
    assert len(found) == 1


def test_a_large_file_goes_in_chunks_below_the_edge(tmp_path: Path) -> None:
    big = Artifact(
        kind="application/vnd.test", files=(ArtifactFile("big.bin", "application/octet-stream", bytes(5000)),)
    )
    recorder = Recorder()
    options = RegistryOptions(chunk_size=1000, limit=1200, smallest_chunk=100)
    with (
        serving(GITEA_1_26, limit=1200) as server,
        client_for(server, tmp_path, recorder=recorder, options=options) as client,
    ):
        image = publish(client, "team/app")
        attach(client, image, big)
        assert server.seen["patch"] >= 5
        assert max(length for kind, *_, length in server.calls if kind == "patch") <= 1200
        assert {e.blob for e in recorder.of(UploadFinished)} >= {"big.bin", "empty.json"}
        found = fetch(client, image, "application/vnd.test")
        assert found is not None
        assert found.files[0].data == bytes(5000)


def test_entries_of_others_stay_byte_for_byte(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        other = publish(client, "team/app", salt="signature")
        raw = server.model.manifests["team/app", str(other.digest)][0]
        strange = {"mediaType": OCI_MANIFEST, "digest": str(other.digest), "size": len(raw), "x-own": [1, None]}
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "annotations": {"k": "v"}, "manifests": [strange]}
        assert image.digest is not None
        tag = image.with_tag(machines.subject_tag(image.digest))
        client.put_manifest(tag, json.dumps(index).encode(), OCI_INDEX)
        attach(client, image, report_at(NOW))
        entries = index_of(server, image)
        assert entries[0] == strange
        assert len(entries) == 2
        assert json.loads(client.get_manifest(tag).raw)["annotations"] == {"k": "v"}


def test_an_entry_whose_manifest_was_deleted_does_not_stop_others(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        gone = attach(client, image, report_at(NOW, "gone"))
        del server.model.manifests["team/app", str(gone.digest)]
        kept = attach(client, image, report_at(NOW, "kept"))
        assert [entry["digest"] for entry in index_of(server, image)] == [str(kept.digest)]
        assert [a.digest for a in list_artifacts(client, image)] == [kept.digest]


class Meeting(FakeClock):
    """Whoever pauses goes on when everyone else pauses, too, or is done: nobody is between reading and writing then."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self._barrier = barrier

    def sleep(self, seconds: float, cancel: CancelToken) -> None:
        super().sleep(seconds, cancel)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(10)


def test_two_attachers_at_once_lose_nothing(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server:
        with client_for(server, tmp_path / "first") as client:
            image = publish(client, "team/app")
        barrier = threading.Barrier(2)
        reading = threading.Barrier(2)

        def together(kind: str, number: int) -> None:
            # Both have read the index before either writes it.
            if kind == "manifest-put" and image.digest is not None and "sha256-" in server.calls[-1][2]:
                with contextlib.suppress(threading.BrokenBarrierError):
                    reading.wait(2)

        server.before = together

        def run(name: str) -> Digest:
            try:
                with client_for(server, tmp_path / name, clock=Meeting(barrier), seed=len(name)) as client:
                    return attach(client, image, report_at(NOW, name)).digest
            finally:
                barrier.abort()

        with ThreadPoolExecutor(2) as pool:
            digests = {str(digest) for digest in pool.map(run, ("a", "bb"))}
        server.before = None
        assert {entry["digest"] for entry in index_of(server, image)} == digests


def test_an_index_that_others_never_leave_alone_ends_in_an_error(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        assert image.digest is not None
        key = (image.repository, machines.subject_tag(image.digest))

        def forget(kind: str, number: int) -> None:
            if kind == "manifest-get":
                server.model.manifests.pop(key, None)

        server.before = forget
        with pytest.raises(RegistryError, match="rewrite this index of referrers all the time"):
            attach(client, image, report_at(NOW))


@pytest.mark.parametrize("fault", ["drop-before", "drop-after", "502-after", "503-retry-date", "429-retry-after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("profile", [DISTRIBUTION_3, ZOT], ids=lambda profile: profile.name)
def test_failures_in_passing_are_overcome(fault: str, number: int, profile: Profile, tmp_path: Path) -> None:
    with serving(profile) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        server.script = {("manifest-put", number): FAULTS[fault]}
        for kind in ("manifest-get", "referrers", "manifest-head"):
            server.script[kind, server.seen[kind]] = FAULTS[fault]
        descriptor = attach(client, image, report_at(NOW))
        assert [a.digest for a in list_artifacts(client, image)] == [descriptor.digest]


@pytest.mark.parametrize("fault", ["404-before", "400-before", "403-before"])
def test_an_index_that_seems_not_to_be_there_is_not_replaced(fault: str, tmp_path: Path) -> None:
    """An edge may answer 404 for a registry that restarts."""
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        earlier = attach(client, image, report_at(NOW, "earlier"))
        # The first is the image's own manifest, the second the index.
        server.script = {("manifest-get", server.seen["manifest-get"] + 1): FAULTS[fault]}
        with contextlib.suppress(BuildkitError):
            attach(client, image, report_at(NOW, "later"))
        assert server.played
        assert str(earlier.digest) in {entry["digest"] for entry in index_of(server, image)}


def test_only_artifacts_of_this_very_image_count(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image, other = publish(client, "team/app"), publish(client, "team/app", salt="other")
        foreign = attach(client, other, report_at(NOW))
        assert image.digest is not None
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [foreign.to_json()]}
        client.put_manifest(image.with_tag(machines.subject_tag(image.digest)), json.dumps(index).encode(), OCI_INDEX)
        assert list_artifacts(client, image) == ()
        assert fetch_report(client, image) is None


HOSTILE = {
    "not json": b"<<<",
    "a list": b"[]",
    "no entries": b'{"schemaVersion":2}',
    "an image": b'{"schemaVersion":2,"config":{},"layers":[]}',
    "entries of another kind": b'{"manifests":{"a":1}}',
    "an entry without digest": b'{"manifests":[{"mediaType":"a","size":1}]}',
    "a negative size": b'{"manifests":[{"mediaType":"a","size":-1,"digest":"sha256:' + b"a" * 64 + b'"}]}',
    "a text as entry": b'{"manifests":["sha256:' + b"a" * 64 + b'"]}',
    "deep": b'{"manifests":' + b"[" * 100_000,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_list_that_is_none_is_a_clear_error(body: bytes, tmp_path: Path) -> None:
    with serving(ZOT) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        server.always["referrers"] = Fault(name="hostile", status=200, headers={"Content-Type": OCI_INDEX}, body=body)
        with pytest.raises(ProtocolError):
            list_artifacts(client, image)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_is_a_clear_error_and_is_not_written_over(body: bytes, tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        assert image.digest is not None
        key = (image.repository, machines.subject_tag(image.digest))
        server.model.manifests[key] = (body, OCI_INDEX)
        with pytest.raises(BuildkitError) as caught:
            list_artifacts(client, image)
        assert type(caught.value) is not BuildkitError
        if b'"manifests":[' not in body:
            with pytest.raises(BuildkitError):
                attach(client, image, report_at(NOW))
            assert server.model.manifests[key] == (body, OCI_INDEX)


def test_pages_without_end_and_pages_elsewhere_are_refused(tmp_path: Path) -> None:
    def linked(target: Callable[[str], str]) -> Fault:
        def rewrite(headers: dict[str, str], call: object) -> None:
            headers["Link"] = f'<{target(server.registry)}>; rel="next"'

        return Fault(name="linked", rewrite=rewrite)

    with serving(ZOT) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        path = f"/v2/team/app/referrers/{image.digest}"
        server.always["referrers"] = linked(lambda host: path)
        with pytest.raises(ProtocolError, match="pages"):
            list_artifacts(client, image)
        server.always["referrers"] = linked(lambda host: f"http://localhost:{host.rpartition(':')[2]}{path}")
        with pytest.raises(ProtocolError, match="another host"):
            list_artifacts(client, image)


@pytest.mark.parametrize("status", [400, 404, 405, 406, 501, 302, 307])
def test_registries_without_the_list_say_so_in_many_ways(status: int, tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        attach(client, image, report_at(NOW))
        server.always["referrers"] = Fault(
            name="no list",
            status=status,
            headers={"Location": "/somewhere", "Content-Type": "text/html"},
            body=b"<html>",
        )
        assert len(list_artifacts(client, image)) == 1


def test_a_page_for_people_is_no_list(tmp_path: Path) -> None:
    with serving(ZOT) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        server.always["referrers"] = Fault(name="page", status=200, body=b"<!doctype html><title>Sign in</title>")
        with pytest.raises(ProtocolError, match="not a list"):
            list_artifacts(client, image)


def test_a_list_that_lacks_what_was_attached_is_told(tmp_path: Path) -> None:
    with serving(replace(ZOT, referrers="quiet")) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        server.always["referrers"] = Fault(name="empty", status=200, body=b'{"manifests":null}')
        with pytest.raises(ProtocolError, match="does not put 1 of ours on it"):
            attach(client, image, report_at(NOW))


def test_a_refused_token_is_told_without_the_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(DISTRIBUTION_2_8) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        server.always["start"] = Fault(name="no", status=403, body=f"no, {SECRET}".encode())
        with pytest.raises(RegistryError) as caught:
            attach(client, image, report_at(NOW))
        assert SECRET not in str(caught.value)
        printed = capfd.readouterr()
        assert printed.out + printed.err == "", "nothing of oras-py's own comes out"


def test_an_image_that_is_not_there_and_one_without_digest(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        missing = Reference(registry=server.registry, repository="team/app", digest=Digest.of(b"nothing"))
        with pytest.raises(NotFoundError):
            attach(client, missing, report_at(NOW))
        assert list_artifacts(client, missing) == ()
        with pytest.raises(UsageError):
            list_artifacts(client, missing.with_tag("sm70"))


def test_a_full_index_lets_superseded_entries_of_ours_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MAX_LISTED", 4)
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        foreign = attach(client, image, Artifact(kind="application/x.sig", files=(ArtifactFile("s", "a/b", b"s"),)))
        only = attach(client, image, check_artifact(b"{}", created=NOW - timedelta(days=9)))
        for hour in range(6):
            attach(client, image, report_at(NOW + timedelta(hours=hour), f"run {hour}"))
        listed = list_artifacts(client, image)
        assert len(listed) == 4
        assert {foreign.digest, only.digest} < {a.digest for a in listed}
        assert fetch_report(client, image) == b'{"text": "run 5"}'


def test_evidence_that_fails_counts_by_its_time_and_not_by_its_place(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        attach(client, image, evidence_artifact(evidence_for(image, NOW + timedelta(hours=2), "fail")))
        attach(client, image, evidence_artifact(evidence_for(image, NOW)))
        reader = AttachedEvidence(lambda host: client_for(server, tmp_path))
        found = reader.read(image)
        assert found is not None
        assert found.verdicts["check"] == "fail"
        assert {a.kind for a in list_artifacts(client, image)} == {EVIDENCE_TYPE}


def test_a_clock_is_waited_on_only_where_an_index_was_written(tmp_path: Path) -> None:
    for profile, waits in ((ZOT, False), (DISTRIBUTION_3, True)):
        clock = FakeClock()
        with serving(profile) as server, client_for(server, tmp_path / profile.name, clock=clock) as client:
            image = publish(client, "team/app")
            attach(client, image, report_at(NOW))
            assert bool(clock.slept) == waits
            before = list(clock.slept)
            attach(client, image, report_at(NOW))
            assert clock.slept == before


def test_the_folder_for_temporary_files_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("with:colon", "with blank", "ü@%#"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path / "state") as client:
            image = publish(client, "team/app")
            attach(client, image, report_at(NOW))
            assert fetch_report(client, image) == b'{"text": "report"}'
            assert list(folder.iterdir()) == [], "nothing is left behind"


def test_names_and_types_that_would_lead_elsewhere_are_refused() -> None:
    for name in ("../x", "a/b", "", ".hidden", "x" * 200, "a:b"):
        with pytest.raises(UsageError):
            Artifact(kind="a/b", files=(ArtifactFile(name, "a/b", b""),))
    for kind in ("", "text", "a/b:c", "a/b\n", "a/b c"):
        with pytest.raises(UsageError):
            Artifact(kind=kind, files=(ArtifactFile("a", "a/b", b""),))
        with pytest.raises(UsageError):
            Artifact(kind="a/b", files=(ArtifactFile("a", kind, b""),))
    with pytest.raises(UsageError):
        Artifact(kind="a/b", files=())
    with pytest.raises(UsageError):
        Artifact(kind="a/b", files=(ArtifactFile("a", "a/b", b""),), annotations={"a": "\ud800"})


def test_files_may_be_called_what_we_call_ours(tmp_path: Path) -> None:
    names = ("config", "files", "empty.json")
    with serving(ZOT) as server, client_for(server, tmp_path) as client:
        image = publish(client, "team/app")
        attach(client, image, Artifact(kind="a/b", files=tuple(ArtifactFile(n, "a/b", n.encode()) for n in names)))
        found = fetch(client, image, "a/b")
        assert found is not None
        assert [(f.name, f.data) for f in found.files] == [(n, n.encode()) for n in names]


def test_nothing_of_oras_goes_round_our_connection(tmp_path: Path) -> None:
    with serving(ZOT) as server, client_for(server, tmp_path) as client:
        pusher = Pusher(client)
        for ask in (pusher.get_tags, pusher.get_manifest, lambda target: pusher.pull(target, outdir=str(tmp_path))):
            with pytest.raises(ProtocolError, match="oras-py wants to send GET"):
                ask(f"{server.registry}/team/app:x")
        assert not server.requests


KINDS = (
    "manifest-get",
    "manifest-head",
    "manifest-put",
    "head",
    "start",
    "patch",
    "close",
    "referrers",
    "read",
    "token",
)


@settings(max_examples=80, deadline=None)
@given(
    profile=st.sampled_from(PROFILES),
    script=st.dictionaries(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 4)), st.sampled_from(sorted(FAULTS)), max_size=6
    ),
    seed=st.integers(0, 100),
)
def test_whatever_happens_on_the_way_the_answer_is_true(
    profile: Profile, script: dict[tuple[str, int], str], seed: int
) -> None:
    """Either an error of ours without the secret, or the artifact is there, listed once, and complete."""
    with tempfile.TemporaryDirectory() as state, serving(profile) as server:
        with client_for(server, Path(state), seed=seed) as client:
            image = publish(client, "team/app")
            earlier = attach(client, image, report_at(NOW, "earlier"))
        seen = dict(server.seen)
        server.script = {(kind, seen.get(kind, 0) + n): FAULTS[name] for (kind, n), name in script.items()}
        with client_for(server, Path(state), seed=seed + 1) as client:
            try:
                descriptor = attach(client, image, report_at(NOW + timedelta(hours=1), "later"))
                said = ""
            except BuildkitError as error:
                descriptor, said = None, str(error)
        assert SECRET not in said
        server.script = {}
        with client_for(server, Path(state), seed=seed + 2) as client:
            listed = [a.digest for a in list_artifacts(client, image)]
            assert earlier.digest in listed
            assert len(listed) == len(set(listed))
            if descriptor is not None:
                assert descriptor.digest in listed
                assert fetch_report(client, image) == b'{"text": "later"}'
        assert not server.model.check_integrity()
