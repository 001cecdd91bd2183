"""transformers' own model of the probe as a server, with each fault patched into it. Needs torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buildkit.gdn import probe
from buildkit.gdn.decoder import Choice, fresh_state
from buildkit.gdn.faults import Fault
from smokeworld.upstream import torch, transformers, upstream

GDN = probe.SHAPE.gdn
SCALE = GDN.key_dim**-0.5


class Served:
    """Answers as transformers does; ``dtype`` is a name of torch's. One request at a time."""

    def __init__(self, folder: Path, dtype: str, fault: Fault | None) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._fault = fault
        self._stale: dict[int, Any] = {}

    def answer(self, prompt: tuple[int, ...], count: int) -> list[Choice]:
        out: list[Choice] = []
        fed, cache = list(prompt), None
        with torch.no_grad(), patched(self._fault, self._stale):
            for _ in range(count):
                answer = self.model(torch.tensor([fed]), cache=cache, use_cache=True)
                cache = answer.cache
                logits = answer.logits[0, -1].to(torch.float64).numpy()
                token = int(logits.argmax())
                state = fresh_state(probe.SHAPE)
                out.append(Choice(token=token, logits=logits, state=state, largest_output=0, largest_state=0))
                fed = [token]
        return out


@contextmanager
def patched(fault: Fault | None, stale: dict[int, Any]) -> Iterator[None]:
    """The functions of ``modeling_qwen3_5`` with ``fault`` in them; ``stale`` holds each layer's last state."""
    kept = {
        name: getattr(upstream, name)
        for name in (
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
        )
    }
    norm = upstream.Qwen3_5RMSNormGated.forward
    seen: set[int] = set()
    calls = iter(range(10**9))

    def conv(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **more: Any) -> Any:
        y = kept["causal_conv1d_fn"](x, weight, bias, activation if fault is not Fault.SILU_MISSING else None, **more)
        if fault is Fault.KEY_BAND_ZEROED:
            y[:, GDN.bands()["k"]] = 0
        return y

    def update(x: Any, state: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
        if fault is Fault.CONV_STATE_DROPPED and state.data_ptr() not in seen:
            seen.add(state.data_ptr())
            state.zero_()
        if fault is Fault.CONV_STATE_UNREAD:
            state.zero_()
        used = state.clone() if fault is Fault.CONV_STATE_FROZEN else state
        return kept["causal_conv1d_update"](
            x, used, weight, bias, activation if fault is not Fault.SILU_MISSING else None
        )

    def rule(name: str) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, **named: Any) -> Any:
            layer = next(calls) % 3
            if fault is Fault.STATE_NOT_RESET and name.startswith("torch_chunk"):
                named["initial_state"] = stale.get(layer)
            o, state = _rule(kept[name], fault, q, k, v, named)
            stale[layer] = state.clone()
            return o, state

        return call

    def gated(self: Any, x: Any, gate: Any) -> Any:
        return norm(self, x, torch.full_like(gate, 1e4) if fault is Fault.GATE_Z_IGNORED else gate) / (
            1e4 if fault is Fault.GATE_Z_IGNORED else 1
        )

    try:
        upstream.causal_conv1d_fn, upstream.causal_conv1d_update = conv, update
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            setattr(upstream, name, rule(name))
        upstream.Qwen3_5RMSNormGated.forward = gated
        yield
    finally:
        for name, function in kept.items():
            setattr(upstream, name, function)
        upstream.Qwen3_5RMSNormGated.forward = norm


def _rule(function: Callable[..., Any], fault: Fault | None, q: Any, k: Any, v: Any, named: dict[str, Any]) -> Any:
    group = GDN.value_heads // GDN.key_heads
    match fault:
        case Fault.OUTPUT_ZERO:
            o, state = function(q, k, v, **named)
            return o * 0, state
        case Fault.Q_NOT_SCALED:
            o, state = function(q, k, v, **named)
            return o / SCALE, state
        case Fault.QK_SWAPPED:
            return function(k, q, v, **named)
        case Fault.GQA_INTERLEAVED:
            return function(q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1), v, **named)
        case Fault.DECAY_IGNORED:
            return function(q, k, v, **{**named, "g": named["g"] * 0})
        case (
            Fault.DECAY_TWICE
            | Fault.DECAY_RAW
            | Fault.L2_NORM_LANE_0
            | Fault.L2_NORM_OTHERS_RAW
            | Fault.QK_SWAPPED_SCALED
        ):
            return _token_by_token(fault, q, k, v, named)
        case _:
            return function(q, k, v, **named)


def _token_by_token(fault: Fault, q: Any, k: Any, v: Any, named: dict[str, Any]) -> Any:
    """The recurrence written once more, for faults that transformers' functions have no argument for."""
    group = GDN.value_heads // GDN.key_heads
    q, k = (_norm(x.float(), fault).repeat_interleave(group, dim=2) for x in (q, k))
    q = q * SCALE
    if fault is Fault.QK_SWAPPED_SCALED:
        q, k = k, q
    g, beta = named["g"].float(), named["beta"].float()
    decay = {Fault.DECAY_TWICE: g.exp().exp(), Fault.DECAY_RAW: g}.get(fault, g.exp())
    state = named["initial_state"]
    if state is None:
        state = torch.zeros(1, GDN.value_heads, GDN.key_dim, GDN.value_dim)
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t].float() - (state * k[:, t, :, :, None]).sum(-2))
        state = state + k[:, t, :, :, None] * u[:, :, None, :]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, dim=1).to(v.dtype), state


def _norm(x: Any, fault: Fault) -> Any:
    whole = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    lane = torch.arange(x.shape[-1]) % 32
    if fault is Fault.L2_NORM_OTHERS_RAW:
        return torch.where(lane == 0, whole, x)
    if fault is not Fault.L2_NORM_LANE_0:
        return whole
    sums = torch.stack([(x * x)[..., lane == i].sum(-1) for i in range(32)], dim=-1)
    for offset in (16, 8, 4, 2, 1):
        shifted = torch.arange(32) + offset
        sums = sums + sums[..., torch.where(shifted < 32, shifted, torch.arange(32))]
    return x * torch.rsqrt(sums[..., lane] + 1e-6)
