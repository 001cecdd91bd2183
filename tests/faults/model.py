"""How registries behave, as a model without sockets: profiles for the kinds that are in the field.

Each profile states what was read from a registry's source or seen on the wire. The model keeps everything in memory and
notes as *problems* what a correct client never does: an empty PATCH, ``Content-Range`` with a unit, a stale Location
used by choice, parts of unequal size where they must be equal.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qs

from buildkit.model import INDEX_TYPES, MANIFEST_TYPES, OCI_INDEX

USER, SECRET = "robot", "s3cret-T0ken-never-to-be-seen"
BASIC = "Basic " + base64.b64encode(f"{USER}:{SECRET}".encode()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One registry's ways. ``empty_range``: Range of an empty session (None: no header). ``broken``: what a body cut
    off within PATCH leaves behind. ``token_uses``: how many requests one bearer token is good for."""

    name: str
    content_range: Literal["ignored", "checked", "required"] = "checked"
    state: Literal["none", "offset", "hash"] = "none"
    absolute: bool = True
    patch_status: int = 202
    patch_range: bool = True
    empty_range: str | None = "0-0"
    status: Literal["right", "one-high", "unsupported"] = "right"
    status_location: bool = True
    broken: Literal["partial", "poisoned", "nothing"] = "partial"
    put_body: Literal["appended", "ignored"] = "appended"
    failed_commit_cancels: bool = True
    minimum: int | None = None
    maximum: int | None = None
    equal_parts: bool = False
    empty_blob_fails: bool = False
    auth: Literal["none", "basic", "bearer"] = "none"
    token_uses: int | None = None
    expires_in: int | None = None
    token_path: str = "/token"
    referrers: Literal["none", "listed", "quiet"] = "none"
    page: int = 1000


DISTRIBUTION_2_8 = Profile(name="distribution-2.8", content_range="ignored", state="offset", auth="basic")
DISTRIBUTION_3 = Profile(name="distribution-3", state="none")
GITEA_1_22 = Profile(
    name="gitea-1.22", content_range="required", absolute=False, empty_range="0-0", status="one-high",
    status_location=False, broken="poisoned", failed_commit_cancels=False, auth="bearer", token_path="/v2/token",
)  # fmt: skip
GITEA_1_24_0 = replace(GITEA_1_22, name="gitea-1.24.0", empty_range="0--1")
GITEA_1_24_1 = replace(GITEA_1_22, name="gitea-1.24.1", empty_range=None)
GITEA_1_26 = replace(GITEA_1_22, name="gitea-1.26", empty_range=None, status="right", status_location=True)
WORKERS = Profile(
    name="workers", content_range="required", state="hash", absolute=False, put_body="ignored", minimum=600,
    maximum=100_000, equal_parts=True, empty_blob_fails=True, broken="nothing", auth="basic",
)  # fmt: skip
IN_MEMORY = Profile(name="in-memory", content_range="checked", patch_status=204, status="unsupported", broken="nothing")
SHORT_TOKENS = replace(DISTRIBUTION_3, name="short-tokens", auth="bearer", token_uses=3, expires_in=60)
QUAY = Profile(name="quay", content_range="checked", status="one-high", broken="nothing", auth="bearer")
BUFFERING_EDGE = replace(GITEA_1_26, name="gitea-behind-buffering-edge", broken="nothing")
ZOT = Profile(name="zot", content_range="checked", referrers="listed", page=2)

PROFILES = (
    DISTRIBUTION_2_8,
    DISTRIBUTION_3,
    GITEA_1_22,
    GITEA_1_24_0,
    GITEA_1_24_1,
    GITEA_1_26,
    WORKERS,
    IN_MEMORY,
    SHORT_TOKENS,
    QUAY,
    BUFFERING_EDGE,
)


@dataclass(slots=True, kw_only=True)
class Call:
    """One request as it arrived."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Result:
    """One answer; a None body of a HEAD still has its Content-Length in ``headers``."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(slots=True, kw_only=True)
class _Session:
    repository: str
    data: bytearray = field(default_factory=bytearray)
    poisoned: bool = False
    known: int = 0
    version: int = 0
    parts: list[int] = field(default_factory=list)


_UPLOADS = re.compile(r"/v2/(.+)/blobs/uploads/([0-9a-f]*)")
_BLOB = re.compile(r"/v2/(.+)/blobs/(sha256:[0-9a-f]{64})")
_MANIFEST = re.compile(r"/v2/(.+)/manifests/(.+)")
_REFERRERS = re.compile(r"/v2/(.+)/referrers/(sha256:[0-9a-f]{64})")
_RANGE = re.compile(r"(\d+)-(\d+)")


def kind_of(method: str, path: str) -> str:
    """The protocol's name for a request; ``?`` for one that is not of the protocol."""
    if path.rstrip("/") == "/v2":
        return "ping"
    if path.endswith("/token"):
        return "token"
    uploads = _UPLOADS.fullmatch(path)
    if uploads:
        names = {"POST": "start", "PATCH": "patch", "GET": "status", "PUT": "close", "DELETE": "cancel"}
        return names.get(method, "?") if bool(uploads[2]) == (method != "POST") else "?"
    if _BLOB.fullmatch(path):
        return {"HEAD": "head", "GET": "read"}.get(method, "?")
    if _MANIFEST.fullmatch(path):
        return {"HEAD": "manifest-head", "GET": "manifest-get", "PUT": "manifest-put"}.get(method, "?")
    if _REFERRERS.fullmatch(path):
        return "referrers" if method == "GET" else "?"
    return "?"


class RegistryModel:
    """A registry of one profile. Thread-safe."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.problems: list[str] = []
        self._sessions: dict[str, _Session] = {}
        self._tokens: dict[str, int] = {}
        self._counter = 0
        self._lock = threading.RLock()

    # For tests

    def forget_sessions(self) -> None:
        with self._lock:
            self._sessions.clear()

    def expire_tokens(self) -> None:
        with self._lock:
            self._tokens = dict.fromkeys(self._tokens, 0)

    def session_data(self) -> list[bytes]:
        with self._lock:
            return [bytes(session.data) for session in self._sessions.values()]

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def check_integrity(self) -> list[str]:
        """Every blob is what it is called; every manifest points at blobs that are there, with their size."""
        wrong = [str(k) for k, data in self.blobs.items() if k[1] != "sha256:" + hashlib.sha256(data).hexdigest()]
        for (repository, target), (raw, _) in self.manifests.items():
            document = json.loads(raw)
            for entry, held in self._contents(repository, document):
                if held is None or len(held) != entry["size"]:
                    wrong.append(f"{repository}:{target} points at {entry['digest']}, which is missing or wrong")
        return wrong

    def _contents(self, repository: str, document: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bytes | None]]:
        """What a manifest or an index points at, and the bytes that are there."""
        for entry in document.get("manifests") or ():
            yield entry, self.manifests.get((repository, entry["digest"]), (None, ""))[0]
        for entry in [document["config"], *document["layers"]] if "config" in document else ():
            yield entry, self.blobs.get((repository, entry["digest"]))

    # Requests

    def broken(self, call: Call) -> None:
        """A request whose body was cut off; ``call.body`` is what arrived."""
        with self._lock:
            match = _UPLOADS.fullmatch(call.path)
            session = self._sessions.get(match[2]) if match else None
            if session is None or call.method not in ("PATCH", "PUT") or not call.body:
                return
            if self.profile.broken == "partial":
                session.data += call.body
                session.known = len(session.data)
            elif self.profile.broken == "poisoned":
                session.data += call.body
                session.poisoned = True

    def handle(self, call: Call) -> Result:
        with self._lock:
            kind = kind_of(call.method, call.path)
            if "transfer-encoding" in call.headers:
                self.problems.append(f"{call.method} with Transfer-Encoding")
            if call.method in ("POST", "PUT", "PATCH") and "content-length" not in call.headers:
                self.problems.append(f"{call.method} without Content-Length")
            if SECRET in call.path + call.query:
                self.problems.append("a secret in a URL")
            if kind == "token":
                return self._token(call)
            refused = self._authorize(call)
            if refused is not None:
                return refused
            if kind == "ping":
                return Result(status=200, headers={"Docker-Distribution-Api-Version": "registry/2.0"}, body=b"{}")
            if match := _UPLOADS.fullmatch(call.path):
                return self._upload(kind, call, match[1], match[2])
            if match := _BLOB.fullmatch(call.path):
                return self._blob(call, match[1], match[2])
            if self.profile.referrers != "none" and (match := _REFERRERS.fullmatch(call.path)):
                return self._referrers(call, match[1], match[2])
            if kind == "referrers":
                return Result(status=404, headers={"Content-Type": "text/plain"}, body=b"404 page not found\n")
            if match := _MANIFEST.fullmatch(call.path):
                return self._manifest(kind, call, match[1], match[2])
            self.problems.append(f"unmatched request {call.method} {call.path}")
            return _error(404, "UNSUPPORTED", "no such endpoint")

    def _token(self, call: Call) -> Result:
        if call.headers.get("authorization") != BASIC:
            return _error(401, "UNAUTHORIZED", "authentication required")
        self._counter += 1
        value = f"tok-{self._counter}"
        self._tokens[value] = self.profile.token_uses if self.profile.token_uses is not None else 10**9
        document: dict[str, object] = {"token": value}
        if self.profile.expires_in is not None:
            document["expires_in"] = self.profile.expires_in
        return Result(status=200, headers={"Content-Type": "application/json"}, body=json.dumps(document).encode())

    def _authorize(self, call: Call) -> Result | None:
        given = call.headers.get("authorization", "")
        if self.profile.auth == "none":
            return None
        if self.profile.auth == "basic":
            if given == BASIC:
                return None
            challenge = 'Basic realm="registry"'
        else:
            if given.startswith("Basic "):
                self.problems.append("a password sent to a registry that asked for a token")
            left = self._tokens.get(given.removeprefix("Bearer "), 0)
            if left > 0:
                self._tokens[given.removeprefix("Bearer ")] = left - 1
                return None
            host = call.headers.get("host", "")
            challenge = f'Bearer realm="http://{host}{self.profile.token_path}",service="registry",scope="*"'
        answer = _error(401, "UNAUTHORIZED", "authentication required")
        answer.headers["WWW-Authenticate"] = challenge
        return answer

    def _location(self, call: Call, identifier: str, session: _Session) -> str:
        where = f"/v2/{session.repository}/blobs/uploads/{identifier}"
        if self.profile.state == "offset":
            where += f"?_state=mac{session.version}-{session.known}"
        elif self.profile.state == "hash":
            where += f"?_stateHash=h{session.version}"
        return f"http://{call.headers.get('host', '')}{where}" if self.profile.absolute else where

    def _range(self, session: _Session, *, high: bool = False) -> dict[str, str]:
        size = session.known
        if not size:
            value = self.profile.empty_range
            if high and value is not None:
                value = "0-0"
            return {"Range": value} if value is not None else {}
        return {"Range": f"0-{size if high else size - 1}"}

    def _upload(self, kind: str, call: Call, repository: str, identifier: str) -> Result:
        profile = self.profile
        query = parse_qs(call.query)
        if kind == "start":
            source = query.get("from", [""])[0]
            mount = query.get("mount", [""])[0]
            if mount and (source, mount) in self.blobs:
                self.blobs[repository, mount] = self.blobs[source, mount]
                return Result(status=201, headers={"Location": f"/v2/{repository}/blobs/{mount}"})
            self._counter += 1
            identifier = f"{self._counter:032x}"
            session = self._sessions[identifier] = _Session(repository=repository)
            headers = {"Location": self._location(call, identifier, session), **self._range(session)}
            headers["Docker-Upload-UUID"] = identifier
            if profile.minimum:
                headers["OCI-Chunk-Min-Length"] = str(profile.minimum)
            if profile.maximum:
                headers["OCI-Chunk-Max-Length"] = str(profile.maximum)
            return Result(status=202, headers=headers)
        found = self._sessions.get(identifier)
        if found is None:
            return _error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        session = found
        state = query.get("_state", [""])[0]
        if profile.state == "offset" and state.rpartition("-")[2] != str(session.known):
            # distribution 2.8 cancels the session on a mismatch, whatever the method.
            del self._sessions[identifier]
            return _error(400, "BLOB_UPLOAD_INVALID", "blob upload invalid")
        if profile.state == "hash" and query.get("_stateHash", [""])[0] != f"h{session.version}" and kind != "cancel":
            return _error(404, "BLOB_UPLOAD_UNKNOWN", "state hash is stale")
        match kind:
            case "patch":
                return self._patch(call, identifier, session)
            case "status":
                if profile.status == "unsupported":
                    return _error(405, "UNSUPPORTED", "the operation is unsupported")
                headers = self._range(session, high=profile.status == "one-high")
                if profile.status_location:
                    headers["Location"] = self._location(call, identifier, session)
                return Result(status=204, headers=headers)
            case "cancel":
                del self._sessions[identifier]
                return Result(status=204)
            case _:
                return self._close(call, identifier, session, query)

    def _patch(self, call: Call, identifier: str, session: _Session) -> Result:
        profile = self.profile
        if not call.body:
            self.problems.append("an empty PATCH")
        header = call.headers.get("content-range")
        match = _RANGE.fullmatch(header or "")
        if not match or int(match[2]) - int(match[1]) + 1 != len(call.body):
            self.problems.append(f"Content-Range {header!r} for {len(call.body)} bytes")
            return _error(400, "RANGE_INVALID", "invalid content range")
        if session.poisoned:
            return _error(500, "UNKNOWN", "offset mismatch between file and model")
        start, end = int(match[1]), int(match[2])
        if profile.content_range != "ignored" and start != session.known:
            return Result(status=416)
        if profile.equal_parts:
            if start >= end:
                return Result(status=416)
            if session.parts and (session.parts[-1] != session.parts[0] or len(call.body) > session.parts[0]):
                self.problems.append(f"parts {session.parts} + {len(call.body)} are not equal")
        if profile.maximum and len(call.body) > profile.maximum:
            self.problems.append(f"a chunk of {len(call.body)} bytes above the maximum")
        session.parts.append(len(call.body))
        session.data += call.body
        session.known = len(session.data)
        session.version += 1
        headers = {"Location": self._location(call, identifier, session)}
        if profile.patch_range:
            headers |= self._range(session)
        return Result(status=profile.patch_status, headers=headers)

    def _close(self, call: Call, identifier: str, session: _Session, query: dict[str, list[str]]) -> Result:
        profile = self.profile
        digest = query.get("digest", [""])[0]
        if session.poisoned:
            return _error(500, "UNKNOWN", "offset mismatch between file and model")
        if call.body and not (profile.put_body == "ignored" and session.parts):
            session.data += call.body
            session.known = len(session.data)
        if profile.empty_blob_fails and not session.data:
            return _error(500, "INTERNAL", "no body")
        if profile.equal_parts and profile.minimum and any(part < profile.minimum for part in session.parts[:-1]):
            self.problems.append(f"parts {session.parts} below the minimum")
        if digest != "sha256:" + hashlib.sha256(session.data).hexdigest():
            if profile.failed_commit_cancels:
                del self._sessions[identifier]
            return _error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        self.blobs[session.repository, digest] = bytes(session.data)
        del self._sessions[identifier]
        where = f"/v2/{session.repository}/blobs/{digest}"
        return Result(status=201, headers={"Location": where, "Docker-Content-Digest": digest})

    def _blob(self, call: Call, repository: str, digest: str) -> Result:
        data = self.blobs.get((repository, digest))
        if data is None:
            return _error(404, "BLOB_UNKNOWN", "blob unknown to registry")
        headers = {"Docker-Content-Digest": digest, "Content-Type": "application/octet-stream"}
        if match := re.fullmatch(r"bytes=(\d+)-", call.headers.get("range", "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return Result(status=206, headers=headers, body=data[start:])
        return Result(status=200, headers=headers, body=data)

    def _manifest(self, kind: str, call: Call, repository: str, target: str) -> Result:
        if kind == "manifest-put":
            digest = "sha256:" + hashlib.sha256(call.body).hexdigest()
            media_type = call.headers.get("content-type", "")
            if media_type not in MANIFEST_TYPES + INDEX_TYPES:
                return _error(400, "MANIFEST_INVALID", "unknown media type")
            document = json.loads(call.body)
            for entry, there in self._contents(repository, document):
                if there is None:
                    return _error(400, "MANIFEST_BLOB_UNKNOWN", f"blob {entry['digest']} unknown")
            for name in (target, digest):
                self.manifests[repository, name] = (call.body, media_type)
            headers = {"Docker-Content-Digest": digest}
            if self.profile.referrers == "listed" and "subject" in document:
                headers["OCI-Subject"] = document["subject"]["digest"]
            return Result(status=201, headers=headers)
        held = self.manifests.get((repository, target))
        if held is None:
            return _error(404, "MANIFEST_UNKNOWN", "manifest unknown")
        digest = "sha256:" + hashlib.sha256(held[0]).hexdigest()
        return Result(status=200, headers={"Docker-Content-Digest": digest, "Content-Type": held[1]}, body=held[0])

    def _referrers(self, call: Call, repository: str, digest: str) -> Result:
        entries = []
        for (owner, name), (raw, media_type) in sorted(self.manifests.items()):
            document = json.loads(raw)
            if owner == repository and ":" in name and document.get("subject", {}).get("digest") == digest:
                kind = document.get("artifactType") or document.get("config", {}).get("mediaType")
                entry = {"mediaType": media_type, "digest": name, "size": len(raw), "artifactType": kind}
                entries.append(entry | {"annotations": document.get("annotations", {})})
        start = int(parse_qs(call.query).get("after", ["0"])[0])
        headers = {"Content-Type": OCI_INDEX}
        if start + self.profile.page < len(entries):
            headers["Link"] = f'<{call.path}?after={start + self.profile.page}>; rel="next"'
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries[start : start + self.profile.page]}
        return Result(status=200, headers=headers, body=json.dumps(index).encode())


def _error(status: int, code: str, message: str) -> Result:
    body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
    return Result(status=status, headers={"Content-Type": "application/json"}, body=body)
