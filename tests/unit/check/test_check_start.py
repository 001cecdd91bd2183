"""Watching a container that is just ending: the engine's answers do not agree for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from docker.errors import APIError

from buildkit.check.start import _watch
from buildkit.errors import EngineError
from buildkit.recipe import Start

RUNNING = {"Running": True, "Status": "running"}
ENDED = {"Running": False, "Status": "exited", "ExitCode": 5}
SPEC = Start(command=("x",), port=1, health="/x", timeout=10)


@dataclass
class Answered:
    exit_code: int | None


class Container:
    """States and answers as a script gives them; the last of each stays."""

    def __init__(self, states: list[dict[str, Any]], answers: list[int | Exception | None]) -> None:
        self._states = self._lasting(states)
        self._answers = self._lasting(answers)
        self.attrs: dict[str, Any] = {}

    @staticmethod
    def _lasting(values: list[Any]) -> Iterator[Any]:
        yield from values
        while True:
            yield values[-1]

    def reload(self) -> None:
        self.attrs = {"State": next(self._states)}

    def exec_run(self, command: list[str]) -> Answered:
        del command
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return Answered(answer)


def watch(container: Container) -> tuple[int | None, str]:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return _watch(container, SPEC, SPEC.timeout, lambda: now[0], sleep)


@pytest.mark.parametrize("answer", [126, 127, 128, 137, 1, None, APIError("container is not running")])
def test_what_is_answered_for_a_dying_container_is_not_held_against_the_image(answer: int | Exception | None) -> None:
    assert watch(Container([RUNNING, ENDED], [answer])) == (5, "ended with 5 before it was healthy")


@pytest.mark.parametrize("answer", [97, 126, 127])
def test_an_image_without_any_client_is_told(answer: int) -> None:
    code, message = watch(Container([RUNNING], [answer]))
    assert code is None
    assert "no curl, wget, python or bash" in message


def test_health_is_waited_for() -> None:
    assert watch(Container([RUNNING], [7, 7, APIError("busy"), 0])) == (None, "")


def test_an_engine_that_never_lets_the_health_be_asked_is_the_engines_fault() -> None:
    with pytest.raises(EngineError, match="exec is forbidden"):
        watch(Container([RUNNING], [APIError("exec is forbidden")]))
