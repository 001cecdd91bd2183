"""Long-running programs that outlive the command that starts them, and can be found and ended safely later.

A number alone does not name a process: numbers are used again. A process is named by its number, its start time in
clock ticks after boot, and the boot (proc_pid_stat(5), field 22; random(4), ``boot_id``). Signals go through a pidfd
(pidfd_open(2)), opened before the name is checked, so that a number that is used again in between is never hit.

Linux only, like the programs that it runs.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import MissingComponentError, StorageError

_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The name of one process for all time. ``started`` is in clock ticks after the boot ``boot``."""

    pid: int
    started: int
    boot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    parent: int
    session: int
    started: int


def find_program(name: str) -> str | None:
    """The absolute path of ``name`` on PATH or in the system's usual folders, which a user's PATH may lack."""
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH)


def spawn(arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start a program in a session of its own, its output going to the end of ``log``, its input empty.

    It is not waited for, and a terminal's Ctrl-C does not reach it. Raises MissingComponentError where the program
    cannot be started and StorageError where the log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise StorageError(f"{log}: cannot be written: {error.strerror}") from error
    try:
        pid = os.posix_spawn(
            arguments[0],
            list(arguments),
            dict(os.environ if environment is None else environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT],
        )
    except OSError as error:
        raise MissingComponentError(f"{arguments[0]} cannot be started: {error.strerror}") from error
    finally:
        os.close(output)
    stat = _stat(pid)  # our child: it stays in the process table until we wait for it
    assert stat is not None
    return Process(pid=pid, started=stat.started, boot=boot_id())


def alive(process: Process) -> bool:
    """Whether exactly this process still runs. A dead child of ours is taken off the process table."""
    _reap(process.pid)
    with _handle(process) as handle:
        return handle is not None


def wait(process: Process, seconds: float) -> bool:
    """Wait until ``process`` has ended, at most ``seconds``. Returns whether it has."""
    with _handle(process) as handle:
        ended = handle is None or _ended(handle, max(0.0, seconds))
    _reap(process.pid)
    return ended


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process. Returns False where it has ended before."""
    with _handle(process) as handle:
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
    return True


def stop(process: Process, *, grace: float) -> bool:
    """End ``process``: ask (SIGTERM), wait ``grace`` seconds, then force; then force what is left of its session.

    Safe to call again. Returns whether it ended by itself within the grace.
    """
    polite = True
    if send(process, signal.SIGTERM) and not wait(process, grace):
        polite = False
        send(process, signal.SIGKILL)
        wait(process, 10)
    for left in session_members(process):
        send(left, signal.SIGKILL)
        wait(left, 10)
    return polite


def session_members(leader: Process) -> tuple[Process, ...]:
    """Processes of the session that ``leader`` opened, without itself: what a crash may have left behind.

    The kernel does not give a number out again while a session still bears it. So another process under the leader's
    number means that its session is empty, and none under it means that the session's members are ours.
    """
    if leader.boot != boot_id():
        return ()
    at_number = _stat(leader.pid)
    if at_number is not None and not _same(leader, at_number):
        return ()
    members = (
        Process(pid=pid, started=stat.started, boot=leader.boot)
        for pid, stat in _processes()
        if stat.session == leader.pid and pid != leader.pid
    )
    return tuple(member for member in members if alive(member))


def listens(leader: Process, port: int) -> bool:
    """Whether ``leader`` or another process of its session listens on this port of 127.0.0.1 (proc_net(5), ``tcp``)."""
    sockets = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1] == f"0100007F:{port:04X}" and fields[3] == "0A":
            sockets.add(f"socket:[{fields[9]}]")
    for process in (leader, *session_members(leader)):
        with contextlib.suppress(OSError):
            for handle in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{process.pid}/fd/{handle}") in sockets:
                        return True
    return False


def using(folder: Path) -> tuple[Process, ...]:
    """Processes with a path under ``folder`` among their arguments, and all their descendants, deepest first."""
    table = dict(_processes())
    prefix = f"{folder}/".encode()
    found: dict[int, None] = {}
    for pid in table:
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(argument.startswith(prefix) for argument in arguments):
                found[pid] = None
    queue = list(found)
    while queue:
        parent = queue.pop(0)
        for pid, stat in table.items():
            if stat.parent == parent and pid not in found:
                found[pid] = None
                queue.append(pid)
    boot = boot_id()
    return tuple(
        Process(pid=pid, started=table[pid].started, boot=boot) for pid in reversed(found) if pid != os.getpid()
    )


def running(name: str) -> bool:
    """Whether any process of this machine bears the program name ``name`` (at most 15 characters)."""
    for pid, _ in _processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() == name[:15]:
                return True
    return False


def boot_id() -> str:
    """Names this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextlib.contextmanager
def _handle(process: Process) -> Iterator[int | None]:
    """A pidfd of exactly this process, None where it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        stat = _stat(process.pid)
        yield handle if stat is not None and _same(process, stat) and not _ended(handle, 0) else None
    finally:
        os.close(handle)


def _ended(handle: int, seconds: float) -> bool:
    """Whether all threads behind a pidfd have ended, after waiting for it at most ``seconds`` (pidfd_open(2)).

    The state in ``/proc/PID/stat`` is that of the first thread alone: it can be a zombie while others still hold files
    and listening sockets open.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _same(process: Process, stat: _Stat) -> bool:
    return stat.started == process.started and process.boot == boot_id()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The program's name stands in parentheses and may hold any byte: count from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def _processes() -> Iterator[tuple[int, _Stat]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            yield int(entry), stat
