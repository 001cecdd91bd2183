"""Reading manifests: values with their lines, and a finding instead of a traceback for whatever else a file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.deploy.documents import MAX_FILE, Document, read_documents, read_file
from buildkit.deploy.findings import Finding

TEXT = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def read(text: str) -> tuple[list[Document], list[Finding]]:
    return read_documents(text, "m.yaml")


def value(text: str) -> object:
    documents, findings = read(text)
    assert not findings
    assert len(documents) == 1
    return documents[0].value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("-12", -12),
        ("0644", 420),
        ("0o644", 420),
        ("0x1F", 31),
        ("08", 8.0),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("yes", True),
        ("Off", False),
        ("y", True),
        ("N", False),
        ("yEs", "yEs"),
        ("~", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("=", "="),
        (".", "."),
        ("16Gi", "16Gi"),
        ("!!python/object/apply:os.system [x]", ["x"]),
    ],
)
def test_scalars_read_as_kubernetes_reads_them(text: str, expected: object) -> None:
    assert value(f"a: {text}\n") == {"a": expected}


@given(JSON)
@settings(max_examples=200)
def test_json_is_yaml(document: object) -> None:
    documents, findings = read(json.dumps({"a": document}, ensure_ascii=False))
    assert not findings
    assert documents[0].value == {"a": document}


@given(st.text(max_size=200))
def test_any_text_is_read_or_reported(text: str) -> None:
    for finding in read(text)[1]:
        assert 1 <= finding.line <= text.count("\n") + 2 + sum(text.count(c) for c in "\r\x85\u2028\u2029")


def test_every_value_knows_its_line() -> None:
    documents, _ = read("a: 1\nb:\n  - x\n  - {c: 2}\n---\n# note\nd: e\n")
    first, second = documents
    assert [first.line(p) for p in (("a",), ("b",), ("b", 0), ("b", 1), ("b", 1, "c"))] == [1, 2, 3, 4, 4]
    assert second.line(("d",)) == 7
    assert first.line(("b", 1, "absent", "deeper")) == 4


def test_anchors_and_merge_keys_are_followed() -> None:
    text = "base: &b {x: 1, y: 2}\none:\n  <<: *b\n  y: 3\nmany:\n  <<: [{x: 9}, *b]\n"
    assert value(text) == {"base": {"x": 1, "y": 2}, "one": {"x": 1, "y": 3}, "many": {"x": 9, "y": 2}}


def test_a_document_that_does_not_parse_hides_no_other() -> None:
    documents, findings = read("a: 1\n---\nb: [1\n---\nc: 3\n")
    assert [d.value for d in documents] == [{"a": 1}, {"c": 3}]
    assert [(f.rule, f.line) for f in findings] == [("yaml", 4)] or [(f.rule, f.line) for f in findings] == [
        ("yaml", 3)
    ]


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("a: 1\n{{- if .Values.x }}\nb: 2\n{{- end }}\n", "template", 2),
        ("a: 1\nreplicas: {{ .Values.replicas }}\n", "yaml-key", 2),
        ("a: 1\na: 2\n", "yaml-duplicate-key", 2),
        ("a:\n\t- b\n", "yaml", 2),
        ("a: 1\nb: \x01\n", "yaml", 2),
        ("a: *nowhere\n", "yaml", 1),
        ("x: 1\na: &a [*a]\n", "yaml", 2),
    ],
)
def test_what_does_not_parse_is_a_finding_with_its_line(text: str, rule: str, line: int) -> None:
    _, findings = read(text)
    assert [(f.rule, f.line) for f in findings] == [(rule, line)]
    assert findings[0].remedy


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: " + "[" * 300 + "]" * 300,
        "".join(" " * i + "a:\n" for i in range(2000)),
        "- " * 5000 + "x",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
        "a: " + "9" * 10_000,
    ],
    ids=["brackets", "flow", "indent", "dashes", "billion-laughs", "huge-number"],
)
def test_hostile_nesting_and_alias_bombs_end_quickly(text: str) -> None:
    documents, findings = read(text)
    assert findings or documents
    assert len(findings) <= 1


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\n")
    assert [(f.rule, f.line) for f in read_file(binary)[1]] == [("yaml", 2)]
    assert read_file(tmp_path)[1][0].rule == "yaml"
    assert "cannot be read" in read_file(tmp_path / "none.yaml")[1][0].message
    large = tmp_path / "l.yaml"
    with large.open("wb") as handle:
        handle.truncate(MAX_FILE + 1)
    assert "larger" in read_file(large)[1][0].message
    marked = tmp_path / "bom.yaml"
    marked.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(marked)[0][0].value == {"a": 1}
