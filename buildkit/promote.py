"""Moving a tag to an image, never backwards.

Two runs of a pipeline may end in either order; the tag must be the newer commit's in the end. What is newer is read
from the labels that a build writes: the commit's ancestry where git knows both commits, else the commits' times.

A registry has no "put this if that is still there". So whoever has moved the tag looks again after a while, and where
somebody has put something older over it meanwhile, decides anew. That holds as long as nobody takes longer from a look
to the PUT behind it than others wait; hence a last look, one HEAD, right before the PUT.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from buildkit.build.labels import CREATED, DIRTY, REVISION
from buildkit.errors import ImageError, NotFoundError, ProtocolError, RegistryError, UnreachableError, UsageError
from buildkit.model import (
    INDEX_TYPES,
    Digest,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    Reference,
    load_json_object,
    split_name,
)
from buildkit.registry import FetchedManifest, RegistryClient

SETTLE = 2.0
"""Seconds after which the tag is looked at again."""
ATTEMPTS = 12
"""Looks and PUTs before this gives up on a registry that loses the tag, and on rivals that never rest."""
_MAX_CONFIG = 64 * 2**20
_MAX_NESTING = 4

Ancestry = Callable[[str, str], bool | None]
"""Whether the first commit is an ancestor of the second; None where that cannot be told."""
Verdict = Literal["move", "keep", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where an image comes from, as its labels say. ``created`` is the commit's time."""

    digest: Digest
    revision: str | None = None
    created: datetime | None = None
    dirty: bool = False

    @property
    def name(self) -> str:
        """For people: the commit, else the digest."""
        return self.revision[:12] if self.revision else self.digest.short


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``unclear``: nothing shows which one is newer, so the tag stays."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteResult:
    """``moved``: the tag stands for ``image`` now because of this call. ``previous`` is what it stood for before;
    ``current`` what it stands for now. In a dry run ``moved`` says what would happen.
    """

    image: Reference
    tag: str
    moved: bool
    reason: str
    previous: Digest | None
    current: Digest | None
    clear: bool = True
    dry: bool = False

    @property
    def ok(self) -> bool:
        """False where the tag stayed because nothing shows which image is newer."""
        return self.clear

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "schema": "buildkit/promote/1",
            "image": str(self.image),
            "tag": self.tag,
            "moved": self.moved,
            "reason": self.reason,
            "previous": str(self.previous) if self.previous else None,
            "current": str(self.current) if self.current else None,
            "dry": self.dry,
        }

    def render(self) -> str:
        """One line."""
        verb = ("would move" if self.dry else "moved") if self.moved else "stays"
        return f"{self.image.name}:{self.tag} {verb}: {self.reason}"


def decide(image: Provenance, held: Provenance | None, ancestry: Ancestry, *, force: bool = False) -> Decision:
    """Whether the tag that stands for ``held`` is to stand for ``image``."""
    if held is None:
        return Decision(verdict="move", reason="the tag is new")
    if held.digest == image.digest:
        return Decision(verdict="keep", reason=f"it is {image.name} already")
    found = _compare(image, held, ancestry)
    if force and found.verdict != "move":
        return Decision(verdict="move", reason=f"forced, although {found.reason}")
    return found


def _compare(image: Provenance, held: Provenance, ancestry: Ancestry) -> Decision:
    if image.revision and held.revision:
        if image.revision == held.revision:
            return Decision(verdict="move", reason=f"a rebuild of {image.name}" + (", with changes" * image.dirty))
        if ancestry(held.revision, image.revision):
            return Decision(verdict="move", reason=f"{image.name} comes after {held.name}")
        if ancestry(image.revision, held.revision):
            return Decision(verdict="keep", reason=f"it holds {held.name}, which comes after {image.name}")
    if image.created and held.created:
        ours, theirs = (moment.isoformat().replace("+00:00", "Z") for moment in (image.created, held.created))
        if image.created > held.created:
            return Decision(
                verdict="move", reason=f"{image.name} of {ours} is newer than {held.name} of {theirs}, by their times"
            )
        if image.created < held.created:
            return Decision(
                verdict="keep", reason=f"it holds {held.name} of {theirs}, newer than {image.name} of {ours}"
            )
        return Decision(
            verdict="unclear", reason=f"{image.name} and {held.name} are both of {ours}, and git knows no order of them"
        )
    if not held.revision and not held.created:
        if image.revision or image.created:
            return Decision(verdict="move", reason=f"it held {held.name}, whose labels name no commit")
        return Decision(
            verdict="unclear", reason=f"neither {image.name} nor {held.name}, which it holds, names a commit"
        )
    return Decision(
        verdict="unclear",
        reason=f"nothing shows that {image.name} is newer than {held.name}, which it holds: a label is missing",
    )


# The machine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """What does the tag stand for? The reply is its Provenance, or None."""


@dataclass(frozen=True, slots=True)
class Put:
    """Let the tag stand for the image. The reply is None, or the RegistryError that came of it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Let ``seconds`` pass."""

    seconds: float


Step = Look | Put | Wait
Reply = Provenance | RegistryError | None
Promotion = Generator[Step, Reply, tuple[Decision, Digest | None, Digest | None]]


def promotion(image: Provenance, ancestry: Ancestry, *, force: bool = False, dry: bool = False) -> Promotion:
    """The steps that bring the tag to ``image``, without I/O. Returns the last decision, what the tag stood for at
    first and what it stands for at the end. Raises the last PUT's error, or RegistryError, where the tag never settles.
    """
    held = yield from _look()
    previous = held.digest if held else None
    decision = decide(image, held, ancestry, force=force)
    failed: RegistryError | None = None
    for _ in range(ATTEMPTS):
        if decision.verdict != "move" or dry:
            return decision, previous, held.digest if held else None
        # Deciding takes its time: it reads manifests and asks git. What was decided on must still be there.
        decided, held = held, (yield from _look())
        if held != decided:
            decision = decide(image, held, ancestry, force=force)
            continue
        reply = yield Put()
        failed = reply if isinstance(reply, RegistryError) else None
        # The registry may have stored it all the same: only a look can tell.
        yield Wait(SETTLE)
        held = yield from _look()
        if held is not None and held.digest == image.digest:
            return decision, previous, held.digest
        if held == decided:
            continue  # ours never came to be there, or is lost
        decision = decide(image, held, ancestry)
        if decision.verdict == "move" and held is not None and image.revision and held.revision == image.revision:
            # Two rebuilds of one commit would take the tag from each other for ever.
            decision = Decision(verdict="keep", reason=f"another run has pushed {image.name} meanwhile")
    raise failed or UnreachableError(
        "others move the tag back all the time, or the registry loses it", hint="run the same command again"
    )


def _look() -> Generator[Step, Reply, Provenance | None]:
    held = yield Look()
    assert held is None or isinstance(held, Provenance)
    return held


# The world -----------------------------------------------------------------------------------------------------------


def promote(
    client: RegistryClient,
    image: Reference,
    tag: str,
    *,
    ancestry: Ancestry = lambda _older, _newer: None,
    say: Callable[[str], None] = lambda _: None,
    force: bool = False,
    dry: bool = False,
) -> PromoteResult:
    """Let ``tag`` stand for ``image`` (by digest, in the same repository), unless it stands for something newer.

    The manifest's very bytes are put under the tag. Idempotent: where the tag stands for the image already, nothing is
    sent. A tag that stays with a newer image is no error: see ``PromoteResult.moved`` and ``reason``. ``force`` moves
    it backwards.

    Raises NotFoundError where the image is not there, UsageError for a bad tag, RegistryError.
    """
    if image.digest is None:
        raise UsageError(f"{image} has no digest", hint="write REPOSITORY@sha256:…, as the push printed it")
    split_name(f"{image.repository}:{tag}", f"{image.repository}:{tag}")
    pinned, target = replace(image, tag=None), image.with_tag(tag)
    fetched = client.get_manifest(pinned)
    own = _provenance(client, pinned, fetched, say)
    known = {own.digest: own}
    machine = promotion(own, ancestry, force=force, dry=dry)
    try:
        step = next(machine)
        while True:
            reply: Reply = None
            match step:
                case Look():
                    reply = _look_at(client, target, known, say)
                case Put():
                    say(f"{target}: moving to {own.name}")
                    reply = _put(client, target, fetched)
                case Wait(seconds=seconds):
                    client.pause(seconds)
            step = machine.send(reply)
    except StopIteration as stop:
        decision, previous, current = stop.value
    return PromoteResult(
        image=pinned,
        tag=tag,
        moved=decision.verdict == "move",
        reason=decision.reason,
        previous=previous,
        current=current,
        clear=decision.verdict != "unclear",
        dry=dry,
    )


def _put(client: RegistryClient, target: Reference, fetched: FetchedManifest) -> RegistryError | None:
    try:
        # Not repeated as it is: after a failure somebody newer may hold the tag.
        client.put_manifest(target, fetched.raw, _media_type(fetched), retries=0)
    except (UnreachableError, ProtocolError) as error:
        return error
    return None


def _media_type(fetched: FetchedManifest) -> str:
    own = load_json_object(fetched.raw, where="manifest", limit=len(fetched.raw)).get("mediaType")
    return own if isinstance(own, str) else fetched.media_type


def _look_at(
    client: RegistryClient, target: Reference, known: dict[Digest, Provenance], say: Callable[[str], None]
) -> Provenance | None:
    """``known`` are images that were looked at before: of those the digest says it all."""
    digest = client.head_manifest(target)
    if digest is not None and digest not in known:
        pinned = replace(target, tag=None, digest=digest)
        try:
            known[digest] = _provenance(client, pinned, client.get_manifest(pinned), say)
        except NotFoundError:
            return None  # deleted between the two requests, or a registry that holds a tag to nothing
    return known[digest] if digest is not None else None


def _provenance(
    client: RegistryClient, pinned: Reference, fetched: FetchedManifest, say: Callable[[str], None]
) -> Provenance:
    """From the labels of the image's config, or of the linux/amd64 image of an index; without labels where it has no
    config that can be read."""
    assert pinned.digest is not None
    try:
        labels = _config(client, pinned, fetched).labels
    except ImageError as error:
        say(f"{pinned}: its labels cannot be read: {error.message}")
        return Provenance(digest=pinned.digest)
    return Provenance(
        digest=pinned.digest,
        revision=labels.get(REVISION) or None,
        created=_time(labels.get(CREATED)),
        dirty=labels.get(DIRTY) == "true",
    )


def _config(client: RegistryClient, pinned: Reference, fetched: FetchedManifest) -> ImageConfig:
    where = str(pinned)
    for _ in range(_MAX_NESTING):
        document = load_json_object(fetched.raw, where=where, limit=len(fetched.raw))
        if "manifests" not in document and document.get("mediaType") not in INDEX_TYPES:
            manifest = Manifest.parse(fetched.raw, where=where, media_type=fetched.media_type)
            if manifest.config.size > _MAX_CONFIG:
                raise ImageError(f"{where}: config of {manifest.config.size} bytes")
            raw = b"".join(client.read_blob(pinned.repository, manifest.config))
            manifest.config.digest.check(raw, f"{where}: config")
            return ImageConfig.parse(raw, where=f"{where}: config")
        index = Index.parse(fetched.raw, where=where, media_type=fetched.media_type)
        try:
            chosen = index.select(Platform(), where=where)
        except UsageError:
            if len(index.images) != 1:
                raise ImageError(f"{where} has no image for {Platform()}") from None
            chosen = index.images[0]
        fetched = client.get_manifest(replace(pinned, digest=chosen.digest))
    raise ImageError(f"{where}: more than {_MAX_NESTING} indexes lie within each other")


def _time(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
        return moment.astimezone(UTC) if moment is not None and moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
