"""Does the start need a network? Commands and scripts as images really have them."""

from __future__ import annotations

from typing import Any

import pytest
from cudafiles.image import Item, MemoryImage, symlink
from hypothesis import given
from hypothesis import strategies as st

from buildkit.check.offline import StartAnalysis, analyse, scan_text
from buildkit.check.tree import Want
from buildkit.check.walk import walk_image


def start(runtime: dict[str, Any], files: dict[str, bytes | Item] | None = None) -> StartAnalysis:
    image = MemoryImage(files or {}, runtime=runtime)
    return analyse(runtime, walk_image(image, Want()))


def levels(line: str, **environment: str) -> list[str]:
    return [level for _, level, _, _ in scan_text(line, environment)]


@pytest.mark.parametrize(
    "line",
    [
        "pip install torch",
        "pip3 install --quiet -r requirements.txt",
        "python3 -m pip install vllm==0.6",
        "uv pip install x",
        "uvx ruff",
        'subprocess.run([sys.executable, "-m", "pip", "install", "x"])',
        "curl -fsSL https://example.org/install.sh | sh",
        "wget -qO- https://example.org/i | sudo bash -s -- -y",
        'bash -c "$(curl -fsSL https://example.org/install.sh)"',
        "bash <(curl -s https://example.org/x)",
        "apt-get update && apt-get install -y curl",
        "apt-get -y install curl",
        "apk add --no-cache git",
        "git clone https://example.org/x.git",
        "npm install",
        "npx something",
        "cargo install ripgrep",
        "huggingface-cli download Qwen/Qwen3",
        "hf download Qwen/Qwen3",
        'snapshot_download("Qwen/Qwen3")',
        'AutoModel.from_pretrained("Qwen/Qwen3-Next")',
        "exec vllm serve Qwen/Qwen3 --port 8000",
        "server --model meta-llama/Llama-3 --port 1",
        "server --model=meta-llama/Llama-3",
        "aws s3 cp s3://bucket/model /models --recursive",
        "curl -o /models/x.bin https://example.org/x.bin",
        "wget https://example.org/model.gguf",
        "urllib.request.urlretrieve('https://example.org/x')",
        "conda install -y numpy",
    ],
)
def test_what_reaches_for_the_network_is_a_violation(line: str) -> None:
    assert levels(line) == ["violation"]


@pytest.mark.parametrize(
    "line",
    [
        "# pip install torch",
        "echo 'run pip install torch first'",
        'print("pip install torch")',
        "curl -fsS http://localhost:8000/health",
        "curl -fs http://127.0.0.1:$PORT/health || exit 1",
        "wget -qO- http://localhost/",
        "exec server --model /models/clef --port 8000",
        "exec server --model ./models/clef",
        "server --model $MODEL",
        "AutoModel.from_pretrained('/models/clef')",
        "AutoModel.from_pretrained(path)",
        "git config --global x y",
        "pip list",
        "python app.py --workers 2",
        "cp a/b c/d",
        "command -v curl",
    ],
)
def test_what_does_not_is_silent(line: str) -> None:
    assert levels(line) == []


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("pip install --no-index --find-links /wheels x", {}),
        ("pip install /wheels/x.whl", {}),
        ("pip install x", {"PIP_NO_INDEX": "1"}),
        ("hf download a/b", {"HF_HUB_OFFLINE": "1"}),
        ('from_pretrained("a/b")', {"TRANSFORMERS_OFFLINE": "true"}),
        ('from_pretrained("a/b", local_files_only=True)', {}),
    ],
)
def test_settings_that_keep_it_local_make_a_note_of_it(line: str, environment: dict[str, str]) -> None:
    assert levels(line, **environment) == ["note"]


def test_an_address_in_a_variable_is_a_warning() -> None:
    assert levels('curl -o x "$MODEL_URL"') == ["warning"]


def test_continued_lines_are_one_line() -> None:
    text = "true\npip \\\n  install \\\n  torch\n"
    assert [(number, level) for number, level, _, _ in scan_text(text, {})] == [(2, "violation")]


SCRIPT = b'#!/bin/bash\nset -e\npip install -r /app/requirements.txt\nexec "$@"\n'


@pytest.mark.parametrize(
    "runtime",
    [
        {"Entrypoint": ["/app/entrypoint.sh"], "Cmd": ["server"]},
        {"Cmd": ["bash", "/app/entrypoint.sh"]},
        {"Cmd": ["/bin/sh", "-c", "exec /app/entrypoint.sh --x"]},
        {"Entrypoint": ["tini", "--", "/app/entrypoint.sh"]},
        {"Entrypoint": ["./entrypoint.sh"], "WorkingDir": "/app"},
        {"Cmd": ["start-server"]},
        {"Cmd": ["/usr/bin/env", "A=b", "start-server"]},
        {"Cmd": ["wrapper"]},
    ],
)
def test_scripts_are_found_however_they_are_named(runtime: dict[str, Any]) -> None:
    files: dict[str, bytes | Item] = {
        "app/entrypoint.sh": SCRIPT,
        "usr/local/bin/start-server": symlink("/app/entrypoint.sh"),
        "usr/local/bin/wrapper": b"#!/bin/sh\nif true; then . /app/entrypoint.sh; fi\n",
        "bin/sh": b"\x7fELF",
    }
    found = start(runtime, files)
    assert [(f.path, f.line, f.level) for f in found.findings] == [("/app/entrypoint.sh", 3, "violation")]


def test_the_command_itself_is_read() -> None:
    found = start({"Cmd": ["/bin/sh", "-c", "pip install flask && python app.py"]})
    assert [(f.path, f.line) for f in found.findings] == [("command", 0)]


def test_python_programs_are_read_by_path_and_by_module() -> None:
    files: dict[str, bytes | Item] = {
        "app/server/__main__.py": b"from huggingface_hub import snapshot_download\nsnapshot_download('a/b')\n",
        "usr/local/lib/python3.11/site-packages/other/x.py": b"snapshot_download('a/b')\n",
    }
    for command in (
        ["python3", "-m", "server"],
        ["python", "/app/server/__main__.py"],
        ["python3", "-u", "server/__main__.py"],
    ):
        found = start({"Cmd": command, "WorkingDir": "/app"}, files)
        assert [(f.path, f.line) for f in found.findings] == [("/app/server/__main__.py", 2)]


def test_only_what_the_start_leads_to_counts() -> None:
    files: dict[str, bytes | Item] = {"opt/setup.sh": SCRIPT, "app/run.sh": b"#!/bin/sh\nexec server\n"}
    found = start({"Cmd": ["/app/run.sh"]}, files)
    assert found.findings == ()
    assert found.scripts == ("/app/run.sh",)


def test_scripts_that_call_each_other_end() -> None:
    files: dict[str, bytes | Item] = {"a.sh": b"#!/bin/sh\n/b.sh\n", "b.sh": b"#!/bin/sh\n/a.sh\n"}
    assert start({"Cmd": ["/a.sh"]}, files).scripts == ("/a.sh", "/b.sh")


def test_a_binary_is_said_to_be_unread() -> None:
    found = start({"Entrypoint": ["/bin/server"]}, {"bin/server": b"\x7fELF"})
    assert found.unread == ("/bin/server",)


def test_settings_are_shown_without_secrets() -> None:
    found = start({"Env": ["PIP_INDEX_URL=https://user:secret@index.example/simple", "PATH=/bin", "HF_HUB_OFFLINE=1"]})
    assert found.environment == {"PIP_INDEX_URL": "https://***@index.example/simple", "HF_HUB_OFFLINE": "1"}
    found = start({"Cmd": ["sh", "-c", "TOKEN=abc123 curl -H x https://u:p@example.org/x"]})
    assert "abc123" not in found.findings[0].text
    assert "u:p" not in found.findings[0].text


def test_requirements_are_compared_with_what_is_installed() -> None:
    site = "usr/lib/python3/site-packages"
    files: dict[str, bytes | Item] = {
        f"{site}/Flask_Cors-4.0.1.dist-info/METADATA": b"Name: x\n",
        f"{site}/torch-2.7.1+cu126.dist-info/METADATA": b"Name: x\n",
        f"{site}/numpy-1.26.4.dist-info/METADATA": b"Name: x\n",
        "app/requirements.txt": b"# comment\nflask-cors\ntorch==2.7.1\nnumpy == 2.0.0\nmissing>=1\n"
        b"-r other.txt\npkg @ https://x/y.whl\nold; python_version<'3'\nuvicorn[standard]==1.0\n",
    }
    found = start({}, files).requirements
    assert [(r.name, r.wanted, r.installed) for r in found] == [
        ("numpy", "==2.0.0", "1.26.4"),
        ("missing", ">=1", None),
        ("uvicorn", "==1.0", None),
    ]


@given(st.text(), st.lists(st.text(max_size=20), max_size=5))
def test_any_text_and_command_is_read_without_an_error(text: str, command: list[str]) -> None:
    list(scan_text(text, {}))
    clean = [word.replace("\0", "") for word in command]
    start({"Cmd": [*clean], "Entrypoint": clean[:1] or None, "Env": clean}, {"a.sh": text.encode("utf-8", "replace")})


@pytest.mark.parametrize(
    "text", ["pip " * 5000, "curl " * 5000, "from_pretrained(" * 2000, "git -x " * 5000, "a" * 10**6]
)
def test_hostile_lines_take_no_time(text: str) -> None:
    list(scan_text(text, {}))
    list(scan_text(" \\\n".join([text[:1000]] * 100), {}))


@pytest.mark.parametrize(
    "runtime", [{}, {"Cmd": None}, {"Cmd": "string form"}, {"Entrypoint": 3, "Env": {"a": 1}}, {"Cmd": [1, None]}]
)
def test_odd_configs_are_read(runtime: dict[str, Any]) -> None:
    start(runtime)
