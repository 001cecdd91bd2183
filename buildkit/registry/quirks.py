"""Where registries differ from the specification's text, each by name.

Quirks are detected from what a server sends and does. ``RegistryOptions.quirks`` presets one that is known (saving the
detour through its discovery), ``RegistryOptions.not_quirks`` forbids one. A report names those that mattered.
"""

from __future__ import annotations

from enum import StrEnum


class Quirk(StrEnum):
    """The value is how it is written in options and reports."""

    EQUAL_PARTS = "equal-parts"
    """All chunks but the last must have one size (stores on S3 or R2 multipart; Cloudflare's Workers registry)."""

    NO_STATUS = "no-status"
    """The upload session cannot be asked for its offset: after a broken chunk the blob starts again."""

    STATUS_ONE_HIGH = "status-one-high"
    """GET on the session counts one byte too many (Gitea and Forgejo before about 1.25, Quay)."""

    PATCH_ONE_HIGH = "patch-one-high"
    """PATCH answers ``Range: 0-<size>`` instead of ``0-<size - 1>``."""

    NO_RANGE = "no-range"
    """PATCH answers without a Range: that the chunk is stored follows from its status alone."""

    POISONED_SESSION = "poisoned-session"
    """A body cut off within PATCH makes every later PATCH and PUT fail; only DELETE and a new session help (Gitea)."""

    CLOSE_UNKNOWN = "close-unknown"
    """The closing PUT failed or timed out although the blob had been stored; HEAD said so."""

    MANIFEST_UNKNOWN = "manifest-put-unknown"
    """The manifest's PUT failed or timed out although it had been stored; a HEAD or GET said so."""

    LOCATION_REWRITTEN = "location-rewritten"
    """Location named another scheme or port on the same host (a proxy that ends TLS); the user's were kept."""

    NO_LOCATION = "no-location"
    """The session came without Location, only with Docker-Upload-UUID."""
