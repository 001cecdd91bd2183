"""What the doctor asks of a client: one exchange as it comes, in bounded time, whatever the server does."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faults.blobs import MemoryBlob
from faults.model import DISTRIBUTION_3, GITEA_1_22, SHORT_TOKENS, WORKERS
from faults.pushing import OPTIONS, REPOSITORY, client_for, data_of
from faults.server import FAULTS, FaultServer
from smokeworld.drip import DRIPS, dripping

from buildkit.registry import Anonymous, RegistryClient
from buildkit.registry.limits import LearnedLimit
from buildkit.registry.steps import Answer, Failure, Request, Window
from buildkit.registry.upload import push_scope


def _greeting(client: RegistryClient) -> Request:
    return Request(doing="greeting", method="GET", url=f"{client.origin}/v2/", scopes=())


def test_an_answer_is_an_answer_whatever_its_status(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        for fault in ("403-before", "502-before", "404-before", "413-html"):
            server.reset({("ping", 0): FAULTS[fault]})
            reply = client.ask(_greeting(client))
            assert isinstance(reply, Answer)
            assert reply.status == int(fault[:3])
            assert reply.version == 11
            assert server.requests == 1, "asked once, not again"


def test_a_failure_is_a_value(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        server.reset({("ping", 0): FAULTS["drop-before"]})
        assert isinstance(client.ask(_greeting(client)), Failure)


def test_a_body_is_counted_and_a_token_fetched(tmp_path: Path) -> None:
    blob = MemoryBlob(data_of(3000))
    with FaultServer(SHORT_TOKENS) as server, client_for(server, tmp_path, options=OPTIONS) as client:
        scopes = (push_scope(REPOSITORY),)
        url = f"{client.origin}/v2/{REPOSITORY}/blobs/uploads/"
        opened = client.ask(
            Request(doing="opening", method="POST", url=url, scopes=scopes, headers={"Content-Length": "0"})
        )
        assert isinstance(opened, Answer)
        assert opened.status == 202
        sent = client.ask(
            Request(doing="sending", method="PATCH", url=opened.headers["location"], scopes=scopes,
                    body=Window(start=0, end=3000),
                    headers={"Content-Length": "3000", "Content-Range": "0-2999"}),
            blob,
        )  # fmt: skip
        assert isinstance(sent, Answer)
        assert (sent.status, sent.sent) == (202, 3000)
        assert server.model.session_data() == [blob.data]


@pytest.mark.parametrize("kind", DRIPS)
def test_a_server_that_never_ends_its_answer_is_left_in_time(kind: str, tmp_path: Path) -> None:
    with (
        dripping(kind) as url,
        RegistryClient(urlsplit(url).netloc, credentials=Anonymous(), state=tmp_path) as client,
        client.within(0.3) as late,
    ):
        reply = client.ask(_greeting(client))
        assert late() or kind == "compressed"  # its few bytes end the unpacking
        assert isinstance(reply, Failure) or len(reply.body) < 100000


def test_what_comes_after_a_deadline_is_not_cut(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        with client.within(60) as late:
            assert isinstance(client.ask(_greeting(client)), Answer)
            assert not late()
        assert isinstance(client.ask(_greeting(client)), Answer)


@pytest.mark.parametrize(
    ("profile", "kind"),
    [(GITEA_1_22, "Gitea or Forgejo"), (DISTRIBUTION_3, "distribution or compatible"), (WORKERS, "unknown")],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_registry_is_known_before_it_knows_us(profile: object, kind: str, tmp_path: Path) -> None:
    with (
        FaultServer(profile) as server,  # type: ignore[arg-type]
        RegistryClient(server.registry, credentials=Anonymous(), state=tmp_path) as client,
    ):
        request = Request(doing="greeting", method="GET", url=f"{client.origin}/v2/", scopes=(), authenticate=False)
        answer = client.ask(request)
        assert isinstance(answer, Answer)
        assert client.identify(answer)[0] == kind


def test_a_measured_limit_is_kept_as_a_pushs_is(tmp_path: Path) -> None:
    with RegistryClient("example.org", state=tmp_path) as client:
        assert client.learned_limit is None
        client.learn_limit(accepted=1_000_000, refused=1_100_000)
        learned = client.learned_limit
        assert isinstance(learned, LearnedLimit)
        assert (learned.accepted, learned.refused) == (1_000_000, 1_100_000)
    with RegistryClient("example.org", state=tmp_path) as client:
        assert client.learned_limit is not None
        client.learn_limit(accepted=2_000_000, refused=None)
        assert client.learned_limit is None, "what was refused then goes through now"
