"""The pipeline in bad company: other builds, foreign reports, full disks, tags that others hold."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from support.repository import GOLDEN, Repository

from buildkit.build import BuildOptions
from buildkit.engine import Engine
from buildkit.evidence import attach_all, list_artifacts, report_artifact
from buildkit.image.cache import BlobCache
from buildkit.image.transports import open_source
from buildkit.model import Reference
from buildkit.pipeline import Job, Recorder, World, run_pipeline
from buildkit.progress import Quiet
from buildkit.recipe import load
from buildkit.registry import CancelToken, FixedCredentials, RegistryClient
from buildkit.report import Report

PUSHING = ("--stages", "build,check,push,attach")


def world(engine: Engine, client: RegistryClient, folder: Path) -> World:
    nobody = FixedCredentials(registry="", credential=None)
    return World(
        engine_host=engine.host,
        connect=lambda: Engine.connect(engine.host),
        client=client,
        credentials=nobody,
        open_source=lambda text: open_source(
            text, engine_host=engine.host, registry_client_factory=lambda at: RegistryClient(at, credentials=nobody)
        ),
        cache=BlobCache(folder / "cache-of-library"),
        shown=Recorder(Quiet()),
        cancel=CancelToken(),
    )


def test_another_build_that_takes_the_name_does_not_get_its_image_pushed(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    """Two pipelines share the engine, and both call their image by the plain tag."""
    repository.write("code.so", (GOLDEN / "cuda11-partial.so").read_bytes())
    assert repository.run("build", "bk-pipe").code == 0
    bad = engine.inspect("bk-pipe:sm70").id
    repository.write("code.so", (GOLDEN / "cuda11-sm70.so").read_bytes())
    job = Job(
        recipe=load("bk-pipe", repository.folder / "images"),
        repository=Reference.parse(f"{repository.edge}/{repository.name}", default_tag=None),
        build=BuildOptions(),
    )

    def taken(report: Report) -> None:
        if report.stages and report.stages[-1].name in ("build", "check"):
            engine.tag(bad, "bk-pipe:sm70")

    with RegistryClient(repository.edge) as client:
        result = run_pipeline(job, world(engine, client, tmp_path), stages=("build", "check", "push"), save=taken)
    assert result.exit_code == 0, result.report.reason
    built = result.report.stage("build")
    checked = result.report.stage("check")
    assert built is not None
    assert built.data is not None
    assert checked is not None
    assert checked.data is not None
    assert checked.data["imageId"] == built.data["image_id"] != str(bad)
    manifest = repository.manifest(tag=str(result.report.digest)).json()
    assert manifest["config"]["digest"] == built.data["image_id"]
    engine.remove(str(built.data["image_id"]))


def test_an_image_of_an_earlier_commit_is_told_and_tagged_as_what_it_is(repository: Repository, engine: Engine) -> None:
    first = repository.git("rev-parse", "HEAD")
    assert repository.run("build", "bk-pipe").code == 0
    repository.commit("later", "2026-01-02T00:00:00Z")
    engine.tag("bk-pipe:sm70", "bk-pipe:somebodys-own")
    where = f"{repository.edge}/{repository.name}"
    result = repository.run("pipeline", "bk-pipe", "--to", where, "--stages", "check,push", "--json")
    assert result.code == 0, result.err
    assert result.json["revision"] == first
    assert result.json["tags"] == [f"sm70-{first[:12]}"]
    assert repository.manifest(tag="somebodys-own").status_code == 404
    # Where the recipe has no tag of the commit, one is made: of the image's commit, not of the work tree's.
    repository.write(
        "recipe.yaml", (repository.recipe / "recipe.yaml").read_bytes().replace(b', "sm70-{short_revision}"', b"")
    )
    result = repository.run("pipeline", "bk-pipe", "--to", f"{where}:trial", "--stages", "push", "--json")
    assert result.json["tags"] == [f"trial-{first[:12]}"], result.err


def test_a_foreign_report_ends_the_run_with_a_way_out_and_a_summary(repository: Repository, tmp_path: Path) -> None:
    pushed = repository.report(*PUSHING)
    image = Reference.parse(pushed["pull"], default_tag=None)
    good = (repository.folder / ".buildkit" / "report" / "bk-pipe" / "report.json").read_bytes()
    later = datetime.now(UTC) + timedelta(days=400)
    foreign: dict[str, Any] = {
        "buildkit/report/2": {**json.loads(good), "schema": "buildkit/report/2"},
        "is about another image": {**json.loads(good), "digest": "sha256:" + "1" * 64},
        "not bk-pipe": {**json.loads(good), "name": "<img src=x onerror=alert(1)>"},
    }
    summary = tmp_path / "summary"
    for message, document in foreign.items():
        later += timedelta(days=1)
        with RegistryClient(image.registry) as client:
            attach_all(client, image, [report_artifact(json.dumps(document).encode(), created=later)])
        result = repository.pipeline("--resume", pushed["pull"], GITHUB_STEP_SUMMARY=str(summary))
        assert result.code in (1, 2)
        assert message in result.err.splitlines()[-1]
        assert "Traceback" not in result.err
        assert "<img" not in summary.read_text()
    assert summary.read_text().count("## bk-pipe: fail") == len(foreign)
    # A clock that was ahead on the machine before: what is attached now is the newest all the same.
    with RegistryClient(image.registry) as client:
        attach_all(client, image, [report_artifact(good, created=later + timedelta(days=1))])
        assert repository.pipeline("--resume", pushed["pull"], "--stages", "attach").code == 0
        newest = list_artifacts(client, image)[0]
    assert newest.created is not None
    assert newest.created > later + timedelta(days=1)
    assert newest.files[-1][0] != "report.json"


def test_a_tag_that_nothing_shows_to_be_older_stays_and_the_registry_is_told_why(repository: Repository) -> None:
    first = repository.report()
    repository.git("checkout", "-q", "--orphan", "other")
    repository.commit("no relation, at the same time", "2026-01-01T00:00:00Z")
    result = repository.pipeline()
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert f"promote {result.json['pull']} --tag sm70 --force" in last
    assert repository.manifest(tag="sm70").headers["docker-content-digest"] == first["digest"]
    out = repository.folder / "attached.json"
    assert repository.run("evidence", result.json["pull"], "--get", "report", "--out", str(out)).code == 0
    assert json.loads(out.read_text())["reason"] == result.json["reason"]


def test_outputs_that_cannot_be_written_hide_no_result(repository: Repository) -> None:
    words = ("--stages", "build,check")
    result = repository.pipeline(*words, GITHUB_OUTPUT="/dev/full", GITHUB_STEP_SUMMARY="/dev/full")
    assert result.code == 1
    assert result.json["ok"] is False  # one document, and the whole report
    assert result.json["stages"][-1]["verdict"] == "pass"
    assert "all is done, but" in result.err.splitlines()[-1]
    repository.write("Dockerfile", b"FROM scratch\nCOPY nothing /nothing\n")
    result = repository.pipeline(*words, GITHUB_OUTPUT="/dev/full")
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("error: build failed")
    assert "GITHUB_OUTPUT" in result.err.splitlines()[-1]


def test_a_full_log_ends_no_pipeline(repository: Repository) -> None:
    words = repository.command("pipeline", "bk-pipe", "--to", repository.to, "--stages", "build,check,push", "--json")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, cwd=repository.folder, env=repository.environ, stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["digest"]


def test_the_registrys_token_is_no_build_argument(repository: Repository) -> None:
    result = repository.pipeline(
        "--build-arg", "TOKEN=x-correct-horse", REGISTRY_USERNAME="u", REGISTRY_TOKEN="correct-horse"
    )
    assert result.code == 2
    assert "--build-arg TOKEN" in result.err
    assert "correct-horse" not in result.err + result.out


def test_a_dry_run_tells_only_what_its_stages_would_do(repository: Repository) -> None:
    image = f"{repository.edge}/{repository.name}@sha256:{'0' * 64}"
    result = repository.run("pipeline", "bk-pipe", "--resume", image, "--dry-run")
    assert result.code == 0
    assert "would push" not in result.out
    assert "would then move sm70" in result.out
    result = repository.run("pipeline", "bk-pipe", "--to", repository.to, "--stages", "build,check", "--dry-run")
    assert "would push" not in result.out
    assert "no tag would move" in result.out


def test_a_cache_that_cannot_be_used_is_told_before_anything_is_built(repository: Repository) -> None:
    result = repository.pipeline(BUILDKIT_CACHE_DIR="/proc/nothing")
    assert result.code == 1
    assert "BUILDKIT_CACHE_DIR" in result.err.splitlines()[-1]
    assert "building" not in result.err


def test_a_build_that_prints_the_registrys_token_does_not_get_it_into_log_and_report(repository: Repository) -> None:
    token = "correct-horse-battery"
    repository.write("Dockerfile", f"FROM scratch\nCOPY {token} /nothing\n".encode())
    result = repository.pipeline("--stages", "build", REGISTRY_USERNAME="u", REGISTRY_TOKEN=token)
    assert result.code == 1
    written = "".join(path.read_text() for path in (repository.folder / ".buildkit" / "report" / "bk-pipe").iterdir())
    assert "***" in result.err
    assert token not in result.err + result.out + written
