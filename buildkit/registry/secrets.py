"""Keeps out of every text what we ourselves have sent as a secret. No I/O.

A registry, or what stands before it, may repeat a request's headers in its error page; from there they would come into
our messages, logs and reports.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import threading
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, quote, quote_plus

MASK = "***"
_SHORTEST = 4
"""Characters. Shorter words are part of ordinary text; nothing that protects anything is so short."""


class KnownSecrets:
    """All that one client has sent as a secret so far; thread-safe. What one request brought, another's answer, or a
    token service's, may repeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forms: tuple[str, ...] = ()
        self._seen: set[str] = set()

    def learn(self, headers: Mapping[str, str], body: bytes | None = None) -> None:
        """Remember what is secret in a request that is about to be sent."""
        with self._lock:
            new = sent_secrets(headers, body) - self._seen
            if new:
                self._seen |= new
                self._forms = forms(self._seen)

    @property
    def forms(self) -> tuple[str, ...]:
        """For ``masked``."""
        return self._forms

    def masked(self, text: str) -> str:
        return masked(text, self._forms)


def sent_secrets(headers: Mapping[str, str], body: bytes | None = None) -> frozenset[str]:
    """The secrets in a request of ours: header values, tokens, passwords."""
    found: set[str] = set()
    for name, value in headers.items():
        if name.lower() != "authorization":
            continue
        scheme, _, token = value.partition(" ")
        found.add(token)
        if scheme.lower() == "basic":
            try:
                found.add(base64.b64decode(token, validate=True).decode().partition(":")[2])
            except (binascii.Error, ValueError):
                continue
    if body is not None and len(body) < 2**17:
        # OAuth2 requests carry their token in a form (RFC 6749, 6).
        found |= {value for name, value in parse_qsl(body.decode("latin-1")) if name in ("refresh_token", "password")}
    return frozenset(text for text in found if len(text) >= _SHORTEST)


def forms(secrets: Iterable[str]) -> tuple[str, ...]:
    """The secrets as they are and as URLs, HTML and JSON write them; the longest first, so that none is cut."""
    found: set[str] = set()
    for text in secrets:
        found |= {text, quote(text), quote(text, safe=""), quote_plus(text), html.escape(text)}
        found |= {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], text.rstrip("=")}
    return tuple(sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True))


def masked(text: str, secrets: Iterable[str]) -> str:
    """``text`` without any of ``forms``. To be applied before a text is cut: half a token is still half a token."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text
