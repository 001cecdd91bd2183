"""What a run was told: inputs and variables in every form in which forges pass them."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildkit.errors import RecipeError, UsageError
from buildkit.recipe import Recipe, parse
from buildkit.workflows import read_settings
from buildkit.workflows.settings import parse_flag, registry_of

GITEA = {
    "GITHUB_SERVER_URL": "https://git.example.org",
    "GITHUB_REPOSITORY_OWNER": "Team",
    "GITHUB_REF": "refs/heads/main",
    "MAIN_BRANCH": "main",
    "RECIPE": "app",
}


def recipe(more: str = "") -> Recipe:
    return parse(f"name: app\ntags: [sm70]\n{more}".encode(), folder=Path("/nowhere/app"))


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", "yes", " true "])
def test_yes(text: str) -> None:
    assert parse_flag(text, default=False, name="X") is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "off"])
def test_no(text: str) -> None:
    assert parse_flag(text, default=True, name="X") is False


@pytest.mark.parametrize("default", [True, False])
def test_nothing_is_the_default(default: bool) -> None:
    assert parse_flag("", default=default, name="X") is default


@pytest.mark.parametrize(
    ("environ", "registry"),
    [
        ({}, "git.example.org/team"),
        ({"GITHUB_SERVER_URL": "https://git.example.org:3000/"}, "git.example.org:3000/team"),
        ({"GITHUB_SERVER_URL": "https://github.com"}, "ghcr.io/team"),
        ({"REGISTRY": "127.0.0.1:5000"}, "127.0.0.1:5000/team"),
        ({"REGISTRY": "https://packages.example.org/"}, "packages.example.org/team"),
        ({"REGISTRY": "packages.example.org/other/deep"}, "packages.example.org/other/deep"),
        ({"REGISTRY_OWNER": "Bots"}, "git.example.org/bots"),
        ({"REGISTRY": " ", "REGISTRY_OWNER": " "}, "git.example.org/team"),
        ({"REGISTRY": "127.0.0.1:5000", "GITHUB_REPOSITORY_OWNER": ""}, "127.0.0.1:5000"),
    ],
)
def test_the_registry(environ: dict[str, str], registry: str) -> None:
    assert registry_of({**GITEA, **environ}) == registry


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"REGISTRY": "http://user:secret@host:5000"}, "scheme"),
        ({"REGISTRY": "user:secret@git.example.org"}, "user name"),
        ({"REGISTRY": "gitea"}, "names no registry"),
        ({"REGISTRY": "git.example.org/a", "REGISTRY_OWNER": "b"}, "unset one"),
        ({"REGISTRY_OWNER": "no spaces"}, "REGISTRY_OWNER"),
        ({"GITHUB_SERVER_URL": ""}, "REGISTRY"),
        ({"GITHUB_REPOSITORY_OWNER": ""}, "REGISTRY_OWNER"),
    ],
)
def test_a_registry_that_cannot_be(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        registry_of({**GITEA, **environ})
    assert "secret" not in str(caught.value)


def test_where_the_image_goes() -> None:
    own = recipe("push: {target: '${BUILDKIT_REGISTRY}/images/app'}\n")
    assert read_settings(GITEA, lambda _: own).target.name == "git.example.org/team/images/app"
    assert read_settings(GITEA, lambda _: recipe()).target.name == "git.example.org/team/app"
    named = {**GITEA, "IMAGE": "ghcr.io/other/thing"}
    assert read_settings(named, lambda _: own).target.name == "ghcr.io/other/thing"
    with pytest.raises(UsageError, match="tag"):
        read_settings({**GITEA, "IMAGE": "ghcr.io/other/thing:1"}, lambda _: own)


@pytest.mark.parametrize(
    ("environ", "stages"),
    [
        ({}, "verify,promote,attach"),
        ({"PROMOTE": "true"}, "verify,promote,attach"),
        ({"PROMOTE": "false"}, "verify,attach"),
        ({"GITHUB_REF": "refs/heads/dev"}, "verify,attach"),
        ({"GITHUB_REF": "refs/heads/dev", "PROMOTE": "true"}, "verify,attach"),
        ({"GITHUB_REF": "refs/tags/main"}, "verify,attach"),
        ({"GITHUB_REF": ""}, "verify,attach"),
        ({"GITHUB_REF": "refs/heads/release", "MAIN_BRANCH": "release"}, "verify,promote,attach"),
    ],
)
def test_plain_tags_move_on_the_main_branch_only(environ: dict[str, str], stages: str) -> None:
    assert read_settings({**GITEA, **environ}, lambda _: recipe()).environment["PUBLISH_STAGES"] == stages


def test_a_gpu_is_demanded_where_a_runner_with_one_is_named() -> None:
    gpu = recipe("cuda: {require: [sm_70]}\nsmoke: {library: /lib/x.so, levels: [kernel]}\n")
    cpu = recipe("smoke: {levels: [server], server: {command: [x]}}\n")
    assert read_settings(GITEA, lambda _: gpu).environment["ALLOW_MISSING_GPU"] == "1"
    assert read_settings({**GITEA, "GPU_RUNNER": "gpu-v100"}, lambda _: gpu).environment["ALLOW_MISSING_GPU"] == ""
    assert read_settings(GITEA, lambda _: cpu).environment["ALLOW_MISSING_GPU"] == ""


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({"PROMOTE": "perhaps", "SPLIT": "2"}, lambda _: recipe())
    for word in ("PROMOTE", "perhaps", "SPLIT", "REGISTRY", "RECIPE"):
        assert word in str(caught.value)


def test_a_broken_recipe_is_told_as_such() -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml:2"):
        read_settings(GITEA, lambda _: parse(b"name: app\ntags: {}\n", folder=Path("/nowhere/app")))
