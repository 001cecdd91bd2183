"""``smoke``: does an image compute what it should? And ``parity``: do two services answer the same?"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.engine import Engine
from buildkit.errors import StorageError, UsageError, one_line
from buildkit.gdn import probe
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location, open_source
from buildkit.parity import ParityReport, read_cases
from buildkit.parity import run_parity as compare_services
from buildkit.progress import display
from buildkit.recipe import Smoke
from buildkit.smoke import SmokeOptions, SmokeReport, Subject, Verdict, run_smoke
from buildkit.smoke.recipe import subject_of
from buildkit.smoke.report import Level
from buildkit.tasks import actions, flags, resolve
from buildkit.units import parse_duration

LOG_WIDTH = 220
"""Columns of a log; the widest table, that of the kernels, has about 200."""


class NotRun(ReportedFailure):
    """Levels that need a GPU were not run: the report is printed, and the exit code says that something is missing."""

    exit_code = 3


@command(
    positional=["name"],
    help={
        "name": f"recipe, or image of the engine (default: the recipe {resolve.DEFAULT_RECIPE})",
        "level": "kernel or server; may be given several times (default: the recipe's)",
        "url": "test a server that runs already, with the probe checkpoint (see --write-checkpoint)",
        "library": "the kernels' shared library: a path in the image, or a file here when no image is named",
        "dtype": "what the server computes in: f32, f16 or bf16 (default: the recipe's)",
        "contract": "how the kernels are called: auto, log, log-kv or decay",
        "revision": "source revision of the kernels, which tells their contract",
        "gpu": "number of the GPU that runs the kernels (default 0)",
        "timeout": "longest time for one answer, like 2m",
        "allow-missing-gpu": "exit with 0 where there is no GPU; the report still says NOT RUN",
        "no-same": "do not look whether the server has the library's kernels (reads the whole image)",
        "write-checkpoint": "instead: write the probe checkpoint into this folder",
        "report": "also write the report as Markdown into this file",
        "engine": flags.ENGINE,
    },
)
def smoke(
    context: Any,
    name: str = "",
    level: list[str] = [],  # noqa: B006  # invoke tells a list flag by its default
    url: str = "",
    library: str = "",
    dtype: str = "",
    contract: str = "auto",
    revision: str = "",
    gpu: int = 0,
    timeout: str = "",
    allow_missing_gpu: bool = False,
    no_same: bool = False,
    write_checkpoint: str = "",
    report: str = "",
    engine: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Compare what an image computes with a reference, stage by stage and end to end, and name the fault."""
    if write_checkpoint:
        _write_checkpoint(Path(write_checkpoint), dtype or "f16", json=json)
        return
    host = flags.engine_host(engine)
    subject, wish = _subject(name, url=url, library=library, revision=revision, host=host)
    defaults = SmokeOptions()
    options = replace(
        defaults,
        levels=_levels(level, wish, subject),
        dtype=dtype or wish.dtype,
        contract=contract,
        ordinal=gpu,
        timeout=parse_duration(timeout, what="--timeout") if timeout else defaults.timeout,
        allow_missing_gpu=allow_missing_gpu,
        same=not no_same,
    )

    def open_image(text: str) -> ImageSource:
        return open_source(text, engine_host=host)

    with ExitStack() as stack, display(quiet=quiet) as shown:
        connected = stack.enter_context(Engine.connect(host)) if subject.image else None
        result = run_smoke(subject, options, engine=connected, open_image=open_image, say=shown.say)
    _write_markdown(result.to_markdown(), report)
    if json:
        emit_json(result.to_json())
    elif quiet:
        print(result.summary())
    else:
        _print(result.render())
    _conclude(result)


def _conclude(result: SmokeReport) -> None:
    if result.exit_code == 0:
        return
    message = one_line(result.summary(), 300)
    if result.verdict is Verdict.NOT_RUN:
        raise NotRun(message, hint="--allow-missing-gpu lets this pass, untested")
    raise ReportedFailure(message)


def _subject(name: str, *, url: str, library: str, revision: str, host: str | None) -> tuple[Subject, Smoke]:
    """What is tested, and the recipe's wishes. An image is only looked for where one is needed."""
    if not name and (url or library):
        if library:
            _require_file(library)
        shown = one_line(url or library)
        return (
            Subject(name=shown, url=url or None, library=library or None, revision=revision or None),
            Smoke(),
        )
    chosen = resolve.choose(name, engine_host=host)
    place = Location.parse(chosen.source)
    if place.kind != "docker-daemon" or place.name is None:
        raise UsageError(f"smoke tests images of the engine, {chosen.source} is none", hint="docker load it first")
    wish = chosen.recipe.smoke if chosen.recipe else Smoke()
    subject = (
        subject_of(chosen.recipe, place.name, revision=revision or None)
        if chosen.recipe
        else Subject(name=name, image=place.name, revision=revision or None)
    )
    return replace(subject, library=library or subject.library, url=url or None), wish


def _require_file(library: str) -> None:
    """Without an image, the library is a file here."""
    path = Path(library)
    hint = "to test a library inside an image, name the recipe or image too"
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else "is not there"
            raise UsageError(f"--library {library} {what}", hint=hint)
        path.open("rb").close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--library {library} cannot be read: {why}", hint=hint) from error


def _levels(given: list[str], wish: Smoke, subject: Subject) -> tuple[Level, ...]:
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    for word in words:
        if word not in get_args(Level):
            raise UsageError(f"--level {word!r} is not known", hint=", ".join(get_args(Level)))
    if given and not words:
        raise UsageError("--level names no level", hint=", ".join(get_args(Level)))
    if words:
        return tuple(level for level in get_args(Level) if level in words)
    if subject.url:
        return ("server",)
    return wish.levels or (("kernel",) if subject.library else ())


def _write_checkpoint(folder: Path, dtype: str, *, json: bool) -> None:
    if dtype not in ("f32", "f16", "bf16"):
        raise UsageError(f"--dtype {dtype!r} is not known", hint="f32, f16 or bf16")
    probe.write(folder, dtype)
    if json:
        emit_json({"ok": True, "folder": str(folder), "files": sorted(probe.files(dtype))})
    else:
        print(f"wrote the probe checkpoint in {dtype} to {folder}")


@command(
    help={
        "candidate": "URL of the service under test",
        "reference": "URL of the service that it is compared with",
        "cases": "YAML file with the requests and the fields to compare",
        "timeout": "longest time for one answer, like 5m",
        "out": "also write the report as JSON into this file",
        "report": "also write the report as Markdown into this file",
    },
)
def parity(
    context: Any,
    candidate: str = "",
    reference: str = "",
    cases: str = "",
    timeout: str = "5m",
    out: str = "",
    report: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Send the same requests to two services and compare their answers field by field."""
    for flag, value in (("--candidate", candidate), ("--reference", reference), ("--cases", cases)):
        if not value:
            raise UsageError(f"parity needs {flag}", hint="--candidate URL --reference URL --cases FILE")
    wanted = read_cases(Path(cases))
    with display(quiet=quiet) as shown:
        result = compare_services(
            candidate, reference, wanted, timeout=parse_duration(timeout, what="--timeout"), say=shown.say
        )
    _write_markdown(result.to_markdown(), report)
    if out:
        _write(Path(out), _dump(result))
    if json:
        emit_json(result.to_json())
    elif quiet:
        print(result.summary())
    else:
        _print(result.render())
    if not result.ok:
        raise ReportedFailure(one_line(result.summary(), 300))


def _print(what: Any) -> None:
    """Tables as wide as they need in logs, where nobody's window is."""
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else LOG_WIDTH).print(what)


def _dump(result: ParityReport) -> str:
    from json import dumps

    # Texts of servers may hold halves of surrogate pairs, which only JSON's escapes can carry; it has no NaN at all.
    return dumps(result.to_json(), indent=2, allow_nan=False) + "\n"


def _write_markdown(text: str, report: str) -> None:
    """Into the file that was asked for, and onto an Actions job's summary page."""
    if report:
        _write(Path(report), text)
    actions.append_summary(text)


def _write(path: Path, text: str) -> None:
    try:
        # A file name of ours may be no Unicode; a report is.
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
