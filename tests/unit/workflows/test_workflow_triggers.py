"""Which pushes start which workflow: the matcher by the documentation's own examples, then our ``on:`` by pushes."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildkit.workflows.tree import parse
from buildkit.workflows.triggers import matches, starts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", ["README.md", "server.rb"], ["docs/file.txt"]),
        ("**", ["all/the/files.md", "main"], []),
        ("*.js", ["app.js"], ["page.ts", "js/app.js"]),
        ("**.js", ["index.js", "js/index.js", "src/js/app.js"], ["x.jsx"]),
        ("docs/*", ["docs/file.txt"], ["docs/a/b.txt", "docs"]),
        ("docs/**", ["docs/README.md", "docs/mona/octo.txt"], ["docs", "x/docs/a"]),
        ("docs/**/*.md", ["docs/README.md", "docs/mona/hello.md"], ["docs/a.txt"]),
        ("**/docs/**", ["docs/hello.md", "dir/docs/my-file.txt"], ["mydocs/x"]),
        ("**/README.md", ["README.md", "js/README.md"], ["xREADME.md"]),
        ("**/*-post.md", ["my-post.md", "path/their-post.md"], ["post.md"]),
        ("v[12].[0-9]+.[0-9]+", ["v1.10.1", "v2.0.0"], ["v3.0.0", "v1.0"]),
        ("feature/*", ["feature/a"], ["feature/a/b", "feature"]),
        ("releases/**-alpha", ["releases/1/2-alpha"], ["releases/1"]),
        ("*.jsx?", ["page.js", "page.jsx"], ["page.jsxx", "pageXjs"]),
        ("a.b", ["a.b"], ["aXb"]),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes if not matches(pattern, name)] == []
    assert [name for name in no if matches(pattern, name)] == []


@pytest.mark.parametrize(
    ("on", "event", "ref", "changed", "expected"),
    [
        ("push", "push", "refs/heads/x", ["a"], True),
        ("[push, pull_request]", "push", "refs/tags/x", [], True),
        ("pull_request", "push", "refs/heads/main", ["a"], False),
        ("{push: {branches: [main]}}", "push", "refs/heads/main", ["a"], True),
        ("{push: {branches: [main]}}", "push", "refs/heads/dev", ["a"], False),
        ("{push: {branches: [main]}}", "push", "refs/tags/main", ["a"], False),
        ("{push: {branches-ignore: [main]}}", "push", "refs/heads/dev", ["a"], True),
        ("{push: {branches-ignore: [main]}}", "push", "refs/tags/v1", ["a"], False),
        ("{push: {tags: ['v*']}}", "push", "refs/tags/v1", [], True),
        ("{push: {tags: ['v*']}}", "push", "refs/heads/v1", [], False),
        ("{push: {branches: ['**', '!dev'], paths: [docs/**]}}", "push", "refs/heads/dev", ["docs/x"], False),
        ("{push: {paths: [docs/**]}}", "push", "refs/heads/main", ["src/x", "docs/x"], True),
        ("{push: {paths: [docs/**]}}", "push", "refs/heads/main", ["src/x"], False),
        ("{push: {paths: [docs/**, '!docs/a/**']}}", "push", "refs/heads/main", ["docs/a/x"], False),
        ("{push: {paths: [docs/**, '!docs/a/**']}}", "push", "refs/heads/main", ["docs/a/x", "docs/b"], True),
        ("{push: {paths-ignore: ['*.md']}}", "push", "refs/heads/main", ["a.md"], False),
        ("{push: {paths-ignore: ['*.md']}}", "push", "refs/heads/main", ["a.md", "b"], True),
        ("{push: {paths: [docs/**]}}", "push", "refs/tags/v1", [], True),
    ],
)
def test_filters(on: str, event: str, ref: str, changed: list[str], expected: bool) -> None:
    assert starts(parse(f"on: {on}\njobs: {{}}\n".encode()), event, ref=ref, changed=changed) is expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["images/candle-vllm/Dockerfile"], {"candle-vllm-sm70"}),
        (["images/candle-vllm/recipe.yaml", "README.md"], {"candle-vllm-sm70"}),
        (["workflows/candle-vllm-sm70.yaml"], {"candle-vllm-sm70"}),
        (["images/clef-serve/app.py"], {"clef-serve", "clef-serve-cpu"}),
        (["images/clef-serve-cpu/recipe.yaml"], {"clef-serve-cpu"}),
        (["images/cuda-probe/recipe.yaml"], set()),
        (["README.md", "docs/smoke.md"], set()),
        (["images/candle-vllm-other/Dockerfile"], set()),
    ],
)
def test_a_merge_builds_the_images_that_it_changes(changed: list[str], expected: set[str]) -> None:
    started = {
        path.stem
        for path in (ROOT / "workflows").glob("*.yaml")
        if starts(parse(path.read_bytes()), "push", changed=changed)
    }
    assert started == expected | {"ci"}


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.yaml")), ids=lambda path: path.stem)
def test_nothing_starts_for_a_tag_or_another_branch(path: Path) -> None:
    top = parse(path.read_bytes())
    everything = ["images/candle-vllm/Dockerfile", "images/clef-serve/app.py", "images/clef-serve-cpu/recipe.yaml"]
    for ref in ("refs/heads/feature", "refs/heads/main-2", "refs/tags/main", "refs/tags/v1"):
        assert not starts(top, "push", ref=ref, changed=everything)
    assert starts(top, "workflow_dispatch")
    assert not starts(top, "schedule")
