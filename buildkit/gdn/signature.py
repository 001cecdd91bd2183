"""Answers of a server against the reference, and which fault explains them. Pure.

Each answer is followed token by token: the reference is given the server's own tokens and says at each place what it
would have chosen. So a place is judged by what the server had seen there, and one near-tie does not spoil the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from buildkit.gdn.decoder import Choice, Decoder, DecoderState, choices
from buildkit.gdn.faults import Fault
from buildkit.gdn.reference import Array

TIES = {"f32": 1e-4, "f16": 0.02, "bf16": 0.12}
"""How far below the best a token's logit may be and still be right, in units of the logits' root mean square. The error
of a right server in that dtype, measured with transformers on the probe checkpoint, is a fifth of it at most."""

OUTPUT_RANGE = {"f32": 1e18, "f16": 6e4, "bf16": 1e18}
"""Largest GDN output that a server computing in that dtype can go on with: what float16 holds, and what float32 can
square in the norm. Beyond it the tokens of a reference with a fault mean nothing."""
UNSTABLE = {Fault.L2_NORM_OTHERS_RAW: {"f32": 1e18, "f16": 10.0, "bf16": 1.0}}
"""The same for faults that make keys longer than one: the recurrence then amplifies what rounding has left, and half a
dozen bits are gone where the outputs have grown a thousand times (measured with transformers)."""
STATE_RANGE = 1e37
"""The recurrent state is float32 in every server known."""

COMPARABLE = 8
"""Places that must be comparable before a fault may be said to explain an image."""


class Place(Enum):
    """One token of an answer."""

    IDENTICAL = "identical"
    NEAR_TIE = "near tie"
    WRONG = "wrong"
    UNKNOWN = "not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A prompt and the tokens that a server answered, in the order in which they were asked."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One place judged: what the reference chooses there, its logprob of the token answered, and its state."""

    place: Place
    wanted: int
    logprob: float
    state: DecoderState


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An exchange judged. ``wanted`` is what the reference chooses at each place; ``logprobs`` the reference's for the
    tokens answered."""

    places: tuple[Place, ...]
    wanted: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def identical(self) -> int:
        return self.places.count(Place.IDENTICAL)

    @property
    def ties(self) -> int:
        return self.places.count(Place.NEAR_TIE)

    @property
    def first_wrong(self) -> int | None:
        return self.places.index(Place.WRONG) if Place.WRONG in self.places else None


def follow(
    model: Decoder, exchange: Exchange, dtype: str, *, fault: Fault | None = None, stale: DecoderState | None = None
) -> Iterator[Step]:
    """Judge an exchange place by place by the reference, or by a reference with ``fault``; ``stale`` as in
    ``decoder.fresh_state``."""
    run = choices(model, exchange.prompt, given=exchange.answer, fault=fault, stale=stale)
    for token in exchange.answer:
        with np.errstate(all="ignore"):  # a fault may drive values out of every range
            choice = next(run)
        yield Step(
            place=place(choice, token, dtype, fault),
            wanted=int(np.argmax(choice.logits)),
            logprob=float(log_softmax(choice.logits)[token]),
            state=choice.state,
        )


def judge(model: Decoder, exchange: Exchange, dtype: str) -> Answer:
    """The whole exchange by the reference without a fault."""
    steps = tuple(follow(model, exchange, dtype))
    return Answer(
        places=tuple(step.place for step in steps),
        wanted=tuple(step.wanted for step in steps),
        logprobs=tuple(step.logprob for step in steps),
    )


def place(choice: Choice, token: int, dtype: str, fault: Fault | None = None) -> Place:
    """What ``token`` is where the reference (with ``fault``) had ``choice``."""
    limit = UNSTABLE.get(fault, OUTPUT_RANGE)[dtype] if fault else OUTPUT_RANGE[dtype]
    in_range = choice.largest_output < limit and choice.largest_state < STATE_RANGE
    if not in_range or not np.all(np.isfinite(choice.logits)):
        return Place.UNKNOWN
    if token == int(np.argmax(choice.logits)):
        return Place.IDENTICAL
    return Place.NEAR_TIE if is_tie(choice.logits, token, dtype) else Place.WRONG


def is_tie(row: Array, token: int, dtype: str) -> bool:
    """Whether ``token`` is as good as the best within the dtype's error."""
    if not 0 <= token < row.size:
        return False
    scale = float(np.sqrt(np.mean(row[row != 0.0] ** 2))) if np.any(row) else 0.0
    return float(np.max(row) - row[token]) <= TIES[dtype] * scale


def log_softmax(row: Array) -> Array:
    """Natural logarithms of the probabilities."""
    shifted = row - np.max(row)
    out: Array = shifted - np.log(np.sum(np.exp(shifted)))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A fault that gives the server's tokens at each place where it can be told: ``explained`` of ``places``."""

    fault: Fault
    explained: int
    places: int

    @property
    def sentence(self) -> str:
        return f"{self.explained} of {self.places} tokens as with *{self.fault.sentence}*: {self.fault.consequence}"


def diagnose(model: Decoder, exchanges: Sequence[Exchange], dtype: str) -> tuple[Explanation, ...]:
    """The faults that reproduce the answers, all of them; the exchanges in the order in which they were asked."""
    found = (_explanation(model, exchanges, dtype, fault) for fault in Fault)
    return tuple(one for one in found if one is not None)


def _explanation(model: Decoder, exchanges: Sequence[Exchange], dtype: str, fault: Fault) -> Explanation | None:
    explained = 0
    stale: DecoderState | None = None
    for exchange in exchanges:
        before = stale if fault is Fault.STATE_NOT_RESET else None
        for step in follow(model, exchange, dtype, fault=fault, stale=before):
            if step.place is Place.WRONG:
                return None
            explained += step.place is not Place.UNKNOWN
            stale = step.state
    if explained < COMPARABLE:
        return None
    return Explanation(fault=fault, explained=explained, places=sum(len(e.answer) for e in exchanges))


def tells_apart(one: Sequence[Choice], other: Sequence[Choice], dtype: str, fault: Fault | None = None) -> bool:
    """Whether ``one``'s tokens cannot be ``other``'s (which has ``fault``), with all that rounding in ``dtype`` may do:
    at the first place where the two differ, both having seen the same until then, ``other`` would not have chosen what
    ``one`` chose."""
    for a, b in zip(one, other, strict=True):
        if a.token != b.token:
            return place(b, a.token, dtype, fault) is Place.WRONG
    return False
