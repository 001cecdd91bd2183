"""How a registry takes chunks, found out with a few kilobytes in one session that is cancelled afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from buildkit.doctor.seen import ChunksSeen, Exchange, Offset
from buildkit.doctor.uploads import Session, Uploads
from buildkit.registry.answers import is_poisoned
from buildkit.registry.location import stored_bytes
from buildkit.registry.quirks import Quirk
from buildkit.registry.upload import STORED

PIECE = 8192
"""Bytes of one chunk, where the registry does not ask for more. Equal for all: some stores want equal parts."""
LARGEST_PIECE = 200_000
"""A registry that wants larger chunks than this is tried with smaller ones all the same: what it minds about small
parts it says when an upload is closed, and none is closed here."""

_LOOKS = 3
"""How often a session is asked again whose last chunk broke off: the registry may notice that a little later."""


def probe(uploads: Uploads, session: Session) -> ChunksSeen:
    """Send a chunk, ask for the offset, claim a wrong place, break off, go on. The session is not cancelled here."""
    return _Probe(uploads, session).run()


@dataclass(slots=True)
class _Probe:
    uploads: Uploads
    session: Session
    _stored: int = 0
    _one_high: bool = False
    _quirks: dict[Quirk, None] = field(default_factory=dict)

    def run(self) -> ChunksSeen:
        opened = self.session.opened.answer
        assert opened is not None
        smallest = opened.headers.number("oci-chunk-min-length")
        largest = opened.headers.number("oci-chunk-max-length")
        size = max(min(max(PIECE, smallest or 0), LARGEST_PIECE, largest or LARGEST_PIECE), 2)
        seen = ChunksSeen(location=self.session.location, smallest=smallest, largest=largest)
        if largest is not None or "_stateHash" in self.session.url:
            self._note(Quirk.EQUAL_PARTS)
        if self.session.location.form == "missing":
            self._note(Quirk.NO_LOCATION)
        if not self.session.url:
            return replace(seen, quirks=tuple(self._quirks))
        first = self.uploads.patch(self.session, size, start=0)
        if first is None or first.status not in STORED:
            return replace(seen, refusal=first, quirks=tuple(self._quirks))
        self._stored = size
        seen = replace(seen, stored=True, acknowledged=self._acknowledged(first), offset=self._ask_offset())
        if seen.offset != "lost":
            seen = replace(seen, content_range=self._misplace(size))
            # A session whose address is signed for its size can neither go on nor be cancelled after a broken chunk.
            signed = self.session.told[-1].state
            seen = replace(seen, after_break="signed" if signed else self._break_off(size))
        if any(told.form == "absolute" and not told.other_host and (told.other_scheme or told.other_port)
               for told in self.session.told):  # fmt: skip
            self._note(Quirk.LOCATION_REWRITTEN)
        return replace(seen, quirks=tuple(self._quirks))

    def _note(self, quirk: Quirk) -> None:
        self._quirks[quirk] = None

    def _acknowledged(self, exchange: Exchange) -> Offset:
        answer = exchange.answer
        assert answer is not None
        header = answer.headers.get("range")
        if header is None:
            self._note(Quirk.NO_RANGE)
            return "not told"
        told = stored_bytes(header)
        if told == self._stored + 1:
            self._note(Quirk.PATCH_ONE_HIGH)
            return "one high"
        return "right" if told == self._stored else "wrong"

    def _ask_offset(self) -> Offset:
        exchange = self.uploads.status(self.session)
        answer = exchange.answer
        if answer is None:
            return "failed"
        if answer.status in (405, 501):
            self._note(Quirk.NO_STATUS)
            return "unsupported"
        if answer.status in (400, 404):
            return "lost"
        if answer.status not in (200, 202, 204):
            return "failed"
        told = stored_bytes(answer.headers.get("range"))
        if told is None:
            return "not told"
        if told == self._stored + 1:
            self._one_high = True
            self._note(Quirk.STATUS_ONE_HIGH)
            return "one high"
        return "right" if told == self._stored else "wrong"

    def _misplace(self, size: int) -> Literal["honoured", "ignored", "unclear"]:
        """A chunk that claims to begin where nothing has come yet."""
        exchange = self.uploads.patch(self.session, size, start=self._stored + size)
        if exchange is None:
            return "unclear"
        if exchange.status in STORED:
            self._stored += size
            return "ignored"
        if exchange.status in (400, 409, 416):
            return "honoured"
        return "unclear"

    def _break_off(self, size: int) -> Literal["goes on", "starts again", "poisoned", "unclear"]:
        """A chunk that ends half-way, as when a client dies; then what a client does that comes back."""
        self.uploads.patch(self.session, size, start=self._stored, stop=size // 2)
        for _ in range(_LOOKS):
            exchange = self.uploads.status(self.session)
            answer = exchange.answer
            if answer is None:
                return "unclear"
            if answer.status not in (200, 202, 204):
                return "starts again"
            told = stored_bytes(answer.headers.get("range"))
            offset = self._stored if told is None else told - 1 if self._one_high and told > 0 else told
            if not self._stored <= offset <= self._stored + size:
                return "starts again"
            again = self.uploads.patch(self.session, size, start=offset)
            if again is None or again.answer is None:
                return "unclear"
            if again.status in STORED:
                return "goes on"
            if is_poisoned(again.answer):
                self._note(Quirk.POISONED_SESSION)
                return "poisoned"
            if again.status in (400, 404):
                return "starts again"
            if again.status != 416:
                return "unclear"
        return "starts again"
