"""The command line of deploy.check and deploy.plan: pipes, odd encodings, and numbers that are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: ü}\nspec: {containers: [{name: a, image: 'x:1'}]}\n"


def run(*words: str, text: bytes = b"", **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "buildkit", *words]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, input=text, capture_output=True, cwd=ROOT, env=settings)
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    assert "Traceback" not in err
    assert "internal error" not in err
    return done.returncode, out, err


def test_a_dash_is_standard_input() -> None:
    manifests = b"---\n".join(f.read_bytes() for f in sorted((Path(__file__).parent / "history").glob("both*/*.yaml")))
    code, out, _ = run("deploy.plan", "-", text=manifests)
    assert code == 0
    assert "Pending: Deployment/clef-serve (pod 0) wants 1" in out
    code, out, err = run("deploy.check", "-", "--node-gpus", "3", text=manifests)
    assert code == 1
    assert "<stdin>:" in out
    assert err == "error: <stdin>: 4 findings\n"


def test_an_empty_pipe_is_no_pass() -> None:
    code, out, _ = run("deploy.check", "-")
    assert code == 1
    assert "[nothing-to-check]" in out
    code, _, err = run("deploy.plan", "-", "--node-gpus", "1")
    assert code == 2
    assert "there is no Kubernetes object in it" in err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("kustomization.yaml", "resources: [pod.yaml, ../nowhere]\n", "does not render"),
        ("kustomization.yaml", "resources: [pod.yaml\n", "does not parse"),
        ("other.yaml", "kind: [\n", "does not parse"),
        ("other.yaml", "{{ if .Values.x }}\nkind: Pod\n{{ end }}\n", "template"),
    ],
)
def test_no_plan_of_what_a_cluster_would_not_get(tmp_path: Path, name: str, text: str, told: str) -> None:
    """Half of the manifests would make a plan that looks right and is not."""
    (tmp_path / "pod.yaml").write_text(POD)
    assert run("deploy.plan", str(tmp_path), "--node-gpus", "1")[0] == 0
    (tmp_path / name).write_text(text)
    code, out, err = run("deploy.plan", str(tmp_path), "--node-gpus", "1")
    assert code == 2, out
    assert f"{name}:" in err
    assert told in err


def test_bytes_that_are_no_text_are_a_finding_whatever_the_locale() -> None:
    code, out, _ = run("deploy.check", "-", text=b"a: 1\nb: \xff\xfe\n", LC_ALL="C")
    assert code == 1
    assert "<stdin>:2: error [yaml] is not UTF-8 at byte 8" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_cannot_show_a_name_gets_it_escaped(encoding: str) -> None:
    code, out, _ = run("deploy.check", "-", text=POD.encode(), PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert code == 1
    assert "[image-by-tag]" in out


@pytest.mark.parametrize(
    "words", [("--node-gpus", "-5"), ("--node-gpus", "many"), ("--nodes", "/etc/passwd"), ("--kubernetes", "old")]
)
def test_settings_that_make_no_sense_are_wrong_usage(words: tuple[str, ...]) -> None:
    assert run("deploy.check", "deploy", *words)[0] == 2
