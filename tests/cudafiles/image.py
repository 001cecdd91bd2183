"""An image made of tars in memory: a real source, with proven streams, in any order of layers."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream
from buildkit.model import Digest, ImageConfig, Manifest


@dataclass(frozen=True, kw_only=True)
class Item:
    """A member of a layer: a file with content, or a link, or a folder."""

    data: bytes = b""
    mode: int = 0o755
    type: bytes = tarfile.REGTYPE
    link: str = ""


def layer(items: Mapping[str, bytes | Item]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, given in items.items():
            item = given if isinstance(given, Item) else Item(data=given)
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname, info.size = item.type, item.mode, item.link, len(item.data)
            archive.addfile(info, io.BytesIO(item.data))
    return out.getvalue()


def symlink(target: str) -> Item:
    return Item(type=tarfile.SYMTYPE, link=target)


def folder() -> Item:
    return Item(type=tarfile.DIRTYPE)


class MemoryImage:
    """An ImageSource over layers in memory, given as members or as a whole tar.

    ``order`` is the order in which they are streamed.
    """

    method = "archive"
    reason = ""
    manifest: Manifest | None = None
    random_access = False

    def __init__(
        self,
        *layers: Mapping[str, bytes | Item] | bytes,
        runtime: Mapping[str, Any] | None = None,
        order: tuple[int, ...] | None = None,
        corrupt: bool = False,
    ) -> None:
        self.name = "memory:image"
        self._tars = [items if isinstance(items, bytes) else layer(items) for items in layers]
        self._order = order or tuple(range(len(layers)))
        self._corrupt = corrupt
        self.layers = tuple(SourceLayer(diff_id=Digest.of(tar)) for tar in self._tars)
        document = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(runtime or {}),
            "rootfs": {"type": "layers", "diff_ids": [str(item.diff_id) for item in self.layers]},
        }
        self._config = json.dumps(document).encode()

    @property
    def image_id(self) -> Digest:
        return Digest.of(self._config)

    def config(self) -> ImageConfig:
        return ImageConfig.parse(self._config, where="memory")

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in self._order:
            if index in wanted:
                yield self.open(index)

    def open(self, index: int) -> LayerStream:
        data = self._tars[index]
        if self._corrupt:
            data = data[:-1] + b"x"
        return VerifiedStream(
            io.BytesIO(data), index=index, layer=self.layers[index], kind="tar", what=f"layer {index + 1}"
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
