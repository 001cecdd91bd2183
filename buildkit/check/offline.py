"""Does the start need a network? Read from the configured command and the scripts that it leads to. Pure.

A reader of text, not a shell: it sees what is written, not what is decided while running. What it reports is a line of
a script and what that line would fetch; ``check --run`` proves the rest.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from buildkit.check.tree import Tree

Level = Literal["violation", "warning", "note"]
MAX_SCRIPTS = 100
_MAX_LINE = 1000
"""Characters of a line that are looked at, and four times as many of one that goes on with backslashes."""
_MAX_FINDINGS = 200
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELLS = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh"))
_WRAPPERS = frozenset(("exec", "env", "tini", "dumb-init", "gosu", "su-exec", "nice", "time", "sudo", "--", "nohup"))
_ON = frozenset(("1", "true", "yes", "on"))

_PIP = r"(?:pip3?(?:\.\d+)?|python[\d.]*\s+-m\s*pip|uv\s+pip)"


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    pattern: re.Pattern[str]
    level: Level
    kind: Literal["pip", "hub", "url", "other"] = "other"


_RULES = (
    _Rule(
        "installs Python packages",
        re.compile(rf"\b{_PIP}\s+(?:\S+\s+)*?(?:install|download|wheel)\b"),
        "violation",
        "pip",
    ),
    _Rule(
        "installs Python packages",
        re.compile(r"""["']pip3?["']\s*,\s*["'](?:install|download)["']|\bpip\.main\(|\bensurepip\b"""),
        "violation",
        "pip",
    ),
    _Rule(
        "installs Python packages",
        re.compile(
            r"\b(?:uv\s+(?:sync|run|add|tool)|uvx|pipx\s+(?:run|install)|poetry\s+install|pipenv\s+(?:install|sync)|pdm\s+(?:install|sync))\b"
        ),
        "violation",
        "pip",
    ),
    _Rule(
        "installs packages",
        re.compile(r"\b(?:conda|mamba|micromamba)\s+(?:install|create|update|env\s+(?:create|update))\b"),
        "violation",
    ),
    _Rule(
        "runs a script from the network",
        re.compile(
            r"\b(?:curl|wget)\b[^|;&]*\|\s*(?:sudo\s+)?(?:\S*/)?(?:ba|da|z)?sh\b|\b(?:ba|z)?sh\s+(?:-c\s+)?[\"']?(?:<\(|\$\()\s*(?:curl|wget)\b|\b(?:curl|wget)\b[^|;&]*\|\s*(?:sudo\s+)?python[\d.]*\b"
        ),
        "violation",
        "url",
    ),
    _Rule(
        "installs system packages",
        re.compile(
            r"\b(?:apt-get|apt|aptitude|yum|dnf|microdnf|zypper)\s+(?:-\S+\s+)*(?:install|update|upgrade|dist-upgrade|reinstall)\b|\bapk\s+(?:-\S+\s+)*(?:add|update|upgrade)\b|\bpacman\s+-S"
        ),
        "violation",
    ),
    _Rule(
        "installs packages",
        re.compile(
            r"\b(?:npm\s+(?:install|ci|i)|npx|yarn\s+(?:install|add)|pnpm\s+(?:install|add|i|dlx)|cargo\s+(?:install|build|run|fetch)|go\s+(?:install|get)|gem\s+install|bundle\s+install|luarocks\s+install)\b"
        ),
        "violation",
    ),
    _Rule(
        "fetches a repository",
        re.compile(r"\bgit\s+(?:-\S+\s+)*(?:clone|pull|fetch|submodule\s+update)\b|\bgit\s+lfs\s+(?:pull|fetch)\b"),
        "violation",
        "url",
    ),
    _Rule(
        "downloads a model",
        re.compile(
            r"\b(?:huggingface-cli|hf)\s+download\b|\b(?:snapshot_download|hf_hub_download|cached_download)\s*\("
        ),
        "violation",
        "hub",
    ),
    _Rule(
        "downloads a model",
        re.compile(
            r"""\b(?:from_pretrained|load_dataset|SentenceTransformer|pipeline)\s*\([^)]*["'](?![./])[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*["']"""
        ),
        "violation",
        "hub",
    ),
    _Rule(
        "downloads a model",
        re.compile(
            r"(?:^|(?<=[\s\"]))(?:--model(?:-path|-id|-name)?|--tokenizer|--w|--m|vllm\s+serve)(?:[= ]|[\"'],\s*[\"'])"
            r"(?![./$-])[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?=[\s\"',;]|$)"
        ),
        "violation",
        "hub",
    ),
    _Rule(
        "downloads a model",
        re.compile(
            r"\b(?:ollama\s+pull|torch\.hub\.load\w*\s*\(|nltk\.download\s*\(|spacy\s+download|gdown\b|modelscope\s+download|aria2c\b)"
        ),
        "violation",
    ),
    _Rule(
        "copies from object storage",
        re.compile(
            r"\b(?:aws\s+s3\s+(?:cp|sync)|gsutil\s+(?:-\S+\s+)*(?:cp|rsync)|gcloud\s+storage\s+cp|azcopy\s+copy|rclone\s+(?:copy|sync)|mc\s+(?:cp|mirror)|s3cmd\s+(?:get|sync))\b"
        ),
        "violation",
    ),
    _Rule(
        "downloads",
        re.compile(r"\b(?:curl|wget|urlretrieve\s*\(|urlopen\s*\(|requests\.get\s*\(|httpx\.get\s*\()"),
        "violation",
        "url",
    ),
)
_URL = re.compile(r"""\b(?:https?|ftp|git|ssh)://[^\s"'<>|;&)]+""")
_LOCAL_HOSTS = ("localhost", "127.", "0.0.0.0", "[::1]", "::1", "unix")  # noqa: S104 - compared with, not bound to
_LOCAL_PIP = re.compile(r"--no-index\b|--offline\b")
_PIP_LOCAL_TARGET = re.compile(r"\binstall\s+(?:(?:-[-\w]+|--no-deps)\s+)*(?:\.|/[^\s;&|]+\.whl)(?:\s|$)")

_NOTED = (
    "PIP_NO_INDEX",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "UV_OFFLINE",
    "UV_INDEX_URL",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "HF_HOME",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFinding:
    """A line of a script (or of the command: line 0) that reaches for the network."""

    level: Level
    path: str
    line: int
    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A line of a requirements file that what is installed does not satisfy; ``installed`` None: not there at all."""

    path: str
    name: str
    wanted: str
    installed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAnalysis:
    """What the start reads and reaches for. ``environment`` are the settings that matter here, without secrets."""

    command: tuple[str, ...]
    scripts: tuple[str, ...]
    findings: tuple[StartFinding, ...]
    environment: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    unread: tuple[str, ...] = ()
    """Programs that the command names and that are not scripts that could be read: binaries, or not there."""


def analyse(runtime: Mapping[str, Any], tree: Tree) -> StartAnalysis:
    """The start of an image by its config's ``config`` object (OCI image-spec, config.md: Entrypoint, Cmd, Env)."""
    command = (*_strings(runtime.get("Entrypoint")), *_strings(runtime.get("Cmd")))
    environment = parse_environment(runtime.get("Env"))
    folder = runtime.get("WorkingDir")
    reader = _Reader(tree, environment, folder if isinstance(folder, str) and folder else "/")
    reader.command(command)
    return StartAnalysis(
        command=command,
        scripts=tuple(reader.scripts),
        findings=tuple(reader.findings),
        environment={key: _public(environment[key]) for key in _NOTED if key in environment},
        requirements=tuple(compare_requirements(tree)),
        unread=tuple(dict.fromkeys(reader.unread)),
    )


def parse_environment(value: object) -> dict[str, str]:
    """``["A=b"]`` to a mapping; what is no such list is empty."""
    pairs = (item.partition("=") for item in _strings(value))
    return {key: rest for key, equals, rest in pairs if equals}


def scan_text(text: str, environment: Mapping[str, str]) -> Iterator[tuple[int, Level, str, str]]:
    """Line number, level, what it does, and the line, for every line that reaches for the network."""
    for number, line in _lines(text):
        for rule in _RULES:
            match = rule.pattern.search(line)
            if match is None:
                continue
            level = _level(rule, line, environment)
            if level is not None:
                yield number, level, rule.name, line.strip()[:200]
            break


def compare_requirements(tree: Tree) -> Iterator[Requirement]:
    """Requirements files outside of packages, against the ``*.dist-info`` folders of the image.

    Names and exact pins (``==``) are compared; lines with markers, options, paths or URLs are left out.
    """
    installed = installed_packages(tree)
    for path in sorted(tree.files):
        name = posixpath.basename(path)
        text = tree.files[path].text
        if text is None or not (name.startswith("requirements") and name.endswith(".txt")):
            continue
        for _, line in _lines(text.decode("utf-8", "replace")):
            match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(==\s*[\w.!+-]+)?([^;@]*)$", line)
            if match is None:
                continue
            key = canonical(match[1])
            wanted = (match[2] or "").replace(" ", "")
            have = installed.get(key)
            if have is None:
                yield Requirement(path=path, name=key, wanted=wanted or match[3].strip(), installed=None)
            elif wanted and have.partition("+")[0] != wanted[2:].partition("+")[0]:
                yield Requirement(path=path, name=key, wanted=wanted, installed=have)


def installed_packages(tree: Tree) -> dict[str, str]:
    """Python packages by canonical name, from the paths of their metadata (PyPA, "Recording installed projects")."""
    found: dict[str, str] = {}
    for path in tree.paths:
        match = re.search(r"/([^/]+?)-([^/-]+)\.(?:dist-info|egg-info)(?:/METADATA|/PKG-INFO)?$", path)
        if match:
            found[canonical(match[1])] = match[2]
    return found


def canonical(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


class _Reader:
    """Follows a command through the scripts that it names."""

    def __init__(self, tree: Tree, environment: Mapping[str, str], folder: str) -> None:
        self._tree = tree
        self._environment = environment
        self._folder = folder
        self._search = environment.get("PATH", _DEFAULT_PATH).split(":")
        self.scripts: list[str] = []
        self.findings: list[StartFinding] = []
        self.unread: list[str] = []

    def command(self, command: tuple[str, ...]) -> None:
        if not command:
            return
        self._scan("command", " ".join(command), only_line=0)
        self._follow(list(command))

    def _follow(self, words: list[str]) -> None:
        """A command's words: find its program, and the script that an interpreter among them is given."""
        words = list(words)
        while words and (
            posixpath.basename(words[0]) in _WRAPPERS or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]) is not None
        ):
            words.pop(0)
            while words and words[0].startswith("-"):
                words.pop(0)
        if not words:
            return
        program = posixpath.basename(words[0])
        self._open(words[0], by_name=True)
        rest = words[1:]
        if program in _SHELLS:
            if "-c" in rest or any(re.fullmatch(r"-[a-z]*c", word) for word in rest):
                at = next(i for i, word in enumerate(rest) if re.fullmatch(r"-[a-z]*c", word))
                for inner in rest[at + 1 : at + 2]:
                    self._inside(inner)
                return
            rest = [word for word in rest if not word.startswith("-")][:1]
            for word in rest:
                self._open(word, by_name=False)
            return
        if re.fullmatch(r"python[\d.]*|pypy[\d.]*", program):
            if "-m" in rest[:-1]:
                self._module(rest[rest.index("-m") + 1])
                return
            for word in [word for word in rest if not word.startswith("-")][:1]:
                self._open(word, by_name=False)
            return
        # A wrapper with a command behind it: entrypoint.sh python app.py
        for index, word in enumerate(rest):
            if not word.startswith("-") and self._find(word, by_name=index == 0) is not None:
                self._follow(rest[index:])
                return

    def _inside(self, text: str) -> None:
        """Commands in a script's text that lead to other scripts."""
        for _, line in _lines(text):
            for part in re.split(r"[;&|]+|\b(?:then|else|do)\b|\$\(|`", line):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:
                    words = part.split()
                if words and words[0] in (".", "source"):
                    words = words[1:]
                    for word in words[:1]:
                        self._open(word, by_name=False)
                elif words and not words[0].startswith(("$", "#", "-")):
                    self._follow(words)

    def _module(self, name: str) -> None:
        inner = name.replace(".", "/")
        for path in self._tree.files:
            if path.endswith((f"/{inner}.py", f"/{inner}/__main__.py")):
                self._open(path, by_name=False)

    def _open(self, word: str, *, by_name: bool) -> None:
        path = self._find(word, by_name=by_name)
        if path is None or path in self.scripts or len(self.scripts) >= MAX_SCRIPTS:
            if path is None and by_name and "$" not in word and not self.scripts:
                self.unread.append(word)
            return
        text = self._tree.files[path].text if path in self._tree.files else None
        if text is None:
            if not self.scripts:
                self.unread.append(path)
            return
        self.scripts.append(path)
        decoded = text.decode("utf-8", "replace")
        self._scan(path, decoded)
        first = decoded.partition("\n")[0]
        if path.endswith(".py") or "python" in first:
            return
        self._inside(decoded)

    def _find(self, word: str, *, by_name: bool) -> str | None:
        if "/" in word:
            return self._tree.resolve(posixpath.join(self._folder, word))
        if by_name:
            for folder in self._search:
                found = self._tree.resolve(posixpath.join(folder, word))
                if found is not None:
                    return found
            return None
        return self._tree.resolve(posixpath.join(self._folder, word))

    def _scan(self, path: str, text: str, *, only_line: int | None = None) -> None:
        for number, level, what, line in scan_text(text, self._environment):
            if len(self.findings) < _MAX_FINDINGS:
                self.findings.append(
                    StartFinding(
                        level=level,
                        path=path,
                        line=number if only_line is None else only_line,
                        what=what,
                        text=_without_secrets(line),
                    )
                )


def _level(rule: _Rule, line: str, environment: Mapping[str, str]) -> Level | None:
    """How bad a match is: settings and addresses may make it harmless. None: it needs no network at all."""
    if rule.kind == "pip":
        if _LOCAL_PIP.search(line) or _on(environment, "PIP_NO_INDEX") or _PIP_LOCAL_TARGET.search(line):
            return "note"
        return rule.level
    if rule.kind == "hub":
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if any(_on(environment, key) for key in offline) or "local_files_only=True" in line:
            return "note"
        return rule.level
    if rule.kind == "url":
        urls = _URL.findall(line)
        if urls:
            return None if all(_is_local(url) for url in urls) else rule.level
        if any(host in line for host in _LOCAL_HOSTS):
            return None
        # The address is in a variable, or the word is only mentioned.
        return "warning" if "$" in line or "(" in line else None
    return rule.level


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host.startswith(_LOCAL_HOSTS)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, continuations joined, comments and the words of ``echo`` left out."""
    joined = ""
    first = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw[:_MAX_LINE]
        first = first if joined else number
        if line.endswith("\\") and len(joined) < _MAX_LINE * 3:
            joined += line[:-1] + " "
            continue
        line = joined + line
        joined = ""
        line = re.sub(r"(?:^|(?<=\s))#.*$", "", line)
        line = re.sub(r"""\b(?:echo|printf|print|log\w*|warn|info|die)\b\s*\(?\s*(?:"[^"]*"|'[^']*')""", "", line)
        if line.strip():
            yield first, line
    if joined.strip():
        yield first, joined


def _on(environment: Mapping[str, str], key: str) -> bool:
    return environment.get(key, "").strip().lower() in _ON


def _public(value: str) -> str:
    """A setting's value without user and password."""
    return _without_secrets(value)


def _without_secrets(text: str) -> str:
    text = re.sub(r"://[^/\s@]+@", "://***@", text)
    return re.sub(r"(?i)\b([\w-]*(?:token|password|passwd|secret|api[_-]?key)[\w-]*\s*[=:]\s*)\S+", r"\1***", text)


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
