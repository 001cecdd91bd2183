"""Decoders as checkpoints in the layout of transformers, and decoders made from a seed.

A checkpoint folder holds ``config.json``, ``model.safetensors`` and a tokenizer; the names of the tensors are those of
``Qwen3_5ForCausalLM``. Values that are made here have 8 significant bits at most: exact in float32, float16 and
bfloat16, so that every server computes with the same weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buildkit.errors import FormatError, NotFoundError
from buildkit.gdn import safetensors
from buildkit.gdn.decoder import AttentionWeights, Decoder, DecoderShape, LayerWeights
from buildkit.gdn.layer import GdnShape, GdnWeights
from buildkit.gdn.reference import Array
from buildkit.model import load_json_object

MAX_CHECKPOINT = 1 << 30
"""Bytes of a checkpoint that are read into memory."""

_GDN = {
    "in_proj_qkv": "linear_attn.in_proj_qkv.weight",
    "in_proj_z": "linear_attn.in_proj_z.weight",
    "in_proj_b": "linear_attn.in_proj_b.weight",
    "in_proj_a": "linear_attn.in_proj_a.weight",
    "conv": "linear_attn.conv1d.weight",
    "a_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "norm": "linear_attn.norm.weight",
    "out_proj": "linear_attn.out_proj.weight",
}
_ATTENTION = {field: f"self_attn.{field}.weight" for field in AttentionWeights.__dataclass_fields__}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def tensor_shapes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order of the data; the convolution's as a checkpoint has it, [D, 1, W]."""
    gdn, hidden = shape.gdn, shape.hidden
    wide = shape.heads * shape.head_dim
    linear = {
        "in_proj_qkv": (gdn.channels, hidden),
        "in_proj_z": (gdn.value_channels, hidden),
        "in_proj_b": (gdn.value_heads, hidden),
        "in_proj_a": (gdn.value_heads, hidden),
        "conv": (gdn.channels, 1, gdn.conv_width),
        "a_log": (gdn.value_heads,),
        "dt_bias": (gdn.value_heads,),
        "norm": (gdn.value_dim,),
        "out_proj": (hidden, gdn.value_channels),
    }
    full = {
        "q_proj": (2 * wide, hidden),
        "k_proj": (shape.kv_heads * shape.head_dim, hidden),
        "v_proj": (shape.kv_heads * shape.head_dim, hidden),
        "o_proj": (hidden, wide),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
    }
    around = {
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "gate_proj": (shape.intermediate, hidden),
        "up_proj": (shape.intermediate, hidden),
        "down_proj": (hidden, shape.intermediate),
    }
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for number, kind in enumerate(shape.layers):
        names, dims = (_GDN, linear) if kind == "linear_attention" else (_ATTENTION, full)
        prefix = f"model.layers.{number}."
        out |= {prefix + names[field]: size for field, size in dims.items()}
        out |= {prefix + _LAYER[field]: size for field, size in around.items()}
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocabulary, hidden)}


def assemble(shape: DecoderShape, tensors: Mapping[str, Array], *, where: str = "the checkpoint") -> Decoder:
    """The decoder from its tensors by name. Raises FormatError for one that is missing or has another shape."""
    for name, size in tensor_shapes(shape).items():
        if name not in tensors:
            raise FormatError(f"has no tensor {name}", where=where)
        if tensors[name].shape != size:
            raise FormatError(f"{name} has shape {list(tensors[name].shape)}, not {list(size)}", where=where)

    def layer(number: int) -> LayerWeights:
        def pick(names: Mapping[str, str]) -> dict[str, Array]:
            return {field: tensors[f"model.layers.{number}.{name}"] for field, name in names.items()}

        mixer: GdnWeights | AttentionWeights
        if shape.layers[number] == "linear_attention":
            parts = pick(_GDN)
            parts["conv"] = parts["conv"][:, 0]
            mixer = GdnWeights(**parts)
        else:
            mixer = AttentionWeights(**pick(_ATTENTION))
        return LayerWeights(mixer=mixer, **pick(_LAYER))

    return Decoder(
        shape=shape,
        embedding=tensors["model.embed_tokens.weight"],
        layers=tuple(layer(number) for number in range(len(shape.layers))),
        norm=tensors["model.norm.weight"],
        head=tensors["lm_head.weight"],
    )


# config.json ---------------------------------------------------------------------------------------------------------


def config_of(shape: DecoderShape, *, eos: int, dtype: str, context: int = 4096) -> dict[str, Any]:
    """``config.json`` of a decoder. Readers differ in where they look for the rotary settings and for the kinds of
    layers; both are said in each way."""
    period = next((n + 1 for n, kind in enumerate(shape.layers) if kind == "full_attention"), 0)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": shape.rotary / shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary / shape.head_dim,
        },
        "layer_types": list(shape.layers),
        "full_attention_interval": period,
        "linear_conv_kernel_dim": shape.gdn.conv_width,
        "linear_key_head_dim": shape.gdn.key_dim,
        "linear_value_head_dim": shape.gdn.value_dim,
        "linear_num_key_heads": shape.gdn.key_heads,
        "linear_num_value_heads": shape.gdn.value_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def shape_of(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """The shape that a ``config.json`` of ours describes. Raises FormatError."""
    try:
        head_dim = int(config["head_dim"])
        return DecoderShape(
            vocabulary=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=tuple(_layer_type(kind) for kind in config["layer_types"]),
            gdn=GdnShape(
                key_heads=int(config["linear_num_key_heads"]),
                value_heads=int(config["linear_num_value_heads"]),
                key_dim=int(config["linear_key_head_dim"]),
                value_dim=int(config["linear_value_head_dim"]),
                conv_width=int(config["linear_conv_kernel_dim"]),
                eps=float(config["rms_norm_eps"]),
            ),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=head_dim,
            rotary=int(head_dim * float(config["partial_rotary_factor"])),
            rope_theta=float(config["rope_theta"]),
            eps=float(config["rms_norm_eps"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"does not describe a Qwen3.5 decoder: {error}", where=where) from error


def _layer_type(kind: object) -> Any:
    if kind not in ("linear_attention", "full_attention"):
        raise ValueError(f"layer type {kind!r}")
    return kind


def load(folder: Path) -> Decoder:
    """A checkpoint folder. Raises NotFoundError for a missing file and FormatError for one that makes no sense."""
    raw: dict[str, bytes] = {}
    for name in ("config.json", "model.safetensors"):
        try:
            with (folder / name).open("rb") as file:
                raw[name] = file.read(MAX_CHECKPOINT + 1)
        except OSError as error:
            raise NotFoundError(f"checkpoint {folder} has no {name}: {error.strerror}") from error
    if len(raw["model.safetensors"]) > MAX_CHECKPOINT:
        raise FormatError(f"is larger than the {MAX_CHECKPOINT} bytes that are read", where=str(folder))
    config = load_json_object(raw["config.json"], where=str(folder / "config.json"), limit=1 << 20)
    shape = shape_of(config, where=str(folder / "config.json"))
    where = str(folder / "model.safetensors")
    return assemble(shape, safetensors.decode(raw["model.safetensors"], where=where), where=where)


# Tensors from a seed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """How large the parts of a made model are; every matrix starts with entries of variance 1 / (its inputs).

    ``values``: the value band after the convolution. ``loud``: the share of q's and k's channels at full size, the
    others being ``quiet`` times as large. ``mixing``: gain of what the GDN layers add, ``attending`` and ``mlp`` of the
    rest. ``decay``: log decay of the slowest and the fastest head, about. ``writing``, ``gating``: gain of beta's and
    of z's inputs. ``sharp``: standard deviation of the logits. ``silent``: rows of the head that are zero, for tokens
    that must not be chosen.
    """

    values: float = 1.0
    loud: float = 1.0
    quiet: float = 0.1
    mixing: float = 1.0
    attending: float = 1.0
    mlp: float = 1.0
    decay: tuple[float, float] = (0.05, 1.0)
    writing: float = 1.0
    gating: float = 1.0
    sharp: float = 1.0
    silent: Sequence[int] = ()


def make(shape: DecoderShape, seed: int, how: Make | None = None) -> Decoder:
    """A decoder from ``seed``, the same on every machine and with every version of NumPy."""
    return assemble(shape, make_tensors(shape, seed, how or Make()))


def make_tensors(shape: DecoderShape, seed: int, how: Make) -> dict[str, Array]:
    """The tensors of ``make`` by name, exact in float16 and bfloat16."""
    return {name: round_to_8_bits(_made(name, size, shape, seed, how)) for name, size in tensor_shapes(shape).items()}


def _made(name: str, size: tuple[int, ...], shape: DecoderShape, seed: int, how: Make) -> Array:
    x = normal(seed, name, size)
    gdn = shape.gdn
    kinds: dict[str, Callable[[], Array]] = {
        "embed_tokens.weight": lambda: x,
        "lm_head.weight": lambda: x * how.sharp / shape.hidden**0.5,
        "conv1d.weight": lambda: _conv(x, normal(seed, name + ":loud", size[:1]), gdn, how),
        "A_log": lambda: np.log(np.geomspace(*how.decay, gdn.value_heads) / np.log(2.0)),
        "dt_bias": lambda: 0.2 * x,
        "linear_attn.norm.weight": lambda: 1.0 + 0.2 * x,
        "norm.weight": lambda: 0.2 * x,
        "layernorm.weight": lambda: 0.2 * x,
        "in_proj_b.weight": lambda: x * how.writing / size[1] ** 0.5,
        "in_proj_z.weight": lambda: x * how.gating / size[1] ** 0.5,
        "out_proj.weight": lambda: x * how.mixing / size[1] ** 0.5,
        "o_proj.weight": lambda: x * how.attending / size[1] ** 0.5,
        "down_proj.weight": lambda: x * how.mlp / size[1] ** 0.5,
        "weight": lambda: x / size[-1] ** 0.5,
    }
    made = next(kind for ending, kind in kinds.items() if name.endswith(ending))()
    if name == "lm_head.weight":
        made[list(how.silent)] = 0.0
    return made


def _conv(x: Array, draw: Array, gdn: GdnShape, how: Make) -> Array:
    width = x.shape[-1]
    out: Array = x / np.sqrt(width)
    bands = gdn.bands()
    for band in ("q", "k"):
        # which channels are loud: those with the largest of a band's random numbers
        part = draw[bands[band]]
        loud = part >= np.sort(part)[::-1][max(1, round(how.loud * part.size)) - 1]
        out[bands[band]] *= np.where(loud, 1.0, how.quiet)[:, None, None]
    out[bands["v"]] *= how.values
    return out


def normal(seed: int, name: str, size: tuple[int, ...]) -> Array:
    """About normal numbers of variance 1: each the sum of four 16-bit uniform ones, from PCG64's own output, which
    NumPy promises to keep (NEP 19)."""
    count = int(np.prod(size))
    words = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(count)
    total = sum((words >> np.uint64(16 * n) & np.uint64(0xFFFF)).astype(np.float64) for n in range(4))
    centred = (total - 2 * 0xFFFF) / (0x10000 * (4 / 12) ** 0.5)
    return np.asarray(centred, dtype=np.float64).reshape(size)


def round_to_8_bits(x: Array) -> Array:
    """``x`` rounded to 8 significant bits; what is then too small for a normal float16 (2⁻¹⁴) becomes 0."""
    mantissa, exponent = np.frexp(x)
    rounded: Array = np.ldexp(np.round(mantissa * 256.0), exponent - 8)
    rounded[np.abs(rounded) < 2.0**-14] = 0.0
    return rounded


def dump_json(value: object) -> bytes:
    """JSON as the files of a checkpoint have it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
