"""How long an image takes from the engine to a registry: this package beside docker, skopeo, crane and regctl.

Every way starts cold: a registry with an empty store of its own, an empty cache, page caches dropped where allowed. All
run one after the other in one session on one machine, so the ratios mean something; the seconds alone do not.

    python benchmarks/push.py IMAGE                  # an image that the engine has
    python benchmarks/push.py --build                # or the CUDA toolkit image of several GB, built first
    python benchmarks/push.py IMAGE --only direct,docker-push --json result.json

Needs an engine (DOCKER_HOST, or `buildkit stack.up`), docker-registry, nginx; takes the peers that it finds on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buildkit import stack as local_stack
from buildkit.engine import Engine
from buildkit.image.layout import LayoutSource
from buildkit.image.transports import open_source
from buildkit.stack import StackOptions, StackState

TOOLKIT = """FROM {base}
RUN sed -i 's/ main.*/ main contrib non-free/' /etc/apt/sources.list && apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y nvidia-cuda-toolkit \\
 && apt-get clean && rm -rf /var/lib/apt/lists/*
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured way. ``rss`` is the largest resident size of our own process in bytes (0 for peers, whose work is
    spread over daemons)."""

    name: str
    seconds: float
    rss: int
    ok: bool
    note: str = ""


class Bench:
    def __init__(self, image: str, folder: Path) -> None:
        self.image = image
        self.folder = folder
        self.runs: dict[str, Run] = {}
        self.engine_host = _engine_host()
        self.docker = _docker()

    @contextmanager
    def registry(self) -> Iterator[StackState]:
        """An empty registry and an edge before it, gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="bk-bench-", dir=self.folder))
        try:
            yield local_stack.up(folder, StackOptions(engine="none"))
        finally:
            local_stack.down(folder, purge=True)
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, name: str, command: list[str], *, expect: int = 0, environ: dict[str, str] | None = None) -> Run:
        _drop_caches()
        with open(self.folder / f"{name}.log", "wb") as log:
            began = time.monotonic()
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "DOCKER_HOST": self.engine_host, **(environ or {})}
            )
            _, status, usage = os.wait4(child.pid, 0)
            seconds = time.monotonic() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        ok = child.returncode == expect
        result = Run(name=name, seconds=seconds, rss=usage.ru_maxrss * 1024, ok=ok)
        if not ok:
            tail = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-3:]
            print(f"{name} ended with {child.returncode}: {' | '.join(tail)}", file=sys.stderr)
        self.runs[name] = result
        print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        return result

    def ours(
        self, name: str, to: str, cache: Path, *, source: str | None = None, extra: list[str] | None = None
    ) -> Run:
        command = [sys.executable, "-m", "buildkit", "push", source or f"docker-daemon:{self.image}", "--to", to]
        return self.run(
            name,
            [*command, "--chunked", "--quiet", *(extra or [])],
            environ={"BUILDKIT_CACHE_DIR": str(cache), "BUILDKIT_STATE_DIR": str(cache)},
        )

    # The ways --------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.run("docker-save", ["sh", "-c", f"{self.docker} save {self.image} > /dev/null"])

    def docker_push(self) -> None:
        with self.registry() as stack:
            name = f"{stack.registry}/bench:docker"
            subprocess.run([self.docker, "tag", self.image, name], check=True, env=self._env())
            self.run("docker-push", [self.docker, "push", name])
            subprocess.run([self.docker, "rmi", name], check=True, env=self._env(), stdout=subprocess.DEVNULL)

    def docker_push_edge(self) -> None:
        with self.registry() as stack:
            name = f"{stack.edge}/bench:docker"
            subprocess.run([self.docker, "tag", self.image, name], check=True, env=self._env())
            self.run("docker-push-edge", [self.docker, "push", name], expect=1)
            subprocess.run([self.docker, "rmi", name], check=True, env=self._env(), stdout=subprocess.DEVNULL)

    def skopeo(self) -> None:
        with self.registry() as stack:
            self.run(
                "skopeo",
                ["skopeo", "copy", "--src-daemon-host", self.engine_host,
                 "--dest-tls-verify=false", f"docker-daemon:{self.image}", f"docker://{stack.registry}/bench:skopeo"],
            )  # fmt: skip

    def crane(self) -> None:
        with self.registry() as stack:
            tar = self.folder / "image.tar"
            self.run(
                "save+crane",
                ["sh", "-c", f"{self.docker} save -o {tar} {self.image} && crane push --insecure {tar} {stack.registry}/bench:crane"],
            )  # fmt: skip
            tar.unlink(missing_ok=True)

    def regctl(self) -> None:
        with self.registry() as stack:
            tar = self.folder / "image.tar"
            host = stack.edge
            self.run(
                "save+regctl",
                ["sh", "-c", f"{self.docker} save -o {tar} {self.image} && regctl registry set --tls disabled --blob-chunk 95000000 --blob-max 95000000 {host} && regctl image import {host}/bench:regctl {tar}"],
            )  # fmt: skip
            tar.unlink(missing_ok=True)

    def direct(self) -> None:
        """Cold; then unchanged; then with a small layer on top."""
        with self.registry() as stack, tempfile.TemporaryDirectory(dir=self.folder) as cache:
            to = f"{stack.edge}/bench:ours"
            self.ours("direct", to, Path(cache), extra=["--source", "direct"])
            self.ours("unchanged", to, Path(cache))
            changed = "bench-changed:latest"
            with tempfile.TemporaryDirectory(dir=self.folder) as context:
                (Path(context) / "Dockerfile").write_text(f"FROM {self.image}\nCOPY note /note\n")
                (Path(context) / "note").write_text(f"{time.time()}\n")
                subprocess.run(
                    [self.docker, "build", "-q", "-t", changed, context],
                    check=True, env=self._env() | {"DOCKER_BUILDKIT": "1"}, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            self.ours("top-layer", to, Path(cache), source=f"docker-daemon:{changed}", extra=["--source", "direct"])
            subprocess.run([self.docker, "rmi", changed], check=True, env=self._env(), stdout=subprocess.DEVNULL)

    def by_save(self) -> None:
        with self.registry() as stack, tempfile.TemporaryDirectory(dir=self.folder) as cache:
            self.ours("by-save", f"{stack.edge}/bench:ours", Path(cache), extra=["--source", "save"])

    def layout(self) -> None:
        """An `oci:` source beside curl with the same bytes, both straight to the registry."""
        layout = self.folder / "layout"
        with self.registry() as stack, tempfile.TemporaryDirectory(dir=self.folder) as cache:
            self.ours("to-make-a-layout", f"{stack.registry}/bench:src", Path(cache))
            subprocess.run(
                ["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{stack.registry}/bench:src", f"oci:{layout}:x"],
                check=True,
            )  # fmt: skip
        with open_source(f"oci:{layout}:x") as source:
            assert isinstance(source, LayoutSource)
            assert source.manifest is not None
            largest = max(source.manifest.layers, key=lambda layer: layer.size)
        path = layout / "blobs" / "sha256" / largest.digest.hex
        for name, edge in (("curl", False), ("curl-edge", True)):
            with self.registry() as stack:
                self._curl(name, stack.edge if edge else stack.registry, path, chunk=95_000_000 if edge else None)
        for name, edge in (("layout", False), ("layout-edge", True)):
            with self.registry() as stack, tempfile.TemporaryDirectory(dir=self.folder) as cache:
                to = f"{stack.edge if edge else stack.registry}/bench:ours"
                self.ours(name, to, Path(cache), source=f"oci:{layout}:x", extra=[] if edge else ["--edge", "none"])
        shutil.rmtree(layout, ignore_errors=True)

    def _curl(self, name: str, registry: str, path: Path, *, chunk: int | None) -> None:
        """One PATCH, or one for each chunk through the edge; as a script, because Location changes each time."""
        script = f"""
        set -e
        url=$(curl -sS -X POST -H 'Content-Length: 0' -D - -o /dev/null http://{registry}/v2/bench/blobs/uploads/ \
              | tr -d '\\r' | awk 'tolower($1)=="location:"{{print $2}}')
        size=$(stat -c %s {path}); at=0; step={chunk or 2**62}
        while [ $at -lt $size ]; do
          end=$((at + step)); [ $end -gt $size ] && end=$size
          if [ $at -eq 0 ] && [ $end -eq $size ]; then body={path}; else
            body={self.folder}/piece; dd if={path} of=$body bs=1M iflag=skip_bytes,count_bytes skip=$at count=$((end-at)) status=none; fi
          url=$(curl -sS -X PATCH -H 'Content-Type: application/octet-stream' -H 'Expect:' -H "Content-Range: $at-$((end-1))" \
                -T $body -D - -o /dev/null "$url" | tr -d '\\r' | awk 'tolower($1)=="location:"{{print $2}}')
          at=$end
        done
        curl -sSf -X PUT -H 'Content-Length: 0' "$url&digest=sha256:{path.name}"
        """
        self.run(name, ["bash", "-c", script])
        (self.folder / "piece").unlink(missing_ok=True)

    def _env(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.engine_host}


def table(runs: dict[str, Run]) -> Table:
    out = Table(title="seconds, and ratios within this run")
    for column in ("way", "seconds", "peak MB", "÷ docker push", "÷ skopeo", "÷ docker save", "note"):
        out.add_column(column, justify="left" if column in ("way", "note") else "right")
    for run in runs.values():
        ratios = []
        for other in ("docker-push", "skopeo", "docker-save"):
            peer = runs.get(other)
            ratios.append(f"{run.seconds / peer.seconds:.3f}" if peer and peer.ok else "-")
        out.add_row(run.name, f"{run.seconds:.1f}", f"{run.rss / 1e6:.0f}", *ratios, run.note if run.ok else "FAILED")
    return out


def _docker() -> str:
    return "/usr/bin/docker" if os.access("/usr/bin/docker", os.X_OK) else "docker"


def _engine_host() -> str:
    if os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    engine = local_stack.status(local_stack.default_folder()).components.get("engine")
    return engine.address if engine else "unix:///var/run/docker.sock"


def _drop_caches() -> None:
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def _build(base: str) -> str:
    name = "bench-toolkit:latest"
    with tempfile.TemporaryDirectory() as context:
        (Path(context) / "Dockerfile").write_text(TOOLKIT.format(base=base))
        subprocess.run(
            [_docker(), "build", "--network", "host", "-t", name, context],
            check=True, env={**os.environ, "DOCKER_HOST": _engine_host(), "DOCKER_BUILDKIT": "1"},
        )  # fmt: skip
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?")
    parser.add_argument("--build", metavar="BASE", help="build the toolkit image on this base (of the engine) first")
    parser.add_argument("--only", help="ways, by commas")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for registries and caches")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    image = _build(options.build) if options.build else options.image
    if not image:
        parser.error("name an image, or --build one")
    with Engine.connect(_engine_host()) as engine:
        size = engine.inspect(image).size
    print(f"{image}: {size / 1e9:.2f} GB", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(image, Path(folder))
        ways: dict[str, Callable[[], None]] = {
            "docker-save": bench.save,
            "docker-push": bench.docker_push,
            "docker-push-edge": bench.docker_push_edge,
            "skopeo": bench.skopeo,
            "crane": bench.crane,
            "regctl": bench.regctl,
            "direct": bench.direct,
            "save": bench.by_save,
            "layout": bench.layout,
        }
        for name, way in ways.items():
            if options.only and name not in options.only.split(","):
                continue
            if name in ("skopeo", "crane", "regctl") and not shutil.which(name):
                print(f"{name}: not on PATH, left out", file=sys.stderr)
                continue
            way()
    bench.runs.pop("to-make-a-layout", None)
    Console(width=140).print(table(bench.runs))
    if options.json:
        figures = {"image": image, "size": size, "runs": [asdict(run) for run in bench.runs.values()]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
