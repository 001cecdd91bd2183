"""The check on images in a real engine, in every transport, and the start without a network.

The image is made of this machine's own shell, perl and their libraries, and of the golden CUDA files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.rootfs import root_tar

from buildkit.check import run_check, same_fatbins
from buildkit.check.start import prove_start
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Policy
from buildkit.engine import Engine
from buildkit.errors import NotFoundError, UsageError
from buildkit.image.transports import open_source
from buildkit.recipe import Start

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cuda"
NAME = "buildkit-check-test:start"
PROGRAMS = ("sh", "bash", "perl", "sleep", "cat", "touch")

SERVER = b"""#!/bin/perl
use IO::Socket::INET;
print "listening on $ARGV[0]\\n"; $| = 1;
my $server = IO::Socket::INET->new(LocalAddr => '0.0.0.0', LocalPort => $ARGV[0], Listen => 5) or die $!;
while (my $client = $server->accept) {
  my $line = <$client>;
  my $status = $line =~ m{ /health } ? '200 OK' : '503 No';
  print $client "HTTP/1.0 $status\\r\\nContent-Length: 0\\r\\n\\r\\n"; close $client;
}
"""
INSTALLS = b"#!/bin/sh\npip install torch\nexec /srv/server 8000\n"


def root_file_system() -> bytes:
    """Programs, perl's base modules, and the files to check."""
    includes = subprocess.run(
        ["perl", "-e", 'print join "\\n", @INC'], capture_output=True, text=True, check=True
    ).stdout
    base = next(Path(line) for line in includes.splitlines() if line.endswith("perl-base"))
    files = {
        "srv/server": (SERVER, 0o755),
        "srv/installs.sh": (INSTALLS, 0o755),
        "srv/libgdn.so": ((GOLDEN / "cuda11-sm70.so").read_bytes(), 0o644),
        "srv/app": ((GOLDEN / "cuda11-partial.so").read_bytes(), 0o755),
        "tmp/.keep": (b"", 0o644),
    }
    return root_tar(PROGRAMS, files, folders=[base])


@pytest.fixture(scope="module")
def image(engine: Engine) -> Iterator[str]:
    engine.import_tar([root_file_system()], NAME, changes=['CMD ["/srv/installs.sh"]', "ENV PIP_DEFAULT_TIMEOUT=1"])
    yield NAME
    engine.remove(NAME)


def containers(engine: Engine) -> list[str]:
    return [str(c.id) for c in engine.client.containers.list(all=True, filters={"label": "buildkit.check=start"})]


# Transports ----------------------------------------------------------------------------------------------------------


def test_the_engines_image_and_its_archive_say_the_same(engine: Engine, image: str, tmp_path: Path) -> None:
    policy = Policy(require=(Arch(70),))
    by_engine = run_check(
        f"docker-daemon:{image}", policy, open_image=lambda text: open_source(text, engine_host=engine.host)
    )
    archive = tmp_path / "image.tar"
    with engine.save(image) as stream, archive.open("wb") as file:
        while data := stream.read(1 << 20):
            file.write(data)
    by_archive = run_check(f"docker-archive:{archive}", policy)
    by_save = run_check(
        f"docker-daemon:{image}",
        policy,
        open_image=lambda text: open_source(text, engine_host=engine.host, method="save"),
    )
    for report in (by_engine, by_archive, by_save):
        assert {f.path: str(f.verdict) for f in report.files} == {"/srv/app": "partial", "/srv/libgdn.so": "native"}
        assert {f.rule for f in report.violations} == {"cuda.require", "offline start"}
        assert report.image_id == by_engine.image_id


def test_the_library_is_in_the_program_byte_for_byte(engine: Engine, image: str) -> None:
    report = same_fatbins("/srv/libgdn.so", image, open_image=lambda text: open_source(text, engine_host=engine.host))
    assert report.holders == ("/srv/app",)


# The start -----------------------------------------------------------------------------------------------------------


def test_a_server_becomes_healthy_without_a_network(engine: Engine, image: str) -> None:
    spec = Start(command=("/srv/server", "8000"), port=8000, health="/health", expect="listening", timeout=30)
    proof = prove_start(engine, image, spec)
    assert (proof.ok, proof.exit_code) == (True, None)
    assert "healthy at /health" in proof.message


def test_an_unhealthy_server_is_a_result(engine: Engine, image: str) -> None:
    spec = Start(command=("/srv/server", "8000"), port=8000, health="/other", timeout=2)
    proof = prove_start(engine, image, spec)
    assert not proof.ok
    assert "not healthy within 2 s" in proof.message


@pytest.mark.parametrize(
    ("script", "spec", "ok", "words"),
    [
        ("exit 0", Start(), True, "ended with 0"),
        ("echo version 1.2", Start(expect=r"version \d"), True, "ended with 0"),
        ("echo other", Start(expect="version"), False, "does not match"),
        ("echo boom; exit 3", Start(), False, "ended with 3: boom"),
        ("echo $GREETING", Start(environment={"GREETING": "hello"}, expect="hello"), True, "ended with 0"),
        ("touch /srv/x", Start(), False, "ended with 1"),
        ("touch /tmp/x", Start(), True, "ended with 0"),
        ("touch /cache/x", Start(writable=("/tmp", "/cache")), True, "ended with 0"),
        ("exec 3<>/dev/tcp/192.0.2.1/80", Start(), False, "ended with 1"),
        ("sleep 60", Start(timeout=1), False, "did not end within 1 s"),
        ("exit 5", Start(port=1, health="/x"), False, "ended with 5 before it was healthy"),
    ],
)
def test_commands_are_judged_by_their_end_and_output(
    engine: Engine, image: str, script: str, spec: Start, ok: bool, words: str
) -> None:

    proof = prove_start(engine, image, replace(spec, command=("bash", "-c", script)))
    assert (proof.ok, words in proof.message) == (ok, True), proof
    assert containers(engine) == []


def test_a_program_that_is_not_there_is_a_result(engine: Engine, image: str) -> None:
    proof = prove_start(engine, image, Start(command=("/no/such/program",)))
    assert not proof.ok
    assert "/no/such/program" in proof.message
    assert containers(engine) == []


def test_the_image_starts_by_its_own_command(engine: Engine, image: str) -> None:
    proof = prove_start(engine, image, Start(timeout=20))
    assert not proof.ok
    assert "not found" in proof.output


def test_what_cannot_be_started_is_an_error(engine: Engine, image: str) -> None:
    with pytest.raises(NotFoundError):
        prove_start(engine, "buildkit-check-test:none", Start(command=("sh",)))
    with pytest.raises(UsageError, match=r"needs start\.port"):
        prove_start(engine, image, Start(health="/x"))
    with pytest.raises(UsageError, match="regular expression"):
        prove_start(engine, image, Start(expect="("))


def test_a_check_with_a_start_reports_both(engine: Engine, image: str) -> None:
    report = run_check(
        image,
        Policy(),
        open_image=lambda text: open_source(text, engine_host=engine.host),
        prove=lambda: prove_start(engine, image, Start(command=("sh", "-c", "exit 1"))),
    )
    assert {f.rule for f in report.violations} == {"offline start", "start"}
    assert report.proof is not None
    assert "does not start" in report.to_markdown()
