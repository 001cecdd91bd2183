"""How the kernels' C entry points are called: the contract differs between revisions of attention-rs.

A contract is a set of answers to the questions on which revisions differ (``Contract``'s fields); ``entry`` turns it
into a symbol and an argument list that the worker can call without knowing more. Known revisions name their contract;
for others each question is settled by probing (``buildkit.gdn.harness``).

Argument kinds: ``io`` the dtype under test; ``f32``, ``u32``, ``i64`` arrays of that type; ``null`` a null pointer;
``int``, ``bool``, ``float`` scalars; ``stream`` a 64-bit stream handle, always 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["f32", "f16"]
Kind = Literal["io", "f32", "u32", "i64", "null", "int", "bool", "float", "stream"]
Argument = tuple[str, Kind]

STAGES = (
    "conv_prefill",
    "conv_decode",
    "gating",
    "l2_norm",
    "recurrence",
    "decode",
    "recurrence_gqa",
    "decode_gqa",
    "gated_norm",
)
"""Stages with an entry point of their own, in the order of the data."""

OPTIONAL = frozenset({"recurrence_gqa", "decode_gqa"})
"""Stages that only some revisions have: their absence is reported, and is no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The answers on which revisions differ.

    ``gates``: type of g and beta. ``parameters``: type of dt_bias, and of A_log where no ``_alog_f32`` entry is used.
    ``writes``, ``reads``: whether gating writes, and the recurrence and decode kernels read, the log decay or the decay
    itself; where they differ the host's code exponentiates in between. ``state``: order of the last two axes of the
    recurrent state. ``conv_state``: its type. ``…_snapshots``: whether prefill conv and recurrence take a snapshot
    buffer (a null pointer here).
    """

    name: str
    gates: Literal["io", "f32"] = "io"
    parameters: Literal["io", "f32"] = "io"
    writes: Literal["log", "decay"] = "log"
    reads: Literal["log", "decay"] = "log"
    state: Literal["vk", "kv"] = "vk"
    conv_state: Literal["io", "f32"] = "io"
    conv_snapshots: bool = False
    recurrence_snapshots: bool = False

    def describe(self) -> str:
        """The answers on one line."""
        return (
            f"gates {self.gates}, gating parameters {self.parameters}, gating writes the "
            f"{'log decay' if self.writes == 'log' else 'decay'}, recurrence reads the "
            f"{'log decay' if self.reads == 'log' else 'decay'}, state [heads, {', '.join(self.state.upper())}], "
            f"conv state {self.conv_state}, snapshots "
            + ("conv " if self.conv_snapshots else "")
            + ("recurrence" if self.recurrence_snapshots else "" if self.conv_snapshots else "none")
        )


LOG = Contract(name="log")
"""The early contract: gates in the tensors' type, exponentiated inside the kernels, state [heads, V, K]."""

LOG_KV = replace(LOG, name="log-kv", state="kv")
"""The early contract with the state as [heads, K, V]."""

DECAY = Contract(
    name="decay",
    gates="f32",
    parameters="f32",
    reads="decay",
    state="kv",
    conv_state="f32",
    conv_snapshots=True,
    recurrence_snapshots=True,
)
"""The later contract: float32 gates, the recurrence takes the decay itself (the host exponentiates what gating wrote),
snapshot buffers, state [heads, K, V]."""

CONTRACTS = {contract.name: contract for contract in (LOG, LOG_KV, DECAY)}

REVISIONS: dict[str, str] = {
    # attention.rs, as read from its gdn.cu; every other revision is probed
    "896a058c94497603803e0d0a66fe0b1ba0a0b56a": "log-kv",
}


def contract_of_revision(revision: str) -> Contract | None:
    """The contract of an attention.rs revision given in full or by at least 7 of its first digits; None if unknown."""
    if len(revision) < 7:
        return None
    names = {name for known, name in REVISIONS.items() if known.startswith(revision)}
    return CONTRACTS[names.pop()] if len(names) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One C entry point: what is exported, the arguments in order, and which arrays it writes."""

    symbol: str
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]


def entry(stage: str, dtype: Dtype, contract: Contract) -> Entry:
    """The entry point of ``stage`` under ``contract``."""
    narrow = dtype != "f32"
    g: Kind = "f32" if contract.gates == "f32" else "io"
    conv_state: Kind = "f32" if contract.conv_state == "f32" else "io"
    conv_snapshots: tuple[Argument, ...] = (("snapshots", "null"),) if contract.conv_snapshots else ()
    snapshots: tuple[Argument, ...] = (("snapshots", "null"),) if contract.recurrence_snapshots else ()
    qkv: tuple[Argument, ...] = (("q", "io"), ("k", "io"), ("v", "io"))
    after: tuple[Argument, ...] = (("state", "f32"), ("slots", "i64"), ("out", "io"))
    dims: tuple[Argument, ...] = (("key_dim", "int"), ("value_dim", "int"))
    stream: tuple[Argument, ...] = (("stream", "stream"),)
    if stage == "conv_prefill":
        return Entry(
            symbol=f"causal_conv1d_fwd_{dtype}",
            arguments=(
                ("x", "io"),
                ("weight", "io"),
                ("bias", "null"),
                ("conv_state", conv_state),
                ("out", "io"),
                *conv_snapshots,
                ("cu_seqlens", "u32"),
                ("batch", "int"),
                ("channels", "int"),
                ("width", "int"),
                ("silu", "bool"),
                *stream,
            ),
            outputs=("out", "conv_state"),
        )
    if stage == "conv_decode":
        return Entry(
            symbol=f"causal_conv1d_update_slots_{dtype}",
            arguments=(
                ("x", "io"),
                ("weight", "io"),
                ("bias", "null"),
                ("conv_state", conv_state),
                ("slots", "i64"),
                ("out", "io"),
                ("batch", "int"),
                ("channels", "int"),
                ("width", "int"),
                ("silu", "bool"),
                *stream,
            ),
            outputs=("out", "conv_state"),
        )
    if stage == "gating":
        separate = narrow and contract.parameters == "io"
        return Entry(
            symbol=f"fused_gdn_gating_{dtype}{'_alog_f32' if separate else ''}",
            arguments=(
                ("a_log", "f32"),
                ("a", "io"),
                ("b", "io"),
                ("dt_bias", "f32" if contract.parameters == "f32" else "io"),
                ("g", g),
                ("beta", g),
                ("batch", "int"),
                ("seq", "int"),
                ("heads", "int"),
                *stream,
            ),
            outputs=("g", "beta"),
        )
    if stage == "l2_norm":
        return Entry(
            symbol=f"l2_norm_last_dim_{dtype}",
            arguments=(("x", "io"), ("out", "io"), ("rows", "int"), ("dim", "int"), ("eps", "float"), *stream),
            outputs=("out",),
        )
    if stage == "recurrence":
        return Entry(
            symbol=f"gated_delta_rule_recurrence_varlen_{dtype}",
            arguments=(
                *qkv,
                ("g", g),
                ("beta", g),
                *after,
                *snapshots,
                ("cu_seqlens", "u32"),
                ("batch", "int"),
                ("heads", "int"),
                *dims,
                *stream,
            ),
            outputs=("out", "state"),
        )
    if stage == "decode":
        return Entry(
            symbol=f"gated_delta_rule_decode_slots_{dtype}{'_state_f32' if narrow else ''}",
            arguments=(*qkv, ("g", g), ("beta", g), *after, ("batch", "int"), ("heads", "int"), *dims, *stream),
            outputs=("out", "state"),
        )
    if stage == "recurrence_gqa":
        return Entry(
            symbol=f"gated_delta_rule_recurrence_varlen_gqa_{dtype}",
            arguments=(
                *qkv,
                ("g", "f32"),
                ("beta", "f32"),
                *after,
                ("snapshots", "null"),
                ("cu_seqlens", "u32"),
                ("batch", "int"),
                ("heads", "int"),
                ("key_heads", "int"),
                *dims,
                ("q_scale", "float"),
                *stream,
            ),
            outputs=("out", "state"),
        )
    if stage == "decode_gqa":
        return Entry(
            symbol=f"gated_delta_rule_decode_slots_gqa_{dtype}",
            arguments=(
                *qkv,
                ("g", "f32"),
                ("beta", "f32"),
                *after,
                ("batch", "int"),
                ("heads", "int"),
                ("key_heads", "int"),
                *dims,
                ("q_scale", "float"),
                *stream,
            ),
            outputs=("out", "state"),
        )
    if stage == "gated_norm":
        return Entry(
            symbol=f"gdn_gated_rmsnorm_silu_mul_{dtype}{'_wf32' if narrow else ''}",
            arguments=(
                ("x", "io"),
                ("z", "io"),
                ("gamma", "f32"),
                ("bias", "null"),
                ("out", "io"),
                ("rows", "int"),
                ("channels", "int"),
                ("group", "int"),
                ("eps", "float"),
                ("per_group", "bool"),
                ("has_bias", "bool"),
                *stream,
            ),
            outputs=("out",),
        )
    raise ValueError(f"no stage {stage!r}")
