"""Our own rules for workflows: a clean one passes, and each rule has files that break it, at the line that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.workflows import RULES, lint

ROOT = Path(__file__).parents[3]
COMMIT = "11bd71901bbe5b1630ceea73d27597364c9af683"
CLEAN = f"""\
name: app
on:
  push:
    branches: [main]
    paths: ["images/app/**"]
  workflow_dispatch:
    inputs:
      promote: {{type: boolean, default: true}}
permissions:
  contents: read
defaults:
  run:
    shell: bash
env:
  HAS_TOKEN: ${{{{ secrets.REGISTRY_TOKEN != '' }}}}
  PROMOTE: ${{{{ github.event.inputs.promote }}}}
jobs:
  build:
    runs-on: ${{{{ vars.RUNNER || 'ubuntu-latest' }}}}
    timeout-minutes: 170
    permissions:
      contents: read
      packages: write
    steps:
      - name: Check out
        uses: actions/checkout@{COMMIT} # v4.2.2
      - name: Push
        if: github.ref == 'refs/heads/main'
        env:
          TOKEN: ${{{{ secrets.REGISTRY_TOKEN }}}}
          TITLE: ${{{{ github.event.head_commit.message }}}}
        run: |
          echo "$TITLE"
          docker run --rm -v cache:/cache image true
          docker buildx build --cache-to type=registry,ref=x .
          echo ${{{{ github.sha }}}}
"""
BROKEN = [
    # rule, what is replaced, by what, the line that is named (by a piece of it)
    ("branches", "    branches: [main]\n", "", "push:"),
    ("branches", "    branches: [main]\n", "    tags: ['v*']\n", "push:"),
    ("branches", "    branches: [main]\n", "    branches-ignore: [dev]\n", "push:"),
    ("branches", "    branches: [main]\n", "    branches: [main]\n    branches-ignore: [dev]\n", "push:"),
    ("trusted-trigger", "  workflow_dispatch:\n", "  pull_request_target:\n", "pull_request_target"),
    ("trusted-trigger", "  workflow_dispatch:\n", "  workflow_run:\n", "workflow_run"),
    ("forge-expression", "github.sha }", "gitea.sha }", "gitea.sha"),
    ("forge-expression", "if: github.ref", "if: gitea.ref", "gitea.ref"),
    ("forge-expression", "vars.RUNNER ||", "forgejo.actor || vars.RUNNER ||", "forgejo.actor"),
    ("forge-expression", "github.event.head_commit.message", "gitea['sha']", "gitea["),
    ("hash-files", "github.event.head_commit.message", "hashFiles('**/lock')", "hashFiles"),
    ("hash-files", "if: github.ref == 'refs/heads/main'", "if: hashfiles('x') != ''", "hashfiles"),
    ("absolute-action", "actions/checkout@", "https://github.com/actions/checkout@", "uses:"),
    ("absolute-action", "actions/checkout@", "http://git.example.org/a/b@", "uses:"),
    ("artifact", f"actions/checkout@{COMMIT} # v4.2.2", "actions/upload-artifact@v4", "artifact"),
    ("artifact", f"actions/checkout@{COMMIT} # v4.2.2", "actions/download-artifact@v4", "artifact"),
    ("artifact", f"actions/checkout@{COMMIT} # v4.2.2", "actions/upload-artifact@v3", "artifact"),
    ("artifact", "actions/checkout@", "actions/upload-artifact/merge@", "artifact"),
    ("artifact", "actions/checkout@", "example/upload-artifact@", "artifact"),
    ("runner-group", "runs-on: ${{ vars.RUNNER || 'ubuntu-latest' }}", "runs-on: {group: gpus}", "group"),
    (
        "environment",
        "    timeout-minutes: 170\n",
        "    timeout-minutes: 170\n    environment: production\n",
        "environment",
    ),
    (
        "continue-on-error",
        "    timeout-minutes: 170\n",
        "    timeout-minutes: 170\n    continue-on-error: true\n",
        "continue-on-error",
    ),
    ("cache-gha", "type=registry,ref=x", "type=gha,mode=max", "type=gha"),
    ("cache-gha", "# v4.2.2", "\n        with: {cache-from: 'type=gha'}", "type=gha"),
    ("reserved-name", "secrets.REGISTRY_TOKEN }", "secrets.GITEA_TOKEN }", "GITEA_TOKEN"),
    ("reserved-name", "secrets.REGISTRY_TOKEN }", "secrets.GITHUB_PACKAGES }", "GITHUB_PACKAGES"),
    ("reserved-name", "vars.RUNNER", "vars.GITHUB_RUNNER", "GITHUB_RUNNER"),
    ("dispatch-input", "if: github.ref == 'refs/heads/main'", "if: inputs.promote == true", "inputs.promote"),
    ("dispatch-input", "if: github.ref", "if: ${{ github.event.inputs.promote == 'true' }} && github.ref", "inputs"),
    ("workspace-mount", "-v cache:/cache", "-v $PWD:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", '-v "$(pwd)":/work', "docker run"),
    ("workspace-mount", "-v cache:/cache", "--volume=${PWD}/x:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", "-v ./data:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", "-v=.:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", "\\\n            -v $GITHUB_WORKSPACE:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", "-v ${{ github.workspace }}:/work", "docker run"),
    ("workspace-mount", "-v cache:/cache", "--mount type=bind,source=$PWD,target=/work", "docker run"),
    ("workspace-mount", "docker run --rm -v cache:/cache", "docker create -v `pwd`:/w", "docker create"),
    (
        "workspace-mount",
        "    timeout-minutes: 170\n",
        "    timeout-minutes: 170\n    container: {image: x, volumes: ['${{ github.workspace }}:/w']}\n",
        "volumes",
    ),
    ("secret-in-run", 'echo "$TITLE"', "login ${{ secrets.REGISTRY_TOKEN }}", "login"),
    ("secret-in-run", 'echo "$TITLE"', "login ${{ github.token }}", "login"),
    ("secret-in-run", 'echo "$TITLE"', "login ${{ format('{0}', secrets.X) }}", "login"),
    ("secret-scope", "HAS_TOKEN: ${{ secrets.REGISTRY_TOKEN != '' }}", "T: ${{ secrets.REGISTRY_TOKEN }}", "  T:"),
    (
        "secret-scope",
        "HAS_TOKEN: ${{ secrets.REGISTRY_TOKEN != '' }}",
        "T: ${{ secrets.A != '' && secrets.REGISTRY_TOKEN }}",
        "  T:",
    ),
    (
        "secret-scope",
        "    timeout-minutes: 170\n",
        "    timeout-minutes: 170\n    env: {T: '${{ secrets.X }}'}\n",
        "secrets.X",
    ),
    ("secret-scope", "name: Push", "name: Push ${{ secrets.X }}", "name: Push"),
    ("secret-scope", "if: github.ref", "if: startsWith(secrets.X, 'a') && github.ref", "secrets.X"),
    ("secret-scope", "    timeout-minutes: 170\n", "    timeout-minutes: 170\n    secrets: inherit\n", "inherit"),
    ("all-secrets", "secrets.REGISTRY_TOKEN }", "toJSON(secrets) }", "toJSON"),
    ("all-secrets", "secrets.REGISTRY_TOKEN }", "secrets[github.ref] }", "secrets["),
    ("injection", "github.sha }", "github.event.pull_request.title }", "title"),
    ("injection", "github.sha }", "github.head_ref }", "head_ref"),
    ("injection", "github.sha }", "github.ref_name }", "ref_name"),
    ("injection", "github.sha }", "inputs.promote }", "inputs.promote"),
    ("injection", "github.sha }", "github.sha || inputs.x }", "inputs.x"),
    ("injection", "github.sha }", "format('{0}', github.event.issue.body) }", "issue.body"),
    ("injection", "# v4.2.2", "\n        with: {script: 'x(${{ github.event.issue.body }})'}", "issue.body"),
    ("unpinned-action", f"actions/checkout@{COMMIT}", "actions/checkout@v4", "uses:"),
    ("unpinned-action", f"actions/checkout@{COMMIT}", f"actions/checkout@{COMMIT[:12]}", "uses:"),
    ("unpinned-action", f"actions/checkout@{COMMIT}", "actions/checkout", "uses:"),
    ("unpinned-action", f"actions/checkout@{COMMIT}", "docker://alpine:3", "uses:"),
    ("permissions", "permissions:\n  contents: read\ndefaults", "defaults", "name: app"),
    ("permissions", "permissions:\n  contents: read\ndefaults", "permissions: write-all\ndefaults", "write-all"),
    ("permissions", "permissions:\n  contents: read\ndefaults", "permissions: read-all\ndefaults", "read-all"),
    ("permissions", "permissions:\n  contents: read\n", "permissions:\n  packages: write\n", "packages"),
    ("permissions", "      packages: write\n", "      contents: write\n", "contents: write"),
    ("permissions", "      packages: write\n", "      id-token: write\n", "id-token"),
    ("step-name", "      - name: Push\n        if:", "      - if:", "- if:"),
    ("step-name", "name: Push", "name: ''", "name: ''"),
    ("timeout", "    timeout-minutes: 170\n", "", "build:"),
    ("timeout", "timeout-minutes: 170", "timeout-minutes: 360", "360"),
    ("timeout", "timeout-minutes: 170", "timeout-minutes: ${{ fromJSON(vars.LIMIT) }}", "LIMIT"),
    ("shell", "    shell: bash", "    shell: sh", "echo"),
    ("shell", "defaults:\n  run:\n    shell: bash\n", "", "echo"),
    ("shell", "        run: |", "        shell: python\n        run: |", "echo"),
    ("repeated-key", "name: app\n", "name: app\nname: other\n", "name: other"),
    ("repeated-key", "        run: |", "        env: {A: b}\n        run: |", "env: {A"),
    ("yaml", "name: app\n", "name: [app\n", "on:"),
    ("yaml", CLEAN, "- a list\n", "- a list"),
    ("yaml", CLEAN, "", ""),
]


def test_the_clean_workflow_breaks_no_rule() -> None:
    assert lint(CLEAN.encode(), "clean") == ()


@pytest.mark.parametrize(("rule", "old", "new", "named"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_rule_is_found_at_its_line(rule: str, old: str, new: str, named: str) -> None:
    assert CLEAN.count(old) == 1
    text = CLEAN.replace(old, new)
    findings = [finding for finding in lint(text.encode(), "w.yaml") if finding.rule == rule]
    assert findings
    lines = {text.splitlines()[finding.line - 1] if text else "" for finding in findings}
    assert any(named in line for line in lines), lines
    for finding in findings:
        assert "\n" not in str(finding)
        assert str(finding).startswith(f"w.yaml:{finding.line}: {rule}: ")
        assert finding.remedy


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in BROKEN} == {*RULES, "yaml"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("on:\n", '"on":\n'),
        ("runs-on: ${{ vars.RUNNER || 'ubuntu-latest' }}", "runs-on: [self-hosted, gpu-v100]"),
        ("permissions:\n  contents: read\n", "permissions: {}\n"),
        (f"actions/checkout@{COMMIT} # v4.2.2", "./.github/actions/own"),
        (f"actions/checkout@{COMMIT} # v4.2.2", f"docker://alpine@sha256:{'0' * 64}"),
        ("secrets.REGISTRY_TOKEN }", "secrets.GITHUB_TOKEN }"),
        ("secrets.REGISTRY_TOKEN }", "secrets.A || (vars.X == 'y' && github.token) || '' }"),
        ("-v cache:/cache", "-v /var/run/docker.sock:/var/run/docker.sock"),
        ('echo "$TITLE"', "echo 'secrets.X, gitea.sha and hashFiles(x) are words here'"),
        ("if: github.ref == 'refs/heads/main'", "if: github.ref == 'inputs.x' || github.event_name == 'gitea.x'"),
        ("        run: |", "        shell: bash --noprofile {0}\n        run: |"),
    ],
)
def test_what_is_allowed_is_not_found(old: str, new: str) -> None:
    assert CLEAN.count(old) == 1
    assert lint(CLEAN.replace(old, new).encode(), "w.yaml") == ()


def test_a_called_workflow_needs_no_timeout_of_its_own() -> None:
    call = f"  other:\n    uses: o/r/.github/workflows/w.yml@{COMMIT}\n    secrets:\n      T: ${{{{ secrets.T }}}}\n"
    assert lint((CLEAN + call).encode(), "w.yaml") == ()


@given(st.binary(max_size=300) | st.text(alphabet="on:jobs-steprun{}[]&*!|>\n '\"$", max_size=200).map(str.encode))
def test_any_bytes_end_in_findings(data: bytes) -> None:
    for finding in lint(data, "w.yaml"):
        assert 1 <= finding.line <= data.count(b"\n") + data.count(b"\r") + 400


@given(st.data())
def test_a_workflow_that_lost_lines_ends_in_findings_or_none(data: st.DataObject) -> None:
    lines = CLEAN.splitlines()
    kept = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
    lint("\n".join(line for line, keep in zip(lines, kept, strict=True) if keep).encode(), "w.yaml")


def test_aliases_of_themselves_end() -> None:
    assert lint(b"on: &a\n  push: *a\njobs: {a: &j {steps: [*j]}}\n", "w.yaml")
