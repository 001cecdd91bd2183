"""Settings of the way to one registry: limits, time-outs, retries and trust."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from buildkit.errors import UsageError
from buildkit.registry.quirks import Quirk

MB = 10**6

EDGE_LIMITS: Mapping[str, int | None] = MappingProxyType(
    {
        # Cloudflare documents "100 MB", "200 MB" and "500 MB" without saying which kind of megabyte, and counts the
        # whole body: 5% below the smaller reading is safe for both.
        "cloudflare-free": 95 * MB,
        "cloudflare-business": 190 * MB,
        "cloudflare-enterprise": 475 * MB,
        "none": None,
    }
)
"""Largest request body, in bytes, that the preset lets through; None is no limit."""

_ALIASES = {"business": "cloudflare-business", "enterprise": "cloudflare-enterprise", "free": "cloudflare-free"}

DEFAULT_CHUNK = 95 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """All sizes in bytes, all times in seconds.

    ``limit`` is the largest request body that the way to the registry lets through (None: none known); ``chunk_size``
    the size of one PATCH, kept at or below the limit. ``chunked`` sends all data by PATCH and closes with an empty
    PUT; without it a complete blob within the limit goes as one PUT. ``learn`` allows smaller chunks after a size
    refusal, remembered per host, and probed upward again after ``probe_after``; below ``smallest_chunk`` no way
    through is worth looking for (a 5 GB layer would take 80,000 requests of 64 KiB).

    Time-outs: ``connect_timeout`` for connection and TLS; ``silence_timeout`` for a body that no longer moves;
    ``answer_timeout`` from the end of a body to the answer; ``closing_timeout`` the same for the closing PUT, in which
    a registry copies the blob. ``chunk_seconds`` bounds a chunk's time on slow links by the measured rate.

    ``retries`` failures in a row are forgiven; acknowledged bytes refill the budget. ``max_wait`` bounds one pause.

    ``plain_http`` None means: only for loopback. ``insecure_hosts`` are ``host[:port]`` whose certificate is not
    verified; there is no switch that covers every host.
    """

    chunk_size: int = DEFAULT_CHUNK
    limit: int | None = EDGE_LIMITS["cloudflare-free"]
    chunked: bool = True
    learn: bool = True
    smallest_chunk: int = 64 * 2**10
    parallel: int = 4
    connect_timeout: float = 15.0
    silence_timeout: float = 60.0
    answer_timeout: float = 300.0
    closing_timeout: float = 1800.0
    chunk_seconds: float = 60.0
    retries: int = 8
    max_wait: float = 300.0
    probe_after: float = 14 * 86400.0
    plain_http: bool | None = None
    insecure_hosts: frozenset[str] = frozenset()
    ca_bundle: str | None = None
    quirks: frozenset[Quirk] = frozenset()
    not_quirks: frozenset[Quirk] = frozenset()

    def __post_init__(self) -> None:
        if self.chunk_size < 2:
            raise UsageError(f"chunk size {self.chunk_size} is too small", hint="95MB suits most registries")
        if self.limit is not None and self.limit < 2:
            raise UsageError(f"request limit {self.limit} is too small")
        if not 1 <= self.parallel <= 64:
            raise UsageError(f"{self.parallel} parallel uploads make no sense", hint="choose 1 to 64")
        if self.retries < 0:
            raise UsageError("the number of retries is negative")
        for name in ("connect_timeout", "silence_timeout", "answer_timeout", "closing_timeout", "chunk_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0 seconds")

    @property
    def body_limit(self) -> int:
        """The largest body that one request may have; without a limit, larger than any blob."""
        return self.limit if self.limit is not None else 2**63 - 1

    @property
    def effective_chunk(self) -> int:
        return min(self.chunk_size, self.body_limit)

    def with_edge(self, preset: str) -> RegistryOptions:
        """The limits of a named edge; the chunk size follows the limit. UsageError for an unknown name."""
        name = _ALIASES.get(preset, preset)
        if name not in EDGE_LIMITS:
            raise UsageError(f"unknown edge {preset!r}", hint=f"known: {', '.join(EDGE_LIMITS)}")
        limit = EDGE_LIMITS[name]
        return replace(self, limit=limit, chunk_size=limit if limit is not None else self.chunk_size)
