"""Bring the stack up, take it down, look at it.

``up`` converges: what runs as wanted stays, what crashed, hangs or was started with other settings is ended and
started again. The state file is written after every step, so that an interrupted ``up`` leaves nothing unknown behind.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from buildkit.engine import Engine
from buildkit.errors import BuildkitError, EngineError, MissingComponentError, StorageError, UsageError, one_line
from buildkit.stack import htpasswd, packages, probe
from buildkit.stack.plan import (
    LOOPBACK,
    Credentials,
    EngineVariant,
    StackOptions,
    engine_arguments,
    engine_variants,
    fingerprint,
    nginx_config,
    registry_config,
)
from buildkit.stack.process import Process, alive, find_program, listens, running, send, spawn, stop, using, wait
from buildkit.stack.state import Component, ComponentName, Condition, StackState, load, save

Say = Callable[[str], None]

_READY_SECONDS = {"engine": 90.0, "registry": 30.0, "edge": 30.0}
_GRACE_SECONDS = {"engine": 45.0, "registry": 10.0, "edge": 10.0}
_ATTEMPTS = 4  # a free port may be taken by somebody else before our program gets to it
_LONGEST_FOLDER = 60
"""Characters. A unix socket's path holds 107 bytes (unix(7)), and containerd's and the network driver's sockets lie
deep under the engine's folder."""


def _silent(_: str) -> None:
    """Says nothing."""


def up(folder: Path, options: StackOptions, *, install: bool = False, say: Say = _silent) -> StackState:
    """Bring the stack in ``folder`` up as ``options`` say; ``say`` gets a line per step.

    Safe to run again: it starts only what is not running as wanted. What this call started is ended again when it
    fails. Raises MissingComponentError (programs; ``install`` installs their packages), UsageError (a port that is
    taken), EngineError and BuildkitError (a program that ends or does not answer; its last log lines go to ``say``).
    """
    if sys.platform != "linux":
        raise MissingComponentError("the local stack runs on Linux only")
    folder = folder.absolute()
    with _locked(folder):
        before = load(folder)
        engine = _choose_engine(before, options)
        programs = ["docker-registry", "nginx"]
        if engine is None and options.engine != "none":
            programs.append("dockerd")
        if options.builder:
            programs += ["docker", "debootstrap"]
        packages.require(programs, install=install, say=say)
        state = replace(before, edge_limit=options.edge_limit)
        started: list[ComponentName] = []
        try:
            ours = state.components.get("engine")
            if engine is None or not engine.owned:
                if ours and ours.owned:
                    state = _stop(state, "engine", say)
                state = state.without("engine")
            if engine is not None:
                say(f"engine: {engine.address} answers" + (f" ({engine.note})" if engine.note else ""))
                state = state.with_component(engine)
            elif options.engine != "none":
                state = _start_engine(state, started, say)
            save(state)
            state = _up_registry(state, options, started, say)
            state = _up_edge(state, options, started, say)
        except BaseException:
            for name in reversed(started):
                state = _stop(load(folder), name, say)
                save(state)
            raise
        return state


def down(folder: Path, *, purge: bool = False, say: Say = _silent) -> StackState:
    """End what ``up`` started in ``folder``, and nothing else; safe to run again.

    The data stays (images, blobs, ports) unless ``purge``, which removes the folder of a stack.
    """
    folder = folder.absolute()
    if not (folder / "state.json").exists():
        return StackState(folder=folder)
    with _locked(folder):
        state = load(folder)
        for name in ("edge", "registry", "engine"):
            state = _stop(state, name, say)
            save(state)
        if state.runtime is not None:
            _remove([state.runtime])
            state = replace(state, runtime=None)
            save(state)
        if purge:
            say(f"removing the stack's data in {folder}")
            _remove([folder / name for name in _OURS])
            with contextlib.suppress(OSError):  # not empty: what else is there is not ours
                folder.rmdir()
    return state


def status(folder: Path) -> StackState:
    """The stack as it is now. Changes nothing."""
    state = load(folder.absolute())
    for component in state.components.values():
        state = state.with_component(replace(component, condition=_condition(component)))
    return state


# The engine ----------------------------------------------------------------------------------------------------------


def _choose_engine(state: StackState, options: StackOptions) -> Component | None:
    """An engine that already answers and fits, None where one has to be started.

    Which one: ours if it runs, else the one that a Docker client would take, by DOCKER_HOST, context or usual socket.
    """
    if options.engine == "none":
        return None
    ours = state.components.get("engine")
    if ours and ours.owned and _condition(ours) == "running":
        return replace(ours, condition="running")
    if options.engine == "own":
        return None
    try:
        with Engine.connect() as other:
            address = other.host
    except MissingComponentError:
        return None
    return Component(name="engine", address=address, owned=False, condition="running", note="not ours: it stays")


def _start_engine(state: StackState, started: list[ComponentName], say: Say) -> StackState:
    program = find_program("dockerd")
    assert program is not None  # packages.require saw it
    if os.geteuid() != 0:
        raise MissingComponentError(
            "no Docker engine answers, and only root can start one",
            hint="run as root, or set DOCKER_HOST to an engine that runs",
        )
    runtime = _runtime(state)
    state = replace(state, runtime=runtime)
    socket = runtime / "docker.sock"
    log = state.folder / "log" / "engine.log"
    failure: BuildkitError | None = None
    for variant in engine_variants(other_engine=running("dockerd")):
        say(
            "engine: starting dockerd" + (f" {' '.join(variant.arguments)}: {variant.reason}" if variant.reason else "")
        )
        # Left by a crash. dockerd takes a process that nobody has waited for as a containerd that still runs, where
        # the first process of the machine or container does not do so; nothing of ours runs here any more.
        for name in ("docker.sock", "dockerd.pid", "exec/containerd/containerd.pid"):
            (runtime / name).unlink(missing_ok=True)
        try:
            return _launch(
                state,
                Component(name="engine", address=f"unix://{socket}", log=log, note=_engine_note(variant)),
                engine_arguments(
                    program, socket=socket, data=state.folder / "engine", runtime=runtime, variant=variant
                ),
                lambda _: probe.engine_answers(socket),
                started,
                say,
            )
        except _EndedEarly as error:
            failure = error
    raise EngineError(
        f"dockerd does not start: {failure.message if failure else 'no way to start it'}",
        hint="set DOCKER_HOST to an engine that runs",
    )


def _engine_note(variant: EngineVariant) -> str:
    return f"started with {' '.join(variant.arguments)}: {variant.reason}" if variant.reason else ""


# Registry and edge ---------------------------------------------------------------------------------------------------


def _up_registry(state: StackState, options: StackOptions, started: list[ComponentName], say: Say) -> StackState:
    folder = state.folder / "registry"
    passwords = _password_file(state.folder / "htpasswd", options.auth)
    secret = _secret(state.folder / "secret")
    program = find_program("docker-registry")
    assert program is not None
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REGISTRY_")}  # they override the file
    config = state.folder / "registry.yml"

    def prepare(port: int) -> tuple[tuple[str, ...], str]:
        text = registry_config(port=port, storage=folder, secret=secret, htpasswd=passwords[0] if passwords else None)
        arguments = (program, "serve", str(config))
        return arguments, fingerprint(arguments, text, passwords[1] if passwords else "")

    def write(port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = registry_config(port=port, storage=folder, secret=secret, htpasswd=passwords[0] if passwords else None)
        _write(config, text)

    return _up_server(state, "registry", options.registry_port, prepare, write, environment, started, say)


def _up_edge(state: StackState, options: StackOptions, started: list[ComponentName], say: Say) -> StackState:
    folder = state.folder / "edge"
    config = state.folder / "nginx.conf"
    program = find_program("nginx")
    assert program is not None
    pid_file = folder / "nginx.pid"
    upstream = int(state.registry.rpartition(":")[2])
    user = (pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name) if os.geteuid() == 0 else None
    environment = {k: v for k, v in os.environ.items() if k != "NGINX"}  # nginx takes sockets over by it

    def text(port: int) -> str:
        return nginx_config(
            port=port, upstream=upstream, limit=options.edge_limit, folder=folder, user=user, pid_file=pid_file
        )

    def prepare(port: int) -> tuple[tuple[str, ...], str]:
        # -e: the log before the configuration is read; otherwise /var/log/nginx, which may not be ours to write
        arguments = (program, "-e", "stderr", "-p", str(folder), "-c", str(config))
        return arguments, fingerprint(arguments, text(port))

    def write(port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(config, text(port))

    return _up_server(state, "edge", options.edge_port, prepare, write, environment, started, say)


def _up_server(
    state: StackState,
    name: ComponentName,
    wanted_port: int,
    prepare: Callable[[int], tuple[tuple[str, ...], str]],
    write: Callable[[int], None],
    environment: dict[str, str],
    started: list[ComponentName],
    say: Say,
) -> StackState:
    """Keep the server ``name`` if it runs as wanted, else start it, on another port where one is taken."""
    before = state.components.get(name)
    last_port = int(before.address.rpartition(":")[2]) if before else 0
    if before and _condition(before) == "running" and wanted_port in (0, last_port):
        arguments, wanted = prepare(last_port)
        if wanted == before.fingerprint:
            say(f"{name}: http://{before.address} runs already")
            return state.with_component(replace(before, condition="running"))
    state = _stop(state, name, say)
    save(state)
    log = state.folder / "log" / f"{name}.log"
    for attempt in range(_ATTEMPTS):
        port = wanted_port or last_port
        if not port or not probe.port_free(port):
            if wanted_port:
                raise UsageError(
                    f"port {wanted_port} on {LOOPBACK}, asked for the {name}, is taken", hint="0 takes any free port"
                )
            port = probe.free_port()
        arguments, settings = prepare(port)
        try:
            write(port)
        except OSError as error:
            raise StorageError(f"{error.filename or state.folder}: cannot be written: {error.strerror}") from error
        component = Component(name=name, address=f"{LOOPBACK}:{port}", fingerprint=settings, log=log)
        say(f"{name}: starting on http://{component.address}")
        try:
            return _launch(
                state,
                component,
                arguments,
                # Another program may answer there while ours still tries to get the port.
                lambda process, port=port: listens(process, port) and probe.registry_answers(port),  # type: ignore[misc]
                started,
                say,
                environment=environment,
            )
        except _EndedEarly:
            if probe.port_free(port) or attempt == _ATTEMPTS - 1:
                raise
            say(f"{name}: port {port} was taken by another program meanwhile")
            last_port = 0
    raise AssertionError("unreachable")


# Common --------------------------------------------------------------------------------------------------------------


class _EndedEarly(BuildkitError):
    """The program ended before it answered."""


def _launch(
    state: StackState,
    component: Component,
    arguments: tuple[str, ...],
    answers: Callable[[Process], bool],
    started: list[ComponentName],
    say: Say,
    *,
    environment: dict[str, str] | None = None,
) -> StackState:
    """Start the program and wait until it answers. Raises _EndedEarly or BuildkitError; then nothing of it is left."""
    log = component.log
    assert log is not None
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_suffix(".log.1"))
    process = spawn(arguments, log=log, environment=environment)
    component = replace(component, process=process)
    started.append(component.name)
    save(state.with_component(component))
    deadline = time.monotonic() + _READY_SECONDS[component.name]
    while True:
        ended = wait(process, 0.05)
        if not ended and answers(process):
            state = state.with_component(replace(component, condition="running"))
            save(state)
            return state
        if ended or time.monotonic() > deadline:
            break
    stop(process, grace=_GRACE_SECONDS[component.name])
    started.remove(component.name)
    save(state)
    tail = log_tail(log)
    for line in tail:
        say(f"{component.name}: | {line}")
    last = f": {one_line(tail[-1], 200)}" if tail else ""
    if ended:
        raise _EndedEarly(f"the {component.name} ended at once{last}", hint=f"its log is {log}")
    seconds = round(_READY_SECONDS[component.name])
    raise BuildkitError(f"the {component.name} did not answer within {seconds} s{last}", hint=f"its log is {log}")


def log_tail(path: Path, lines: int = 12) -> tuple[str, ...]:
    """The last lines of a log, each cut to one line's length; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(one_line(line) for line in text.splitlines()[-lines:] if line.strip())


def _condition(component: Component) -> Condition:
    if component.owned:
        if component.process is None:
            return "stopped"
        if not alive(component.process):
            return "crashed"
    if component.name == "engine":
        answers = _engine_answers(component)
    else:
        answers = probe.registry_answers(int(component.address.rpartition(":")[2]))
    return "running" if answers else "silent"


def _engine_answers(component: Component) -> bool:
    if component.owned:
        return probe.engine_answers(Path(component.address.removeprefix("unix://")))
    try:
        Engine.connect(component.address).close()
    except MissingComponentError:
        return False
    return True


def _stop(state: StackState, name: ComponentName, say: Say) -> StackState:
    """End a component that is ours; its address stays remembered, so that the next start can use it again."""
    component = state.components.get(name)
    if component is None:
        return state
    if not component.owned:
        say(f"{name}: {component.address} is not ours and stays")
        return state.without(name)
    if component.process is not None:
        was_alive = alive(component.process)
        if was_alive:
            say(f"{name}: stopping")
        polite = stop(component.process, grace=_GRACE_SECONDS[name])
        if not polite:
            say(f"{name}: did not end when asked to and was killed")
        if name == "engine" and state.runtime is not None and not (was_alive and polite):
            _end_orphans(state.runtime, say)
        if name == "engine":
            _unmount(state.folder / "engine")
    return state.with_component(replace(component, process=None, condition="stopped"))


def _end_orphans(runtime: Path, say: Say) -> None:
    """A killed engine leaves containerd, shims and containers behind; they name the engine's own folder."""
    orphans: tuple[Process, ...] = using(runtime)
    if orphans:
        say(f"engine: ending {len(orphans)} processes that it left behind")
    for orphan in orphans:
        send(orphan, signal.SIGKILL)
    for orphan in orphans:
        wait(orphan, 10)


_OURS = (
    *("engine", "registry", "edge", "log", "run"),
    *("registry.yml", "nginx.conf", "htpasswd", "secret", "lock", "state.json"),
)
"""Everything that a stack puts into its folder."""


def _remove(places: list[Path]) -> None:
    """Remove files and folders that the stack has made, after what is mounted there. Missing ones are fine."""
    for place in places:
        _unmount(place)
        left = _mounts_under(place)
        if left:
            raise StorageError(f"{left[0]}: is still mounted, so {place} is not removed")
        try:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{error.filename or place}: cannot be removed: {error.strerror}") from error


def _unmount(place: Path) -> None:
    """Undo the mounts that the engine leaves behind: its data root is one; killed containers have more."""
    umount = find_program("umount")
    for point in _mounts_under(place):
        if umount is not None:
            subprocess.run([umount, "-l", str(point)], check=False, capture_output=True, timeout=30)


def _mounts_under(folder: Path) -> tuple[Path, ...]:
    """Mount points at and below ``folder``, deepest first (proc_pid_mountinfo(5), field 5)."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        name = line.split(" ")[4]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            name = name.replace(code, character)
        if Path(name).is_relative_to(folder):
            points.append(Path(name))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One command at a time per data folder, which is made where it is missing, for us alone to read."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(folder / "lock", timeout=300)
        lock.acquire()
    except Timeout as error:
        raise StorageError(f"{folder}: another command works on this stack for 5 minutes already") from error
    except OSError as error:
        raise StorageError(f"{folder}: cannot be used as data folder: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _runtime(state: StackState) -> Path:
    """Where the engine's sockets lie: in the data folder, or in a temporary one where that path is too long."""
    if state.runtime is not None and _private(state.runtime):
        return state.runtime
    runtime = state.folder / "run"
    try:
        if len(os.fsencode(runtime)) <= _LONGEST_FOLDER:
            runtime.mkdir(mode=0o700, exist_ok=True)
            return runtime
        return Path(tempfile.mkdtemp(prefix="bk-", dir="/tmp"))
    except OSError as error:
        raise StorageError(f"{runtime}: cannot be made: {error.strerror}") from error


def _private(path: Path) -> bool:
    """Whether it is a folder that nobody else can have put there."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _password_file(path: Path, auth: Credentials | None) -> tuple[Path, str] | None:
    """The registry's password file and its text; the one of the last time where it fits."""
    if auth is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    if not htpasswd.matches(text, auth.user, auth.password):
        text = htpasswd.line(auth.user, auth.password)
        _write(path, text)
    return path, text


def _secret(path: Path) -> str:
    """A random text that is the same on every start of this stack."""
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text(encoding="ascii").strip()
        if len(text) == 64:
            return text
    text = secrets.token_hex(32)
    _write(path, text + "\n")
    return text


def _write(path: Path, text: str) -> None:
    """Write a file that only we can read."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
