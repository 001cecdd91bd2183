"""Tensors in the safetensors format, as far as a checkpoint of one file needs it.

Source: the format's description in the safetensors repository ("Format"): u64 little endian, the size of a JSON header;
the header, padded with spaces; the tensors' bytes, little endian, row by row, without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from buildkit.errors import FormatError
from buildkit.gdn.reference import Array
from buildkit.model import load_json_object

TensorType = Literal["F32", "F16", "BF16"]

MAX_HEADER = 1 << 20
"""Bytes of header that are read; a probe checkpoint's has 6,000."""
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def encode(tensors: Mapping[str, Array], dtype: TensorType) -> bytes:
    """The file with all tensors in ``dtype``, in the order given. Values must be exact in BF16 where that is asked for:
    the lower half of a float32 is cut off."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, at = [], 0
    for name, tensor in tensors.items():
        data = _to_bytes(tensor, dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def decode(data: bytes, *, where: str) -> dict[str, Array]:
    """All tensors of a file as float64. Raises FormatError naming ``where``."""
    if len(data) < 8:
        raise FormatError("is too short for a safetensors file", where=where)
    (size,) = struct.unpack_from("<Q", data)
    if size > min(MAX_HEADER, len(data) - 8):
        raise FormatError(f"has a header of {size} bytes, more than there is or than is read", where=where)
    header = load_json_object(data[8 : 8 + size], where=where, limit=MAX_HEADER)
    body = memoryview(data)[8 + size :]
    return {name: _tensor(entry, body, f"{where}: {name}") for name, entry in header.items() if name != "__metadata__"}


def _tensor(entry: object, body: memoryview, where: str) -> Array:
    try:
        assert isinstance(entry, dict)
        kind, dims = str(entry["dtype"]), [int(n) for n in entry["shape"]]
        start, end = (int(n) for n in entry["data_offsets"])
        item = _SIZES[kind]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise FormatError("is not described as a tensor of a known type", where=where) from error
    if min(dims, default=0) < 0 or not 0 <= start <= end <= len(body) or end - start != math.prod(dims) * item:
        raise FormatError(f"takes bytes {start} to {end}, which is not what its shape {dims} needs", where=where)
    return _from_bytes(bytes(body[start:end]), kind).reshape(dims)


def _to_bytes(tensor: Array, dtype: TensorType) -> bytes:
    if dtype == "F16":
        return tensor.astype("<f2").tobytes()
    single: NDArray[np.float32] = tensor.astype("<f4")
    if dtype == "F32":
        return single.tobytes()
    return (single.view("<u4") >> 16).astype("<u2").tobytes()


def _from_bytes(data: bytes, kind: str) -> Array:
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind]).astype(np.float64)
