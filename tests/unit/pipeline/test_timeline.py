"""The notes that are taken of a push."""

from __future__ import annotations

from buildkit.model import Digest
from buildkit.pipeline.timeline import MAX_EVENTS, Recorder
from buildkit.progress import Quiet
from buildkit.registry.events import (
    BytesAcknowledged,
    Event,
    LimitFound,
    QuirkMet,
    Restarted,
    Retrying,
    UploadFinished,
    UploadStarted,
    WaitingForPeer,
)
from buildkit.registry.quirks import Quirk


def test_events_are_noted_with_their_time_after_the_push_began() -> None:
    now = [100.0]
    recorder = Recorder(Quiet(), clock=lambda: now[0])
    now[0] = 110.0
    events = (
        UploadStarted(blob="layer 1", size=10),
        BytesAcknowledged(blob="layer 1", offset=5, size=10, sent=5, seconds=0.5),
        Retrying(blob="layer 1", reason="503", wait=2.0, left=3),
        LimitFound(blob="layer 1", refused=10, chunk=5, who="the edge"),
        Restarted(blob="layer 1", reason="poisoned", lost=5),
        QuirkMet(blob="layer 1", quirk=next(iter(Quirk))),
        WaitingForPeer(blob="layer 1"),
        UploadFinished(blob="layer 1", digest=Digest.of(b""), size=10, seconds=7.0),
    )
    recorder.notify(events[0])  # before the push: somebody else's
    with recorder.push():
        for event in events:
            now[0] += 1
            recorder.notify(event)
    recorder.notify(events[0])
    notes = recorder.events
    assert [note.event for note in notes] == ["started", "acknowledged", "retrying", "limit", "restarted", "finished"]
    assert [note.at for note in notes] == [1, 2, 3, 4, 5, 8]
    assert "503" in notes[2].text
    assert notes[3].size == 10


def test_a_push_without_end_does_not_fill_the_memory() -> None:
    recorder = Recorder(Quiet(), clock=lambda: 0.0)
    with recorder.push():
        for number in range(MAX_EVENTS + 7):
            recorder.notify(UploadStarted(blob=f"layer {number}", size=1))
    assert len(recorder.events) == MAX_EVENTS
    assert recorder.dropped == 7


class Full(Quiet):
    """A log on a full disk."""

    def say(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    def notify(self, event: Event, /) -> None:
        raise BrokenPipeError


def test_a_log_that_takes_nothing_more_ends_no_push_and_no_notes() -> None:
    recorder = Recorder(Full(), clock=lambda: 0.0)
    recorder.say("building")
    retrying = Retrying(blob="layer 1", reason="503", wait=2.0, left=3)
    recorder.notify(retrying)
    with recorder.push():
        recorder.notify(retrying)
    assert [note.event for note in recorder.events] == ["retrying"]


def test_secrets_are_kept_out_of_what_is_said_and_of_json() -> None:
    lines: list[str] = []

    class Kept(Quiet):
        def say(self, text: str) -> None:
            lines.append(text)

    recorder = Recorder(Kept(), lambda: 0.0, secrets=["s3cr&t"])
    recorder.say("a build prints s3cr&t and s3cr%26t")
    assert lines == ["a build prints *** and ***"]
    assert recorder.masked({"s3cr&t": ["x s3cr&t", 1, None, {"a": "s3cr&amp;t"}]}) == {
        "***": ["x ***", 1, None, {"a": "***"}]
    }
