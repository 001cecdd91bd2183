"""``workflows.install``, ``.check`` and ``.new`` on repositories of their own, by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from buildkit.cli import program
from buildkit.recipe import load
from buildkit.tasks import actions
from buildkit.workflows import Wish, lint, pinned, render
from buildkit.workflows.template import path_filters

ROOT = Path(__file__).parents[3]
PIN = f"buildkit @ git+https://git.example.org/tools/buildkit@{'a1' * 20}"


@dataclass
class Repository:
    """A work tree that is not buildkit's: a recipe, and nothing else. The current folder, for a test."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str, code: int = 0) -> str:
        """What the command printed; on standard error too where it is to fail."""
        ended = 0
        try:
            program().run(["buildkit", *words])
        except SystemExit as stop:
            ended = int(stop.code or 0)
        out = self.capsys.readouterr()
        assert ended == code, out
        return out.out if code == 0 else out.out + out.err

    def json(self, *words: str, code: int = 0) -> Any:
        done = self.run(*words, "--json", code=code)
        return json.loads(done[: done.rindex("}") + 1])

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Repository:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    made = Repository(tmp_path, capsys)
    made.write("images/app/recipe.yaml", "name: app\ntags: [v1]\n")
    made.write("images/app/Dockerfile", "FROM scratch\n")
    return made


@pytest.mark.parametrize("name", ["candle-vllm-sm70:candle-vllm", "clef-serve", "clef-serve-cpu"])
def test_our_workflows_are_what_new_makes(name: str) -> None:
    workflow, _, recipe = name.partition(":")
    wish = Wish(name=workflow, recipe=load(recipe or workflow, ROOT / "images"), root=ROOT, install=".")
    assert (ROOT / "workflows" / f"{workflow}.yaml").read_text() == render(wish)


def test_another_repository_takes_a_recipe_and_one_command(repository: Repository) -> None:
    out = repository.run("workflows.new", "app", "--install", PIN)
    assert "written: workflows/app.yaml" in out
    assert "written: scripts/ci-setup" in out
    assert os.access(repository.folder / "scripts/ci-setup", os.X_OK)
    text = (repository.folder / "workflows/app.yaml").read_text()
    assert f'BUILDKIT_INSTALL: "{PIN}"' in text
    assert lint(text.encode(), "app") == ()
    assert "workflows.install" in repository.run("workflows.check", code=1)
    repository.run("workflows.install", "--for", "gitea")
    assert repository.run("workflows.check") == "workflows: nothing to report\n"
    assert not (repository.folder / ".github").exists()


def test_new_is_safe_to_run_again_and_keeps_what_others_wrote(repository: Repository) -> None:
    repository.run("workflows.new", "app", "--install", PIN)
    assert "unchanged: workflows/app.yaml" in repository.run("workflows.new", "app", "--install", PIN)
    repository.write("workflows/own.yaml", "name: own\n")
    assert "was not made by this command" in repository.run(
        "workflows.new", "own", "--recipe", "app", "--install", PIN, code=2
    )
    assert (repository.folder / "workflows/own.yaml").read_text() == "name: own\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "needs a name"),
        (("Not A Name", "--recipe", "app"), "is no name for a workflow"),
        (("nothing",), "no recipe 'nothing'"),
        (("n" * 101, "--recipe", "app"), "is no name for a workflow"),
        (("app", "--branch", "a b"), "no name of a branch"),
        (("app", "--branch", "a..b"), "no name of a branch"),
        (("app", "--branch", "a//b"), "no name of a branch"),
        (("app", "--branch", "a/"), "no name of a branch"),
        (("app", "--branch", "a.lock"), "no name of a branch"),
        (("app", "--branch", "a/.b"), "no name of a branch"),
        (("app", "--branch", "release/v1.2_x-"), None),
        (("app", "--image", "host/x"), "names no registry"),
        (("app", "--image", "git.example.org/a/b:1"), "tag or digest"),
        (("app", "--install", "buildkit"), "not pinned"),
        (("app", "--install", "buildkit @ git+https://git.example.org/tools/buildkit@main"), "not pinned"),
        (("app", "--install", "."), None),
    ],
)
def test_what_new_refuses(repository: Repository, words: tuple[str, ...], named: str | None) -> None:
    if "--install" not in words:
        words = (*words, "--install", PIN)
    if named is None:
        repository.run("workflows.new", *words)
    else:
        assert named in repository.run("workflows.new", *words, code=2)


def test_names_that_yaml_takes_for_something_else(repository: Repository) -> None:
    repository.write("images/1e3/recipe.yaml", "name: '1e3'\ntags: [v1]\nsecrets: [{id: t, env: REGISTRY_TOKEN}]\n")
    repository.write("images/1e3/Dockerfile", "FROM scratch\n")
    repository.run("workflows.new", "on", "--recipe", "1e3", "--branch", "null", "--install", PIN)
    text = (repository.folder / "workflows/on.yaml").read_bytes()
    assert lint(text, "on") == ()
    document = yaml.safe_load(text)
    assert (document["name"], document["env"]["RECIPE"], document["env"]["MAIN_BRANCH"]) == ("on", "1e3", "null")
    assert document[True]["push"]["branches"] == ["null"]  # YAML 1.1 takes the key on for a boolean


def test_new_does_not_overwrite_a_workflow_made_by_hand_for_all_forges(repository: Repository) -> None:
    own = repository.write("workflows/ci.yaml", (ROOT / "workflows/ci.yaml").read_text())
    repository.run("workflows.new", "ci", "--recipe", "app", "--install", PIN, code=2)
    assert own.read_text() == (ROOT / "workflows/ci.yaml").read_text()


def test_an_installation_from_no_commit_has_to_be_told(repository: Repository) -> None:
    assert "--install" in repository.run("workflows.new", "app", code=2)


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("https://git.example.org/tools/buildkit", True),
        ("https://user:secret@git.example.org/tools/buildkit", False),  # a password is no part of a workflow
        ("file:///home/somebody/buildkit", False),
    ],
)
def test_an_installation_from_a_commit_is_taken_for_the_runners_too(
    repository: Repository,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    good: bool,
) -> None:
    """What pip notes beside a package that it built from a repository (PEP 610)."""
    place = tmp_path_factory.mktemp("site")
    notes = place / "buildkit-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: buildkit\nVersion: 0.1.0\n")
    commit = "a1" * 20
    (notes / "direct_url.json").write_text(json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": commit}}))
    monkeypatch.syspath_prepend(place)
    out = repository.run("workflows.new", "app", code=0 if good else 2)
    assert "secret@" not in out
    if good:
        assert f"buildkit @ git+{url}@{commit}" in (repository.folder / "workflows/app.yaml").read_text()


def test_a_build_that_outlives_its_runner_is_refused(repository: Repository) -> None:
    repository.write("images/app/recipe.yaml", "name: app\ntags: [v1]\nbuild: {timeout: 4h}\n")
    assert "3 hours" in repository.run("workflows.new", "app", "--install", PIN, code=2)


def test_a_broken_recipe_is_told_with_its_line(repository: Repository) -> None:
    repository.write("images/app/recipe.yaml", "name: app\ntags: [v1\n")
    assert "recipe.yaml:" in repository.run("workflows.new", "app", "--install", PIN, code=2)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (".", True),
        (PIN, True),
        (PIN.replace("buildkit @", "buildkit[deploy] @"), True),
        (PIN.replace("https://", "ssh://git@"), True),
        ("buildkit==0.1.0", True),
        ("buildkit", False),
        ("buildkit>=0.1", False),
        ("..", False),
        (PIN[:-1], False),
        (PIN.replace("https://", "https://user:secret@"), False),
        (f"{PIN} other", False),
        (f"other @ git+https://x/y@{'a1' * 20}", False),
    ],
)
def test_what_is_pinned(text: str, good: bool) -> None:
    assert pinned(text) is good


def test_the_paths_are_those_that_the_image_is_made_of(repository: Repository) -> None:
    repository.write("images/other/Containerfile", "FROM scratch\n")
    repository.write(
        "images/sub/recipe.yaml", "name: sub\ntags: [v1]\ncontext: ../app\ndockerfile: ../other/Containerfile\n"
    )
    wish = Wish(
        name="w", recipe=load("sub", repository.folder / "images"), root=repository.folder, install=PIN
    )  # fmt: skip
    assert path_filters(wish) == ("images/sub/**", "images/app/**", "images/other/Containerfile", "workflows/w.yaml")


def test_variables_of_build_secrets_reach_the_build_alone(repository: Repository) -> None:
    repository.write(
        "images/app/recipe.yaml", "name: app\ntags: [v1]\nsecrets: [{id: t, env: SOURCE_TOKEN}, {id: f, file: x}]\n"
    )
    repository.run("workflows.new", "app", "--install", PIN, "--image", "git.example.org/a/b")
    text = (repository.folder / "workflows/app.yaml").read_text()
    assert text.count("SOURCE_TOKEN: ${{ secrets.SOURCE_TOKEN }}") == 1
    assert '  IMAGE: "git.example.org/a/b"\n' in text
    assert "GPU_RUNNER" not in text  # nothing in the recipe needs a GPU
    assert lint(text.encode(), "app") == ()


def test_install_writes_both_and_elsewhere(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    repository.run("workflows.new", "app", "--install", PIN)
    files = repository.json("workflows.install")["files"]
    assert [entry["path"] for entry in files] == [".gitea/workflows/app.yaml", ".github/workflows/app.yaml"]
    assert {entry["state"] for entry in repository.json("workflows.install")["files"]} == {"unchanged"}
    repository.run("workflows.install", "--for", "github", "--to", str(other))
    assert (other / ".github/workflows/app.yaml").is_file()
    assert "gitea, github or both" in repository.run("workflows.install", "--for", "gitlab", code=2)
    assert "not a folder" in repository.run("workflows.install", "--to", str(other / "none"), code=2)


def test_install_tells_what_gitea_reads_no_longer(repository: Repository) -> None:
    repository.run("workflows.new", "app", "--install", PIN)
    assert "no longer runs" not in repository.run("workflows.install")
    repository.write(".github/workflows/nightly.yml", "on: push\njobs: {}\n")
    assert "no longer runs: nightly.yml" in repository.run("workflows.install", "--for", "gitea")


def test_install_leaves_other_workflows_alone(repository: Repository) -> None:
    repository.run("workflows.new", "app", "--install", PIN)
    text = "name: own\non: {push: {branches: [main]}}\npermissions: {}\njobs: {}\n"
    own = repository.write(".gitea/workflows/own.yaml", text)
    repository.run("workflows.install")
    assert own.read_text() == text
    repository.run("workflows.check")


FOREIGN = """\
name: own
on: [push, {trigger}]
jobs:
  a:
    runs-on: x
    steps:
      - uses: actions/checkout@v4
      - run: {script}
"""


@pytest.mark.parametrize("forge", ["gitea", "github"])
@pytest.mark.parametrize(
    ("trigger", "script", "found"),
    [
        ("pull_request", "make", {}),
        ("pull_request_target", "make", {"trusted-trigger": "gitea github"}),
        ("pull_request", "echo ${{ github.head_ref }}", {"injection": "gitea github"}),
        ("pull_request", "curl -H ${{ secrets.T }} x", {"secret-in-run": "gitea github"}),
        ("pull_request", "'echo ${{ gitea.sha }}'", {"injection": "gitea github", "forge-expression": "github"}),
        ("pull_request", "docker build --cache-to type=gha .", {"cache-gha": "gitea"}),
        ("pull_request", "[", {"yaml": "gitea github"}),
    ],
)
def test_workflows_of_others_are_held_to_what_concerns_us(
    repository: Repository, forge: str, trigger: str, script: str, found: dict[str, str]
) -> None:
    """They share the repository's secrets; how they name their steps is not our business."""
    repository.run("workflows.new", "app", "--install", PIN)
    repository.run("workflows.install")
    text = FOREIGN.replace("{trigger}", trigger).replace("{script}", script)
    repository.write(f".{forge}/workflows/own.yaml", text)
    expected = {rule for rule, forges in found.items() if forge in forges.split()}
    told = repository.json("workflows.check", code=1 if expected else 0)["findings"]
    assert {finding["rule"] for finding in told} == expected


def test_a_folder_with_others_workflows_alone_is_no_installation(repository: Repository) -> None:
    repository.write(".github/workflows/own.yml", FOREIGN.replace("{trigger}", "pull_request"))
    (repository.folder / ".github/workflows/folder.yaml").mkdir()
    repository.run("workflows.new", "app", "--install", PIN)
    assert "is installed for no forge" in repository.run("workflows.check", code=1)
    repository.run("workflows.install", "--for", "gitea")
    repository.run("workflows.check")
    assert ".github/workflows/app.yaml:1: copy: is not there" in repository.run(
        "workflows.check", "--for", "both", code=1
    )


def test_install_keeps_what_was_made_by_hand(repository: Repository) -> None:
    """All or nothing, and a copy is known by its mark, or by being the same."""
    repository.run("workflows.new", "app", "--install", PIN)
    own = repository.write(".github/workflows/app.yaml", FOREIGN)
    assert "is no copy of workflows/app.yaml" in repository.run("workflows.install", code=2)
    assert own.read_text() == FOREIGN
    assert not (repository.folder / ".gitea").exists()
    own.unlink()
    repository.run("workflows.install")
    _change(repository.folder / "workflows/app.yaml", "timeout-minutes: 15", "timeout-minutes: 16")
    assert "written: .github/workflows/app.yaml" in repository.run("workflows.install")


def test_new_keeps_a_script_of_that_name(repository: Repository) -> None:
    own = repository.write("scripts/ci-setup", "#!/bin/sh\necho mine\n")
    assert "ci-setup is there" in repository.run("workflows.new", "app", "--install", PIN, code=2)
    assert own.read_text() == "#!/bin/sh\necho mine\n"
    assert not (repository.folder / "workflows").exists()


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nspec: {entrypoint: jobs}\n",
        "main:\n  steps:\n    - init: {assign: [{on: 1}]}\n",  # Google's Workflows
        "a: 1\n---\nb: {{ .Values.c }}\n",
        "",
    ],
)
def test_workflows_of_other_engines_are_left_alone(repository: Repository, text: str) -> None:
    repository.write("workflows/other.yaml", text)
    assert "no workflow in" in repository.run("workflows.install", code=2)
    repository.run("workflows.new", "app", "--install", PIN)
    assert "other" not in repository.run("workflows.install")
    repository.run("workflows.check")
    repository.write("workflows/hand.yml", "on:\n  push\njobs: [\n")
    assert "workflows/hand.yml:" in repository.run("workflows.check", code=1)


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (
            ".gitea/workflows/app.yaml",
            "RECIPE: app",
            "RECIPE: other",
            ".gitea/workflows/app.yaml:{line}: copy: differs",
        ),
        (".github/workflows/app.yaml", "RECIPE: app\n", "", ".github/workflows/app.yaml:{line}: copy: differs"),
        ("scripts/ci-setup", "set -euo pipefail", "set -eu", "scripts/ci-setup:1: setup: is not this version's"),
        ("workflows/app.yaml", '"images/app/**"', '"images/ap/**"', "workflows/app.yaml:{line}: dead-filter: no file"),
        ("workflows/app.yaml", "timeout-minutes: 15", "timeout-minutes: 999", "workflows/app.yaml:{line}: timeout"),
        ("workflows/app.yaml", "name: app", "name: [app", ": yaml: is not YAML"),
    ],
)
def test_check_names_the_place(repository: Repository, name: str, old: str, new: str, expected: str) -> None:
    repository.run("workflows.new", "app", "--install", PIN)
    repository.run("workflows.install")
    line = next(
        (n for n, row in enumerate((repository.folder / name).read_text().splitlines(), 1) if old.strip() in row), 0
    )
    _change(repository.folder / name, old, new)
    assert expected.format(line=line) in repository.run("workflows.check", code=1)


def test_check_misses_what_is_not_there(repository: Repository) -> None:
    repository.run("workflows.new", "app", "--install", PIN)
    repository.run("workflows.install", "--for", "gitea")
    assert "is not there" in repository.run("workflows.check", "--for", "both", code=1)
    (repository.folder / "scripts/ci-setup").unlink()
    assert "calls scripts/ci-setup, which is not there" in repository.run("workflows.check", code=1)
    shutil.move(repository.folder / "workflows/app.yaml", repository.folder / "workflows/renamed.yaml")
    findings = repository.json("workflows.check", code=1)["findings"]
    assert {"its source workflows/app.yaml is gone"} <= {finding["message"] for finding in findings}
    (repository.folder / "workflows/renamed.yaml").unlink()
    assert "workflows.new" in repository.run("workflows.check", code=2)


def test_the_script_of_the_jobs_is_the_packages_own() -> None:
    packaged = ROOT / "buildkit/workflows/files/ci-setup"
    assert (ROOT / "scripts/ci-setup").read_bytes() == packaged.read_bytes()
    assert os.access(ROOT / "scripts/ci-setup", os.X_OK)


def test_settings_reach_the_steps_that_follow(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    file = repository.folder / "env"
    for name, value in {
        "GITHUB_ENV": str(file),
        "GITHUB_SERVER_URL": "https://git.example.org",
        "GITHUB_REPOSITORY_OWNER": "Team",
        "GITHUB_REF": "refs/heads/main",
        "RECIPE": "app",
        "REGISTRY": "",
        "SPLIT": "true",
    }.items():
        monkeypatch.setenv(name, value)
    assert "git.example.org/team/app" in repository.run("workflows.settings")
    lines = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert (lines["TARGET"], lines["SPLIT_LAYERS"]) == ("git.example.org/team/app", "1")
    monkeypatch.setenv("RECIPE", "ap")
    assert "no recipe 'ap'" in repository.run("workflows.settings", code=2)


def test_settings_hand_on_values_that_are_whole_and_nothing_else(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables come from the repository's settings, refs from whoever pushes: neither adds a variable or a command."""
    file = repository.folder / "env"
    for name, value in {
        "GITHUB_ENV": str(file),
        "GITHUB_REPOSITORY_OWNER": "Team",
        "GITHUB_REF": "refs/heads/x\n::set-env name=PATH::/evil",
        "MAIN_BRANCH": "main\n##[add-path]/evil",
        "RECIPE": "app",
        "REGISTRY": "git.example.org/team",
    }.items():
        monkeypatch.setenv(name, value)
    told = repository.run("workflows.settings").splitlines()
    assert not [line for line in told if line.lstrip().startswith("::") or "##[" in line]
    lines = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert lines["TARGET"] == "git.example.org/team/app"
    assert len(lines) == 6
    monkeypatch.setenv("REGISTRY", "git.example.org/x\nLD_PRELOAD=/evil")
    before = file.read_text()
    assert "is not a repository name" in repository.run("workflows.settings", code=2)
    assert file.read_text() == before
    file.unlink()
    actions.write_environment({"A": "x" * 1000 + "\nB=1"})
    assert file.read_text() == f"A={'x' * 1000} B=1\n"
