"""Parity: rules, paths, cases files, and two real services."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smokeworld.server import serving

from buildkit.errors import NotFoundError, UsageError
from buildkit.parity import Comparison, ParityReport, Rule, compare, parse_cases, read_cases, run_parity

CASES = b"""
cases:
  - name: greeting
    path: /v1/completions
    body: {prompt: "Hi", max_tokens: 3}
    compare:
      - {field: "choices[*].token_ids", rule: identical, as: token ids}
      - {field: trace.beta, rule: {relative: 1e-5}, as: beta}
      - {field: trace.absmax, rule: {decimals: 6}}
      - {field: "answers.*.label"}
"""

GOOD = {
    "choices": [{"token_ids": list(range(420))}],
    "trace": {"beta": 8646.982, "absmax": 0.1234561},
    "answers": {"a": {"label": "yes"}, "b": {"label": "no"}},
}


@contextmanager
def service(answer: object, status: int = 200) -> Iterator[str]:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(candidate: object, reference: object = GOOD, *, status: int = 200) -> ParityReport:
    with ExitStack() as stack:
        urls = stack.enter_context(service(candidate, status)), stack.enter_context(service(reference))
        return run_parity(*urls, parse_cases(CASES, where="cases.yaml"))


def changed(path: list[Any], value: Any) -> Any:
    document = json.loads(json.dumps(GOOD))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


def test_services_that_agree_are_told_as_deployments_tell_it() -> None:
    report = run(changed(["trace", "beta"], 8647.021))
    assert report.ok
    assert report.summary() == (
        "1/1 cases agree: token ids 420/420 identical, beta 8647.021 vs 8646.982 (relative 4.5e-06), "
        "trace.absmax 0.1234561 vs 0.1234561 (relative 0.0e+00), answers.*.label 2/2 identical"
    )
    document = json.loads(json.dumps(report.to_json()))
    assert document["cases"][0]["fields"][1]["relative"] == pytest.approx(4.51e-6, rel=1e-2)
    assert "| greeting |" in report.to_markdown()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["choices", 0, "token_ids", 7], 8, "token ids 419/420 identical, first at choices[0].token_ids[7]: 8 vs 7"),
        (["choices", 0, "token_ids"], list(range(419)), "only one of the two has choices[0].token_ids[419]"),
        (["choices"], [], "the candidate has no such field"),
        (["trace", "beta"], 8650.0, "beta 8650 vs 8646.982"),
        (["trace", "beta"], "8646.982", "beta 8646.982 vs 8646.982"),
        (["trace", "absmax"], 0.123457, "0.123457 vs 0.1234561"),
        (["answers", "b", "label"], "maybe", "1/2 identical, first at answers.b.label: maybe vs no"),
    ],
)
def test_every_difference_is_found_and_named(path: list[Any], value: Any, words: str) -> None:
    report = run(changed(path, value))
    assert not report.ok
    assert words in report.summary()


def test_a_field_that_the_reference_lacks_is_no_agreement() -> None:
    assert "the reference has no such field" in run({}, {}).summary()


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (b"no json", 200, "candidate: /v1/completions answers something else than JSON"),
        (b"[" * 100_000, 200, "candidate: /v1/completions"),
        ({"detail": "boom"}, 503, 'candidate: /v1/completions answers 503: {"detail": "boom"}'),
    ],
)
def test_a_service_that_fails_is_in_the_report(answer: object, status: int, words: str) -> None:
    report = run(answer, status=status)
    assert not report.ok
    assert words in report.cases[0].problem


def test_a_service_that_is_not_there_is_in_the_report() -> None:
    with service(GOOD) as url:
        gone = url
    with service(GOOD) as url:
        report = run_parity(gone, url, parse_cases(CASES, where="c"), timeout=5)
    assert "candidate: /v1/completions broke off" in report.cases[0].problem


def test_the_probe_server_agrees_with_itself() -> None:
    cases = parse_cases(
        b"cases: [{path: /v1/completions, body: {prompt: Abc, max_tokens: 5}, compare: [{field: 'choices[0].text'}]}]",
        where="c",
    )
    with serving() as one, serving() as other:
        assert run_parity(one.url, other.url, cases).ok


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(NUMBERS, NUMBERS, st.floats(0, 1))
def test_a_wider_bound_never_refuses_what_a_narrower_one_accepts(a: float, b: float, bound: float) -> None:
    for kind in ("relative", "absolute"):
        if Rule(kind=kind, bound=bound).holds(a, b):
            assert Rule(kind=kind, bound=2 * bound).holds(a, b)


@given(NUMBERS)
def test_a_number_agrees_with_itself_by_every_rule(x: float) -> None:
    for rule in (Rule(kind="identical"), Rule(kind="relative"), Rule(kind="absolute"), Rule(kind="decimals", bound=3)):
        assert rule.holds(x, x)


def test_integers_that_no_float_holds_are_only_identical() -> None:
    assert Rule(kind="identical").holds(10**400, 10**400)
    for rule in (Rule(kind="relative", bound=1), Rule(kind="absolute", bound=1), Rule(kind="decimals", bound=1)):
        assert not rule.holds(10**400, 10**400)


def test_what_is_not_a_number_agrees_with_nothing() -> None:
    for rule in (Rule(kind="identical"), Rule(kind="relative", bound=1), Rule(kind="decimals", bound=1)):
        assert not rule.holds(math.nan, math.nan)
        assert not rule.holds(True, 1)
    assert not Rule(kind="absolute", bound=1).holds(math.inf, math.inf)
    assert Rule(kind="identical").holds(1, 1.0)


def test_lists_under_a_tolerance_are_compared_element_by_element() -> None:
    rule = Comparison(field="x", rule=Rule(kind="absolute", bound=0.1), label="x")
    field = compare(rule, {"x": [[1.0, 2.0], [3.05]]}, {"x": [[1.0, 2.0], [3.0]]})
    assert (field.ok, field.same, field.total, field.where) == (True, 3, 3, "x[1][0]")
    assert field.sentence() == "x 3/3 within absolute 0.1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a table"),
        ("cases: []", "cases: is not a list with at least one case"),
        ("cases: [5]", "cases[0] is not a table"),
        ("cases: [{path: x, compare: [{field: a}]}]", "cases[0].path: 'x' is not a path"),
        ("cases: [{path: /x}]", "cases[0].compare: is not a list"),
        ("cases: [{path: /x, compare: [{field: 'a[b]'}]}]", "compare[0].field: 'a[b]' is not a path"),
        ("cases: [{path: /x, compare: [{field: a, rule: {relative: -1}}]}]", "compare[0].rule"),
        ("cases: [{path: /x, compare: [{field: a, rule: {decimals: 1.5}}]}]", "compare[0].rule"),
        ("cases: [{path: /x, compare: [{field: a, rule: same}]}]", "compare[0].rule"),
        ("cases: [{path: /x, methode: GET, compare: [{field: a}]}]", "the key 'methode' is not known"),
        ("cases: [{path: /x, method: PUT, compare: [{field: a}]}]", "is not GET or POST"),
        ("cases: [{path: /x, path: /y, compare: [{field: a}]}]", ":1: the key 'path' is there twice"),
        ("cases: [{path: /x, compare: [{field: a}]}, {path: /x, compare: [{field: a}]}]", "is there twice"),
        ("a: &a [1]\ncases: *a", ":2: aliases are not allowed"),
        ("cases: !!python/object:os.system {}", "could not determine a constructor"),
        ("cases: [", "expected"),
    ],
)
def test_a_wrong_cases_file_is_wrong_usage_with_its_place(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cases(text.encode(), where="cases.yaml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("cases.yaml:")


def test_a_cases_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_cases(tmp_path / "none.yaml")


def test_urls_are_checked() -> None:
    with pytest.raises(UsageError):
        run_parity("http://user:secret@host", "http://host", ())
