"""The command line's own rules: optional positional arguments, exit codes, one-line errors, JSON that stays JSON."""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from invoke.collection import Collection
from invoke.program import Program

from buildkit import __version__
from buildkit.cli import ReportedFailure, command, emit_json, program
from buildkit.errors import (
    BuildkitError,
    CancelledError,
    CheckFailedError,
    MissingComponentError,
    RegistryError,
    UsageError,
)

Run = Callable[..., tuple[int, str, str]]


def _tasks(seen: list[tuple[str, Any]], error: BaseException | None = None) -> Collection:
    @command(positional=["name"], help={"name": "what", "count": "how many"})
    def make(context: Any, name: str = "", count: int = 1, json: bool = False, quiet: bool = False) -> None:
        seen.append(("make", (name, count, json, quiet)))
        if error is not None:
            raise error

    @command(help={})
    def check(context: Any, json: bool = False) -> None:
        seen.append(("check", json))
        if error is not None:
            emit_json({"ok": False})
            raise ReportedFailure("two findings")

    collection = Collection()
    collection.add_task(make)
    collection.add_task(check)
    return collection


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def go(tasks: Collection, *words: str) -> tuple[int, str, str]:
        code = 0
        try:
            Program(namespace=tasks, version="1", name="t", binary="t").run(["t", *words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return go


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["make"], [("make", ("", 1, False, False))]),
        (["make", "probe"], [("make", ("probe", 1, False, False))]),
        (["make", "--count", "3", "probe"], [("make", ("probe", 3, False, False))]),
        (["make", "--quiet", "probe", "--json"], [("make", ("probe", 1, True, True))]),
        (["make", "--name", "probe"], [("make", ("probe", 1, False, False))]),
        (["make", "--name=check"], [("make", ("check", 1, False, False))]),
        (["make", "check"], [("make", ("", 1, False, False)), ("check", False)]),
        (["make", "probe", "check"], [("make", ("probe", 1, False, False)), ("check", False)]),
        (["make", "a", "make", "b"], [("make", ("a", 1, False, False)), ("make", ("b", 1, False, False))]),
    ],
)
def test_positional_arguments_may_be_left_out(run: Run, words: list[str], expected: list[tuple[str, Any]]) -> None:
    seen: list[tuple[str, Any]] = []
    code, _, _ = run(_tasks(seen), *words)
    assert (code, seen) == (0, expected)


@pytest.mark.parametrize(
    "words",
    [
        ["make", "a", "b"],
        ["make", "--nope"],
        ["make", "--count", "many"],
        ["nothing"],
        ["make", "--count"],
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(run: Run, words: list[str]) -> None:
    code, out, err = run(_tasks([]), *words)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BuildkitError("a"), 1),
        (RegistryError("a", hint="b"), 1),
        (CheckFailedError("a"), 1),
        (UsageError("a", hint="b"), 2),
        (MissingComponentError("a", hint="get it"), 3),
        (CancelledError("stopped"), 130),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "/some/file"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_errors_are_one_line_and_an_exit_code(run: Run, error: BaseException, code: int) -> None:
    seen: list[tuple[str, Any]] = []
    actual, out, err = run(_tasks(seen, error), "make")
    assert actual == code
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_the_line_names_the_way_out(run: Run) -> None:
    _, _, err = run(_tasks([], MissingComponentError("no engine answers", hint="start one")), "make")
    assert err == "error: no engine answers (start one)\n"


def test_an_error_of_the_system_names_its_file(run: Run) -> None:
    _, _, err = run(_tasks([], OSError(28, "No space left on device", "/some/file")), "make")
    assert err == "error: /some/file: No space left on device\n"


def test_debug_shows_the_traceback(run: Run) -> None:
    code, _, err = run(_tasks([], UsageError("a")), "make", "--debug")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize("error", [UsageError("a", hint="b"), ZeroDivisionError("x"), OSError(2, "gone", "f")])
def test_json_stays_json_when_a_task_fails(run: Run, error: BaseException) -> None:
    code, out, _ = run(_tasks([], error), "make", "--json")
    document = jsonlib.loads(out)
    assert document["ok"] is False
    assert document["exit_code"] == code
    assert document["error"]["message"]


def test_json_stays_json_when_a_task_is_interrupted(run: Run) -> None:
    code, out, err = run(_tasks([], KeyboardInterrupt()), "make", "--json")
    assert code == jsonlib.loads(out)["exit_code"] == 130
    assert err.startswith("error: interrupted")


def test_json_stays_json_when_the_usage_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["t", "make", "--json", "--nope"])
    code, out, _ = run(_tasks([]), "make", "--json", "--nope")
    assert code == jsonlib.loads(out)["exit_code"] == 2


def test_a_missing_value_names_its_flag(run: Run) -> None:
    _, _, err = run(_tasks([]), "make", "--count")
    assert "--count" in err
    assert "<Argument" not in err


# The process as a whole -----------------------------------------------------------------------------------------------


def _shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line.replace("buildkit", f"{sys.executable} -m buildkit")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "line",
    [
        "buildkit --list > /dev/full",
        "buildkit stack.status --data /nonexistent > /dev/full",
        "buildkit stack.status --data /nonexistent --json > /dev/full",
        "buildkit build nowhere --json > /dev/full",
        "buildkit build nowhere --json >&-",
        "buildkit build nowhere 2>&-",
        "buildkit --list | head -1 > /dev/null; exit ${PIPESTATUS[0]}",
        "buildkit push docker-archive:x.tar --to localhost:1/a:b --username a --password-stdin <&-",
    ],
)
def test_broken_standard_streams_are_no_crash(line: str) -> None:
    done = _shell(line)
    assert "Traceback" not in done.stderr + done.stdout
    assert "internal error" not in done.stderr + done.stdout
    assert "Exception ignored" not in done.stderr
    if "--list |" not in line:
        assert done.returncode in (1, 2)


def test_no_password_in_a_reference_is_shown() -> None:
    done = _shell("buildkit pull-check user:sekrit@localhost:1/a:b --json")
    assert done.returncode == 2
    assert "sekrit" not in done.stdout + done.stderr


def test_a_failed_check_prints_its_report_once(run: Run) -> None:
    code, out, err = run(_tasks([], BuildkitError("x")), "check", "--json")
    assert code == 1
    assert jsonlib.loads(out) == {"ok": False}
    assert err == "error: two findings\n"


def test_the_installed_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program().run(["buildkit", "--version"])
    assert not stop.value.code
    assert capsys.readouterr().out == f"buildkit {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    with pytest.raises(SystemExit):
        program().run(["buildkit", "--print-completion-script", shell])
    assert "buildkit" in capsys.readouterr().out


def test_every_task_and_every_flag_has_help() -> None:
    from buildkit.tasks import namespace

    for name, task in sorted((n, namespace[n]) for n in namespace.task_names):
        assert task.__doc__, name
        for argument in task.get_arguments():
            assert argument.help, f"{name} --{argument.name}"
            assert task.get_arguments()[0].help, "listing them once more says the same"
