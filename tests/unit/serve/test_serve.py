"""The reference server's logic, checked by one process in an environment with torch, told here check by check."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from support.reference import reference_python

HERE = Path(__file__).parent
NAMES = [
    node.name
    for node in ast.parse((HERE / "serve_checks.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and "check" in [ast.unparse(d) for d in node.decorator_list]
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("serve") / "probe"
    folder.parent.chmod(0o755)
    python = str(reference_python())
    subprocess.run([python, str(HERE / "tiny_checkpoint.py"), str(folder)], check=True, capture_output=True)
    command = [python, str(HERE / "serve_checks.py"), str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(row) for row in done.stdout.splitlines() if row.startswith('{"check"')]
    return {str(row["check"]): row for row in lines}


@pytest.mark.parametrize("name", NAMES)
def test_reference_server(name: str, results: dict[str, dict[str, object]]) -> None:
    assert results[name]["ok"], results[name].get("trace")


def test_no_check_is_forgotten(results: dict[str, dict[str, object]]) -> None:
    assert sorted(results) == sorted(NAMES)
