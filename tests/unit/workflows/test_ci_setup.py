"""``scripts/ci-setup`` on runners that lack something: everything that is missing is told at once, and nothing is
installed. The runner is a PATH of its own, with the programs of this machine that it is meant to have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COREUTILS = ("bash", "id", "dirname", "mktemp", "env", "timeout", "git")


@dataclass
class Runner:
    """``bin`` is all of PATH; ``work`` the checkout."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "bash", ROOT / "scripts/ci-setup", *words],
            cwd=self.folder / "work",
            env={
                "PATH": str(self.bin),
                "HOME": str(self.folder),
                "GITHUB_PATH": str(self.folder / "path"),
                "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
                "RUNNER_TEMP": str(self.folder),
                **environ,
            },
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    made = Runner(tmp_path)
    made.bin.mkdir()
    for name in COREUTILS:
        found = shutil.which(name)
        assert found, name
        (made.bin / name).symlink_to(found)
    work = tmp_path / "work"
    work.mkdir()
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *identity, *command], cwd=work, check=True)
    return made


@pytest.fixture
def tool(runner: Runner) -> Path:
    """An interpreter with buildkit beside it, as a runner's own image may bring."""
    runner.program("buildkit", "#!/bin/sh\n")
    return runner.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')


def test_a_runner_that_brings_buildkit_needs_no_installation(runner: Runner, tool: Path) -> None:
    done = runner.run("registry", HAS_TOKEN="true", BUILDKIT_PYTHON=str(tool))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (runner.folder / "path").read_text() == f"{runner.bin}\n"
    assert "buildkit 0." in done.stdout
    assert not (runner.folder / "summary").exists()


def test_everything_that_is_missing_is_told_at_once(runner: Runner) -> None:
    runner.program("python3", "#!/bin/sh\nexit 1\n")
    done = runner.run("docker", "registry", GITHUB_SHA="0" * 40, BUILDKIT_INSTALL=".")
    assert done.returncode == 3
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    for words in ("this run is for 000", "no Python 3.11", "no docker on this runner", "REGISTRY_TOKEN is not set"):
        assert sum(words in line for line in lines) == 1, done.stdout
    assert len(lines) == 4
    assert (runner.folder / "summary").read_text().count("**error**") == 4
    assert not (runner.folder / "path").exists()


@pytest.mark.parametrize("value", ["", "false", "secret"])
def test_without_the_secret(runner: Runner, tool: Path, value: str) -> None:
    done = runner.run("registry", HAS_TOKEN=value, BUILDKIT_PYTHON=str(tool))
    assert done.returncode == 3
    assert "Settings > Actions > Secrets" in done.stdout


@pytest.mark.parametrize("environ", [{"DOCKER_HOST": "tcp://engine:2375"}, {}])
def test_an_engine_or_its_client_will_do(runner: Runner, tool: Path, environ: dict[str, str]) -> None:
    if not environ:
        runner.program("docker", "#!/bin/sh\n")
    assert runner.run("docker", BUILDKIT_PYTHON=str(tool), **environ).returncode == 0


def test_an_old_python_is_none(runner: Runner) -> None:
    runner.program("python3", '#!/bin/sh\ncase "$*" in *version_info*) exit 1;; esac\n')
    done = runner.run(BUILDKIT_INSTALL=".")
    assert done.returncode == 3
    assert "no Python 3.11" in done.stdout


def test_a_python_without_environments(runner: Runner) -> None:
    answers = "*ensurepip*) exit 1;; *%d.%d*) echo 3.12;; *) exit 0;;"
    runner.program("python3", f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    done = runner.run(BUILDKIT_INSTALL=".")
    assert done.returncode == 3
    assert "apt-get install python3.12-venv" in done.stdout


def test_a_package_of_the_distribution_is_installed_where_that_is_allowed(runner: Runner) -> None:
    """A job's container is root's: what apt has is no reason to stop."""
    runner.program("id", "#!/bin/sh\necho 0\n")
    runner.program("apt-get", f'#!/bin/sh\necho "$*" >> {runner.folder}/apt\n')
    (runner.bin / "git").unlink()
    done = runner.run("registry", HAS_TOKEN="true")
    assert (runner.folder / "apt").read_text().splitlines() == ["update -qq", "install -y -qq git"]
    assert done.returncode == 3  # this apt-get installs nothing


def test_no_git_and_no_apt(runner: Runner) -> None:
    (runner.bin / "git").unlink()
    done = runner.run()
    assert done.returncode == 3
    assert "git is not installed" in done.stdout


def test_a_download_is_no_checkout(runner: Runner, tool: Path) -> None:
    shutil.rmtree(runner.folder / "work/.git")
    done = runner.run(BUILDKIT_PYTHON=str(tool), GIT_CEILING_DIRECTORIES=str(runner.folder))
    assert done.returncode == 3
    assert "no checkout with its history" in done.stdout


def test_an_interpreter_that_is_not_there(runner: Runner) -> None:
    done = runner.run(BUILDKIT_PYTHON="/nowhere/python")
    assert done.returncode == 3
    assert "BUILDKIT_PYTHON is /nowhere/python, which is not there" in done.stdout


def test_an_interpreter_without_buildkit(runner: Runner, tool: Path) -> None:
    (runner.bin / "buildkit").unlink()
    done = runner.run(BUILDKIT_PYTHON=str(tool))
    assert done.returncode == 3
    assert "no buildkit beside" in done.stdout


def test_what_pip_cannot_install(runner: Runner) -> None:
    runner.program("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    nothing = runner.folder / "nothing"
    done = runner.run(BUILDKIT_INSTALL=str(nothing), PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert f"pip could not install {nothing}" in done.stdout
    assert f"pip could not install {nothing}" in (runner.folder / "summary").read_text()


def test_nothing_to_install_and_no_page_to_tell_it_on(runner: Runner, tool: Path) -> None:
    runner.program("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    done = runner.run(GITHUB_STEP_SUMMARY="/nowhere/summary", GITHUB_SHA="x\n::set-env name=PATH::/evil")
    assert done.returncode == 3
    assert "BUILDKIT_INSTALL is empty" in done.stdout
    assert not done.stderr
    assert all(line.startswith("error: ") for line in done.stdout.splitlines()), "no line is a command to the runner"


def test_it_asks_for_what_it_knows(runner: Runner, tool: Path) -> None:
    done = runner.run("kubernetes", BUILDKIT_PYTHON=str(tool))
    assert done.returncode == 3
    assert "ci-setup knows no kubernetes" in done.stdout


def test_no_secret_has_a_way_into_its_output(runner: Runner) -> None:
    done = runner.run("registry", HAS_TOKEN="true", REGISTRY_TOKEN="very-secret", BUILDKIT_PYTHON="/nowhere")
    assert "very-secret" not in done.stdout + done.stderr
    assert os.path.exists(runner.folder / "summary")
