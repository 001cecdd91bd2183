"""Engine-direct with a net: a layer that cannot be read to its end goes on with ``docker save`` where it broke off.

The engine may delete a layer while it is read (an image was removed or built anew), or keep its files in a way that was
not foreseen. What was handed out so far is compared with the beginning of the same layer in the engine's own stream:
equal, and reading goes on there; different, and it is an error, since nothing can be called back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any, Literal, Self

from buildkit.image.direct import DirectSource, NotDirectError
from buildkit.image.save import SaveSource
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.model import Digest, ImageConfig, Manifest


class FallbackSource:
    """``direct``, and ``reopen`` (a fresh source by ``docker save``) for what it cannot give. ``ImageSource``."""

    method = "direct"
    random_access = True
    manifest: Manifest | None = None

    def __init__(self, direct: DirectSource, reopen: Callable[[], SaveSource]) -> None:
        self._direct = direct
        self._reopen = reopen
        self._lock = threading.Lock()
        self.reason = direct.reason
        self.name = direct.name

    @property
    def image_id(self) -> Digest:
        return self._direct.image_id

    @property
    def layers(self) -> tuple[SourceLayer, ...]:
        return self._direct.layers

    def config(self) -> ImageConfig:
        return self._direct.config()

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in distinct(self.layers, wanted):
            yield self.open(index)

    def open(self, index: int) -> LayerStream:
        return _Resumed(self._direct, index, self._saved)

    def close(self) -> None:
        self._direct.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _saved(self, index: int, why: NotDirectError, undo: ExitStack) -> VerifiedStream:
        with self._lock:
            self.reason = f"{self._direct.reason}; then docker save, because {why.message}"
        source = undo.enter_context(self._reopen())
        # The generator holds the engine's stream; it must live as long as the layer is read.
        streams = source.stream({index})
        undo.callback(getattr(streams, "close", lambda: None))
        return undo.enter_context(next(streams))


class _Resumed:
    """One layer, by one way after the other."""

    kind: Literal["tar", "blob"] = "tar"

    def __init__(
        self,
        direct: DirectSource,
        index: int,
        saved: Callable[[int, NotDirectError, ExitStack], VerifiedStream],
    ) -> None:
        self.index = index
        self.layer = direct.layers[index]
        self._direct: DirectSource | None = direct
        self._saved = saved
        self._undo = ExitStack()
        self._stream: VerifiedStream | None = None
        try:
            self._stream = self._undo.enter_context(direct.open(index))
        except NotDirectError as error:
            self._change(error)

    def read(self, size: int, /) -> bytes:
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def readinto(self, buffer: Any, /) -> int:
        assert self._stream is not None
        try:
            return self._stream.readinto(buffer)
        except NotDirectError as error:
            self._change(error)
            return self._stream.readinto(buffer)

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _change(self, error: NotDirectError) -> None:
        if self._direct is None:
            raise error
        self._direct = None
        self._undo.close()
        count, so_far = (self._stream.count, self._stream.hexdigest) if self._stream is not None else (0, None)
        self._stream = stream = self._saved(self.index, error, self._undo)
        buffer = memoryview(bytearray(1 << 20))
        while count:
            step = stream.readinto(buffer[: min(count, len(buffer))])
            if not step:
                raise NotDirectError(f"{error.message}, and docker save gives a shorter layer")
            count -= step
        if so_far is not None and so_far != stream.hexdigest:
            raise NotDirectError(
                f"{error.message}, and what was read before differs from what docker save gives",
                hint="run it again with --source save",
            )
