"""The image of the reference server for the CPU: built from its wheelhouse, started without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.reference import reference_python

from buildkit.wheelhouse import wheelhouse

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPE = "clef-serve-cpu"
FOLDER = REPOSITORY / "images" / "clef-serve"
TINY = REPOSITORY / "tests" / "unit" / "serve" / "tiny_checkpoint.py"

pytestmark = pytest.mark.slow

_CLIENT = """
import json, urllib.request
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:8000" + path, data, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))
print(json.dumps({
    "models": ask("/v1/models"),
    "completion": ask("/v1/completions", {"prompt": "Hello world", "max_tokens": 12, "logprobs": 1}),
    "systemone": ask("/v1/systemone", {"prompt": "Hello world"}),
}))
"""


@pytest.fixture(scope="module")
def docker(engine_host: str) -> list[str]:
    return ["docker", "--host", engine_host]


@pytest.fixture(scope="module")
def image(docker: list[str], engine_host: str) -> str:
    report = wheelhouse(FOLDER / "requirements-cpu.txt", FOLDER / "wheelhouse" / "cpu")
    assert report.ok, report.render()
    command = [sys.executable, "-m", "buildkit", "build", RECIPE]
    subprocess.run(command, cwd=REPOSITORY, check=True, env=os.environ | {"DOCKER_HOST": engine_host})
    return f"{RECIPE}:cpu"


@pytest.fixture
def container(docker: list[str], image: str, tmp_path: Path) -> Iterator[str]:
    probe = tmp_path / "probe"
    subprocess.run([str(reference_python()), str(TINY), str(probe)], check=True, capture_output=True)
    run = [*docker, "run", "--detach", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    mount = ["--volume", f"{probe}:/models/probe:ro"]
    words = [image, "--model", "/models/probe", "--device", "cpu", "--trace"]
    name = subprocess.run([*run, *mount, *words], check=True, capture_output=True, text=True).stdout.strip()
    yield name
    subprocess.run([*docker, "rm", "--force", "--volumes", name], check=True, capture_output=True)


def test_it_starts_without_a_network_and_answers_and_stops(docker: list[str], container: str) -> None:
    def inside(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [*docker, "exec", "--interactive", container, *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    for _ in range(300):
        if inside("python", "/app/healthcheck.py").returncode == 0:
            break
    answers = json.loads(inside("python", "-", text=_CLIENT).stdout)
    assert answers["models"]["data"][0]["id"] == "probe"
    assert len(answers["completion"]["choices"][0]["token_ids"]) == 12
    assert len(answers["completion"]["trace"]["layers"]) == 3
    assert set(answers["systemone"]["answers"]) == {"route", "mood", "length"}
    assert inside("python", "-m", "pip", "--version").returncode != 0
    assert inside("sh", "-c", "command -v pip || command -v pip3").returncode != 0
    assert inside("touch", "/written").returncode != 0
    assert inside("id", "-u").stdout.strip() == "65532"
    subprocess.run([*docker, "stop", "--time", "30", container], check=True, capture_output=True)
    state = subprocess.run(
        [*docker, "inspect", "--format", "{{.State.ExitCode}}", container], check=True, capture_output=True, text=True
    )
    assert state.stdout.strip() == "0"
