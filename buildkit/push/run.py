"""A push, from the first look to the verified tag.

The story: *survey* what the registry and the cache have - *send* what is missing, where reading, compressing and
uploading overlap - *publish* the manifest once every blob is there and proven - *verify*.

One thread (the caller's) reads and compresses, a few upload. The first failure stops all of them; what the registry
acknowledged stays, for the next run to go on from. No tag moves before every blob is known to be there and right.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from buildkit.blob import Blob, BlobState
from buildkit.errors import (
    BuildkitError,
    CancelledError,
    CheckFailedError,
    DigestMismatchError,
    ImageError,
    NotFoundError,
)
from buildkit.image.blobfile import FileBlob, GrowingBlob, HoldsBlobs
from buildkit.image.cache import BlobCache
from buildkit.image.compress import DEFAULT_CODEC, Codec, Compressor
from buildkit.image.source import ImageSource, LayerStream
from buildkit.image.streams import HashingReader
from buildkit.model import (
    DOCKER_CONFIG,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    Digest,
    ImageConfig,
    Manifest,
)
from buildkit.progress import Display
from buildkit.push.plan import Action, PlannedBlob, PushPlan, Target, disk_need
from buildkit.push.report import PushReport
from buildkit.registry import CancelToken, Presence, Present, RegistryClient, Unknown
from buildkit.registry.events import UploadReport
from buildkit.units import format_size

LAYERS_WARN = 64
"""Some container runtimes have trouble above this number of layers."""
LAYERS_REFUSE = 120
"""moby stops at 125 layers and overlay2 at 128 lower folders; a container adds some of its own."""

_POLL = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """``threads`` compress (None: as many as there are CPUs). ``mount_from`` are repositories on the same registry that
    may hold the blobs. ``deep`` reads every byte back from the registry after the push."""

    codec: Codec = DEFAULT_CODEC
    threads: int | None = None
    mount_from: tuple[str, ...] = ()
    deep: bool = False


def plan_push(
    source: ImageSource, target: Target, *, client: RegistryClient, cache: BlobCache, options: PushOptions
) -> PushPlan:
    """What ``push`` would do now. Sends no bytes and changes nothing."""
    with _Push(source, target, client, cache, options, display=None, cancel=CancelToken()) as job:
        job.survey()
        return job.plan()


def push(
    source: ImageSource,
    target: Target,
    *,
    client: RegistryClient,
    cache: BlobCache,
    options: PushOptions,
    display: Display,
    cancel: CancelToken,
) -> PushReport:
    """Push the image; ``cancel`` must be the token that ``client`` was made with.

    Raises RegistryError, ImageError, StorageError or EngineError, and CancelledError after ``cancel``. Whatever it
    raises, no tag was moved to something incomplete.
    """
    began = time.monotonic()
    try:
        with _Push(source, target, client, cache, options, display=display, cancel=cancel) as job:
            job.survey()
            job.send()
            manifest = job.publish()
            job.verify(manifest)
            return job.report(manifest, seconds=time.monotonic() - began)
    except KeyboardInterrupt:
        raise CancelledError(
            "stopped", hint="run the same command again: it goes on from what the registry holds"
        ) from None


@dataclass(slots=True, kw_only=True)
class _Item:
    """One distinct blob of the image while the push runs."""

    planned: PlannedBlob
    indexes: tuple[int, ...] = ()
    at_hand: FileBlob | None = None
    descriptor: Descriptor | None = None
    upload: Future[UploadReport] | None = None
    proof: Future[None] | None = None
    report: UploadReport | None = None


class BytesBlob:
    """A small blob in memory."""

    def __init__(self, data: bytes, descriptor: Descriptor, *, label: str) -> None:
        self._data = data
        self._descriptor = descriptor
        self._label = label

    @property
    def label(self) -> str:
        return self._label

    def state(self) -> BlobState:
        return BlobState(available=len(self._data), descriptor=self._descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:  # noqa: ARG002  # complete: never waits
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        return io.BytesIO(self._data[start:end])


@dataclass(slots=True)
class _Push:
    source: ImageSource
    target: Target
    client: RegistryClient
    cache: BlobCache
    options: PushOptions
    display: Display | None
    cancel: CancelToken
    _items: list[_Item] = field(default_factory=list)
    _image: tuple[Manifest, ImageConfig] | None = None
    _compressed: int = 0
    _up_to_date: bool = False
    _warnings: list[str] = field(default_factory=list)
    _failure: BaseException | None = None
    _resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> _Push:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    # Survey ----------------------------------------------------------------------------------------------------------

    def survey(self) -> None:
        """What has to be done with each blob, from the cache's and the registry's word."""
        self._check_layer_count()
        # An address where no registry answers is told in seconds, not after all the patience that an upload deserves.
        with contextlib.suppress(NotFoundError):
            self.client.ping()
        known = None if self.source.manifest else self.cache.find_image(self.source.image_id, self._cache_key)
        if known and tuple(known.config.diff_ids) == tuple(layer.diff_id for layer in self.source.layers):
            self._image = (known.manifest, known.config)
        self._items = [self._layer_item(index, indexes) for index, indexes in self._distinct_layers()]
        described = [item for item in self._items if item.descriptor and item.planned.action is not Action.FOREIGN]
        config = self._known_config()
        if config is not None:
            described.append(config)
            self._items.append(config)
        with ThreadPoolExecutor(self.client.options.parallel, thread_name_prefix="survey") as pool:
            found = list(pool.map(self._is_there, described))
        for item, there in zip(described, found, strict=True):
            if there:
                item.planned = replace(item.planned, action=Action.EXISTS)
        for item in self._items:
            self._prove_cached(item)
        self._up_to_date = self._is_up_to_date()

    def _check_layer_count(self) -> None:
        count = len(self.source.layers)
        if count > LAYERS_REFUSE:
            raise ImageError(
                f"{self.source.name} has {count} layers; engines refuse more than {LAYERS_REFUSE} of an image",
                hint="build it with fewer instructions, or split with a larger limit",
            )
        if count > LAYERS_WARN:
            self._warnings.append(f"{count} layers: some container runtimes have trouble above {LAYERS_WARN}")

    def _distinct_layers(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each distinct layer once, with all the places where it stands."""
        places: dict[tuple[Digest, Digest | None], list[int]] = {}
        for index, layer in enumerate(self.source.layers):
            places.setdefault((layer.diff_id, layer.blob.digest if layer.blob else None), []).append(index)
        for indexes in places.values():
            yield indexes[0], tuple(indexes)

    def _layer_item(self, index: int, indexes: tuple[int, ...]) -> _Item:
        layer = self.source.layers[index]
        label = f"layer {index + 1}/{len(self.source.layers)}"
        blob: FileBlob | None = None
        descriptor = layer.blob
        if descriptor is not None and descriptor.foreign:
            action = Action.FOREIGN
        elif descriptor is not None:
            blob = self.source.local_blob(index) if isinstance(self.source, HoldsBlobs) else None
            action = Action.UPLOAD if blob else Action.COPY
        else:
            hit = self.cache.find(layer.diff_id, self._cache_key, label=label)
            blob, descriptor = (hit.blob, hit.descriptor) if hit else (None, None)
            action = Action.UPLOAD if blob else Action.COMPRESS
        if blob is not None:
            self._resources.callback(blob.close)
        planned = PlannedBlob(
            label=label,
            action=action,
            index=index,
            diff_id=layer.diff_id,
            descriptor=descriptor,
            tar_size=layer.tar_size,
        )
        return _Item(planned=planned, indexes=indexes, at_hand=blob, descriptor=descriptor)

    def _prove_cached(self, item: _Item) -> None:
        """A damaged file in the cache costs a second look at the source, and nothing else."""
        cached = item.planned.diff_id is not None and self.source.layers[item.indexes[0]].blob is None
        if item.planned.action is not Action.UPLOAD or item.at_hand is None or not cached:
            return
        try:
            self._prove(item.at_hand)
        except ImageError as error:
            self._say(f"{item.planned.label}: the cached copy is damaged, reading the layer again: {error.message}")
            self.cache.evict(item.at_hand.descriptor.digest)
            item.at_hand = item.descriptor = None
            item.planned = replace(item.planned, action=Action.COMPRESS, descriptor=None)

    def _prove(self, blob: FileBlob) -> None:
        """Raises DigestMismatchError where the file is not what its digest says."""
        with blob.window(0, blob.descriptor.size) as window:
            reader = HashingReader(
                window, digest=blob.descriptor.digest, size=blob.descriptor.size, what=f"{blob.path}: {blob.label}"
            )
            while reader.read(1 << 20):
                self.cancel.check()

    def _known_config(self) -> _Item | None:
        if self.source.manifest is not None:
            descriptor = self.source.manifest.config
        elif self._image is not None:
            descriptor = self._image[0].config
        else:
            return None
        planned = PlannedBlob(label="config", action=Action.UPLOAD, descriptor=descriptor)
        return _Item(planned=planned, descriptor=descriptor)

    def _is_there(self, item: _Item) -> bool:
        """An unclear answer counts as "not there": the upload asks again, with all its patience."""
        assert item.descriptor is not None
        self.cancel.check()
        found = self.client.head_blob(self._repository, item.descriptor.digest)
        return isinstance(found, Present) and found.size in (None, item.descriptor.size)

    def _is_up_to_date(self) -> bool:
        manifest = self.source.manifest or (self._image[0] if self._image else None)
        if manifest is None or any(i.planned.action not in (Action.EXISTS, Action.FOREIGN) for i in self._items):
            return False
        return all(self._tag_digest(tag) == manifest.digest for tag in self.target.tags)

    def _tag_digest(self, tag: str) -> Digest | None:
        return self.client.head_manifest(self.target.repository.with_tag(tag))

    def plan(self) -> PushPlan:
        blobs = [item.planned for item in self._items]
        if not any(blob.label == "config" for blob in blobs):
            blobs.append(PlannedBlob(label="config", action=Action.UPLOAD))
        return PushPlan(
            source=self.source.name,
            method=self.source.method,
            reason=self.source.reason,
            target=self.target,
            blobs=tuple(blobs),
            chunk=self.client.options.effective_chunk,
            chunked=self.client.options.chunked,
            disk=disk_need(blobs),
            up_to_date=self._up_to_date,
        )

    # Send ------------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Bring every missing blob to the registry. Returns when all are there; raises the first failure."""
        if self._up_to_date:
            return
        uploads = ThreadPoolExecutor(self.client.options.parallel, thread_name_prefix="upload")
        proofs = ThreadPoolExecutor(1, thread_name_prefix="prove")
        try:
            for item in self._items:
                if item.at_hand is not None and item.planned.action is Action.UPLOAD:
                    if self.source.layers[item.indexes[0]].blob is not None:
                        item.proof = proofs.submit(self._prove, item.at_hand)
                    self._submit(uploads, item, item.at_hand)
            self._read_layers(uploads)
            self._send_config(uploads)
            self._collect()
        except _Stopped:
            damage = self._damage()
            assert self._failure is not None
            raise (damage or self._failure) from None
        finally:
            # The first failure ends the other uploads too. What was acknowledged stays, for the next run.
            if any(item.report is None for item in self._items if item.upload is not None):
                self.cancel.cancel()
            uploads.shutdown(wait=True, cancel_futures=True)
            proofs.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, item: _Item, blob: Blob) -> None:
        key = f"{item.planned.diff_id} {self._cache_key}" if blob.state().descriptor is None else None
        item.upload = pool.submit(
            self.client.upload, self._repository, blob, mount_from=self.options.mount_from, key=key
        )
        item.upload.add_done_callback(self._note_failure)

    def _note_failure(self, upload: Future[UploadReport]) -> None:
        error = None if upload.cancelled() else upload.exception()
        if error is not None and self._failure is None:
            self._failure = error

    def _read_layers(self, uploads: ThreadPoolExecutor) -> None:
        wanted = {
            item.planned.index: item
            for item in self._items
            if item.planned.action in (Action.COMPRESS, Action.COPY) and item.planned.index is not None
        }
        if not wanted and self._image is not None:
            return
        if not wanted and (self.source.manifest is not None or self.source.random_access):
            return
        with Compressor(self.options.threads) as compressor:
            for stream in self.source.stream(frozenset(wanted)):
                with stream:
                    item = wanted.pop(stream.index)
                    self._say(_reading(item.planned, self.source))
                    self._read_layer(stream, item, compressor, uploads)
        if wanted:
            missing = ", ".join(item.planned.label for item in wanted.values())
            raise ImageError(f"{self.source.name} did not deliver {missing}")

    def _read_layer(
        self, stream: LayerStream, item: _Item, compressor: Compressor, uploads: ThreadPoolExecutor
    ) -> None:
        blob = self.cache.create(label=item.planned.label)
        self._resources.callback(blob.close)
        self._submit(uploads, item, blob)
        try:
            if stream.kind == "blob":
                assert item.descriptor is not None
                while data := stream.read(1 << 20):
                    self._write(blob, data)
                blob.finish(item.descriptor)
                return
            result = compressor.run(stream, lambda data: self._write(blob, data), self.options.codec, hash_input=False)
            item.descriptor = Descriptor(
                media_type=self.options.codec.media_type(docker=self._docker), digest=result.digest, size=result.size
            )
            self._compressed += result.tar_size
            if self._image is not None and self._image[0].layers[stream.index].digest != result.digest:
                self._image = None  # the cached manifest was made by another compressor: it is made anew
            blob.finish(item.descriptor)
            self.cache.commit(blob, diff_id=stream.layer.diff_id, codec_id=self._cache_key)
        except BuildkitError as error:
            blob.fail(error)
            raise

    def _write(self, blob: GrowingBlob, data: bytes) -> None:
        self._check()
        blob.write(data)

    def _check(self) -> None:
        if self._failure is not None:
            raise _Stopped
        self.cancel.check()

    def _send_config(self, uploads: ThreadPoolExecutor) -> None:
        manifest, config = self._described()
        if any(item.planned.label == "config" and item.planned.action is Action.EXISTS for item in self._items):
            return
        self._items = [item for item in self._items if item.planned.label != "config"]
        planned = PlannedBlob(label="config", action=Action.UPLOAD, descriptor=manifest.config)
        item = _Item(planned=planned, descriptor=manifest.config)
        self._items.append(item)
        self._submit(uploads, item, BytesBlob(config.raw, manifest.config, label="config"))

    def _collect(self) -> None:
        """Wait for all uploads and proofs. In short waits: Ctrl-C has to come through within a second."""
        pending: set[Future[Any]] = {f for item in self._items for f in (item.upload, item.proof) if f is not None}
        while pending:
            _, pending = wait(pending, timeout=_POLL, return_when=FIRST_COMPLETED)
            self._check()
        for item in self._items:
            if item.proof is not None:
                item.proof.result()
            if item.upload is not None:
                report = item.upload.result()
                if item.descriptor is not None and report.digest != item.descriptor.digest:
                    raise DigestMismatchError(f"{report.label}: sent {report.digest}, not {item.descriptor.digest}")
                item.report = report

    def _damage(self) -> BaseException | None:
        """A registry that refuses a digest does not tell who is wrong; the proof of the local file does."""
        for item in self._items:
            if item.proof is not None and item.upload is not None and item.upload.done():
                error = item.proof.exception()
                if isinstance(error, ImageError):
                    return error
        return None

    # Publish and verify ----------------------------------------------------------------------------------------------

    def publish(self) -> Manifest:
        """The manifest, under every tag, once every blob is there with its size."""
        manifest, config = self._described()
        if self._up_to_date:
            return manifest
        self._check_blobs(item.descriptor for item in self._items if item.upload is not None and item.descriptor)
        for tag in self.target.tags:
            self.cancel.check()
            self.client.put_manifest(self.target.repository.with_tag(tag), manifest.raw, manifest.media_type)
        if self.source.manifest is None:
            self.cache.store_image(self.source.image_id, self._cache_key, manifest=manifest, config=config.raw)
        return manifest

    def verify(self, manifest: Manifest) -> None:
        """By digest and by every tag: the registry gives back what was sent. ``deep`` reads every blob."""
        fetched = self.client.get_manifest(self.target.repository.with_digest(manifest.digest))
        if fetched.raw != manifest.raw:
            raise CheckFailedError(f"{self.target.repository}@{manifest.digest} comes back with other bytes")
        for tag in self.target.tags:
            found = self._tag_digest(tag)
            if found != manifest.digest:
                raise CheckFailedError(
                    f"{self.target.repository.with_tag(tag)} points at {found or 'nothing'}, not at {manifest.digest}",
                    hint="another push may have moved the tag; the image is there by its digest",
                )
        if self.options.deep:
            for descriptor in _distinct((manifest.config, *manifest.layers)):
                self._say(f"reading back {descriptor.digest.short} ({format_size(descriptor.size)})")
                for _ in self.client.read_blob(self._repository, descriptor):
                    self.cancel.check()

    def _check_blobs(self, descriptors: Iterable[Descriptor]) -> None:
        with ThreadPoolExecutor(self.client.options.parallel, thread_name_prefix="check") as pool:
            wanted = list(_distinct(descriptors))
            for descriptor, found in zip(
                wanted, pool.map(lambda d: self.client.head_blob(self._repository, d.digest), wanted), strict=True
            ):
                if not isinstance(found, Present) or found.size not in (None, descriptor.size):
                    raise CheckFailedError(
                        f"{self.target.repository}: blob {descriptor.digest} is not there with its "
                        f"{descriptor.size} bytes after the upload ({_in_words(found)})",
                        hint="no tag was moved; push again, and look at the registry's storage if it stays so",
                    )

    def report(self, manifest: Manifest, *, seconds: float) -> PushReport:
        _, config = self._described()
        return PushReport(
            source=self.source.name,
            method=self.source.method,
            reason=self.source.reason,
            target=self.target,
            manifest=manifest.descriptor,
            platform=str(config.platform),
            present=tuple(i.planned.label for i in self._items if i.planned.action is Action.EXISTS),
            uploads=tuple(item.report for item in self._items if item.report is not None),
            compressed=self._compressed,
            seconds=seconds,
            up_to_date=self._up_to_date,
            verified="every byte" if self.options.deep else "manifest and blobs",
            warnings=tuple(self._warnings),
        )

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _repository(self) -> str:
        return self.target.repository.repository

    @property
    def _docker(self) -> bool:
        """Which family of media types a new manifest has: Docker's for an engine's image, unless the codec is OCI's."""
        return self.options.codec.algorithm == "gzip"

    @property
    def _cache_key(self) -> str:
        return self.options.codec.id

    def _described(self) -> tuple[Manifest, ImageConfig]:
        """Manifest and config: the source's own, the cached ones, or new ones made of what was compressed."""
        if self._image is not None:
            return self._image
        config = self.source.config()
        if self.source.manifest is not None:
            self._image = (self.source.manifest, config)
            return self._image
        layers: dict[int, Descriptor] = {}
        for item in self._items:
            for index in item.indexes:
                assert item.descriptor is not None
                layers[index] = item.descriptor
        manifest = Manifest.build(
            media_type=DOCKER_MANIFEST if self._docker else OCI_MANIFEST,
            config=Descriptor(
                media_type=DOCKER_CONFIG if self._docker else OCI_CONFIG,
                digest=config.digest,
                size=len(config.raw),
            ),
            layers=[layers[index] for index in sorted(layers)],
        )
        self._image = (manifest, config)
        return self._image

    def _say(self, text: str) -> None:
        if self.display is not None:
            self.display.say(text)


class _Stopped(BuildkitError):
    """Reading stops because an upload failed; that failure is what is raised in the end."""

    def __init__(self) -> None:
        super().__init__("stopped after a failed upload")


def _in_words(found: Presence) -> str:
    match found:
        case Present(size=size):
            return f"it has {size} bytes there"
        case Unknown(reason=reason):
            return f"no clear answer: {reason}"
        case _:
            return "it is missing there"


def _distinct(descriptors: Iterable[Descriptor]) -> Iterator[Descriptor]:
    seen: set[Digest] = set()
    for descriptor in descriptors:
        if descriptor.digest not in seen and not descriptor.foreign:
            seen.add(descriptor.digest)
            yield descriptor


def _reading(planned: PlannedBlob, source: ImageSource) -> str:
    verb = "copying" if planned.action is Action.COPY else "reading and compressing"
    size = f" ({format_size(planned.tar_size)})" if planned.tar_size else ""
    return f"{planned.label}: {verb}{size} by {source.method}"
