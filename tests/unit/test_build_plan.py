"""From recipe to builder: names, labels, arguments, the choice of the builder, secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.build import BaseImage, BuildOptions, Client, GitFacts, choose, plan
from buildkit.build import labels as label
from buildkit.build.base import base_key, host_suite
from buildkit.build.clients import find_clients
from buildkit.build.plan import BuildPlan, command, needs_buildkit
from buildkit.build.secrets import LARGEST, places
from buildkit.errors import BuildkitError, MissingComponentError, UsageError
from buildkit.model import Digest, Platform
from buildkit.recipe import Debootstrap, Recipe, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = GitFacts(revision=COMMIT, time=1_767_225_600, url="https://git.example.org/team/images.git")
RECIPE = """\
name: probe
description: a probe
version: "1.2"
tags: [sm70, "sm70-{short_revision}", "{version}"]
source: {url: https://example.org/src.git, revision: abcdef0123456789}
base: {image: "cuda:12.9", arg: CUDA}
args: {SM: "{sm}", URL: "{source_url}", REV: "{source_revision}"}
labels: {team: "serving-{date}"}
cuda: {require: [sm_70], version: "12.9"}
"""


def recipe(text: str = RECIPE, folder: Path = Path("images/probe")) -> Recipe:
    return parse(text.encode(), folder=folder)


def planned(options: BuildOptions | None = None, facts: GitFacts = FACTS, text: str = RECIPE) -> BuildPlan:
    return plan(recipe(text), facts, BaseImage(name="cuda:12.9", digest=Digest.of(b"base")), options or BuildOptions())


def test_names_labels_and_arguments_come_from_recipe_and_commit() -> None:
    made = planned()
    assert made.names == ("probe:sm70", "probe:sm70-0123456789ab", "probe:1.2")
    assert made.epoch == 1_767_225_600
    assert dict(made.arguments) == {
        "SM": "70",
        "URL": "https://example.org/src.git",
        "REV": "abcdef0123456789",
        "CUDA": "cuda:12.9",
        "SOURCE_DATE_EPOCH": "1767225600",
    }
    assert dict(made.labels) == {
        label.TITLE: "probe",
        label.DESCRIPTION: "a probe",
        label.CREATED: "2026-01-01T00:00:00Z",
        label.SOURCE: "https://git.example.org/team/images.git",
        label.REVISION: COMMIT,
        label.VERSION: "1.2",
        label.BASE_NAME: "cuda:12.9",
        label.BASE_DIGEST: str(Digest.of(b"base")),
        label.RECIPE: "probe",
        label.SM: "70",
        label.CUDA: "12.9",
        label.SOURCE_URL: "https://example.org/src.git",
        label.SOURCE_REVISION: "abcdef0123456789",
        "team": "serving-20260101",
    }


def test_a_fork_is_built_by_overriding_source_and_revision() -> None:
    made = planned(BuildOptions(source_url="https://example.org/fork.git", source_revision="fix/conv"))
    assert made.arguments["URL"] == made.labels[label.SOURCE_URL] == "https://example.org/fork.git"
    assert made.arguments["REV"] == made.labels[label.SOURCE_REVISION] == "fix/conv"


def test_the_callers_arguments_and_tags_win() -> None:
    made = planned(BuildOptions(arguments={"SM": "75", "NEW": "x"}, tags=("mine",), timeout=5))
    assert made.arguments["SM"] == "75"
    assert made.arguments["NEW"] == "x"
    assert made.names == ("probe:mine",)
    assert made.timeout == 5


def test_a_dirty_tree_is_labelled_and_takes_no_commits_tag() -> None:
    made = planned(facts=GitFacts(revision=COMMIT, time=0, dirty=True))
    assert made.labels[label.DIRTY] == "true"
    assert made.labels[label.REVISION] == COMMIT
    assert made.names == ("probe:sm70", "probe:sm70-0123456789ab-dirty", "probe:1.2")


def test_without_git_a_tag_that_needs_the_commit_is_an_error_and_a_given_revision_cures_it() -> None:
    with pytest.raises(UsageError, match=r"\{short_revision\} has no value here"):
        planned(facts=GitFacts(), text='name: probe\ntags: [a, "sm70-{short_revision}"]\n')
    made = planned(BuildOptions(revision="f" * 40, tags=("{short_revision}",)), facts=GitFacts(), text=SMALL)
    assert made.names == ("probe:ffffffffffff",)
    assert label.CREATED not in made.labels
    assert made.epoch is None


SMALL = "name: probe\ntags: [sm70]\n"


def test_a_source_revision_that_makes_no_tag_is_an_error() -> None:
    with pytest.raises(UsageError, match="becomes 'fix/conv', which is not a tag"):
        planned(BuildOptions(source_revision="fix/conv", tags=("{source_revision}",)))


@given(st.text(max_size=8), st.text(max_size=8))
def test_whatever_the_revision_is_names_are_tags_or_an_error(revision: str, template: str) -> None:
    try:
        made = planned(BuildOptions(revision=revision, tags=(template + "{short_revision}",)))
    except UsageError:
        return
    assert all(part.isascii() and part.isprintable() for part in made.names)


def test_the_command_line_has_places_of_secrets_and_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{SMALL}secrets: [{{id: t, env: TOKEN}}]\nbuild: {{network: host}}\ntarget: image\n"
    found = places(recipe(text), environ={"TOKEN": "hunter2hunter2"})
    words = command(planned(text=text), found.options)
    assert "--secret=id=t,env=TOKEN" in words
    assert "--network=host" in words
    assert "--target=image" in words
    assert "hunter2" not in " ".join(words)
    assert "hunter2" not in repr(found)


# The choice of the builder -------------------------------------------------------------------------------------------

NEW = Client(path="/usr/local/bin/docker", version=(28, 2), buildx=None)
OLD = Client(path="/usr/bin/docker", version=(20, 10), buildx=None)
PLUGIN = Client(path="/opt/docker", version=(27, 0), buildx="0.17.1")


@pytest.mark.parametrize(
    ("clients", "backend", "path"),
    [
        ((NEW, OLD, PLUGIN), "buildx", "/opt/docker"),
        ((NEW, OLD), "docker", "/usr/bin/docker"),
        ((OLD, NEW), "docker", "/usr/bin/docker"),
        ((NEW,), "classic", None),
        ((), "classic", None),
        ((Client(path="/x", version=None, buildx=None),), "classic", None),
    ],
)
def test_buildx_then_a_client_with_buildkit_then_the_classic_builder(
    clients: tuple[Client, ...], backend: str, path: str | None
) -> None:
    chosen = choose(clients, backend="auto", builder=None, needs=None)
    assert chosen.backend == backend
    assert (chosen.client.path if chosen.client else None) == path


def test_a_named_builder_needs_buildx_and_says_how_to_get_it() -> None:
    assert choose((NEW, PLUGIN), backend="auto", builder="k8s", needs=None).client == PLUGIN
    with pytest.raises(MissingComponentError, match=r"builder 'k8s' needs docker buildx.*docker-buildx") as caught:
        choose((NEW, OLD), backend="auto", builder="k8s", needs=None)
    assert caught.value.exit_code == 3
    with pytest.raises(UsageError, match="is not buildx"):
        choose((PLUGIN,), backend="classic", builder="k8s", needs=None)


def test_what_the_classic_builder_lacks_is_told_before_anything_runs() -> None:
    with pytest.raises(MissingComponentError, match="needs BuildKit \\(the build secret t\\)") as caught:
        choose((NEW,), backend="auto", builder=None, needs="the build secret t")
    assert caught.value.exit_code == 3
    for backend in ("buildx", "docker"):
        with pytest.raises(MissingComponentError):
            choose((NEW,), backend=backend, builder=None, needs=None)


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM a\nRUN true\n", None),
        ("FROM a\nRUN --mount=type=secret,id=x true\n", "RUN --mount in Dockerfile, line 2"),
        ("FROM a\nrun --network=host --mount=type=cache,target=/x true\n", "RUN --mount in Dockerfile, line 2"),
        ("FROM a\nCOPY --from=a /x /y\nCOPY --chown=1:1 a b\n", None),
        ("FROM a\nCOPY --from=a --chmod=755 /x /y\n", "an option of COPY or ADD in Dockerfile, line 2"),
        ("FROM a\nRUN <<EOF\ntrue\nEOF\n", "a here-document in Dockerfile, line 2"),
        ("FROM a\n# RUN --mount=x\nRUN echo --mount\n", None),
        ("FROM a\nRUN echo $((1 << 2))\n", None),
    ],
)
def test_instructions_that_need_buildkit_are_found_with_their_line(dockerfile: str, expected: str | None) -> None:
    assert needs_buildkit(recipe(SMALL), dockerfile) == expected


def test_required_secrets_need_buildkit_and_optional_ones_do_not() -> None:
    assert needs_buildkit(recipe(f"{SMALL}secrets: [{{id: t, env: T}}]\n"), "") == "the build secret t"
    assert needs_buildkit(recipe(f"{SMALL}secrets: [{{id: t, env: T, optional: true}}]\n"), "") is None


def client(path: Path, version: str, *, buildx: bool) -> None:
    """A program that answers like a Docker client."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plugin = "echo github.com/docker/buildx v0.17.1 abc" if buildx else "echo unknown command >&2; exit 1"
    # Without an engine, `docker version` prints its own version and still fails.
    path.write_text(f"#!/bin/sh\ncase $1 in version) echo {version}; exit 1;; buildx) {plugin};; esac\n")
    path.chmod(0o755)


def test_every_client_on_path_is_looked_at_and_each_once(tmp_path: Path) -> None:
    client(tmp_path / "a" / "docker", "28.2.2", buildx=False)
    client(tmp_path / "b" / "docker", "20.10.24+dfsg1", buildx=False)
    client(tmp_path / "c" / "docker", "27.1.0", buildx=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "docker").symlink_to(tmp_path / "a" / "docker")
    path = os.pathsep.join(str(tmp_path / name) for name in "abcd") + os.pathsep + "/bin"
    found = [found for found in find_clients({"PATH": path}) if found.path.startswith(str(tmp_path))]
    assert [(found.version, found.buildx) for found in found] == [
        ((28, 2), None),
        ((20, 10), None),
        ((27, 1), "0.17.1"),
    ]


# Secrets -------------------------------------------------------------------------------------------------------------


def test_a_missing_secret_is_an_error_unless_it_is_optional(tmp_path: Path) -> None:
    text = f"{SMALL}secrets: [{{id: t, env: TOKEN}}]\n"
    with pytest.raises(UsageError, match="build secret t of recipe probe: the variable TOKEN is not set"):
        places(recipe(text), environ={})
    with pytest.raises(UsageError, match="nowhere is not there"):
        places(recipe(f"{SMALL}secrets: [{{id: t, file: nowhere}}]\n", folder=tmp_path), environ={})
    optional = f"{SMALL}secrets: [{{id: t, env: TOKEN, optional: true}}, {{id: f, file: nowhere, optional: true}}]\n"
    assert places(recipe(optional), environ={}).options == ()


def test_files_and_the_ca_bundle_are_passed_by_path(tmp_path: Path) -> None:
    (tmp_path / "a,b").write_text("file-secret\n")
    (tmp_path / "ca.crt").write_text("CERTIFICATE\n")
    text = f"{SMALL}secrets: [{{id: f, file: 'a,b'}}, {{id: c, ca_bundle: true}}]\n"
    found = places(recipe(text, folder=tmp_path), environ={"SSL_CERT_FILE": str(tmp_path / "ca.crt")})
    assert found.options == (f'id=f,"src={tmp_path}/a,b"', f"id=c,src={tmp_path}/ca.crt")
    assert found.blot("x file-secret CERTIFICATE") == "x *** CERTIFICATE"


def test_a_secret_that_buildkit_would_refuse_is_refused_here() -> None:
    with pytest.raises(UsageError, match="more than the 512000"):
        places(recipe(f"{SMALL}secrets: [{{id: t, env: T}}]\n"), environ={"T": "x" * (LARGEST + 1)})


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0*"), min_size=4), min_size=1, max_size=4))
def test_no_line_of_a_secret_survives_blotting(values: list[str]) -> None:
    names = [f"S{n}" for n in range(len(values))]
    text = SMALL + "secrets: [" + ", ".join(f"{{id: {n}, env: {n}, optional: true}}" for n in names) + "]\n"
    found = places(recipe(text), environ=dict(zip(names, values, strict=True)))
    for value in values:
        for line in value.splitlines():
            if len(line.strip()) >= 4:
                assert line.strip() not in found.blot(f"before {line.strip()} after")


# Bases ---------------------------------------------------------------------------------------------------------------


def test_a_bases_key_depends_on_everything_it_is_made_from_and_not_on_order() -> None:
    spec = Debootstrap(include=("a", "b"), components=("main", "extra"))
    key = base_key(spec, "bookworm", Platform())
    assert key == base_key(Debootstrap(include=("b", "a"), components=("extra", "main")), "bookworm", Platform())
    others = {
        base_key(spec, "trixie", Platform()),
        base_key(spec, "bookworm", Platform(architecture="arm64")),
        base_key(Debootstrap(include=("a",), components=("main", "extra")), "bookworm", Platform()),
        base_key(Debootstrap(include=("a", "b"), components=("main",)), "bookworm", Platform()),
        base_key(
            Debootstrap(include=("a", "b"), components=("main", "extra"), variant="buildd"), "bookworm", Platform()
        ),
    }
    assert len(others | {key}) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ID=debian\nVERSION_CODENAME=bookworm\n", "bookworm"),
        ('VERSION_CODENAME="noble"\n', "noble"),
        ("ID=fedora\nVERSION_CODENAME=\n", None),
        ("", None),
    ],
)
def test_the_hosts_release_is_read_from_os_release(tmp_path: Path, text: str, expected: str | None) -> None:
    (tmp_path / "os-release").write_text(text)
    try:
        assert host_suite(tmp_path / "os-release") == expected
    except BuildkitError as error:
        assert expected is None, error  # noqa: PT017
