"""Greedy completions from a server with an API like OpenAI's.

``POST /v1/completions``; where a server has no such path, ``/v1/chat/completions`` with the prompt as a literal text in
``messages``, which candle-vllm passes on as it is. What a server answers is a value here, right or wrong: only the
judgement of it is elsewhere.

Source: the OpenAI API reference, "Completions" and "Chat"; vLLM's ``return_token_ids``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from buildkit.errors import one_line
from buildkit.smoke.http import CONNECT_SECONDS, NoAnswerError, check_timeout, fetch, server_url

ANSWER_LIMIT = 4 << 20
"""Bytes of an answer that are read."""
_NAME_LIMIT = 1000
"""Characters of a model's name."""
ASK_SECONDS = 120.0
"""Until a completion must be there; the first one may compile kernels."""
_POLL_SECONDS = 0.5
_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back. ``problem`` says why there is no text; ``ids`` and ``logprobs`` are there where the server gives
    them, a log probability that is ``null`` as None. ``note`` is what was unusual and could be coped with."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None
    problem: str = ""
    note: str = ""


class Completions:
    """A server under test. Safe for several threads once a first question was answered."""

    def __init__(self, url: str, *, timeout: float = ASK_SECONDS) -> None:
        """``timeout`` in seconds for a whole answer. Raises UsageError for what is no http URL or no time."""
        self.url = server_url(url, "server").removesuffix("/v1")
        self.timeout = check_timeout(timeout)
        self._model = "probe"
        self._path = _PATHS[0]
        self._logprobs = True

    def wait(
        self,
        health: str,
        timeout: float,
        *,
        ended: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> str:
        """Empty once ``health`` answers 2xx; else what was wrong after ``timeout`` seconds, or what ``ended`` says."""
        deadline = clock() + timeout
        while True:
            reason = ended()
            if reason:
                return reason
            try:
                status = fetch("GET", self.url + health, timeout=CONNECT_SECONDS, limit=0).status
                if 200 <= status < 400:
                    return ""
                last = f"{health} answers {status}"
            except NoAnswerError as error:
                last = f"nothing answers at {self.url}{health}: it {error}"
            if clock() >= deadline:
                return f"not healthy after {timeout:g} s: {last}"
            sleep(_POLL_SECONDS)

    def find_model(self) -> tuple[str, str]:
        """Take the model's name from ``/v1/models``; ``probe`` where the server lists none. The name as it can be
        shown, and what is wrong with it."""
        try:
            status, document = self._call("GET", "/v1/models", None)
            name = document["data"][0]["id"] if status == 200 else self._model
        except (_Failed, KeyError, IndexError, TypeError):
            return self._model, ""
        if not isinstance(name, str) or not _is_text(name) or not 0 < len(name) <= _NAME_LIMIT:
            return self._model, f"/v1/models gives its model an id that is no name: {_message(name)}"
        self._model = name
        return one_line(name, 200), ""

    def ask(self, prompt: str, count: int) -> Reply:
        """``count`` tokens after ``prompt``, always the most likely. Never raises for what the server does."""
        try:
            return self._ask(prompt, count)
        except _Failed as failure:
            return Reply(problem=str(failure))

    def _ask(self, prompt: str, count: int) -> Reply:
        status, document = self._call("POST", self._path, self._body(prompt, count))
        if status in (400, 422) and self._logprobs:
            # Some servers refuse what they do not know.
            self._logprobs = False
            status, document = self._call("POST", self._path, self._body(prompt, count))
        if status in (404, 405) and self._path == _PATHS[0]:
            self._path, self._logprobs = _PATHS[1], True
            return self._ask(prompt, count)
        if status != 200:
            raise _Failed(f"{self._path} answers {status}: {_message(document)}")
        try:
            return _reply(document)
        except _WrongValue as error:
            raise _Failed(f"{self._path} answers {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise _Failed(f"{self._path} answers something else than a completion: {_message(document)}") from error

    def _body(self, prompt: str, count: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": False,
        }
        if self._path == _PATHS[0]:
            return body | {"prompt": prompt} | ({"logprobs": 1} if self._logprobs else {})
        return body | {"messages": prompt} | ({"logprobs": True} if self._logprobs else {})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        """Status and decoded answer (text where it is not JSON)."""
        try:
            answer = fetch(method, self.url + path, body=body, timeout=self.timeout, limit=ANSWER_LIMIT)
        except NoAnswerError as error:
            raise _Failed(f"{path} {error}") from error
        return answer.status, _decode(answer.body, answer.kind, path)


class _Failed(Exception):
    """Why a question has no answer."""


class _WrongValue(Exception):
    """A completion with something in it that cannot be what it says."""


def _decode(raw: bytes, kind: str, path: str) -> Any:
    text = raw.decode("utf-8", "replace")
    if kind.startswith("text/event-stream"):
        return _events(text, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _events(text: str, path: str) -> dict[str, Any]:
    """A stream of server-sent events put together to one completion."""
    pieces, finished = [], False
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            finished = True
            continue
        try:
            choice = json.loads(data)["choices"][0]
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if not isinstance(piece, str):
                raise TypeError("no text")
            pieces.append(piece)
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Failed(f"{path} streams something else than a completion: {one_line(data, 200)}") from error
    if not finished:
        raise _Failed(f"{path} streams, and breaks off before its end")
    return {"choices": [{"text": "".join(pieces)}], "streamed": True}


def _reply(document: Any) -> Reply:
    choice = document["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("no text")
    return Reply(
        text=text,
        ids=_ids(choice.get("token_ids")),
        logprobs=_logprobs(choice.get("logprobs")),
        note="streams although it was asked not to" if document.get("streamed") else "",
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _WrongValue(f"token_ids that are no list: {_message(value)}")
    for at, number in enumerate(value):
        if type(number) is not int or not 0 <= number < 1 << 32:
            raise _WrongValue(f"token_ids[{at}] that is no token id: {_message(number)}")
    return tuple(value)


def _logprobs(value: Any) -> tuple[float | None, ...] | None:
    """From ``token_logprobs`` (completions) or ``content[].logprob`` (chat)."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _WrongValue(f"logprobs that are no object: {_message(value)}")
    numbers = value.get("token_logprobs")
    if numbers is None:
        content = value.get("content")
        if content is None:
            return None
        if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
            raise _WrongValue(f"logprobs that are no list: {_message(content)}")
        numbers = [entry.get("logprob") for entry in content]
    if not isinstance(numbers, list):
        raise _WrongValue(f"logprobs that are no list: {_message(numbers)}")
    return tuple(_logprob(at, number) for at, number in enumerate(numbers))


def _logprob(at: int, number: Any) -> float | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _WrongValue(f"a log probability ({at}) that is no number: {_message(number)}")
    try:
        return float(number)
    except OverflowError as error:  # JSON's integers have no end
        raise _WrongValue(f"a log probability ({at}) that no float can hold") from error


def _is_text(text: str) -> bool:
    """Whether it is Unicode: JSON can escape halves of surrogate pairs, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(document: Any) -> str:
    """A server's own words about an error, on one line."""
    try:
        if isinstance(document, dict):
            error = document.get("error", document.get("message", document.get("detail", document)))
            if isinstance(error, dict) and "message" in error:
                error = error["message"]
            return one_line(error if isinstance(error, str) else json.dumps(error), 200)
        return (
            one_line(document if isinstance(document, str) and _is_text(document) else json.dumps(document), 200)
            or "nothing"
        )
    except RecursionError:
        return "values nested too deeply to show"
