"""clef-serve: the PyTorch reference of a hybrid Qwen3.5 model behind a small HTTP interface.

``GET /health``, ``GET /v1/models``, ``POST /v1/completions`` (greedy, in the form of the OpenAI API, with token ids and
log probabilities), ``POST /v1/systemone`` (one prompt in, one answer for each classification head). The model is loaded
before the port is opened: whoever can connect gets an answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from model import CancelledError, Completion, LayerTrace, Model, ModelError, RequestError
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from turns import BusyError, Turns

MAX_BODY = 4 * 2**20
"""Bytes of a request. A context of 32768 tokens is far below."""
MAX_PROMPTS = 64
RETRY_AFTER = "1"

T = TypeVar("T")
TokenIds = Annotated[list[StrictInt], Field(max_length=1_000_000)]
Prompts = (
    StrictStr
    | TokenIds
    | Annotated[list[StrictStr], Field(max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
)


class CompletionRequest(BaseModel):
    """Of the OpenAI API's fields, those that a greedy reference can honour; others that matter are refused."""

    model_config = ConfigDict(extra="ignore")

    prompt: Prompts
    model: StrictStr | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | bool | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=16)] | None = None
    echo: bool = False
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=0)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    stream: Literal[False] | None = None
    suffix: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(s for s in given if s)

    @property
    def top(self) -> int | None:
        """Alternatives per token; None where no log probabilities are asked for."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return 1 if self.logprobs is True else self.logprobs


class SystemOneRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    prompt: StrictStr | TokenIds
    model: StrictStr | None = None


def create_app(model: Model, *, waiting: int = 16, max_tokens: int = 4096, trace: bool = False) -> FastAPI:
    """The application for one loaded model. ``trace`` adds what the GDN layers computed to each answer."""
    turns = Turns(waiting)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        turns.close()

    app = FastAPI(title="clef-serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "model": model.name,
            "device": str(model.device),
            "dtype": model.dtype,
            "requests": turns.taken,
            "requests_limit": turns.limit,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model.name, "object": "model", "created": started, "owned_by": "clef-serve"}
        return {
            "object": "list",
            "data": [entry | {"max_model_len": model.context, "heads": [h.name for h in model.heads]}],
        }

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> dict[str, Any]:
        _check_model(model, body.model)
        if body.max_tokens > max_tokens:
            raise RequestError(f"max_tokens is at most {max_tokens} here", "max_tokens")
        prompts = _prompts(model, body.prompt)

        def work(cancelled: threading.Event) -> tuple[list[Completion], list[LayerTrace]]:
            with model.traced() if trace else nullcontext([]) as traces:
                done = [
                    model.complete(
                        ids,
                        max_tokens=body.max_tokens,
                        top=body.top or 0,
                        stop=body.stops,
                        ignore_end=body.ignore_eos,
                        cancelled=cancelled,
                    )
                    for ids in prompts
                ]
            return done, traces

        done, traces = await turns.run(work, request.is_disconnected)
        used = sum(len(c.prompt_ids) for c in done)
        made = sum(len(c.token_ids) for c in done)
        answer = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "choices": [_choice(model, i, c, body) for i, c in enumerate(done)],
            "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
        }
        return answer | ({"trace": _trace(traces)} if trace else {})

    @app.post("/v1/systemone")
    async def systemone(body: SystemOneRequest, request: Request) -> dict[str, Any]:
        _check_model(model, body.model)
        (ids,) = _prompts(model, body.prompt)

        def work(_cancelled: threading.Event) -> tuple[dict[str, Any], list[LayerTrace]]:
            with model.traced() if trace else nullcontext([]) as traces:
                answers = model.classify(ids)
            found = {a.head: {"answer": a.label, "score": a.scores[a.label], "scores": dict(a.scores)} for a in answers}
            return found, traces

        answers, traces = await turns.run(work, request.is_disconnected)
        answer: dict[str, Any] = {
            "id": f"sys1-{uuid4().hex}",
            "object": "systemone",
            "model": model.name,
            "answers": answers,
            "usage": {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)},
        }
        return answer | ({"trace": _trace(traces)} if trace else {})

    return app


class BodyLimit:
    """Refuses a request body above ``MAX_BODY`` bytes with 413, by its length or as soon as it has grown past it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        refusal = _error(413, f"the request is larger than {MAX_BODY} bytes")
        if not length.isdigit() or int(length[:20]) > MAX_BODY:
            await refusal(scope, receive, send)
            return
        seen = 0
        refused = False

        async def counted() -> Message:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY and not refused:
                refused = True
                await refusal(scope, receive, send)
            return {"type": "http.disconnect"} if refused else message

        async def once(message: Message) -> None:
            if not refused:
                await send(message)

        await self._app(scope, counted, once)


def _prompts(model: Model, given: str | Sequence[Any]) -> list[tuple[int, ...]]:
    if isinstance(given, str):
        return [model.encode(given)]
    if given and all(isinstance(p, str) for p in given):
        return [model.encode(p) for p in given]
    if given and all(isinstance(p, list) for p in given):
        return [model.check_ids(p) for p in given]
    return [model.check_ids(given)]


def _check_model(model: Model, wanted: str | None) -> None:
    if wanted not in (None, "", model.name):
        raise HTTPException(404, f"there is no model {wanted!r} here, only {model.name!r}")


def _choice(model: Model, index: int, completion: Completion, body: CompletionRequest) -> dict[str, Any]:
    prefix = model.decode(completion.prompt_ids) if body.echo else ""
    return {
        "index": index,
        "text": prefix + completion.text,
        "finish_reason": completion.finish_reason,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_ids),
        "logprobs": None if body.top is None else _logprobs(completion, len(prefix)),
    }


def _logprobs(completion: Completion, offset: int) -> dict[str, Any]:
    """The legacy form of the OpenAI API: parallel lists, and a map of the likeliest tokens for each position."""
    offsets = []
    for step in completion.steps:
        offsets.append(offset)
        offset += len(step.chosen.text)
    return {
        "tokens": [s.chosen.text for s in completion.steps],
        "token_logprobs": [s.chosen.logprob for s in completion.steps],
        "top_logprobs": [{t.text: t.logprob for t in s.top} for s in completion.steps],
        "text_offset": offsets,
        "token_ids": [s.chosen.token_id for s in completion.steps],
    }


def _trace(traces: Sequence[LayerTrace]) -> dict[str, Any]:
    def total(pick: Callable[[LayerTrace], Any]) -> dict[str, float]:
        parts = [pick(t) for t in traces]
        return {"sum": sum(p.sum for p in parts), "absmax": max((p.absmax for p in parts), default=0.0)}

    return {
        "layers": [t.to_json() for t in traces],
        "total": {
            "beta": total(lambda t: t.beta),
            "delta": total(lambda t: t.delta),
            "norm": total(lambda t: t.norm),
        },
    }


# Errors --------------------------------------------------------------------------------------------------------------


def _error(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, f"{place}: {first['msg']}" if place else str(first["msg"]), place or None)

    async def refused(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return _error(400, error.message, error.param)

    async def http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _error(error.status_code, str(error.detail), **(dict(error.headers) if error.headers else {}))

    async def busy(_request: Request, _unused: Exception) -> JSONResponse:
        return _error(503, "all places in the queue are taken", **{"Retry-After": RETRY_AFTER})

    async def broken(_request: Request, error: Exception) -> JSONResponse:
        return _error(500, str(error))

    async def left(_request: Request, _unused: Exception) -> JSONResponse:
        return _error(499, "the client has left")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(BusyError, busy)
    app.add_exception_handler(ModelError, broken)
    app.add_exception_handler(CancelledError, left)


# Command line --------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clef-serve", description="Serve a hybrid Qwen3.5 checkpoint on one device.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--name", help="name in the API (default: the folder's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda:N or auto; one device, the state is not sharded")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float16 on a GPU")
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104 - a container's port is opened by its runtime
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--waiting", type=int, default=16, help="requests that may queue behind the one that runs")
    parser.add_argument("--max-tokens", type=int, default=4096, help="the most that one request may ask for")
    parser.add_argument(
        "--trace", action="store_true", help="return sums and absmax of each GDN layer with each answer"
    )
    parser.add_argument("--stop-timeout", type=int, default=30, help="seconds that running requests get at shutdown")
    options = parser.parse_args(arguments)
    if not 0 <= options.waiting <= 10_000 or options.max_tokens < 1 or not 0 < options.port < 65536:
        parser.error("--waiting is 0 to 10000, --max-tokens at least 1, --port 1 to 65535")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a clean stop, 1 where the checkpoint or the device cannot be used (one line on stderr)."""
    options = parse_arguments(arguments)
    try:
        model = Model.load(options.model, device=options.device, dtype=options.dtype, name=options.name)
    except ModelError as error:
        print(f"clef-serve: {' '.join(str(error).split())[:600]}", file=sys.stderr)
        return 1
    app = create_app(model, waiting=options.waiting, max_tokens=options.max_tokens, trace=options.trace)
    # uvicorn finishes what runs and then raises the signal again: by then there is nothing left to do.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    print(f"clef-serve: {model.name} on {model.device} in {model.dtype}, port {options.port}", flush=True)
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=options.stop_timeout,
        server_header=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
