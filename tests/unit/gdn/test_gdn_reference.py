"""Properties of the float64 reference, each named after what the formulas promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.gdn import reference as ref
from buildkit.gdn.checkpoint import Make, make
from buildkit.gdn.decoder import Decoder, DecoderShape, complete, forward
from buildkit.gdn.faults import Fault
from buildkit.gdn.layer import GdnShape, GdnState, l2_norm_with, linear_attention
from buildkit.gdn.reference import Array

SHAPES = st.builds(
    lambda heads, group, key, value, width: GdnShape(
        key_heads=heads, value_heads=heads * group, key_dim=key, value_dim=value, conv_width=width
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([2, 5, 8]),
    st.sampled_from([1, 4, 7]),
    st.integers(2, 4),
)
SEEDS = st.integers(0, 2**32 - 1)


def close(got: Array, want: Array) -> bool:
    return bool(np.allclose(got, want, rtol=1e-9, atol=1e-9))


def model_of(shape: GdnShape, seed: int) -> Decoder:
    return make(
        DecoderShape(
            vocabulary=11,
            hidden=12,
            intermediate=8,
            layers=("linear_attention", "full_attention"),
            gdn=shape,
            heads=2,
            kv_heads=1,
            head_dim=8,
            rotary=4,
        ),
        seed,
        Make(),
    )


def drawn(shape: GdnShape, tokens: int, seed: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    """q, k, v, g, beta and a state."""
    rng = np.random.default_rng(seed)
    heads = shape.value_heads
    q, k = (ref.l2_norm(rng.standard_normal((tokens, heads, shape.key_dim))) for _ in range(2))
    v = rng.standard_normal((tokens, heads, shape.value_dim))
    g = -np.abs(rng.standard_normal((tokens, heads)))
    beta = ref.sigmoid(rng.standard_normal((tokens, heads)))
    return q, k, v, g, beta, rng.standard_normal((heads, shape.key_dim, shape.value_dim))


@given(SHAPES, st.integers(1, 150), SEEDS, st.sampled_from([1, 3, 64]))
@settings(max_examples=40, deadline=None)
def test_the_chunked_form_is_the_recurrent_form(shape: GdnShape, tokens: int, seed: int, chunk: int) -> None:
    q, k, v, g, beta, state = drawn(shape, tokens, seed)
    o, after = ref.delta_rule(q, k, v, np.exp(g), beta, state)
    o_chunked, after_chunked = ref.delta_rule_chunked(q, k, v, g, beta, state, chunk)
    assert close(o_chunked, o)
    assert close(after_chunked, after)


@given(SHAPES, st.integers(1, 12), SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_recurrence_is_its_formula_written_with_scalars(shape: GdnShape, tokens: int, seed: int) -> None:
    q, k, v, g, beta, state = drawn(shape, tokens, seed)
    o, after = ref.delta_rule(q, k, v, np.exp(g), beta, state)
    for h in range(shape.value_heads):
        s = [list(row) for row in state[h]]
        for t in range(tokens):
            s = [[math.exp(g[t, h]) * x for x in row] for row in s]
            held = [sum(s[i][j] * k[t, h, i] for i in range(len(s))) for j in range(len(s[0]))]
            u = [beta[t, h] * (v[t, h, j] - held[j]) for j in range(len(held))]
            s = [[s[i][j] + k[t, h, i] * u[j] for j in range(len(u))] for i in range(len(s))]
            for j in range(len(u)):
                assert o[t, h, j] == pytest.approx(sum(s[i][j] * q[t, h, i] for i in range(len(s))), abs=1e-9)
        assert close(after[h], np.array(s))


@given(SHAPES, st.integers(1, 40), SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_convolution_sees_the_last_inputs_and_none_before_the_start(
    shape: GdnShape, tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((tokens, shape.channels)), rng.standard_normal((shape.channels, shape.conv_width))
    y, state = ref.causal_conv(x, weight)
    for t in range(tokens):
        total = np.zeros(shape.channels)
        for w in range(shape.conv_width):
            source = t - shape.conv_width + 1 + w
            if source >= 0:
                total += x[source] * weight[:, w]
        assert close(y[t], total / (1 + np.exp(-total)))
    padded = np.concatenate([np.zeros((shape.conv_width - 1, shape.channels)), x])
    assert np.array_equal(state, padded[-(shape.conv_width - 1) :].T)


@given(SHAPES, st.integers(2, 90), st.data(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_a_token_does_not_see_what_comes_after_it(shape: GdnShape, tokens: int, data: st.DataObject, seed: int) -> None:
    model = model_of(shape, seed)
    at = data.draw(st.integers(1, tokens - 1))
    rng = np.random.default_rng(seed)
    one = rng.integers(0, 11, tokens).tolist()
    other = one[:at] + rng.integers(0, 11, tokens - at).tolist()
    assert close(forward(model, one).logits[:at], forward(model, other).logits[:at])


@given(SHAPES, st.integers(2, 90), st.data(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_two_halves_with_carried_state_are_one_pass(
    shape: GdnShape, tokens: int, data: st.DataObject, seed: int
) -> None:
    model = model_of(shape, seed)
    at = data.draw(st.integers(1, tokens - 1))
    ids = np.random.default_rng(seed).integers(0, 11, tokens).tolist()
    whole = forward(model, ids)
    first = forward(model, ids[:at])
    second = forward(model, ids[at:], first.state)
    assert close(np.concatenate([first.logits, second.logits]), whole.logits)
    for got, want in zip(second.state.layers, whole.state.layers, strict=True):
        if isinstance(got, GdnState) and isinstance(want, GdnState):
            assert close(got.conv, want.conv)
            assert close(got.recurrent, want.recurrent)


@given(SHAPES, st.integers(1, 20), SEEDS)
@settings(max_examples=15, deadline=None)
def test_decoding_one_by_one_is_a_prompt_with_the_same_tokens(shape: GdnShape, tokens: int, seed: int) -> None:
    model = model_of(shape, seed)
    ids = np.random.default_rng(seed).integers(0, 11, tokens).tolist()
    done = complete(model, ids, 4)
    whole = forward(model, [*ids, *(choice.token for choice in done)])
    assert close(np.stack([choice.logits for choice in done]), whole.logits[tokens - 1 : -1])
    assert all(choice.token == int(choice.logits.argmax()) for choice in done)


@given(SHAPES, SEEDS)
@settings(max_examples=15, deadline=None)
def test_no_decay_and_full_strength_recall_what_was_written(shape: GdnShape, seed: int) -> None:
    # one key written with beta = 1 and g = 0, then asked for: the delta rule gives back the value
    q, _, v, _, _, _ = drawn(shape, 1, seed)
    q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True))
    ones, state = np.ones((1, shape.value_heads)), np.zeros((shape.value_heads, shape.key_dim, shape.value_dim))
    o, _ = ref.delta_rule(q, q, v, ones, ones, state)
    assert close(o, v)


@given(SEEDS, st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_a_warp_that_reduces_wrongly_is_right_in_lane_0(seed: int, dim: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, dim))
    right = ref.l2_norm(x)
    for fault in (Fault.L2_NORM_LANE_0, Fault.L2_NORM_OTHERS_RAW):
        assert close(l2_norm_with(x, fault)[:, ::32], right[:, ::32])
    squares = np.sum(x * x, axis=-1)
    assert close(np.sum(right**2, axis=-1), squares / (squares + ref.L2_EPS))


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_of_the_layer_changes_its_output_and_nothing_is_changed_without_one(fault: Fault) -> None:
    shape = GdnShape(key_heads=2, value_heads=4, key_dim=64, value_dim=64)
    model = model_of(shape, 3)
    weights = model.layers[0].mixer
    x = model.embedding[[1, 2, 3, 4, 5, 6, 7, 8]]
    zeros = GdnState.zeros(shape)
    _, _, state = linear_attention(x, weights, shape)  # type: ignore[arg-type]
    if fault is Fault.STATE_NOT_RESET:  # the caller's: it starts with the state of the sequence before
        good, _, _ = linear_attention(x, weights, shape, zeros)  # type: ignore[arg-type]
        bad, _, _ = linear_attention(x, weights, shape, GdnState(conv=zeros.conv, recurrent=state.recurrent))  # type: ignore[arg-type]
        assert not close(good, bad)
        return
    good, _, after = linear_attention(x, weights, shape)  # type: ignore[arg-type]
    bad, _, bad_after = linear_attention(x, weights, shape, fault=fault)  # type: ignore[arg-type]
    good_next, _, _ = linear_attention(x[:1], weights, shape, after, decode=True)  # type: ignore[arg-type]
    bad_next, _, _ = linear_attention(x[:1], weights, shape, bad_after, decode=True, fault=fault)  # type: ignore[arg-type]
    in_decode_only = fault in (Fault.CONV_STATE_DROPPED, Fault.CONV_STATE_FROZEN, Fault.CONV_STATE_UNREAD)
    assert close(good, bad) == in_decode_only
    if fault is not Fault.CONV_STATE_FROZEN:  # that one shows from the second decoded token on
        assert not close(good_next, bad_next)


def test_keys_longer_than_one_do_not_spoil_the_tokens_before_them() -> None:
    # With unnormalised keys the state explodes, and a chunk solved at once has its last tokens' error in its first.
    shape = GdnShape(key_heads=1, value_heads=1, key_dim=64, value_dim=8)
    rng = np.random.default_rng(5)
    model = model_of(shape, 5)
    weights = model.layers[0].mixer
    x = 40.0 * rng.standard_normal((64, 12))
    whole, _, _ = linear_attention(x, weights, shape, fault=Fault.L2_NORM_OTHERS_RAW)  # type: ignore[arg-type]
    short, _, _ = linear_attention(x[:8], weights, shape, fault=Fault.L2_NORM_OTHERS_RAW)  # type: ignore[arg-type]
    assert close(whole[:8], short)
