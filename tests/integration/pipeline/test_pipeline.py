"""The pipeline from the recipe to the tag, against a real engine and a real registry behind its edge."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.repository import GOLDEN, Repository

SCHEMA = json.loads((Path(__file__).parents[3] / "buildkit" / "report" / "schema.json").read_text())


def verdicts(report: Any) -> dict[str, str]:
    return {stage["name"]: stage["verdict"] for stage in report["stages"]}


def files(repository: Repository) -> Path:
    return repository.folder / ".buildkit" / "report" / "bk-pipe"


def test_from_the_recipe_to_the_tag_with_evidence(repository: Repository, tmp_path: Path) -> None:
    outputs, summary = tmp_path / "outputs", tmp_path / "summary"
    report = repository.report(GITHUB_OUTPUT=str(outputs), GITHUB_STEP_SUMMARY=str(summary))
    assert verdicts(report) == {
        "preflight": "pass",
        "build": "pass",
        "check": "pass",
        "smoke": "skipped",  # the recipe names no levels
        "split": "skipped",
        "push": "pass",
        "verify": "pass",
        "attach": "pass",
        "promote": "pass",
    }
    assert report["verdict"] == "not-run"  # nothing was computed: that is never a pass
    revision = repository.git("rev-parse", "HEAD")
    fixed = f"sm70-{revision[:12]}"
    assert report["tags"] == [fixed, "sm70"]
    for tag in report["tags"]:
        assert repository.manifest(tag=tag).headers["docker-content-digest"] == report["digest"]
    assert f"digest={report['digest']}" in outputs.read_text()
    assert report["digest"] in summary.read_text()
    written = json.loads((files(repository) / "report.json").read_text())
    jsonschema.validate(written, SCHEMA)
    assert written["digest"] == report["digest"]
    assert report["digest"] in (files(repository) / "report.html").read_text()
    assert any(event["event"] == "finished" for event in report["timeline"])
    assert all(layer["size"] and layer["digest"] for layer in report["layers"]["before"])

    shown = repository.run("evidence", report["pull"], "--json")
    assert shown.code == 0, shown.err
    text = json.dumps(shown.json)
    for kind in ("evidence", "report", "check"):
        assert f"application/vnd.buildkit.{kind}.v1+json" in text
    assert "application/vnd.cyclonedx+json" in text


def test_a_second_run_sends_nothing(repository: Repository) -> None:
    first = repository.report()
    second = repository.report()
    assert second["digest"] == first["digest"]
    push = next(stage["data"] for stage in second["stages"] if stage["name"] == "push")
    assert push["up_to_date"]
    assert push["bytes_sent"] == 0


def test_a_failed_check_keeps_the_image_out_of_the_registry(repository: Repository) -> None:
    repository.write("code.so", (GOLDEN / "cuda11-partial.so").read_bytes())
    repository.commit("broken", "2026-01-02T00:00:00Z")
    result = repository.pipeline()
    assert result.code == 1
    report = result.json
    assert verdicts(report)["check"] == "fail"
    assert {verdicts(report)[name] for name in ("smoke", "push", "attach", "promote")} == {"skipped"}
    assert report["digest"] is None
    assert repository.manifest(tag="sm70").status_code == 404
    assert "check failed" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert "fail" in (files(repository) / "summary.md").read_text().lower()


def test_a_failed_build_is_told_and_reported(repository: Repository) -> None:
    repository.write("Dockerfile", b"FROM scratch\nCOPY nothing /nothing\n")
    repository.commit("broken", "2026-01-02T00:00:00Z")
    result = repository.pipeline()
    assert result.code == 1
    assert verdicts(result.json)["build"] == "fail"
    assert (files(repository) / "report.html").exists()
    assert "Traceback" not in result.err


def test_jobs_on_other_machines_go_on_from_the_attached_report(repository: Repository) -> None:
    first = repository.report("--stages", "build,check,push,verify,attach")
    assert repository.manifest(tag="sm70").status_code == 404
    second = repository.report("--resume", first["pull"])
    assert [run["stages"] for run in second["runs"]] == [
        ["build", "check", "push", "verify", "attach"],
        ["smoke", "verify", "attach", "promote"],
    ]
    assert verdicts(second)["check"] == "pass"
    assert repository.manifest(tag="sm70").headers["docker-content-digest"] == first["digest"]
    # What is attached now tells of the promotion, too.
    third = repository.run("evidence", first["pull"], "--get", "report", "--out", str(repository.folder / "r.json"))
    assert third.code == 0, third.err
    assert verdicts(json.loads((repository.folder / "r.json").read_text()))["promote"] == "pass"


def test_an_image_that_is_gone_cannot_be_resumed(repository: Repository) -> None:
    gone = f"{repository.edge}/{repository.name}@sha256:{'0' * 64}"
    result = repository.pipeline("--resume", gone)
    assert result.code == 1
    assert "is not in the registry" in result.err
    assert "Traceback" not in result.err


def test_no_tag_moves_to_an_image_that_was_not_checked(repository: Repository) -> None:
    first = repository.report("--stages", "build,push,attach")
    result = repository.pipeline("--resume", first["pull"], "--stages", "promote")
    assert result.code == 1
    assert "not checked" in result.err
    assert repository.manifest(tag="sm70").status_code == 404


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_newer_commit_holds_the_tag_in_either_order(repository: Repository, newest_first: bool) -> None:
    old = repository.git("rev-parse", "HEAD")
    new = repository.commit("second", "2026-01-02T00:00:00Z")
    digests = {}
    for revision in (new, old) if newest_first else (old, new):
        repository.git("checkout", "-q", revision)
        digests[revision] = repository.report()["digest"]
    assert digests[old] != digests[new]
    assert repository.manifest(tag="sm70").headers["docker-content-digest"] == digests[new]


def test_a_gpu_that_is_missing_stops_the_pipeline_unless_it_is_allowed(repository: Repository) -> None:
    recipe = (repository.recipe / "recipe.yaml").read_text()
    repository.write(
        "recipe.yaml",
        (recipe + 'smoke: {levels: [server], server: {command: ["/bin/sh", "-c", "sleep 60"]}}\n').encode(),
    )
    repository.commit("smoke", "2026-01-02T00:00:00Z")
    report = repository.report("--stages", "build,check,smoke,push", code=3)
    assert verdicts(report) == {"build": "pass", "check": "pass", "smoke": "not-run", "push": "skipped"}
    report = repository.report("--stages", "build,check,smoke,push,verify,attach,promote", "--allow-missing-gpu")
    assert report["verdict"] == "not-run"
    assert verdicts(report)["promote"] == "pass"


def test_layers_above_the_limit_are_divided_where_that_is_asked_for(repository: Repository) -> None:
    report = repository.report("--split", "--limit", "1MB", "--stages", "build,check,split,push,verify,attach")
    before, after = report["layers"]["before"], report["layers"]["after"]
    assert len(after) > len(before)
    assert any(layer["size"] > 1_000_000 for layer in before)
    manifest = repository.manifest(tag=report["tags"][0]).json()
    assert [layer["size"] for layer in manifest["layers"]] == [layer["size"] for layer in after]
    # What remains above the limit is one file each (the C library): no cut can help it.
    large = [layer for layer in after if layer["size"] > 1_000_000]
    assert len(large) <= 1
    assert report["limit"] == 1_000_000


def test_a_run_that_is_stopped_leaves_its_report(repository: Repository) -> None:
    recipe = (repository.recipe / "recipe.yaml").read_text().replace("echo ready", "while :; do :; done")
    repository.write("recipe.yaml", recipe.encode())
    repository.commit("endless", "2026-01-02T00:00:00Z")
    path = files(repository) / "report.json"
    command = repository.command("pipeline", "bk-pipe", "--to", repository.to)
    with subprocess.Popen(command, cwd=repository.folder, env=repository.environ, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"build: pass"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read().decode()
        assert process.wait(60) == 130, rest
    assert "Traceback" not in rest
    report = json.loads(path.read_text())
    assert verdicts(report)["check"] == "fail"
    assert report["stages"][-1]["reason"] == "interrupted"
    assert (files(repository) / "summary.md").exists()


def test_a_dry_run_touches_nothing(repository: Repository) -> None:
    result = repository.run("pipeline", "bk-pipe", "--to", repository.to, "--dry-run", DOCKER_HOST="unix:///nowhere")
    assert result.code == 0, result.err
    assert re.search(r"would push \S+ as sm70-[0-9a-f]{12}\n", result.out)
    assert not files(repository).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "bild"], "'bild' is not a stage"),
        (["--resume", "127.0.0.1:1/x/y:z"], "has no digest"),
        (["--to", "127.0.0.1:1/x/y@sha256:" + "0" * 64], "is a digest"),
    ],
)
def test_wrong_words_are_usage_errors(repository: Repository, words: list[str], message: str) -> None:
    result = repository.run("pipeline", "bk-pipe", *words)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_without_an_engine_the_first_stage_says_so_and_the_report_is_written(repository: Repository) -> None:
    result = repository.pipeline(DOCKER_HOST="unix:///nowhere.sock")
    assert result.code == 3
    assert "/nowhere.sock" in result.err
    assert (files(repository) / "summary.md").exists()


def test_a_registry_that_is_gone_is_told_by_the_preflight(repository: Repository) -> None:
    result = repository.run("pipeline", "bk-pipe", "--to", "127.0.0.1:9/x/y:sm70", "--json")
    assert result.code == 1
    assert verdicts(result.json)["preflight"] == "fail"
    assert verdicts(result.json)["build"] == "skipped"
