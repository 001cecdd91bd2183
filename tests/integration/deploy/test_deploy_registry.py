"""From a pushed image with attached evidence to a pinned, clean deployment, on a real registry."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from oras.client import OrasClient
from oras.oci import Subject

from buildkit.deploy import Evidence, Settings, check_manifests
from buildkit.deploy.attached import AttachedEvidence, default_policy
from buildkit.deploy.evidence import EVIDENCE_TYPE
from buildkit.deploy.pin import pin
from buildkit.errors import CheckFailedError, NotFoundError, UnreachableError
from buildkit.model import Digest, Platform, Reference
from buildkit.registry.client import RegistryClient
from buildkit.stack import StackState

REPOSITORY = Path(__file__).resolve().parents[3]
IMAGES = ("candle-vllm", "clef-serve", "coder")
BAD_REVISION = "bd3c890ba3919a589a70562e88ca703a3b10e6d0"


@pytest.fixture
def reader(tmp_path: Path) -> AttachedEvidence:
    return AttachedEvidence(lambda host: RegistryClient(host, state=tmp_path / "state"))


@pytest.fixture
def push(registry: StackState, tmp_path: Path) -> Callable[[str], Reference]:
    """Pushes a small artifact in the place of an image, with another implementation's client."""

    def run(name: str) -> Reference:
        reference = Reference.parse(f"{registry.registry}/{tmp_path.name.lower()}/{name}:sm70")
        content = tmp_path / f"{name}.txt"
        content.write_text(f"{name} {tmp_path}")
        with RegistryClient(reference.registry, state=tmp_path / "state") as client:
            OrasClient(insecure=True).push(str(reference), files=[str(content)], disable_path_validation=True)
            digest = client.head_manifest(reference)
        assert digest is not None
        return reference.with_digest(digest)

    return run


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., None]:
    """Attaches an evidence document as a referrer, as oras does; and keeps the index of the fallback tag."""

    def run(image: Reference, **changes: object) -> None:
        assert image.digest is not None
        values: dict[str, object] = {
            "digest": image.digest,
            "platform": Platform(),
            "created": datetime(2026, 7, 22, tzinfo=UTC),
            "verdicts": {"check": "pass", "smoke": "pass"},
            "architectures": ("sm_70",),
            "known_bad": default_policy().known_bad,
        }
        document = json.dumps(Evidence(**(values | changes)).to_json()).encode()  # type: ignore[arg-type]
        file = tmp_path / "evidence.json"
        file.write_bytes(document)
        with RegistryClient(image.registry, state=tmp_path / "state") as client:
            subject = client.get_manifest(image.with_digest(image.digest))
            target = image.with_tag(f"evidence-{Digest.of(document).short}")
            OrasClient(insecure=True).push(
                str(target),
                files=[f"{file}:{EVIDENCE_TYPE}"],
                disable_path_validation=True,
                subject=Subject(mediaType=subject.media_type, digest=str(subject.digest), size=len(subject.raw)),
            )
            referring = client.get_manifest(target)
            tag = image.with_tag(f"sha256-{image.digest.hex}")
            try:
                entries = json.loads(client.get_manifest(tag).raw)["manifests"]
            except NotFoundError:
                entries = []
            entries.append(
                {"mediaType": referring.media_type, "digest": str(referring.digest), "size": len(referring.raw)}
            )
            kind = "application/vnd.oci.image.index.v1+json"
            index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
            client.put_manifest(tag, json.dumps(index).encode(), kind)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "deploy", tmp_path / "deploy")
    shutil.copytree(
        REPOSITORY / "images" / "clef-serve",
        tmp_path / "images" / "clef-serve",
        ignore=shutil.ignore_patterns("wheelhouse"),
    )
    return tmp_path / "deploy"


def test_images_with_good_evidence_make_the_committed_deployment_clean(
    push: Callable[[str], Reference], attach: Callable[..., None], folder: Path, reader: AttachedEvidence
) -> None:
    policy = default_policy()
    assert policy.bad_revisions
    assert policy.known_bad is not None
    for name in IMAGES:
        image = push(name)
        attach(image)
        tagged = image.with_tag("sm70")
        assert pin(name, reader.resolve(tagged), folder=folder, reader=reader, policy=policy).changed
    report = check_manifests([folder], evidence=reader, settings=Settings(evidence=policy))
    assert report.findings == (), report.render()


def test_bad_missing_and_stray_evidence_pins_nothing(
    push: Callable[[str], Reference], attach: Callable[..., None], folder: Path, reader: AttachedEvidence
) -> None:
    before = (folder / "kustomization.yaml").read_bytes()
    policy = default_policy()
    image = push("candle-vllm")

    def refusal() -> str:
        with pytest.raises(CheckFailedError) as caught:
            pin("candle-vllm", image, folder=folder, reader=reader, policy=policy)
        assert (folder / "kustomization.yaml").read_bytes() == before
        return caught.value.message

    assert "no evidence is attached" in refusal()
    other = push("coder")
    attach(image, digest=other.digest)
    assert "no evidence is attached" in refusal(), "another image's evidence counts for nothing"
    attach(image, revisions={"attention.rs": BAD_REVISION})
    assert "is known to be bad: l2_norm_last_dim" in refusal()
    attach(image, created=datetime(2026, 7, 23, tzinfo=UTC), verdicts={"check": "pass", "smoke": "fail"})
    assert "failed smoke" in refusal(), "the newest counts"
    attach(image, created=datetime(2026, 7, 24, tzinfo=UTC))
    assert pin("candle-vllm", image, folder=folder, reader=reader, policy=policy).changed


def test_evidence_from_before_the_list_of_today_is_stale_until_the_image_is_checked_again(
    push: Callable[[str], Reference], attach: Callable[..., None], folder: Path, reader: AttachedEvidence
) -> None:
    policy = default_policy()
    assert policy.known_bad is not None
    before = policy.known_bad - timedelta(days=1)
    text = (folder / "kustomization.yaml").read_text()
    for name in IMAGES:
        image = push(name)
        attach(image, known_bad=before)
        with pytest.raises(CheckFailedError, match=f"the list of {before:%Y-%m-%d}; the current one is of"):
            pin(name, image, folder=folder, reader=reader, policy=policy)
        text = text.replace(f"git.example.org/models/{name}\n", f"{image.name}\n").replace(
            "sha256:" + "0" * 64, str(image.digest), 1
        )
    assert (folder / "kustomization.yaml").read_text() != text, "nothing was written"
    (folder / "kustomization.yaml").write_text(text)
    settings = Settings(evidence=policy)
    report = check_manifests([folder], evidence=reader, settings=settings)
    assert [f.rule for f in report.findings] == ["evidence-stale"] * 3, report.render()
    assert not report.ok
    for name in IMAGES:
        attach(push(name), created=datetime(2026, 7, 25, tzinfo=UTC))
    assert check_manifests([folder], evidence=reader, settings=settings).findings == ()


def test_a_registry_without_the_image_or_without_an_answer(
    registry: StackState, reader: AttachedEvidence, folder: Path
) -> None:
    with pytest.raises(NotFoundError):
        reader.resolve(Reference.parse(f"{registry.registry}/nothing/here:1"))
    text = (folder / "kustomization.yaml").read_text()
    closed = "localhost:9"
    (folder / "kustomization.yaml").write_text(text.replace("git.example.org", closed).replace("0" * 64, "a" * 64))

    class Impatient(AttachedEvidence):
        def read(self, image: Reference) -> Evidence | None:
            raise UnreachableError(f"nothing answers at {image.registry}")

    rules = {f.rule for f in check_manifests([folder], evidence=Impatient()).findings}
    assert rules == {"evidence-unread"}
