"""Running the builder: its lines, its end, and nothing left running."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from buildkit.build.process import Ended, run
from buildkit.errors import EngineError, MissingComponentError


def execute(script: str, *, timeout: float = 60, arguments: tuple[str, ...] = ()) -> tuple[Ended, list[str]]:
    lines: list[str] = []
    ended = run(
        [sys.executable, "-c", script, *arguments],
        say=lines.append,
        timeout=timeout,
        environment=os.environ,
        what="the build",
    )
    return ended, lines


def test_lines_come_printable_and_complete_from_both_streams() -> None:
    ended, lines = execute(
        "import sys; sys.stdout.write('one\\ntwo\\rthree\\x1b[1m\\n\\n'); sys.stdout.flush();"
        "sys.stderr.buffer.write(b'bad \\xff\\nlast'); sys.exit(3)"
    )
    assert ended.code == 3
    assert lines == ["one", "two", "three [1m", "bad \ufffd", "last"]
    assert ended.tail[-1] == "last"


def test_a_line_without_end_is_cut_and_does_not_fill_the_memory() -> None:
    _, lines = execute("import sys\nfor _ in range(100): sys.stdout.write('x' * 100000)")
    assert lines
    assert max(map(len, lines)) <= 2000


def test_after_the_time_out_the_program_and_its_children_are_gone(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == 'stubborn' else signal.SIG_DFL)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid)); print('ready', flush=True); time.sleep(1000)"
    )
    with pytest.raises(EngineError, match=r"the build took longer than 1\.0 s and was ended"):
        execute(script, timeout=1, arguments=(str(tmp_path / "pid"), "polite"))
    assert ended(int((tmp_path / "pid").read_text()))


def test_an_interruption_ends_the_program_too(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        (tmp_path / "pid").write_text(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"],
            say=interrupt,
            timeout=60,
            environment=os.environ,
            what="the build",
        )
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingComponentError, match="/nowhere/docker cannot be started"):
        run(["/nowhere/docker"], say=print, timeout=1, environment={}, what="the build")


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and waiting for its parent."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
    return False
