"""Talking to registries through whatever stands before them."""

from buildkit.registry.client import RegistryClient, RegistryInfo
from buildkit.registry.clock import CancelToken, Clock, SystemClock
from buildkit.registry.credentials import (
    Anonymous,
    Credential,
    Credentials,
    DefaultCredentials,
    FixedCredentials,
)
from buildkit.registry.events import (
    BytesAcknowledged,
    Event,
    JournalFailed,
    LimitFound,
    Observer,
    Outcome,
    QuirkMet,
    Restarted,
    Resumed,
    Retrying,
    Silent,
    UploadFailed,
    UploadFinished,
    UploadReport,
    UploadSkipped,
    UploadStarted,
    WaitingForPeer,
)
from buildkit.registry.manifests import FetchedManifest
from buildkit.registry.options import EDGE_LIMITS, RegistryOptions
from buildkit.registry.quirks import Quirk
from buildkit.registry.upload import Missing, Presence, Present, Unknown

__all__ = [
    "EDGE_LIMITS",
    "Anonymous",
    "BytesAcknowledged",
    "CancelToken",
    "Clock",
    "Credential",
    "Credentials",
    "DefaultCredentials",
    "Event",
    "FetchedManifest",
    "FixedCredentials",
    "JournalFailed",
    "LimitFound",
    "Missing",
    "Observer",
    "Outcome",
    "Presence",
    "Present",
    "Quirk",
    "QuirkMet",
    "RegistryClient",
    "RegistryInfo",
    "RegistryOptions",
    "Restarted",
    "Resumed",
    "Retrying",
    "Silent",
    "SystemClock",
    "Unknown",
    "UploadFailed",
    "UploadFinished",
    "UploadReport",
    "UploadSkipped",
    "UploadStarted",
    "WaitingForPeer",
]
