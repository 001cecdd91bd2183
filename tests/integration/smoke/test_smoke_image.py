"""Both levels against an image in a real engine: the library is taken out of it, the server is started from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from smokeworld.image import LIBRARY, PYTHON

from buildkit.engine import Engine
from buildkit.errors import NotFoundError
from buildkit.gdn.faults import Fault
from buildkit.recipe import SmokeServer
from buildkit.smoke import SmokeOptions, SmokeReport, Subject, Verdict, run_smoke
from buildkit.smoke.container import copy_out

SERVER = SmokeServer(
    command=(str(PYTHON), "-m", "smokeworld.server", "--model", "{model}", "--port", "{port}"),
    environment={"OPENBLAS_NUM_THREADS": "1"},
    port=8123,
    model="/models/deep/probe",
    timeout=60,
)


def containers(engine: Engine) -> list[Any]:
    return list(engine.client.containers.list(all=True, filters={"label": "buildkit.smoke"}))


def serve(engine: Engine, image: str, server: SmokeServer, *, gpu: bool = False) -> SmokeReport:
    report = run_smoke(
        Subject(name="it", image=image, server=server, gpu=gpu),
        SmokeOptions(levels=("server",), dtype="f32", timeout=60),
        engine=engine,
    )
    assert containers(engine) == []
    assert engine.client.networks.list(filters={"label": "buildkit.smoke"}) == []
    return report


def test_an_image_with_a_fault_is_named_by_it(engine: Engine, probe_image: str) -> None:
    wrong = replace(SERVER, command=(*SERVER.command, "--fault", "key-band-zeroed"))
    report = serve(engine, probe_image, wrong)
    assert report.exit_code == 1
    assert report.levels[0].diagnosis == (
        f"80 of 80 tokens as with *{Fault.KEY_BAND_ZEROED.sentence}*: this build lacks the GDN conv fix",
    )


def test_a_server_that_ends_is_a_failure_with_its_last_words(engine: Engine, probe_image: str) -> None:
    report = serve(engine, probe_image, replace(SERVER, command=(str(PYTHON), "-c", "exit('no such model')")))
    assert report.verdict is Verdict.FAIL
    assert "ended with 1: no such model" in report.levels[0].reason


def test_a_server_that_is_never_healthy_is_a_failure(engine: Engine, probe_image: str) -> None:
    report = serve(engine, probe_image, replace(SERVER, health="/ready", timeout=5))
    assert report.verdict is Verdict.FAIL
    assert "/ready answers 404" in report.levels[0].reason


def test_a_program_that_is_not_there_is_a_failure(engine: Engine, probe_image: str) -> None:
    report = serve(engine, probe_image, replace(SERVER, command=("/no/such/program",)))
    assert report.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("words", "verdict", "code"),
    [
        ("CUDA error: no kernel image is available for execution on the device", Verdict.CANNOT_RUN, 1),
        ("Error: DriverError(CUDA_ERROR_NO_DEVICE)", Verdict.NOT_RUN, 3),
    ],
)
def test_what_the_driver_says_tells_a_card_that_cannot_from_a_wrong_result(
    engine: Engine, probe_image: str, words: str, verdict: Verdict, code: int
) -> None:
    report = serve(engine, probe_image, replace(SERVER, command=(str(PYTHON), "-c", f"exit({words!r})")))
    assert (report.verdict, report.exit_code) == (verdict, code)
    assert words in report.levels[0].reason


def test_an_image_that_needs_a_gpu_is_not_run_without_one(engine: Engine, probe_image: str) -> None:
    if "nvidia" in engine.client.info().get("Runtimes", {}):
        pytest.fail("this engine has a GPU: run the tests marked gpu there")
    report = serve(engine, probe_image, SERVER, gpu=True)
    assert (report.verdict, report.exit_code) == (Verdict.NOT_RUN, 3)


def test_kernels_are_not_run_without_a_gpu(engine: Engine, probe_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    report = run_smoke(Subject(name="it", image=probe_image, library=LIBRARY), SmokeOptions(), engine=engine)
    assert (report.verdict, report.exit_code) == (Verdict.NOT_RUN, 3)
    assert "no NVIDIA driver" in report.levels[0].reason


@pytest.mark.slow  # reads the whole image
def test_what_is_tested_must_be_what_is_served(engine: Engine, probe_image: str, gpu: Path) -> None:
    # built for the processor, the library has no fatbin that the server could share
    report = run_smoke(
        Subject(name="it", image=probe_image, library=LIBRARY, server=SERVER), SmokeOptions(), engine=engine
    )
    assert report.verdict is Verdict.FAIL
    assert "has no fatbin" in report.levels[0].reason


def test_a_file_comes_out_of_an_image_by_its_links(
    engine: Engine, probe_image: str, kernels: Path, tmp_path: Path
) -> None:
    copy_out(engine, probe_image, LIBRARY, tmp_path / "library")
    assert (tmp_path / "library").read_bytes() == kernels.read_bytes()
    for path, words in (("/no/such", "has no /no/such"), ("/app", "not a file")):
        with pytest.raises(NotFoundError, match=words):
            copy_out(engine, probe_image, path, tmp_path / "none")
    assert containers(engine) == []


def test_a_library_that_the_image_lacks_is_a_failure(engine: Engine, probe_image: str) -> None:
    report = run_smoke(Subject(name="it", image=probe_image, library="/lib/none.so"), SmokeOptions(), engine=engine)
    assert report.verdict is Verdict.FAIL
    assert "has no /lib/none.so" in report.levels[0].reason


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(engine_host: str, tmp_path: Path) -> Run:
    """The command line, in a folder with one recipe."""
    folder = tmp_path / "images/it"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\n")
    command = [str(PYTHON), "-m", "smokeworld.server", "--model", "{model}", "--port", "{port}"]
    (folder / "recipe.yaml").write_text(
        "name: it\nimage: bk-test-smoke\ntags: [probe]\n"
        f"smoke:\n  library: {LIBRARY}\n  dtype: f32\n  levels: [kernel, server]\n"
        f"  server: {{command: {json.dumps(command)}, port: 8123}}\n"
    )

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "buildkit", *words],
            cwd=tmp_path,
            env={**os.environ, "DOCKER_HOST": engine_host, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_task_tests_a_recipe_and_reports(invoke: Run, probe_image: str, gpu: Path, tmp_path: Path) -> None:
    code, out, err = invoke("smoke", "it", "--no-same", "--json", "--report", str(tmp_path / "report.md"))
    document = json.loads(out)
    assert code == 0, (out, err)
    assert [(level["verdict"], level["reason"]) for level in document["levels"]] == [
        ("PASS", "40 of 40 cases within tolerance"),
        ("PASS", "112/112 tokens identical"),
    ]
    assert "## Smoke test of it: PASS" in (tmp_path / "report.md").read_text()


def test_the_task_says_not_run_without_a_gpu(invoke: Run, probe_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    code, out, err = invoke("smoke", "it", "--level", "kernel", "--no-same")
    assert code == 3
    assert "kernel level NOT RUN: no NVIDIA driver" in out
    assert "Traceback" not in err
    code, out, _ = invoke("smoke", "it", "--level", "kernel", "--no-same", "--allow-missing-gpu", "--json")
    assert code == 0
    assert (json.loads(out)["ok"], json.loads(out)["verdict"]) == (False, "NOT RUN")


def test_the_task_refuses_what_makes_no_sense(invoke: Run, tmp_path: Path) -> None:
    for words in (
        ("smoke", "it", "--level", "all"),
        ("smoke", "it", "--dtype", "f8"),
        ("smoke", "--url", "nowhere"),
        ("smoke", "--write-checkpoint", str(tmp_path / "x"), "--dtype", "f8"),
        ("parity",),
        ("parity", "--candidate", "http://h", "--reference", "http://h", "--cases", str(tmp_path)),
    ):
        code, out, err = invoke(*words)
        assert code in (1, 2), (words, out, err)
        assert err.startswith("error: ")
        assert "Traceback" not in err


def test_the_task_writes_the_checkpoint(invoke: Run, tmp_path: Path) -> None:
    code, out, _ = invoke("smoke", "--write-checkpoint", str(tmp_path / "probe"), "--dtype", "f32")
    assert code == 0
    assert "wrote the probe checkpoint in f32" in out
    assert (tmp_path / "probe/model.safetensors").stat().st_size > 1_000_000
