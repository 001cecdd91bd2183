"""The process that loads the library under test: ``python -m buildkit.gdn.worker``.

It may die (a segfault in the library, an illegal address that poisons the context, a hang): ``buildkit.gdn.harness``
reads what it left behind and starts another for the calls that remain. Each line of the journal is a JSON array: the
call's number, ``begin``, ``end``, ``missing`` or ``error``, and a text. The outputs of call n are in ``n.npz``.

Standard input is one JSON object: ``library``, ``out`` (a folder), ``ordinal`` of the GPU, and ``calls``, each an array
of number, case id and the contract's fields; ``loadable`` asks instead whether the driver can load the library's code.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from buildkit.errors import BuildkitError, MissingComponentError
from buildkit.gdn import reference as ref
from buildkit.gdn.cases import Arrays, Case, Inputs, find_case, inputs, quantise
from buildkit.gdn.contracts import LOG, Contract, Entry, entry
from buildkit.gdn.driver import CudaError, Driver

EXIT_NO_GPU = 3
EXIT_DEVICE_ERROR = 4
EXIT_CANNOT_LOAD = 5

_TYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "u32": np.uint32, "i64": np.int64}
_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "stream": ctypes.c_int64,
}
GUARD = 256
"""Bytes of poison after each output; a kernel that touches them writes out of bounds."""


class MissingSymbolError(Exception):
    """The library exports no such entry point."""


class Library:
    """The shared library under test, with its device memory."""

    def __init__(self, path: Path, ordinal: int) -> None:
        self._driver = Driver(ordinal)
        self.device = self._driver.describe()
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildkitError(f"{path.name} cannot be loaded: {error}") from error
        self._contract = LOG

    def run(self, case: Case, contract: Contract) -> dict[str, Any]:
        """The outputs of a case: for each, the array in its own dtype and ``<name>:guard``, whether its guard held.

        Raises MissingSymbol, or CudaError where the context is lost.
        """
        self._contract = contract
        given = inputs(case, contract)
        if case.stage == "chain":
            return self._chain(case, given)
        return self._call(entry(case.stage, case.dtype, contract), case, given)

    def _call(self, target: Entry, case: Case, given: Inputs) -> dict[str, Any]:
        try:
            function = getattr(self._lib, target.symbol)
        except AttributeError as error:
            raise MissingSymbolError(target.symbol) from error
        function.restype = None
        arrays = dict(given.arrays)
        if self._contract.state == "vk" and "state" in arrays:
            arrays["state"] = np.swapaxes(arrays["state"], -1, -2)
        values: list[Any] = []
        written: dict[str, tuple[int, tuple[int, ...], type[np.generic]]] = {}
        for name, kind in target.arguments:
            if kind in _SCALARS:
                values.append(_SCALARS[kind](given.scalars[name]))
                continue
            if kind == "null":
                values.append(ctypes.c_void_p(None))
                continue
            dtype = _TYPES[case.dtype if kind == "io" else kind]
            if name in arrays:
                data = np.ascontiguousarray(arrays[name].astype(dtype))
                shape = data.shape
                pointer = self._driver.upload(data.tobytes() + b"\xff" * GUARD)
            else:
                shape = _output_shape(name, case, given)
                pointer = self._driver.poisoned(int(np.prod(shape)) * dtype().itemsize + GUARD)
            values.append(ctypes.c_void_p(pointer))
            if name in target.outputs:
                written[name] = (pointer, shape, dtype)
        function(*values)
        self._driver.synchronise()
        out: dict[str, Any] = {}
        for name, (pointer, shape, dtype) in written.items():
            size = int(np.prod(shape)) * dtype().itemsize
            raw = self._driver.download(pointer, size + GUARD)
            array = np.frombuffer(raw[:size], dtype=dtype).reshape(shape)
            if self._contract.state == "vk" and name == "state":
                array = np.swapaxes(array, -1, -2)
            out[name] = np.ascontiguousarray(array)
            out[f"{name}:guard"] = raw[size:] == b"\xff" * GUARD
        return out

    def _chain(self, case: Case, given: Inputs) -> dict[str, Any]:
        """All stages in a row, each fed what the one before wrote on the device; the glue is what a server's host code
        does: split the bands, scale q, repeat key heads, fit the decay to the recurrence's contract."""
        contract, shape, arrays = self._contract, case.shape, given.arrays
        decode = case.name == "decode"
        batch, tokens, heads = len(case.lengths), case.tokens, shape.value_heads
        slots = np.array(case.slots, dtype=np.float64)
        cu_seqlens = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.float64)
        placed: Arrays = {"slots": slots} if decode else {"cu_seqlens": cu_seqlens}
        guards = True

        def stage(name: str, stage_arrays: Arrays, **scalars: float) -> dict[str, Any]:
            nonlocal guards
            scalars = {"batch": batch, "stream": 0, "heads": heads, **scalars}
            got = self._call(
                entry(name, case.dtype, contract), case, Inputs(arrays=stage_arrays, scalars=_typed(scalars))
            )
            guards = guards and all(held for key, held in got.items() if key.endswith(":guard"))
            return got

        conv_state = arrays["conv_state"] if decode else arrays["conv_state"][list(case.slots)]
        conv = stage(
            "conv_decode" if decode else "conv_prefill",
            {"x": arrays["x"], "weight": arrays["weight"], "conv_state": conv_state, **placed},
            channels=shape.channels,
            width=shape.conv_width,
            silu=1,
        )["out"].astype(np.float64)
        bands = shape.bands()
        v = conv[:, bands["v"]].reshape(tokens, heads, shape.value_dim)
        normalised = {}
        for name in ("q", "k"):
            rows = conv[:, bands[name]].reshape(tokens * shape.key_heads, shape.key_dim)
            unit = stage("l2_norm", {"x": rows}, rows=rows.shape[0], dim=shape.key_dim, eps=ref.L2_EPS)["out"]
            unit = unit.astype(np.float64).reshape(tokens, shape.key_heads, shape.key_dim)
            normalised[name] = ref.repeat_heads(unit, heads)
        gates = stage("gating", {name: arrays[name] for name in ("a_log", "a", "b", "dt_bias")}, batch=1, seq=tokens)
        g = gates["g"].astype(np.float64)
        if contract.writes != contract.reads:
            g = np.exp(g) if contract.reads == "decay" else np.log(g)
        recurrent = stage(
            "decode" if decode else "recurrence",
            {
                "q": quantise(normalised["q"] * shape.key_dim**-0.5, case.dtype),
                "k": normalised["k"],
                "v": v,
                "g": g,
                "beta": gates["beta"].astype(np.float64),
                "state": arrays["state"],
                **({"cu_seqlens": cu_seqlens} if not decode else {}),
                "slots": slots,
            },
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )
        normed = stage(
            "gated_norm",
            {
                "x": recurrent["out"].astype(np.float64).reshape(tokens, shape.value_channels),
                "z": arrays["z"],
                "gamma": arrays["gamma"],
            },
            rows=tokens,
            channels=shape.value_channels,
            group=shape.value_dim,
            eps=shape.eps,
            per_group=1,
            has_bias=0,
        )
        return {"out": normed["out"], "out:guard": guards, "state": recurrent["state"], "state:guard": guards}

    def loadable(self, path: Path) -> str:
        """Empty where the driver can load one of the library's fatbins; else its reason for refusing the last one."""
        reason = "the library holds no fatbin"
        for image in fatbins(path.read_bytes()):
            try:
                self._driver.loads(image)
            except CudaError as error:
                reason = f"CUDA error {error.code} ({error.name})"
            else:
                return ""
        return reason


def fatbins(data: bytes) -> list[bytes]:
    """The fatbins in a file's bytes: magic 0xBA55ED50, version 1, header size 16, u64 size of what follows."""
    found, at = [], data.find(_FATBIN)
    while at >= 0:
        size = int.from_bytes(data[at + 8 : at + 16], "little")
        if at % 8 == 0 and at + 16 + size <= len(data):
            found.append(data[at : at + 16 + size])
        at = data.find(_FATBIN, at + 8)
    return found


_FATBIN = b"\x50\xed\x55\xba\x01\x00\x10\x00"


def _typed(scalars: Mapping[str, float]) -> dict[str, int | float | bool]:
    flags = {"silu", "per_group", "has_bias"}
    return {name: bool(value) if name in flags else value for name, value in scalars.items()}


def _output_shape(name: str, case: Case, given: Inputs) -> tuple[int, ...]:
    if name in ("g", "beta"):
        return given.arrays["a"].shape
    if name == "out":
        source = "v" if "v" in given.arrays else "x"
        return given.arrays[source].shape
    raise ValueError(f"{case.id}: no shape for {name}")


def main() -> int:
    """Exit status 0 when all calls ran, EXIT_NO_GPU without a GPU, EXIT_DEVICE_ERROR when the context is lost."""
    job = json.load(sys.stdin)
    out, path = Path(job["out"]), Path(job["library"])
    try:
        library = Library(path, job["ordinal"])
    except MissingComponentError as error:
        (out / "no-gpu").write_text(str(error), encoding="utf-8")
        return EXIT_NO_GPU
    except BuildkitError as error:
        (out / "cannot-load").write_text(str(error), encoding="utf-8")
        return EXIT_CANNOT_LOAD
    (out / "device.json").write_text(json.dumps(asdict(library.device)), encoding="utf-8")
    if job.get("loadable"):
        (out / "loadable").write_text(library.loadable(path), encoding="utf-8")
        return 0
    with (out / "journal").open("a", encoding="utf-8") as journal:

        def note(number: int, what: str, text: str = "") -> None:
            journal.write(json.dumps([number, what, text]) + "\n")
            journal.flush()

        for number, case_id, contract in job["calls"]:
            note(number, "begin")
            try:
                outputs = library.run(find_case(case_id), Contract(**contract))
            except MissingSymbolError as error:
                note(number, "missing", str(error))
                continue
            except CudaError as error:
                note(number, "error", error.message)
                return EXIT_DEVICE_ERROR
            np.savez(out / f"{number}.npz", **outputs)
            note(number, "end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
