"""The command line: what invoke lacks for us, and the installed command ``buildkit``.

The tasks themselves are in ``buildkit.tasks``; ``tasks.py`` and ``buildkit …`` serve the same collection. Here is

- ``command``: a task whose errors become one line and an exit code (0 done, 1 a check or push failed, 2 wrong usage or
  configuration, 3 a needed component is missing, 130 interrupted), and whose ``--json`` stays JSON when it fails;
- optional positional arguments, which invoke does not have: ``invoke build`` and ``invoke build cuda-probe``;
- wrong usage with exit code 2, where invoke ends with 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from io import TextIOWrapper
from types import FrameType
from typing import Any, cast

from invoke.exceptions import Exit, ParseError
from invoke.parser.context import ParserContext
from invoke.parser.parser import ParseMachine
from invoke.program import Program
from invoke.tasks import Task, task

from buildkit import __version__
from buildkit.errors import BuildkitError, CancelledError, CheckFailedError, StorageError, UsageError, one_line


class WrongUsage(ParseError, Exit):
    """A command line that does not parse. Invoke prints a ParseError, and takes the code of an Exit."""

    def __init__(self, message: str, context: ParserContext | None = None) -> None:
        ParseError.__init__(self, message, context)
        Exit.__init__(self, code=UsageError.exit_code)
        self.text = message

    def __str__(self) -> str:
        return f"error: {self.text} (--help shows what is there)"


class ReportedFailure(CheckFailedError):
    """The report is printed already; what is left to say is one line on standard error, and exit code 1."""


_stock_handle = ParseMachine.handle


def _handle(machine: ParseMachine, token: str) -> None:
    """Invoke's parser takes every positional argument as required. Here one with a default is filled by the first word
    that is neither a flag nor the name of a task, so that ``invoke build check`` still means two tasks."""
    context = machine.context
    if (
        context
        and context is not machine.initial
        and not re.match("-.", token)  # a dash alone is standard input
        and token not in machine.contexts
        and not machine.waiting_for_flag_value
    ):
        for argument in context.positional_args:
            if argument.raw_value is None and argument.default is not None:
                argument.value = token
                return
    try:
        _stock_handle(machine, token)
    except ValueError:
        flag = f"--{machine.flag.name}" if machine.flag else "the flag"
        _error(machine, f"{flag} takes a number, not {token!r}")


def _error(machine: ParseMachine, message: str) -> None:
    text = re.sub(r"<Argument: ([^ >(]+)[^>]*>", r"--\1", message)
    if "--json" in sys.argv:
        _emit_failure(UsageError(text, hint="--help shows what is there"))
    raise WrongUsage(text, machine.context)


# The parser names this class and offers no way to pass another one; a subclass would lose the states that its
# metaclass collects.
ParseMachine.handle = _handle  # type: ignore[method-assign, assignment]
ParseMachine.error = _error  # type: ignore[method-assign, assignment]


class _Command(Task[Any]):
    """Invoke's task takes the texts out of its help when its arguments are listed: here they stay, for the next time
    (a program within a program, a reference)."""

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> Any:
        kept = dict(self.help)
        try:
            return super().get_arguments(ignore_unknown_help)
        finally:
            self.help = kept


def command(
    *,
    help: Mapping[str, str],
    positional: Iterable[str] = (),
    name: str | None = None,
) -> Callable[[Callable[..., None]], Task[Any]]:
    """A task from ``body(context, *, …)``. Adds ``--debug`` and ``--quiet``; all errors pass through here.

    The body returns None and raises BuildkitError. A body with a ``json`` parameter prints its own JSON when it ends
    well; when it raises, ``{"ok": false, "error": …}`` is printed here.
    """

    def wrap(body: Callable[..., None]) -> Task[Any]:
        signature = inspect.signature(body)
        flags: dict[str, str] = dict(help)
        extra = [
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=False)
            for flag in ("quiet", "debug")
            if flag not in signature.parameters
        ]
        own_debug = "debug" in signature.parameters
        own_quiet = "quiet" in signature.parameters
        flags.setdefault("quiet", "print nothing but results and errors")
        flags.setdefault("debug", "show the traceback of an error and more of what happens (never a secret)")
        if "json" in signature.parameters:
            flags.setdefault("json", "print the report as JSON on standard output")

        @functools.wraps(body)
        def run(context: Any, **given: Any) -> None:
            debug = bool(given["debug"] if own_debug else given.pop("debug", False))
            if not own_quiet:
                given.pop("quiet", None)
            as_json = bool(given.get("json", False))
            replace_closed_streams()
            try:
                with _TerminationAsInterrupt():
                    body(context, **given)
                    sys.stdout.flush()
            except BuildkitError as error:
                raise _failed(error, debug=debug, as_json=as_json) from None
            except KeyboardInterrupt:
                stopped = CancelledError("interrupted", hint="the same command can be run again")
                raise _failed(stopped, debug=debug, as_json=as_json) from None
            except BrokenPipeError:
                # The reader of our output went away (`| head`): nothing more to say, and nothing to say it to.
                give_up_output()
                raise Exit(code=1) from None
            except OSError as error:
                raise _failed(_from_os(error), debug=debug, as_json=as_json) from None
            except Exit:
                raise
            except Exception as error:
                if debug:
                    traceback.print_exc()
                bug = BuildkitError(
                    f"internal error: {type(error).__name__}: {one_line(str(error), 300)}",
                    hint="this is a bug in buildkit; --debug shows where",
                )
                raise _failed(bug, debug=False, as_json=as_json) from None

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *extra]
        )
        made = task(run, name=name, positional=list(positional), help=flags, auto_shortflags=False, klass=_Command)
        return cast("Task[Any]", made)

    return wrap


def emit_json(document: object) -> None:
    """One JSON document on standard output (RFC 8259): no NaN, and text that is no Unicode (file names) is escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(document, indent=2, allow_nan=False)
    print(text)


def _failed(error: BuildkitError, *, debug: bool, as_json: bool) -> Exit:
    if debug:
        traceback.print_exception(error)
    try:
        if as_json and not isinstance(error, ReportedFailure):
            _emit_failure(error)
        sys.stdout.flush()
    except OSError:
        give_up_output()  # it is full or closed; standard error still says what there is to say
    return Exit(f"error: {error}", code=error.exit_code)


def _emit_failure(error: BuildkitError) -> None:
    emit_json(
        {
            "ok": False,
            "error": {"message": error.message, "hint": error.hint, "kind": type(error).__name__},
            "exit_code": error.exit_code,
        }
    )


def replace_closed_streams() -> None:
    """A program that is started with a standard stream closed has None there (``2>&-``): the null device instead."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for the life of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def give_up_output() -> None:
    """Standard output cannot be written: what is still buffered for it goes nowhere, also at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _from_os(error: OSError) -> BuildkitError:
    """An operating-system error that no module has mapped: it still names its file, and is no traceback."""
    place = error.filename or "standard output"
    return StorageError(f"{place}: {error.strerror or error}")


class _TerminationAsInterrupt:
    """SIGTERM ends a task as Ctrl-C does, so that a stopped CI job leaves its state as tidy as an interrupted one; and
    so does SIGHUP, a terminal that is closed, where nobody (``nohup``) has asked for it to be ignored."""

    def __enter__(self) -> None:
        self._before: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before != signal.SIG_DFL:
                continue
            with contextlib.suppress(ValueError):  # not in the main thread: someone else's program and signals
                signal.signal(number, self._raise)
                self._before[number] = before

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)

    @staticmethod
    def _raise(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def program() -> Program:
    """The installed command: the same tasks, in any directory."""
    from buildkit.tasks import namespace

    return Program(
        name="buildkit", binary="buildkit", binary_names=["buildkit"], namespace=namespace, version=__version__
    )


def main() -> None:
    """The entry point: also what happens outside of a task ends in a line and a code."""
    replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what others wrote may not fit the terminal's encoding
    try:
        try:
            program().run()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(CancelledError.exit_code)
    except OSError as error:
        give_up_output()
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)
