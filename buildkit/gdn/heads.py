"""Classification heads: one answer per head from the last token of a prompt, as the reference server gives it.

A checkpoint names its heads in a side file, ``heads.json``, with the tensors of linear heads beside it::

    {"heads": [{"name": "route", "labels": ["a", "b"], "weight": "route.weight", "bias": "route.bias"},
               {"name": "mood", "labels": ["calm", "tense"], "tokens": [17, 23]}],
     "tensors": "heads.tensors"}

The tensors are in the safetensors format, but not under that extension: servers that know no heads load every
``*.safetensors`` of a checkpoint, and some refuse tensors that their model has no place for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from buildkit.gdn import safetensors
from buildkit.gdn.checkpoint import dump_json
from buildkit.gdn.decoder import Pass
from buildkit.gdn.reference import Array

HEADS_FILE = "heads.json"
TENSORS_FILE = "heads.tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One question with one of ``labels`` as its answer.

    Either linear on the normalised output of the last layer (``weight`` [labels, H], ``bias`` [labels]), or a choice
    among ``tokens``, one for each label, by their logits.
    """

    name: str
    labels: tuple[str, ...]
    weight: Array | None = None
    bias: Array | None = None
    tokens: tuple[int, ...] = ()


def scores(head: Head, step: Pass) -> dict[str, float]:
    """Probability of each label (softmax) after the last token of ``step``."""
    if head.weight is None:
        raw = step.logits[-1][list(head.tokens)]
    else:
        raw = head.weight @ step.hidden[-1] + (0.0 if head.bias is None else head.bias)
    share = np.exp(raw - np.max(raw))
    return dict(zip(head.labels, (share / share.sum()).tolist(), strict=True))


def files(heads: Sequence[Head], dtype: safetensors.TensorType) -> Mapping[str, bytes]:
    """The side file and the tensors that it refers to, by name."""
    entries: list[dict[str, object]] = []
    tensors: dict[str, Array] = {}
    for head in heads:
        entry: dict[str, object] = {"name": head.name, "labels": list(head.labels)}
        if head.tokens:
            entry["tokens"] = list(head.tokens)
        for field, value in (("weight", head.weight), ("bias", head.bias)):
            if value is not None:
                tensors[f"{head.name}.{field}"] = value
                entry[field] = f"{head.name}.{field}"
        entries.append(entry)
    document = {"heads": entries, "tensors": TENSORS_FILE}
    return {HEADS_FILE: dump_json(document), TENSORS_FILE: safetensors.encode(tensors, dtype)}
