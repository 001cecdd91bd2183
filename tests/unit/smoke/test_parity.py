"""Parity: rules, paths, cases files, and two real services."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from smokeworld.drip import DRIPS, dripping
from smokeworld.server import serving

from buildkit.errors import UsageError
from buildkit.parity import CaseParity, Comparison, ParityReport, Rule, compare, parse_cases, read_cases, run_parity

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


def test_a_cases_file_that_is_not_there_is_wrong_usage_and_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(UsageError, match="no cases file"):
            read_cases(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{1: a}", "body: the key '1' is no text"),
        ("{a: {true: a}}", "body.a: the key 'True' is no text"),
        ("[{null: a}]", "body[0]: the key 'None' is no text"),
        ("{2024-01-01: a}", "body: the key '2024-01-01' is no text"),
        ("{a: 2024-01-01}", "body.a: JSON has no date"),
        ("[2024-01-01 10:00:00]", "body[0]: JSON has no datetime"),
        ("{'a b': !!set {x, y}}", 'body["a b"]: JSON has no set'),
        ("{a: !!binary aGk=}", "body.a: JSON has no bytes"),
        ("!!omap [a: 1]", "body[0]: JSON has no tuple"),
        ("{a: .inf}", "body.a: inf is no number"),
        ("{a: [1, .nan]}", "body.a[1]: nan is no number"),
        (f"{{a: 0x{'f' * 5000}}}", "body.a: is an integer of more than"),
        (f"{{a: {'9' * 5000}}}", "this is no int"),
        ('{a: "\\ud800"}', "body.a: the text holds half"),
        ('{"\\ud800": 1}', "body: the text holds half"),
        ("[" * 150 + "]" * 150, "is nested more than 100 deep"),
        ("[" * 5000, "cases.yaml:"),
        ("{[1]: 2}", "a key is a list or a table"),
        ("{? {a: 1} : 2}", "a key is a list or a table"),
        ("!!int ''", "this is no int"),
        ("!!bool maybe", "this is no bool"),
        ("!!timestamp soon", "this is no timestamp"),
        ("2024-13-45", "this is no timestamp"),
        ("!!float x", "this is no float"),
        ("!!map 5", "cases.yaml:"),
    ],
)
def test_a_body_that_json_cannot_hold_is_wrong_usage_with_its_path(body: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cases(f"cases: [{{path: /x, body: {body}, compare: [{{field: a}}]}}]".encode(), where="cases.yaml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("cases.yaml:")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (f"path: /x, compare: [{{field: 'a[{'9' * 5000}]'}}]", "cases[0].compare[0].field: an index has more than"),
        ("path: /x, compare: [{field: 'a[1234567890]'}]", "cases[0].compare[0].field: an index has more than"),
        ("path: /x, compare: [{field: 1}]", "cases[0].compare[0].field: 1 is not a path"),
        ('path: "/\\ud800", compare: [{field: a}]', "cases[0].path"),
        ('path: "/x\\r\\ny", compare: [{field: a}]', "cases[0].path"),
        ('name: "\\udfff", path: /x, compare: [{field: a}]', "cases[0].name: is not a text"),
        ("name: 2024-01-01, path: /x, compare: [{field: a}]", "cases[0].name: is not a text"),
        ("name: [a], path: /x, compare: [{field: a}]", "cases[0].name: is not a text"),
        ('path: /x, compare: [{field: a, as: "\\ud800"}]', "cases[0].compare[0].as: is not a text"),
        ("path: /x, compare: [{field: a, as: {b: c}}]", "cases[0].compare[0].as: is not a text"),
        (f"path: /x, compare: [{{field: a, rule: {{relative: 0x{'f' * 5000}}}}}]", "compare[0].rule"),
        ("path: /x, compare: [{field: a, rule: {!!binary aGk=: 1}}]", "compare[0].rule"),
        ("path: /x, 5: y, compare: [{field: a}]", "the key '5' is not known"),
    ],
)
def test_a_case_that_makes_no_sense_is_wrong_usage_with_its_path(case: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cases(f"cases: [{{{case}}}]".encode(), where="cases.yaml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("cases.yaml:")


@given(st.binary(max_size=60) | st.text("{}[]:,!?-&*|>'\"\\\n #a1.~<=", max_size=60).map(str.encode))
def test_whatever_a_cases_file_holds_is_cases_or_wrong_usage(raw: bytes) -> None:
    for text in (raw, b"cases: [{path: /x, body: " + raw + b", compare: [{field: a}]}]"):
        with suppress(UsageError):
            for case in parse_cases(text, where="c"):
                json.dumps(case.body, allow_nan=False).encode()


def test_a_number_for_a_name_is_taken_as_it_is_written() -> None:
    (case,) = parse_cases(
        b"cases: [{name: 7, path: /x, body: {a: [1, 2.5, null, x]}, compare: [{field: a}]}]", where="c"
    )
    assert (case.name, case.body) == ("7", {"a": [1, 2.5, None, "x"]})


@pytest.mark.parametrize(
    "url", ["http://user:secret@host", "http://[::1", "http://h:99999", "h", "", "http://h/\udcff"]
)
def test_urls_are_checked(url: str) -> None:
    for pair in ((url, "http://host"), ("http://host", url)):
        with pytest.raises(UsageError, match="is not the URL of a service") as caught:
            run_parity(*pair, ())
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan, 999999999 * 3600.0])
def test_times_are_checked(timeout: float) -> None:
    with pytest.raises(UsageError, match="time-out"):
        run_parity("http://h", "http://h", (), timeout=timeout)


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_that_comes_drop_by_drop_is_given_up_when_its_time_is_over(kind: str) -> None:
    with dripping(kind) as url:
        report = run_parity(url, url, parse_cases(CASES, where="c"), timeout=0.3)
    assert report.cases[0].problem == "candidate: /v1/completions has not answered within 0.3 s"


ODD = (math.inf, -math.inf, math.nan, 5e-324, 1.7e308, -1.7e308, 10**400, 2**999, 0, -0.0, True, None, "\ud800", "")
RULES = (
    Rule(kind="identical"),
    Rule(kind="relative", bound=0.5),
    Rule(kind="absolute", bound=1e300),
    Rule(kind="decimals", bound=30),
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_whatever_two_services_answer_is_a_report_in_strict_json(rule: Rule) -> None:
    comparison = Comparison(field="b", rule=rule, label="b")
    for a, b in product(ODD, ODD):
        field = compare(comparison, {"b": a}, {"b": b})
        case = CaseParity(name="c", fields=(field, compare(comparison, {"b": [a, 1, b]}, {"b": [b, 1, a]})))
        report = ParityReport(candidate="http://a", reference="http://b", cases=(case,))
        json.dumps(report.to_json(), allow_nan=False)
        for text in (report.to_markdown(), report.summary(), drawn(report)):
            text.encode()


def drawn(report: ParityReport) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(report.render())
    out = console.file
    assert isinstance(out, StringIO)
    return out.getvalue()


@given(st.recursive(st.sampled_from(ODD), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_documents_of_every_shape_are_compared(document: Any) -> None:
    for field in ("*", "b", "[0]", "b.*[*]", "0"):
        compare(Comparison(field=field, rule=RULES[1], label="x"), document, document)


def test_infinity_is_identical_to_itself_alone() -> None:
    rule = Comparison(field="b", rule=Rule(kind="identical"), label="b")
    assert compare(rule, {"b": math.inf}, {"b": math.inf}).ok
    assert not compare(rule, {"b": math.inf}, {"b": -math.inf}).ok


def test_a_difference_beyond_every_float_is_not_within_a_bound_that_is() -> None:
    for rule in (Rule(kind="relative", bound=1.5), Rule(kind="absolute", bound=1e300)):
        assert not rule.holds(1.7e308, -1.7e308)
    assert Rule(kind="relative", bound=2.0).holds(1.7e308, -1.7e308)


def test_keys_that_look_like_paths_hide_no_difference() -> None:
    one, other = {"x": {"a.b": 1, "a": {"b": 2}}}, {"x": {"a.b": 9, "a": {"b": 2}}}
    field = compare(Comparison(field="x", rule=Rule(kind="identical"), label="x"), one, other)
    assert (field.ok, field.total, field.where) == (False, 2, 'x["a.b"]')


def test_halves_of_surrogates_in_texts_and_keys_are_shown_as_escapes() -> None:
    report = run({"answers": {"\ud800": {"label": "\udc80[/x]"}}}, {"answers": {"\ud800": {"label": "a"}}})
    assert 'first at answers["\\ud800"].label: \\udc80[/x] vs a' in report.summary()
    assert "[/x]" in drawn(report)


def test_the_summary_names_the_first_case_without_answers_before_what_agrees() -> None:
    report = run({"detail": "boom"}, status=503)
    assert report.summary() == '0/1 cases agree: greeting: candidate: /v1/completions answers 503: {"detail": "boom"}'
    twice = ParityReport(candidate="a", reference="b", cases=report.cases * 2)
    assert twice.summary().endswith('{"detail": "boom"} (and 1 more)')


def test_the_summary_has_what_differs_before_what_agrees() -> None:
    assert run(changed(["answers", "b", "label"], "maybe")).summary().startswith("0/1 cases agree: answers.*.label 1/2")
