"""Starts an image without a network, on a read-only root, to prove that it needs neither.

The health URL is asked inside the container: with ``--network none`` nothing outside can reach it. The container is
removed whatever happens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from buildkit.engine import Engine
from buildkit.engine import _translated as translated
from buildkit.errors import EngineError, UsageError, one_line
from buildkit.recipe import Start

OUTPUT_LINES = 200
"""Of the container's output that are looked at and kept."""
OUTPUT_LIMIT = 64 * 1024
_POLL = 0.25

# The first of these that the image has asks for the health URL; 97 where it has none.
_ASK = """\
url=http://127.0.0.1:$1$2
if command -v curl >/dev/null 2>&1; then exec curl -fsS -m 5 -o /dev/null "$url"; fi
if command -v wget >/dev/null 2>&1; then exec wget -q -T 5 -O /dev/null "$url"; fi
for python in python3 python; do
  if command -v $python >/dev/null 2>&1; then
    exec $python -c 'import sys,urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read(1)' "$url"
  fi
done
if command -v bash >/dev/null 2>&1; then
  exec bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0" || exit 1
    printf "GET %s HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n" "$1" >&3
    read -r -t 5 _ status _ <&3 && case $status in 2*) exit 0;; *) exit 1;; esac' "$1" "$2"
fi
exit 97
"""
_NO_CLIENT = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProof:
    """What happened. ``exit_code`` is None where the program was still running (and healthy, or out of time)."""

    ok: bool
    message: str
    exit_code: int | None
    seconds: float
    output: str
    """The last lines, standard output and error together."""

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "message": self.message,
            "exitCode": self.exit_code,
            "seconds": round(self.seconds, 3),
            "output": self.output,
        }


def prove_start(
    engine: Engine,
    image: str,
    spec: Start,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> StartProof:
    """Start ``image`` (a name or an id of the engine) by ``spec``, without network, and tell whether that worked.

    Without ``spec.health`` the command must end with 0 within ``spec.timeout`` seconds; with it,
    ``http://127.0.0.1:<port><health>`` must answer 2xx by then.

    A start that fails is a result. Raises EngineError where the engine itself refuses, UsageError for a ``spec`` that
    cannot be used.
    """
    if spec.health is not None and spec.port is None:
        raise UsageError("start.health needs start.port")
    try:
        expected = re.compile(spec.expect) if spec.expect else None
    except re.error as error:
        raise UsageError(f"start.expect {spec.expect!r} is not a regular expression: {error}") from error
    container = _create(engine, image, spec)
    begun = clock()
    try:
        try:
            with translated(f"starting {image}"):
                container.start()
        except EngineError as error:
            # No such program, or not executable: the image's fault, not the engine's.
            return StartProof(
                ok=False, message=error.message, exit_code=None, seconds=clock() - begun, output=_output(container)
            )
        code, message = _watch(container, spec, begun + spec.timeout, clock, sleep)
        output = _output(container)
        ok = message == ""
        if ok and expected is not None and not expected.search(output):
            ok, message = False, f"its output does not match {spec.expect!r}"
        if not ok:
            last = output.strip().splitlines()[-1:]
            message += f": {one_line(last[0], 200)}" if last else ""
        elif spec.health:
            message = f"healthy at {spec.health} after {clock() - begun:.1f} s, without network"
        else:
            message = "ended with 0, without network"
        return StartProof(ok=ok, message=message, exit_code=code, seconds=clock() - begun, output=output)
    finally:
        with translated(f"removing the container of {image}"):
            container.remove(force=True, v=True)


def _create(engine: Engine, image: str, spec: Start) -> Any:
    options: dict[str, Any] = {
        "network_mode": "none",
        "read_only": True,
        "tmpfs": dict.fromkeys(spec.writable, ""),
        "environment": dict(spec.environment),
        "labels": {"buildkit.check": "start"},
        "security_opt": ["no-new-privileges"],
        "detach": True,
    }
    if spec.command:
        # An entrypoint of one's own also clears the image's command (Docker Engine API, ContainerCreate).
        options["entrypoint"] = list(spec.command)
    with translated(f"creating a container of {image}"):
        return engine.client.containers.create(image, **options)


def _watch(
    container: Any, spec: Start, deadline: float, clock: Callable[[], float], sleep: Callable[[float], object]
) -> tuple[int | None, str]:
    """Exit code, and what went wrong; an empty text where nothing did."""
    refused: EngineError | None = None
    unable = 0
    while True:
        with translated("watching the container"):
            container.reload()
            state: Mapping[str, Any] = container.attrs["State"]
        if not state.get("Running") and state.get("Status") not in ("created", "restarting"):
            code = int(state.get("ExitCode", -1))
            if state.get("OOMKilled"):
                return code, "was killed for its memory"
            if spec.health is not None:
                return code, f"ended with {code} before it was healthy"
            return code, "" if code == 0 else f"ended with {code}"
        if spec.health is not None:
            # In a container that is just ending, engines refuse to run anything, or say that it cannot be run: what
            # became of the container is seen at the next look.
            try:
                answer, refused = _ask(container, spec), None
            except EngineError as error:
                answer, refused = None, error
            if answer == 0:
                return None, ""
            unable = unable + 1 if answer in (_NO_CLIENT, 126, 127) else 0
            if unable > 1:
                return None, "the image has no curl, wget, python or bash to ask for its health with"
        if clock() >= deadline:
            if refused is not None:
                raise refused
            what = "was not healthy" if spec.health is not None else "did not end"
            return None, f"{what} within {spec.timeout:g} s"
        sleep(_POLL)


def _ask(container: Any, spec: Start) -> int | None:
    """Exit code of a request for the health URL inside the container; None where the engine knows of none."""
    with translated("asking for health inside the container"):
        code = container.exec_run(["sh", "-c", _ASK, "sh", str(spec.port), spec.health]).exit_code
    return None if code is None else int(code)


def _output(container: Any) -> str:
    with translated("reading the container's output"):
        raw: bytes = container.logs(stdout=True, stderr=True, tail=OUTPUT_LINES)
    text = raw[-OUTPUT_LIMIT:].decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
