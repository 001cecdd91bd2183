"""A server of the probe checkpoint over HTTP, computing with the NumPy reference: right, or wrong in a chosen way.

python -m smokeworld.server --model FOLDER --port PORT [--fault NAME]
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from buildkit.gdn import probe
from buildkit.gdn.checkpoint import load
from buildkit.gdn.decoder import Choice, Decoder, DecoderState, choices
from buildkit.gdn.faults import Fault
from buildkit.gdn.signature import is_tie, log_softmax


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a server does. The defaults are those of a right one."""

    fault: Fault | None = None
    model: Decoder = field(default_factory=probe.model)
    takes_ties: str = ""
    """Take the second best token wherever this dtype would allow it."""
    status: int = 200
    """Answer completions with this status."""
    hangs: bool = False
    """Never answer a completion."""
    breaks_off: bool = False
    """Close the connection in the middle of the body."""
    streams: bool = False
    stream_cut: bool = False
    before: str = ""
    after: str = ""
    """Text around the answer."""
    echoes: bool = False
    chat_only: bool = False
    refuses_logprobs: bool = False
    logprobs_off_by: float | None = 0.0
    """None: gives none."""
    token_ids: bool = False
    tokens: int = probe.ANSWER
    """How many tokens are answered at most, whatever is asked for."""
    more: int = 0
    raw: bytes | None = None
    """Answer completions with these bytes."""
    logprobs_missing: int = 0
    """Log probabilities that are left out, at the end of each answer."""
    logprobs_null: bool = False
    """The last log probability is null."""
    model_id: object = "probe-under-test"
    drops_text: int = 0
    """Characters that the text lacks at its end."""
    answers: Callable[[tuple[int, ...], int], list[Choice]] | None = None
    """Who computes, instead of the reference."""
    mixes_batches: bool = False
    """Requests at the same time get each other's answer."""


class ProbeServer(ThreadingHTTPServer):
    """On a free port of the loopback. ``asked`` are the completion requests' bodies."""

    daemon_threads = True

    def __init__(self, behaviour: Behaviour, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__((host, port), _Handler)
        self.behaviour = behaviour
        self.asked: list[dict[str, Any]] = []
        self.leaving = threading.Event()
        self._lock = threading.Lock()
        self._stale: DecoderState | None = None
        self._together = threading.Barrier(2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, prompt: tuple[int, ...], count: int) -> list[Choice]:
        """Greedy tokens; one request after the other, as stale state goes from one to the next."""
        behaviour = self.behaviour
        if behaviour.mixes_batches and len(self.asked) > 5:
            self._together.wait(timeout=60)
            others = [request for request in self.asked[5:] if _prompt(request) != prompt]
            prompt = _prompt(others[0])
        if behaviour.answers is not None:
            with self._lock:
                return behaviour.answers(prompt, count)
        alone = behaviour.fault is not Fault.STATE_NOT_RESET and not behaviour.takes_ties
        if alone and behaviour.model is probe.model():
            return _answered(prompt, count, behaviour.fault)
        with self._lock, np.errstate(all="ignore"):
            stale = self._stale if behaviour.fault is Fault.STATE_NOT_RESET else None
            out = _answer(behaviour, prompt, count, stale)
            self._stale = out[-1].state
        return out


@functools.cache
def _answered(prompt: tuple[int, ...], count: int, fault: Fault | None) -> list[Choice]:
    with np.errstate(all="ignore"):
        return _answer(Behaviour(fault=fault), prompt, count, None)


def _answer(behaviour: Behaviour, prompt: tuple[int, ...], count: int, stale: DecoderState | None) -> list[Choice]:
    out: list[Choice] = []
    given: list[int] = []
    run = choices(behaviour.model, prompt, given=given, fault=behaviour.fault, stale=stale)
    for _ in range(count):
        choice = next(run)
        second = int(np.argsort(choice.logits)[-2])
        if behaviour.takes_ties and is_tie(choice.logits, second, behaviour.takes_ties):
            given += [c.token for c in out[len(given) :]] + [second]
            run = choices(behaviour.model, prompt, given=given, fault=behaviour.fault, stale=stale)
            for _ in given:
                choice = next(run)
        out.append(choice)
    return out


class _Handler(BaseHTTPRequestHandler):
    server: ProbeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"ok", "text/plain")
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": self.server.behaviour.model_id}]})
        else:
            self._json(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        behaviour = self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path == "/v1/chat/completions"
        if self.path not in ("/v1/completions", "/v1/chat/completions") or (behaviour.chat_only and not chat):
            return self._json(404, {"error": {"message": f"no {self.path}"}})
        if behaviour.refuses_logprobs and "logprobs" in body:
            return self._json(422, {"detail": "logprobs: extra fields not permitted"})
        self.server.asked.append(body)
        if behaviour.hangs:
            self.server.leaving.wait(60)
            self.close_connection = True
            return None
        if behaviour.status != 200:
            return self._json(behaviour.status, {"error": {"message": "CUDA error: an illegal memory access\nsecond"}})
        if behaviour.raw is not None:
            return self._send(200, behaviour.raw, "application/json")
        prompt = _prompt(body)
        done = self.server.answer(prompt, min(body["max_tokens"], behaviour.tokens) + behaviour.more)
        tokens = tuple(choice.token for choice in done)
        text = behaviour.before + probe.to_text(tokens) + behaviour.after
        text = text[: len(text) - behaviour.drops_text]
        if behaviour.echoes:
            text = probe.to_text(prompt) + text
        if behaviour.streams:
            return self._stream(text, cut=behaviour.stream_cut)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if behaviour.token_ids:
            choice["token_ids"] = list(tokens)
        if behaviour.logprobs_off_by is not None and body.get("logprobs"):
            numbers: list[float | None] = [
                float(log_softmax(c.logits)[c.token]) + behaviour.logprobs_off_by for c in done
            ]
            numbers = numbers[: len(numbers) - behaviour.logprobs_missing]
            numbers[-1:] = [None] if behaviour.logprobs_null else numbers[-1:]
            choice["logprobs"] = (
                {"content": [{"token": "", "logprob": n} for n in numbers]} if chat else {"token_logprobs": numbers}
            )
        return self._json(200, {"object": "text_completion", "choices": [choice]}, cut=behaviour.breaks_off)

    def _json(self, status: int, document: object, *, cut: bool = False) -> None:
        self._send(status, json.dumps(document).encode(), "application/json", cut=cut)

    def _send(self, status: int, data: bytes, kind: str, *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut

    def _stream(self, text: str, *, cut: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for character in text:
            event = json.dumps({"choices": [{"text": character}]})
            self.wfile.write(f"data: {event}\n\n".encode())
        if not cut:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def _prompt(body: dict[str, Any]) -> tuple[int, ...]:
    tokens = probe.to_tokens(body["prompt"] if "prompt" in body else body["messages"])
    assert tokens is not None
    return tokens


@contextmanager
def serving(behaviour: Behaviour | None = None) -> Iterator[ProbeServer]:
    """A running server; gone, with its threads, when the context ends."""
    server = ProbeServer(behaviour or Behaviour())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.leaving.set()
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", type=Fault)
    options = parser.parse_args()
    behaviour = Behaviour(model=load(options.model), fault=options.fault)
    with ProbeServer(behaviour, options.port, "0.0.0.0") as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
