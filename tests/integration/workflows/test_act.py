"""The candle-vllm workflow, run by act from its checkout to the tag behind the edge, and what stops it.

Each test asserts the result of every job: a job of which act says nothing was skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.act import Act, Run, commit
from support.door import Door
from support.forge import GOLDEN, IMAGE, TOKEN, USER, Forge, remove_images, stages

from buildkit.engine import Engine
from buildkit.errors import NotFoundError

GREEN = dict.fromkeys(("preflight", "build", "smoke", "publish", "summary"), "success")
Behind = Callable[[Forge, str], Forge]


def stopped_in(job: str) -> dict[str, str]:
    """The jobs' results where ``job`` fails: those behind it are skipped, the summary is written."""
    names = list(GREEN)
    at = names.index(job)
    return {
        name: "success" if n < at or name == "summary" else "failure" if n == at else "skipped"
        for n, name in enumerate(names)
    }


def nothing_came_of(forge: Forge, run: Run) -> None:
    assert forge.tags == set()
    summary = run.summary("summary")
    assert "none, see the first job that failed" in summary
    for job, result in run.jobs.items():
        if job != "summary":
            assert f"| {job} | {result} |" in summary


def is_built(engine: Engine) -> bool:
    try:
        engine.inspect(f"{IMAGE}:sm70")
    except NotFoundError:
        return False
    return True


# From the checkout to the tag ----------------------------------------------------------------------------------------


def test_every_commit_gets_its_tag_and_the_newest_one_the_plain_tag(forge: Forge, engine: Engine) -> None:
    """Three runs: an old commit; a newer one, which moves the tag; the old one again, late, which does not.

    In the first one the smoke test's runner does not have the image, as if it were another machine.
    """

    def forget(line: Mapping[str, Any]) -> None:
        if line.get("jobID") == "build" and "jobResult" in line:
            remove_images(engine)

    (forge.recipe / "note").write_text("old\n")
    (forge.recipe / "Dockerfile").write_text((forge.recipe / "Dockerfile").read_text() + "COPY note /note\n")
    old = forge.commit("old", 3)

    first = forge.push(on_line=forget)
    assert first.jobs == GREEN, first.table
    assert "the engine fetches" in first.output("smoke")
    digest = first.outputs("build")["digest"]
    assert forge.tags >= {"sm70", f"sm70-{old[:12]}"}
    assert forge.digest("sm70") == forge.digest(f"sm70-{old[:12]}") == digest
    assert forge.labels("sm70")["org.opencontainers.image.revision"] == old  # the run's own commit
    report = forge.report(digest)
    assert stages(report) == {
        "build": "pass",
        "check": "pass",
        "split": "skipped",
        "push": "pass",
        "verify": "pass",
        "smoke": "not-run",  # no runner with a GPU is named: that is visible, and never a pass
        "promote": "pass",
        "attach": "pass",
    }
    assert report["verdict"] == "not-run"
    assert set(forge.attached(digest)) == {
        "application/vnd.buildkit.evidence.v1+json",
        "application/vnd.buildkit.report.v1+json",
        "application/vnd.buildkit.check.v1+json",
        "application/vnd.cyclonedx+json",
    }
    summary = first.summary("summary")
    assert "| publish | success |" in summary
    assert summary.count(digest) >= 2  # in the table of jobs, and in the report
    assert "not run" in summary.lower()
    assert digest in first.summary("build")

    (forge.recipe / "note").write_text("new\n")
    new = forge.commit("new", 4)
    second = forge.push()
    assert second.jobs == GREEN, second.table
    assert forge.digest("sm70") == second.outputs("build")["digest"] != digest
    assert forge.labels("sm70")["org.opencontainers.image.revision"] == new
    assert forge.digest(f"sm70-{old[:12]}") == digest

    forge.checkout(old)
    # Git keeps the newer commit, as a checkout with all branches does.
    late = forge.push()
    assert late.jobs == GREEN, late.table
    assert late.outputs("build")["digest"] == digest
    assert forge.digest("sm70") == second.outputs("build")["digest"]
    push = next(stage for stage in forge.report(digest)["stages"] if stage["name"] == "push")
    assert (push["data"]["up_to_date"], push["data"]["bytes_sent"]) == (True, 0)
    assert f"{new[:12]}, which comes after {old[:12]}" in late.output("publish")


def test_a_cuda_image_goes_through_the_edge(forge: Forge) -> None:
    """The recipe cuda-probe in the place of candle-vllm: NVIDIA's libraries, with a layer above the edge's limit."""
    shutil.rmtree(forge.recipe)
    shutil.copytree(forge.repository / "images" / "cuda-probe", forge.recipe)
    recipe = forge.recipe / "recipe.yaml"
    text = recipe.read_text()
    for old, new in (
        ("name: cuda-probe", f"name: candle-vllm\nimage: {IMAGE}"),
        ("tags: [sm70]", 'tags: [sm70, "sm70-{short_revision}"]'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    recipe.write_text(text.replace("/cuda-probe\n", "/candle-vllm\n"))
    revision = forge.commit("cuda-probe in its place", 3)
    run = forge.push()
    assert run.jobs == GREEN, run.table
    digest = run.outputs("build")["digest"]
    assert forge.digest("sm70") == forge.digest(f"sm70-{revision[:12]}") == digest
    assert forge.labels("sm70")["org.opencontainers.image.revision"] == revision
    assert max(layer["size"] for layer in forge.get(f"manifests/{digest}").json()["layers"]) > 100 * 2**20
    assert digest in run.summary("summary")


@pytest.mark.slow
def test_a_run_by_hand_on_another_branch_moves_no_tag(forge: Forge) -> None:
    """Inputs arrive as true, "true" and nothing; what they ask for is told."""
    inputs: Mapping[str, Any] = {"promote": "true", "split": ""}
    run = forge.push(name="workflow_dispatch", event={"ref": "refs/heads/feature", "inputs": inputs})
    assert run.jobs == GREEN, run.table
    assert "sm70" not in forge.tags
    assert any(tag.startswith("sm70-") for tag in forge.tags)
    assert "not for main" in run.output("publish")


# What a preflight can know -------------------------------------------------------------------------------------------


def test_without_the_secret_nothing_is_built(forge: Forge, engine: Engine) -> None:
    run = forge.push(secrets={})
    assert run.jobs == stopped_in("preflight"), run.table
    assert "error: the secret REGISTRY_TOKEN is not set" in run.output("preflight")
    assert "REGISTRY_TOKEN is not set" in run.summary("preflight")
    assert list(run.steps("preflight").values()) == ["success", "failure"]  # right after the checkout
    assert not is_built(engine)
    nothing_came_of(forge, run)


def test_a_wrong_token(forge: Forge, engine: Engine) -> None:
    run = forge.push(secrets={"REGISTRY_TOKEN": "wrong-token-of-somebody"})
    assert run.jobs == stopped_in("preflight"), run.table
    assert "401" in run.output("preflight")
    assert "401" in run.summary("preflight")
    assert "wrong-token-of-somebody" not in run.text
    assert not is_built(engine)
    nothing_came_of(forge, run)


def test_a_token_that_may_only_read(forge: Forge, behind: Behind, engine: Engine) -> None:
    with Door(forge.act.variables["REGISTRY"], read_only=True) as door:
        run = behind(forge, door.address).push()
    assert run.jobs == stopped_in("preflight"), run.table
    assert "403" in run.output("preflight")
    assert not is_built(engine)
    nothing_came_of(forge, run)


@pytest.mark.parametrize("skew", [3600.0, -3600.0])
def test_a_clock_that_is_an_hour_off(forge: Forge, behind: Behind, engine: Engine, skew: float) -> None:
    with Door(forge.act.variables["REGISTRY"], skew=skew) as door:
        run = behind(forge, door.address).push()
    assert run.jobs == stopped_in("preflight"), run.table
    assert "this machine's clock is" in run.output("preflight")
    assert not is_built(engine)
    nothing_came_of(forge, run)


def test_a_registry_that_is_not_there(forge: Forge, behind: Behind, engine: Engine) -> None:
    with Door(forge.act.variables["REGISTRY"]) as door:
        gone = door.address
    run = behind(forge, gone).push()
    assert run.jobs == stopped_in("preflight"), run.table
    assert gone in run.output("preflight")
    assert not is_built(engine)
    nothing_came_of(forge, run)


def test_a_runner_without_docker(forge: Forge, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("bash", "git", "python3", "env", "id", "dirname", "mktemp", "timeout", "tee", "sh", "cat"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    environ = {key: value for key, value in forge.act.environ.items() if key != "DOCKER_HOST"}
    poor = replace(forge, act=replace(forge.act, environ=environ))
    if Path("/var/run/docker.sock").exists():
        # This machine has the usual socket, and so has a job on it: an address that leads nowhere is as good as none.
        run = poor.push(path=str(folder), environ={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    else:
        run = poor.push(path=str(folder))
        assert "no docker on this runner" in run.output("preflight")
    assert run.jobs == stopped_in("preflight"), run.table
    nothing_came_of(forge, run)


def test_an_engine_that_does_not_answer(forge: Forge, tmp_path: Path) -> None:
    run = forge.push(environ={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert run.jobs == stopped_in("preflight"), run.table
    assert "none.sock" in run.output("preflight")
    nothing_came_of(forge, run)


def test_a_disk_that_is_too_small(forge: Forge, engine: Engine) -> None:
    recipe = forge.recipe / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("timeout: 10m}", "timeout: 10m, min_disk: 900TB}"))
    forge.commit("hungry", 3)
    run = forge.push()
    assert run.jobs == stopped_in("preflight"), run.table
    assert "needs 900" in run.output("preflight")
    assert not is_built(engine)
    nothing_came_of(forge, run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("tags: [", "tags: [["), "recipe.yaml:"),
        (lambda text: text.replace("licenses:", "licences:"), "did you mean licenses?"),
        (None, "no recipe 'candle-vllm'"),
    ],
    ids=["yaml", "key", "gone"],
)
def test_a_recipe_that_cannot_be_used(forge: Forge, change: Callable[[str], str] | None, words: str) -> None:
    recipe = forge.recipe / "recipe.yaml"
    if change is None:
        recipe.unlink()
    else:
        recipe.write_text(change(recipe.read_text()))
    forge.commit("broken", 3)
    run = forge.push()
    assert run.jobs == stopped_in("preflight"), run.table
    assert words in run.output("preflight")
    nothing_came_of(forge, run)


# What shows later ----------------------------------------------------------------------------------------------------


def test_a_failed_check_keeps_the_image_out_of_the_registry(forge: Forge) -> None:
    shutil.copyfile(GOLDEN / "cuda11-partial.so", forge.recipe / "code.so")
    forge.commit("no code for sm_70", 3)
    run = forge.push()
    assert run.jobs == stopped_in("build"), run.table
    assert "sm_70" in run.summary("build")
    nothing_came_of(forge, run)


def test_a_disk_that_fills_up_in_mid_build(forge: Forge) -> None:
    dockerfile = forge.recipe / "Dockerfile"
    dockerfile.write_text(
        dockerfile.read_text() + 'RUN ["/bin/sh", "-c", "cat /etc/passwd /srv/libgdn.so > /dev/full"]\n'
    )
    forge.commit("too much", 3)
    run = forge.push()
    assert run.jobs == stopped_in("build"), run.table
    assert "No space left on device" in run.output("build")
    nothing_came_of(forge, run)


def test_a_registry_that_vanishes_between_two_jobs(forge: Forge, behind: Behind) -> None:
    with Door(forge.act.variables["REGISTRY"]) as door:

        def watch(line: Mapping[str, Any]) -> None:
            if line.get("jobID") == "build" and "jobResult" in line:
                door.shut()

        run = behind(forge, door.address).push(on_line=watch)
    assert run.jobs == stopped_in("smoke"), run.table
    assert door.address in run.output("smoke")
    assert "sm70" not in forge.tags  # the commit's own tag is there, the plain one never moved
    assert "| smoke | failure |" in run.summary("summary")
    assert "The report cannot be read" in run.summary("summary")


def test_a_missing_gpu_is_red_where_a_runner_with_one_is_named(forge: Forge) -> None:
    run = forge.push(variables={"GPU_RUNNER": "gpu-v100"}, labels=("gpu-v100",))
    assert run.jobs == stopped_in("smoke"), run.table
    assert "sm70" not in forge.tags


# The other ways in ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_repository_runs_what_new_made(forge: Forge, tmp_path: Path, python: Path) -> None:
    """Nothing of this repository is in it: a recipe, the workflow and its script, and a runner that has buildkit."""
    other = tmp_path / "other"
    shutil.copytree(forge.recipe, other / "images" / "candle-vllm")
    subprocess.run(["git", "init", "-q", "-b", "main", other], check=True)
    pin = f"buildkit @ git+https://git.example.org/tools/buildkit@{'a1' * 20}"
    for words in (
        ("new", "app", "--recipe", "candle-vllm", "--install", pin),
        ("install", "--for", "gitea"),
        ("check",),
    ):
        subprocess.run([python.parent / "buildkit", f"workflows.{words[0]}", *words[1:]], cwd=other, check=True)
    commit(other, "first", "2026-01-01T00:00:00Z")
    run = replace(forge, repository=other).push(workflow=".gitea/workflows/app.yaml")
    assert run.jobs == GREEN, run.table
    assert forge.digest("sm70") == run.outputs("build")["digest"]


def test_the_jobs_of_this_repository_hold_its_workflows(forge: Forge) -> None:
    run = forge.push(workflow=".github/workflows/ci.yaml", job="workflows")
    assert run.jobs == {"workflows": "success", "checks": "skipped"}, run.table
    assert "nothing to report" in run.output("workflows")


def test_a_runner_that_brings_nothing_installs_it(forge: Forge) -> None:
    """The way of a bare runner: an environment of its own, and this repository installed into it by pip."""
    environ = {key: os.environ[key] for key in os.environ if key.startswith(("PIP_", "SSL_", "REQUESTS_", "HTTP"))}
    run = forge.push(workflow=".github/workflows/ci.yaml", job="workflows", environ={"BUILDKIT_PYTHON": "", **environ})
    assert run.jobs["workflows"] == "success", run.table
    assert "ci-setup: installing ." in run.output("workflows")


# The harness --------------------------------------------------------------------------------------------------------


def test_a_job_that_act_leaves_out_is_not_taken_for_green(tmp_path: Path) -> None:
    """act ends well for a job whose runner it does not know; its result is not one."""
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main", repository], check=True)
    steps = "steps: [{name: Do nothing, run: 'true'}]"
    (repository / "w.yaml").write_text(
        f"on: push\njobs:\n  here: {{runs-on: ubuntu-latest, {steps}}}\n  elsewhere: {{runs-on: gpu-v100, {steps}}}\n"
    )
    commit(repository, "first", "2026-01-01T00:00:00Z")
    act = Act(home=tmp_path / "home", environ={}, variables={}, secrets={})
    run = act.push(repository, "w.yaml")
    assert (run.code, run.jobs) == (0, {"here": "success", "elsewhere": "skipped"})


def test_the_user_is_no_secret_and_the_token_is() -> None:
    assert USER not in TOKEN
