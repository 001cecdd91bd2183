"""The reference server as a process: under more requests than it takes, and when it is told to stop."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from support.reference import reference_python

REPOSITORY = Path(__file__).resolve().parents[3]
APP = REPOSITORY / "images" / "clef-serve" / "app.py"
TINY = REPOSITORY / "tests" / "unit" / "serve" / "tiny_checkpoint.py"
WAITING = 8
REQUESTS = 200
START_SECONDS = 120.0


class Server:
    """A running server on a free port of loopback."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.log = log
        command = [str(reference_python()), str(APP), "--model", str(checkpoint), "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--waiting", str(WAITING), "--trace"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._wait()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _wait(self) -> None:
        """The port is opened once the model is loaded, so the first connection says that it is ready."""
        limit = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < limit:
            try:
                assert self.ask("GET", "/health")[0] == 200
                return
            except ConnectionError:
                self._pause()
        self.process.kill()
        self.process.wait()
        pytest.fail(f"the server did not start: {self.log.read_text()[-2000:]}")

    def _pause(self) -> None:
        """Give the process a moment, or less if it ends."""
        try:
            self.process.wait(0.1)
        except subprocess.TimeoutExpired:
            return


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "tiny"
    subprocess.run([str(reference_python()), str(TINY), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(checkpoint, tmp_path / "log")
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.wait()


def test_it_keeps_its_word_under_two_hundred_requests_and_stops_when_told(server: Server) -> None:
    def body(number: int) -> dict[str, object]:
        return {"prompt": f"request {number % 5}", "max_tokens": 4, "ignore_eos": True}

    expected = [server.ask("POST", "/v1/completions", body(n))[1]["choices"][0]["token_ids"] for n in range(5)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda n: server.ask("POST", "/v1/completions", body(n)), range(REQUESTS)))
    statuses = Counter(status for status, _ in answers)
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[200] > WAITING, "those that were let in are answered"
    for number, (status, answer) in enumerate(answers):
        if status == 200:
            assert answer["choices"][0]["token_ids"] == expected[number % 5]
            assert answer["trace"]["total"]["beta"]["sum"] > 0
        else:
            assert answer["error"]["type"] == "server_error"
    status, health = server.ask("GET", "/health")
    assert (status, health["requests"], health["requests_limit"]) == (200, 0, WAITING + 1)

    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(
            server.ask, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        )
        while server.ask("GET", "/health")[1]["requests"] == 0 and not last.done():
            pass
        server.process.send_signal(signal.SIGTERM)
        status, answer = last.result()
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 200), "what runs is finished"
    assert server.process.wait(30) == 0
    assert server.log.read_text().splitlines()[0].endswith(f"on cpu in float32, port {server.port}")
    assert "Traceback" not in server.log.read_text()
