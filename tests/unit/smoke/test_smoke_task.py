"""The tasks `smoke` and `parity` as they are called, where no engine and no GPU is: exit codes and one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from smokeworld.server import Behaviour, serving

ROOT = Path(__file__).parents[3]


def call(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "buildkit", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DOCKER_HOST": "unix:///nowhere", "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_library_that_is_no_file_is_wrong_usage_and_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path, words in (("none.so", "is not there"), ("folder", "is not a file"), ("fifo", "is not a file")):
        code, _, err = call(tmp_path, "smoke", "--library", path, "--level", "kernel")
        assert (code, f"--library {path} {words}" in err) == (2, True), err
        assert "recipe candle-vllm" not in err


def test_a_library_that_is_none_fails_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_text("text")
    code, out, err = call(tmp_path, "smoke", "--library", "bad.so", "--json")
    assert (code, json.loads(out)["verdict"]) == (1, "FAIL")
    assert "bad.so cannot be loaded: byte 0: " in err


@pytest.mark.parametrize(
    "words",
    [
        ("--level", ","),
        ("--level", ""),
        ("--timeout", "0"),
        ("--timeout", "0s"),
        ("--timeout", "999999999h"),
        ("--gpu=-1",),
        ("--url", "http://[::1"),
        ("--url", "http://127.0.0.1:99999"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    first = () if words[0] == "--url" else ("--url", "http://127.0.0.1:1")
    assert call(tmp_path, "smoke", *first, *words)[0] == 2
    if words[0] in ("--timeout", "--url"):
        (tmp_path / "c.yaml").write_text("cases: [{path: /x, compare: [{field: a}]}]")
        flags = words if words[0] == "--timeout" else ("--candidate", words[1])
        more = ("--candidate", "http://127.0.0.1:1") if words[0] == "--timeout" else ()
        assert call(tmp_path, "parity", *more, "--reference", "http://h", "--cases", "c.yaml", *flags)[0] == 2


def test_a_server_with_a_broken_name_fails_as_such_in_every_form(tmp_path: Path) -> None:
    with serving(Behaviour(model_id="\ud800")) as server:
        code, out, err = call(tmp_path, "smoke", "--url", server.url, "--json", "--report", "r.md")
        assert (code, json.loads(out)["verdict"]) == (1, "FAIL")
        assert "/v1/models gives its model an id that is no name" in err
        assert call(tmp_path, "smoke", "--url", server.url)[0] == 1
    assert "FAIL" in (tmp_path / "r.md").read_text()


def test_services_that_answer_halves_of_surrogates_are_reported_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cases: [{path: /v1/completions, body: {}, compare: [{field: '*'}]}]")
    with serving(Behaviour(raw=rb'{"\ud800": "\udc80", "b": Infinity}')) as one:
        words = ("parity", "--candidate", one.url, "--reference", one.url, "--cases", "c.yaml", "--out", "p.json")
        code, out, _ = call(tmp_path, *words, "--report", "r.md", "--json")
        assert (code, json.loads(out)["ok"]) == (0, True)
        assert call(tmp_path, *words)[0] == 0
    assert json.loads((tmp_path / "p.json").read_text())["ok"]


def test_the_error_line_of_parity_names_the_first_case_without_answers(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cases: [{path: /v1/completions, body: {}, compare: [{field: a}]}]")
    with serving(Behaviour(status=503)) as one:
        code, _, err = call(
            tmp_path, "parity", "--candidate", one.url, "--reference", one.url, "--cases", "c.yaml", "--quiet"
        )
    assert code == 1
    assert err.startswith("error: 0/1 cases agree: /v1/completions: candidate: /v1/completions answers 503: ")


def test_a_cases_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    words = ("--candidate", "http://h", "--reference", "http://h", "--cases")
    for path in ("none.yaml", "."):
        code, _, err = call(tmp_path, "parity", *words, path)
        assert (code, f"no cases file {path}" in err) == (2, True)
