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
from urllib.parse import urlsplit

import requests
import urllib3

from buildkit.errors import UsageError, one_line

ANSWER_LIMIT = 4 << 20
"""Bytes of an answer that are read."""
CONNECT_SECONDS = 10.0
ASK_SECONDS = 120.0
"""Until a completion must be there; the first one may compile kernels."""
_POLL_SECONDS = 0.5
_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back. ``problem`` says why there is no text; ``ids`` and ``logprobs`` are there where the server gives
    them. ``note`` is what was unusual and could be coped with."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    problem: str = ""
    note: str = ""


class Completions:
    """A server under test. Safe for several threads once a first question was answered."""

    def __init__(self, url: str, *, timeout: float = ASK_SECONDS) -> None:
        """Raises UsageError for what is no http URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise UsageError(f"{one_line(url, 100)!r} is not the URL of a server", hint="like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
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
                with requests.get(self.url + health, timeout=CONNECT_SECONDS, stream=True) as response:
                    if response.ok:
                        return ""
                    last = f"{health} answers {response.status_code}"
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                last = f"nothing answers at {self.url}{health}: {_cause(error)}"
            if clock() >= deadline:
                return f"not healthy after {timeout:g} s: {last}"
            sleep(_POLL_SECONDS)

    def find_model(self) -> str:
        """Take the model's name from ``/v1/models``; ``probe`` where the server lists none."""
        try:
            status, document = self._call("GET", "/v1/models", None)
            if status == 200 and isinstance(document, dict):
                self._model = str(document["data"][0]["id"])
        except (_Failed, KeyError, IndexError, TypeError):
            return self._model
        return self._model

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
        except (KeyError, IndexError, TypeError, ValueError) as error:
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
        deadline = time.monotonic() + self.timeout
        try:
            with requests.request(
                method, self.url + path, json=body, timeout=(CONNECT_SECONDS, self.timeout), stream=True
            ) as response:
                raw = bytearray()
                for chunk in response.iter_content(1 << 14):
                    raw += chunk
                    if len(raw) > ANSWER_LIMIT:
                        raise _Failed(f"{path} answers more than {ANSWER_LIMIT} bytes")
                    if time.monotonic() > deadline:
                        raise _Failed(f"{path} has not answered within {self.timeout:g} s")
                kind = response.headers.get("Content-Type", "")
                return response.status_code, _decode(bytes(raw), kind, path)
        except requests.Timeout as error:
            raise _Failed(f"{path} has not answered within {self.timeout:g} s") from error
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise _Failed(f"{path} broke off: {_cause(error)}") from error


class _Failed(Exception):
    """Why a question has no answer."""


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
            pieces.append(str(choice.get("text") or (choice.get("delta") or {}).get("content") or ""))
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
    ids = choice.get("token_ids")
    return Reply(
        text=text,
        ids=tuple(int(n) for n in ids) if isinstance(ids, list) else None,
        logprobs=_logprobs(choice.get("logprobs")),
        note="streams although it was asked not to" if document.get("streamed") else "",
    )


def _logprobs(value: Any) -> tuple[float, ...] | None:
    """From ``token_logprobs`` (completions) or ``content[].logprob`` (chat)."""
    if not isinstance(value, dict):
        return None
    numbers = value.get("token_logprobs")
    if numbers is None and isinstance(value.get("content"), list):
        numbers = [entry.get("logprob") if isinstance(entry, dict) else None for entry in value["content"]]
    if not isinstance(numbers, list) or not all(isinstance(n, (int, float)) for n in numbers):
        return None
    return tuple(float(n) for n in numbers)


def _message(document: Any) -> str:
    """A server's own words about an error, on one line."""
    if isinstance(document, dict):
        error = document.get("error", document.get("message", document.get("detail", document)))
        if isinstance(error, dict) and "message" in error:
            error = error["message"]
        return one_line(error if isinstance(error, str) else json.dumps(error), 200)
    return one_line(str(document), 200) or "nothing"


def _cause(error: BaseException) -> str:
    """The innermost reason, without the wrapping and without the URL."""
    seen = error
    while (inner := seen.__cause__ or seen.__context__) is not None and inner is not seen:
        seen = inner
    if isinstance(seen, OSError) and seen.strerror:
        return seen.strerror
    return one_line(str(seen), 200) or type(seen).__name__
