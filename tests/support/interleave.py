"""Runs several machines against one world, their steps in any order: a model of clients at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from faults.model import Call, RegistryModel

from buildkit.registry.steps import Answer, Headers, Pause, Request

Kind = Literal["read", "write", "wait"]


@dataclass(slots=True, kw_only=True)
class _Runner:
    machine: Generator[Any, Any, Any]
    step: Any = None
    waits_for: set[int] = field(default_factory=set)
    ended: bool = False
    result: Any = None


def interleave(
    machines: Sequence[Generator[Any, Any, Any]],
    carry_out: Callable[[int, Any], Any],
    kind_of: Callable[[Any], Kind],
    choose: Callable[[Sequence[int]], int],
) -> list[Any]:
    """The machines' results. ``choose`` picks whose next step is carried out, of those that are ready.

    A pause lasts at least as long as any other client takes from its last look to its next write: whoever pauses waits
    until everyone who was between the two has written. That is all that a settling time can promise.
    """
    runners = [_Runner(machine=machine) for machine in machines]
    for runner in runners:
        runner.step = next(runner.machine)
    while True:
        ready = [n for n, r in enumerate(runners) if not r.ended and not r.waits_for]
        if not ready:
            assert all(r.ended for r in runners), "the machines wait for each other"
            return [r.result for r in runners]
        number = choose(ready)
        runner = runners[number]
        kind = kind_of(runner.step)
        reply = None if kind == "wait" else carry_out(number, runner.step)
        try:
            runner.step = runner.machine.send(reply)
        except StopIteration as stop:
            runner.ended, runner.result = True, stop.value
        pauses = not runner.ended and kind_of(runner.step) == "wait"
        if kind == "write" or runner.ended:
            for other in runners:
                other.waits_for.discard(number)
        if pauses:
            runner.waits_for = {n for n, r in enumerate(runners) if not r.ended and kind_of(r.step) == "write"}


def request_kind(step: Any) -> Kind:
    """For machines of the registry's protocol."""
    if isinstance(step, Pause):
        return "wait"
    return "write" if isinstance(step, Request) and step.method == "PUT" else "read"


def against(model: RegistryModel) -> Callable[[int, Any], Answer | None]:
    """Carries out the steps of such machines on a registry without sockets."""

    def carry_out(_: int, step: Any) -> Answer | None:
        if not isinstance(step, Request):
            return None
        parts = urlsplit(step.url)
        body = step.body if isinstance(step.body, bytes) else b""
        headers = {name.lower(): value for name, value in step.headers.items()}
        result = model.handle(Call(method=step.method, path=parts.path, query=parts.query, headers=headers, body=body))
        fields = Headers(result.headers)
        return Answer(status=result.status, headers=fields, body=result.body, sent=len(body), seconds=0.0, at=0.0)

    return carry_out
