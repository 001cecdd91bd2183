"""The server level against real HTTP servers: right, with each fault, and odd in every way that servers are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest
from smokeworld.drip import DRIPS, dripping
from smokeworld.server import Behaviour, serving

from buildkit.errors import UsageError
from buildkit.gdn import probe
from buildkit.gdn.checkpoint import assemble
from buildkit.gdn.faults import Fault
from buildkit.gdn.plain import plain
from buildkit.smoke import Completions, ServerReport, SmokeOptions, Subject, Verdict, check_server, run_smoke


def check(behaviour: Behaviour, dtype: str = "f32", *, timeout: float = 60.0) -> ServerReport:
    with serving(behaviour) as server:
        return check_server(Completions(server.url, timeout=timeout), dtype)


def test_a_right_server_passes_with_every_token_identical() -> None:
    with serving() as server:
        report = check_server(Completions(server.url), "f32")
        asked = list(server.asked)
    assert report.verdict is Verdict.PASS
    assert report.reason == "112/112 tokens identical"
    assert report.model == "probe-under-test"
    assert [q.name for q in report.questions] == [
        "5 tokens",
        "24 tokens",
        "70 tokens",
        "150 tokens",
        "5 tokens, again",
        "24 tokens, two at once",
        "70 tokens, two at once",
    ]
    assert all(q.logprob_error is not None and q.logprob_error < 1e-9 for q in report.questions)
    assert {request["model"] for request in asked} == {"probe-under-test"}
    assert all(request["temperature"] == 0 and request["ignore_eos"] for request in asked)


USUAL = (Fault.KEY_BAND_ZEROED, Fault.L2_NORM_LANE_0, Fault.CONV_STATE_DROPPED, Fault.STATE_NOT_RESET)
FAULTS = [pytest.param(f, id=f.value, marks=() if f in USUAL else pytest.mark.slow) for f in Fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_and_is_named(fault: Fault) -> None:
    report = check(Behaviour(fault=fault), "f16")
    assert report.verdict is Verdict.FAIL
    assert [e.fault for e in report.explanations] == [fault]
    assert report.diagnosis[0].endswith(f"as with *{fault.sentence}*: {fault.consequence}")


def test_near_ties_are_right_and_are_counted() -> None:
    report = check(Behaviour(takes_ties="bf16"), "bf16")
    assert report.verdict is Verdict.PASS
    assert report.ties > 0
    assert f"{report.ties} at near-ties" in report.reason
    # the same answers from a server that computes in float32 are wrong
    assert check(Behaviour(takes_ties="bf16"), "f32").verdict is Verdict.FAIL


def passes(behaviour: Behaviour) -> str:
    """All notes of a server that is odd and right."""
    report = check(behaviour)
    assert report.verdict is Verdict.PASS, report.reason
    return "; ".join({q.note for q in report.questions})


def fails(behaviour: Behaviour, *, timeout: float = 60.0) -> ServerReport:
    report = check(behaviour, timeout=timeout)
    assert report.verdict is Verdict.FAIL
    assert report.explanations == ()
    return report


def test_what_is_odd_and_harmless_is_noted() -> None:
    assert "streams although" in passes(Behaviour(streams=True))
    assert "white space" in passes(Behaviour(before=" ", after="\n"))
    assert "repeats the prompt" in passes(Behaviour(echoes=True))
    assert "answers 18 tokens where 16" in passes(Behaviour(more=2))
    assert "no real log probabilities" not in passes(Behaviour(logprobs_off_by=None))
    assert passes(Behaviour(refuses_logprobs=True)) == ""
    assert passes(Behaviour(token_ids=True)) == ""
    assert passes(Behaviour(chat_only=True)) == ""


@pytest.mark.parametrize("odd", [{"before": "assistant: "}, {"drops_text": 1}, {"drops_text": 16}, {"after": "A"}])
def test_a_text_that_does_not_match_its_ids_is_a_failure_though_the_ids_are_right(odd: dict[str, Any]) -> None:
    report = fails(Behaviour(token_ids=True, **odd))
    assert report.identical == 112
    assert "and token ids that mean" in report.reason


def test_a_text_with_white_space_or_the_prompt_around_matches_its_ids() -> None:
    for harmless in (Behaviour(token_ids=True, before=" "), Behaviour(token_ids=True, echoes=True)):
        assert check(harmless).verdict is Verdict.PASS


@pytest.mark.parametrize("chat", [False, True])
def test_fewer_log_probabilities_than_tokens_are_a_failure(chat: bool) -> None:
    assert "gives 15 log probabilities for 16 tokens" in fails(Behaviour(logprobs_missing=1, chat_only=chat)).reason
    assert "gives 0 log probabilities" in fails(Behaviour(logprobs_missing=16, chat_only=chat)).reason
    assert "no log probability for 1 of 16 tokens" in fails(Behaviour(logprobs_null=True, chat_only=chat)).reason


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (f'"logprobs": {{"token_logprobs": [{HUGE}]}}', "a log probability (0) that no float can hold"),
        (f'"logprobs": {{"content": [{{"logprob": -{HUGE}}}]}}', "a log probability (0) that no float can hold"),
        ('"logprobs": {"token_logprobs": ["-1.0"]}', "a log probability (0) that is no number: -1.0"),
        ('"logprobs": {"token_logprobs": [true]}', "that is no number: true"),
        ('"logprobs": {"token_logprobs": {}}', "logprobs that are no list"),
        ('"logprobs": {"content": [1]}', "logprobs that are no list"),
        ('"logprobs": [1]', "logprobs that are no object"),
        ('"token_ids": [Infinity]', "token_ids[0] that is no token id: Infinity"),
        ('"token_ids": [1, NaN]', "token_ids[1] that is no token id: NaN"),
        ('"token_ids": [1.9]', "token_ids[0] that is no token id: 1.9"),
        ('"token_ids": [1.0]', "token_ids[0] that is no token id: 1.0"),
        ('"token_ids": [true]', "token_ids[0] that is no token id: true"),
        ('"token_ids": ["1"]', "token_ids[0] that is no token id: 1"),
        ('"token_ids": [null]', "token_ids[0] that is no token id: null"),
        ('"token_ids": [-1]', "token_ids[0] that is no token id: -1"),
        (f'"token_ids": [{HUGE}]', "token_ids[0] that is no token id: 999"),
        ('"token_ids": "B"', "token_ids that are no list"),
        ('"token_ids": ["\\ud800"]', 'token_ids[0] that is no token id: "\\ud800"'),
    ],
)
def test_values_that_cannot_be_what_they_say_are_the_servers_fault(field: str, words: str) -> None:
    report = fails(Behaviour(raw=f'{{"choices": [{{"text": "B", {field}}}]}}'.encode()))
    assert words in report.reason
    json.dumps(plain(report), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("text", ["\ud800", "\x1b[31m", "[/red]", "\u202e"])
def test_texts_of_a_server_can_be_shown_wherever_they_stand(text: str) -> None:
    for document in ({"choices": [{"text": text}]}, {"error": text}, {text: text}, [text], text):
        report = fails(Behaviour(raw=json.dumps(document).encode()))
        assert json.dumps(plain(report), ensure_ascii=False).encode()
        assert "\x1b" not in report.reason


@pytest.mark.parametrize("name", ["\ud800", "", 5, None, {}, "x" * 5000, math.inf])
def test_a_model_without_a_usable_name_is_the_servers_fault(name: object) -> None:
    report = fails(Behaviour(model_id=name))
    assert "/v1/models gives its model an id that is no name" in report.reason
    json.dumps(plain(report), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_that_comes_drop_by_drop_is_given_up_when_its_time_is_over(kind: str) -> None:
    with dripping(kind) as url:
        client = Completions(url, timeout=0.3)
        assert client.ask("A", 1).problem == "/v1/completions has not answered within 0.3 s"


@pytest.mark.parametrize("place", ["http://[::1", "http://h:99999/", "ftp://h", "//", "http://" + "a" * 300, "\x00"])
def test_a_redirection_to_nowhere_is_the_servers_fault(place: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(307)
            self.send_header("Location", place)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        reply = Completions(f"http://127.0.0.1:{server.server_address[1]}", timeout=5).ask("A", 1)
        server.shutdown()
        thread.join()
    assert reply.problem.startswith("/v1/completions")


def test_text_around_the_answer_is_a_failure_that_shows_the_text() -> None:
    report = fails(Behaviour(before="<think>"))
    assert "adds text around" in report.reason
    assert "<think>" in report.reason


def test_errors_are_shown_in_one_line_and_asked_for_once() -> None:
    with serving(Behaviour(status=500)) as server:
        report = check_server(Completions(server.url), "f32")
        assert len(server.asked) == 1
    assert report.verdict is Verdict.FAIL
    assert "answers 500: CUDA error: an illegal memory access second" in report.reason


def test_a_server_that_never_answers_is_given_up() -> None:
    report = fails(Behaviour(hangs=True), timeout=0.2)
    assert "has not answered within 0.2 s" in report.reason
    assert len(report.questions) == 1


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    assert "broke off" in fails(Behaviour(breaks_off=True)).reason
    assert "breaks off before its end" in fails(Behaviour(streams=True, stream_cut=True)).reason


def test_an_answer_that_is_too_short_is_a_failure() -> None:
    assert "stops after 7 of 16 tokens" in fails(Behaviour(tokens=7)).reason


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"text": 5}]}',
        b'{"choices": [{"message": null}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_whatever_is_answered_is_a_verdict(document: bytes) -> None:
    assert "something else than a completion" in fails(Behaviour(raw=document)).reason


def test_an_empty_answer_and_foreign_ids_are_failures() -> None:
    assert "the answer is empty" in fails(Behaviour(raw=b'{"choices": [{"text": ""}]}')).reason
    foreign = json.dumps({"choices": [{"text": "x", "token_ids": [248045]}]}).encode()
    assert "token ids that the probe does not have" in fails(Behaviour(raw=foreign)).reason


def test_log_probabilities_that_differ_are_a_failure_though_the_tokens_are_right() -> None:
    report = fails(Behaviour(logprobs_off_by=0.5))
    assert report.identical == 112
    assert "log probabilities differ by up to 0.5" in report.reason


def test_a_checkpoint_loaded_in_part_is_told_from_known_faults() -> None:
    tensors: dict[str, Any] = dict(probe.tensors())
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros_like(tensors["model.layers.1.mlp.up_proj.weight"])
    report = fails(Behaviour(model=assemble(probe.SHAPE, tensors)))
    assert "loaded in part" in report.diagnosis[0]


def test_sequences_of_a_batch_that_are_mixed_up_are_named() -> None:
    report = fails(Behaviour(mixes_batches=True))
    assert [q.verdict for q in report.questions[:5]] == [Verdict.PASS] * 5
    assert "state is mixed up between sequences of a batch" in report.diagnosis[0]


def test_nobody_there_is_a_failure() -> None:
    with serving() as server:
        url = server.url
    report = check_server(Completions(url), "f32")
    assert report.verdict is Verdict.FAIL
    assert "Connection refused" in report.reason


URLS = (
    *(
        "",
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://user:secret@host",
        "http://[::1",
        "http://h:99999",
        "http://h:0",
    ),
    *(
        "http://h:x",
        "http://a b",
        "http://h?x=1",
        "http://h#x",
        "http://\ud800",
        "http://h/\udcff",
        "http://h\n",
        "http://*",
    ),
)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 999999999 * 3600.0])
def test_a_time_that_nobody_can_wait_is_wrong_usage(timeout: float) -> None:
    with pytest.raises(UsageError, match="time-out"):
        Completions("http://h", timeout=timeout)
    with pytest.raises(UsageError, match="time-out"):
        run_smoke(Subject(name="x", url="http://h"), SmokeOptions(levels=("server",), timeout=timeout))


@pytest.mark.parametrize("url", URLS)
def test_what_is_no_url_is_wrong_usage_and_shows_no_secret(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Completions(url)
    assert "is not the URL of a server" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_health_is_waited_for_as_long_as_allowed() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with serving() as server:
        client = Completions(server.url)
        assert client.wait("/health", 5, clock=lambda: now[0], sleep=sleep) == ""
        reason = client.wait("/healthz", 5, clock=lambda: now[0], sleep=sleep)
        assert reason == "not healthy after 5 s: /healthz answers 404"
        assert client.wait("/healthz", 5, ended=lambda: "it died", clock=lambda: now[0], sleep=sleep) == "it died"
    assert now[0] >= 5


def test_the_level_runs_by_url_without_an_engine() -> None:
    with serving(Behaviour(fault=Fault.OUTPUT_ZERO)) as server:
        report = run_smoke(
            Subject(name="it", url=server.url + "/v1/"), SmokeOptions(levels=("server",), dtype="f32", timeout=60)
        )
    assert report.exit_code == 1
    assert report.levels[0].diagnosis[0].startswith("80 of 80 tokens as with *every GDN output zero*")
    document = json.loads(json.dumps(report.to_json()))
    assert document["verdict"] == "FAIL"
    assert document["levels"][0]["server"]["questions"][0]["name"] == "5 tokens"
    assert "every GDN output zero" in report.to_markdown()


def test_a_level_that_was_not_run_is_never_a_pass() -> None:
    report = run_smoke(
        Subject(name="it", url="http://127.0.0.1:9"), SmokeOptions(levels=("server",), dtype="f32", timeout=5)
    )
    level = replace(report.levels[0], verdict=Verdict.NOT_RUN, reason="no GPU")
    missing = replace(report, levels=(level,))
    assert missing.exit_code == 3
    allowed = replace(missing, missing_gpu_allowed=True)
    assert (allowed.exit_code, allowed.ok, allowed.verdict) == (0, False, Verdict.NOT_RUN)
    assert "Nothing was tested" in allowed.to_markdown()
    assert "NOT RUN" in allowed.summary()
    good = replace(level, verdict=Verdict.PASS)
    bad = replace(level, verdict=Verdict.FAIL)
    assert replace(missing, levels=(good, level)).exit_code == 3
    assert replace(missing, levels=(good, level, bad)).exit_code == 1
    assert replace(missing, levels=(good,)).exit_code == 0


def test_options_that_make_no_sense_are_wrong_usage() -> None:
    for subject, options, words in (
        (Subject(name="x"), SmokeOptions(levels=()), "no level"),
        (Subject(name="x"), SmokeOptions(), "names no library"),
        (Subject(name="x"), SmokeOptions(levels=("server",)), "not known how x is started"),
        (Subject(name="x", url="http://h"), SmokeOptions(levels=("server",), dtype="f8"), "dtype 'f8'"),
        (Subject(name="x", library="/a"), SmokeOptions(contract="new"), "contract 'new'"),
        (Subject(name="x", image="i", library="/a"), SmokeOptions(), "no engine"),
    ):
        with pytest.raises(UsageError, match=words):
            run_smoke(subject, options)
