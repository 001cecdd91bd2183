"""Pushing an artifact with oras-py, over our own connection to the registry.

oras-py puts the artifact together (``push``: layers with their titles, config, subject, annotations) and says what is
to be sent in which order. Sending is ours, because oras-py's own requests

- wait up to 83 s between repetitions, deaf to Retry-After and to the user, and have no time-outs;
- send the token to whatever host a ``Location`` names, and find a challenge's scope by a pattern that loses commas;
- send a blob whole, or in chunks that no later run resumes and no edge's limit bounds;
- read Docker's configuration again, and log what a credential helper prints;
- serialise the manifest a second time after its digest could have been taken.

It also knows no ``artifactType``, which is added where the manifest passes. A request that oras-py would send by
itself, past this module, is an error: a later version of it must not go round our limits, tokens and masks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import oras.oci
import oras.provider
import requests

from buildkit.errors import ProtocolError, StorageError
from buildkit.evidence.artifact import EMPTY_TYPE, Artifact
from buildkit.image.blobfile import FileBlob
from buildkit.model import OCI_MANIFEST, Descriptor, Digest, Reference
from buildkit.registry import RegistryClient
from buildkit.registry.location import redact

_CONFIG = b"{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """``promised``: the registry said that it lists the artifact as a referrer. ``descriptor`` is what an index of
    referrers says of it (image-spec, image-index.md: ``artifactType`` and annotations are the manifest's)."""

    descriptor: Descriptor
    promised: bool


class Pusher(oras.provider.Registry):  # type: ignore[misc]  # oras has no types
    """Pushes one artifact; not to be used twice."""

    def __init__(self, client: RegistryClient) -> None:
        super().__init__(hostname=client.registry, insecure=client.origin.scheme == "http")
        self.auth = _NoCredentials()
        self._client = client
        self._pushed: Pushed | None = None

    def push_artifact(self, image: Reference, subject: Descriptor, artifact: Artifact, folder: Path) -> Pushed:
        """Make the registry hold ``artifact`` beside ``image``, whose manifest is ``subject``; ``folder`` is made for
        the files on their way. Idempotent: what the registry holds is not sent."""
        self._image, self._kind = image, artifact.kind
        config, files = folder / "config" / "empty.json", folder / "files"
        self._types = {config: EMPTY_TYPE}
        try:
            config.parent.mkdir(parents=True)
            files.mkdir()
            config.write_bytes(_CONFIG)
            for file in artifact.files:
                (files / file.name).write_bytes(file.data)
                self._types[files / file.name] = file.media_type
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}") from error
        try:
            self.push(
                f"{image.name}:unused",
                files=[str(files / file.name) for file in artifact.files],
                manifest_config=str(config),
                manifest_annotations=artifact.all_annotations(),
                subject=oras.oci.Subject(subject.media_type, str(subject.digest), subject.size),
                disable_path_validation=True,
                quiet=True,
            )
        finally:
            self.session.close()
        assert self._pushed is not None
        return self._pushed

    def upload_blob(
        self, blob: str, container: Any, layer: dict[str, Any], do_chunked: bool = False, chunk_size: int = 0
    ) -> requests.Response:
        """In chunks, within the way's limit, resumed where an earlier run stopped."""
        del container, do_chunked, chunk_size
        path = Path(blob)
        # Its place in the manifest. oras-py wants PATH:TYPE, which it cannot tell apart where the path has a colon.
        layer["mediaType"] = self._types[path]
        with FileBlob.open(path, Descriptor.parse(layer, where=path.name), label=path.name) as held:
            self._client.upload(self._image.repository, held)
        return _done()

    def upload_manifest(self, manifest: dict[str, Any], container: Any) -> requests.Response:
        """By digest: an artifact needs no tag, its subject leads to it."""
        del container
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": self._kind,
            **{name: manifest[name] for name in ("config", "layers", "subject", "annotations") if manifest[name]},
        }
        raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        digest = Digest.of(raw)
        target = self._image.with_digest(digest)
        promised = False
        if self._client.head_manifest(target) != digest:
            promised = self._client.put_referrer(target, raw, OCI_MANIFEST)
        descriptor = Descriptor(
            media_type=OCI_MANIFEST,
            digest=digest,
            size=len(raw),
            annotations=manifest["annotations"],
            artifact_type=self._kind,
        )
        self._pushed = Pushed(descriptor=descriptor, promised=promised)
        return _done()

    def do_request(self, url: str, method: str = "GET", **_: Any) -> NoReturn:
        raise ProtocolError(
            f"oras-py wants to send {method} {redact(url)} by itself", hint="this version of it is not supported"
        )


class _NoCredentials:
    """In place of oras-py's own reader of Docker's configuration: the connection has the user's credentials."""

    def load_configs(self, container: Any, configs: Any = None) -> None:
        del container, configs


def _done() -> requests.Response:
    response = requests.Response()
    response.status_code = 201
    return response
