"""A digest is written where it belongs and nothing else changes, only for an image whose evidence passes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from buildkit.deploy.evidence import Evidence, EvidencePolicy, judge
from buildkit.deploy.pin import edit, entry_of, pin
from buildkit.errors import CheckFailedError, FormatError, UsageError
from buildkit.model import Digest, Platform, Reference

NEW = "git.example.org/team/app"
DIGEST = Digest.parse("sha256:" + "b" * 64)
IMAGE = Reference(registry="git.example.org", repository="team/app", tag="sm70", digest=DIGEST)
GOOD = Evidence(
    digest=DIGEST,
    platform=Platform(),
    created=datetime(2026, 7, 22, tzinfo=UTC),
    verdicts={"check": "pass", "smoke": "pass"},
    architectures=("sm_70",),
    revisions={"attention.rs": "a97f519" + "0" * 33},
    origin="test",
)


class Given:
    def __init__(self, evidence: Evidence | None) -> None:
        self.evidence = evidence

    def read(self, image: Reference) -> Evidence | None:
        return self.evidence


def edited(text: str, name: str = "app") -> str:
    return edit(text, name, new_name=NEW, digest=str(DIGEST), where="k.yaml")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("images:\n  - name: app\n", "images:\n  - name: app\n    newName: N\n    digest: D\n"),
        ("images:\n- name: app # why\n  newTag: '1'\n", "images:\n- name: app # why\n  newName: N\n  digest: D\n"),
        (
            "# head\nimages:\n  # about\n  - digest: sha256:0  # old\n    name: app\n    newName: x\nresources: []\n",
            "# head\nimages:\n  # about\n  - digest: D  # old\n    name: app\n    newName: N\nresources: []\n",
        ),
        ("images: [{name: app, newTag: a}]\n", "images: [{name: app, newName: N, digest: D}]\n"),
        ("images: [{newTag: a, name: app}]\n", "images: [{ name: app, newName: N, digest: D}]\n"),
        ("images:\n  - newTag: a\n    name: app\n", "images:\n  - name: app\n    newName: N\n    digest: D\n"),
        ("images: [{name: b}]\n", "images: [{name: b}, {name: app, newName: N, digest: D}]\n"),
        ("images: []\n", "images: [{name: app, newName: N, digest: D}]\n"),
        (
            "images:\n  - name: b\n    newTag: c\n\n# tail\nkind: x\n",
            "images:\n  - name: b\n    newTag: c\n  - name: app\n    newName: N\n    digest: D\n\n# tail\nkind: x\n",
        ),
        ("resources: [x]", "resources: [x]\nimages:\n  - name: app\n    newName: N\n    digest: D\n"),
        ("images:\n  - name: app", "images:\n  - name: app\n    newName: N\n    digest: D"),
        ("images:\n  - name: app\n    digest:\n", "images:\n  - name: app\n    newName: N\n    digest: D\n"),
        ("images:\nkind: x\n", "images:\n  - name: app\n    newName: N\n    digest: D\nkind: x\n"),
        ("images: ~\nkind: x\n", "images: \n  - name: app\n    newName: N\n    digest: D\nkind: x\n"),
        (
            "kind: x\r\nimages:\r\n  - name: app\r\n    newTag: a\r\n",
            "kind: x\r\nimages:\r\n  - name: app\r\n    newName: N\r\n    digest: D\r\n",
        ),
        ("\ufeffimages:\n  - name: app\n", "\ufeffimages:\n  - name: app\n    newName: N\n    digest: D\n"),
    ],
)
def test_only_the_entry_changes(before: str, after: str) -> None:
    got = edited(before)
    assert got == after.replace(": N", f": {NEW}").replace(": D", f": {DIGEST}")
    assert edited(got) == got


@given(
    st.lists(
        st.fixed_dictionaries(
            {"name": st.sampled_from(["app", "b", "c"])},
            optional={"newName": st.just("x/y"), "newTag": st.just("1"), "digest": st.just("sha256:0")},
        ),
        max_size=3,
        unique_by=lambda e: e["name"],
    ),
    st.booleans(),
)
def test_every_kustomization_ends_up_pinned_and_otherwise_as_it_was(images: list[dict[str, str]], flow: bool) -> None:
    document = {"namespace": "n", "images": images, "resources": ["a.yaml"]}
    got = yaml.safe_load(edited(yaml.safe_dump(document, sort_keys=False, default_flow_style=flow)))
    assert got["resources"] == ["a.yaml"]
    assert {"name": "app", "newName": NEW, "digest": str(DIGEST)} in got["images"]
    assert [e for e in got["images"] if e["name"] != "app"] == [e for e in images if e["name"] != "app"]


@pytest.mark.parametrize("name", ["1.0", "no", "y", "a: b", "x # y", "localhost:5000/app", "ü", "-", "'", '"'])
@pytest.mark.parametrize("text", ["resources: []\n", "images: [{name: z}]\n", "images:\n- name: z\n"])
def test_any_name_is_written_so_that_it_is_read_as_it_is(text: str, name: str) -> None:
    got = edited(text, name)
    assert {"name": name, "newName": NEW, "digest": str(DIGEST)} in yaml.safe_load(got)["images"]
    assert edited(got, name) == got


@pytest.mark.parametrize(
    "text",
    [
        "images: x\n",
        "images: [{name: app}, {name: app, newTag: b}]\n",
        "[]\n",
        "images: [\n",
        "images: &a\n  - &b {name: app}\n  - *b\n",
    ],
)
def test_a_file_that_cannot_be_edited_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        edited(text)


def test_a_pin_needs_evidence_that_passes(tmp_path: Path) -> None:
    file = tmp_path / "kustomization.yaml"
    file.write_text("images:\n  - name: app # kept\n    newTag: old\n")
    policy = EvidencePolicy(bad_revisions={"f" * 40: "zeroes the key band"})
    before = file.read_bytes()
    for evidence, says in (
        (None, "no evidence"),
        (replace(GOOD, verdicts={"check": "pass", "smoke": "fail"}), "failed smoke"),
        (replace(GOOD, verdicts={"check": "pass"}), "smoke was not run"),
        (replace(GOOD, architectures=("sm_90",)), "the card needs sm_70"),
        (replace(GOOD, digest=Digest.of(b"x")), "another image"),
        (replace(GOOD, revisions={"attention.rs": "f" * 40}), "zeroes the key band"),
    ):
        with pytest.raises(CheckFailedError, match=says):
            pin("app", IMAGE, folder=tmp_path, reader=Given(evidence), policy=policy)
        assert file.read_bytes() == before
    result = pin("app", IMAGE, folder=tmp_path, reader=Given(GOOD), policy=policy)
    assert result.changed
    assert result.before == {"name": "app", "newTag": "old"}
    assert entry_of(tmp_path, "app") == {"name": "app", "newName": NEW, "digest": str(DIGEST)}
    assert "# kept" in file.read_text()
    assert json.loads(json.dumps(result.to_json()))["digest"] == str(DIGEST)
    assert not pin("app", IMAGE, folder=tmp_path, reader=Given(GOOD), policy=policy).changed
    assert [p.name for p in tmp_path.iterdir()] == ["kustomization.yaml"]
    with pytest.raises(UsageError, match="no digest"):
        pin("app", replace(IMAGE, digest=None), folder=tmp_path, reader=Given(GOOD), policy=policy)
    with pytest.raises(UsageError, match=r"no kustomization"):
        pin("app", IMAGE, folder=tmp_path / "none", reader=Given(GOOD), policy=policy)


def test_a_name_that_nothing_uses_is_not_pinned(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [pod.yaml]\n")
    (tmp_path / "pod.yaml").write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: a, image: 'candle-vllm:1'}]}}\n"
    )
    with pytest.raises(UsageError, match="'candle-vlm'") as caught:
        pin("candle-vlm", IMAGE, folder=tmp_path, reader=Given(GOOD), policy=EvidencePolicy())
    assert caught.value.hint == "did you mean candle-vllm?"
    assert pin("candle-vllm", IMAGE, folder=tmp_path, reader=Given(GOOD), policy=EvidencePolicy()).changed
    (tmp_path / "kustomization.yaml").write_text("resources: ['https://git.example.org/base']\n")
    assert pin("of-the-base", IMAGE, folder=tmp_path, reader=Given(GOOD), policy=EvidencePolicy()).changed


def test_a_linked_kustomization_stays_a_link_and_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("images: [{name: app}]\n")
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "kustomization.yaml").symlink_to("../real.yaml")
    assert pin("app", IMAGE, folder=tmp_path / "over", reader=Given(GOOD), policy=EvidencePolicy()).changed
    assert (tmp_path / "over" / "kustomization.yaml").is_symlink()
    assert str(DIGEST) in (tmp_path / "real.yaml").read_text()
    (tmp_path / "real.yaml").write_bytes(b"images: [{name: app}] # \xff\n")
    with pytest.raises(UsageError, match="is not UTF-8"):
        pin("app", IMAGE, folder=tmp_path / "over", reader=Given(GOOD), policy=EvidencePolicy())


def test_not_run_can_be_allowed_by_name() -> None:
    unrun = replace(GOOD, verdicts={"check": "pass", "smoke": "not-run"}, reasons={"smoke": "no GPU"})
    assert "smoke was not run on the image: no GPU" in judge(unrun, DIGEST, EvidencePolicy())[0].message
    assert judge(unrun, DIGEST, EvidencePolicy(allow_not_run=("smoke",))) == ()


@pytest.mark.parametrize("length", [40, 12])
def test_a_revision_is_known_by_its_beginning_too(length: int) -> None:
    policy = EvidencePolicy(bad_revisions={"abcdef" + "0" * 34: "zeroes the key band"})
    evidence = replace(GOOD, revisions={"attention.rs": ("ABCDEF" + "0" * 34)[:length]})
    assert [o.rule for o in judge(evidence, DIGEST, policy)] == ["evidence-failed"]
    assert judge(replace(GOOD, revisions={"attention.rs": "abcdef"}), DIGEST, policy) == ()


def test_evidence_reads_what_it_writes_and_refuses_the_rest() -> None:
    raw = json.dumps(GOOD.to_json()).encode()
    assert Evidence.parse(raw, where="test") == GOOD
    good = json.loads(raw)
    changes: tuple[dict[str, object], ...] = (
        {"schema": "other"},
        {"digest": "sha256:1"},
        {"platform": "amd64"},
        {"created": "yesterday"},
        {"created": 5},
        {"verdicts": []},
        {"verdicts": {"check": {"verdict": "perhaps"}}},
        {"verdicts": {"check": "pass"}},
        {"architectures": "sm_70"},
        {"revisions": {"a": 1}},
        {"known_bad": "soon"},
    )
    for change in changes:
        with pytest.raises(FormatError, match="test"):
            Evidence.parse(json.dumps(good | change).encode(), where="test")
    for broken in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(FormatError):
            Evidence.parse(broken, where="test")
