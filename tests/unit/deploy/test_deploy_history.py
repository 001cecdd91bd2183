"""The three states that the deployment went through are found, and the one in deploy/ is clean once it is pinned."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from buildkit.deploy import Evidence, Severity, check_manifests, plan_cards
from buildkit.deploy.evidence import EvidencePolicy
from buildkit.deploy.rules import PLACEHOLDER, Settings
from buildkit.errors import UnreachableError
from buildkit.model import Digest, Platform, Reference

HERE = Path(__file__).parent
HISTORY = HERE / "history"
DEPLOY = HERE.parents[2] / "deploy"
LISTED = datetime(2026, 7, 20, tzinfo=UTC)


class Passed:
    """Evidence for whatever is asked, with changes; counts how often each image was asked for."""

    def __init__(self, **changes: object) -> None:
        self.changes = changes
        self.asked: list[str] = []

    def read(self, image: Reference) -> Evidence | None:
        self.asked.append(image.repository)
        assert image.digest is not None
        values: dict[str, object] = {
            "digest": image.digest,
            "platform": Platform(),
            "created": LISTED,
            "verdicts": {"check": "pass", "smoke": "pass"},
            "architectures": ("sm_70",),
            "known_bad": LISTED,
        }
        return Evidence(**(values | self.changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("both-want-the-card", {("gpu-budget", "clef-serve.yaml", 7)}),
        ("service-selects-the-parked", {("service-no-endpoints", "clef-serve.yaml", 38)}),
        (
            "applied-by-hand",
            {("configmap-handmade", "clef-serve-code.yaml", 1), ("configmap-stale", "clef-serve-code.yaml", 7)},
        ),
    ],
)
def test_each_historical_state_is_found_and_nothing_else(state: str, expected: set[tuple[str, str, int]]) -> None:
    report = check_manifests([HISTORY / state], evidence=Passed())
    assert {(f.rule, Path(f.file).name, f.line) for f in report.findings} == expected
    assert not report.ok


def test_two_deployments_and_one_free_card() -> None:
    paths = [HISTORY / "both-want-the-card" / name for name in ("clef-candle.yaml", "clef-serve.yaml")]
    report = check_manifests(paths, node_gpus=1, evidence=Passed())
    assert [f.rule for f in report.findings] == ["gpu-budget"]
    assert "Deployment/clef-serve wants 1, Deployment/clef-candle wants 1, but there is 1" in report.findings[0].message


def test_the_configmap_that_was_never_in_the_repository(tmp_path: Path) -> None:
    shutil.copytree(HISTORY / "applied-by-hand", tmp_path / "d")
    (tmp_path / "d" / "clef-serve-code.yaml").unlink()
    assert [f.rule for f in check_manifests([tmp_path / "d"], evidence=Passed()).findings] == ["configmap-missing"]


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """deploy/ with real digests in the place of the placeholders."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    shutil.copytree(DEPLOY.parent / "images" / "clef-serve", tmp_path / "images" / "clef-serve")
    file = tmp_path / "deploy" / "kustomization.yaml"
    file.write_text(file.read_text().replace(PLACEHOLDER, "a" * 64))
    return tmp_path / "deploy"


@pytest.mark.parametrize("renderer", ["own", "auto"])
def test_the_final_state_is_clean(pinned: Path, renderer: str) -> None:
    report = check_manifests([pinned], evidence=Passed(), renderer=renderer)  # type: ignore[arg-type]
    assert not report.findings, report.render()
    assert report.render() == "PASS: 6 objects in 6 files, 0 errors, 0 warnings"
    assert report.objects == 6


def test_as_committed_it_waits_for_its_digests_and_for_nothing_else() -> None:
    report = check_manifests([DEPLOY], evidence=Passed())
    assert {f.rule for f in report.findings} <= {"image-placeholder"}


def test_the_plan_tells_who_gets_which_card() -> None:
    assert plan_cards([DEPLOY]).render().splitlines() == [
        "gpu-1: 3 cards, 0 free",
        "  card 0: Deployment/clef-candle (pod 0)",
        "  cards 1, 2: Deployment/coder (pod 0)",
        "parked at 0 replicas: Deployment/clef-serve",
    ]


def test_the_reference_brought_up_beside_the_server_starves(pinned: Path) -> None:
    file = pinned / "clef-serve.yaml"
    file.write_text(file.read_text().replace("replicas: 0", "replicas: 1"))
    report = check_manifests([pinned], evidence=Passed())
    assert [f.rule for f in report.findings] == ["gpu-budget"]
    assert check_manifests([pinned], evidence=Passed(), node_gpus=4).ok


def test_an_edit_of_the_reference_rolls_its_pod(pinned: Path) -> None:
    def code_map() -> str:
        manifests = check_manifests([pinned], evidence=Passed())
        assert manifests.ok
        from buildkit.deploy.check import load_manifests

        return next(o.name for o in load_manifests([pinned]).objects if o.kind == "ConfigMap")

    before = code_map()
    app = pinned.parent / "images" / "clef-serve" / "app.py"
    app.write_text(app.read_text() + "# edited\n")
    assert before.startswith("clef-serve-code-")
    assert code_map() != before


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"verdicts": {"check": "fail", "smoke": "pass"}}, "evidence-failed", "failed check"),
        ({"verdicts": {"check": "pass", "smoke": "not-run"}}, "evidence-failed", "smoke was not run"),
        ({"verdicts": {"check": "pass"}}, "evidence-failed", "smoke was not run"),
        ({"known_bad": None}, "evidence-stale", "no list of known-bad"),
        ({"known_bad": datetime(2026, 7, 1, tzinfo=UTC)}, "evidence-stale", "the list of 2026-07-01"),
        ({"platform": Platform(architecture="arm64")}, "evidence-architecture", "linux/arm64"),
        ({"architectures": ("sm_80", "sm_90")}, "evidence-architecture", "proves sm_80, sm_90, the card needs sm_70"),
        ({"digest": Digest.of(b"other")}, "evidence-missing", "another image"),
    ],
)
def test_evidence_that_is_not_enough(pinned: Path, changes: dict[str, object], rule: str, says: str) -> None:
    reader = Passed(**changes)
    settings = Settings(evidence=EvidencePolicy(known_bad=LISTED))
    report = check_manifests([pinned], evidence=reader, settings=settings)
    assert {f.rule for f in report.findings} == {rule}
    assert len(report.findings) == 3
    assert says in report.findings[0].message
    assert sorted(reader.asked) == ["models/candle-vllm", "models/clef-serve", "models/coder"]


def test_no_evidence_an_unreachable_registry_and_no_reader_are_told_apart(pinned: Path) -> None:
    class Nothing:
        def read(self, image: Reference) -> None:
            return None

    class Away:
        def read(self, image: Reference) -> Evidence | None:
            raise UnreachableError("nothing answers at git.example.org")

    rules = {
        reader: {(f.rule, f.severity) for f in check_manifests([pinned], evidence=reader).findings}
        for reader in (Nothing(), Away(), None)
    }
    assert list(rules.values()) == [
        {("evidence-missing", Severity.ERROR)},
        {("evidence-unread", Severity.ERROR)},
        {("evidence-unread", Severity.UNKNOWN)},
    ]
