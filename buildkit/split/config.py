"""The config of a divided image: new diff_ids, a history that still tells the story, everything else as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from buildkit.model import Digest, ImageConfig

COMMENT = "buildkit.split"


def divided_config(config: ImageConfig, parts: Sequence[Sequence[Digest]]) -> ImageConfig:
    """``config`` with each layer's diff_id replaced by those of its parts (``parts[i]``: lowest first).

    The history gets one entry more for each part but the first, behind the entry of the layer; a history that does not
    tell of as many layers as there are is left alone. Where no layer was divided it is ``config`` itself, byte for
    byte. Image-spec, config.md: "rootfs", "history".
    """
    if [list(p) for p in parts] == [[d] for d in config.diff_ids]:
        return config
    document = config.document
    changed: dict[str, Any] = {"rootfs": {**document["rootfs"], "diff_ids": [str(d) for ids in parts for d in ids]}}
    history = document.get("history")
    if isinstance(history, list) and _matches(history, len(parts)):
        changed["history"] = _divided_history(history, parts)
    return ImageConfig.parse(replace_members(config.raw, changed), where="divided config")


def replace_members(raw: bytes, changed: Mapping[str, Any]) -> bytes:
    """A JSON object's bytes with the values of some members replaced; every other byte stays as it is."""
    text = raw.decode("utf-8", errors="surrogatepass")
    decoder = json.JSONDecoder()
    out = []
    done = 0
    at = _skip(text, 0)
    while text[at] in "{,":
        at = _skip(text, at + 1)
        if text[at] == "}":
            break
        key, at = decoder.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = decoder.raw_decode(text, begin)
        if key in changed:
            out += [text[done:begin], json.dumps(changed[key], separators=(",", ":"), ensure_ascii=False)]
            done = end
        at = _skip(text, end)
    out.append(text[done:])
    return "".join(out).encode("utf-8", errors="surrogatepass")


def _skip(text: str, at: int) -> int:
    """The first character from ``at`` on that is no white space (RFC 8259, section 2)."""
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _matches(history: Sequence[object], layers: int) -> bool:
    entries = [entry for entry in history if isinstance(entry, dict)]
    return len(entries) == len(history) and sum(not entry.get("empty_layer") for entry in entries) == layers


def _divided_history(
    history: Sequence[Mapping[str, Any]], parts: Sequence[Sequence[Digest]]
) -> list[Mapping[str, Any]]:
    out: list[Mapping[str, Any]] = []
    layer = 0
    for entry in history:
        out.append(entry)
        if entry.get("empty_layer"):
            continue
        count = len(parts[layer])
        for number in range(2, count + 1):
            more: dict[str, Any] = {"created": entry["created"]} if "created" in entry else {}
            more["created_by"] = f"part {number} of {count} of the layer above"
            more["comment"] = COMMENT
            out.append(more)
        layer += 1
    return out
