"""What a workflow must heed to run unchanged on Gitea and on GitHub, and to keep its secrets. Pure.

Each rule is a function over the parsed file that yields findings; ``RULES`` names them all. What generic linters know
(the schema, types of expressions, shell scripts) is theirs; here is what the two forges do differently, and our own
conventions. Where a rule is about Gitea, it holds for versions up to 1.27.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import yaml

from buildkit.errors import one_line
from buildkit.workflows import tree
from buildkit.workflows.tree import BrokenWorkflow, Job, Text, expressions, get, items, scalars, text_of, texts

Found = Iterator[tuple[int, str, str]]
"""Line, what is wrong, what to do."""

LONGEST_JOB = 180
"""Minutes. Gitea's runner ends a job after three hours, without a word."""
ALLOWED: Mapping[str, frozenset[str]] = {
    "contents": frozenset({"read", "none"}),
    "packages": frozenset({"read", "write", "none"}),
}
"""Permissions that building an image can need; ``write`` only on a job."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HARMLESS = re.compile(
    r"\s*(?:github\.(?:sha|run_id|run_number|run_attempt|job|event_name|repository_id)|runner\.(?:os|arch)"
    r"|strategy\.[a-z-]+|job\.status|(?:always|success|failure|cancelled)\(\))\s*"
)
_MOUNT = re.compile(
    r"\bdocker\s+(?:container\s+)?(?:run|create)\b[^\n;|&]*?"
    r"(?:\s-v[\s=]*|\s--volume[\s=]+|\s--mount[\s=]+\S*?(?:source|src)=)[\"']?"
    r"(?:\$\(pwd\)|`pwd`|\$\{?PWD\b|\$\{?GITHUB_WORKSPACE\b|\$\{\{\s*github\.workspace\b|\.{1,2}/|\.:)"
)
_SECRET = re.compile(r"\bsecrets\b|\bgithub\.token\b")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """One place where a rule is broken; ``line`` counts from 1, ``remedy`` is the way out."""

    path: str
    line: int
    rule: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return one_line(f"{self.path}:{self.line}: {self.rule}: {self.message} ({self.remedy})", 1000)

    def to_json(self) -> dict[str, str | int]:
        return {
            "path": self.path,
            "line": self.line,
            "rule": self.rule,
            "message": self.message,
            "remedy": self.remedy,
        }


def lint(text: bytes, path: str) -> tuple[Finding, ...]:
    """All findings in one workflow, in the order of their lines. ``path`` is what they call it."""
    try:
        top = tree.parse(text)
    except BrokenWorkflow as error:
        return (Finding(path=path, line=error.line, rule="yaml", message=error.text, remedy="correct the file"),)
    return _apply(top, path, RULES)


def lint_foreign(text: bytes, path: str, forge: str) -> tuple[Finding, ...]:
    """Findings in a workflow that is not ours, in the folder of ``forge`` (gitea or github).

    It runs beside ours with the same secrets, so what gives them away is found, and what does not work where it is
    read. Conventions, and the forge that it is not meant for, are its owner's business.
    """
    try:
        top = tree.parse(text)
    except BrokenWorkflow as error:
        return (Finding(path=path, line=error.line, rule="yaml", message=error.text, remedy="correct the file"),)
    names = SAFETY | ONLY[forge]
    return _apply(top, path, {name: rule for name, rule in RULES.items() if name in names})


def _apply(
    top: yaml.MappingNode, path: str, rules: Mapping[str, Callable[[yaml.MappingNode], Found]]
) -> tuple[Finding, ...]:
    found = {
        Finding(path=path, line=line, rule=name, message=message, remedy=remedy)
        for name, rule in rules.items()
        for line, message, remedy in rule(top)
    }
    return tuple(sorted(found, key=lambda finding: (finding.line, finding.rule, finding.message)))


# What starts a run ---------------------------------------------------------------------------------------------------


def _branches(top: yaml.MappingNode) -> Found:
    """A push trigger without ``branches`` runs for every branch and tag; path filters are applied to tags, too."""
    for name, node, line in _triggers(top):
        if name != "push":
            continue
        if get(node, "branches") is None:
            yield line, "push names no branches, so every branch and tag starts it", "add branches: [main]"
        elif get(node, "branches-ignore") is not None:
            yield line, "push has branches and branches-ignore", "keep branches"


def _trusted_trigger(top: yaml.MappingNode) -> Found:
    for name, _, line in _triggers(top):
        if name in ("pull_request_target", "workflow_run"):
            yield line, f"{name} runs with this repository's secrets on others' commits", "use push or pull_request"


def _triggers(top: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node | None, int]]:
    node = get(top, "on")
    if isinstance(node, yaml.MappingNode):
        for key, value in items(node):
            yield key.value, value, key.line
    else:
        for text in texts(node):
            yield text.value, None, text.line


# What differs between the forges -------------------------------------------------------------------------------------


def _forge_expressions(top: yaml.MappingNode) -> Found:
    for _, expression in _all_expressions(top):
        match = re.search(r"(?<![\w.-])(gitea|forgejo)\s*[.\[]", expression.code)
        if match:
            yield expression.line, f"{match[1]}.* is known to one forge only", "write github.*, which both know"


def _hash_files(top: yaml.MappingNode) -> Found:
    for _, expression in _all_expressions(top):
        if re.search(r"\bhashFiles\s*\(", expression.code, re.IGNORECASE):
            yield expression.line, "hashFiles is empty in some versions of Gitea", "compute it in code"


def _absolute_action(top: yaml.MappingNode) -> Found:
    for uses in _uses(top):
        if re.match(r"https?://", uses.value):
            yield uses.line, f"uses: {uses.value} is accepted by Gitea only", "OWNER/REPOSITORY@COMMIT"


def _artifacts(top: yaml.MappingNode) -> Found:
    for uses in _uses(top):
        match = re.search(r"\b(upload|download)-artifact(?:/[\w-]+)?@", uses.value)
        if match:
            yield (
                uses.line,
                f"{match[1]}-artifact: Gitea refuses v4, and GitHub has switched v3 off",
                "attach it to the image (buildkit pipeline does), or write it to the step summary",
            )


def _runner_group(top: yaml.MappingNode) -> Found:
    for job in tree.jobs(top):
        node = get(job.node, "runs-on")
        if isinstance(node, yaml.MappingNode):
            yield tree.line_of(node), f"job {job.id}: Gitea knows no runs-on with group", "a label, or a list of them"


def _environment(top: yaml.MappingNode) -> Found:
    for job, key, _ in _job_keys(top, "environment"):
        yield key.line, f"job {job.id}: Gitea ignores environment, and its protection with it", "leave it out"


def _continue_on_error(top: yaml.MappingNode) -> Found:
    for job, key, _ in _job_keys(top, "continue-on-error"):
        yield key.line, f"job {job.id}: continue-on-error is ignored by Gitea, and hides failures", "leave it out"


def _cache_gha(top: yaml.MappingNode) -> Found:
    for _, text in scalars(top):
        match = re.search(r"\btype\s*=\s*gha\b", text.value)
        if match:
            yield text.line_at(match.start()), "a cache of type gha is fragile on Gitea", "type=local or type=registry"


def _reserved_names(top: yaml.MappingNode) -> Found:
    for _, expression in _all_expressions(top):
        for match in re.finditer(r"\b(secrets|vars)\.((?:GITHUB|GITEA)_\w+)", expression.code, re.IGNORECASE):
            if (match[1], match[2].upper()) != ("secrets", "GITHUB_TOKEN"):
                yield (
                    expression.line,
                    f"{match[2]}: the forges keep names that begin with GITHUB_ and GITEA_ for themselves",
                    "choose another name",
                )


def _dispatch_inputs(top: yaml.MappingNode) -> Found:
    """Booleans of a manual run arrive as true, "true", "" or false: no expression can compare them."""
    for path, text in scalars(top):
        if path and path[-1] == "if":
            for expression in expressions(text, bare=True):
                if re.search(r"(?<![\w.])(?:github\.event\.)?inputs\b", expression.code):
                    yield (
                        expression.line,
                        "if compares an input, whose form differs",
                        "pass it by env:, parse it in code",
                    )


def _workspace_mount(top: yaml.MappingNode) -> Found:
    """A job that has the host's engine by its socket names the host's paths in ``-v``: the folder there is empty."""
    for run in _runs(top):
        for match in _MOUNT.finditer(run.value.replace("\\\n", "  ")):  # as long as before: offsets stay true
            yield (
                run.line_at(match.start()),
                "docker run mounts the work tree, which the engine's host does not have",
                "send files by standard input, docker cp or a build",
            )
    for job in tree.jobs(top):
        for where in ("container", "services"):
            for path, text in scalars(get(job.node, where)):
                if "volumes" in path and re.search(r"github\.workspace|GITHUB_WORKSPACE|^\.{0,2}/?:|^\./", text.value):
                    yield (
                        text.line,
                        f"{where} mounts the work tree, which the engine's host does not have",
                        "leave it out",
                    )


# Secrets and trust ---------------------------------------------------------------------------------------------------


def _secret_in_run(top: yaml.MappingNode) -> Found:
    """A secret that is pasted into a script shows in logs of the command line, and a quote in it ends the string."""
    for run in _runs(top):
        for expression in expressions(run):
            if _SECRET.search(expression.code):
                yield expression.line, "a secret is pasted into the script", "pass it by the step's env:"


def _secret_scope(top: yaml.MappingNode) -> Found:
    """Secrets go to the steps that need them: by a step's ``env``, or by ``with`` of an action."""
    for path, text in scalars(top):
        if path and path[-1] == "run":
            continue
        for expression in expressions(text, bare=bool(path) and path[-1] == "if"):
            if _gives_secret(expression.code) and not _may_hold_secret(path):
                yield (
                    expression.line,
                    "a secret outside of one step's env:",
                    "pass it by env: to the steps that need it",
                )
    for job in tree.jobs(top):
        inherit = text_of(get(job.node, "secrets"))
        if inherit is not None and inherit.value == "inherit":
            yield inherit.line, f"job {job.id} passes all secrets on", "name those that it needs"


def _gives_secret(code: str) -> bool:
    """Does the expression's value hold a secret? Comparisons only tell whether there is one."""
    compared = re.sub(r"\bsecrets\.\w+\s*[!=]=\s*''", "", code)
    return bool(_SECRET.search(compared))


def _may_hold_secret(path: tuple[str, ...]) -> bool:
    """A step's ``env`` and ``with``, the login of a container, and what a called workflow is given by name."""
    if path[:1] != ("jobs",):
        return False
    in_step = path[2:3] == ("steps",) and bool({"env", "with"} & set(path[3:4]))
    return in_step or "credentials" in path[2:] or path[2:3] == ("secrets",)


def _all_secrets(top: yaml.MappingNode) -> Found:
    for _, expression in _all_expressions(top):
        if re.search(r"\bsecrets\b(?!\s*\.\s*\w)", expression.code):
            yield expression.line, "the expression holds all secrets at once", "name the one that is needed"


def _injection(top: yaml.MappingNode) -> Found:
    """What others write (a branch's name, a title, an input) must not become part of a script."""
    for run in (*_runs(top), *_scripts(top)):
        for expression in expressions(run):
            if not _HARMLESS.fullmatch(expression.code) and not _SECRET.search(expression.code):
                yield (
                    expression.line,
                    f"${{{{ {expression.code.strip()} }}}} becomes part of the script",
                    'pass it by env: and write "$NAME"',
                )


def _unpinned_action(top: yaml.MappingNode) -> Found:
    for uses in _uses(top):
        if uses.value.startswith("./") or re.match(r"https?://", uses.value):
            continue
        if uses.value.startswith("docker://"):
            if not re.search(r"@sha256:[0-9a-f]{64}$", uses.value):
                yield uses.line, f"{uses.value} can change", "pin it by @sha256:…"
        elif not _COMMIT.fullmatch(uses.value.rpartition("@")[2]):
            yield uses.line, f"{uses.value} can change", "pin it by its full commit, with the version as a comment"


def _permissions(top: yaml.MappingNode) -> Found:
    """Least: the workflow reads, and a job that pushes writes packages."""
    node = get(top, "permissions")
    if node is None:
        yield 1, "no permissions are named, so the token gets the repository's default", "permissions: {contents: read}"
    else:
        yield from _granted(node, "the workflow", writes=False)
    for job, _, value in _job_keys(top, "permissions"):
        yield from _granted(value, f"job {job.id}", writes=True)


def _granted(node: yaml.Node, who: str, *, writes: bool) -> Found:
    if isinstance(node, yaml.ScalarNode):
        yield tree.line_of(node), f"{who} asks for {node.value or 'nothing by name'}", "name each permission"
    for key, value in items(node):
        text = text_of(value)
        granted = text.value if text else ""
        if granted not in ALLOWED.get(key.value, frozenset({"read", "none"})):
            yield key.line, f"{who} asks for {key.value}: {granted}", "building an image does not need it"
        elif granted == "write" and not writes:
            yield key.line, f"{who} asks for {key.value}: write", "ask for it in the jobs that push"


# Conventions ---------------------------------------------------------------------------------------------------------


def _names(top: yaml.MappingNode) -> Found:
    """A step without a name is called by its script in logs and reports."""
    for job in tree.jobs(top):
        for step in job.steps:
            name = step.text("name")
            if name is None or not name.value.strip():
                yield step.line, f"a step of job {job.id} has no name", "name it"


def _timeouts(top: yaml.MappingNode) -> Found:
    for job in tree.jobs(top):
        if get(job.node, "uses") is not None:
            continue
        limit = text_of(get(job.node, "timeout-minutes"))
        if limit is None:
            yield job.line, f"job {job.id} has no timeout-minutes", f"set one, at most {LONGEST_JOB}"
        elif not limit.value.isdigit() or not 0 < int(limit.value) <= LONGEST_JOB:
            yield limit.line, f"job {job.id}: timeout-minutes {limit.value}", f"a number, at most {LONGEST_JOB}"


def _shell(top: yaml.MappingNode) -> Found:
    """The shell that runs where none is named goes on after a failure within a pipe; ``bash`` has pipefail."""
    default = text_of(get(top, "defaults", "run", "shell"))
    for job in tree.jobs(top):
        own = text_of(get(job.node, "defaults", "run", "shell")) or default
        for step in job.steps:
            run, shell = step.text("run"), step.text("shell") or own
            if run is not None and (shell is None or shell.value.split()[:1] != ["bash"]):
                yield run.line, f"a step of job {job.id} runs in {shell.value if shell else 'any shell'}", "shell: bash"


def _repeated(top: yaml.MappingNode) -> Found:
    for key in tree.repeated_keys(top):
        yield key.line, f"{key.value} stands there twice", "keep one"


RULES: Mapping[str, Callable[[yaml.MappingNode], Found]] = {
    "branches": _branches,
    "trusted-trigger": _trusted_trigger,
    "forge-expression": _forge_expressions,
    "hash-files": _hash_files,
    "absolute-action": _absolute_action,
    "artifact": _artifacts,
    "runner-group": _runner_group,
    "environment": _environment,
    "continue-on-error": _continue_on_error,
    "cache-gha": _cache_gha,
    "reserved-name": _reserved_names,
    "dispatch-input": _dispatch_inputs,
    "workspace-mount": _workspace_mount,
    "secret-in-run": _secret_in_run,
    "secret-scope": _secret_scope,
    "all-secrets": _all_secrets,
    "injection": _injection,
    "unpinned-action": _unpinned_action,
    "permissions": _permissions,
    "step-name": _names,
    "timeout": _timeouts,
    "shell": _shell,
    "repeated-key": _repeated,
}

SAFETY = frozenset({"trusted-trigger", "secret-in-run", "all-secrets", "injection", "repeated-key"})
"""Rules for whatever runs with the repository's secrets, whoever wrote it."""
ONLY: Mapping[str, frozenset[str]] = {
    "gitea": frozenset(
        {"hash-files", "artifact", "runner-group", "environment", "continue-on-error", "cache-gha", "reserved-name"}
    ),
    "github": frozenset({"forge-expression", "absolute-action", "reserved-name"}),
}
"""Rules about what a forge refuses or ignores."""


# What rules walk over ------------------------------------------------------------------------------------------------


def _all_expressions(top: yaml.MappingNode) -> Iterator[tuple[tuple[str, ...], tree.Expression]]:
    for path, text in scalars(top):
        for expression in expressions(text, bare=bool(path) and path[-1] == "if"):
            yield path, expression


def _uses(top: yaml.MappingNode) -> Iterator[Text]:
    for job in tree.jobs(top):
        for node in (job.node, *(step.node for step in job.steps)):
            uses = text_of(get(node, "uses"))
            if uses is not None:
                yield uses


def _runs(top: yaml.MappingNode) -> Iterator[Text]:
    for job in tree.jobs(top):
        for step in job.steps:
            run = step.text("run")
            if run is not None:
                yield run


def _scripts(top: yaml.MappingNode) -> Iterator[Text]:
    """Scripts in JavaScript: what actions/github-script is given."""
    for job in tree.jobs(top):
        for step in job.steps:
            script = text_of(get(step.node, "with", "script"))
            if script is not None:
                yield script


def _job_keys(top: yaml.MappingNode, name: str) -> Iterator[tuple[Job, Text, yaml.Node]]:
    for job in tree.jobs(top):
        for key, value in items(job.node):
            if key.value == name:
                yield job, key, value
