"""Runs several protocol machines against one registry, their requests in any order: a model of clients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from faults.model import Call, RegistryModel

from buildkit.registry.steps import Answer, Headers, Pause, Request, Steps


@dataclass(slots=True, kw_only=True)
class _Runner:
    machine: Steps[Any]
    step: Any = None
    reply: Any = None
    waits_for: set[int] = field(default_factory=set)
    ended: bool = False
    result: Any = None


def interleave(
    machines: Sequence[Steps[Any]], model: RegistryModel, choose: Callable[[Sequence[int]], int]
) -> list[Any]:
    """The machines' results. ``choose`` picks whose next step is carried out, of those that are ready.

    A pause lasts at least as long as any other client takes from its last look to its next write: whoever pauses waits
    until everyone who was between the two has written, or has paused too. That is all that a settling time can promise.
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
        if isinstance(runner.step, Request):
            runner.reply = _carry_out(runner.step, model)
            if runner.step.method == "PUT":
                _written(runners, number)
        elif isinstance(runner.step, Pause):
            runner.reply = None
        try:
            runner.step = runner.machine.send(runner.reply)
        except StopIteration as stop:
            runner.ended, runner.result = True, stop.value
        if runner.ended or isinstance(runner.step, Pause):
            _written(runners, number)
        if not runner.ended and isinstance(runner.step, Pause):
            busy = {n for n, r in enumerate(runners) if n != number and not r.ended and not isinstance(r.step, Pause)}
            runner.waits_for = busy


def _written(runners: Sequence[_Runner], number: int) -> None:
    for runner in runners:
        runner.waits_for.discard(number)


def _carry_out(request: Request, model: RegistryModel) -> Answer:
    parts = urlsplit(request.url)
    body = request.body if isinstance(request.body, bytes) else b""
    headers = {name.lower(): value for name, value in request.headers.items()}
    result = model.handle(Call(method=request.method, path=parts.path, query=parts.query, headers=headers, body=body))
    headers_back = Headers(result.headers)
    return Answer(status=result.status, headers=headers_back, body=result.body, sent=len(body), seconds=0.0, at=0.0)
