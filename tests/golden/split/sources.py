"""An image source over tars in memory: the protocol of ``buildkit.image.source``, with real digests."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream
from buildkit.model import DOCKER_CONFIG, DOCKER_LAYER_GZIP, DOCKER_MANIFEST, Descriptor, Digest, ImageConfig, Manifest


class TarsSource:
    """Layers given as tars, lowest first.

    ``blobs``: the source holds gzip blobs and a manifest, as a registry does; otherwise plain tars, as an engine does.
    ``random_access=False``: layers come once, in order, as ``docker save`` sends them.
    """

    method = "memory"
    reason = ""

    def __init__(
        self,
        tars: Sequence[bytes],
        *,
        blobs: bool = False,
        random_access: bool = True,
        config: dict[str, Any] | None = None,
        annotations: dict[str, str] | None = None,
    ) -> None:
        self.name = "memory:image"
        self.tars = list(tars)
        self.blobs = [gzip.compress(tar, 1, mtime=0) for tar in tars] if blobs else None
        self.random_access = random_access
        self.annotations = annotations or {}
        diff_ids = [Digest.of(tar) for tar in tars]
        document = config or {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Labels": {"a": "<&>"}},
            "rootfs": {"type": "layers", "diff_ids": []},
            "history": [{"created": "2024-01-02T03:04:05Z", "created_by": f"RUN {n}"} for n in range(len(tars))],
        }
        document = {**document, "rootfs": {"type": "layers", "diff_ids": [str(d) for d in diff_ids]}}
        self._config = ImageConfig.parse(json.dumps(document, indent=1).encode(), where="memory config")
        self.image_id = self._config.digest
        self.layers = tuple(
            SourceLayer(
                diff_id=diff_id,
                blob=None if self.blobs is None else self._descriptor(self.blobs[n]),
                tar_size=None if self.blobs is not None else len(self.tars[n]),
            )
            for n, diff_id in enumerate(diff_ids)
        )
        self.reads = 0

    def _descriptor(self, blob: bytes) -> Descriptor:
        return Descriptor(
            media_type=DOCKER_LAYER_GZIP, digest=Digest.of(blob), size=len(blob), annotations=self.annotations
        )

    @property
    def manifest(self) -> Manifest | None:
        if self.blobs is None:
            return None
        return Manifest.build(
            media_type=DOCKER_MANIFEST,
            config=Descriptor(media_type=DOCKER_CONFIG, digest=self.image_id, size=len(self._config.raw)),
            layers=[self._descriptor(blob) for blob in self.blobs],
        )

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in range(len(self.tars)):
            if index in wanted:
                yield self._open(index)

    def open(self, index: int) -> LayerStream:
        assert self.random_access
        return self._open(index)

    def _open(self, index: int) -> LayerStream:
        self.reads += 1
        data = self.tars[index] if self.blobs is None else self.blobs[index]
        return VerifiedStream(
            io.BytesIO(data),
            index=index,
            layer=self.layers[index],
            kind="tar" if self.blobs is None else "blob",
            what=f"layer {index + 1}",
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
