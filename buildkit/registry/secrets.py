"""Keeps out of every text what we ourselves have sent as a secret. Pure.

A registry, or what stands before it, may repeat a request's headers in its error page; from there they would come into
our messages, logs and reports.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from urllib.parse import parse_qsl

MASK = b"***"
_SHORTEST = 4
"""Characters. Shorter words are part of ordinary text; nothing that protects anything is so short."""


def sent_secrets(headers: Mapping[str, str], body: bytes | None) -> tuple[bytes, ...]:
    """The secrets in a request of ours, longest first: credentials in all the forms that they went out in."""
    found: set[str] = set()
    for name, value in headers.items():
        if name.lower() != "authorization":
            continue
        scheme, _, token = value.partition(" ")
        found |= {value, token}
        if scheme.lower() == "basic":
            try:
                user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                continue
            found |= {f"{user}:{password}", password}
    if body is not None and len(body) < 65536:
        # OAuth2 requests carry their token in a form (RFC 6749, 6).
        found |= {value for name, value in parse_qsl(body.decode("latin-1")) if name in ("refresh_token", "password")}
    return tuple(sorted((text.encode() for text in found if len(text) >= _SHORTEST), key=len, reverse=True))


def masked(text: bytes, secrets: tuple[bytes, ...]) -> bytes:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text
