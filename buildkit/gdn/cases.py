"""The kernel cases: inputs from a fixed seed, what they must give, and what they give under each fault.

A case's inputs are float64 arrays whose values are exact in the dtype that the kernel gets, so that the whole error
seen is the kernel's. Shapes as in ``buildkit.gdn.contracts``; several sequences of different lengths share a batch:
one token, fewer than W, about a chunk of 64, several chunks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from buildkit.gdn import reference as ref
from buildkit.gdn.contracts import Contract, Dtype
from buildkit.gdn.faults import Fault
from buildkit.gdn.layer import GdnShape, GdnState, decay_with, gated_norm_with, heads_with, l2_norm_with, mix
from buildkit.gdn.reference import Array

SEED = 20260722

Regime = Literal["none", "mild", "strong"]
Arrays = dict[str, Array]
Scalars = dict[str, int | float | bool]

SLOTS = 6
"""Rows of the state arrays; the batch uses some of them, and the others must stay as they are."""

GQA = GdnShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
GQA_64 = GdnShape(key_heads=2, value_heads=4, key_dim=64, value_dim=64)
FLAT_64 = GdnShape(key_heads=2, value_heads=2, key_dim=64, value_dim=128)

LENGTHS = (1, 3, 70, 150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one stage (or, for ``chain``, all stages in a row). ``continued``: the states are not zero."""

    stage: str
    name: str
    dtype: Dtype
    shape: GdnShape
    lengths: tuple[int, ...] = LENGTHS
    continued: bool = False
    regime: Regime = "mild"

    @property
    def id(self) -> str:
        return f"{self.stage}/{self.name}/{self.dtype}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def slots(self) -> tuple[int, ...]:
        """The state row of each sequence: neither in order nor next to each other."""
        return (4, 1, 5, 2)[: len(self.lengths)]


def all_cases(dtype: Dtype) -> tuple[Case, ...]:
    """Every case of one dtype, in the order of the data."""
    return tuple(_cases(dtype))


def _cases(dtype: Dtype) -> Iterator[Case]:
    one = (1, 1, 1)

    def case(stage: str, name: str, shape: GdnShape, **more: object) -> Case:
        return Case(stage=stage, name=name, dtype=dtype, shape=shape, **more)  # type: ignore[arg-type]

    yield case("conv_prefill", "fresh", GQA)
    yield case("conv_prefill", "continued", GQA, continued=True)
    for width in (2, 3):
        shape = GdnShape(key_heads=2, value_heads=4, key_dim=64, value_dim=64, conv_width=width)
        yield case("conv_prefill", f"width-{width}", shape, continued=True)
    yield case("conv_decode", "slots", GQA, lengths=one, continued=True)
    yield case("gating", "extremes", GQA)
    yield case("l2_norm", "dim-128", GQA)
    yield case("l2_norm", "dim-64", GQA_64)
    yield case("recurrence", "no-decay", GQA, regime="none")
    yield case("recurrence", "continued", GQA, continued=True)
    yield case("recurrence", "strong-decay", GQA_64, regime="strong")
    yield case("recurrence", "wide-value", FLAT_64, continued=True)
    yield case("recurrence_gqa", "continued", GQA, continued=True)
    yield case("decode", "slots", GQA, lengths=one, continued=True)
    yield case("decode", "no-decay", FLAT_64, lengths=one, continued=True, regime="none")
    yield case("decode_gqa", "slots", GQA, lengths=one, continued=True)
    yield case("gated_norm", "dim-128", GQA)
    yield case("gated_norm", "dim-64", GQA_64)
    yield case("chain", "prefill", GQA)
    yield case("chain", "decode", GQA, lengths=one, continued=True)


def find_case(case_id: str) -> Case:
    """The case with this id. Raises KeyError."""
    dtype: Dtype = "f16" if case_id.endswith("/f16") else "f32"
    return {case.id: case for case in all_cases(dtype)}[case_id]


def quantise(x: Array, dtype: str) -> Array:
    """``x`` rounded to ``dtype``, as float64."""
    return x.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What goes into the call. ``arrays`` has what the kernel reads and the states it updates; ``scalars`` the rest.

    ``g`` in ``arrays`` is what the contract's kernels read: the log decay or the decay itself.
    """

    arrays: Arrays
    scalars: Scalars


def inputs(case: Case, contract: Contract) -> Inputs:
    """The inputs of a case; the same on every machine (PCG64 from a seed that holds the case's name)."""
    rng = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(case.id.encode())]))
    shape, tokens, heads = case.shape, case.tokens, case.shape.value_heads
    io, batch = case.dtype, len(case.lengths)
    gate_type = io if contract.gates == "io" else "f32"

    def normal(*dims: int, scale: float = 1.0, dtype: str = io) -> Array:
        return quantise(rng.standard_normal(dims) * scale, dtype)

    def conv_state(rows: int) -> Array:
        dtype = io if contract.conv_state == "io" else "f32"
        state = normal(rows, shape.channels, shape.conv_width - 1, dtype=dtype)
        return state if case.continued else np.zeros_like(state)

    def state() -> Array:
        # kept as float32 under every contract; in narrow types its values are rounded as a cache of theirs would be
        value = normal(SLOTS, heads, shape.key_dim, shape.value_dim, scale=0.1)
        return value if case.continued else np.zeros_like(value)

    def gates(dtype: str = gate_type, reads: str = contract.reads) -> tuple[Array, Array]:
        scale = {"none": 0.0, "mild": 0.1, "strong": 3.0}[case.regime]
        g = -np.abs(rng.standard_normal((tokens, heads))) * scale
        beta = quantise(ref.sigmoid(rng.standard_normal((tokens, heads))), dtype)
        return quantise(np.exp(g) if reads == "decay" else g, dtype), beta

    def unit(rows: int, count: int) -> Array:
        return ref.l2_norm(rng.standard_normal((rows, count, shape.key_dim)))

    cu_seqlens = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.float64)
    slots = np.array(case.slots, dtype=np.float64)
    common: Scalars = {"batch": batch, "stream": 0}
    dims: Scalars = {"key_dim": shape.key_dim, "value_dim": shape.value_dim, "heads": heads}

    match case.stage:
        case "conv_prefill":
            return Inputs(
                arrays={
                    "x": normal(tokens, shape.channels),
                    "weight": normal(shape.channels, shape.conv_width, scale=0.5),
                    "conv_state": conv_state(batch),
                    "cu_seqlens": cu_seqlens,
                },
                scalars={**common, "channels": shape.channels, "width": shape.conv_width, "silu": True},
            )
        case "conv_decode":
            return Inputs(
                arrays={
                    "x": normal(tokens, shape.channels),
                    "weight": normal(shape.channels, shape.conv_width, scale=0.5),
                    "conv_state": conv_state(SLOTS),
                    "slots": slots,
                },
                scalars={**common, "channels": shape.channels, "width": shape.conv_width, "silu": True},
            )
        case "gating":
            # from far below zero to where a careless softplus overflows
            a = normal(tokens, heads, scale=4.0)
            a[:4, 0] = (-30.0, -8.0, 20.0, 60.0)
            return Inputs(
                arrays={
                    "a_log": quantise(np.log(np.linspace(0.5, 4.0, heads)), "f32"),
                    "a": a,
                    "b": normal(tokens, heads, scale=3.0),
                    "dt_bias": quantise(np.linspace(-1.0, 1.0, heads), "f32" if contract.parameters == "f32" else io),
                },
                scalars={**common, "batch": 1, "seq": tokens, "heads": heads},
            )
        case "l2_norm":
            x = normal(tokens * shape.key_heads, shape.key_dim)
            x[0] = 0.0  # the eps inside the root decides
            x[1] *= 2.0**-9
            return Inputs(
                arrays={"x": x},
                scalars={**common, "rows": x.shape[0], "dim": shape.key_dim, "eps": ref.L2_EPS},
            )
        case "recurrence" | "decode":
            g, beta = gates()
            arrays = {
                "q": quantise(unit(tokens, heads) * shape.key_dim**-0.5, io),
                "k": quantise(unit(tokens, heads), io),
                "v": normal(tokens, heads, shape.value_dim),
                "g": g,
                "beta": beta,
                "state": state(),
                "slots": slots,
            }
            if case.stage == "recurrence":
                arrays["cu_seqlens"] = cu_seqlens
            return Inputs(arrays=arrays, scalars={**common, **dims})
        case "recurrence_gqa" | "decode_gqa":
            g, beta = gates("f32", "log")
            arrays = {
                "q": quantise(unit(tokens, shape.key_heads), io),
                "k": quantise(unit(tokens, shape.key_heads), io),
                "v": normal(tokens, heads, shape.value_dim),
                "g": g,
                "beta": beta,
                "state": state(),
                "slots": slots,
            }
            if case.stage == "recurrence_gqa":
                arrays["cu_seqlens"] = cu_seqlens
            scale = float(np.float32(shape.key_dim**-0.5))
            return Inputs(arrays=arrays, scalars={**common, **dims, "key_heads": shape.key_heads, "q_scale": scale})
        case "gated_norm":
            x = normal(tokens, shape.value_channels, scale=0.05)
            x[0] = 0.0
            return Inputs(
                arrays={
                    "x": x,
                    "z": normal(tokens, shape.value_channels),
                    "gamma": quantise(1.0 + 0.1 * rng.standard_normal(shape.value_dim), "f32"),
                },
                scalars={
                    **common,
                    "rows": tokens,
                    "channels": shape.value_channels,
                    "group": shape.value_dim,
                    "eps": shape.eps,
                    "per_group": True,
                    "has_bias": False,
                },
            )
        case "chain":
            return Inputs(
                arrays={
                    "x": normal(tokens, shape.channels),
                    "z": normal(tokens, shape.value_channels),
                    "a": normal(tokens, heads),
                    "b": normal(tokens, heads),
                    "weight": normal(shape.channels, shape.conv_width, scale=0.5),
                    "a_log": quantise(np.log(np.linspace(0.02, 0.5, heads)), "f32"),
                    "dt_bias": quantise(np.linspace(-1.0, 1.0, heads), "f32" if contract.parameters == "f32" else io),
                    "gamma": quantise(1.0 + 0.1 * rng.standard_normal(shape.value_dim), "f32"),
                    "conv_state": conv_state(SLOTS),
                    "state": state(),
                },
                scalars={},
            )
        case _:
            raise ValueError(f"no stage {case.stage!r}")


def expected(case: Case, given: Inputs, contract: Contract, fault: Fault | None = None) -> Arrays | None:
    """What the call must leave in its outputs; with ``fault``, what a kernel with that fault leaves there.

    None where the fault does not live in this stage (or cannot show in this case).
    """
    arrays, shape = given.arrays, case.shape
    match case.stage:
        case "conv_prefill":
            return _conv_prefill(case, arrays, fault)
        case "conv_decode":
            return _conv_decode(case, arrays, fault)
        case "gating":
            g, beta = ref.gates(arrays["a"], arrays["b"], arrays["a_log"], arrays["dt_bias"])
            if fault is None:
                return {"g": np.exp(g) if contract.writes == "decay" else g, "beta": beta}
            if fault is Fault.DECAY_TWICE:
                return {"g": np.exp(np.exp(g)) if contract.writes == "decay" else np.exp(g), "beta": beta}
            if fault is Fault.DECAY_RAW and contract.writes == "decay":
                return {"g": g, "beta": beta}
            return None
        case "l2_norm":
            if fault in (None, Fault.L2_NORM_LANE_0, Fault.L2_NORM_OTHERS_RAW):
                return {"out": l2_norm_with(arrays["x"], fault)}
            return None
        case "recurrence" | "decode" | "recurrence_gqa" | "decode_gqa":
            return _recurrence(case, arrays, contract, fault)
        case "gated_norm":
            if fault not in (None, Fault.GATE_Z_IGNORED):
                return None
            grouped = (case.tokens, shape.value_heads, shape.value_dim)
            x, z = arrays["x"].reshape(grouped), arrays["z"].reshape(grouped)
            out = gated_norm_with(x, z, arrays["gamma"], shape.eps, fault)
            return {"out": out.reshape(case.tokens, shape.value_channels)}
        case "chain":
            return _chain(case, arrays, fault)
        case _:
            raise ValueError(f"no stage {case.stage!r}")


def _spans(case: Case) -> Iterator[tuple[int, slice]]:
    start = 0
    for sequence, length in enumerate(case.lengths):
        yield sequence, slice(start, start + length)
        start += length


def _conv_prefill(case: Case, arrays: Arrays, fault: Fault | None) -> Arrays | None:
    if fault not in (None, Fault.KEY_BAND_ZEROED, Fault.SILU_MISSING, Fault.CONV_STATE_DROPPED):
        return None
    out, states = np.empty_like(arrays["x"]), arrays["conv_state"].copy()
    for sequence, span in _spans(case):
        out[span], state = ref.causal_conv(
            arrays["x"][span], arrays["weight"], states[sequence], activation=fault is not Fault.SILU_MISSING
        )
        if fault is not Fault.CONV_STATE_DROPPED:
            states[sequence] = state
    if fault is Fault.KEY_BAND_ZEROED:
        out[:, case.shape.bands()["k"]] = 0.0
    return {"out": out, "conv_state": states}


def _conv_decode(case: Case, arrays: Arrays, fault: Fault | None) -> Arrays | None:
    if fault not in (None, Fault.SILU_MISSING, Fault.CONV_STATE_FROZEN, Fault.CONV_STATE_UNREAD):
        return None
    out, states = np.empty_like(arrays["x"]), arrays["conv_state"].copy()
    for sequence, span in _spans(case):
        slot = case.slots[sequence]
        before = np.zeros_like(states[slot]) if fault is Fault.CONV_STATE_UNREAD else states[slot]
        out[span], state = ref.causal_conv(
            arrays["x"][span], arrays["weight"], before, activation=fault is not Fault.SILU_MISSING
        )
        if fault is not Fault.CONV_STATE_FROZEN:
            states[slot] = state
    return {"out": out, "conv_state": states}


_RECURRENCE_FAULTS = (
    Fault.OUTPUT_ZERO,
    Fault.DECAY_TWICE,
    Fault.DECAY_RAW,
    Fault.DECAY_IGNORED,
)


def _recurrence(case: Case, arrays: Arrays, contract: Contract, fault: Fault | None) -> Arrays | None:
    native = case.stage.endswith("_gqa")
    # q arrives scaled where the key heads are already repeated, and is scaled inside the kernel where they are not
    own = (Fault.QK_SWAPPED, Fault.GQA_INTERLEAVED, Fault.Q_NOT_SCALED) if native else (Fault.QK_SWAPPED_SCALED,)
    if fault not in (None, *_RECURRENCE_FAULTS, *own):
        return None
    q, k, heads = arrays["q"], arrays["k"], case.shape.value_heads
    if fault in (Fault.QK_SWAPPED, Fault.QK_SWAPPED_SCALED):
        q, k = k, q
    if native:
        q, k = heads_with(q, heads, fault), heads_with(k, heads, fault)
        if fault is not Fault.Q_NOT_SCALED:
            q = q * case.shape.key_dim**-0.5
    if native or contract.reads == "log":
        decay = decay_with(arrays["g"], fault)
    else:
        with np.errstate(divide="ignore"):
            decay = decay_with(np.log(arrays["g"]), fault)
    states = arrays["state"].copy()
    out = np.empty_like(arrays["v"])
    for sequence, span in _spans(case):
        slot = case.slots[sequence]
        out[span], states[slot] = ref.delta_rule(
            q[span], k[span], arrays["v"][span], decay[span], arrays["beta"][span], states[slot]
        )
    if fault is Fault.OUTPUT_ZERO:
        out = np.zeros_like(out)
    return {"out": out, "state": states}


def _chain(case: Case, arrays: Arrays, fault: Fault | None) -> Arrays | None:
    if fault is Fault.STATE_NOT_RESET:
        return None
    out = np.empty_like(arrays["z"])
    conv, state = arrays["conv_state"].copy(), arrays["state"].copy()
    for sequence, span in _spans(case):
        slot = case.slots[sequence]
        trace, after = mix(
            arrays["x"][span],
            arrays["z"][span],
            arrays["a"][span],
            arrays["b"][span],
            conv=arrays["weight"],
            a_log=arrays["a_log"],
            dt_bias=arrays["dt_bias"],
            norm=arrays["gamma"],
            shape=case.shape,
            state=GdnState(conv=conv[slot], recurrent=state[slot]),
            decode=case.name == "decode",
            fault=fault,
        )
        out[span] = trace.normed.reshape(out[span].shape)
        conv[slot], state[slot] = after.conv, after.recurrent
    return {"out": out, "state": state}
