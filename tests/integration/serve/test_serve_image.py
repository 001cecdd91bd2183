"""The image of the reference server for the CPU: built from its wheelhouse, started without a network, tested there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.relay import relay

from buildkit.gdn import probe
from buildkit.wheelhouse import wheelhouse

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPE = "clef-serve-cpu"
FOLDER = REPOSITORY / "images" / "clef-serve"
CASES = REPOSITORY / "deploy" / "parity.yaml"
MODEL = "/models/probe"
TAG = f"bk-test-{os.getpid()}"
REQUESTS = 200
START_TRIES = 300

_KEY_BAND = probe.SHAPE.gdn.bands()["k"]
FAULT = f"""

from transformers.models.qwen3_5 import modeling_qwen3_5 as _upstream

_right = _upstream.causal_conv1d_fn


def _zeroed(*arguments, **named):
    out = _right(*arguments, **named)
    out[:, {_KEY_BAND.start}:{_KEY_BAND.stop}] = 0
    return out


_upstream.causal_conv1d_fn = _zeroed
"""
"""What an older build does: the channels of the keys are zero after the convolution of a prompt."""

_ASK = """
import json, urllib.request
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:8000" + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
"""
_CROWD = (
    _ASK
    + """
import sys
from concurrent.futures import ThreadPoolExecutor
body = {"prompt": sys.argv[1], "max_tokens": 4, "ignore_eos": True}
count = int(sys.argv[2])
with ThreadPoolExecutor(count) as pool:
    answers = list(pool.map(lambda _: ask("/v1/completions", body), range(count)))
print(json.dumps([answers, ask("/health")]))
"""
)


class Docker:
    """The engine's own client."""

    def __init__(self, host: str) -> None:
        self.command = ["docker", "--host", host]

    def __call__(self, *words: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*self.command, *words], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, (words, done.stderr)
        return done


@pytest.fixture(scope="module")
def docker(engine_host: str) -> Docker:
    return Docker(engine_host)


@pytest.fixture(scope="module")
def images(docker: Docker, engine_host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``good``: the recipe's image with the probe checkpoint copied in; ``faulty``: its model patched."""
    report = wheelhouse(FOLDER / "requirements-cpu.txt", FOLDER / "wheelhouse" / "cpu")
    assert report.ok, report.render()
    names = {name: f"{RECIPE}:{TAG}-{name}" for name in ("plain", "good", "faulty")}
    files = tmp_path_factory.mktemp("serve")
    probe.write(files / "models" / "probe", "f32")
    (files / "model.py").write_text((FOLDER / "model.py").read_text() + FAULT)
    for path in files.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with ExitStack() as undo:
        undo.callback(docker, "rmi", "--force", *names.values(), check=False)
        command = [sys.executable, "-m", "buildkit", "build", RECIPE, "--tag", f"{TAG}-plain"]
        subprocess.run(command, cwd=REPOSITORY, check=True, env=os.environ | {"DOCKER_HOST": engine_host})
        for made, of, source, target in (
            ("good", "plain", files / "models", "/"),
            ("faulty", "good", files / "model.py", "/app/model.py"),
        ):
            container = docker("create", "--network", "none", names[of]).stdout.strip()
            undo.callback(docker, "rm", "--force", container, check=False)
            docker("cp", str(source), f"{container}:{target}")
            docker("commit", container, names[made])
        yield names


@contextmanager
def started(docker: Docker, image: str) -> Iterator[str]:
    """A container as a cluster would run it, but without any network; its name, once its health check is green."""
    run = ["run", "--detach", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    words = ["--security-opt", "no-new-privileges", image, "--model", MODEL, "--device", "cpu", "--trace"]
    name = docker(*run, *words).stdout.strip()
    try:
        for _ in range(START_TRIES):
            if docker("exec", name, "python", "/app/healthcheck.py", check=False).returncode == 0:
                break
        else:
            pytest.fail(f"it does not become healthy: {docker('logs', name).stderr[-2000:]}")
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


@pytest.fixture(scope="module")
def good(docker: Docker, images: dict[str, str]) -> Iterator[str]:
    with started(docker, images["good"]) as name:
        yield name


@pytest.fixture(scope="module")
def faulty(docker: Docker, images: dict[str, str]) -> Iterator[str]:
    with started(docker, images["faulty"]) as name:
        yield name


@pytest.fixture(scope="module")
def url(docker: Docker) -> Iterator[Callable[[str], str]]:
    """The URL of a container's server."""
    with ExitStack() as stack:
        yield lambda container: stack.enter_context(relay(docker.command, container, 8000))


def buildkit(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "buildkit", *words], cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def ask(docker: Docker, container: str, path: str, body: object = None) -> Any:
    script = f"{_ASK}\nprint(json.dumps(ask({path!r}, {body!r})))"
    status, answer = json.loads(docker("exec", "--interactive", container, "python", "-", text=script).stdout)
    assert status == 200, answer
    return answer


def test_it_runs_as_nobody_on_a_root_that_is_read_only_without_pip_or_a_network(docker: Docker, good: str) -> None:
    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        return docker("exec", good, *words, check=False)

    assert inside("id", "-u").stdout.strip() == "65532"
    assert inside("touch", "/written").returncode != 0
    assert inside("python", "-m", "pip", "--version").returncode != 0
    assert inside("sh", "-c", "command -v pip || command -v pip3").returncode != 0
    assert inside("sh", "-c", "echo $PIP_NO_INDEX").stdout.strip() == "1"
    devices = inside("python", "-c", "import socket; print(socket.if_nameindex())").stdout
    assert "lo" in devices
    assert "eth" not in devices
    config = json.loads(docker("inspect", good).stdout)[0]
    assert config["HostConfig"]["NetworkMode"] == "none"
    assert config["Config"]["Healthcheck"]["Test"] == ["CMD", "python", "/app/healthcheck.py"]


def test_completions_are_the_reference_s_tokens(docker: Docker, good: str) -> None:
    assert ask(docker, good, "/v1/models")["data"][0]["heads"] == list(probe.HEADS)
    answer = ask(docker, good, "/v1/completions", {"prompt": probe.prompts()[0].text, "max_tokens": probe.ANSWER})
    assert answer["choices"][0]["text"] == "YkkEeZyKSEajc1F4"
    assert [layer["layer"] for layer in answer["trace"]["layers"]] == [0, 1, 2]


def test_three_heads_answer_what_the_reference_in_numpy_computes(docker: Docker, good: str, faulty: str) -> None:
    for prompt in probe.prompts():
        answers = ask(docker, good, "/v1/systemone", {"prompt": prompt.text})["answers"]
        expected = probe.head_scores(prompt)
        assert set(answers) == set(expected)
        for name, scores in expected.items():
            assert answers[name]["scores"] == pytest.approx(scores, abs=1e-4)
            assert answers[name]["answer"] == max(scores, key=scores.__getitem__)
    wrong = ask(docker, faulty, "/v1/systemone", {"prompt": probe.prompts()[-1].text})["answers"]
    expected = probe.head_scores(probe.prompts()[-1])
    assert any(wrong[name]["scores"] != pytest.approx(scores, abs=0.05) for name, scores in expected.items())


def test_the_smoke_test_passes_it_and_names_the_fault_of_a_patched_one(
    good: str, faulty: str, url: Callable[[str], str]
) -> None:
    code, out, err = buildkit("smoke", "--url", url(good), "--dtype", "f32")
    assert code == 0, (out, err)
    assert "112/112 tokens identical" in out
    code, out, err = buildkit("smoke", "--url", url(faulty), "--dtype", "f32", "--json")
    assert code == 1, (out, err)
    (level,) = json.loads(out)["levels"]
    assert level["verdict"] == "FAIL"
    assert level["diagnosis"] == [
        "80 of 80 tokens as with *key band zeroed in causal_conv1d_fwd*: this build lacks the GDN conv fix"
    ]


def test_parity_shows_it_as_the_deployment_did(good: str, faulty: str, url: Callable[[str], str]) -> None:
    reference = url(good)
    words = ("--reference", reference, "--cases", str(CASES))
    code, out, err = buildkit("parity", "--candidate", reference, *words)
    assert code == 0, (out, err)
    for sentence in (
        "token ids 420/420 identical",
        "answers of the heads 3/3 identical",
        "sum of beta",
        "2/2 cases agree",
    ):
        assert sentence in out
    code, out, err = buildkit("parity", "--candidate", url(faulty), *words)
    assert code == 1
    assert "token ids" in out
    assert "420/420" not in out
    assert "absmax of the delta rule" in out


def test_two_hundred_requests_at_once_are_each_answered_or_refused_and_it_stops_clean(
    docker: Docker, images: dict[str, str]
) -> None:
    with started(docker, images["good"]) as container:
        prompt = probe.prompts()[0].text
        done = docker("exec", "--interactive", container, "python", "-", prompt, str(REQUESTS), text=_CROWD)
        answers, (status, health) = json.loads(done.stdout)
        statuses = Counter(code for code, _ in answers)
        assert set(statuses) <= {200, 503}, statuses
        assert sum(statuses.values()) == REQUESTS
        assert statuses[200] >= health["requests_limit"]
        for code, body in answers:
            if code == 200:
                assert body["choices"][0]["text"] == "YkkE"
            else:
                assert body["error"]["message"] == "all places in the queue are taken"
        assert (status, health["status"], health["requests"]) == (200, "ok", 0)
        docker("stop", "--time", "30", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container).stdout.strip() == "0"
        assert "Traceback" not in docker("logs", container).stderr


def test_a_start_that_cannot_succeed_says_why_on_one_line(docker: Docker, images: dict[str, str]) -> None:
    tmp = ("--tmpfs", "/tmp")
    no_tmp = "/tmp cannot be written: give it a tmpfs (--tmpfs /tmp, or an emptyDir)"
    for options, words, says in (
        (tmp, ("--model", MODEL, "--device", "cuda:0"), "device cuda:0 is not there"),
        (tmp, ("--model", "/models/none"), "/models/none is not a checkpoint: it has no config.json"),
        ((), ("--model", MODEL), no_tmp),
    ):
        run = ["run", "--rm", "--network", "none", "--read-only", *options, images["good"], *words]
        done = docker(*run, check=False)
        assert (done.returncode, done.stderr.strip()) == (1, f"clef-serve: {says}")
