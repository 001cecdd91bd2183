"""What can go wrong, as one tree.

::

    BuildkitError                    exit code 1
    ├── UsageError                   exit code 2: the command line or a configuration file is wrong
    │   └── RecipeError              a recipe.yaml, with dotted path and line
    ├── MissingComponentError        exit code 3: a program, engine or GPU is needed and not there
    ├── StorageError                 the local disk: full, unwritable
    ├── EngineError                  the container engine refused or failed
    ├── ImageError                   an image, archive or layout is not what it claims to be
    │   ├── FormatError              bytes that do not parse, with file and offset
    │   ├── DigestMismatchError      content and digest (or diff_id) differ
    │   └── NotFoundError            no such image, tag, layer or file
    ├── RegistryError                a registry, or what stands before it, answered or did not
    │   ├── AuthError                401 or 403 that a fresh token does not cure
    │   ├── SizeRefusedError         a body is above a limit that no chunk size can cure
    │   ├── UnreachableError         nothing (usable) answers there
    │   └── ProtocolError            an answer that the protocol does not allow
    ├── CheckFailedError             a check, verification or smoke test says no
    └── CancelledError               exit code 130: the user asked to stop (Ctrl-C)

Every message is one line that names the thing; ``hint`` is the way out, also one line. A failed *check* inside a
report is a value, not an exception: ``CheckFailedError`` only carries the verdict out of a task.
"""

from __future__ import annotations

from collections.abc import Sequence


class BuildkitError(Exception):
    """Base of everything that this package raises on purpose.

    ``message`` and ``hint`` hold no secret and no line break, whatever a server sent.
    """

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = one_line(message)
        self.hint = one_line(hint) if hint else None
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(BuildkitError):
    """The command line, an environment variable or a configuration file is wrong."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that cannot be used; the message carries ``file:line: dotted.path: what``.

    ``problems`` has all of them, one line each, where there are several; the message holds as many as fit.
    """

    def __init__(self, message: str, *, hint: str | None = None, problems: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(one_line(problem) for problem in problems) or (self.message,)


class MissingComponentError(BuildkitError):
    """Something that must be installed, started or plugged in; ``hint`` says how to get it."""

    exit_code = 3


class StorageError(BuildkitError):
    """The local disk refused: full, read-only, not ours."""


class EngineError(BuildkitError):
    """The container engine answered with an error, or its answer makes no sense."""


class ImageError(BuildkitError):
    """An image, archive or layout is not what it claims to be."""


class FormatError(ImageError):
    """Bytes that do not parse. ``where`` names the file (or stream), ``offset`` the byte in it, where known."""

    def __init__(
        self, message: str, *, where: str | None = None, offset: int | None = None, hint: str | None = None
    ) -> None:
        place = where or ""
        if offset is not None:
            place = f"{place} at byte {offset}" if place else f"byte {offset}"
        super().__init__(f"{place}: {message}" if place else message, hint=hint)
        self.where = where
        self.offset = offset


class DigestMismatchError(ImageError):
    """Content whose digest is not the one that names it."""


class NotFoundError(ImageError):
    """No such image, tag, layer, blob or file."""


class RegistryError(BuildkitError):
    """A registry (or the edge before it) refused or failed. ``status`` is its HTTP status where one came."""

    def __init__(self, message: str, *, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class AuthError(RegistryError):
    """Wrong or missing credentials, or a credential without the needed scope."""


class SizeRefusedError(RegistryError):
    """A request body is too large for the way there, and smaller chunks do not help."""


class UnreachableError(RegistryError):
    """Connection, TLS or name resolution failed, or retries are used up."""


class ProtocolError(RegistryError):
    """An answer that the distribution specification does not allow and that we cannot work with."""


class CheckFailedError(BuildkitError):
    """A check, verification or smoke test ended with a negative verdict; the report has the findings."""


class CancelledError(BuildkitError):
    """The user asked to stop; ``hint`` says how to go on. Exit code as shells report SIGINT."""

    exit_code = 130


def one_line(text: str, limit: int = 500) -> str:
    """``text`` on one line without control characters, cut to ``limit`` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
