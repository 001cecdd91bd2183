"""What the stack remembers between two commands: one JSON file in its data folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from buildkit.disk import write_atomic
from buildkit.errors import MissingComponentError, StorageError
from buildkit.stack.process import Process

Condition = Literal["running", "crashed", "silent", "stopped"]
"""``crashed``: started and no longer there. ``silent``: there, but it does not answer."""

ComponentName = Literal["engine", "registry", "edge"]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One program of the stack.

    ``address`` is ``HOST:PORT``, or a DOCKER_HOST value for the engine. ``owned``: started by us, and ours to end.
    ``process`` is there while it is meant to run; ``fingerprint`` tells with which settings. ``note`` says what is
    worth knowing, such as why the engine runs without a bridge network.
    """

    name: ComponentName
    address: str
    owned: bool = True
    process: Process | None = None
    fingerprint: str = ""
    log: Path | None = None
    note: str = ""
    condition: Condition = "stopped"

    def to_json(self) -> dict[str, Any]:
        """For reports and for the state file; ``condition`` is found out anew each time."""
        process = self.process
        return {
            "address": self.address,
            "condition": self.condition,
            "owned": self.owned,
            "process": {"pid": process.pid, "started": process.started, "boot": process.boot} if process else None,
            "fingerprint": self.fingerprint,
            "log": str(self.log) if self.log else None,
            "note": self.note,
        }


_NOTHING: Mapping[ComponentName, Component] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The stack as it is: its data folder, its edge's limit in bytes, its components by name in the order of start.

    ``runtime`` holds the engine's sockets, whose paths must be short.
    """

    folder: Path
    edge_limit: int = 0
    runtime: Path | None = None
    components: Mapping[ComponentName, Component] = field(default_factory=lambda: _NOTHING)

    @property
    def running(self) -> bool:
        """Whether every component that belongs to the stack answers."""
        return bool(self.components) and all(c.condition == "running" for c in self.components.values())

    @property
    def engine(self) -> str | None:
        """A DOCKER_HOST value, where the stack knows an engine."""
        return self.components["engine"].address if "engine" in self.components else None

    @property
    def registry(self) -> str:
        """``HOST:PORT`` of the registry, without the edge in its way. Raises MissingComponentError without one."""
        return self._address("registry")

    @property
    def edge(self) -> str:
        """``HOST:PORT`` of the edge, where the registry's clients knock. Raises MissingComponentError without one."""
        return self._address("edge")

    def _address(self, name: ComponentName) -> str:
        if name not in self.components:
            raise MissingComponentError(f"there is no {name} in {self.folder}", hint="`buildkit stack.up` starts it")
        return self.components[name].address

    def with_component(self, component: Component) -> StackState:
        """The same with ``component`` in place of the one of its name."""
        return StackState(
            folder=self.folder,
            edge_limit=self.edge_limit,
            runtime=self.runtime,
            components=_ordered({**self.components, component.name: component}),
        )

    def without(self, name: ComponentName) -> StackState:
        """The same without the component ``name``."""
        left = {key: value for key, value in self.components.items() if key != name}
        return StackState(
            folder=self.folder, edge_limit=self.edge_limit, runtime=self.runtime, components=MappingProxyType(left)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for ``--json`` and for the state file."""
        return {
            "version": _VERSION,
            "folder": str(self.folder),
            "running": self.running,
            "edge_limit": self.edge_limit,
            "runtime": str(self.runtime) if self.runtime else None,
            "components": {name: component.to_json() for name, component in self.components.items()},
        }


def _ordered(components: Mapping[ComponentName, Component]) -> Mapping[ComponentName, Component]:
    return MappingProxyType({name: components[name] for name in get_args(ComponentName) if name in components})


def load(folder: Path) -> StackState:
    """The remembered state; an empty one where there is none. Raises StorageError for a file that is not ours."""
    path = folder / "state.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return StackState(folder=folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _parse(folder, json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(
            f"{path}: is not a state file of this version's stack",
            hint="end what it started (ps), then remove the file",
        ) from error


def save(state: StackState) -> None:
    """Write the state file, whole or not at all. Raises StorageError."""
    path = state.folder / "state.json"
    try:
        write_atomic(path, json.dumps(state.to_json(), indent=2).encode() + b"\n", durable=False)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _parse(folder: Path, document: Any) -> StackState:
    if document["version"] != _VERSION:
        raise ValueError("another version")
    components: dict[ComponentName, Component] = {}
    for name in get_args(ComponentName):
        value = document["components"].get(name)
        if value is None:
            continue
        process = value["process"]
        components[name] = Component(
            name=name,
            address=str(value["address"]),
            owned=value["owned"] is True,
            process=Process(pid=int(process["pid"]), started=int(process["started"]), boot=str(process["boot"]))
            if process
            else None,
            fingerprint=str(value["fingerprint"]),
            log=Path(value["log"]) if value["log"] else None,
            note=str(value["note"]),
        )
    runtime = document["runtime"]
    return StackState(
        folder=folder,
        edge_limit=int(document["edge_limit"]),
        runtime=Path(runtime) if runtime else None,
        components=MappingProxyType(components),
    )
