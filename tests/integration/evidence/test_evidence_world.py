"""Evidence on Debian's registry behind the edge, with oras-py and skopeo as peers, and from the command line."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sysconfig
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import oras.client
import oras.oci
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from faults.doubles import FakeClock
from faults.pushing import data_of
from packageurl import PackageURL
from packaging.utils import canonicalize_name
from support.images import layer_tar, write_archive, write_layout
from support.published import publish
from support.world import World

from buildkit.deploy.evidence import Evidence
from buildkit.errors import SizeRefusedError
from buildkit.evidence import (
    REPORT_TYPE,
    SBOM_TYPE,
    Artifact,
    ArtifactFile,
    attach,
    attach_all,
    evidence_artifact,
    fetch,
    list_artifacts,
    make_sbom,
    report_artifact,
    sbom_artifact,
)
from buildkit.image.transports import open_source
from buildkit.model import OCI_INDEX, Platform, Reference
from buildkit.registry import Credential, FixedCredentials, RegistryClient, RegistryOptions
from buildkit.registry.referrers import subject_tag
from buildkit.stack import Credentials, StackOptions, StackState

NOW = datetime(2026, 7, 22, 10, tzinfo=UTC)
USER, PASSWORD = "robot", "pass-word-never-seen"
LIMIT = 1_000_000


@pytest.fixture(scope="module")
def guarded(stack_factory: Callable[[StackOptions], StackState]) -> StackState:
    """An edge that refuses bodies above a megabyte, before a registry that asks for a password."""
    return stack_factory(StackOptions(engine="none", edge_limit=LIMIT, auth=Credentials.parse(f"{USER}:{PASSWORD}")))


def client_of(host: str | None, state: Path) -> RegistryClient:
    assert host is not None
    credential = Credential(source="test", username=USER, password=PASSWORD)
    return RegistryClient(
        host, credentials=FixedCredentials(host, credential), state=state, clock=FakeClock(),
        options=RegistryOptions(limit=LIMIT, chunk_size=LIMIT),
    )  # fmt: skip


def peer() -> oras.client.OrasClient:
    client = oras.client.OrasClient(insecure=True, auth_backend="basic")
    client.auth.set_basic_auth(USER, PASSWORD)
    return client


def evidence_for(image: Reference, verdict: str = "pass") -> Evidence:
    assert image.digest is not None
    return Evidence(
        digest=image.digest,
        platform=Platform(),
        created=NOW,
        verdicts={"check": "pass", "smoke": verdict},  # type: ignore[dict-item]
        reasons={"smoke": "the state is not kept"},
        architectures=("sm_70",),
    )


def test_another_client_finds_and_pulls_what_was_attached(guarded: StackState, tmp_path: Path) -> None:
    big = data_of(3_200_000)
    with client_of(guarded.edge, tmp_path / "state") as client:
        image = publish(client, tmp_path.name.lower())
        attach(client, image, report_artifact(b'{"a": 1}', b"<!doctype html>", created=NOW))
        attach(client, image, Artifact(kind="application/x.large", files=(ArtifactFile("large.bin", "a/b", big),)))
    assert image.digest is not None
    # oras-py knows no list of referrers: it reads the index as any client can.
    inside = f"{guarded.registry}/{image.repository}"
    index = peer().get_manifest(f"{inside}:{subject_tag(image.digest)}")
    kinds = {entry["artifactType"]: entry["digest"] for entry in index["manifests"]}
    assert set(kinds) == {REPORT_TYPE, "application/x.large"}
    manifest = peer().get_manifest(f"{inside}@{kinds[REPORT_TYPE]}")
    assert manifest["subject"]["digest"] == str(image.digest)
    for digest in kinds.values():
        peer().pull(f"{inside}@{digest}", outdir=str(tmp_path / "out"))
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {"report.json": b'{"a": 1}', "report.html": b"<!doctype html>", "large.bin": big}
    raw = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", f"--creds={USER}:{PASSWORD}",
         f"docker://{inside}@{kinds[REPORT_TYPE]}"],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    assert json.loads(raw) == manifest


def test_what_another_client_attached_is_listed_beside_ours(guarded: StackState, tmp_path: Path) -> None:
    with client_of(guarded.registry, tmp_path / "state") as client:
        image = publish(client, tmp_path.name.lower())
        ours = attach(client, image, evidence_artifact(evidence_for(image)))
        assert image.digest is not None
        subject = client.get_manifest(image)
        note = tmp_path / "note.txt"
        note.write_text("signed")
        target = image.with_tag("note")
        peer().push(
            str(target),
            files=[f"{note}:application/x.note"],
            subject=oras.oci.Subject(subject.media_type, str(image.digest), len(subject.raw)),
            disable_path_validation=True,
            quiet=True,
        )
        # It keeps no index itself: as a client that does would write it.
        pushed = client.get_manifest(target)
        index_at = image.with_tag(subject_tag(image.digest))
        index = json.loads(client.get_manifest(index_at).raw)
        index["manifests"].append(
            {"mediaType": pushed.media_type, "digest": str(pushed.digest), "size": len(pushed.raw)}
        )
        client.put_manifest(index_at, json.dumps(index).encode(), OCI_INDEX)
        attach(client, image, report_artifact(b"{}", created=NOW))
        listed = list_artifacts(client, image)
        assert {a.digest for a in listed} >= {ours.digest, pushed.digest}
        assert len(listed) == 3
        other = fetch(client, image, "application/vnd.unknown.config.v1+json")
        assert other is not None
        assert [(f.name, f.data) for f in other.files] == [("note.txt", b"signed")]


def test_a_limit_that_no_chunk_cures_is_told(guarded: StackState, tmp_path: Path) -> None:
    """The manifest itself is above the edge's limit."""
    with client_of(guarded.edge, tmp_path / "state") as client:
        image = publish(client, tmp_path.name.lower())
        much = Artifact(
            kind="application/x", files=(ArtifactFile("a", "a/b", b"a"),), annotations={"text": "x" * (LIMIT + 1)}
        )
        with pytest.raises(SizeRefusedError):
            attach(client, image, much)


def test_the_command_shows_and_fetches_what_is_attached(registry: StackState, tmp_path: Path) -> None:
    world = World(registry, tmp_path, tmp_path.name.lower())
    host, _, _ = world.to.partition("/")
    tagged = f"{host}/{world.name}:sm70"
    with RegistryClient(host, state=tmp_path / "state", clock=FakeClock()) as client:
        image = publish(client, world.name)
        raw = client.get_manifest(image)
        client.put_manifest(image.with_tag("sm70"), raw.raw, raw.media_type)
        empty = world.run("evidence", tagged)
        assert (empty.code, "nothing is attached" in empty.out) == (1, True)
        assert world.run("evidence", tagged, "--json").json["artifacts"] == []
        report = report_artifact(b'{"a": 1}', b"<html>", created=NOW)
        attach_all(client, image, [evidence_artifact(evidence_for(image)), report])
        shown = world.run("evidence", tagged)
        assert shown.code == 0, shown.err
        for word in ("evidence", "report", "2026-07-22 10:00:00", "check pass", "proven for: sm_70", "report.html"):
            assert word in shown.out
        document = world.run("evidence", f"{host}/{world.name}@{image.digest}", "--json").json
        assert document["ok"]
        assert document["evidence"]["digest"] == str(image.digest)
        assert {a["kind"] for a in document["artifacts"]} == {"evidence", "report"}
        got = world.run("evidence", tagged, "--get", "report", "--out", "report.json")
        assert (got.code, (tmp_path / "report.json").read_bytes()) == (0, b'{"a": 1}')
        (tmp_path / "all").mkdir()
        both = world.run("evidence", tagged, "--get", REPORT_TYPE, "--out", "all", "--json")
        assert sorted(Path(f).name for f in both.json["files"]) == ["report.html", "report.json"]
        assert (tmp_path / "all" / "report.html").read_bytes() == b"<html>"
        assert world.run("evidence", tagged, "--get", "report", "--out", "-").out == '{"a": 1}'
    for words, code in (
        (["evidence", tagged, "--get", "sbom", "--out", "x"], 1),
        (["evidence", tagged, "--get", "report"], 2),
        (["evidence", tagged, "--out", "x"], 2),
        (["evidence", tagged, "--get", "report", "--out", "no/such/folder/x"], 1),
        (["evidence", f"{host}/{world.name}:missing"], 1),
        (["evidence", "no-registry"], 2),
    ):
        result = world.run(*words)
        assert (result.code, len(result.err.strip().splitlines())) == (code, 1), (words, result.err)


def test_failed_evidence_is_shown_and_fails(registry: StackState, tmp_path: Path) -> None:
    world = World(registry, tmp_path, tmp_path.name.lower())
    host, _, _ = world.to.partition("/")
    with RegistryClient(host, state=tmp_path / "state", clock=FakeClock()) as client:
        image = publish(client, world.name)
        attach(client, image, evidence_artifact(evidence_for(image, "fail")))
    shown = world.run("evidence", str(image))
    assert shown.code == 1
    assert "smoke: FAILED (the state is not kept)" in shown.out
    assert "failed smoke" in shown.err


SITE = "opt/venv/lib/python3.11/site-packages"
PYTHON_LAYERS = [
    layer_tar({"usr/lib/os-release": b'ID=debian\nVERSION_ID="12"\n'}),
    layer_tar(
        {
            f"{SITE}/{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n".encode()
            for name, version in (("torch", "2.1.2"), ("numpy", "1.26.4"), ("pip", "23.0"))
        }
    ),
    layer_tar({f"{SITE}/pip-23.0.dist-info/.wh.METADATA": b""}),
]


@pytest.fixture
def python_image(tmp_path: Path) -> str:
    """An OCI layout with a Python environment, as a recipe builds it."""
    write_layout(tmp_path / "layout", PYTHON_LAYERS)
    return f"oci:{tmp_path / 'layout'}"


def test_the_bill_of_an_image_goes_with_it(registry: StackState, python_image: str, tmp_path: Path) -> None:
    assert registry.registry is not None
    with open_source(python_image) as source:
        bill = make_sbom(source)
    other = write_archive(tmp_path / "image.tar", PYTHON_LAYERS)
    with open_source(f"docker-archive:{other}") as source:
        assert make_sbom(source) == bill, "the same image, whatever it comes in"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.decode())
    assert problem is None, problem
    assert [c["purl"] for c in json.loads(bill)["components"]] == ["pkg:pypi/numpy@1.26.4", "pkg:pypi/torch@2.1.2"]
    with RegistryClient(registry.registry, state=tmp_path / "state", clock=FakeClock()) as client:
        image = publish(client, tmp_path.name.lower())
        attach(client, image, sbom_artifact(bill))
        found = fetch(client, image, "sbom")
        assert found is not None
        assert [(f.media_type, f.data) for f in found.files] == [(SBOM_TYPE, bill)]


def test_the_bill_of_this_machine_is_what_its_own_tools_say(tmp_path: Path) -> None:
    """dpkg's database and the running Python's packages, in an image; dpkg-query and importlib.metadata as oracles."""
    site = Path(sysconfig.get_path("purelib"))
    metadata = {
        f"opt/venv/lib/python3/site-packages/{path.relative_to(site)}": path.read_bytes()
        for path in site.glob("*.dist-info/METADATA")
    }
    layers = [
        layer_tar({"var/lib/dpkg/status": Path("/var/lib/dpkg/status").read_bytes()}),
        layer_tar({"etc/os-release": Path("/etc/os-release").read_bytes(), **metadata}),
    ]
    archive = write_archive(tmp_path / "image.tar", layers)
    with open_source(f"docker-archive:{archive}") as source:
        bill = make_sbom(source)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.decode())
    assert problem is None, problem
    components = [(PackageURL.from_string(c["purl"]), c) for c in json.loads(bill)["components"]]
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture} ${db:Status-Status}\n"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    installed = {" ".join(line.split()[:3]) for line in lines if line.endswith(" installed")}
    told = {f"{c['name']} {c['version']} {purl.qualifiers['arch']}" for purl, c in components if purl.type == "deb"}
    assert told == installed
    assert {(purl.name, purl.version) for purl, _ in components if purl.type == "pypi"} == {
        (canonicalize_name(d.name), d.version) for d in importlib.metadata.distributions(path=[str(site)])
    }
