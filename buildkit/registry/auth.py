"""Authentication as a generator without I/O: requests to a token service out, answers in, header values back.

Sources: RFC 9110 section 11 (challenges), "Token Authentication Specification" and "OAuth2 token authentication" of
distribution. oras-py's token flow is not used: it finds challenge parameters by a regular expression that swallows
commas within scopes, keeps one token for all scopes without looking at its life, and logs a token service's answer.

A token is fetched when a challenge asks for one, kept per set of scopes, renewed ahead of its end, and thrown away when
the registry refuses it; the request that met the refusal is then sent once more, within the same upload session.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlencode, urlsplit

from buildkit.errors import AuthError, ProtocolError
from buildkit.registry.answers import describe, error_for
from buildkit.registry.credentials import Credential
from buildkit.registry.location import Origin, redact, same_host, with_query
from buildkit.registry.steps import RETRYABLE, Answer, Failure, Request, Steps, ask, retry_after

DEFAULT_LIFE = 60.0
"""Seconds a token lives if nobody says (Token Authentication Specification, ``expires_in``)."""

_CLIENT_ID = "buildkit"
_MAX_TOKEN = 64 * 2**10
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_SCHEME = re.compile(r"\s*,?\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:\s+|$)", re.ASCII)
_PARAMETER = re.compile(r"\s*,?\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]*))", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """One challenge of ``WWW-Authenticate``: the scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]


def parse_challenges(header: str) -> tuple[Challenge, ...]:
    """All challenges of a header value; what cannot be read is left out, never guessed."""
    found: list[Challenge] = []
    position, header = 0, header[:8192]
    while position < len(header):
        parameter = _PARAMETER.match(header, position)
        if parameter and found:
            quoted = parameter[2]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else parameter[3]
            found[-1].parameters.setdefault(parameter[1].lower(), value)
            position = parameter.end()
            continue
        scheme = _SCHEME.match(header, position)
        if not scheme or scheme.end() == position:
            break
        found.append(Challenge(scheme=scheme[1].lower(), parameters={}))
        position = scheme.end()
    return tuple(found)


class TokenUnavailable(Exception):
    """The token service failed in passing. The request that needs the token counts as failed, and is tried again by
    whoever has the budget for it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """``renew_at`` is monotonic time: a bit before the token's end."""

    header: str
    renew_at: float

    def __repr__(self) -> str:
        return f"Token(renew_at={self.renew_at})"


class Authenticator:
    """What is known about one registry's wishes; thread-safe.

    ``header`` gives what a request needs now, ``refused`` learns from a 401. Both are generators that may yield
    requests to a token service; those carry the credential, and go nowhere but to the realm that the registry named.
    """

    def __init__(
        self,
        *,
        registry: str,
        origin: Origin,
        credential: Callable[[], Credential | None],
        monotonic: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._origin = origin
        self._lookup = credential
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._credential: Credential | None = None
        self._looked_up = False
        self._basic = False
        self._tried = False
        self._bearer: Challenge | None = None
        self._tokens: dict[frozenset[str], Token] = {}

    @property
    def credential(self) -> Credential | None:
        """Looked up once, when first needed: a key ring may ask the user."""
        with self._lock:
            if not self._looked_up:
                self._credential = self._lookup()
                self._looked_up = True
            return self._credential

    @property
    def tried(self) -> bool:
        """Whether the credential was asked for: an open registry takes any, and proves nothing."""
        return self._tried

    @property
    def realm(self) -> str | None:
        """The token service's address, once the registry has named it."""
        return self._bearer.parameters.get("realm") if self._bearer else None

    def header(self, scopes: Iterable[str]) -> Steps[str | None]:
        """The Authorization value for a request with these scopes; None for an anonymous one."""
        wanted = frozenset(scopes)
        with self._lock:
            bearer, basic = self._bearer, self._basic
            token = self._tokens.get(wanted)
        if bearer is not None:
            if token is None or self._monotonic() >= token.renew_at:
                token = yield from self._fetch(bearer, wanted)
            return token.header
        if basic and self.credential is not None:
            return self.credential.basic()
        return None

    def refused(self, request: Request, answer: Answer, used: str | None) -> Steps[str | None]:
        """After a 401 to a request that carried ``used``: a header that may do better, or None if there is none."""
        challenges = parse_challenges(answer.headers.get("www-authenticate", ""))
        bearer = next((c for c in challenges if c.scheme == "bearer" and c.parameters.get("realm")), None)
        wanted = frozenset(request.scopes)
        if bearer is None and all(c.scheme == "bearer" for c in challenges):
            # An edge that drops the header, or a mere `Bearer error="invalid_token"`: the realm is known from before.
            bearer = self._bearer
        if bearer is not None:
            with self._lock:
                self._bearer = bearer
                known = self._tokens.get(wanted)
                if known is not None and known.header == used:
                    del self._tokens[wanted]
                    known = None
            if known is not None and self._monotonic() < known.renew_at:
                return known.header  # another thread has renewed it already
            token = yield from self._fetch(bearer, wanted)
            return token.header if token.header != used else None
        credential = self.credential
        direct = credential is not None and credential.registry_token is not None
        if challenges and not direct and all(c.scheme == "bearer" for c in challenges):
            raise ProtocolError(
                f"{self._registry} asks for a token and names no realm to get it from",
                hint="the registry is misconfigured, or this address is none",
            )
        if credential is None or used is not None:
            return None
        if credential.registry_token is not None:
            self._tried = True
            return f"Bearer {credential.registry_token}"
        if not any(c.scheme == "basic" for c in challenges):
            return None  # a password goes out only where it is asked for
        with self._lock:
            self._basic = self._tried = True
        return credential.basic()

    def _fetch(self, challenge: Challenge, wanted: frozenset[str]) -> Steps[Token]:
        credential = self.credential
        self._tried = self._tried or credential is not None
        if credential is not None and credential.registry_token is not None:
            return Token(header=f"Bearer {credential.registry_token}", renew_at=float("inf"))
        request = self._token_request(challenge, wanted, credential)
        asked_at = self._monotonic()
        reply = yield from ask(request)
        if isinstance(reply, Failure):
            raise TokenUnavailable(replace(reply, detail=describe(request, reply), sent=0))
        if reply.status in RETRYABLE:
            raise TokenUnavailable(
                Failure(
                    kind="dropped", detail=describe(request, reply), seconds=reply.seconds, asked=retry_after(reply)
                )
            )
        if reply.status in (400, 401, 403):
            who = f"{credential.username or 'the token'} ({credential.source})" if credential else "anonymous"
            raise AuthError(
                f"{self._registry} refuses {who}: {describe(request, reply)}",
                hint="invoke login, or set REGISTRY_USERNAME and REGISTRY_TOKEN",
                status=reply.status,
            )
        if reply.status != 200:
            # Without the body where it may be a token after all.
            raise error_for(request, reply if reply.status >= 400 else replace(reply, body=b""))
        value, life = parse_token(reply.body, where=f"the token service of {self._registry}")
        # Ahead of its end by a tenth, at least by 5 s (but never more than half of its life): the request has to get
        # there in time, too.
        token = Token(header=f"Bearer {value}", renew_at=asked_at + life - min(max(life * 0.1, 5.0), life / 2))
        with self._lock:
            self._tokens[wanted] = token
        return token

    def _token_request(self, challenge: Challenge, wanted: frozenset[str], credential: Credential | None) -> Request:
        realm = challenge.parameters.get("realm", "")
        try:
            target = Origin.of(realm)
        except ProtocolError as error:
            raise ProtocolError(
                f"{self._registry} names a token realm that is no URL: {realm[:200]!r}",
                hint="the registry is misconfigured, or this address is none",
            ) from error
        if urlsplit(realm).username is not None:
            raise ProtocolError(f"{self._registry} names a token realm with user information: {redact(realm)[:200]!r}")
        if target.scheme == "http" and not same_host(target.host, self._origin.host):
            # Whatever the registry's own scheme: its host is what the user named, and trusts without TLS if at all.
            raise ProtocolError(
                f"{self._registry} sends logins to {target}, another host, without TLS: not followed",
                hint="the registry's token realm is misconfigured",
            )
        if target.scheme == "http" and self._origin.scheme == "https":
            # Behind a proxy that ends TLS the registry may not know its own scheme.
            parts = urlsplit(realm)
            realm = f"{self._origin}{parts.path}" + (f"?{parts.query}" if parts.query else "")
        query = [("service", challenge.parameters["service"])] if challenge.parameters.get("service") else []
        scopes = sorted(wanted) or challenge.parameters.get("scope", "").split()
        doing = f"asking for a token for {self._registry}"
        if credential is not None and credential.identity_token is not None:
            form = [
                ("grant_type", "refresh_token"),
                *query,
                ("client_id", _CLIENT_ID),
                ("scope", " ".join(scopes)),
                ("refresh_token", credential.identity_token),
            ]
            body = urlencode(form).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            return Request(
                doing=doing, method="POST", url=realm, scopes=(), headers=headers, body=body, authenticate=False
            )
        query += [("scope", scope) for scope in scopes]
        headers = {}
        if credential is not None and (basic := credential.basic()) is not None:
            headers["Authorization"] = basic
            query.append(("account", credential.username))
        url = with_query(realm, urlencode(query)) if query else realm
        return Request(doing=doing, method="GET", url=url, scopes=(), headers=headers, authenticate=False)


def parse_token(body: bytes, *, where: str) -> tuple[str, float]:
    """The token and its life in seconds. Raises ProtocolError; its text holds nothing of the body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{where} did not answer with JSON") from error
    value = (document.get("token") or document.get("access_token")) if isinstance(document, dict) else None
    if not isinstance(value, str) or len(value) > _MAX_TOKEN or not _TOKEN68.fullmatch(value):
        raise ProtocolError(f"{where} answered without a usable token")
    expires = document.get("expires_in")
    if isinstance(expires, int | float) and not isinstance(expires, bool) and 0 < expires < 10**9:
        return value, float(expires)
    return value, _life_of_jwt(value) or DEFAULT_LIFE


def _life_of_jwt(token: str) -> float | None:
    """``exp - iat`` of a JSON Web Token (RFC 7519, 4.1), unverified: both by the service's clock, so skew cancels."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        life = float(claims["exp"]) - float(claims.get("iat", claims.get("nbf")))
    except (binascii.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return life if 0 < life < 10**9 else None
