"""Pure parts: chunk planning, URLs, Range, challenges, tokens, answers, budget, options."""

from __future__ import annotations

import base64
import json
from random import Random

import pytest
from faults.model import SECRET
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import AuthError, BuildkitError, ProtocolError, SizeRefusedError, UsageError
from buildkit.registry import EDGE_LIMITS, RegistryOptions, chunks
from buildkit.registry.answers import error_for, is_html, is_size_refusal, summary, who
from buildkit.registry.auth import DEFAULT_LIFE, parse_challenges, parse_token
from buildkit.registry.location import Origin, redact, resolve, stored_bytes, with_query
from buildkit.registry.steps import Answer, Budget, Failure, Headers, Request, Window, retry_after

ORIGIN = Origin(scheme="https", host="git.example.org", port=443)


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    fields = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return Answer(status=status, headers=fields, body=body, sent=0, seconds=0.1, at=1_800_000_000.0)


def request(method: str = "PATCH", size: int = 100) -> Request:
    body = Window(start=0, end=size) if size else None
    return Request(doing="testing", method=method, url="https://git.example.org/v2/a/blobs/uploads/1?_state=x",
                   scopes=(), body=body)  # fmt: skip


# Chunks


@given(
    total=st.integers(0, 5000),
    size=st.integers(2, 700),
    growth=st.lists(st.integers(1, 900), max_size=20),
    equal=st.booleans(),
)
def test_chunks_cover_the_blob_without_an_empty_or_a_needless_one_byte_body(
    total: int, size: int, growth: list[int], equal: bool
) -> None:
    rules = chunks.settle(size, limit=700, smallest=None, largest=None, equal=equal, total=total if equal else None)
    start = available = 0
    sizes = []
    ended = False
    while True:
        piece = chunks.next_chunk(rules, start=start, available=available, total=total if ended or equal else None)
        if piece is None:
            if ended or equal:
                break
            available = min(total, available + growth.pop()) if growth else total
            ended = not growth
            continue
        assert piece[0] == start < piece[1] <= total
        assert piece[1] - start <= rules.size
        sizes.append(piece[1] - start)
        start = piece[1]
    assert start == total
    if total > 1 and rules.size > 2:
        assert 1 not in sizes
    if equal:
        assert len(set(sizes[:-1])) <= 1


def test_demands_of_the_registry_and_the_way_there_are_weighed() -> None:
    settle = chunks.settle
    assert settle(50, limit=100, smallest=60, largest=None, equal=False, total=None).size == 60
    assert settle(500, limit=1000, smallest=None, largest=200, equal=True, total=None).size == 200
    assert settle(10, limit=1000, smallest=None, largest=None, equal=True, total=200_000).size == 20
    with pytest.raises(SizeRefusedError, match="at least"):
        settle(50, limit=100, smallest=5_242_880, largest=None, equal=False, total=None)


# Range and Location


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("0-99", 100), ("bytes=0-99", 100), ("bytes 0-99", 100), ("0-99/200", 100), (" 0-99 ", 100), ("0-0", 0),
        ("0--1", 0), (None, None), ("", None), ("5-99", None), ("0-", None), ("0--2", None), ("0-9" * 50, None),
        ("0-x", None), ("٠-٩", None),
    ],
)  # fmt: skip
def test_range_says_how_much_is_stored_or_nothing(text: str | None, stored: int | None) -> None:
    assert stored_bytes(text) == stored


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/v2/a/blobs/uploads/1?_state=a%2Bb", "https://git.example.org/v2/a/blobs/uploads/1?_state=a%2Bb"),
        ("2?x=1", "https://git.example.org/v2/a/blobs/uploads/2?x=1"),
        ("http://git.example.org/u/1", "https://git.example.org/u/1"),
        ("http://GIT.example.org:3000/u/1", "https://git.example.org/u/1"),
        ("https://store.example.net/u/1?sig=a/b==", "https://store.example.net/u/1?sig=a/b=="),
        ("https://user:pw@git.example.org/u/1", "https://git.example.org/u/1"),
        ("//git.example.org/u/1", "https://git.example.org/u/1"),
    ],
)
def test_location_is_resolved_and_keeps_the_users_scheme_and_port(location: str, expected: str) -> None:
    url, _ = resolve(location, request_url="https://git.example.org/v2/a/blobs/uploads/", origin=ORIGIN)
    assert url == expected


@pytest.mark.parametrize(
    "location", ["http://other.example.net/u", "ftp://git.example.org/u", "http://[::1", "", "a b"]
)
def test_a_location_without_tls_on_another_host_or_that_is_no_url_is_refused(location: str) -> None:
    with pytest.raises(ProtocolError):
        resolve(location, request_url="https://git.example.org/v2/", origin=ORIGIN)


@given(st.text(max_size=300))
def test_any_location_gives_a_url_or_a_protocol_error(location: str) -> None:
    try:
        url, _ = resolve(location, request_url="https://git.example.org/v2/", origin=ORIGIN)
    except ProtocolError:
        return
    assert url.startswith(("https://", "http://"))
    assert url.isascii()
    assert url.isprintable()


def test_plain_http_is_for_loopback_unless_told() -> None:
    of = Origin.of_registry
    assert str(of("127.0.0.1:5000", plain_http=None)) == "http://127.0.0.1:5000"
    assert str(of("[::1]:5000", plain_http=None)) == "http://[::1]:5000"
    assert str(of("localhost", plain_http=None)) == "http://localhost"
    assert str(of("git.example.org", plain_http=None)) == "https://git.example.org"
    assert str(of("git.example.org:80", plain_http=True)) == "http://git.example.org"
    assert str(of("localhost:5000", plain_http=False)) == "https://localhost:5000"
    with pytest.raises(UsageError):
        of("a:b:c", plain_http=None)


def test_messages_show_no_query_and_the_digest_is_added_behind_the_servers_own() -> None:
    assert redact("https://u:p@h/v2/x?_state=secret") == "https://h/v2/x?…"
    assert with_query("https://h/u?_state=a%2Fb", "digest=sha256:1") == "https://h/u?_state=a%2Fb&digest=sha256:1"


# Challenges and tokens


def test_challenges_keep_commas_within_scopes_and_several_schemes() -> None:
    found = parse_challenges(
        'Bearer realm="https://auth.example.org/token",service="reg, one",scope="repository:a:pull,push", Basic realm=x'
    )
    assert [c.scheme for c in found] == ["bearer", "basic"]
    assert found[0].parameters["scope"] == "repository:a:pull,push"
    assert found[0].parameters["service"] == "reg, one"
    assert parse_challenges('BEARER realm="a\\"b"')[0].parameters["realm"] == 'a"b'


@given(st.text(max_size=400))
def test_any_challenge_text_is_read_or_left_out(text: str) -> None:
    parse_challenges(text)


def _jwt(claims: dict[str, object]) -> str:
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{part}.c2ln"


def test_a_tokens_life_is_told_or_read_from_it_or_a_minute() -> None:
    assert parse_token(b'{"token":"abc","expires_in":300}', where="x") == ("abc", 300.0)
    assert parse_token(b'{"access_token":"abc"}', where="x") == ("abc", DEFAULT_LIFE)
    token = _jwt({"iat": 1000, "exp": 1900})
    assert parse_token(json.dumps({"token": token}).encode(), where="x")[1] == 900.0
    assert parse_token(json.dumps({"token": _jwt({"exp": "x"})}).encode(), where="x")[1] == DEFAULT_LIFE


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"token": 5}', b'{"token":"a\\r\\nX: y"}', b'{"token":""}', b"[" * 100_000]
)
def test_an_unusable_token_answer_is_an_error_that_quotes_nothing(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_token(body, where="the token service")
    assert "X: y" not in str(caught.value)


# Answers


def test_who_answered_and_what_it_said() -> None:
    page = answer(413, b"<html><head><title>413 Request\nEntity Too Large</title></head>", server="cloudflare",
                  cf_ray="8f-FRA", content_type="text/html; charset=UTF-8")  # fmt: skip
    assert who(page) == "cloudflare, cf-ray 8f-FRA, text/html"
    assert is_html(page)
    assert summary(page) == "an HTML page: 413 Request Entity Too Large"
    error = error_for(request(), page)
    assert isinstance(error, SizeRefusedError)
    assert "_state" not in str(error)
    assert "cloudflare" in str(error)
    body = b'{"errors":[{"code":"DENIED","message":"quota","detail":"used up"}]}'
    assert summary(answer(403, body)) == "DENIED quota: used up"


@pytest.mark.parametrize("status", [400, 403, 500, 502])
def test_a_size_refusal_is_known_by_its_words_too(status: int) -> None:
    assert is_size_refusal(request(), answer(status, b"<title>Request Entity Too Large</title>"))
    assert not is_size_refusal(request("POST", 0), answer(status, b"<title>Request Entity Too Large</title>"))
    assert not is_size_refusal(request(), answer(status, b"Bad Request"))


def test_a_job_token_that_gitea_refuses_gets_the_right_hint() -> None:
    error = error_for(request(), answer(401, b'{"errors":[{"code":"UNAUTHORIZED","message":"reqPackageAccess"}]}'))
    assert isinstance(error, AuthError)
    assert "write:package" in str(error)


@given(st.integers(100, 999), st.binary(max_size=500), st.text(max_size=100))
def test_any_answer_becomes_one_line_without_control_characters(status: int, body: bytes, header: str) -> None:
    error = error_for(request(), answer(status, body, server=header, content_type=header))
    assert isinstance(error, BuildkitError)
    assert "\n" not in str(error)
    assert len(error.message) <= 500


# Retrying


def test_retry_after_in_both_forms() -> None:
    assert retry_after(answer(429, retry_after="7")) == 7.0
    assert retry_after(answer(429, retry_after="Fri, 15 Jan 2027 08:00:20 GMT")) == 20.0
    assert retry_after(answer(429, retry_after="Fri, 15 Jan 1999 08:00:20 GMT")) == 0.0
    for text in ("", "soon", "-5", "9" * 40, "٣", "Fri, 99 Jan 2027 99:00:20 GMT"):
        value = retry_after(answer(429, retry_after=text))
        assert value is None or value >= 0


@given(st.integers(0, 20), st.integers())
def test_backoff_grows_within_bounds_and_the_budget_ends(limit: int, seed: int) -> None:
    budget = Budget(limit=limit, rng=Random(seed), max_wait=300)
    failure = Failure(kind="dropped", detail="x")
    count = 0
    while budget.spend():
        count += 1
        assert 0 < budget.wait(failure) <= 30
    assert count == limit


def test_edges_are_presets_and_odd_settings_are_usage_errors() -> None:
    assert RegistryOptions().effective_chunk == 95_000_000
    business = RegistryOptions().with_edge("business")
    assert business.limit == business.effective_chunk == EDGE_LIMITS["cloudflare-business"]
    assert RegistryOptions(chunk_size=10**9).effective_chunk == 95_000_000
    assert RegistryOptions(chunk_size=10**9).with_edge("none").effective_chunk == 10**9
    for bad in ({"chunk_size": 1}, {"limit": 0}, {"parallel": 0}, {"retries": -1}, {"connect_timeout": 0.0}):
        with pytest.raises(UsageError):
            RegistryOptions(**bad)
    with pytest.raises(UsageError, match="unknown edge"):
        RegistryOptions().with_edge("cloudfront")


def test_values_that_hold_secrets_do_not_show_them() -> None:
    from buildkit.registry import Credential

    credential = Credential(source="x", username="u", password=SECRET, identity_token=SECRET, registry_token=SECRET)
    assert SECRET not in repr(credential) + str(credential)
