"""Builds in a real engine, by every way that is here, from recipes without a base to download."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.rootfs import root_tar

from buildkit.build import Backend, BuildOptions, BuildResult, build, find_clients
from buildkit.build import base as bases
from buildkit.build import labels as label
from buildkit.build import run as build_run
from buildkit.build.run import archive_config
from buildkit.engine import Engine
from buildkit.errors import (
    BuildkitError,
    EngineError,
    FormatError,
    MissingComponentError,
    NotFoundError,
    StorageError,
    UsageError,
)
from buildkit.model import Digest
from buildkit.recipe import Debootstrap, Recipe, load
from buildkit.stack.process import find_program

Build = Callable[..., tuple[BuildResult, list[str]]]


def write(root: Path, dockerfile: str, recipe: str = "", **files: str) -> Recipe:
    """A recipe ``bk-test`` in a repository of its own."""
    folder = root / "images" / "bk-test"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: bk-test\ntags: [one, two]\n{recipe}")
    (folder / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (folder / name).write_text(text)
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(root)]
    environment = os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z"}
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *settings, *words], check=True, env=environment)
    return load("bk-test", root / "images")


@pytest.fixture
def make(engine: Engine) -> Iterator[Build]:
    """Builds, collects the lines, and removes what was built."""
    built: set[str] = set()

    def run(
        recipe: Recipe, options: BuildOptions | None = None, environ: Mapping[str, str] = os.environ
    ) -> tuple[BuildResult, list[str]]:
        lines: list[str] = []
        built.update(f"{recipe.image}:{tag}" for tag in recipe.tags)
        result = build(recipe, engine, options or BuildOptions(), lines.append, environ=environ)
        built.update(result.names)
        return result, lines

    yield run
    for name in built:
        with contextlib.suppress(NotFoundError):
            engine.remove(name)


def backends() -> list[Backend]:
    """Every way of building that this machine has; the classic builder is always one."""
    clients = find_clients()
    found: list[Backend] = ["classic"]
    if any(client.has_buildkit for client in clients):
        found.append("docker")
    if any(client.buildx for client in clients):
        found.append("buildx")
    return found


PLAIN = 'FROM scratch\nARG WHAT=nothing\nLABEL what=$WHAT\nCOPY hello /hello\nCMD ["/hello"]\n'
FILES = {"hello": "hello world\n"}


@pytest.mark.parametrize("backend", backends())
def test_an_image_is_built_named_and_labelled(tmp_path: Path, make: Build, engine: Engine, backend: Backend) -> None:
    recipe = write(tmp_path, PLAIN, 'version: "1.0"\nargs: {WHAT: "v{version}"}\ncuda: {require: [sm_70]}\n', **FILES)
    result, lines = make(recipe, BuildOptions(backend=backend))
    image = engine.inspect("bk-test:one")
    assert image.id == result.image_id == engine.inspect("bk-test:two").id
    assert image.labels["what"] == "v1.0"
    assert image.labels[label.SM] == "70"
    assert image.labels[label.CREATED] == "2026-01-02T03:04:05Z"
    assert image.labels[label.REVISION] == result.revision
    assert label.DIRTY not in image.labels
    assert dict(result.labels).items() <= dict(image.labels).items()
    assert lines[-1].startswith(f"built {result.image_id}")
    assert json.loads(json.dumps(result.to_json()))["source"] == "docker-daemon:bk-test:one"


@pytest.mark.parametrize("backend", backends())
def test_files_that_dockerignore_names_stay_out(tmp_path: Path, make: Build, engine: Engine, backend: Backend) -> None:
    recipe = write(tmp_path, "FROM scratch\nCOPY . /all/\n", **FILES, secret="x")
    (recipe.folder / ".dockerignore").write_text("secret\n")
    result, _ = make(recipe, BuildOptions(backend=backend))
    assert result.dirty
    names: list[str] = []
    with engine.save(result.image_id) as stream, tarfile.open(fileobj=stream, mode="r|*") as outer:
        for member in outer:
            inner = outer.extractfile(member) if member.isfile() else None
            if inner is not None and member.name != "manifest.json":
                try:
                    with tarfile.open(fileobj=io.BytesIO(inner.read())) as layer:
                        names += layer.getnames()
                except tarfile.ReadError:
                    continue
    assert "all/hello" in names
    assert "all/secret" not in names


@pytest.mark.parametrize("backend", backends())
def test_a_failing_step_is_one_line_and_leaves_no_name(
    tmp_path: Path, make: Build, engine: Engine, backend: Backend
) -> None:
    recipe = write(tmp_path, "FROM scratch\nCOPY nowhere /x\n")
    with pytest.raises(EngineError) as caught:
        make(recipe, BuildOptions(backend=backend))
    assert "\n" not in str(caught.value)
    assert "nowhere" in str(caught.value)
    assert caught.value.exit_code == 1
    with pytest.raises(BuildkitError, match="no image"):
        engine.inspect("bk-test:one")


@pytest.mark.parametrize("backend", backends())
def test_building_again_gives_the_same_image(tmp_path: Path, make: Build, backend: Backend) -> None:
    recipe = write(tmp_path, PLAIN, **FILES)
    first, _ = make(recipe, BuildOptions(backend=backend))
    second, _ = make(recipe, BuildOptions(backend=backend))
    assert first.image_id == second.image_id


def test_tags_that_the_caller_gives_replace_the_recipes(tmp_path: Path, make: Build, engine: Engine) -> None:
    recipe = write(tmp_path, PLAIN, **FILES)
    result, _ = make(recipe, BuildOptions(tags=("three-{short_revision}",)))
    assert result.revision is not None
    assert result.names == (f"bk-test:three-{result.revision[:12]}",)
    with pytest.raises(BuildkitError, match="no image"):
        engine.inspect("bk-test:one")


# Bases made here, and secrets ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_base(engine: Engine) -> Iterator[str]:
    """A base with a shell, from this machine's own programs: a few files, and no mirror to ask."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("etc", "run", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        files: dict[str, str] = {}
        for name in ("sh", "cat", "sleep", "wc", "sha256sum"):
            program = find_program(name)
            assert program is not None
            files[f"bin/{name}"] = program
            libraries = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
            files.update((word.lstrip("/"), word) for word in libraries.split() if word.startswith("/"))
        for name, path in files.items():
            tar.add(os.path.realpath(path), arcname=name)
    engine.import_tar([stream.getvalue()], "bk-test-base:1")
    yield "bk-test-base:1"
    engine.remove("bk-test-base:1")


buildkit_backends = [backend for backend in backends() if backend != "classic"]


@pytest.mark.parametrize("backend", buildkit_backends)
def test_secrets_reach_the_build_and_show_nowhere(
    tmp_path: Path, make: Build, engine: Engine, small_base: str, backend: Backend
) -> None:
    (tmp_path / "token").write_text("file-secret-value\n")
    dockerfile = (
        f"FROM {small_base}\n"
        "RUN --mount=type=secret,id=env --mount=type=secret,id=file --mount=type=secret,id=ca "
        "cat /run/secrets/env /run/secrets/file; "
        "cat /run/secrets/env /run/secrets/file | sha256sum > /sums; wc -c < /run/secrets/ca >> /sums; cat /sums\n"
    )
    recipe = write(
        tmp_path,
        dockerfile,
        "secrets:\n"
        "- {id: env, env: BK_TEST_TOKEN}\n"
        f"- {{id: file, file: {os.path.relpath(tmp_path / 'token', tmp_path / 'images' / 'bk-test')}}}\n"
        "- {id: ca, ca_bundle: true}\n"
        "build: {network: none}\n",
    )
    (tmp_path / "ca.crt").write_text("x" * 1234)
    environ = os.environ | {"BK_TEST_TOKEN": "env-secret-value", "SSL_CERT_FILE": str(tmp_path / "ca.crt")}
    # The cache does not know secrets: without `rebuild` the step of the other backend would do.
    result, lines = make(recipe, BuildOptions(backend=backend, rebuild=True), environ)
    shown = "\n".join(lines)
    assert "***" in shown
    assert "1234" in shown
    everything = shown + json.dumps(result.to_json()) + json.dumps(engine.client.images.get("bk-test:one").attrs)
    everything += json.dumps(engine.client.images.get("bk-test:one").history())
    assert "env-secret-value" not in everything
    assert "file-secret-value" not in everything
    with engine.save(result.image_id) as stream:
        assert b"secret-value" not in stream.read()


def test_a_recipe_with_secrets_is_refused_by_the_classic_builder(tmp_path: Path, make: Build) -> None:
    recipe = write(tmp_path, PLAIN, "secrets: [{id: t, env: HOME}]\n", **FILES)
    with pytest.raises(UsageError, match=r"needs BuildKit \(the build secret t\)"):
        make(recipe, BuildOptions(backend="classic"))


@pytest.mark.parametrize("backend", backends())
def test_a_build_that_takes_too_long_is_ended(tmp_path: Path, make: Build, small_base: str, backend: Backend) -> None:
    recipe = write(tmp_path, f"FROM {small_base}\nRUN echo sleeping; sleep 1000\n", "build: {network: none}\n")
    with pytest.raises(EngineError, match="took longer than"):
        make(recipe, BuildOptions(backend=backend, timeout=2))


def test_an_interrupted_build_stops(tmp_path: Path, engine: Engine, small_base: str) -> None:
    recipe = write(tmp_path, f"FROM {small_base}\nRUN echo sleeping; sleep 1001\n", "build: {network: none}\n")

    def interrupt(line: str) -> None:
        if line.endswith("sleeping") and "RUN" not in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(recipe, engine, BuildOptions(backend=buildkit_backends[0]), interrupt)


# Before anything is started ------------------------------------------------------------------------------------------


def test_too_little_disk_is_told_before_the_build(tmp_path: Path, make: Build, engine: Engine) -> None:
    recipe = write(tmp_path, PLAIN, "build: {min_disk: 999TB}\n", **FILES)
    if not engine.local:
        pytest.fail("this test needs the engine's data root on this machine")
    with pytest.raises(StorageError, match=r"has .* free, and building bk-test needs 999\.00 TB"):
        make(recipe)
    result, _ = make(recipe, BuildOptions(ignore_disk=True))
    assert result.image_id


def test_a_builder_without_buildx_is_exit_code_3(tmp_path: Path, make: Build) -> None:
    recipe = write(tmp_path, PLAIN, "build: {builder: k8s}\n", **FILES)
    with pytest.raises(MissingComponentError, match="builder 'k8s' needs docker buildx") as caught:
        make(recipe, None, {"PATH": "/nowhere"} if not any(c.buildx for c in find_clients({"PATH": ""})) else {})
    assert caught.value.exit_code == 3


def test_a_base_made_here_is_no_use_to_a_remote_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write(tmp_path, PLAIN, "base: {debootstrap: {}}\n", **FILES)
    with pytest.raises(UsageError, match="where a remote builder cannot see it"):
        bases.prepare(recipe, None, rebuild=False, say=print)


def fake_buildx(folder: Path, archive: bytes, *, code: int = 0) -> Mapping[str, str]:
    """A Docker client with buildx, that writes ``archive`` to where ``--output`` says, and records what it was told."""
    (folder / "archive").write_bytes(archive)
    (folder / "docker").write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        '"version --format") echo 27.0.1; exit;;\n'
        '"buildx version") echo github.com/docker/buildx v0.17.1 abc; exit;;\n'
        "esac\n"
        f'printf "%s\\n" "$@" > {folder}/words; printenv | sort > {folder}/environment\n'
        f'for word; do case $word in --output=*) cp {folder}/archive "${{word#*dest=}}";; esac; done\n'
        f"echo '#1 DONE'; exit {code}\n"
    )
    (folder / "docker").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def oci_archive(**changes: bytes) -> bytes:
    """A small OCI archive; ``changes`` replaces members by name (``index`` or ``manifest``)."""
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    manifest = changes.get(
        "manifest",
        json.dumps(
            {
                "schemaVersion": 2,
                "config": {"mediaType": "x", "digest": str(Digest.of(config)), "size": len(config)},
                "layers": [],
            }
        ).encode(),
    )
    digest = Digest.of(manifest)
    index = changes.get("index", json.dumps({"manifests": [{"digest": str(digest), "size": len(manifest)}]}).encode())
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        members = {"index.json": index, f"blobs/sha256/{digest.hex}": changes.get("stored", manifest)}
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def test_a_named_builder_needs_no_engine_and_gives_an_archive(tmp_path: Path) -> None:
    recipe = write(tmp_path / "repo", PLAIN, "build: {builder: k8s, network: host}\n", **FILES)
    output = tmp_path / "out" / "image.tar"
    result = build(recipe, None, BuildOptions(output=output), print, environ=fake_buildx(tmp_path, oci_archive()))
    assert result.output == output
    assert result.source == f"oci-archive:{output}"
    assert result.image_id == archive_config(output)
    assert result.builder == "k8s"
    words = (tmp_path / "words").read_text().split("\n")
    assert {"--builder=k8s", "--provenance=false", "--network=host", "--allow=network.host"} <= set(words)
    assert "SOURCE_DATE_EPOCH=1767323045" in (tmp_path / "environment").read_text()
    assert [path.name for path in output.parent.iterdir()] == ["image.tar"]


def test_a_builder_that_fails_leaves_no_archive_and_keeps_the_last_one(tmp_path: Path) -> None:
    recipe = write(tmp_path / "repo", PLAIN, **FILES)
    output = tmp_path / "out" / "image.tar"
    output.parent.mkdir()
    output.write_text("the last one")
    options = BuildOptions(builder="k8s", output=output)
    with pytest.raises(EngineError, match="failed with exit code 1: #1 DONE"):
        build(recipe, None, options, print, environ=fake_buildx(tmp_path, oci_archive(), code=1))
    with pytest.raises(FormatError, match="is not an OCI archive"):
        build(recipe, None, options, print, environ=fake_buildx(tmp_path, b"not a tar"))
    assert output.read_text() == "the last one"
    assert [path.name for path in output.parent.iterdir()] == ["image.tar"]


@pytest.mark.parametrize(
    "archive",
    [
        oci_archive(index=b'{"manifests": []}'),
        oci_archive(index=b'{"manifests": [{}, {}]}'),
        oci_archive(index=b'{"manifests": [7]}'),
        oci_archive(index=b"[]"),
        oci_archive(manifest=b"{}"),
        oci_archive(stored=b"other bytes"),
        oci_archive()[:700],
    ],
)
def test_an_archive_that_is_not_one_image_is_refused(tmp_path: Path, archive: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(archive)
    with pytest.raises(BuildkitError):
        archive_config(tmp_path / "a.tar")


def test_an_empty_id_file_is_no_success(tmp_path: Path) -> None:
    for text in ("", "sha256:12", "\xff"):
        (tmp_path / "id").write_text(text, encoding="latin-1")
        with pytest.raises(EngineError, match="named no image"):
            build_run._read_id(tmp_path / "id")


# Debootstrap ---------------------------------------------------------------------------------------------------------


def fake_debootstrap(folder: Path, script: str) -> None:
    (folder / "debootstrap").write_text(f"#!/bin/sh\neval root=\\${{$#}}\n{script}\n")
    (folder / "debootstrap").chmod(0o755)


TREE = (
    'mkdir -p "$root/etc" "$root/usr/share/doc/a" "$root/dev" "$root/var/log" "$root/bin"; echo hello > "$root/bin/x"; '
    'echo thishost > "$root/etc/hostname"; echo log > "$root/var/log/dpkg.log"; '
    'touch -d 2026-01-01 "$root/usr/share/doc/a/changelog.gz"'
)


def test_a_base_is_made_once_and_found_again(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_debootstrap(tmp_path, TREE + f'; echo "$@" >> {tmp_path}/calls; echo I: unpacking')
    recipe = write(tmp_path / "r", PLAIN, "base: {debootstrap: {suite: bk-test, include: [curl, bash]}}\n", **FILES)
    lines: list[str] = []
    first = bases.prepare(recipe, engine, rebuild=False, say=lines.append)
    assert first is not None
    try:
        again = bases.prepare(recipe, engine, rebuild=False, say=lines.append)
        assert again == first
        assert len((tmp_path / "calls").read_text().splitlines()) == 1
        call = (tmp_path / "calls").read_text()
        assert "--variant=minbase --components=main --include=curl,bash bk-test" in call
        assert "base: I: unpacking" in lines
        assert engine.inspect(first.name).id == first.digest
        bases.prepare(recipe, engine, rebuild=True, say=lines.append)
        assert len((tmp_path / "calls").read_text().splitlines()) == 2
        engine.remove(str(first.digest))  # without its name now
        # The same packages make the same layer, whenever it is made; what the host put in is not in it.
        assert engine.inspect(first.name).diff_ids
        with engine.save(first.name) as stream:
            data = stream.read()
        assert b"hello" in data
        assert b"thishost" not in data
        assert b"dpkg.log" not in data
    finally:
        engine.remove(first.name)


def test_the_same_tree_makes_the_same_layer(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    recipe = write(tmp_path / "r", PLAIN, "base: {debootstrap: {suite: bk-same}}\n", **FILES)
    found = []
    for order in ("a b", "b a"):
        fake_debootstrap(tmp_path, f'{TREE}; for n in {order}; do echo $n > "$root/bin/$n"; done')
        made = bases.prepare(recipe, engine, rebuild=True, say=print)
        assert made is not None
        found.append(engine.inspect(made.name).diff_ids)
        engine.remove(made.name)
    assert found[0] == found[1]


def test_a_debootstrap_that_fails_makes_no_base(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_debootstrap(tmp_path, TREE + "; echo E: no such script; exit 3")
    recipe = write(tmp_path / "r", PLAIN, "base: {debootstrap: {suite: bk-bad}}\n", **FILES)
    with pytest.raises(EngineError, match="debootstrap bk-bad failed with exit code 3: E: no such script"):
        bases.prepare(recipe, engine, rebuild=False, say=print)
    fake_debootstrap(tmp_path, TREE)
    monkeypatch.setattr(bases, "_EXCLUDED", ("./dev/*", "--no-such-option-of-tar"))
    monkeypatch.setattr(bases, "_output", failing(bases._output))
    with pytest.raises(StorageError, match="packing the base failed"):
        bases.prepare(recipe, engine, rebuild=False, say=print)
    with pytest.raises(BuildkitError, match="no image"):
        engine.inspect(f"buildkit-base/bk-bad:{bases.base_key(_spec(recipe), 'bk-bad', recipe.platform)}")


def failing(real: Callable[[list[str]], Iterator[bytes]]) -> Callable[[list[str]], Iterator[bytes]]:
    """tar that ends with an error after it has written everything, as when a file vanished meanwhile."""
    return lambda command: real(["sh", "-c", '"$@"; exit 2', "sh", *[w for w in command if "no-such" not in w]])


def _spec(recipe: Recipe) -> Debootstrap:
    assert recipe.base is not None
    assert recipe.base.debootstrap is not None
    return recipe.base.debootstrap


def test_without_debootstrap_or_root_the_way_out_is_named(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(tmp_path, PLAIN, "base: {debootstrap: {suite: bk-none}}\n", **FILES)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingComponentError, match="debootstrap needs root"):
        bases.prepare(recipe, engine, rebuild=False, say=print)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingComponentError, match=r"debootstrap is not installed.*apt-get install debootstrap"):
        bases.prepare(recipe, engine, rebuild=False, say=print)
    foreign = replace(recipe, platform=replace(recipe.platform, architecture="riscv64"))
    with pytest.raises(BuildkitError):
        bases.prepare(foreign, engine, rebuild=False, say=print)


@pytest.mark.parametrize("backend", backends())
def test_a_full_disk_is_named_as_the_reason(tmp_path: Path, make: Build, engine: Engine, backend: Backend) -> None:
    dockerfile = 'FROM scratch\nADD root.tar /\nRUN ["/bin/sh", "-c", "cat /bin/sh > /dev/full"]\n'
    recipe = write(tmp_path, dockerfile, "build: {network: none}\n", **FILES)
    (recipe.folder / "root.tar").write_bytes(root_tar(["sh", "cat"], {}))
    with pytest.raises(StorageError) as caught:
        make(recipe, BuildOptions(backend=backend))
    assert "a disk is full" in caught.value.message
    assert "No space left on device" in caught.value.message
