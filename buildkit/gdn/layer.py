"""One gated-delta-net layer: the stages of ``reference`` put together, with a fault injected on request.

``linear_attention`` is the layer as the formulas have it; every ``fault is`` in it is one known way to get it wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buildkit.gdn import reference as ref
from buildkit.gdn.faults import Fault
from buildkit.gdn.reference import Array

WARP = 32

_TOKEN_BY_TOKEN = (
    Fault.DECAY_TWICE,
    Fault.DECAY_RAW,
    Fault.DECAY_IGNORED,
    Fault.L2_NORM_LANE_0,
    Fault.L2_NORM_OTHERS_RAW,
)
"""Faults that the chunked form of the delta rule, otherwise the faster one for a prompt, cannot compute: its decay is
an exp(g), and with keys longer than 1 the state grows from token to token, so that solving a whole chunk at once leaves
errors of its last tokens' size in its first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnShape:
    """Hk, Hv, K, V and W of ``reference``; ``eps`` is that of the gated norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    eps: float = 1e-6

    @property
    def key_channels(self) -> int:
        """Channels of the q band, and of the k band."""
        return self.key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """D, the channels of the convolution."""
        return 2 * self.key_channels + self.value_channels

    def bands(self) -> dict[str, slice]:
        """The channels of q, k and v in [.., D]."""
        k = self.key_channels
        return {"q": slice(0, k), "k": slice(k, 2 * k), "v": slice(2 * k, self.channels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnWeights:
    """One layer's tensors as ``transformers`` stores them: [out, in] matrices; ``conv`` is [D, W]."""

    in_proj_qkv: Array
    in_proj_z: Array
    in_proj_b: Array
    in_proj_a: Array
    conv: Array
    a_log: Array
    dt_bias: Array
    norm: Array
    out_proj: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnState:
    """What one sequence carries from call to call: ``conv`` [D, W-1] and ``recurrent`` [Hv, K, V]."""

    conv: Array
    recurrent: Array

    @classmethod
    def zeros(cls, shape: GdnShape) -> GdnState:
        return cls(
            conv=np.zeros((shape.channels, shape.conv_width - 1)),
            recurrent=np.zeros((shape.value_heads, shape.key_dim, shape.value_dim)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnTrace:
    """What each stage gave, for stage-by-stage comparison: conv [T, D]; q, k [T, Hv, K] as they enter the recurrence;
    g, beta [T, Hv]; o and normed [T, Hv, V]."""

    conv: Array
    q: Array
    k: Array
    g: Array
    beta: Array
    o: Array
    normed: Array


def l2_norm_with(x: Array, fault: Fault | None) -> Array:
    """``reference.l2_norm``, or what a warp computes whose reduced sum reaches only lane 0.

    Lane i of 32 holds the elements i, i+32, … of a row. ``L2_NORM_LANE_0`` is a reduction by ``__shfl_down_sync``:
    lane 0 ends with the sum of all, lane i with what the shifts left there (a lane beyond the warp's end gives the
    lane's own value, CUDA C++ Programming Guide, "Warp Shuffle Functions"). With ``L2_NORM_OTHERS_RAW`` the other
    lanes pass their elements on as they are.
    """
    if fault not in (Fault.L2_NORM_LANE_0, Fault.L2_NORM_OTHERS_RAW):
        return ref.l2_norm(x)
    lane = np.arange(x.shape[-1]) % WARP
    if fault is Fault.L2_NORM_OTHERS_RAW:
        return np.where(lane == 0, ref.l2_norm(x), x)
    sums = np.stack([np.sum(np.where(lane == i, x * x, 0.0), axis=-1) for i in range(WARP)], axis=-1)
    for offset in (16, 8, 4, 2, 1):
        source = np.arange(WARP) + offset
        sums = sums + sums[..., np.where(source < WARP, source, np.arange(WARP))]
    return x / np.sqrt(sums[..., lane] + ref.L2_EPS)


def decay_with(g: Array, fault: Fault | None) -> Array:
    """exp(g), or the factor that a faulty build multiplies the state with."""
    if fault is Fault.DECAY_TWICE:
        return np.exp(np.exp(g))
    if fault is Fault.DECAY_RAW:
        return g.copy()
    if fault is Fault.DECAY_IGNORED:
        return np.ones_like(g)
    return np.exp(g)


def heads_with(x: Array, heads: int, fault: Fault | None) -> Array:
    """``reference.repeat_heads``, or the interleaved mapping (value head h reads key head h mod Hk)."""
    if fault is Fault.GQA_INTERLEAVED:
        return np.tile(x, (1, heads // x.shape[1], 1))
    return ref.repeat_heads(x, heads)


def gated_norm_with(o: Array, z: Array, weight: Array, eps: float, fault: Fault | None) -> Array:
    """``reference.gated_rms_norm``, or the norm without its gate."""
    if fault is Fault.GATE_Z_IGNORED:
        return ref.rms_norm(o, weight - 1.0, eps)
    return ref.gated_rms_norm(o, z, weight, eps)


def mix(
    qkv: Array,
    z: Array,
    a: Array,
    b: Array,
    *,
    conv: Array,
    a_log: Array,
    dt_bias: Array,
    norm: Array,
    shape: GdnShape,
    state: GdnState,
    decode: bool = False,
    fault: Fault | None = None,
) -> tuple[GdnTrace, GdnState]:
    """The stages between the projections: qkv [T, D], z [T, Hv·V], a and b [T, Hv] of one sequence → trace and state.

    ``decode`` says that the tokens come one by one after a prefill, which is where some faults differ.
    """
    tokens = qkv.shape[0]
    bands = shape.bands()

    before = np.zeros_like(state.conv) if decode and fault is Fault.CONV_STATE_UNREAD else state.conv
    y, conv_state = ref.causal_conv(qkv, conv, before, activation=fault is not Fault.SILU_MISSING)
    if not decode and fault is Fault.KEY_BAND_ZEROED:
        y[:, bands["k"]] = 0.0
    if not decode and fault is Fault.CONV_STATE_DROPPED:
        conv_state = np.zeros_like(conv_state)
    if decode and fault is Fault.CONV_STATE_FROZEN:
        conv_state = state.conv

    q, k = (y[:, bands[name]].reshape(tokens, shape.key_heads, shape.key_dim) for name in ("q", "k"))
    v = y[:, bands["v"]].reshape(tokens, shape.value_heads, shape.value_dim)
    if fault is Fault.QK_SWAPPED:
        q, k = k, q
    q, k = (heads_with(l2_norm_with(x, fault), shape.value_heads, fault) for x in (q, k))
    if fault is not Fault.Q_NOT_SCALED:
        q = q * shape.key_dim**-0.5
    if fault is Fault.QK_SWAPPED_SCALED:
        q, k = k, q

    g, beta = ref.gates(a, b, a_log, dt_bias)
    if fault in _TOKEN_BY_TOKEN or tokens == 1:
        o, recurrent = ref.delta_rule(q, k, v, decay_with(g, fault), beta, state.recurrent)
    else:
        o, recurrent = ref.delta_rule_chunked(q, k, v, g, beta, state.recurrent)
    if fault is Fault.OUTPUT_ZERO:
        o = np.zeros_like(o)

    gate = z.reshape(tokens, shape.value_heads, shape.value_dim)
    normed = gated_norm_with(o, gate, norm, shape.eps, fault)
    trace = GdnTrace(conv=y, q=q, k=k, g=g, beta=beta, o=o, normed=normed)
    return trace, GdnState(conv=conv_state, recurrent=recurrent)


def linear_attention(
    x: Array,
    weights: GdnWeights,
    shape: GdnShape,
    state: GdnState | None = None,
    *,
    decode: bool = False,
    fault: Fault | None = None,
) -> tuple[Array, GdnTrace, GdnState]:
    """Tokens ``x`` [T, hidden] of one sequence through one layer → output [T, hidden], trace and state.

    ``state`` None starts a sequence; ``decode`` as in ``mix``. ``STATE_NOT_RESET`` is the caller's: it starts a
    sequence with the recurrent state of the one before.
    """
    trace, after = mix(
        x @ weights.in_proj_qkv.T,
        x @ weights.in_proj_z.T,
        x @ weights.in_proj_a.T,
        x @ weights.in_proj_b.T,
        conv=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        norm=weights.norm,
        shape=shape,
        state=state or GdnState.zeros(shape),
        decode=decode,
        fault=fault,
    )
    return trace.normed.reshape(x.shape[0], shape.value_channels) @ weights.out_proj.T, trace, after
