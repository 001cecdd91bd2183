"""The configurations in which the decoder is held against transformers: drawn once from a seed, by integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from buildkit.gdn.checkpoint import Make
from buildkit.gdn.decoder import DecoderShape, LayerType
from buildkit.gdn.layer import GdnShape

SEED = 41
COUNT = 24
DECODED = 6
"""Tokens that are decoded after each prompt."""

LENGTHS = (1, 2, 3, 4, 5, 17, 63, 64, 65, 100, 127, 128, 129, 192, 200, 255, 256, 300)
"""Around the width of the convolution and the chunk of 64, and up to several chunks; the other six are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One model and one prompt."""

    number: int
    shape: DecoderShape
    how: Make
    prompt: tuple[int, ...]

    @property
    def id(self) -> str:
        gdn = self.shape.gdn
        return (
            f"{self.number}-gdn{gdn.key_heads}x{gdn.key_dim}-{gdn.value_heads}x{gdn.value_dim}-w{gdn.conv_width}"
            f"-attention{self.shape.heads}-{self.shape.kv_heads}x{self.shape.head_dim}-tokens{len(self.prompt)}"
        )


def configurations() -> tuple[Configuration, ...]:
    """All of them, the same on every machine."""
    raw = iter(np.random.PCG64([SEED]).random_raw(COUNT * 400).tolist())

    def one_of(values: tuple[Any, ...]) -> Any:
        return values[next(raw) % len(values)]

    out = []
    for number in range(COUNT):
        key_heads, group = one_of((1, 2, 4)), one_of((1, 2, 4))
        kv_heads, head_dim = one_of((1, 2)), one_of((32, 64, 128))
        eps = one_of((1e-6, 1e-5))
        kinds: tuple[LayerType, ...] = one_of(
            (
                ("linear_attention",) * 3 + ("full_attention",),
                ("linear_attention", "full_attention"),
                ("full_attention", "linear_attention", "linear_attention"),
            )
        )
        shape = DecoderShape(
            vocabulary=one_of((50, 96)),
            hidden=one_of((64, 96, 128)),
            intermediate=one_of((64, 160)),
            layers=kinds,
            gdn=GdnShape(
                key_heads=key_heads,
                value_heads=key_heads * group,
                key_dim=one_of((64, 128)),
                value_dim=one_of((64, 128)),
                conv_width=one_of((2, 3, 4, 4)),
                eps=eps,
            ),
            heads=kv_heads * one_of((1, 2, 4)),
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=head_dim // one_of((1, 2, 4)),
            rope_theta=one_of((1e4, 1e6, 1e7)),
            eps=eps,
        )
        how = Make(
            decay=one_of(((0.001, 0.1), (0.05, 1.0), (0.5, 4.0))),
            quiet=one_of((0.1, 1.0)),
            loud=one_of((0.2, 1.0)),
            mixing=one_of((0.5, 1.0)),
            mlp=0.5,
            attending=0.5,
        )
        length = LENGTHS[number] if number < len(LENGTHS) else 1 + next(raw) % 300
        out.append(
            Configuration(
                number=number,
                shape=shape,
                how=how,
                prompt=tuple(next(raw) % shape.vocabulary for _ in range(length)),
            )
        )
    return tuple(out)
