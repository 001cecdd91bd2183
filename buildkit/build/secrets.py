"""Build secrets: where their values come from, and how they reach the builder without showing anywhere.

A value goes through an environment variable of the client, or stays in its file; only the name of the place is ever
part of a command line. What a build prints is searched for the values, which are blotted out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildkit.errors import UsageError
from buildkit.recipe import Recipe, Secret

LARGEST = 500 * 1024
"""Bytes. BuildKit's own limit (``session/secrets``, MaxSecretSize)."""

_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
_CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_SHORTEST_BLOTTED = 4  # shorter values would blot out half of any text


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretPlaces:
    """``options`` are texts for ``--secret``; ``hidden`` are the values that must not show."""

    options: tuple[str, ...]
    hidden: tuple[str, ...] = field(repr=False)

    def blot(self, text: str) -> str:
        """``text`` without any of the values."""
        for value in self.hidden:
            text = text.replace(value, "***")
        return text


def find_ca_bundle(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The host's bundle of CA certificates, where it has one."""
    for name in (*(environ.get(variable, "") for variable in _CA_VARIABLES), *_CA_FILES):
        if name and Path(name).is_file():
            return Path(name)
    return None


def places(recipe: Recipe, *, environ: Mapping[str, str] = os.environ) -> SecretPlaces:
    """Where each secret of the recipe is. Optional ones that are not there are left out.

    Raises UsageError for a missing one that is not optional, and for one that BuildKit would refuse.
    """
    options: list[str] = []
    hidden: set[str] = set()
    for secret in recipe.secrets:
        if secret.env is not None:
            value = environ.get(secret.env, "")
            if value:
                _check_size(secret, len(value.encode()))
                options.append(f"id={secret.id},env={secret.env}")
                hidden |= _lines(value)
                continue
            missing = f"the variable {secret.env} is not set"
        else:
            path = find_ca_bundle(environ) if secret.ca_bundle else _path(recipe, secret)
            if path is not None and path.is_file():
                _check_size(secret, path.stat().st_size)
                options.append(f"id={secret.id},{_field(f'src={path}')}")
                if not secret.ca_bundle:
                    hidden |= _lines(_text(secret, path))
                continue
            missing = "this host has no CA bundle" if path is None else f"{path} is not there"
        if not secret.optional:
            raise UsageError(f"build secret {secret.id} of recipe {recipe.name}: {missing}")
    return SecretPlaces(options=tuple(options), hidden=tuple(sorted(hidden, key=len, reverse=True)))


def _path(recipe: Recipe, secret: Secret) -> Path:
    return (recipe.folder / Path(secret.file or "").expanduser()).absolute()


def _text(secret: Secret, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"build secret {secret.id}: {path} cannot be read: {error.strerror}") from error


def _check_size(secret: Secret, size: int) -> None:
    if size > LARGEST:
        raise UsageError(f"build secret {secret.id} has {size} bytes, more than the {LARGEST} that BuildKit takes")


def _lines(value: str) -> set[str]:
    """The value and its lines: output comes line by line."""
    parts = {value.strip(), *(line.strip() for line in value.splitlines())}
    return {part for part in parts if len(part) >= _SHORTEST_BLOTTED}


def _field(text: str) -> str:
    """One field of a comma-separated line (RFC 4180), which is how --secret is parsed."""
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text
