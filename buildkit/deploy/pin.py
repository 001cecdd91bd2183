"""``deploy.pin``: a verified digest into the ``images:`` of a kustomization, and not a character more.

The file is edited as text, by the places at which YAML says its values stand: comments, order and style stay. What
comes out is read again and must say exactly what was meant, before it replaces the file in one step.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from buildkit.deploy.documents import read_documents, read_file
from buildkit.deploy.evidence import Evidence, EvidencePolicy, EvidenceReader, Objection, judge
from buildkit.deploy.kustomize import FILE_NAMES, elsewhere, find_kustomization, read_kustomization, source_files
from buildkit.deploy.rules import parse_image
from buildkit.disk import write_atomic
from buildkit.errors import BuildkitError, CheckFailedError, StorageError, UsageError, one_line
from buildkit.model import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PinResult:
    """``changed`` is false where the file said so already. ``before`` is the entry as it was, None where there was
    none."""

    file: Path
    image: Reference
    evidence: Evidence
    changed: bool
    before: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "buildkit/pin/1",
            "file": str(self.file),
            "image": str(self.image),
            "digest": str(self.image.digest),
            "changed": self.changed,
            "before": dict(self.before) if self.before is not None else None,
            "evidence": self.evidence.to_json(),
        }

    def render(self) -> str:
        verb = "pinned" if self.changed else "already pinned"
        return f"{verb}: {self.image.name}@{self.image.digest} in {self.file} ({self.evidence.origin})"


def pin(
    name: str,
    image: Reference,
    *,
    folder: Path,
    reader: EvidenceReader,
    policy: EvidencePolicy,
) -> PinResult:
    """Write ``image``'s digest into the ``images:`` entry ``name`` of the kustomization in ``folder``.

    ``image`` must carry its digest (see ``AttachedEvidence.resolve``). Raises CheckFailedError, with everything that
    speaks against it, where its evidence does not pass; then nothing is written. Idempotent.
    """
    if image.digest is None:
        raise UsageError(f"{image} has no digest", hint="resolve its tag first")
    file = find_kustomization(folder)
    if file is None:
        raise UsageError(f"{folder} has no kustomization.yaml", hint="name its folder with --folder")
    before = entry_of(folder, name)
    if before is None:
        _check_used(folder, name)
    evidence = reader.read(image)
    objections = judge(evidence, image.digest, policy)
    if objections or evidence is None:
        raise CheckFailedError(_refusal(image, objections), hint="; ".join(dict.fromkeys(o.remedy for o in objections)))
    old = _read(file)
    new = edit(old, name, new_name=image.name, digest=str(image.digest), where=str(file))
    if new != old:
        _replace(file.resolve(), new)  # a link stays one
    return PinResult(file=file, image=image, evidence=evidence, changed=new != old, before=before)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from error


def _check_used(folder: Path, name: str) -> None:
    """Raises UsageError where no container under the kustomization has an image of that name: an entry for it would
    pin nothing. What is not here cannot be looked at, and is believed."""
    if next(elsewhere(folder), None) is not None:
        return
    used = set()
    for file in source_files(folder):
        for document in () if file.name in FILE_NAMES else read_file(file)[0]:
            for image in _images(document.value):
                with contextlib.suppress(BuildkitError):
                    used.add(parse_image(image)[0])
    if name not in used:
        near = difflib.get_close_matches(name, used, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(used)) or 'none'}"
        raise UsageError(f"no container in {folder} has an image named {one_line(name, 200)!r}", hint=hint)


def _images(value: Any) -> Iterator[str]:
    """Every ``image:`` in a document, wherever it stands."""
    if isinstance(value, dict):
        if isinstance(value.get("image"), str):
            yield value["image"]
        for child in value.values():
            yield from _images(child)
    elif isinstance(value, list):
        for child in value:
            yield from _images(child)


def entry_of(folder: Path, name: str) -> dict[str, Any] | None:
    """The ``images:`` entry of that name; None where there is none. Raises UsageError for a broken kustomization."""
    for entry in read_kustomization(folder).at("images").items:
        if entry.at("name").text == name:
            return dict(entry.value)
    return None


def edit(text: str, name: str, *, new_name: str, digest: str, where: str) -> str:
    """``text`` with the entry ``name`` of ``images:`` set to ``new_name`` and ``digest``, without a ``newTag``.

    Raises UsageError where the file is not a kustomization that can be edited in place.
    """
    wanted = {"newName": new_name, "digest": digest}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} does not parse", hint="invoke deploy.check says where") from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{where} is not a YAML mapping")
    images = _member(root, "images")
    if images is None:
        block = "" if text.endswith("\n") or not text else "\n"
        edited = f"{text}{block}images:\n" + _entry(name, wanted, "  ")
    elif images.tag.endswith(":null"):
        after = text[images.end_mark.index :]
        edited = text[: images.start_mark.index] + "\n" + _entry(name, wanted, "  ").rstrip("\n") + after
    elif not isinstance(images, yaml.SequenceNode):
        raise UsageError(f"{where}:{images.start_mark.line + 1}: images is not a list")
    else:
        entries = [e for e in images.value if isinstance(e, yaml.MappingNode) and _text(e, "name") == name]
        if len(entries) > 1:
            line = entries[1].start_mark.line + 1
            raise UsageError(f"{where}:{line}: images has a second entry {name!r}", hint="keep one of them")
        entry = entries[0] if entries else None
        edited = _with_new_entry(text, images, name, wanted) if entry is None else _with_entry(text, entry, wanted)
    if "\r\n" in text:
        edited = re.sub(r"(?<!\r)\n", "\r\n", edited)
    _prove(edited, text, name, wanted, where)
    return edited


def _with_entry(text: str, entry: yaml.MappingNode, wanted: Mapping[str, str]) -> str:
    """Values are replaced where they stand, from the last to the first; what is missing follows the entry's name."""
    edits: list[tuple[int, int, str]] = []
    missing = dict(wanted)
    for key, value in entry.value:
        start, end = value.start_mark.index, value.end_mark.index
        if key.value in wanted:
            del missing[key.value]
            gap = " " if start == end and text[start - 1 : start] == ":" else ""
            edits.append((start, end, gap + wanted[key.value]))
        elif key.value == "newTag":
            edits.append(_removal(text, entry, key, value))
    if missing:
        name = next(v for k, v in entry.value if k.value == "name")
        end = name.end_mark.index
        if entry.flow_style:
            edits.append((end, end, "".join(f", {k}: {v}" for k, v in missing.items())))
        else:
            line_end = text.find("\n", end)
            at = len(text) if line_end < 0 else line_end
            indent = " " * entry.value[0][0].start_mark.column
            edits.append((at, at, "".join(f"\n{indent}{k}: {v}" for k, v in missing.items())))
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _removal(text: str, entry: yaml.MappingNode, key: yaml.Node, value: yaml.Node) -> tuple[int, int, str]:
    """The whole line of a member, or what stands between its comma and the next."""
    start, end = key.start_mark.index, value.end_mark.index
    if entry.flow_style:
        comma = text.rfind(",", entry.start_mark.index, start)
        if comma >= 0:
            return comma, end, ""
        after = text.find(",", end)
        return start, after + 1 if 0 <= after < entry.end_mark.index else end, ""
    line_start = text.rfind("\n", 0, start) + 1
    if text[line_start:start].strip() == "-":
        # The first member carries the dash of the list: its value goes, and the next member takes its place.
        following = min((k.start_mark.index for k, _ in entry.value if k.start_mark.index > start), default=end)
        return start, following, ""
    line_end = text.find("\n", end)
    return line_start, len(text) if line_end < 0 else line_end + 1, ""


def _with_new_entry(text: str, images: yaml.SequenceNode, name: str, wanted: Mapping[str, str]) -> str:
    if images.flow_style:
        end = images.end_mark.index - 1
        comma = ", " if images.value else ""
        members = "".join(f", {k}: {v}" for k, v in wanted.items())
        return f"{text[:end]}{comma}{{name: {_quoted(name)}{members}}}{text[end:]}"
    last = images.value[-1]
    indent = " " * (images.start_mark.column)
    at = _end_of(text, last)
    lead = "" if text[:at].endswith("\n") else "\n"
    return text[:at] + lead + _entry(name, wanted, indent) + text[at:]


def _end_of(text: str, node: yaml.Node) -> int:
    """Where the line after the last one with something of ``node`` begins."""
    end = node.end_mark.index
    while end and text[end - 1] in " \t\r\n":
        end -= 1
    comment = end
    # The end of a block collection is the next token, past comments: go back to its last value.
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        inner = node.value[-1]
        return _end_of(text, inner[1] if isinstance(inner, tuple) else inner)
    line_end = text.find("\n", comment)
    return len(text) if line_end < 0 else line_end + 1


def _entry(name: str, wanted: Mapping[str, str], indent: str) -> str:
    return f"{indent}- name: {_quoted(name)}\n" + "".join(f"{indent}  {k}: {v}\n" for k, v in wanted.items())


def _quoted(name: str) -> str:
    """A scalar that every reader of YAML takes for this text."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._/-]*(?::[0-9]+/[A-Za-z0-9._/-]+)?", name) is not None
    return name if plain and yaml.safe_load(name) == name and name not in ("y", "n", "Y", "N") else json.dumps(name)


def _prove(edited: str, text: str, name: str, wanted: Mapping[str, str], where: str) -> None:
    """The edited text must say what the old one said, with this one entry changed. Raises UsageError."""

    def read(content: str) -> Any:
        documents, findings = read_documents(content, where)
        return documents[0].value if len(documents) == 1 and not findings else None

    expected, got = read(text), read(edited)
    if isinstance(expected, dict):
        if expected.get("images") is None:
            expected["images"] = []
        images = expected["images"]
        entry = next((e for e in images if isinstance(e, dict) and e.get("name") == name), None)
        if entry is None:
            entry = {"name": name}
            images.append(entry)
        entry.update(wanted)
        entry.pop("newTag", None)
    if got is None or got != expected:
        raise UsageError(
            f"{where}: the entry {name!r} of images cannot be edited in place",
            hint=f"set newName: {wanted['newName']} and digest: {wanted['digest']} by hand",
        )


def _member(node: yaml.MappingNode, name: str) -> yaml.Node | None:
    return next((v for k, v in node.value if isinstance(k, yaml.ScalarNode) and k.value == name), None)


def _text(node: yaml.MappingNode, name: str) -> str | None:
    found = _member(node, name)
    return found.value if isinstance(found, yaml.ScalarNode) else None


def _refusal(image: Reference, objections: tuple[Objection, ...]) -> str:
    return f"{image.name}@{image.digest} is not pinned: " + "; ".join(o.message for o in objections)


def _replace(file: Path, text: str) -> None:
    """Write beside the file and move it over; rights stay."""
    try:
        mode = file.stat().st_mode & 0o7777
        write_atomic(file, text.encode(), mode=mode)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}") from error
