"""The nouns of the OCI image and distribution specifications, as frozen values.

Parsing happens here, once, at the border: nothing further in handles a digest or a reference as a bare string. The
exact bytes of manifests and configs are kept beside what was parsed from them, because it is those bytes that are
hashed.

Sources: OCI image-spec 1.1 (descriptor.md, manifest.md, config.md, image-index.md), distribution-spec 1.1,
``distribution/reference`` for the grammar of names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from buildkit.errors import DigestMismatchError, FormatError, UsageError

# Media types -------------------------------------------------------------------------------------------------------

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
DOCKER_LAYER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
DOCKER_FOREIGN_LAYER = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"

MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEX_TYPES = (OCI_INDEX, DOCKER_INDEX)

MAX_MANIFEST = 4 * 2**20
"""Bytes. Registries refuse manifests above 4 MiB (distribution) or 10 MiB (Gitea); distribution-spec asks for 4 MiB."""

_DIGEST_LENGTH = {"sha256": 64, "sha512": 128}
_HEX = re.compile(r"[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """``algorithm:hex`` (image-spec, descriptor.md, "Digests"); sha256 and sha512 are the registered algorithms."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Raises FormatError for anything but a registered algorithm and its number of lower-case hex digits."""
        algorithm, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
        if len(digits) != _DIGEST_LENGTH.get(algorithm, -1) or not _HEX.fullmatch(digits):
            raise FormatError(f"{str(text)[:100]!r} is not a digest (sha256: and 64 hex digits)")
        return cls(algorithm, digits)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The sha256 digest of ``data``."""
        return cls("sha256", hashlib.sha256(data).hexdigest())

    def check(self, data: bytes, what: str) -> None:
        """Raises DigestMismatchError unless ``data`` hashes to this digest."""
        actual = hashlib.new(self.algorithm, data).hexdigest()
        if actual != self.hex:
            raise DigestMismatchError(f"{what} has digest {self.algorithm}:{actual}, expected {self}")

    @property
    def short(self) -> str:
        """The first 12 hex digits, for people."""
        return self.hex[:12]

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """``os/architecture[/variant]`` of an image (image-index.md, "platform")."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Raises UsageError unless ``text`` is ``os/architecture`` or ``os/architecture/variant``."""
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(re.fullmatch(r"[a-z0-9_.-]+", p) for p in parts):
            raise UsageError(f"{text!r} is not a platform", hint="write it like linux/amd64")
        return cls(os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else None)

    def __str__(self) -> str:
        return "/".join(p for p in (self.os, self.architecture, self.variant) if p)


_NO_ANNOTATIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """Points at content: media type, digest and size in bytes (image-spec, descriptor.md)."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=lambda: _NO_ANNOTATIONS, hash=False)
    urls: tuple[str, ...] = ()
    platform: Platform | None = None
    artifact_type: str | None = None

    @classmethod
    def parse(cls, value: object, *, where: str) -> Descriptor:
        """From decoded JSON. ``where`` is the dotted path for the FormatError."""
        if not isinstance(value, dict):
            raise FormatError("is not a descriptor object", where=where)
        size = value.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or size >= 2**63:
            raise FormatError(f"size {size!r} is not a number of bytes", where=where)
        media_type = value.get("mediaType")
        if not isinstance(media_type, str) or not media_type:
            raise FormatError("has no mediaType", where=where)
        try:
            digest = Digest.parse(value.get("digest"))
        except FormatError as error:
            raise FormatError(error.message, where=where) from error
        raw_platform = value.get("platform")
        platform = None
        if isinstance(raw_platform, dict):
            variant = raw_platform.get("variant")
            platform = Platform(
                os=str(raw_platform.get("os", "")),
                architecture=str(raw_platform.get("architecture", "")),
                variant=str(variant) if variant else None,
            )
        artifact_type = value.get("artifactType")
        return cls(
            media_type=media_type,
            digest=digest,
            size=size,
            annotations=MappingProxyType(_strings(value.get("annotations"), f"{where}.annotations")),
            urls=tuple(u for u in value.get("urls") or () if isinstance(u, str)),
            platform=platform,
            artifact_type=artifact_type if isinstance(artifact_type, str) else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, in the order that Docker and Go clients write."""
        out: dict[str, Any] = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        if self.urls:
            out["urls"] = list(self.urls)
        if self.annotations:
            out["annotations"] = dict(self.annotations)
        if self.platform:
            out["platform"] = {"architecture": self.platform.architecture, "os": self.platform.os}
            if self.platform.variant:
                out["platform"]["variant"] = self.platform.variant
        if self.artifact_type:
            out["artifactType"] = self.artifact_type
        return out

    @property
    def foreign(self) -> bool:
        """Nondistributable: fetched by clients from ``urls`` and never uploaded."""
        return "nondistributable" in self.media_type or "foreign" in self.media_type


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An image manifest: the exact bytes, and what they say. Docker schema 2 or OCI; ``media_type`` tells which."""

    raw: bytes
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=lambda: _NO_ANNOTATIONS)
    subject: Descriptor | None = None
    artifact_type: str | None = None

    @classmethod
    def parse(cls, raw: bytes, *, where: str, media_type: str | None = None) -> Manifest:
        """``media_type`` is the transport's word (Content-Type, descriptor); the document's own wins where present."""
        document = load_json_object(raw, where=where, limit=MAX_MANIFEST * 4)
        if document.get("schemaVersion") != 2:
            raise FormatError(f"schemaVersion {document.get('schemaVersion')!r} is not 2", where=where)
        kind = _media_type(document, media_type, where)
        if kind in INDEX_TYPES or "manifests" in document:
            raise FormatError("is an index, not an image manifest", where=where)
        layers = document.get("layers")
        if not isinstance(layers, list):
            raise FormatError("has no list of layers", where=where)
        subject = document.get("subject")
        artifact_type = document.get("artifactType")
        return cls(
            raw=raw,
            media_type=kind or OCI_MANIFEST,
            config=Descriptor.parse(document.get("config"), where=f"{where}: config"),
            layers=tuple(Descriptor.parse(v, where=f"{where}: layers[{i}]") for i, v in enumerate(layers)),
            annotations=MappingProxyType(_strings(document.get("annotations"), f"{where}: annotations")),
            subject=Descriptor.parse(subject, where=f"{where}: subject") if subject is not None else None,
            artifact_type=artifact_type if isinstance(artifact_type, str) else None,
        )

    @classmethod
    def build(
        cls,
        *,
        config: Descriptor,
        layers: Sequence[Descriptor],
        media_type: str = OCI_MANIFEST,
        annotations: Mapping[str, str] = _NO_ANNOTATIONS,
    ) -> Manifest:
        """A new manifest; its bytes depend on the arguments alone."""
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": config.to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        if annotations:
            document["annotations"] = dict(sorted(annotations.items()))
        raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        return cls.parse(raw, where="new manifest")

    @cached_property
    def digest(self) -> Digest:
        return Digest.of(self.raw)

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.raw))

    @property
    def docker(self) -> bool:
        """Docker's media-type family, not OCI's."""
        return self.media_type == DOCKER_MANIFEST


@dataclass(frozen=True, kw_only=True)
class Index:
    """A multi-platform index (or Docker manifest list): the exact bytes, and the manifests that they point at."""

    raw: bytes
    media_type: str
    manifests: tuple[Descriptor, ...]

    @classmethod
    def parse(cls, raw: bytes, *, where: str, media_type: str | None = None) -> Index:
        document = load_json_object(raw, where=where, limit=MAX_MANIFEST * 4)
        manifests = document.get("manifests")
        if not isinstance(manifests, list):
            raise FormatError("has no list of manifests", where=where)
        return cls(
            raw=raw,
            media_type=_media_type(document, media_type, where) or OCI_INDEX,
            manifests=tuple(Descriptor.parse(v, where=f"{where}: manifests[{i}]") for i, v in enumerate(manifests)),
        )

    @cached_property
    def digest(self) -> Digest:
        return Digest.of(self.raw)

    @property
    def images(self) -> tuple[Descriptor, ...]:
        """The entries that are images: without BuildKit's ``unknown/unknown`` attestation manifests."""
        return tuple(
            d
            for d in self.manifests
            if d.annotations.get("vnd.docker.reference.type") != "attestation-manifest"
            and (d.platform is None or d.platform.os != "unknown")
        )

    def select(self, platform: Platform, *, where: str) -> Descriptor:
        """The one image for ``platform``; a single image without a platform serves any. UsageError where none fits."""
        images = self.images
        fits = [
            d
            for d in images
            if d.platform is not None
            and (d.platform.os, d.platform.architecture) == (platform.os, platform.architecture)
            and (platform.variant is None or d.platform.variant in (None, platform.variant))
        ]
        if not fits and len(images) == 1 and images[0].platform is None:
            fits = list(images)
        if not fits:
            have = ", ".join(sorted({str(d.platform) for d in images if d.platform})) or "nothing"
            raise UsageError(f"{where} has no image for {platform}", hint=f"it has {have}; choose one with --platform")
        return fits[0]


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """An image's config: the exact bytes, and the parts of them that this package reads (image-spec, config.md)."""

    raw: bytes
    platform: Platform
    diff_ids: tuple[Digest, ...]
    document: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: bytes, *, where: str) -> ImageConfig:
        document = load_json_object(raw, where=where, limit=64 * 2**20)
        rootfs = document.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        # An image FROM scratch without content has "diff_ids": null.
        if not isinstance(rootfs, dict) or not (diff_ids is None or isinstance(diff_ids, list)):
            raise FormatError("has no rootfs.diff_ids", where=where)
        variant = document.get("variant")
        try:
            parsed = tuple(Digest.parse(d) for d in diff_ids or ())
        except FormatError as error:
            raise FormatError(f"rootfs.diff_ids: {error.message}", where=where) from error
        return cls(
            raw=raw,
            platform=Platform(
                os=str(document.get("os") or "linux"),
                architecture=str(document.get("architecture") or "amd64"),
                variant=str(variant) if variant else None,
            ),
            diff_ids=parsed,
            document=MappingProxyType(document),
        )

    @cached_property
    def digest(self) -> Digest:
        """Docker's image id (of graph-driver engines)."""
        return Digest.of(self.raw)

    @property
    def runtime(self) -> Mapping[str, Any]:
        """The ``config`` object: Env, Entrypoint, Cmd, Labels, User …; empty where the image has none."""
        value = self.document.get("config")
        return value if isinstance(value, dict) else {}

    @property
    def labels(self) -> Mapping[str, str]:
        value = self.runtime.get("Labels")
        return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        value = self.document.get("history")
        return tuple(v for v in value if isinstance(v, dict)) if isinstance(value, list) else ()


# References ----------------------------------------------------------------------------------------------------------

_HOST = re.compile(
    r"(?:\[[0-9a-fA-F:.]+\]|(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*\.?)"
    r"(?::[0-9]{1,5})?",
    re.ASCII,
)
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """``host[:port]/repository[:tag][@digest]``; ``registry`` is host and port as the user wrote them."""

    registry: str
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    @classmethod
    def parse(cls, text: str, *, default_tag: str | None = "latest") -> Reference:
        """A reference with a registry host in it (the first component has a dot, a colon or is ``localhost``).

        Without tag and digest it gets ``default_tag``. Raises UsageError otherwise.
        """
        rest = text.removeprefix("docker://")
        if "://" in rest:
            raise UsageError(
                f"{text!r} is not an image reference", hint="leave the scheme out: HOST[:PORT]/REPOSITORY:TAG"
            )
        host, slash, rest = rest.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            raise UsageError(
                f"image reference {text!r} names no registry",
                hint="write HOST[:PORT]/REPOSITORY:TAG, for example git.example.org/team/app:sm70",
            )
        if "@" in host:
            # Not shown: what stands before the @ may be a password.
            raise UsageError(
                "an image reference has no user name in it",
                hint="credentials come from REGISTRY_USERNAME and REGISTRY_TOKEN, or from a login",
            )
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r} in {text!r} is not a registry host")
        repository, tag, digest = split_name(rest, text)
        if tag is None and digest is None:
            tag = default_tag
        return cls(registry=host, repository=repository, tag=tag, digest=digest)

    @property
    def target(self) -> str:
        """What goes into ``/v2/<name>/manifests/<target>``: the digest where there is one, else the tag."""
        return str(self.digest) if self.digest else self.tag or "latest"

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    def with_tag(self, tag: str) -> Reference:
        return replace(self, tag=tag, digest=None)

    def with_digest(self, digest: Digest) -> Reference:
        return replace(self, digest=digest)

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def is_registry_host(text: str) -> bool:
    """Whether ``text`` is ``host[:port]``, as references begin."""
    return bool(_HOST.fullmatch(text))


def split_name(text: str, whole: str) -> tuple[str, str | None, Digest | None]:
    """``repository[:tag][@digest]`` in its three parts; ``whole`` is what the UsageError shows."""
    rest, at, digest_text = text.partition("@")
    digest = None
    if at:
        try:
            digest = Digest.parse(digest_text)
        except FormatError as error:
            raise UsageError(f"{whole!r}: {error.message}") from error
    head, colon, tag = rest.rpartition(":")
    repository = head if colon and "/" not in tag else rest
    tag_text = tag if colon and "/" not in tag else None
    if not _REPOSITORY.fullmatch(repository) or len(repository) > 255:
        raise UsageError(
            f"{repository!r} in {whole!r} is not a repository name",
            hint="lower-case letters, digits, and . _ - / between them",
        )
    if tag_text is not None and not _TAG.fullmatch(tag_text):
        raise UsageError(f"{tag_text!r} in {whole!r} is not a tag")
    return repository, tag_text, digest


# JSON at the border --------------------------------------------------------------------------------------------------


def load_json_object(raw: bytes, *, where: str, limit: int) -> dict[str, Any]:
    """Decode a JSON object of at most ``limit`` bytes. Raises FormatError, whatever the bytes are."""
    if len(raw) > limit:
        raise FormatError(f"is {len(raw)} bytes, more than the {limit} that are read", where=where)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    if not isinstance(document, dict):
        raise FormatError("is not a JSON object", where=where)
    return document


def _media_type(document: dict[str, Any], given: str | None, where: str) -> str | None:
    own = document.get("mediaType")
    if own is not None and not isinstance(own, str):
        raise FormatError("mediaType is not a string", where=where)
    kind = own or given
    if kind is not None and kind not in MANIFEST_TYPES + INDEX_TYPES:
        raise FormatError(f"media type {kind[:100]!r} is not an image manifest or index", where=where)
    return kind


def _strings(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError("is not an object of strings", where=where)
    return {str(k): v for k, v in value.items() if isinstance(v, str)}
