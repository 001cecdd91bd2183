"""Recipes: what is read, and that every mistake is named with its dotted path and line."""

from __future__ import annotations

import contextlib
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import RecipeError, UsageError
from buildkit.model import Platform
from buildkit.recipe import PLACEHOLDERS, Recipe, expand, find_recipes, images_folder, load, parse, push_target

FOLDER = Path("images/probe")

FULL = """\
name: probe
description: all keys at once
image: team/probe
version: "1.2"
licenses: MIT
tags: [sm70, "sm70-{short_revision}"]
platform: linux/arm64
dockerfile: docker/Dockerfile
context: ../..
target: image
source:
  url: https://example.org/a/b.git
  revision: v1.2
base:
  arg: FROM_IMAGE
  image: example.org/cuda:12.9
  digest: sha256:{digest}
args:
  ARCH: "{{sm}}"
  JOBS: 4
secrets:
  - {{id: token, env: TOKEN}}
  - {{id: ca, ca_bundle: true, optional: true}}
  - {{id: key, file: ~/key}}
labels:
  org.example.team: serving
build:
  builder: remote
  network: host
  timeout: 90m
  min_disk: 20GB
cuda:
  require: [sm_70, sm_75]
  runtime: ">=12,<13"
  version: "12.9"
  exceptions:
    - {{path: /usr/lib/x/**, reason: never loaded}}
start:
  command: [server, --help]
  env: {{A: b}}
  expect: usage
  writable: [/tmp, /run]
  timeout: 30s
smoke:
  library: /usr/lib/libgdn.so
  dtype: f32
  levels: [kernel, server]
  server:
    command: [server, --port, "{{port}}"]
    port: 9000
    health: /ready
    model: /m
    timeout: 5m
push:
  target: ${{REGISTRY}}/team/probe
  chunk_size: 50MB
  limit: 95MB
  edge: business
  split: true
  codec: zstd:5
""".replace("{short_revision}", "{{short_revision}}").format(digest="a" * 64)

SMALL = "name: probe\ntags: [sm70]\n"


def read(text: str | bytes, *, name: str | None = None) -> Recipe:
    return parse(text.encode() if isinstance(text, str) else text, folder=FOLDER, name=name)


def problems(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_every_key_arrives_with_its_type() -> None:
    recipe = read(FULL)
    assert recipe.image == "team/probe"
    assert recipe.platform == Platform(architecture="arm64")
    assert recipe.tags == ("sm70", "sm70-{short_revision}")
    assert recipe.base is not None
    assert recipe.base.pinned == f"example.org/cuda:12.9@sha256:{'a' * 64}"
    assert dict(recipe.arguments) == {"ARCH": "{sm}", "JOBS": "4"}
    assert [secret.id for secret in recipe.secrets] == ["token", "ca", "key"]
    assert recipe.build.timeout == 5400
    assert recipe.build.min_disk == 20_000_000_000
    assert recipe.cuda.sm == "70"
    assert recipe.cuda.exceptions[0].reason == "never loaded"
    assert recipe.start.writable == ("/tmp", "/run")
    assert recipe.smoke.server is not None
    assert recipe.smoke.server.port == 9000
    assert recipe.push.chunk_size == 50_000_000
    assert recipe.push.codec is not None
    assert recipe.push.codec.level == 5
    assert recipe.push.edge == "business"
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]


def test_a_small_recipe_has_defaults() -> None:
    recipe = read(SMALL)
    assert recipe.image == "probe"
    assert recipe.base is None
    assert recipe.dockerfile == "Dockerfile"
    assert recipe.smoke.server is None
    assert recipe.push.target is None


WRONG = [
    ("name: probe\ntags: [a]\ntag: [a]\n", "3: tag: is not a known key (did you mean tags?)"),
    ("name: probe\n", "1: tags: is missing"),
    ("name: probe\ntags: []\n", "2: tags: must have at least one entry"),
    ("name: probe\ntags: sm70\n", "2: tags: must be a list, not a text"),
    ("name: probe\ntags: [1.0]\n", "2: tags[0]: must be a text: write it in quotes, '1.0'"),
    ("name: probe\ntags:\n", "2: tags: must be a list, not nothing"),
    ("name: [probe]\ntags: [a]\n", "1: name: must be a text, not a list"),
    ("name: Probe\ntags: [a]\n", "1: name: Probe is not a name: a-z, 0-9, and . _ - between"),
    (SMALL + "name: probe\n", "3: name: is there twice (first on line 1)"),
    (SMALL + "args: {A: off}\n", "3: args.A: must be a text: write it in quotes, 'off'"),
    (SMALL + "args: {A: }\n", "3: args.A: has no value (leave the key out, or give it one)"),
    (SMALL + "args: {A-B: x}\n", "3: args.A-B: A-B is not a build argument's name"),
    (SMALL + "args:\n  A: '{nonsense}'\n", "4: args.A: {nonsense} is not a placeholder"),
    (SMALL + "args:\n  A: '{name'\n", "4: args.A: '{name': expected '}' before end of string"),
    (SMALL + "args:\n  A: '{name.x}'\n", "4: args.A: {name.x} is not a placeholder"),
    (SMALL + "args:\n  A: '{name!r}'\n", "4: args.A: {name} is not a placeholder"),
    (SMALL + "version: 1.10\n", "3: version: must be a text: write it in quotes, '1.10'"),
    (SMALL + "platform: linux\n", "3: platform: 'linux' is not a platform (write it like linux/amd64)"),
    (SMALL + "dockerfile: /etc/passwd\n", "3: dockerfile: /etc/passwd must be relative to the recipe's folder"),
    (SMALL + "source: {url: 'https://u:p@example.org/x'}\n", "3: source.url: https://u:p@example.org/x is not a URL"),
    (SMALL + "base: {}\n", "3: base.image: is missing (or base.debootstrap)"),
    (SMALL + "base: {image: ubuntu}\n", "3: base.image: ubuntu is not pinned to a version"),
    (SMALL + "base: {image: 'ubuntu:latest'}\n", "3: base.image: ubuntu:latest is not pinned to a version"),
    (SMALL + "base: {image: 'a:1', digest: sha256:12}\n", "3: base.digest: 'sha256:12' is not a digest"),
    (SMALL + "base: {image: 'a:1', debootstrap: {}}\n", "3: base.image: cannot stand beside base.debootstrap"),
    (
        SMALL + "base: {debootstrap: {suites: x}}\n",
        "3: base.debootstrap.suites: is not a known key (did you mean suite?)",
    ),
    (SMALL + "secrets: [{id: a}]\n", "3: secrets[0].id: needs exactly one of env, file and ca_bundle: true beside it"),
    (SMALL + "secrets: [{id: a, env: A}, {id: a, env: B}]\n", "3: secrets[1].id: a is there twice"),
    (SMALL + "secrets: {id: a}\n", "3: secrets: must be a list, not a table of keys"),
    (SMALL + "secrets: [a]\n", "3: secrets[0]: must be a table of keys, not a text"),
    (SMALL + "build: {network: bridge}\n", "3: build.network: bridge is not one of default, host, none"),
    (SMALL + "build: {timeout: soon}\n", "3: build.timeout: duration 'soon' is not a duration"),
    (SMALL + "build: {timeout: 0}\n", "3: build.timeout: must be longer than no time"),
    (SMALL + "build: {min_disk: 1XB}\n", "3: build.min_disk: size '1XB' is not a size"),
    (SMALL + "cuda: {require: [70]}\n", "3: cuda.require[0]: must be a text: write it in quotes, '70'"),
    (SMALL + "cuda: {require: [volta]}\n", "3: cuda.require[0]: volta is not an architecture such as sm_70"),
    (SMALL + "cuda: {runtime: '12.9'}\n", "3: cuda.runtime: 12.9 is not a constraint on versions"),
    (SMALL + "cuda: {version: 12.9}\n", "3: cuda.version: must be a text: write it in quotes, '12.9'"),
    (
        SMALL + "cuda:\n  exceptions:\n  - {path: lib, reason: x}\n",
        "5: cuda.exceptions[0].path: lib is not an absolute path",
    ),
    (SMALL + "cuda:\n  exceptions:\n  - path: /lib\n", "5: cuda.exceptions[0].reason: is missing"),
    (SMALL + "start: {port: '80', health: /}\n", "3: start.port: must be a whole number, not a text"),
    (SMALL + "start: {port: 0x50, health: /}\n", "3: start.port: 0x50 is not a number from 1 to 65535"),
    (SMALL + "start: {port: 70000, health: /}\n", "3: start.port: 70000 is not a number from 1 to 65535"),
    (SMALL + "start: {health: /}\n", "3: start.health: health and port go together"),
    (SMALL + "start: {expect: '('}\n", "3: start.expect: ( is not a regular expression"),
    (SMALL + "start: {command: []}\n", "3: start.command: must have at least one entry"),
    (SMALL + "smoke: {dtype: f64}\n", "3: smoke.dtype: f64 is not one of f32, f16, bf16"),
    (SMALL + "smoke: {library: lib.so}\n", "3: smoke.library: lib.so is not an absolute path in the image"),
    (SMALL + "smoke: {library: /a/../b}\n", "3: smoke.library: /a/../b is not an absolute path in the image"),
    (SMALL + "smoke: {levels: [kernel]}\n", "3: smoke.levels: kernel needs smoke.library"),
    (SMALL + "smoke: {levels: [server]}\n", "3: smoke.levels: server needs smoke.server"),
    (SMALL + "smoke: {levels: [all]}\n", "3: smoke.levels[0]: all is not one of kernel, server"),
    (SMALL + "push: {target: probe}\n", "3: push.target: image reference 'probe' names no registry"),
    (SMALL + "push: {target: 'example.org/a:b'}\n", "3: push.target: example.org/a:b must be without tag and digest"),
    (SMALL + "push: {target: '${A B}/a'}\n", "3: push.target: ${A B}/a has a ${"),
    (SMALL + "push: {edge: akamai}\n", "3: push.edge: unknown edge 'akamai'"),
    (SMALL + "push: {split: 1}\n", "3: push.split: must be true or false, not a number"),
    (SMALL + "push: {codec: xz}\n", "3: push.codec: compression 'xz' is not known"),
    (SMALL + "push: {chunk_size: 2MB, limit: 1MB}\n", "3: push.chunk_size: is larger than push.limit"),
    ("name: probe\ntags: ['a b']\n", "2: tags[0]: a b does not make a tag"),
    ("name: probe\ntags: ['{source_url}']\n", "2: tags[0]: {source_url} cannot be in a tag"),
    ("name: probe\ntags: ['{version}']\n", "2: tags[0]: {version} needs the recipe to have a version"),
    (SMALL + "1: x\n", "3: has a key that is not a text (1): write it in quotes"),
    (SMALL + "description: |\n  two\n  lines\n", "3: description: has a line break or another control character in it"),
    (SMALL + "description: '  '\n", "3: description: is empty"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_each_mistake_is_named_with_its_line_and_dotted_path(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert found[0].startswith(f"{FOLDER}/recipe.yaml:{expected}")


def test_all_mistakes_are_told_at_once_in_the_order_of_lines() -> None:
    found = problems("nmae: x\ntags: [1]\nbuild:\n  tiemout: 1\npush:\n  splitt: true\n")
    assert [problem.split(": ")[0].rpartition(":")[2] for problem in found] == ["1", "1", "2", "4", "6"]
    with pytest.raises(RecipeError, match="splitt"):
        read("nmae: x\ntags: [1]\nbuild:\n  tiemout: 1\npush:\n  splitt: true\n")


HOSTILE = {
    "empty": (b"", "is empty"),
    "only a comment": (b"# nothing\n", "is empty"),
    "not utf-8": (b"name: probe\ntags: [\xff]\n", "recipe.yaml:2: is not UTF-8 text"),
    "a list": (b"- a\n", "recipe.yaml:1: must be a table of keys, not a list"),
    "a text": (b"hello\n", "must be a table of keys, not a text"),
    "two documents": (b"name: a\n---\nname: b\n", "recipe.yaml:2: is not YAML"),
    "not closed": (b"name: [a\n", "is not YAML"),
    "tab": (b"name: a\n\ttags: [a]\n", "recipe.yaml:2: is not YAML"),
    "unknown alias": (b"name: *x\n", "recipe.yaml:1: is not YAML"),
    "NUL": (b"name: a\x00b\n", "is not YAML"),
    "python tag": (b"name: !!python/object/apply:os.system [x]\ntags: [a]\n", "something with the tag"),
    "tagged table": (b"name: probe\ntags: [a]\nbuild: !!set {a}\n", "build: must be a table of keys"),
    "own tag": (b"name: !secret x\ntags: [a]\n", "has the tag !secret, and tags are not allowed"),
    "binary": (b"name: !!binary aGVsbG8=\ntags: [a]\n", "must be a text"),
    "deep": (b"name: " + b"[" * 3000, "nested too deeply"),
    "huge": (b"#" * 300_000, "more than the 262144"),
    "merges itself": (b"name: probe\ntags: [a]\nargs: &a\n  <<: *a\n", "merges (<<) itself"),
    "merges a text": (b"name: probe\ntags: [a]\nargs:\n  <<: x\n", "merges (<<) a text, which is not a table"),
    "recursive list": (b"name: probe\ntags: &a [*a]\n", "tags[0]: must be a text, not a list"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_one_line_that_names_the_file(kind: str) -> None:
    text, expected = HOSTILE[kind]
    found = problems(text)
    assert all(problem.startswith(f"{FOLDER}/recipe.yaml") for problem in found)
    assert any(expected in problem for problem in found), found


def test_aliases_that_would_grow_without_bound_are_not_walked() -> None:
    lists = "\n".join(f"x-{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 10)}]" for n in range(30))
    assert read(f"{SMALL}x-0: &l0 [a]\n{lists}\n").name == "probe"


def test_merges_that_would_grow_without_bound_are_refused() -> None:
    tables = "\n".join(f"x-{n + 1}: &t{n + 1}\n  <<: [{', '.join([f'*t{n}'] * 10)}]" for n in range(9))
    assert any("too much" in problem for problem in problems(f"{SMALL}x-0: &t0 {{A: b}}\n{tables}\nargs: *t9\n"))


def test_anchors_and_merge_keys_work_and_own_keys_win() -> None:
    recipe = read(f"{SMALL}x-common: &common\n  A: one\n  B: two\nargs:\n  <<: *common\n  B: mine\n")
    assert dict(recipe.arguments) == {"A": "one", "B": "mine"}


def test_the_name_must_be_the_folders() -> None:
    with pytest.raises(RecipeError, match="1: name: probe must be the name of the recipe's folder, other"):
        read(SMALL, name="other")


@given(st.binary(max_size=300))
def test_any_bytes_give_a_recipe_or_a_recipe_error(data: bytes) -> None:
    with contextlib.suppress(RecipeError):
        read(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70000)
    | st.sampled_from(["", "a", "sm_70", "95MB", "/x", "{name}", "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "id", "image", "env"]), inner),
    max_leaves=6,
)
KEYS = sorted(yaml.safe_load(FULL))


@given(st.dictionaries(st.sampled_from(KEYS), values), st.sampled_from(["build", "cuda", "push", "smoke", "start"]))
def test_any_value_under_any_key_gives_a_recipe_or_a_recipe_error(document: dict[str, object], part: str) -> None:
    inside = dict(yaml.safe_load(FULL)[part])
    inside.update((key, value) for key, value in zip(inside, document.values(), strict=False))
    text = yaml.safe_dump({"name": "probe", "tags": ["a"], **document, part: inside})
    with contextlib.suppress(RecipeError):
        read(text)


# Placeholders and targets --------------------------------------------------------------------------------------------


def test_placeholders_are_replaced_and_braces_can_be_written() -> None:
    assert expand("a-{sm}-{{x}}", {"sm": "70"}, what="tag") == "a-70-{x}"


def test_a_placeholder_without_a_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"tag x: \{revision\} has no value here"):
        expand("{revision}", {"revision": None}, what="tag x")


def test_every_placeholder_is_explained() -> None:
    assert all(meaning for meaning in PLACEHOLDERS.values())


def test_the_push_target_takes_variables_from_the_environment() -> None:
    recipe = read(FULL)
    assert str(push_target(recipe, {"REGISTRY": "git.example.org:8443"})) == "git.example.org:8443/team/probe"
    with pytest.raises(UsageError, match=r"needs the variable REGISTRY, which is not set"):
        push_target(recipe, {"REGISTRY": " "})
    with pytest.raises(UsageError, match=r"has no push\.target"):
        push_target(read(SMALL), {})


# Files ---------------------------------------------------------------------------------------------------------------


def make(root: Path, name: str, text: str = "", *, dockerfile: bool = True) -> Path:
    folder = root / "images" / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(text or f"name: {name}\ntags: [a]\n")
    if dockerfile:
        (folder / "Dockerfile").write_text("FROM scratch\n")
    return folder


def test_recipes_are_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "two")
    make(tmp_path, "one")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "images").mkdir()  # a folder of that name without a recipe is passed by
    monkeypatch.chdir(below)
    folder = images_folder(environ={})
    assert folder == tmp_path / "images"
    assert find_recipes(folder) == ("one", "two")
    assert load("one", folder).name == "one"


def test_where_recipes_lie_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no images/NAME/recipe\.yaml here or in a folder above"):
        images_folder(environ={})
    (tmp_path / "x").mkdir()
    assert images_folder(environ={"BUILDKIT_IMAGES": "x"}) == tmp_path / "x"
    with pytest.raises(UsageError, match="y is not a folder"):
        images_folder(environ={"BUILDKIT_IMAGES": "y"})


@pytest.mark.parametrize("name", ["cuda", "../one", "", "one/..", "/etc"])
def test_an_unknown_recipe_lists_what_there_is(tmp_path: Path, name: str) -> None:
    make(tmp_path, "cuda-probe")
    with pytest.raises(UsageError, match=r"no recipe .*there is: cuda-probe"):
        load(name, tmp_path / "images")


def test_a_missing_dockerfile_or_context_is_named_with_its_line(tmp_path: Path) -> None:
    make(tmp_path, "one", dockerfile=False)
    with pytest.raises(RecipeError, match=r"recipe.yaml:1: dockerfile: .*Dockerfile is not there"):
        load("one", tmp_path / "images")
    make(tmp_path, "two", "name: two\ntags: [a]\ncontext: nowhere\n")
    with pytest.raises(RecipeError, match=r"recipe.yaml:3: context: .*nowhere is not there"):
        load("two", tmp_path / "images")


@pytest.mark.parametrize("name", find_recipes(Path(__file__).parents[2] / "images"))
def test_the_recipes_of_this_repository_load(name: str) -> None:
    recipe = load(name, Path(__file__).parents[2] / "images")
    assert recipe.tags
