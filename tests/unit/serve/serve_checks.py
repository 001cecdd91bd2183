"""The checks of the reference server's logic, in an environment that has torch: ``python serve_checks.py FOLDER``.

Not collected by the suite itself, which runs without torch; ``test_serve.py`` starts it in an environment with it and
reports each check as a test. ``FOLDER`` holds a checkpoint of ``tiny_checkpoint.py``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

IMAGE = Path(__file__).resolve().parents[3] / "images" / "clef-serve"
sys.path.insert(0, str(IMAGE))

import torch  # noqa: E402
from app import MAX_BODY, create_app, main  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from model import CancelledError, Model, ModelError, RequestError, choose_device, read_heads  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from turns import BusyError, Turns  # noqa: E402

PROMPT = "The delta rule writes what the key selects."
CHECKS: list[Callable[[], None]] = []
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
_MODEL: list[Model] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def model() -> Model:
    if not _MODEL:
        _MODEL.append(Model.load(FOLDER, device="cpu"))
    return _MODEL[0]


@contextmanager
def client(**options: Any) -> Iterator[TestClient]:
    with TestClient(create_app(model(), **options), raise_server_exceptions=False) as found:
        yield found


@contextmanager
def changed(name: str, change: Callable[[Path], object]) -> Iterator[Path]:
    copy = FOLDER.parent / f"changed-{name}"
    shutil.copytree(FOLDER, copy, dirs_exist_ok=True)
    try:
        change(copy)
        yield copy
    finally:
        shutil.rmtree(copy)


@contextmanager
def raises(kind: type[BaseException], says: str) -> Iterator[list[BaseException]]:
    """pytest.raises without pytest, which the environment with torch does not have."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert says in str(caught[0]), caught[0]


def refused(name: str, change: Callable[[Path], object]) -> str:
    with changed(name, change) as folder, raises(ModelError, "") as caught:
        Model.load(folder, device="cpu")
    return str(caught[0])


@check
def completions_are_what_transformers_generates() -> None:
    for prompt in ("a", PROMPT, PROMPT * 4):
        ids = model().encode(prompt)
        ours = model().complete(ids, max_tokens=40, ignore_end=True)
        theirs = model()._network.generate(
            torch.tensor([ids]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None
        )
        assert list(ours.token_ids) == theirs[0, len(ids) :].tolist()
        assert ours.finish_reason == "length"


@check
def log_probabilities_are_those_of_one_pass_without_state() -> None:
    ids = model().encode(PROMPT)
    done = model().complete(ids, max_tokens=12, top=4, ignore_end=True)
    with torch.inference_mode():
        logits = model()._network(input_ids=torch.tensor([[*ids, *done.token_ids]])).logits[0].float()
    scores = torch.log_softmax(logits, -1)
    for index, step in enumerate(done.steps):
        row = scores[len(ids) - 1 + index]
        assert abs(float(row[step.chosen.token_id]) - step.chosen.logprob) < 1e-3
        assert [t.token_id for t in step.top] == torch.topk(row, 4).indices.tolist()
        assert step.top[0] == step.chosen


@check
def the_trace_is_what_the_layers_compute() -> None:
    ids = model().encode(PROMPT)
    layer = model()._network.model.layers[0].linear_attn
    seen: dict[str, torch.Tensor] = {}
    handle = layer.out_proj.register_forward_hook(lambda _m, i, _o: seen.__setitem__("norm", i[0]))
    with model().traced() as traces:
        model().classify(ids)
    handle.remove()
    assert [t.layer for t in traces] == [0, 1, 2]
    first = traces[0]
    assert first.beta.count == len(ids) * 4
    assert 0 < first.beta.absmax <= 1
    assert abs(first.norm.sum - float(seen["norm"].double().sum())) < 1e-3
    assert first.norm.absmax == float(seen["norm"].abs().max())
    assert first.delta.absmax > 0
    before = first.beta.sum
    model().classify(ids)
    assert first.beta.sum == before, "hooks must be gone"


@check
def heads_answer_from_the_last_token() -> None:
    ids = model().encode(PROMPT)
    with torch.inference_mode():
        out = model()._network.model(input_ids=torch.tensor([ids]))
        logits = model()._network.lm_head(out.last_hidden_state)[0, -1]
    tensors = load_file(FOLDER / "heads.safetensors")
    answers = {a.head: a for a in model().classify(ids)}
    assert set(answers) == {"route", "mood", "length"}
    for name in ("route", "mood"):
        expected = torch.softmax(tensors[f"{name}.weight"] @ out.last_hidden_state[0, -1] + tensors[f"{name}.bias"], -1)
        got = list(answers[name].scores.values())
        assert torch.allclose(torch.tensor(got), expected, atol=1e-5)
        assert answers[name].label == list(answers[name].scores)[int(expected.argmax())]
    document = json.loads((FOLDER / "heads.json").read_text())
    tokens = document["heads"][2]["tokens"]
    assert torch.allclose(
        torch.tensor(list(answers["length"].scores.values())), torch.softmax(logits[tokens], -1), atol=1e-5
    )


@check
def a_completion_over_http_has_text_ids_and_log_probabilities() -> None:
    with client(trace=True) as http:
        answer = http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "logprobs": 3, "ignore_eos": True}
        ).json()
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 8
        assert model().encode(choice["text"]) == tuple(choice["token_ids"])
        assert choice["prompt_token_ids"] == list(model().encode(PROMPT))
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"] == list(range(8))
        assert all(len(t) <= 3 for t in choice["logprobs"]["top_logprobs"])
        assert answer["usage"] == {"prompt_tokens": 43, "completion_tokens": 8, "total_tokens": 51}
        assert len(answer["trace"]["layers"]) == 3
        total = sum(layer["beta"]["sum"] for layer in answer["trace"]["layers"])
        assert abs(answer["trace"]["total"]["beta"]["sum"] - total) < 1e-9


@check
def prompts_come_as_text_ids_or_lists_of_either() -> None:
    ids = list(model().encode(PROMPT))
    with client() as http:
        texts = []
        for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids, ids]):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "temperature": 0}).json()
            texts += [c["text"] for c in answer["choices"]]
            assert "trace" not in answer
        assert len(texts) == 6
        assert len(set(texts)) == 1
        echoed = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 5, "echo": True}).json()
        assert echoed["choices"][0]["text"] == PROMPT + texts[0]


@check
def stop_texts_and_end_tokens_end_an_answer() -> None:
    with client() as http:
        whole = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}).json()
        text = whole["choices"][0]["text"]
        body = {"prompt": PROMPT, "max_tokens": 12, "stop": [text[4:6]], "ignore_eos": True}
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == text[: text.find(text[4:6])]
        assert choice["finish_reason"] == "stop"
    first = whole["choices"][0]["token_ids"][0]
    ends, model().end_ids = model().end_ids, frozenset([first])
    try:
        ended = model().complete(model().encode(PROMPT), max_tokens=12)
    finally:
        model().end_ids = ends
    assert (ended.token_ids, ended.finish_reason) == ((), "stop")


@check
def systemone_health_and_models_over_http() -> None:
    with client() as http:
        answer = http.post("/v1/systemone", json={"prompt": PROMPT}).json()
        assert set(answer["answers"]) == {"route", "mood", "length"}
        for head in answer["answers"].values():
            assert head["score"] == max(head["scores"].values()) == head["scores"][head["answer"]]
            assert abs(sum(head["scores"].values()) - 1) < 1e-6
        health = http.get("/health").json()
        assert (health["status"], health["device"], health["requests"]) == ("ok", "cpu", 0)
        (entry,) = http.get("/v1/models").json()["data"]
        assert (entry["id"], entry["max_model_len"]) == (FOLDER.name, 512)


@check
def bad_requests_are_client_errors_in_json() -> None:
    cases: list[tuple[Any, int]] = [
        ({}, 400),
        ({"prompt": None}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": [1, "a"]}, 400),
        ({"prompt": [10_000]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": [True]}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"prompt": "a", "max_tokens": 0}, 400),
        ({"prompt": "a", "max_tokens": 10**9}, 400),
        ({"prompt": "a" * 512, "max_tokens": 1}, 400),
        ({"prompt": "a", "temperature": 0.7}, 400),
        ({"prompt": "a", "stream": True}, 400),
        ({"prompt": "a", "n": 2}, 400),
        ({"prompt": "a", "logprobs": 50}, 400),
        ({"prompt": "a", "presence_penalty": 1}, 400),
        ({"prompt": ["a"] * 65}, 400),
        ({"prompt": "a", "model": "other"}, 404),
        ([], 400),
        ("a", 400),
        (None, 400),
    ]
    with client() as http:
        for path in ("/v1/completions", "/v1/systemone"):
            for body, status in cases:
                if path == "/v1/systemone" and isinstance(body, dict) and set(body) - {"prompt", "model"}:
                    continue
                answer = http.post(path, json=body)
                assert answer.status_code == status, (path, body, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"
            raw = http.post(path, content=b'{"prompt": "a', headers={"content-type": "application/json"})
            assert raw.status_code == 400
            assert raw.json()["error"]["message"]
        assert http.get("/nowhere").json()["error"]["code"] == 404
        assert http.get("/v1/completions").json()["error"]["code"] == 405
        large = http.post("/v1/completions", content=b"x" * (MAX_BODY + 1))
        assert large.status_code == 413
        grown = http.post("/v1/completions", content=iter([b"x" * MAX_BODY, b"x" * MAX_BODY]))
        assert grown.status_code == 413
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "unknown": 1}).status_code == 200


@check
def nonsense_from_the_model_is_a_server_error() -> None:
    head = model()._network.lm_head
    handle = head.register_forward_hook(lambda _m, _i, out: out * float("nan"))
    try:
        with client() as http:
            answer = http.post("/v1/completions", json={"prompt": "a"})
    finally:
        handle.remove()
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the model computed logits that are not finite",
        "type": "server_error",
        "param": None,
        "code": 500,
    }


@check
def one_runs_some_wait_and_the_rest_are_refused() -> None:
    async def story() -> None:
        turns = Turns(waiting=2)
        running, most, release = 0, 0, threading.Event()
        lock = threading.Lock()

        def work(_cancelled: threading.Event) -> int:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            release.wait(10)
            with lock:
                running -= 1
            return 1

        async def stays() -> bool:
            return False

        jobs = [asyncio.ensure_future(turns.run(work, stays)) for _ in range(10)]
        await asyncio.sleep(0)
        assert turns.taken == 3
        release.set()
        done = await asyncio.gather(*jobs, return_exceptions=True)
        assert [d for d in done if d == 1] == [1, 1, 1]
        assert sum(isinstance(d, BusyError) for d in done) == 7
        assert (most, turns.taken) == (1, 0)
        turns.close()
        with raises(BusyError, ""):
            await turns.run(work, stays)

    asyncio.run(story())


@check
def work_ends_when_its_client_has_left() -> None:
    async def story() -> None:
        turns = Turns(waiting=0)
        ids = model().encode(PROMPT)

        async def left() -> bool:
            return True

        def work(cancelled: threading.Event) -> object:
            while True:
                model().complete(ids, max_tokens=400, ignore_end=True, cancelled=cancelled)

        with raises(CancelledError, ""):
            await turns.run(work, left)
        assert turns.taken == 0

    asyncio.run(story())


@check
def a_checkpoint_that_is_not_whole_is_refused() -> None:
    def without(tensor: str) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            del tensors[tensor]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        return change

    def reshaped(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(3)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def truncated(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])

    def setting(**values: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | values))

        return change

    assert "model.layers.0.linear_attn.A_log" in refused("a", without("model.layers.0.linear_attn.A_log"))
    assert "cannot be loaded" in refused("b", reshaped)
    assert "cannot be loaded" in refused("c", truncated)
    assert "cannot be loaded" in refused("d", lambda f: (f / "config.json").write_text("{"))
    assert "no config.json" in refused("e", lambda f: (f / "config.json").unlink())
    assert "cannot be loaded" in refused("f", lambda f: (f / "tokenizer.json").unlink())
    assert "is a llama" in refused("g", setting(model_type="llama"))
    assert "not a hybrid" in refused("h", lambda f: _only_attention(f))


def _only_attention(folder: Path) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig.from_pretrained(folder)
    config.layer_types = ["full_attention"] * 4
    Qwen3_5ForCausalLM(config).save_pretrained(folder)


@check
def a_checkpoint_that_may_not_be_read_is_named() -> None:
    with TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o755)
        file, folder = Path(open_to_all) / "file", Path(open_to_all) / "folder"
        shutil.copytree(FOLDER, file)
        shutil.copytree(FOLDER, folder)
        (file / "model.safetensors").chmod(0)
        folder.chmod(0)
        command = [sys.executable, "-c", _AS_NOBODY, str(IMAGE), str(file), str(folder)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        folder.chmod(0o755)
    assert f"{file}: user 65534 may not read model.safetensors" in told, told
    assert f"{folder}: user 65534: Permission denied" in told, told


_AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from model import Model, ModelError
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
os.getuid = lambda: 65534
for folder in sys.argv[2:]:
    try:
        Model.load(Path(folder), device="cpu")
    except ModelError as error:
        print(error)
"""


@check
def heads_that_make_no_sense_are_refused() -> None:
    def heads(document: Any) -> Callable[[Path], object]:
        return lambda folder: (folder / "heads.json").write_text(json.dumps(document))

    for number, entry in enumerate(
        (
            {"name": "a", "labels": []},
            {"name": "a", "labels": ["x", "x"], "tokens": [1, 2]},
            {"name": "a", "labels": ["x", "y"], "tokens": [1]},
            {"name": "a", "labels": ["x", "y"], "tokens": [1, 10**6]},
            {"name": "a", "labels": ["x", "y"], "weight": "route.weight"},
            {"name": "a", "labels": ["x"], "weight": "none"},
            {"labels": ["x"], "tokens": [1]},
            "a",
        )
    ):
        document = {"heads": [entry], "tensors": "heads.safetensors"}
        assert "heads.json" in refused(f"head{number}", heads(document)), entry
    twice = {"name": "a", "labels": ["x"], "tokens": [1]}
    assert "one name" in refused("twice", heads({"heads": [twice, twice]}))
    assert "heads.json" in refused("outside", heads({"heads": [], "tensors": "../../x"}))
    with changed("headless", lambda f: (f / "heads.json").unlink()) as folder:
        bare = Model.load(folder, device="cpu")
        assert read_heads(folder, hidden=64, vocabulary=96, device=torch.device("cpu")) == ()
        with raises(RequestError, "no heads"):
            bare.classify(bare.encode("a"))


@check
def a_device_that_is_not_there_is_refused() -> None:
    for wanted in ("cuda:0", "cuda:99", "tpu", "auto,0", "meta"):
        with raises(ModelError, wanted):
            choose_device(wanted)
    assert choose_device("auto").type == "cpu"


@check
def a_start_that_fails_says_why_on_one_line() -> None:
    assert main(["--model", str(FOLDER / "none"), "--device", "cpu"]) == 1
    for wrong in (["--port", "0"], ["--waiting", "-1"], ["--max-tokens", "0"], []):
        with raises(SystemExit, "2"):
            main([*(["--model", str(FOLDER)] if wrong else []), *wrong])


def run() -> int:
    for function in CHECKS:
        name = function.__name__
        try:
            function()
        except Exception:  # every failure is reported, with its trace, under the check's name
            print(json.dumps({"check": name, "ok": False, "trace": traceback.format_exc()[-3000:]}), flush=True)
        else:
            print(json.dumps({"check": name, "ok": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run())
