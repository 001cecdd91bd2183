"""Tags that move between real images: on a server with faults, on Debian's registry, and from the command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from faults.doubles import FakeClock
from faults.model import DISTRIBUTION_2_8, DISTRIBUTION_3, GITEA_1_26, SECRET
from faults.pushing import client_for
from faults.server import FAULTS, Fault, FaultServer, serving
from support.published import publish
from support.world import World

from buildkit.build.labels import CREATED, DIRTY, REVISION
from buildkit.errors import AuthError, NotFoundError, RegistryError, UsageError
from buildkit.model import OCI_INDEX, Digest, Reference
from buildkit.promote import promote
from buildkit.registry import Anonymous, RegistryClient
from buildkit.stack import StackState

REPOSITORY = "team/app"


def labels(number: int, *, hour: int | None = None) -> dict[str, str]:
    return {REVISION: f"{number:040x}", CREATED: f"2026-07-22T{number if hour is None else hour:02d}:00:00Z"}


def held_by(server: FaultServer, tag: str = "sm70") -> Digest | None:
    found = server.model.manifests.get((REPOSITORY, tag))
    return Digest.of(found[0]) if found else None


@pytest.mark.parametrize("profile", [DISTRIBUTION_2_8, DISTRIBUTION_3, GITEA_1_26], ids=lambda p: p.name)
def test_the_newer_commit_keeps_the_tag_in_either_order(
    profile: object, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for first, second in ((1, 2), (2, 1)):
        with serving(profile) as server, client_for(server, tmp_path) as client:  # type: ignore[arg-type]
            images = {number: publish(client, REPOSITORY, labels(number)) for number in (first, second)}
            done = [promote(client, images[number], "sm70") for number in (first, second)]
            assert held_by(server) == images[2].digest
            assert done[0].moved
            assert done[1].moved == (second == 2)
            assert done[0].previous is None
            assert done[1].previous == images[first].digest
            assert done[1].current == images[2].digest
            assert done[1].ok
            puts = server.seen["manifest-put"]
            again = promote(client, images[2], "sm70")
            assert (again.moved, again.ok, server.seen["manifest-put"]) == (False, True, puts), "nothing is sent again"
            assert json.loads(json.dumps(again.to_json()))["current"] == str(images[2].digest)


def test_the_very_bytes_stand_under_the_tag(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, REPOSITORY, labels(1))
        raw = server.model.manifests[REPOSITORY, str(image.digest)][0]
        # Spaces that another serialisation would lose.
        odd = json.dumps(json.loads(raw), indent=3).encode() + b"\n"
        pinned = image.with_digest(Digest.of(odd))
        client.put_manifest(pinned, odd, "application/vnd.oci.image.manifest.v1+json")
        assert promote(client, pinned, "sm70").moved
        assert server.model.manifests[REPOSITORY, "sm70"][0] == odd


def test_an_older_run_that_writes_over_the_tag_is_corrected(tmp_path: Path) -> None:
    """It had looked before we wrote, and writes while we wait."""
    with serving(DISTRIBUTION_3) as server:

        class Late(FakeClock):
            def sleep(self, seconds: float, cancel: object) -> None:
                super().sleep(seconds, cancel)  # type: ignore[arg-type]
                if len(self.slept) == 1:
                    server.model.manifests[REPOSITORY, "sm70"] = server.model.manifests[REPOSITORY, str(old.digest)]

        clock = Late()
        with client_for(server, tmp_path, clock=clock) as client:
            old, new = (publish(client, REPOSITORY, labels(number)) for number in (1, 2))
            result = promote(client, new, "sm70")
        assert result.moved
        assert held_by(server) == new.digest
        assert len(clock.slept) == 2


def test_a_newer_run_that_comes_meanwhile_keeps_the_tag(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        old, new = (publish(client, REPOSITORY, labels(number)) for number in (1, 2))

        def meanwhile(kind: str, number: int) -> None:
            # After our first look at the tag: the last look before the PUT must find it.
            if kind == "manifest-head" and server.calls[-1][2].endswith("sm70") and number >= 1:
                server.model.manifests[REPOSITORY, "sm70"] = server.model.manifests[REPOSITORY, str(new.digest)]

        base = server.seen["manifest-head"]
        server.before = lambda kind, number: meanwhile(kind, number - base)
        server.calls.append(("", "", "sm70", 0))
        result = promote(client, old, "sm70")
        server.before = None
        assert (result.moved, result.current) == (False, new.digest)
        assert held_by(server) == new.digest


@pytest.mark.parametrize("fault", ["drop-before", "drop-after", "502-before", "502-after", "524-after"])
def test_a_put_without_a_clear_end_is_settled_by_a_look(fault: str, tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        old, new = (publish(client, REPOSITORY, labels(number)) for number in (1, 2))
        promote(client, old, "sm70")
        server.script = {("manifest-put", server.seen["manifest-put"]): FAULTS[fault]}
        result = promote(client, new, "sm70")
        assert (result.moved, result.previous) == (True, old.digest)
        assert held_by(server) == new.digest


def test_a_refusal_is_final_and_says_no_secret(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_2_8) as server, client_for(server, tmp_path) as client:
        image = publish(client, REPOSITORY, labels(1))
        server.always["manifest-put"] = Fault(name="no", status=403, body=f"no: {SECRET}".encode())
        with pytest.raises(AuthError) as caught:
            promote(client, image, "sm70")
        assert SECRET not in str(caught.value)


def test_a_registry_that_loses_the_tag_ends_in_an_error(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, REPOSITORY, labels(1))

        class Forgetful(FakeClock):
            def sleep(self, seconds: float, cancel: object) -> None:
                server.model.manifests.pop((REPOSITORY, "sm70"), None)

        with client_for(server, tmp_path, clock=Forgetful()) as other, pytest.raises(RegistryError, match="loses it"):
            promote(other, image, "sm70")


def test_an_index_is_judged_by_its_image_for_this_platform(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:

        def index_of(number: int) -> Reference:
            image = publish(client, REPOSITORY, labels(number))
            raw = server.model.manifests[REPOSITORY, str(image.digest)][0]
            entry = {
                "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": str(image.digest),
                "size": len(raw), "platform": {"os": "linux", "architecture": "amd64"},
            }  # fmt: skip
            data = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}).encode()
            pinned = image.with_digest(Digest.of(data))
            client.put_manifest(pinned, data, OCI_INDEX)
            return pinned

        old, new = index_of(1), index_of(2)
        assert promote(client, new, "sm70").moved
        assert not promote(client, old, "sm70").moved
        assert server.model.manifests[REPOSITORY, "sm70"][1] == OCI_INDEX
        assert promote(client, publish(client, REPOSITORY, labels(3)), "sm70").moved


@pytest.mark.parametrize(
    ("ours", "held", "moved", "clear"),
    [
        (labels(2), None, True, True),
        (None, labels(2), False, False),
        (None, None, False, False),
        (labels(2), {REVISION: "", CREATED: "yesterday"}, True, True),
        (labels(2), {CREATED: "2026-07-22T01:00:00"}, True, True),
        (labels(2), {REVISION: "--output=/tmp/x", CREATED: "9999-99-99"}, False, False),
        (labels(2, hour=5), labels(1, hour=5), False, False),
        (labels(2) | {DIRTY: "true"}, labels(2), True, True),
    ],
)
def test_images_without_labels(
    ours: Mapping[str, str] | None, held: Mapping[str, str] | None, moved: bool, clear: bool, tmp_path: Path
) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        other = publish(client, REPOSITORY, held, salt="held")
        client.put_manifest(
            other.with_tag("sm70"), server.model.manifests[REPOSITORY, str(other.digest)][0],
            "application/vnd.oci.image.manifest.v1+json",
        )  # fmt: skip
        image = publish(client, REPOSITORY, ours, salt="ours")
        result = promote(client, image, "sm70")
        assert (result.moved, result.ok) == (moved, clear), result.reason
        forced = promote(client, image, "sm70", force=True)
        assert (forced.moved or moved, forced.ok, held_by(server)) == (True, True, image.digest)


@pytest.mark.parametrize(
    "raw",
    [
        b"not json",
        b'{"schemaVersion":2,"manifests":[]}',
        b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[5]}',
        b'{"schemaVersion":2,"config":{"mediaType":"a","size":5,"digest":"sha256:' + b"a" * 64 + b'"},"layers":[]}',
        b'{"schemaVersion":2,"config":{},"layers":[]}',
    ],
)
def test_a_tag_that_holds_no_image_can_be_moved_away(raw: bytes, tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        media_type = "application/vnd.oci.image.manifest.v1+json"
        for target in ("sm70", str(Digest.of(raw))):
            server.model.manifests[REPOSITORY, target] = (raw, media_type)
        said: list[str] = []
        image = publish(client, REPOSITORY, labels(1))
        assert promote(client, image, "sm70", say=said.append).moved
        assert any("cannot be read" in line for line in said)


def test_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, REPOSITORY, labels(1))
        puts = server.seen["manifest-put"]
        result = promote(client, image, "sm70", dry=True)
        assert (result.moved, result.dry, server.seen["manifest-put"]) == (True, True, puts)
        assert "would move" in result.render()
        assert held_by(server) is None


def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    with serving(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        image = publish(client, REPOSITORY, labels(1))
        for tag in ("", "a/b", "a:b", "-x", "x" * 129, "sha256:" + "a" * 64):
            with pytest.raises(UsageError):
                promote(client, image, tag)
        with pytest.raises(UsageError):
            promote(client, image.with_tag("x"), "sm70")
        with pytest.raises(NotFoundError):
            promote(client, replace(image, digest=Digest.of(b"nothing")), "sm70")


# From the command line, on Debian's registry behind the edge ---------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout.strip()


def test_ancestry_counts_more_than_the_clocks_of_commits(registry: StackState, tmp_path: Path) -> None:
    world = World(registry, tmp_path, tmp_path.name.lower())
    git(tmp_path, "init", "-q")
    commits = []
    for number in range(2):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    host, _, _ = world.to.partition("/")
    with RegistryClient(host, credentials=Anonymous(), state=tmp_path / "state") as client:
        # The newer commit was made on a machine whose clock is an hour behind.
        new = publish(client, world.name, {REVISION: commits[1], CREATED: "2026-07-22T09:00:00Z"})
        old = publish(client, world.name, {REVISION: commits[0], CREATED: "2026-07-22T10:00:00Z"})
        tag = new.with_tag("sm70")
        dry = world.run("promote", str(old), "--tag", "sm70", "--dry-run")
        assert (dry.code, client.head_manifest(tag)) == (0, None), dry.err
        assert world.run("promote", str(new), "--tag", "sm70").code == 0
        late = world.run("promote", str(old), "--tag", "sm70", "--json")
        assert (late.code, late.json["moved"]) == (0, False), "an older run is no failure"
        assert "comes after" in late.json["reason"]
        assert client.head_manifest(tag) == new.digest
        unclear = world.run("promote", str(publish(client, world.name, salt="bare")), "--tag", "sm70")
        assert (unclear.code, client.head_manifest(tag)) == (1, new.digest)
        assert "--force moves it" in unclear.err
        assert len(unclear.err.strip().splitlines()) == 1
        forced = world.run("promote", str(old), "--tag", "sm70", "--force")
        assert (forced.code, client.head_manifest(tag)) == (0, old.digest)
    for words in (["promote"], ["promote", str(tag), "--tag", "x"], ["promote", str(old), "--tag", "a/b"]):
        assert world.run(*words).code == 2
    missing = replace(old, digest=Digest.of(b"nothing"))
    assert world.run("promote", str(missing), "--tag", "sm70").code == 1
