"""The local stack: an engine, a registry and an edge on loopback, to try everything in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from buildkit import stack as local
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.errors import UsageError
from buildkit.progress import display
from buildkit.stack import Credentials, StackOptions, StackState
from buildkit.units import format_size, parse_size

_FOLDER = "data folder of the stack (default: BUILDKIT_STACK, then the user's state folder)"


@command(
    help={
        "install": "install missing Debian packages (as root, by apt-get)",
        "data": _FOLDER,
        "edge-limit": "largest request body that the edge lets through (default 100MiB)",
        "engine": "auto (use the one that answers, else start one), own or none",
        "registry-port": "port of the registry (default: any free one)",
        "edge-port": "port of the edge (default: any free one)",
        "auth": "ask clients of the registry for the user and password in BUILDKIT_STACK_AUTH (user:password)",
        "builder": "also see to the programs that recipes with a base of their own need",
    },
)
def up(
    context: Any,
    install: bool = False,
    data: str = "",
    edge_limit: str = "",
    engine: str = "auto",
    registry_port: int = 0,
    edge_port: int = 0,
    auth: bool = False,
    builder: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Start the engine (if none answers), the registry and the edge; safe to run again."""
    match engine:
        case "auto" | "own" | "none":
            choice = engine
        case _:
            raise UsageError(f"--engine {engine!r} is not known", hint="auto, own or none")
    options = StackOptions(
        edge_limit=parse_size(edge_limit, what="--edge-limit") if edge_limit else local.EDGE_LIMIT,
        engine=choice,
        registry_port=registry_port,
        edge_port=edge_port,
        auth=_credentials() if auth else None,
        builder=builder,
    )
    with display(quiet=quiet) as shown:
        state = local.up(_folder(data), options, install=install, say=shown.say)
    state = local.status(state.folder)
    _show(state, json=json)


@command(
    help={"data": _FOLDER, "purge": "remove the data folder as well: images, blobs, everything"},
)
def down(context: Any, data: str = "", purge: bool = False, json: bool = False, quiet: bool = False) -> None:
    """End what `stack.up` started, and nothing else."""
    with display(quiet=quiet) as shown:
        state = local.down(_folder(data), purge=purge, say=shown.say)
    if json:
        emit_json({"ok": True, **state.to_json()})


@command(help={"data": _FOLDER})
def status(context: Any, data: str = "", json: bool = False) -> None:
    """Show the stack; exit code 1 where a part of it does not answer."""
    state = local.status(_folder(data))
    _show(state, json=json)
    if not state.running:
        raise ReportedFailure("the stack is not running", hint="invoke stack.up")


def _folder(data: str) -> Path:
    return Path(data).absolute() if data else local.default_folder()


def _credentials() -> Credentials:
    text = os.environ.get("BUILDKIT_STACK_AUTH", "")
    if not text:
        raise UsageError("--auth needs the variable BUILDKIT_STACK_AUTH", hint="user:password; never on a command line")
    return Credentials.parse(text)


def _show(state: StackState, *, json: bool) -> None:
    if json:
        emit_json({"ok": state.running, **state.to_json()})
        return
    for name, component in state.components.items():
        note = f" ({component.note})" if component.note else ""
        print(f"{name}: {component.address}: {component.condition}{note}")
    if not state.components:
        print(f"no stack in {state.folder}")
        return
    print(f"the edge refuses bodies above {format_size(state.edge_limit)}; push to {state.edge}/NAME:TAG")
    engine = state.components.get("engine")
    if engine is not None and engine.owned:
        print(f"for docker itself: export DOCKER_HOST={engine.address}")
