"""What an Actions job (GitHub's or Gitea's) takes from its steps: outputs, variables, and Markdown for
its summary page."""

from __future__ import annotations

import os
from collections.abc import Mapping

from buildkit.errors import StorageError, one_line


def append_summary(markdown: str) -> None:
    """Onto the job's summary page, where there is one. Raises StorageError."""
    _append("GITHUB_STEP_SUMMARY", markdown + "\n")


def write_outputs(outputs: Mapping[str, str], *, done: str = "") -> None:
    """``name=value`` for the steps and jobs that follow, where there are any.

    ``done`` is what has happened all the same when this fails. Raises StorageError.
    """
    _append("GITHUB_OUTPUT", "".join(f"{name}={_whole(value)}\n" for name, value in outputs.items()), done)


def write_environment(variables: Mapping[str, str]) -> None:
    """``NAME=value`` for the steps of this job that follow. Raises StorageError."""
    _append("GITHUB_ENV", "".join(f"{name}={_whole(value)}\n" for name, value in variables.items()))


def _whole(value: str) -> str:
    """On one line, since another line would be another variable, and nothing cut off: it is no text to be read."""
    return one_line(value, len(value) + 1)


def _append(variable: str, text: str, done: str = "") -> None:
    path = os.environ.get(variable)
    if not path:
        return
    try:
        # File names within a report may be no Unicode; the report is.
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        first = f"{done}, but " if done else ""
        raise StorageError(f"{first}{variable} ({path}) cannot be written: {error.strerror}") from error
