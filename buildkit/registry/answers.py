"""What an answer means: who gave it, whether it refuses a size, and which error it is. Pure.

Every error answer becomes an exception of ours here and nowhere else.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin

from buildkit.errors import (
    AuthError,
    NotFoundError,
    ProtocolError,
    RegistryError,
    SizeRefusedError,
    UnreachableError,
    one_line,
)
from buildkit.registry.location import redact
from buildkit.registry.secrets import masked
from buildkit.registry.steps import RETRYABLE, Answer, Failure, Request
from buildkit.units import format_size

_TITLE = re.compile(r"<title[^>]{0,200}>(.{0,300}?)</title>", re.IGNORECASE | re.DOTALL)
_TAGS = re.compile(r"<[^<>]{0,1000}>")
_TOO_LARGE = re.compile(
    r"(?:request|entity|payload|body|content)[ _-]{0,3}(?:entity|body|size)?[ _-]{0,3}(?:is |was )?too[ _-]?large"
    r"|exceed\w* .{0,40}(?:body|request|upload|payload) .{0,20}(?:size|limit)"
    r"|max\w* (?:request|body|upload|payload) .{0,10}size",
    re.IGNORECASE,
)
_UNTITLED = {499: "Client Closed Request", 520: "Unknown Error", 521: "Web Server Is Down", 522: "Connection Timed Out",
             523: "Origin Is Unreachable", 524: "A Timeout Occurred"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerError:
    """One entry of ``errors`` in a registry's JSON (distribution-spec, "Error Codes")."""

    code: str
    message: str


def shown(answer: Answer, text: str, limit: int) -> str:
    """What may be printed of a server's ``text``. Every word of a server's that becomes part of ours comes through
    here, decoded already and not yet cut."""
    return one_line(masked(text, answer.secrets), limit)


def server_errors(answer: Answer) -> tuple[ServerError, ...]:
    """The registry's own errors; empty where the body is not that JSON."""
    if answer.body[:1] not in (b"{", b" ", b"\n", b"\r", b"\t"):
        return ()
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        return ()
    entries = document.get("errors") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return ()
    found = []
    for entry in entries[:5]:
        if isinstance(entry, dict):
            detail = entry.get("detail")
            message = shown(answer, str(entry.get("message") or ""), 200)
            if isinstance(detail, str) and detail and detail not in message:
                message = one_line(f"{message}: {shown(answer, detail, 300)}", 300)
            code = shown(answer, str(entry.get("code") or ""), 60).upper()
            found.append(ServerError(code=code, message=message))
    return tuple(found)


def is_html(answer: Answer) -> bool:
    """By what it is rather than by what it is labelled: edges send error pages with any content type."""
    start = answer.body[:200].lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<center")) or (
        "html" in answer.headers.get("content-type", "").lower() and answer.body[:1] != b"{"
    )


def summary(answer: Answer) -> str:
    """What the body says, in a few words; empty where it says nothing."""
    errors = server_errors(answer)
    if errors:
        return "; ".join(" ".join(part for part in (e.code, e.message) if part) for e in errors)
    text = masked(answer.body.decode("utf-8", "replace"), answer.secrets)[:4096]
    if is_html(answer):
        title = _TITLE.search(text)
        words = title[1] if title else _TAGS.sub(" ", text)
        return shown(answer, f"an HTML page: {html.unescape(words)}", 160)
    return shown(answer, text, 160)


def who(answer: Answer) -> str:
    """Who answered, as far as the headers tell: a registry's errors are JSON, an edge's are pages."""
    server = shown(answer, answer.headers.get("server", ""), 60)
    ray = shown(answer, answer.headers.get("cf-ray", ""), 40)
    kind = shown(answer, answer.headers.get("content-type", "").partition(";")[0], 40)
    parts = [server or "an unnamed server"]
    if ray:
        parts.append(f"cf-ray {ray}")
    if kind:
        parts.append(kind)
    return ", ".join(parts)


def phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} {_UNTITLED[status]}" if status in _UNTITLED else str(status)


def describe(request: Request, reply: Answer | Failure) -> str:
    """One line: what was tried, what came, from whom. Holds no query, no credential and no header of ours."""
    target = f"{request.method} {redact(request.url)}"
    size = f" ({format_size(request.size)})" if request.size else ""
    if isinstance(reply, Failure):
        return f"{request.doing}: {target}{size}: {reply.detail}"
    words = summary(reply)
    return f"{request.doing}: {target}{size} got {phrase(reply.status)} from {who(reply)}" + (
        f": {words}" if words else ""
    )


def reason(reply: Answer | Failure) -> str:
    """The short form, for progress lines and the report."""
    if isinstance(reply, Failure):
        return reply.detail
    words = summary(reply)
    return phrase(reply.status) + (f" ({one_line(words, 100)})" if words else "")


def is_size_refusal(request: Request, answer: Answer) -> bool:
    """A 413, or any other refusal of a request with a body that says in words that the body is too large.

    Some proxies use 400, 403, 500 or 502 for it; the page they send says what they mean.
    """
    if answer.status == 413:
        return True
    if answer.status < 400 or not request.size:
        return False
    return bool(_TOO_LARGE.search(answer.body[:8192].decode("utf-8", "replace")))


def codes(answer: Answer) -> frozenset[str]:
    return frozenset(error.code for error in server_errors(answer))


def is_poisoned(answer: Answer) -> bool:
    """Gitea's answer for a session whose file is longer than its database row says, after a body was cut off."""
    return answer.status == 500 and b"offset mismatch" in answer.body[:8192]


def error_for(request: Request, reply: Answer | Failure) -> RegistryError | NotFoundError:
    """The exception for a reply that ends the matter."""
    text = describe(request, reply)
    if isinstance(reply, Failure):
        if reply.kind == "tls":
            return UnreachableError(
                text, hint="give the registry's CA with --ca-bundle, or name the host in --insecure"
            )
        return UnreachableError(
            text, hint="check the address and the network; the same command goes on where it stopped"
        )
    status = reply.status
    right = _right(request.scopes)
    if status == 401:
        if "reqpackageaccess" in summary(reply).lower():
            hint = "Gitea wants a personal token with the scope read:package"
            if right != "pull":
                hint = "Gitea wants a personal token with the scope write:package; an Actions job's token cannot push"
        else:
            needs = f"; the token needs the right to {right} here" if right else ""
            hint = f"invoke login, or set REGISTRY_USERNAME and REGISTRY_TOKEN{needs}"
        return AuthError(text, hint=hint, status=status)
    if status == 403:
        hint = f"the credential may not {right or 'do this'} here: check the token's scopes and who may see the owner"
        if right == "push":
            hint = "the credential may not push here, or a quota is used up: check the token's scopes and the quota"
        return AuthError(text, hint=hint, status=status)
    if is_size_refusal(request, reply):
        return SizeRefusedError(text, hint=_size_hint(request), status=status)
    if status == 404 and request.method in ("GET", "HEAD"):
        return NotFoundError(text)
    if 300 <= status < 400:
        location = reply.headers.get("location")
        if not location:
            return ProtocolError(f"{text}: a redirect to nowhere", status=status)
        target = shown(reply, _target(request.url, location), 200)
        return ProtocolError(f"{text}: redirected to {target}", hint="use the address that it points to", status=status)
    if status in RETRYABLE:
        return UnreachableError(
            text, hint="the retries are used up; the same command goes on where it stopped", status=status
        )
    if status >= 400 and not is_html(reply):
        return RegistryError(text, status=status)
    return ProtocolError(text, hint="is this address a registry? GET /v2/ should answer 200 or 401", status=status)


def _right(scopes: Iterable[str]) -> str:
    """The strongest right among token scopes (``repository:NAME:ACTION,ACTION``); empty where none is named."""
    actions = {action for scope in scopes for action in scope.rpartition(":")[2].split(",")}
    return next((right for right in ("delete", "push", "pull") if right in actions), "")


def _target(request_url: str, location: str) -> str:
    """Where a redirect points: scheme, host and path. The query may hold a signature."""
    try:
        return redact(urljoin(request_url, location))
    except ValueError:
        return redact(location)


def _size_hint(request: Request) -> str:
    if not request.size:
        return "even an empty request is refused as too large: the refusal is not about chunks"
    if "manifest" in request.doing:
        return "a manifest cannot be split; fewer layers or annotations make it smaller"
    return (
        "no smaller chunk helps here: the registry or its owner limits the blob itself, or the edge allows too little"
    )
