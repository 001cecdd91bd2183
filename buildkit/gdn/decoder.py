"""A small Qwen3.5 decoder in NumPy float64: gated delta net and gated full attention in turn, each with an MLP.

Source: the ``qwen3_5`` model of transformers, whose tensor names ``buildkit.gdn.checkpoint`` reads and writes. Letters:
T tokens of one sequence, H hidden size, A attention heads, N key/value heads, E their head dim. Every norm weighs by
1 + w, but for the one inside the gated delta net, which weighs by w.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from buildkit.gdn.faults import Fault
from buildkit.gdn.layer import GdnShape, GdnState, GdnTrace, GdnWeights, linear_attention
from buildkit.gdn.reference import Array, rms_norm, sigmoid, silu

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """``rotary`` is how many of a head's E dims are rotated; ``eps`` that of every norm."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerType, ...]
    gdn: GdnShape
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    rope_theta: float = 1e7
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """``q_proj`` [A·2E, H]: for each head its query and then its gate; ``k_proj``, ``v_proj`` [N·E, H];
    ``o_proj`` [H, A·E]; ``q_norm``, ``k_norm`` [E]."""

    q_proj: Array
    k_proj: Array
    v_proj: Array
    o_proj: Array
    q_norm: Array
    k_norm: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. ``gate_proj``, ``up_proj`` [I, H] and ``down_proj`` [H, I] are the MLP's."""

    mixer: GdnWeights | AttentionWeights
    input_norm: Array
    post_norm: Array
    gate_proj: Array
    up_proj: Array
    down_proj: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model: its shape and its tensors. ``embedding`` and ``head`` are [vocabulary, H]."""

    shape: DecoderShape
    embedding: Array
    layers: tuple[LayerWeights, ...]
    norm: Array
    head: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Keys (rotated) and values of a full-attention layer, [tokens so far, N, E]."""

    keys: Array
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderState:
    """What one sequence carries: ``position`` tokens so far, and each layer's state."""

    position: int
    layers: tuple[GdnState | KvCache, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one forward pass gave: ``hidden`` [T, H], the last layer's output after the final norm; ``logits``
    [T, vocabulary] from it; the state after the pass, and each GDN layer's trace."""

    hidden: Array
    logits: Array
    state: DecoderState
    traces: tuple[GdnTrace, ...]


def fresh_state(shape: DecoderShape, stale: DecoderState | None = None) -> DecoderState:
    """The state of a new sequence. With ``stale``, that of a server which forgets to reset the recurrent state (and
    nothing else) of the sequence before (Fault.STATE_NOT_RESET)."""
    layers: list[GdnState | KvCache] = []
    for number, kind in enumerate(shape.layers):
        if kind == "full_attention":
            empty = np.zeros((0, shape.kv_heads, shape.head_dim))
            layers.append(KvCache(keys=empty, values=empty))
            continue
        zeros = GdnState.zeros(shape.gdn)
        before = stale.layers[number] if stale else zeros
        assert isinstance(before, GdnState)
        layers.append(GdnState(conv=zeros.conv, recurrent=before.recurrent))
    return DecoderState(position=0, layers=tuple(layers))


def forward(
    model: Decoder, tokens: Sequence[int], state: DecoderState | None = None, fault: Fault | None = None
) -> Pass:
    """``tokens`` of one sequence after ``state`` (None: at its start). One token after others is a decode step, which
    is where some faults differ from a prompt's."""
    shape = model.shape
    before = state or fresh_state(shape)
    decode = before.position > 0 and len(tokens) == 1
    x = model.embedding[list(tokens)]
    rotation = _rotation(shape, before.position, len(tokens))
    states: list[GdnState | KvCache] = []
    traces = []
    for weights, carried in zip(model.layers, before.layers, strict=True):
        normed = rms_norm(x, weights.input_norm, shape.eps)
        if isinstance(weights.mixer, GdnWeights):
            assert isinstance(carried, GdnState)
            mixed, trace, after = linear_attention(
                normed, weights.mixer, shape.gdn, carried, decode=decode, fault=fault
            )
            traces.append(trace)
            states.append(after)
        else:
            assert isinstance(carried, KvCache)
            mixed, cache = full_attention(normed, weights.mixer, shape, carried, rotation)
            states.append(cache)
        x = x + mixed
        normed = rms_norm(x, weights.post_norm, shape.eps)
        x = x + (silu(normed @ weights.gate_proj.T) * (normed @ weights.up_proj.T)) @ weights.down_proj.T
    hidden = rms_norm(x, model.norm, shape.eps)
    after_all = DecoderState(position=before.position + len(tokens), layers=tuple(states))
    return Pass(hidden=hidden, logits=hidden @ model.head.T, state=after_all, traces=tuple(traces))


def full_attention(
    x: Array, weights: AttentionWeights, shape: DecoderShape, cache: KvCache, rotation: tuple[Array, Array]
) -> tuple[Array, KvCache]:
    """Causal attention with grouped key/value heads, q and k normalised and partly rotated, and a sigmoid gate on its
    output: x [T, H] → [T, H] and the cache with T more tokens."""
    tokens, heads, dim = x.shape[0], shape.heads, shape.head_dim
    both = (x @ weights.q_proj.T).reshape(tokens, heads, 2 * dim)
    gate = both[..., dim:].reshape(tokens, heads * dim)
    q = _rotate(rms_norm(both[..., :dim], weights.q_norm, shape.eps), rotation)
    k = (x @ weights.k_proj.T).reshape(tokens, shape.kv_heads, dim)
    k = _rotate(rms_norm(k, weights.k_norm, shape.eps), rotation)
    v = (x @ weights.v_proj.T).reshape(tokens, shape.kv_heads, dim)
    keys, values = np.concatenate([cache.keys, k]), np.concatenate([cache.values, v])

    # heads first; key/value head n serves the A/N consecutive query heads from n·A/N on
    group = heads // shape.kv_heads
    all_keys, all_values = (np.repeat(np.swapaxes(t, 0, 1), group, axis=0) for t in (keys, values))
    scores = np.swapaxes(q, 0, 1) @ np.swapaxes(all_keys, 1, 2) * dim**-0.5
    seen = np.arange(keys.shape[0]) <= (keys.shape[0] - tokens + np.arange(tokens))[:, None]
    scores = np.where(seen, scores, -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    out = np.swapaxes(share @ all_values, 0, 1).reshape(tokens, heads * dim)
    return (out * sigmoid(gate)) @ weights.o_proj.T, KvCache(keys=keys, values=values)


def _rotation(shape: DecoderShape, first: int, tokens: int) -> tuple[Array, Array]:
    """cos and sin of the rotary angles, [tokens, 1, rotary]; the second half repeats the first."""
    frequencies = shape.rope_theta ** -(np.arange(0, shape.rotary, 2) / shape.rotary)
    angles = (first + np.arange(tokens))[:, None] * frequencies
    angles = np.concatenate([angles, angles], axis=-1)[:, None, :]
    return np.cos(angles), np.sin(angles)


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate the first dims of each head: (a, b) → (a·cos - b·sin, b·cos + a·sin) for its two halves a and b."""
    cos, sin = rotation
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = np.split(turned, 2, axis=-1)
    return np.concatenate([turned * cos + np.concatenate([-b, a], axis=-1) * sin, rest], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One place of an answer: the ``token`` taken, the ``logits`` [vocabulary] that it was taken from, the state that
    they came from, and the largest absolute GDN output and recurrent state of this sequence until then."""

    token: int
    logits: Array
    state: DecoderState
    largest_output: float
    largest_state: float


def choices(
    model: Decoder,
    prompt: Sequence[int],
    *,
    given: Sequence[int] = (),
    stale: DecoderState | None = None,
    fault: Fault | None = None,
) -> Iterator[Choice]:
    """The answer to ``prompt``, token by token and without end: those in ``given``, and then always the most likely.

    With tokens given, the logits are what this model would have chosen from in the place of whoever chose. A token is
    fed when the next one is asked for.
    """
    step = forward(model, prompt, fresh_state(model.shape, stale), fault)
    output = state = 0.0
    for number in itertools.count():
        logits = step.logits[-1]
        output = max([output, *(float(np.max(np.abs(trace.o))) for trace in step.traces)])
        states = (layer.recurrent for layer in step.state.layers if isinstance(layer, GdnState))
        state = max([state, *(float(np.max(np.abs(recurrent))) for recurrent in states)])
        token = given[number] if number < len(given) else int(np.argmax(logits))
        yield Choice(token=token, logits=logits, state=step.state, largest_output=output, largest_state=state)
        step = forward(model, [token], step.state, fault)


def complete(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    given: Sequence[int] = (),
    stale: DecoderState | None = None,
    fault: Fault | None = None,
) -> tuple[Choice, ...]:
    """The first ``count`` of ``choices``. The last token is not fed any more, as in a server that stops there."""
    return tuple(itertools.islice(choices(model, prompt, given=given, stale=stale, fault=fault), count))
