"""What a start command fetches from the network, found in its text (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PATTERNS = (
    (
        "pip install",
        r"\b(?:pip[0-9.]*|uv\s+pip|python[0-9.]*\s+-m\s+pip)\s+(?:-[^\s]+\s+)*(?:install|download|wheel)\b",
    ),
    ("uv sync or run", r"\buv\s+(?:sync|run|tool\s+install|add)\b"),
    ("conda install", r"\b(?:conda|mamba|micromamba)\s+(?:install|create|env\s+(?:create|update))\b"),
    ("pipx or poetry install", r"\b(?:pipx|poetry|pdm)\s+install\b"),
    ("apt install", r"\b(?:apt|apt-get|aptitude)\s+(?:-[^\s]+\s+)*(?:install|update|upgrade)\b"),
    ("apk add", r"\bapk\s+(?:-[^\s]+\s+)*add\b"),
    ("yum or dnf install", r"\b(?:yum|dnf|microdnf)\s+(?:-[^\s]+\s+)*install\b"),
    ("npm install", r"\b(?:npm|pnpm|yarn)\s+(?:install|ci|add)\b"),
    ("cargo install", r"\bcargo\s+install\b"),
    ("a download piped into a shell", r"\b(?:curl|wget)\b[^\n;&|]*\|\s*(?:sudo\s+)?(?:ba|da|z)?sh\b"),
    ("git clone", r"\bgit\s+(?:clone|pull|fetch)\b"),
    ("a model download", r"\b(?:huggingface-cli|hf)\s+download\b|\bsnapshot_download\s*\("),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _PATTERNS)
_OFFLINE = re.compile(r"--no-index\b|--offline\b")
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)


def fetches(text: str, *, no_index: bool = False) -> Iterator[tuple[str, int]]:
    """What ``text`` (a command line or a shell script) fetches at start, and the line in it, from 0.

    An install with ``--no-index`` or ``--offline`` in the same command takes nothing from the network; so does pip
    where ``no_index`` says that ``PIP_NO_INDEX`` is set.
    """
    bare = _COMMENT.sub("", text).replace("\\\n", " \n")
    for name, pattern in _COMPILED:
        for match in pattern.finditer(bare):
            command = re.split(r"[;&|]|\n(?<! \n)", bare[match.start() :], maxsplit=1)[0]
            if _OFFLINE.search(command) or (no_index and name == "pip install"):
                continue
            yield name, bare.count("\n", 0, match.start())
            break
