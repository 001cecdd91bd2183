"""The probe checkpoint and its prompts: every known fault changes the tokens, and each differently."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buildkit.errors import FormatError, NotFoundError, StorageError
from buildkit.gdn import probe, safetensors
from buildkit.gdn.checkpoint import load, normal, tensor_shapes
from buildkit.gdn.decoder import Choice, DecoderState, complete
from buildkit.gdn.faults import Fault
from buildkit.gdn.layer import GdnWeights
from buildkit.gdn.signature import Exchange, Place, diagnose, judge, place, tells_apart

ROOT = Path(__file__).parents[3]
DTYPES = ("f32", "f16")
IN_DECODING = {Fault.CONV_STATE_DROPPED, Fault.CONV_STATE_FROZEN, Fault.CONV_STATE_UNREAD, Fault.STATE_NOT_RESET}
"""Faults that a single prompt in a fresh state does not meet."""


@functools.cache
def answers(fault: Fault | None) -> tuple[tuple[Choice, ...], ...]:
    """The prompts one after another, the first once more at the end, as a server with ``fault`` answers them."""
    out: list[tuple[Choice, ...]] = []
    stale: DecoderState | None = None
    for prompt in (*probe.prompts(), probe.prompts()[0]):
        with np.errstate(all="ignore"):
            done = complete(
                probe.model(),
                prompt.tokens,
                probe.ANSWER,
                fault=fault,
                stale=stale if fault is Fault.STATE_NOT_RESET else None,
            )
        out.append(done)
        stale = done[-1].state
    return tuple(out)


def exchanges(fault: Fault | None) -> list[Exchange]:
    prompts = (*probe.prompts(), probe.prompts()[0])
    return [
        Exchange(prompt=p.tokens, answer=tuple(c.token for c in a))
        for p, a in zip(prompts, answers(fault), strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fault_changes_the_tokens_and_each_differently(dtype: str) -> None:
    candidates: list[Fault | None] = [None, *Fault]
    alike = [
        (one, other)
        for one, other in itertools.permutations(candidates, 2)
        if not any(tells_apart(a, b, dtype, other) for a, b in zip(answers(one), answers(other), strict=True))
    ]
    assert not alike


def test_the_committed_matrix_is_that_of_today() -> None:
    candidates: list[Fault | None] = [None, *Fault]
    script = runpy.run_path(str(ROOT / "benchmarks/smoke.py"))
    page = "\n".join(script["signatures"]({fault: list(answers(fault)) for fault in candidates})) + "\n"
    committed = ROOT / "docs/evidence/fault-signatures.md"
    assert committed.read_text(encoding="utf-8") == page, "run benchmarks/smoke.py signatures again"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
def test_a_server_with_a_fault_is_explained_by_that_fault_alone(fault: Fault, dtype: str) -> None:
    found = diagnose(probe.model(), exchanges(fault), dtype)
    assert [explanation.fault for explanation in found] == [fault]
    assert fault.sentence in found[0].sentence


def test_a_right_server_is_explained_by_no_fault() -> None:
    assert diagnose(probe.model(), exchanges(None), "f16") == ()
    for exchange in exchanges(None):
        assert judge(probe.model(), exchange, "f16").identical == probe.ANSWER


def test_a_right_server_has_no_near_tie_to_hide_behind() -> None:
    for choice in itertools.chain.from_iterable(answers(None)):
        runner_up = int(np.argsort(choice.logits)[-2])
        assert place(choice, runner_up, "f16") is Place.WRONG


def test_an_answer_is_followed_by_its_own_tokens() -> None:
    exchange = exchanges(None)[1]
    wrong = (exchange.answer[0] + 1) % probe.END
    answer = judge(probe.model(), Exchange(prompt=exchange.prompt, answer=(wrong, *exchange.answer[1:])), "f32")
    assert answer.first_wrong == 0
    assert answer.wanted[1] == complete(probe.model(), exchange.prompt, 2, given=(wrong,))[1].token


def test_a_token_as_good_as_the_best_is_a_near_tie() -> None:
    choice = answers(None)[0][0]
    second = int(np.argsort(choice.logits)[-2])
    logits = choice.logits.copy()
    logits[second] = logits.max() - 0.01 * np.sqrt(np.mean(logits[logits != 0] ** 2))
    close = replace(choice, logits=logits)
    assert [place(close, second, dtype) for dtype in ("f32", "f16")] == [Place.WRONG, Place.NEAR_TIE]


def test_text_maps_back_to_tokens() -> None:
    assert len(set(probe.ALPHABET)) == probe.END == 64
    assert all(c.isascii() and c.isprintable() and not c.isspace() for c in probe.ALPHABET)
    for prompt in probe.prompts():
        assert probe.to_tokens(prompt.text) == prompt.tokens
    assert probe.to_tokens("AB C") is None
    assert sorted(len(p.tokens) for p in probe.prompts()) == list(probe.LENGTHS)
    assert min(probe.LENGTHS) < 64 < max(probe.LENGTHS)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_checkpoint_holds_the_same_weights_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    probe.write(tmp_path, dtype)
    loaded = load(tmp_path)
    assert loaded.shape == probe.SHAPE
    mixer, want = loaded.layers[0].mixer, probe.model().layers[0].mixer
    assert isinstance(mixer, GdnWeights)
    assert isinstance(want, GdnWeights)
    assert np.array_equal(mixer.in_proj_qkv, want.in_proj_qkv)
    assert np.array_equal(loaded.head, probe.model().head)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 8_000_000


def test_the_checkpoint_is_the_same_bytes_everywhere() -> None:
    # PCG64's output and rounding to 8 bits are exact; the one logarithm (A_log) is rounded so coarsely that libraries
    # agree. Whoever changes the probe changes this digest.
    digest = hashlib.sha256(b"".join(probe.files("f16").values())).hexdigest()
    assert digest == "adfa6b09ffbfd79bcaa42b8ddd69bf11782820a44e09f16cede994ef0171a54b"
    assert all(probe.is_exact(tensor) for tensor in probe.tensors().values())


def test_the_heads_are_in_a_side_file_that_no_loader_of_weights_takes_for_its_own() -> None:
    files = probe.files("f16")
    assert [name for name in files if name.endswith((".safetensors", ".bin", ".pt", ".gguf"))] == ["model.safetensors"]
    document = json.loads(files["heads.json"])
    assert {entry["name"]: tuple(entry["labels"]) for entry in document["heads"]} == probe.HEADS
    tensors = safetensors.decode(files[document["tensors"]], where="heads")
    for head in probe.heads():
        for field in ("weight", "bias"):
            value = getattr(head, field)
            if value is None:
                assert len(head.tokens) == len(head.labels)
                continue
            assert np.array_equal(tensors[f"{head.name}.{field}"], value)
            assert probe.is_exact(value)


def test_the_heads_decide_and_what_is_wrong_in_a_prompt_shows_in_their_scores() -> None:
    right = {p: probe.head_scores(p) for p in probe.prompts()}
    for heads in right.values():
        for name, labels in heads.items():
            assert tuple(labels) == probe.HEADS[name]
            assert sum(labels.values()) == pytest.approx(1)
    for name in probe.HEADS:
        assert len({max(heads[name], key=heads[name].__getitem__) for heads in right.values()}) > 1
    for fault in set(Fault) - IN_DECODING:
        with np.errstate(all="ignore"):
            wrong = {p: probe.head_scores(p, fault) for p in probe.prompts()}
        moved = max(abs(wrong[p][h][x] - y) for p in right for h in right[p] for x, y in right[p][h].items())
        assert moved > 0.1, fault


def test_made_numbers_are_about_normal() -> None:
    x = normal(7, "x", (200, 500))
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1) < 0.01
    assert np.array_equal(x, normal(7, "x", (200, 500)))
    assert not np.array_equal(x, normal(8, "x", (200, 500)))


def test_a_checkpoint_with_a_tensor_missing_or_misshapen_is_refused(tmp_path: Path) -> None:
    tensors = dict(probe.tensors())
    gone = tensors.pop("model.layers.1.linear_attn.A_log")
    probe.write(tmp_path, "f32")
    (tmp_path / "model.safetensors").write_bytes(safetensors.encode(tensors, "F32"))
    with pytest.raises(FormatError, match=r"no tensor model\.layers\.1\.linear_attn\.A_log"):
        load(tmp_path)
    tensors["model.layers.1.linear_attn.A_log"] = np.concatenate([gone, gone])
    (tmp_path / "model.safetensors").write_bytes(safetensors.encode(tensors, "F32"))
    with pytest.raises(FormatError, match="shape"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="does not describe"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="probe checkpoint"):
        probe.write(tmp_path / "file", "f32")


def test_safetensors_that_are_cut_or_patched_are_refused() -> None:
    data = safetensors.encode({"a": np.ones((2, 3)), "b": np.zeros(4)}, "F16")
    assert np.array_equal(safetensors.decode(data, where="x")["a"], np.ones((2, 3)))
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            safetensors.decode(data[:cut], where="x")
    for at in range(8):
        with pytest.raises(FormatError):
            safetensors.decode(data[:at] + b"\xff" + data[at + 1 :], where="x")


def test_the_order_of_tensors_is_that_of_the_data() -> None:
    assert list(probe.tensors()) == list(tensor_shapes(probe.SHAPE))
