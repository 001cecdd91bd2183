"""What is compared with transformers: every stage of every layer, of a prompt and of the last decoded token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from buildkit.gdn.checkpoint import make
from buildkit.gdn.decoder import complete, forward
from buildkit.gdn.layer import GdnTrace
from buildkit.gdn.reference import Array
from smokeworld.configurations import DECODED, Configuration

GOLDEN = Path(__file__).resolve().parents[1] / "golden/gdn/transformers.npz"
"""Written by ``scripts/golden-gdn``."""

SAMPLE = 40
"""Elements that are kept of each stage."""

LIMIT = 1e-5
"""The largest error that float32 may have, in the maximum norm."""


def ours(configuration: Configuration) -> tuple[dict[str, Array], tuple[int, ...]]:
    """Every stage by name (``prompt.layer.stage``, ``decode.layer.stage``, logits), and the greedy tokens."""
    model = make(configuration.shape, configuration.number, configuration.how)
    done = complete(model, configuration.prompt, DECODED)
    tokens = tuple(choice.token for choice in done)
    prompt = forward(model, configuration.prompt)
    last = prompt
    for token in tokens[:-1]:
        last = forward(model, [token], last.state)
    out: dict[str, Array] = {}
    linear = [number for number, kind in enumerate(configuration.shape.layers) if kind == "linear_attention"]
    for name, step in (("prompt", prompt), ("decode", last)):
        for number, trace in zip(linear, step.traces, strict=True):
            out |= {f"{name}.{number}.{stage}": value for stage, value in _stages(trace).items()}
        out[f"{name}.logits"] = step.logits
    assert np.array_equal(last.logits[-1], done[-1].logits)
    return out, tokens


def _stages(trace: GdnTrace) -> dict[str, Array]:
    return {name: getattr(trace, name) for name in GdnTrace.__dataclass_fields__}


def sample(array: Array) -> Array:
    """Some elements, evenly over the array."""
    flat = array.reshape(-1)
    picked: Array = flat[np.linspace(0, flat.size - 1, min(SAMPLE, flat.size)).round().astype(int)]
    return picked


def error(got: Array, want: Array) -> float:
    """max |got - want| / max |want|."""
    largest = float(np.max(np.abs(want)))
    return float(np.max(np.abs(got - want))) / (largest or 1.0)


def worst_errors(configuration: Configuration, got: Mapping[str, Array], golden: Mapping[str, Any]) -> dict[str, float]:
    """The error of the golden samples in each stage, measured by the largest element of the whole stage."""
    prefix = f"{configuration.id}/"
    names = {name.removeprefix(prefix) for name in golden if name.startswith(prefix)} - {"tokens"}
    assert names == set(got)
    out = {}
    for name, value in got.items():
        scale = float(np.max(np.abs(value))) or 1.0
        out[name] = float(np.max(np.abs(golden[prefix + name] - sample(value)))) / scale
    return out
