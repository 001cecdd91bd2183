"""``docs/cli.md``, made from the tasks themselves::

    python -m buildkit.tasks.reference > docs/cli.md

What a task's signature and help say is taken from there. What they cannot say is ``NOTES`` below: an example, what the
exit codes stand for, and which arguments cannot be left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from invoke.collection import Collection
from invoke.parser.argument import Argument
from invoke.tasks import Task

from buildkit.tasks import namespace

COMMON = ("json", "quiet", "debug")
"""Flags that ``cli.command`` gives to tasks: described once."""

COMMAND = "python -m buildkit.tasks.reference > docs/cli.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """``failed`` and ``missing`` say what exit codes 1 and 3 mean for this task; without the latter it never ends with
    3. ``needs`` are the arguments that have no default of use, in the order of the usage line."""

    example: str
    failed: str
    missing: str = ""
    needs: tuple[str, ...] = ()


NOTES: Mapping[str, Note] = {
    "doctor": Note(
        example="invoke doctor git.example.org/team/app --recipe candle-vllm --quick",
        failed="there is a problem: a build or a push would fail",
        missing="all that is wrong is that something is not installed or does not run",
    ),
    "pipeline": Note(
        example="invoke pipeline candle-vllm --to git.example.org/models/candle-vllm --report report",
        failed="a stage failed; the report is written all the same, and says which and why",
        missing="a stage was NOT RUN for want of a GPU (`--allow-missing-gpu` goes on), or of an engine or program",
    ),
    "build": Note(
        example="invoke build cuda-probe --tag test",
        failed="the build failed, ran out of time or of disk",
        missing="no engine or builder answers, or a program that the recipe needs (debootstrap) is not installed",
    ),
    "check": Note(
        example="invoke check app:1.2 --require sm_70 --runtime '<13'",
        failed="a requirement is not met, or the start's proof failed",
        missing="the image is the engine's, and no engine answers",
    ),
    "smoke": Note(
        example="invoke smoke candle-vllm --level kernel --report smoke.md",
        failed="a level failed, could not be judged (UNKNOWN), or the GPU cannot run the code (CANNOT RUN)",
        missing="it was NOT RUN for want of a GPU or an engine; `--allow-missing-gpu` makes that 0",
    ),
    "parity": Note(
        example="invoke parity --candidate http://new:8000 --reference http://old:8000 --cases cases.yaml",
        failed="an answer differs, or a service did not answer",
        needs=("candidate", "reference", "cases"),
    ),
    "split": Note(
        example="invoke split app:1.2 oci:small --limit 95MB --verify",
        failed="the image cannot be read, or `--verify` found a difference",
        missing="the image is the engine's, and no engine answers",
        needs=("image", "destination"),
    ),
    "push": Note(
        example="invoke push app:1.2 --to git.example.org/team/app:1.2 --chunked",
        failed="the push did not complete; no tag was moved, and the same command goes on from there",
        missing="the image is the engine's, and no engine answers; or a credential helper is not installed",
    ),
    "pull-check": Note(
        example="invoke pull-check git.example.org/team/app:1.2 --deep",
        failed="something is missing or has another size or digest",
        missing="a credential helper is not installed",
    ),
    "promote": Note(
        example="invoke promote git.example.org/team/app@sha256:DIGEST --tag sm70",
        failed="nothing shows which image is newer (`--force` moves the tag), or the registry refused; that a newer "
        "image keeps the tag is no failure",
        missing="a credential helper is not installed",
        needs=("reference", "tag"),
    ),
    "evidence": Note(
        example="invoke evidence git.example.org/team/app:sm70 --get sbom --out sbom.json",
        failed="nothing is attached, or the newest evidence says that the image failed",
        missing="a credential helper is not installed",
    ),
    "login": Note(
        example="invoke login git.example.org --username ci --password-stdin < token-file",
        failed="the registry refused the credential, or it cannot be stored",
        missing="a credential helper is not installed",
        needs=("registry", "username"),
    ),
    "logout": Note(
        example="invoke logout git.example.org",
        failed="the credential cannot be removed",
        missing="a credential helper is not installed",
        needs=("registry",),
    ),
    "wheelhouse": Note(
        example="invoke wheelhouse clef-serve --variant cuda",
        failed="a wheel is missing, is not the locked one, or does not meet the recipe",
        missing="pip is not installed for this Python",
    ),
    "deploy.check": Note(
        example="invoke deploy.check deploy --node-gpus 3 --evidence",
        failed="there are findings",
        missing="with `--evidence`: a credential helper is not installed",
    ),
    "deploy.plan": Note(
        example="invoke deploy.plan deploy --node-gpus 3",
        failed="the manifests cannot be read",
    ),
    "deploy.pin": Note(
        example="invoke deploy.pin candle-vllm --from git.example.org/models/candle-vllm:sm70",
        failed="there is no such image, or no evidence that passes is attached to it",
        missing="a credential helper is not installed",
        needs=("name", "from"),
    ),
    "stack.up": Note(
        example="invoke stack.up --install --edge-limit 50MB",
        failed="a part does not start",
        missing="a program is not installed and `--install` was not given, or that needs root",
    ),
    "stack.down": Note(example="invoke stack.down --purge", failed="a part does not end"),
    "workflows.install": Note(
        example="invoke workflows.install --for gitea",
        failed="a file cannot be written",
    ),
    "workflows.check": Note(
        example="invoke workflows.check --json",
        failed="there are findings",
    ),
    "workflows.new": Note(
        example="buildkit workflows.new hello --recipe hello --branch main",
        failed="a file cannot be written",
        needs=("name",),
    ),
    "workflows.settings": Note(
        example="RECIPE=hello GITHUB_REF=refs/heads/main buildkit workflows.settings",
        failed="the settings cannot be handed on",
    ),
    "workflows.summary": Note(
        example="buildkit workflows.summary git.example.org/team/hello@sha256:DIGEST",
        failed="the page cannot be written",
        missing="a credential helper is not installed",
        needs=("image",),
    ),
    "stack.status": Note(example="invoke stack.status --json", failed="a part does not answer, or there is no stack"),
}


INTRODUCTION = """\
# Command-line reference

<!-- Made by `{command}`; a test holds this page against the tasks. -->

`invoke TASK` in a checkout of this repository, `buildkit TASK` anywhere else: the same tasks. `invoke --list` lists
them, `invoke --help TASK` shows one. What is in brackets may be left out.

- An **argument without a flag** may be given as a flag, too: `invoke build cuda-probe` and
  `invoke build --name=cuda-probe` are the same. A word that is the name of a task is taken as a task:
  `invoke build check` builds and then checks.
- A **value** follows its flag after `=` or a blank. Sizes are written `95MB` or `64MiB`, durations `30s`, `90m`, `2h`.
- **Several tasks** on one line run one after the other, and the first that fails is the last.
- Where a task has `--dry-run`, invoke's own `--dry` means the same: `invoke --dry push`.

## Flags of every task

| flag | what it does |
| --- | --- |
| `--json` | print the report as JSON on standard output; a failure is `{{"ok": false, "error": …, "exit_code": …}}` |
| `--quiet` | print nothing but results and errors |
| `--debug` | show the traceback of an error and more of what happens (never a secret) |

Results go to standard output, progress and errors to standard error.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | done; where the task checks something: it passed |
| 1 | it failed, or the check says no |
| 2 | wrong usage: a flag, a recipe, a configuration file, an environment variable |
| 3 | a component is missing (an engine, a GPU, a program); the message says how to get it |
| 130 | interrupted (Ctrl-C, SIGTERM as a stopped job gets it, or SIGHUP); the same command can be run again |

What 1 and 3 mean for a task is said below; a task without a line for 3 never ends with it. An error is one line on
standard error: what is wrong, and in parentheses the way out.

## Environment

| variable | what it does |
| --- | --- |
{environment}

## Tasks

{index}
"""

ENVIRONMENT: Mapping[str, str] = {
    "REGISTRY_USERNAME": "user at the registry that is pushed to",
    "REGISTRY_TOKEN": "password or token there; goes to no other host",
    "BUILDKIT_REGISTRY": "host and owner that the recipes' targets begin with, like `git.example.org/models`",
    "BUILDKIT_IMAGES": "folder of the recipes (default: `images/` here or in a folder above)",
    "BUILDKIT_CACHE_DIR": "where compressed layers are kept (default: the user's cache folder)",
    "BUILDKIT_CACHE_LIMIT": "most bytes of them (default 20GB)",
    "BUILDKIT_STATE_DIR": "where the journal of uploads and learned limits are kept (default: the user's state folder)",
    "BUILDKIT_STACK": "folder of the local stack (default: in the user's state folder)",
    "BUILDKIT_STACK_AUTH": "`user:password` that a stack with `--auth` asks for",
    "DOCKER_HOST": "address of the container engine; so is the current Docker context (`DOCKER_CONTEXT`)",
    "DOCKER_CONFIG": "folder of Docker's configuration, with its credentials (default `~/.docker`)",
    "REQUESTS_CA_BUNDLE": "file with the CA certificates to trust, where `--ca-bundle` is not given",
    "NO_COLOR": "no colours",
    "GITHUB_OUTPUT": "set by Actions: `digest=` and `image=` are appended to this file",
    "GITHUB_STEP_SUMMARY": "set by Actions: reports are appended to this file",
}


class IncompleteError(Exception):
    """The page cannot be made; the message says what to add, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """A task as the page shows it: positional arguments first, then the flags in the order of the signature."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    note: Note


def documented(collection: Collection, notes: Mapping[str, Note]) -> tuple[Documented, ...]:
    """All tasks, in the order in which they are registered. Raises IncompleteError."""
    tasks = dict(_walk(collection))
    problems = [f"{name}: add a note to NOTES in {__file__}" for name in tasks if name not in notes]
    problems += [f"{name}: there is a note, and no such task" for name in notes if name not in tasks]
    out = []
    for name, task in tasks.items():
        arguments = tuple(task.get_arguments())
        problems += [f"{name}: {problem}" for argument in arguments for problem in _problems(argument)]
        if name in notes:
            problems += [
                f"{name}: it needs {need}, which is no argument"
                for need in notes[name].needs
                if need not in {_name(argument) for argument in arguments}
            ]
            summary = " ".join((task.__doc__ or "").split("\n\n")[0].split())
            out.append(Documented(name=name, summary=summary, arguments=arguments, note=notes[name]))
    if problems:
        raise IncompleteError("\n".join(problems))
    return tuple(out)


def page(tasks: tuple[Documented, ...]) -> str:
    """The whole page, as Markdown."""
    index = _table("task", "what it does", {f"[{task.name}](#{_anchor(task.name)})": task.summary for task in tasks})
    head = INTRODUCTION.format(
        command=COMMAND,
        index=index,
        environment="\n".join(f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()),
    )
    return "\n".join([head, *(_section(task) for task in tasks)])


def _section(task: Documented) -> str:
    rows = {_written(argument): _described(argument) for argument in task.arguments if _name(argument) not in COMMON}
    lines = [f"### {task.name}", "", task.summary, "", "```", _usage(task), task.note.example, "```", ""]
    if rows:
        lines += [_table("argument", "what it is", rows), ""]
    lacking = [f"`--{flag}`" for flag in COMMON if flag not in {_name(argument) for argument in task.arguments}]
    if lacking:
        lines += [f"It has no {' and no '.join(lacking)}.", ""]
    lines.append(f"- exit code 1: {task.note.failed}")
    if task.note.missing:
        lines.append(f"- exit code 3: {task.note.missing}")
    return "\n".join([*lines, ""])


def _usage(task: Documented) -> str:
    words = ["invoke", task.name]
    left = False
    for argument in task.arguments:
        name = _name(argument)
        value = name.upper()
        if argument.positional:
            words.append(value if name in task.note.needs else f"[{value}]")
        elif name in task.note.needs:
            words.append(f"--{name}={value}")
        else:
            left = True
    return " ".join([*words, "[FLAGS]"] if left else words)


def _name(argument: Argument) -> str:
    """As it is written after the dashes."""
    return argument.names[0]


def _written(argument: Argument) -> str:
    name = _name(argument)
    if argument.kind is bool:
        return f"`--{name}`, `--no-{name}`" if argument.default is True else f"`--{name}`"
    value = "N" if argument.kind is int else name.upper() if argument.positional else "VALUE"
    flag = f"`--{name}={value}`"
    if argument.kind is list:
        flag += " …"
    return f"`{value}`, {flag}" if argument.positional else flag


def _described(argument: Argument) -> str:
    text = _escaped(argument.help or "")
    default = _default(argument)
    return f"{text} (default `{default}`)" if default and "default" not in text else text


def _default(argument: Argument) -> str:
    """What is worth telling. An empty text or list, False, 0 and -1 stand for "not given"."""
    match argument.default:
        case bool() | None:
            return ""
        case int(number):
            return str(number) if number > 0 else ""
        case list(values):
            return ", ".join(str(value) for value in values)
        case value:
            return str(value)


def _problems(argument: Argument) -> Iterator[str]:
    if not argument.help:
        yield f"--{_name(argument)} has no help"
        return
    told = re.search(r"\(default:? ([^ )]+)\)", argument.help)
    default = _default(argument)
    if told and default and told[1] != default:
        yield f"--{_name(argument)}: its help says that the default is {told[1]}, and it is {default}"
    if argument.kind is list and "several times" not in argument.help and "again" not in argument.help:
        yield f"--{_name(argument)}: its help does not say that it may be given several times"


def _walk(collection: Collection, prefix: str = "") -> Iterator[tuple[str, Task[Any]]]:
    for name, task in collection.tasks.items():
        yield prefix + name, task
    for name, inner in collection.collections.items():
        yield from _walk(inner, f"{prefix}{name}.")


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    return "\n".join(
        [f"| {first} | {second} |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in rows.items())]
    )


def _escaped(text: str) -> str:
    """Help text in a cell of a table: nothing in it is markup, and flags look like code."""
    text = re.sub(r"([|<*\\])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", text)


def _anchor(heading: str) -> str:
    """As forges make it of a heading: lower case, without punctuation but dashes."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    try:
        print(page(documented(namespace, NOTES)), end="")
    except IncompleteError as error:
        sys.exit(f"the reference is not complete:\n{error}")
