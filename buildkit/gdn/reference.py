"""The stages of a gated delta net in NumPy float64, one function per formula.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464), eq. 10
for the recurrence and §3.3 for the chunked form; the Qwen3-Next and Qwen3.5 models for what surrounds it. Letters:
T tokens of one sequence, Hk key heads, Hv value heads, K and V the head dims, D = 2·Hk·K + Hv·V channels laid out
q | k | v, W the width of the convolution. All arrays are float64; every function is pure and returns new arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

L2_EPS = 1e-6
"""Inside the root of the L2 norm of q and k."""


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow for any x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x: Array) -> Array:
    """x·sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + e^x)."""
    return np.logaddexp(0.0, x)


def causal_conv(x: Array, weight: Array, state: Array | None = None, *, activation: bool = True) -> tuple[Array, Array]:
    """Depthwise causal convolution over time, then SiLU.

    y[t, c] = SiLU(Σ_w x[t-W+1+w, c]·weight[c, w]), with ``state`` (zeros at a sequence's start) before the first token.

    Args:
        x: [T, D] inputs. weight: [D, W]. state: [D, W-1], the W-1 inputs before x[0], oldest first.

    Returns:
        y [T, D] and the new state [D, W-1].
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    before = np.zeros((channels, width - 1)) if state is None else state
    line = np.concatenate([before.T, x])
    y = np.zeros_like(x)
    for w in range(width):
        y += line[w : w + tokens] * weight[:, w]
    return (silu(y) if activation else y), line[tokens:].T.copy()


def gates(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """Log decay g = -exp(A_log)·softplus(a + dt_bias) (≤ 0) and write strength beta = sigmoid(b).

    Args:
        a, b: [T, Hv]. a_log, dt_bias: [Hv].

    Returns:
        g [T, Hv], beta [T, Hv].
    """
    return -np.exp(a_log) * softplus(a + dt_bias), sigmoid(b)


def l2_norm(x: Array, eps: float = L2_EPS) -> Array:
    """x / sqrt(Σ x² + eps) over the last axis."""
    root: Array = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
    return x / root


def repeat_heads(x: Array, heads: int) -> Array:
    """[T, Hk, K] → [T, heads, K]: key head h serves the ``heads/Hk`` consecutive value heads from h·heads/Hk on."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def delta_rule(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The recurrence, token by token, for each value head.

    S ← exp(g_t)·S;  u = beta_t·(v_t - Sᵀk_t);  S ← S + k_t uᵀ;  o_t = Sᵀq_t

    Args:
        q, k: [T, Hv, K], normalised, q scaled. v: [T, Hv, V]. decay: [T, Hv], which is exp(g). beta: [T, Hv].
        state: [Hv, K, V].

    Returns:
        o [T, Hv, V] and the state after the last token [Hv, K, V].
    """
    s = state.copy()
    out = np.empty_like(v)
    for t in range(q.shape[0]):
        s *= decay[t][:, None, None]
        u = beta[t][:, None] * (v[t] - np.matmul(k[t][:, None, :], s)[:, 0])
        s += k[t][:, :, None] * u[:, None, :]
        out[t] = np.matmul(q[t][:, None, :], s)[:, 0]
    return out, s


def delta_rule_chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, chunk: int = 64
) -> tuple[Array, Array]:
    """The same function in chunks of ``chunk`` tokens (the form that prefill kernels use); ``g`` is the log decay.

    With G_t = Σ_{s≤t} g_s inside a chunk and S₀ the state before it, the writes u solve the unit lower triangular
    system  u_t + beta_t Σ_{s<t} e^{G_t-G_s}(k_t·k_s) u_s = beta_t (v_t - e^{G_t} S₀ᵀk_t),  the outputs are
    o_t = e^{G_t} S₀ᵀq_t + Σ_{s≤t} e^{G_t-G_s}(q_t·k_s) u_s,  and  S = e^{G_C} S₀ + Σ_s e^{G_C-G_s} k_s u_sᵀ.
    Shapes as in ``delta_rule``.
    """
    s = state.copy()
    out = np.empty_like(v)
    for start in range(0, q.shape[0], chunk):
        part = slice(start, min(start + chunk, q.shape[0]))
        # heads first: [Hv, C, ·]
        qc, kc, vc = (np.swapaxes(x[part], 0, 1) for x in (q, k, v))
        total = np.cumsum(g[part].T, axis=1)
        bc = beta[part].T[:, :, None]
        size = total.shape[1]
        lower = np.tril(np.ones((size, size)))
        between = np.exp(np.where(lower > 0, total[:, :, None] - total[:, None, :], 0.0)) * lower
        from_start = np.exp(total)[:, :, None]
        system = np.eye(size) + bc * np.tril(between * (kc @ np.swapaxes(kc, 1, 2)), -1)
        u = np.linalg.solve(system, bc * (vc - from_start * (kc @ s)))
        o = from_start * (qc @ s) + (between * (qc @ np.swapaxes(kc, 1, 2))) @ u
        out[part] = np.swapaxes(o, 0, 1)
        to_end = np.exp(total[:, -1:] - total)[:, :, None]
        s = np.exp(total[:, -1])[:, None, None] * s + np.swapaxes(to_end * kc, 1, 2) @ u
    return out, s


def gated_rms_norm(o: Array, z: Array, weight: Array, eps: float) -> Array:
    """o·rsqrt(mean(o²) + eps)·weight·SiLU(z) over the last axis; o and z [..., V], weight [V] (not 1 + weight)."""
    normed: Array = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + eps)
    return normed * weight * silu(z)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x·rsqrt(mean(x²) + eps)·(1 + weight) over the last axis: every norm of Qwen3.5 but the gated one."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * (1.0 + weight)
