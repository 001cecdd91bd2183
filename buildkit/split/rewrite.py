"""Splits an image: every layer above the limit becomes several, every other passes through as it is.

One pass over each layer. A layer that the source holds as a tar is first compressed as a push would compress it; most
layers end below the limit, and that is their blob. One that exceeds it is compressed anew, atom by atom (``measure``),
from where reading began; then the planner decides, and the parts are put together from the compressed atoms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from buildkit.errors import ImageError, UsageError
from buildkit.image.compress import DEFAULT_CODEC, Codec, Readable, compress_segment
from buildkit.image.source import ImageSource, LayerStream, SourceLayer
from buildkit.image.streams import tar_of
from buildkit.image.tarspan import TRAILER
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
from buildkit.split.bonds import find_bonds
from buildkit.split.config import divided_config
from buildkit.split.forecast import Foreseen, hash_recipe
from buildkit.split.image import NewLayer, SplitImage
from buildkit.split.measure import Measured, measure
from buildkit.split.planner import MIN_LIMIT, Budget, Part, plan, recut
from buildkit.split.report import LayerReport, PartReport, SplitReport
from buildkit.split.spool import Range, Spool, Stored, assembled
from buildkit.split.store import Recipe, Store
from buildkit.split.survey import SHARE, part_report, survey
from buildkit.split.trial import Trial
from buildkit.units import format_size

DEFAULT_LIMIT = 95 * 10**6
"""Bytes of a compressed layer: below the 100 MB that common edges let through, with room for a request's headers."""
LAYERS_WARN = 64
LAYERS_REFUSE = 120
"""moby stops at 125 layers and overlay2 at 128 lower folders; a container adds some of its own."""

Oversize = Literal["isolate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """``limit``: most compressed bytes of a layer. ``oversize``: what to do with an entry that alone is above it,
    ``isolate`` gives it a layer of its own, ``error`` refuses the image. ``stable``: cut where the content says so, so
    that a small change moves few boundaries. ``threads`` compress (None: as many as there are CPUs). ``spool``: folder
    for the temporary file that holds the compressed layers (None: the system's)."""

    limit: int = DEFAULT_LIMIT
    codec: Codec = DEFAULT_CODEC
    oversize: Oversize = "isolate"
    stable: bool = True
    threads: int | None = None
    spool: Path | None = None
    max_layers: int = LAYERS_REFUSE

    def __post_init__(self) -> None:
        if self.limit < MIN_LIMIT:
            raise UsageError(f"a limit of {self.limit} bytes is too small to hold a layer", hint="use 1 MB or more")
        if self.oversize not in ("isolate", "error"):
            raise UsageError(f"oversize {self.oversize!r} is not known", hint="isolate or error")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """The new image, as a source for transports and pushes, and the report. Close it to free the temporary file."""

    image: SplitImage
    report: SplitReport

    def close(self) -> None:
        self.image.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


def split_image(
    source: ImageSource,
    options: SplitOptions | None = None,
    *,
    progress: Callable[[int], object] = lambda _: None,
) -> SplitResult:
    """Split the image. ``source`` must stay open as long as the result is used.

    ``progress`` is told the bytes of uncompressed layers as they are read. Raises FormatError (with the offset) or
    another ImageError for a source that is not what it claims to be, ImageError for too many layers or, with
    ``oversize="error"``, for what cannot be divided, StorageError where the disk refuses.
    """
    options = options or SplitOptions()
    spool = Spool(options.spool)
    try:
        with _Split(source, options, spool, progress) as job:
            return job.run()
    except BaseException:
        spool.close()
        raise


def dry_run(
    source: ImageSource,
    options: SplitOptions | None = None,
    *,
    exact: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> SplitReport:
    """What ``split_image`` would do; keeps nothing.

    ``exact`` compresses everything to know every size; otherwise a sample is compressed and sizes are predicted.
    Never raises for what cannot be divided or for too many layers: the report says it.
    """
    options = options or SplitOptions()
    lenient = replace(options, oversize="isolate", max_layers=2**31)
    if exact:
        with split_image(source, lenient, progress=progress) as result:
            report = replace(result.report, dry="exact")
    else:
        with Spool(options.spool) as spool, _Split(source, lenient, spool, progress) as job:
            report = job.predict()
    verdicts = []
    if report.layers_after > options.max_layers:
        verdicts.append(f"{report.layers_after} layers are refused: engines take no more than {options.max_layers}")
    if options.oversize == "error" and report.too_large:
        verdicts.append("what cannot be divided is refused (oversize: error)")
    return replace(report, warnings=report.warnings + tuple(verdicts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    layers: tuple[NewLayer, ...]
    report: LayerReport


@dataclass(slots=True)
class _Split:
    source: ImageSource
    options: SplitOptions
    spool: Spool
    progress: Callable[[int], object]
    _done: dict[int, _Outcome] = field(default_factory=dict)
    _threads: int = 0
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._threads = self.options.threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="split")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def budget(self) -> Budget:
        trailer = compress_segment(self.options.codec, TRAILER).size
        return Budget(
            limit=self.options.limit, overhead=self.options.codec.overhead + trailer, stable=self.options.stable
        )

    @property
    def docker(self) -> bool:
        """The family of media types: the source's; for a source without manifest Docker's, where it has the codec."""
        if self.source.manifest is not None:
            return self.source.manifest.docker
        return self.options.codec.algorithm == "gzip"

    # -- the story

    def run(self) -> SplitResult:
        # Fails here, not after an hour, where the family has no such codec.
        media_type = self.options.codec.media_type(docker=self.docker)
        for stream in self.source.stream(self._wanted()):
            with stream:
                self._done[stream.index] = self._layer(stream, media_type)
                self._count_layers()
        outcomes = self._in_order()
        self._refuse_oversize(outcomes)
        config = self.source.config()
        layers = tuple(new for outcome in outcomes for new in outcome.layers)
        new_config = divided_config(config, [[new.layer.diff_id for new in outcome.layers] for outcome in outcomes])
        manifest = self._manifest(new_config, layers, changed=new_config is not config)
        report = self._report(outcomes, dry=None)
        report = replace(
            report,
            new_image_id=new_config.digest,
            new_manifest=manifest.digest,
            invalidated=_invalidated(self.source, manifest),
        )
        return SplitResult(image=SplitImage(self.source, self.spool, layers, new_config, manifest), report=report)

    def predict(self) -> SplitReport:
        for stream in self.source.stream(self._wanted()):
            with stream:
                found = survey(
                    tar_of(stream),
                    where=f"layer {stream.index + 1}",
                    codec=self.options.codec,
                    budget=self.budget,
                    progress=self.progress,
                )
                parts: tuple[PartReport, ...] = ()
                if stream.kind == "blob" or found.predicted > self.options.limit:
                    parts = found.parts
                self._done[stream.index] = _Outcome(
                    layers=(),
                    report=LayerReport(
                        number=stream.index + 1,
                        diff_id=stream.layer.diff_id,
                        size=stream.layer.blob.size if stream.layer.blob else None,
                        tar_size=found.tar_size,
                        entries=found.entries,
                        parts=parts,
                    ),
                )
        return self._report(self._in_order(), dry="quick")

    # -- which layers are read

    def _wanted(self) -> set[int]:
        """Layers to read: each distinct one that may need dividing, or whose bytes cannot be had later."""
        wanted: dict[Digest, int] = {}
        for index, layer in enumerate(self.source.layers):
            if not self._passes(layer):
                wanted.setdefault(layer.diff_id, index)
        return set(wanted.values())

    def _passes(self, layer: SourceLayer) -> bool:
        blob = layer.blob
        return blob is not None and (blob.foreign or (blob.size <= self.options.limit and self.source.random_access))

    def _in_order(self) -> list[_Outcome]:
        """The outcome of each of the source's layers; layers that occur twice share theirs."""
        by_diff_id = {outcome.report.diff_id: outcome for outcome in self._done.values()}
        out = []
        for index, layer in enumerate(self.source.layers):
            outcome = by_diff_id.get(layer.diff_id)
            if outcome is None:
                if not self._passes(layer):
                    raise ImageError(f"{self.source.name} did not deliver layer {index + 1}")
                outcome = self._pass_on(index, layer)
            out.append(replace(outcome, report=replace(outcome.report, number=index + 1)))
        return out

    def _pass_on(self, index: int, layer: SourceLayer) -> _Outcome:
        assert layer.blob is not None
        return _Outcome(
            layers=(NewLayer(layer=layer, descriptor=layer.blob, passed=index),),
            report=LayerReport(
                number=index + 1,
                diff_id=layer.diff_id,
                size=layer.blob.size,
                tar_size=layer.tar_size,
                entries=None,
            ),
        )

    # -- one layer

    def _layer(self, stream: LayerStream, media_type: str) -> _Outcome:
        blob = stream.layer.blob
        if stream.kind == "blob":
            assert blob is not None
            if blob.foreign or blob.size <= self.options.limit:
                return self._keep(stream, self._copy(stream, blob), None)
            return self._divide(stream, tar_of(stream), media_type)
        if not self.source.random_access:
            trial = self._trial(stream)
            stored = trial.run(media_type)
            if stored is None:
                return self._divide(stream, trial.again(), media_type)
            return self._keep(stream, stored, trial.tar_size)
        if not self._surely_large(stream.layer):
            trial = self._trial(stream)
            stored = trial.run(media_type, expected=stream.layer.tar_size)
            if stored is not None:
                return self._keep(stream, stored, trial.tar_size)
        with self.source.open(stream.index) as fresh:
            outcome = self._divide(fresh, fresh, media_type)
        if sum(new.descriptor.size for new in outcome.layers) > self.options.limit * 21 // 20:
            return outcome
        # It compressed better than expected: perhaps it is a layer like others, that keeps its blob.
        with self.source.open(stream.index) as fresh:
            trial = self._trial(fresh)
            stored = trial.run(media_type)
            return outcome if stored is None else self._keep(stream, stored, trial.tar_size)

    def _surely_large(self, layer: SourceLayer) -> bool:
        """Whether to skip the trial: so large a tar exceeds the limit unless it is hardly more than zeros."""
        return (layer.tar_size or 0) > 16 * self.options.limit

    def _trial(self, stream: LayerStream) -> Trial:
        return Trial(
            stream,
            codec=self.options.codec,
            limit=self.options.limit,
            pool=self._pool,
            threads=self._threads,
            spool=self.spool,
        )

    def _copy(self, stream: LayerStream, blob: Descriptor) -> Stored:
        into = self.spool.bin()
        start = into.end
        while data := stream.read(2**20):
            into.write((data,))
        whole = Range(into, start, into.end - start)
        return Stored(descriptor=blob, pieces=(whole,), whole=into if into is not self.spool.common else None)

    def _keep(self, stream: LayerStream, stored: Stored, tar_size: int | None) -> _Outcome:
        self.progress(tar_size or 0)
        layer = SourceLayer(diff_id=stream.layer.diff_id, blob=stored.descriptor, tar_size=tar_size)
        return _Outcome(
            layers=(NewLayer(layer=layer, descriptor=stored.descriptor, stored=stored),),
            report=LayerReport(
                number=stream.index + 1,
                diff_id=layer.diff_id,
                size=stored.descriptor.size,
                tar_size=tar_size,
                entries=None,
            ),
        )

    def _divide(self, stream: LayerStream, tar: Readable, media_type: str) -> _Outcome:
        budget = self.budget
        measured = measure(
            tar,
            where=f"layer {stream.index + 1}",
            codec=self.options.codec,
            budget=budget,
            pool=self._pool,
            threads=self._threads,
            spool=self.spool,
            progress=self.progress,
        )
        store = measured.store
        bonds = find_bonds(store.inventory)
        store.recut(recut(store.table.atoms, bonds, budget, store.table.sizes))
        parts = plan(store.inventory, store.table.atoms, bonds, budget, store.sizes())
        found = self._parts(measured, [store.recipe(part) for part in parts])
        layers, reports = [], []
        for part, (recipe, foreseen), predicted in zip(parts, found, _predicted(store, parts), strict=True):
            new = self._new_layer(store, recipe, foreseen, media_type)
            assert new.descriptor.size == part.size, "sizes of segments add up"
            layers.append(new)
            reports.append(
                replace(
                    part_report(store.inventory, store.table.atoms, part, predicted=predicted),
                    size=part.size,
                    digest=new.descriptor.digest,
                    diff_id=new.layer.diff_id,
                )
            )
        blob = stream.layer.blob
        if len(parts) == 1 and parts[0].indivisible and blob is not None and self.source.random_access:
            # There was nothing to divide: the source's own blob is as good, and keeps its digest.
            layers = list(self._pass_on(stream.index, stream.layer).layers)
            reports = [replace(reports[0], size=blob.size, digest=blob.digest, diff_id=stream.layer.diff_id)]
        return _Outcome(
            layers=tuple(layers),
            report=LayerReport(
                number=stream.index + 1,
                diff_id=stream.layer.diff_id,
                size=None,
                tar_size=measured.tar_size,
                entries=len(store.inventory),
                parts=tuple(reports),
            ),
        )

    def _parts(self, measured: Measured, recipes: Sequence[Recipe]) -> list[tuple[Recipe, Foreseen]]:
        """Each part as it was foreseen, or with its hashes taken from the spool, several at once."""
        futures = [
            None if recipe in measured.foreseen else self._pool.submit(hash_recipe, measured.store, recipe)
            for recipe in recipes
        ]
        return [
            (recipe, measured.foreseen[recipe] if future is None else Foreseen(hashes=future.result(), whole=None))
            for recipe, future in zip(recipes, futures, strict=True)
        ]

    def _new_layer(self, store: Store, recipe: Recipe, found: Foreseen, media_type: str) -> NewLayer:
        pieces = assembled(store.codec, store.spool, recipe)
        size = sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces)
        whole = found.whole
        if whole is not None:
            assert whole.end == size, "the bin holds the part and nothing else"
            pieces = (Range(whole, 0, size),)
        descriptor = Descriptor(media_type=media_type, digest=Digest("sha256", found.hashes.blob), size=size)
        layer = SourceLayer(diff_id=Digest("sha256", found.hashes.tar), blob=descriptor, tar_size=found.hashes.tar_size)
        stored = Stored(descriptor=descriptor, pieces=pieces, whole=whole)
        return NewLayer(layer=layer, descriptor=descriptor, stored=stored)

    # -- the whole

    def _count_layers(self) -> None:
        """Refuse as soon as it is sure that there will be too many."""
        count = sum(len(outcome.layers) - 1 for outcome in self._done.values()) + len(self.source.layers)
        if count > self.options.max_layers:
            raise ImageError(
                f"{self.source.name} would have at least {count} layers; engines refuse more than "
                f"{self.options.max_layers}",
                hint="use a larger limit, or the sequential layout, which packs more densely",
            )

    def _refuse_oversize(self, outcomes: Sequence[_Outcome]) -> None:
        if self.options.oversize != "error":
            return
        found = [
            f"layer {outcome.report.number}: {part.indivisible.paths[0]} ({format_size(part.indivisible.size)})"
            for outcome in outcomes
            for part in outcome.report.parts
            if part.indivisible
        ]
        if found:
            raise ImageError(
                f"above the limit of {format_size(self.options.limit)} and not divisible: {', '.join(found)}",
                hint="no layer format divides a file: let it have a layer of its own (oversize: isolate) "
                "and push with --chunked",
            )

    def _manifest(self, config: ImageConfig, layers: Sequence[NewLayer], *, changed: bool) -> Manifest:
        own = self.source.manifest
        if own is not None and not changed and [n.descriptor.digest for n in layers] == [d.digest for d in own.layers]:
            return own
        annotations = {}
        if own is not None:
            annotations = {k: v for k, v in own.annotations.items() if not k.startswith(_SIGNATURES)}
        return Manifest.build(
            media_type=DOCKER_MANIFEST if self.docker else OCI_MANIFEST,
            config=Descriptor(
                media_type=DOCKER_CONFIG if self.docker else OCI_CONFIG, digest=config.digest, size=len(config.raw)
            ),
            layers=[new.descriptor for new in layers],
            annotations=MappingProxyType(annotations),
        )

    def _report(self, outcomes: Sequence[_Outcome], *, dry: Literal["quick", "exact"] | None) -> SplitReport:
        report = SplitReport(
            source=self.source.name,
            method=self.source.method,
            limit=self.options.limit,
            codec=str(self.options.codec),
            stable=self.options.stable,
            dry=dry,
            layers=tuple(outcome.report for outcome in outcomes),
            image_id=self.source.image_id,
            new_image_id=None,
            manifest=self.source.manifest.digest if self.source.manifest else None,
            new_manifest=None,
            warnings=(),
            invalidated=(),
        )
        if report.layers_after > LAYERS_WARN:
            text = f"{report.layers_after} layers: some container runtimes have trouble above {LAYERS_WARN}"
            report = replace(report, warnings=(text,))
        return report


_SIGNATURES = ("dev.cosignproject.", "dev.sigstore.")
"""Annotations that speak about a signature over the old manifest."""


def _invalidated(source: ImageSource, manifest: Manifest) -> tuple[str, ...]:
    """What was bound to the old image and says nothing about the new one."""
    if manifest.config.digest == source.image_id:
        return ()
    old = source.manifest
    out = [f"image id {source.image_id}: whatever names it means the undivided image"]
    if old is not None:
        out.append(
            f"signatures, attestations and other referrers of {old.digest} do not cover the new manifest; "
            "none is carried over: sign the new image"
        )
        if old.subject is not None:
            out.append(f"the manifest's subject {old.subject.digest} is dropped")
        dropped = sorted({key for layer in old.layers for key in layer.annotations})
        if dropped:
            out.append(f"annotations of divided layers are dropped ({', '.join(dropped)[:200]})")
    return tuple(out)


def _predicted(store: Store, parts: Sequence[Part]) -> list[int]:
    """What a sample of every sixteenth segment foretells of the parts' sizes, beside the exact ones."""
    table, spool = store.table, store.spool
    sample = [number for atom in range(len(table.sizes)) for number in table.segments(atom)][::SHARE]
    size, tar_size = sum(spool.size[n] for n in sample), sum(spool.input[n] for n in sample)
    share = size / tar_size if tar_size else 1.0
    sampled = set(sample)
    out = []
    for part in parts:
        total = 0.0
        for atom in part.atoms:
            numbers = table.segments(atom)
            known = [n for n in numbers if n in sampled]
            own = sum(spool.size[n] for n in known) / sum(spool.input[n] for n in known) if known else share
            total += own * sum(spool.input[n] for n in numbers)
        out.append(round(total))
    return out
