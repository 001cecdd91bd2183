"""``doctor`` as a user runs it: the real registry, the real edge, exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.model import DISTRIBUTION_3, SECRET, USER, Call, Result
from faults.server import FaultServer
from support.images import noise, write_layout
from support.world import World

from buildkit.stack import Credentials, StackOptions, StackState

StackFactory = Callable[[StackOptions], StackState]
NO_ENGINE = "unix:///nonexistent/engine.sock"


@pytest.fixture
def world(registry: StackState, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-").replace("--", "-")
    made = World(registry, tmp_path, f"doctor/{name[:60]}")
    made.environ["DOCKER_HOST"] = NO_ENGINE
    return made


def left_over(stack: StackState, name: str) -> list[Path]:
    """Bytes of uploads in the registry's own storage. Distribution 2.8 keeps an empty hash state of a cancelled one."""
    found = [path for path in stack.folder.rglob(f"{name}/_uploads/*/*") if path.name in ("data", "startedat")]
    return [*found, *stack.folder.rglob(f"{name}/_layers/*/*")]


def test_the_edges_limit_is_measured_to_the_byte_and_nothing_stays(world: World, registry: StackState) -> None:
    result = world.run("doctor", world.to, "--json")
    assert result.code == 0, result.err + result.out
    report = result.json
    assert report["limit"]["accepted"] == registry.edge_limit
    assert report["limit"]["refused"] == registry.edge_limit + 1
    assert "nginx" in report["limit"]["by"]
    assert report["bytes_sent"] <= report["budget"] == 400_000_000
    assert report["uploads"]["opened"] == report["uploads"]["cancelled"] > 3
    assert left_over(registry, world.name) == []
    assert report["registry"]["kind"] == "distribution or compatible"
    levels = {(line["area"], line["level"]) for line in report["lines"]}
    assert ("engine", "note") in levels, "nothing that was named needs one"
    assert "at most 400.0 MB" in result.err


def test_the_plain_registry_with_a_small_budget(world: World, registry: StackState) -> None:
    result = world.run("doctor", f"{registry.registry}/{world.name}", "--budget", "3MB")
    assert result.code == 0, result.err
    assert "none was refused" in result.out
    assert "0 problems" in result.out
    assert left_over(registry, world.name) == []


def test_a_dry_run_sends_nothing(world: World) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        for words in (("doctor", f"{server.registry}/a/b", "--dry-run"), ("doctor", "--dry-run")):
            result = world.run(*words)
            assert result.code == 0, result.err
        assert not server.requests
        told = world.run("doctor", f"{server.registry}/a/b", "--dry-run", "--budget", "7MB", "--json")
        assert "7.0 MB in all" in " ".join(told.json["would"])


def test_docker_push_would_fail_for_these_layers(world: World, tmp_path: Path) -> None:
    """As far as an edge of 200 kB goes."""
    write_layout(tmp_path / "image", [noise(400_000), noise(1000)])
    with FaultServer(DISTRIBUTION_3, limit=200_000) as server:
        where = f"{server.registry}/a/b"
        result = world.run("doctor", where, "--image", f"oci:{tmp_path / 'image'}", "--budget", "40MB", "--json")
    lines = [line for line in result.json["lines"] if line["area"] == "docker push"]
    assert [line["level"] for line in lines] == ["warning"]
    assert "layer 1/2 (4" in lines[0]["seen"]
    assert "layer 2/2" not in lines[0]["seen"]
    assert "measured" in lines[0]["means"]
    assert "invoke push" in lines[0]["do"]
    assert "invoke split" in lines[0]["do"]


def test_passwords_right_and_wrong(stack_factory: StackFactory, world: World) -> None:
    asking = stack_factory(StackOptions(engine="none", auth=Credentials.parse("robot:pass-word")))
    where = f"{asking.edge}/{world.name}"
    right = world.run("doctor", where, "--quick", REGISTRY_USERNAME="robot", REGISTRY_TOKEN="pass-word")
    assert right.code == 0, right.err + right.out
    assert "REGISTRY_USERNAME and REGISTRY_TOKEN, is taken" in right.out
    wrong = world.run("doctor", where, REGISTRY_USERNAME="robot", REGISTRY_TOKEN="wr0ng-w0rd")
    assert wrong.code == 1
    assert "is wrong" in wrong.out
    assert "wr0ng-w0rd" not in wrong.out + wrong.err
    assert "error: credentials: " in wrong.err
    none = world.run("doctor", where)
    assert none.code == 1
    assert "invoke login" in none.out
    half = world.run("doctor", where, REGISTRY_USERNAME="robot")
    assert half.code == 1
    assert "REGISTRY_TOKEN is not set" in half.out


def test_the_way_out_of_a_broken_recipe_is_in_the_summary(world: World, tmp_path: Path) -> None:
    images = tmp_path / "images"
    for name, text in (("broken", "name: [\n"), ("good", "name: good\ntags: [x]\npush: {target: '${NOWHERE}/app'}\n")):
        (images / name).mkdir(parents=True)
        (images / name / "recipe.yaml").write_text(text)
        (images / name / "Dockerfile").write_text("FROM scratch\n")
    environ = {"BUILDKIT_IMAGES": str(images), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    for recipe, words in (("broken", "recipe.yaml"), ("unknown", "no recipe 'unknown'"), ("good", "NOWHERE")):
        (tmp_path / "summary.md").unlink(missing_ok=True)
        result = world.run("doctor", "--recipe", recipe, "--quick", **environ)
        assert result.code == 1, result.err
        assert words in result.out
        assert "Traceback" not in result.err
        summary = (tmp_path / "summary.md").read_text()
        assert "pushes will fail" in summary
        assert "❌" in summary


def test_only_missing_components_are_exit_code_three(world: World, tmp_path: Path) -> None:
    (tmp_path / "images" / "good").mkdir(parents=True)
    (tmp_path / "images" / "good" / "recipe.yaml").write_text("name: good\ntags: [x]\n")
    (tmp_path / "images" / "good" / "Dockerfile").write_text("FROM scratch\n")
    environ = {"BUILDKIT_IMAGES": str(tmp_path / "images")}
    with FaultServer(DISTRIBUTION_3) as server:
        where = f"{server.registry}/a/b"
        result = world.run("doctor", where, "--recipe", "good", "--quick", **environ)
        assert result.code == 3, result.err + result.out
        assert "no container engine answers" in result.err
        assert "there is no image yet" in result.out, "which is no problem of its own"
        both = world.run("doctor", "nowhere.invalid/a/b", "--recipe", "good", "--quick", **environ)
        assert both.code == 1
        assert world.run("doctor", where, "--quick").code == 0


def test_a_host_alone_is_looked_at_without_uploads(world: World) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        result = world.run("doctor", server.registry)
        assert result.code == 0, result.err
        assert "no repository is named" in result.out
        assert not server.seen["start"]


@pytest.mark.parametrize("words", [("a reference",), ("user:pass@host/app",), ("x.example/app", "--budget", "none")])
def test_wrong_words_are_exit_code_two(words: tuple[str, ...], world: World) -> None:
    result = world.run("doctor", *words)
    assert result.code == 2
    assert "pass@" not in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("kind", ["start", "patch", "status", "cancel"])
def test_an_interruption_leaves_no_upload_behind(number: signal.Signals, kind: str, world: World) -> None:
    """In the midst of each kind of request: it has been carried out, and the answer is held back."""
    with FaultServer(DISTRIBUTION_3) as server:
        held, go_on = threading.Event(), threading.Event()
        handle = server.model.handle

        def holding(call: Call) -> Result:
            answer = handle(call)
            methods = {"start": "POST", "patch": "PATCH", "status": "GET", "cancel": "DELETE"}
            if call.method == methods[kind] and "uploads" in call.path and not held.is_set():
                held.set()
                # The client is told to stop while it waits for this answer.
                process.send_signal(number)
                go_on.wait(0.5)
            return answer

        server.model.handle = holding  # type: ignore[method-assign]
        process = subprocess.Popen(
            world.command("doctor", f"{server.registry}/a/b"),
            env={**world.environ, "REGISTRY_USERNAME": USER, "REGISTRY_TOKEN": SECRET},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=world.folder,
        )  # fmt: skip
        out, err = process.communicate(timeout=60)
        assert held.is_set(), err
        assert process.returncode == 130, out + err
        assert server.model.open_sessions == 0, err
        assert "interrupted" in err
        assert SECRET not in out + err


def test_a_json_report_is_json_when_something_is_wrong(world: World) -> None:
    result = world.run("doctor", "nowhere.invalid/a/b", "--json", "--quiet")
    assert result.code == 1
    report = json.loads(result.out)
    assert report["ok"] is False
    assert report["schema"] == 1
    assert [line["area"] for line in report["lines"] if line["level"] == "problem"] == ["way"]
