"""The same stages from transformers' ``qwen3_5`` on the CPU, in float32. Needs torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from buildkit.gdn.checkpoint import config_of, make_tensors
from buildkit.gdn.reference import Array
from smokeworld.configurations import DECODED, Configuration

# By name: whoever checks types without the extra has no stubs for them.
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
upstream: Any = import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def load(configuration: Configuration) -> Any:
    """The model with our tensors, which are exact in float32."""
    shape = configuration.shape
    config = config_of(shape, eos=0, dtype="float32")
    for key in ("architectures", "model_type", "torch_dtype"):
        del config[key]
    settings = transformers.Qwen3_5TextConfig(**config)
    settings._attn_implementation = "eager"
    model = upstream.Qwen3_5ForCausalLM(settings).eval()
    tensors = make_tensors(shape, configuration.number, configuration.how)
    model.load_state_dict({name: torch.tensor(value, dtype=torch.float32) for name, value in tensors.items()})
    return model


def theirs(configuration: Configuration) -> tuple[dict[str, Array], tuple[int, ...]]:
    """As ``stages.ours``."""
    model = load(configuration)
    linear = [number for number, kind in enumerate(configuration.shape.layers) if kind == "linear_attention"]
    out: dict[str, Array] = {}
    tokens: list[int] = []
    cache = None
    fed = list(configuration.prompt)
    for step in range(DECODED):
        with torch.no_grad(), _recorded(configuration) as calls:
            answer = model(torch.tensor([fed]), cache=cache, use_cache=True)
        cache = answer.cache
        if step in (0, DECODED - 1):
            name = "prompt" if step == 0 else "decode"
            for number, call in zip(linear, calls, strict=True):
                out |= {f"{name}.{number}.{stage}": value for stage, value in call.items()}
            out[f"{name}.logits"] = _array(answer.logits)
        tokens.append(int(answer.logits[0, -1].argmax()))
        fed = tokens[-1:]
    return out, tuple(tokens)


@contextmanager
def _recorded(configuration: Configuration) -> Iterator[list[dict[str, Array]]]:
    """Collects what passes between the stages of each GDN layer."""
    calls: list[dict[str, Array]] = []
    gdn = configuration.shape.gdn
    kept = {
        name: getattr(upstream, name)
        for name in (
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
        )
    }

    def conv(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *more: Any, **named: Any) -> Any:
            y = function(x, *more, **named)
            calls.append({"conv": _array(y)[:, -1 if function is kept["causal_conv1d_update"] else slice(None)].T})
            if calls[-1]["conv"].ndim == 1:
                calls[-1]["conv"] = calls[-1]["conv"][None]
            return y

        return call

    def rule(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, **named: Any) -> Any:
            o, state = function(q, k, v, **named)
            group = gdn.value_heads // gdn.key_heads
            for name, x in (("q", q), ("k", k)):
                unit = upstream.l2norm(x).repeat_interleave(group, dim=2)
                calls[-1][name] = _array(unit * gdn.key_dim**-0.5 if name == "q" else unit)
            calls[-1] |= {"g": _array(named["g"]), "beta": _array(named["beta"]), "o": _array(o)}
            # the convolution may have had earlier tokens before it
            calls[-1]["conv"] = calls[-1]["conv"][-q.shape[1] :]
            return o, state

        return call

    norm = upstream.Qwen3_5RMSNormGated.forward

    def normed(self: Any, o: Any, gate: Any) -> Any:
        y = norm(self, o, gate)
        calls[-1]["normed"] = y.detach().numpy().astype(np.float64).reshape(-1, gdn.value_heads, gdn.value_dim)
        return y

    try:
        for name, function in kept.items():
            setattr(upstream, name, (conv if "conv" in name else rule)(function))
        upstream.Qwen3_5RMSNormGated.forward = normed
        yield calls
    finally:
        for name, function in kept.items():
            setattr(upstream, name, function)
        upstream.Qwen3_5RMSNormGated.forward = norm


def _array(tensor: Any) -> Array:
    """The first sequence of a batch."""
    out: Array = tensor.detach().numpy().astype(np.float64)[0]
    return out
