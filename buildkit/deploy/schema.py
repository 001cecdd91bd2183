"""Objects against Kubernetes' own JSON schemas, offline.

The schemas come bundled with the ``kubernetes-validate`` package; they are read here rather than through its
``validate``, which reports one error at a time and parses several megabytes of definitions for each object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from buildkit.deploy.findings import Finding, Severity
from buildkit.deploy.objects import Object
from buildkit.errors import UsageError

DEFAULT_VERSION = "1.32"
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}", re.ASCII)
_API = re.compile(r"(?:[a-z0-9][a-z0-9.-]{0,252}/)?v[0-9][a-z0-9]{0,30}", re.ASCII)
_BUILT_IN = re.compile(r"[a-z]+|(?:[a-z0-9-]+\.)+k8s\.io", re.ASCII)
_MOST = 20


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    """Where a value breaks its schema, and how."""

    path: tuple[str | int, ...]
    message: str


def available() -> bool:
    """Whether the package with the schemas is installed."""
    try:
        return resources.files("kubernetes_validate").joinpath("kubernetes-json-schema").is_dir()
    except ModuleNotFoundError:
        return False


def versions() -> tuple[str, ...]:
    """The bundled Kubernetes versions as ``major.minor``, oldest first."""
    folder = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema")
    found = {
        m[1] for entry in folder.iterdir() if (m := re.fullmatch(r"v(\d+\.\d+)(?:\.\d+)?-local-strict", entry.name))
    }
    return tuple(sorted(found, key=_order))


def check_schema(thing: Object, version: str) -> Iterator[Finding]:
    """Findings for one object. A kind that Kubernetes does not define (a custom resource) is told as not checked."""
    if not thing.kind or not thing.api_version:
        missing = " and ".join(k for k, v in (("apiVersion", thing.api_version), ("kind", thing.kind)) if not v)
        yield _finding(thing, (), f"has no {missing}: not a Kubernetes object", "give both, or move the file away")
        return
    if not thing.name:
        yield _finding(thing, ("metadata",), "has no metadata.name", "name it")
    if not _KIND.fullmatch(thing.kind) or not _API.fullmatch(thing.api_version):
        yield _finding(thing, ("kind",), f"{thing.api_version} {thing.kind} is no kind that can exist", "correct it")
        return
    validator = _validator(thing.kind, thing.api_version, version)
    if validator is None:
        group = thing.api_version.rpartition("/")[0]
        custom = bool(group) and not _BUILT_IN.fullmatch(group)
        yield Finding(
            rule="schema",
            severity=Severity.UNKNOWN if custom else Severity.ERROR,
            file=thing.field.file,
            line=thing.field.at("apiVersion").line,
            subject=thing.title,
            message=(
                f"{thing.api_version} is a custom resource, its schema is not known here"
                if custom
                else f"Kubernetes {version} has no {thing.kind} in {thing.api_version}"
            ),
            remedy=(
                "check it with the operator's own tools"
                if custom
                else "use the API version that this Kubernetes serves"
            ),
        )
        return
    for count, error in enumerate(_leaves(validator.iter_errors(thing.field.value))):
        if count == _MOST:
            break
        yield _finding(thing, error.path, error.message, "see kubectl explain for what this field takes")


def _leaves(errors: Any) -> Iterator[SchemaProblem]:
    seen = set()
    for error in errors:
        # A union's own message prints the whole object; its most specific branch says what is wrong.
        while error.context:
            error = max(error.context, key=lambda e: len(e.absolute_path))
        problem = SchemaProblem(tuple(error.absolute_path), _shorten(error.message))
        if problem not in seen:
            seen.add(problem)
            yield problem


def _shorten(message: str) -> str:
    return message if len(message) <= 200 else f"{message[:80]} … {message[-100:]}"


def _finding(thing: Object, path: tuple[str | int, ...], message: str, remedy: str) -> Finding:
    place = ".".join(map(str, path))
    return Finding(
        rule="schema",
        severity=Severity.ERROR,
        file=thing.field.file,
        line=thing.field.at(*path).line,
        subject=thing.title,
        message=f"{place}: {message}" if place else message,
        remedy=remedy,
    )


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _folder(version: str) -> str:
    """The bundled folder for a version: the newest that is not newer."""
    match = re.fullmatch(r"v?(\d{1,3}\.\d{1,3})(?:\.\d+)?", version)
    fitting = [v for v in versions() if match and _order(v) <= _order(match[1])]
    if not fitting:
        raise UsageError(f"no schemas for Kubernetes {version!r}", hint=f"there are {', '.join(versions())}")
    root = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema")
    names = [
        e.name for e in root.iterdir() if re.fullmatch(rf"v{re.escape(fitting[-1])}(?:\.\d+)?-local-strict", e.name)
    ]
    return max(names)


def _read(folder: str, name: str) -> Any:
    file = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema", folder, name)
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


@lru_cache(maxsize=4)
def _definitions(folder: str) -> Any:
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    resource = DRAFT202012.create_resource(_read(folder, "_definitions.json"))
    return Registry().with_resource("_definitions.json", resource).crawl()


@lru_cache(maxsize=256)
def _validator(kind: str, api_version: str, version: str) -> Any | None:
    from jsonschema.validators import Draft202012Validator

    folder = _folder(version)
    group, _, name = api_version.rpartition("/")
    # rbac.authorization.k8s.io/v1 is bundled as rbac-v1. A group of someone else's with the same first label is not it.
    if group and not _BUILT_IN.fullmatch(group):
        return None
    label = f"{group.split('.')[0]}-{name}" if group else name
    schema = _read(folder, f"{kind.lower()}-{label}.json")
    return None if schema is None else Draft202012Validator(schema, registry=_definitions(folder))
