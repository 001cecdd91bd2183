"""What is read from git, on real repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from buildkit.build.git import GitFacts, facts, is_ancestor, public_url


def git(folder: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+0100",
        "GIT_COMMITTER_DATE": "2026-01-02T03:04:05+0100",
    }
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "images" / "probe").mkdir(parents=True)
    (folder / "images" / "probe" / "recipe.yaml").write_text("name: probe\n")
    (folder / "other.txt").write_text("x")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_commit_time_and_origin_are_read(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://user:secret@git.example.org/team/repo.git")
    found = facts([repository / "images" / "probe"], environ={})
    assert found.revision == git(repository, "rev-parse", "HEAD")
    assert found.created == "2026-01-02T02:04:05Z"
    assert found.date == "20260102"
    assert found.url == "https://git.example.org/team/repo.git"
    assert not found.dirty


def test_only_the_given_paths_make_it_dirty(repository: Path) -> None:
    folder = repository / "images" / "probe"
    (repository / "other.txt").write_text("changed")
    assert not facts([folder], environ={}).dirty
    assert facts([folder, repository], environ={}).dirty
    (folder / "new").write_text("untracked")
    assert facts([folder], environ={}).dirty


def test_a_detached_head_and_a_shallow_clone_have_facts_too(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", str(clone))
    git(clone, "checkout", "-q", "--detach")
    found = facts([clone / "images" / "probe"], environ={})
    assert found.revision == git(repository, "rev-parse", "HEAD")
    assert found.url is None  # a path of this machine is nobody else's source


def test_outside_a_repository_the_ci_variables_serve_and_nothing_fails(tmp_path: Path) -> None:
    assert facts([tmp_path], environ={}) == GitFacts()
    environ = {
        "GITHUB_SHA": "a" * 40,
        "GITHUB_SERVER_URL": "https://git.example.org/",
        "GITHUB_REPOSITORY": "team/repo",
    }
    assert facts([tmp_path], environ=environ) == GitFacts(revision="a" * 40, url="https://git.example.org/team/repo")
    assert facts([tmp_path], environ={"GITHUB_SHA": "not a commit"}) == GitFacts()


def test_an_empty_repository_has_no_facts(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert facts([tmp_path], environ={}) == GitFacts()


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("https://git.example.org/a/b.git", "https://git.example.org/a/b.git"),
        ("https://user:p%40ss@git.example.org:8443/a", "https://git.example.org:8443/a"),
        ("https://token@git.example.org/a?private_token=x#y", "https://git.example.org/a"),
        ("git@git.example.org:team/repo.git", "ssh://git.example.org/team/repo.git"),
        ("ssh://git@git.example.org:2222/a/b", "ssh://git.example.org:2222/a/b"),
        ("https://[2001:db8::1]:8443/a", "https://[2001:db8::1]:8443/a"),
        ("/srv/git/repo", None),
        ("file:///srv/git/repo", None),
        ("../repo", None),
        ("https://", None),
        ("https://host:notaport/a", None),
        ("", None),
    ],
)
def test_a_label_shows_no_credentials_and_no_path_of_this_machine(origin: str, expected: str | None) -> None:
    assert public_url(origin) == expected


def test_ancestry_is_told_where_both_commits_are_known(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    second = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "-b", "side", first)
    git(repository, "commit", "-q", "--allow-empty", "-m", "aside")
    aside = git(repository, "rev-parse", "HEAD")
    below = repository / "images" / "probe"
    assert is_ancestor(first, second, below) is True
    assert is_ancestor(first, first, below) is True
    assert is_ancestor(second, first, below) is False
    assert is_ancestor(second, aside, below) is is_ancestor(aside, second, below) is False
    assert is_ancestor("a" * 40, second, below) is None
    assert is_ancestor(first, second, tmp_path) is None
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--branch", "side", repository.as_uri(), str(shallow))
    assert is_ancestor(first, aside, shallow) is None


@pytest.mark.parametrize("text", ["", "HEAD", "--help", "main", "a" * 39, "A" * 40, "a" * 40 + "\n", "--output=x"])
def test_what_is_no_commit_never_reaches_git(repository: Path, text: str) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert is_ancestor(text, commit, repository) is None
    assert is_ancestor(commit, text, repository) is None
