"""The probe: a small Qwen3.5 checkpoint from a fixed seed, and the prompts that go with it.

Three GDN layers and one of full attention, with the head dims of real models (K and V of 128, GQA). Sizes of the parts
are chosen so that each known fault shows: values so small that the gated norm's eps matters (else a missing scale of q
would be divided away), some channels of q and k large enough for SiLU to bend, heads from slow to fast decay, and GDN
layers that weigh more than the rest. ``tests/unit/gdn`` proves that every fault changes the tokens, each differently.

The tokenizer has one printable character per token, so that an answer's text maps back to ids whatever the server does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buildkit.errors import StorageError
from buildkit.gdn import safetensors
from buildkit.gdn.checkpoint import Make, assemble, config_of, dump_json, make_tensors, normal, round_to_8_bits
from buildkit.gdn.decoder import Decoder, DecoderShape, forward
from buildkit.gdn.faults import Fault
from buildkit.gdn.heads import Head, scores
from buildkit.gdn.heads import files as head_files
from buildkit.gdn.layer import GdnShape
from buildkit.gdn.reference import Array

SEED = 302
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
"""Token n is character n. No white space (servers trim it), nothing that templates or markup use."""
END = len(ALPHABET)
"""The end-of-sequence token, which the probe never chooses."""
VOCABULARY = 128
LENGTHS = (5, 24, 70, 150)
"""Tokens of the prompts: below and above the chunk of 64 that prefill kernels work in."""
ANSWER = 16
"""Tokens of each answer."""

SHAPE = DecoderShape(
    vocabulary=VOCABULARY,
    hidden=128,
    intermediate=256,
    layers=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    gdn=GdnShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128),
    heads=2,
    kv_heads=1,
    head_dim=128,
    rotary=32,
)
HOW = Make(
    values=0.03,
    loud=0.1,
    quiet=0.05,
    mixing=2.0,
    attending=0.7,
    mlp=0.7,
    decay=(0.02, 1.5),
    gating=1.5,
    sharp=3.0,
    silent=range(END, VOCABULARY),
)

HEADS = {"route": ("kitchen", "garden", "street"), "mood": ("calm", "tense"), "length": ("short", "long")}
"""The labels of the classification heads: two linear ones, and one that chooses between two tokens."""
_TOKENS = {"length": "sl"}
_HEAD_SHARP = 2.0
"""Standard deviation of what a linear head computes before the softmax, about."""

_DTYPES: dict[str, tuple[safetensors.TensorType, str]] = {
    "f32": ("F32", "float32"),
    "f16": ("F16", "float16"),
    "bf16": ("BF16", "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt by name; ``text`` is what is sent."""

    name: str
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        return to_text(self.tokens)


@functools.cache
def tensors() -> dict[str, Array]:
    """The checkpoint's tensors by name: exact in float32, float16 and bfloat16."""
    return make_tensors(SHAPE, SEED, HOW)


@functools.cache
def model() -> Decoder:
    """The probe as the reference computes it."""
    return assemble(SHAPE, tensors())


@functools.cache
def heads() -> tuple[Head, ...]:
    """The classification heads, exact in every dtype as the other tensors are."""
    out = []
    for name, labels in HEADS.items():
        if name in _TOKENS:
            tokens = tuple(ALPHABET.index(character) for character in _TOKENS[name])
            out.append(Head(name=name, labels=labels, tokens=tokens))
            continue
        weight = normal(SEED, f"{name}.weight", (len(labels), SHAPE.hidden)) * _HEAD_SHARP / SHAPE.hidden**0.5
        bias = 0.2 * normal(SEED, f"{name}.bias", (len(labels),))
        out.append(Head(name=name, labels=labels, weight=round_to_8_bits(weight), bias=round_to_8_bits(bias)))
    return tuple(out)


def head_scores(prompt: Prompt, fault: Fault | None = None) -> dict[str, dict[str, float]]:
    """What a server answers for each head to ``prompt``, by head and label; with ``fault``, one that has it."""
    step = forward(model(), prompt.tokens, fault=fault)
    return {head.name: scores(head, step) for head in heads()}


@functools.cache
def prompts() -> tuple[Prompt, ...]:
    """The prompts, shortest first."""
    raw = np.random.PCG64([SEED, sum(LENGTHS)]).random_raw(sum(LENGTHS)) % np.uint64(len(ALPHABET))
    ends = np.cumsum(LENGTHS)
    return tuple(
        Prompt(name=f"{length} tokens", tokens=tuple(raw[end - length : end].tolist()))
        for length, end in zip(LENGTHS, ends.tolist(), strict=True)
    )


def to_text(tokens: tuple[int, ...]) -> str:
    """The text of tokens; ``?`` for those that are no character."""
    return "".join(ALPHABET[token] if token < END else "?" for token in tokens)


def to_tokens(text: str) -> tuple[int, ...] | None:
    """The tokens of a text; None where it has a character that is not a token."""
    tokens = tuple(ALPHABET.find(character) for character in text)
    return None if -1 in tokens else tokens


def write(folder: Path, dtype: str) -> None:
    """Write the checkpoint, in ``dtype`` (f32, f16 or bf16), into ``folder``; the same bytes every time.

    Raises StorageError where the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files(dtype).items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise StorageError(f"the probe checkpoint cannot be written to {folder}: {error.strerror}") from error


def files(dtype: str) -> dict[str, bytes]:
    """The checkpoint's files by name."""
    stored, named = _DTYPES[dtype]
    special = {"<|end|>": END} | {f"<|unused{n}|>": n for n in range(END + 1, VOCABULARY)}
    return {
        "config.json": dump_json(config_of(SHAPE, eos=END, dtype=named)),
        "generation_config.json": dump_json({"do_sample": False, "eos_token_id": END}),
        "model.safetensors": safetensors.encode(tensors(), stored),
        "tokenizer.json": dump_json(_tokenizer(special)),
        "tokenizer_config.json": dump_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": "<|end|>",
                "pad_token": "<|end|>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 4096,
                "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            }
        ),
        **head_files(heads(), stored),
    }


def _tokenizer(special: dict[str, int]) -> dict[str, object]:
    """Byte-level BPE without merges, which is what readers of Qwen checkpoints expect: a token for each character."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: number for number, character in enumerate(ALPHABET)} | special,
            "merges": [],
        },
    }


def is_exact(values: Array) -> bool:
    """Whether all values survive in every dtype that a checkpoint is written in."""
    return bool(np.array_equal(values, round_to_8_bits(values)))
