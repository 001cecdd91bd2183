"""``deploy.check`` and ``deploy.plan``: manifests from files in, a report out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from buildkit.deploy import schema
from buildkit.deploy.documents import Document, Field, read_bytes, read_documents, read_file
from buildkit.deploy.evidence import EvidenceReader, judge
from buildkit.deploy.findings import Finding, Severity
from buildkit.deploy.kustomize import elsewhere, find_kustomization, render_subset, source_files
from buildkit.deploy.namehash import SUFFIX
from buildkit.deploy.objects import (
    Node,
    Object,
    Workload,
    expand,
    is_owned,
    quantity,
    read_node,
    read_object,
    read_workload,
    supposed_nodes,
)
from buildkit.deploy.placement import Plan, place_pods
from buildkit.deploy.rules import PLACEHOLDER, Scene, Settings, parse_image, run_rules
from buildkit.errors import BuildkitError, RegistryError, UsageError, one_line
from buildkit.model import Reference

Renderer = Literal["auto", "own", "kustomize", "kubectl"]

_SUFFIXES = (".yaml", ".yml", ".json")
_RENDER_SECONDS = 120.0
_MAX_BESIDE = 2**20
_SEVERITY_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.UNKNOWN: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployReport:
    """What was found. ``ok`` is the verdict: no error; what could not be checked is in the findings as ``unknown``.

    ``renderers`` says for each rendered folder by what; ``plan`` is None where the nodes' cards are not known.
    """

    findings: tuple[Finding, ...]
    plan: Plan | None
    objects: int
    files: tuple[str, ...]
    renderers: Mapping[str, str]

    @property
    def ok(self) -> bool:
        return not any(f.severity is Severity.ERROR for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """``{"schema": "buildkit/deploy-report/1", "ok", "objects", "files", "renderers", "plan", "findings"}``."""
        return {
            "schema": "buildkit/deploy-report/1",
            "ok": self.ok,
            "objects": self.objects,
            "files": list(self.files),
            "renderers": dict(self.renderers),
            "plan": self.plan.to_json() if self.plan else None,
            "findings": [f.to_json() for f in self.findings],
        }

    def render(self) -> str:
        """For people: findings, errors first, then one line of verdict."""
        lines = [f.render() for f in self.findings]
        counts = {s: sum(f.severity is s for f in self.findings) for s in Severity}
        verdict = "PASS" if self.ok else "FAIL"
        told = f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings"
        if counts[Severity.UNKNOWN]:
            told += f", {counts[Severity.UNKNOWN]} not checked"
        lines.append(f"{verdict}: {self.objects} objects in {len(self.files)} files, {told}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """Objects read from files or renderings, with what could not be read."""

    objects: tuple[Object, ...]
    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    renderers: Mapping[str, str]
    nodes: tuple[Object, ...] = ()


def check_manifests(
    paths: Sequence[Path | str],
    *,
    node_gpus: int | None = None,
    nodes: Path | None = None,
    settings: Settings | None = None,
    evidence: EvidenceReader | None = None,
    renderer: Renderer = "auto",
    text: str | bytes | None = None,
) -> DeployReport:
    """Check files, folders and kustomizations as one deployment. ``text`` is more YAML, shown as ``<stdin>``; bytes are
    UTF-8.

    The cards of the nodes come from ``node_gpus`` (each node has that many), else from ``nodes`` (a file of Node
    objects, or a parameter file), else from Node objects among the manifests. Without a reader of ``evidence`` images
    that ask for a card are reported as not checked. Raises UsageError for a path that is not there and for wrong
    settings; everything that the manifests say is a finding.
    """
    settings = settings or Settings()
    manifests = load_manifests(paths, renderer=renderer, text=text)
    workloads = _workloads(manifests)
    machines = choose_nodes(manifests, workloads, node_gpus=node_gpus, nodes=nodes, resource=settings.resource)
    plan = place_pods(workloads, machines, settings.resource) if machines else None
    scene = Scene(
        objects=manifests.objects,
        workloads=workloads,
        nodes=machines,
        plan=plan,
        settings=settings,
        beside={file: _beside(file) for file in {o.field.file for o in manifests.objects if o.kind == "ConfigMap"}},
    )
    findings = [*manifests.findings, *_schemas(manifests.objects, settings.kubernetes), *run_rules(scene)]
    findings += _evidence(workloads, settings, evidence)
    unique = {(f.rule, f.file, f.line, f.subject, f.message): f for f in findings}
    ordered = sorted(unique.values(), key=lambda f: (_SEVERITY_ORDER[f.severity], f.file, f.line, f.rule))
    return DeployReport(
        findings=tuple(ordered),
        plan=plan,
        objects=len(manifests.objects),
        files=manifests.files,
        renderers=manifests.renderers,
    )


_UNREAD = frozenset({"kustomize", "template", "yaml"})
"""Rules of findings after which objects are missing, or are not what a cluster would get."""


def plan_cards(
    paths: Sequence[Path | str],
    *,
    node_gpus: int | None = None,
    nodes: Path | None = None,
    settings: Settings | None = None,
    renderer: Renderer = "auto",
    text: str | bytes | None = None,
) -> Plan:
    """Who gets which card.

    Raises UsageError where the nodes' cards are not known or something could not be read: what is left of it would make
    another plan than the one that the cluster gets.
    """
    settings = settings or Settings()
    manifests = load_manifests(paths, renderer=renderer, text=text)
    workloads = _workloads(manifests)
    machines = choose_nodes(manifests, workloads, node_gpus=node_gpus, nodes=nodes, resource=settings.resource)
    if not machines:
        raise UsageError("how many cards the nodes have is not known", hint="give --node-gpus, or a Node object")
    unread = [
        finding for finding in manifests.findings if finding.rule in _UNREAD and finding.severity is Severity.ERROR
    ]
    if unread or (not manifests.objects and manifests.findings):
        first = (unread or manifests.findings)[0]
        raise UsageError(f"{first.file}:{first.line}: {first.message}", hint=first.remedy)
    return place_pods(workloads, machines, settings.resource)


# Reading -------------------------------------------------------------------------------------------------------------


def load_manifests(
    paths: Sequence[Path | str], *, renderer: Renderer = "auto", text: str | bytes | None = None
) -> Manifests:
    """Objects of all ``paths``: files as they are, kustomizations rendered, other folders file by file.

    Raises UsageError for a path that is not there or cannot be read. That there is nothing to check is a finding.
    """
    documents: list[Document] = []
    findings: list[Finding] = []
    files: list[str] = []
    renderers: dict[str, str] = {}
    if text is not None:
        files.append("<stdin>")
        found, problems = read_bytes(
            text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, "<stdin>"
        )
        documents += found
        findings += problems
    for path in map(Path, paths):
        for unit in _units(path):
            if unit.name == _CHART:
                findings.append(_chart(unit))
                files.append(_show(unit))
            elif unit.is_dir():
                rendered, used = _render(unit, renderer)
                renderers[_show(unit)] = used
                documents += rendered.documents
                findings += rendered.findings
                files += rendered.files
            else:
                found, problems = read_file(unit, _show(unit))
                documents += found
                findings += problems
                files.append(_show(unit))
    objects, machines = [], []
    for field in expand(documents):
        thing = read_object(field)
        if thing.kind == "Node" and thing.api_version == "v1":
            machines.append(thing)
        else:
            objects.append(thing)
    if not objects and not findings:
        findings.append(_nothing(files[0] if files else str(next(iter(paths), "<stdin>"))))
    return Manifests(
        objects=tuple(objects),
        findings=tuple(findings),
        files=tuple(dict.fromkeys(files)),
        renderers=renderers,
        nodes=tuple(machines),
    )


def choose_nodes(
    manifests: Manifests,
    workloads: Sequence[Workload],
    *,
    node_gpus: int | None,
    nodes: Path | None,
    resource: str,
) -> tuple[Node, ...]:
    """The nodes that pods can go to; empty where nothing says how many cards there are."""
    if node_gpus is not None and not 0 <= node_gpus <= 10_000:
        raise UsageError(f"--node-gpus {node_gpus} is no number of cards")
    known = read_nodes(nodes, resource) if nodes is not None else ()
    known = known or tuple(read_node(n, resource) for n in manifests.nodes)
    if node_gpus is None:
        return known
    if known:
        return tuple(replace(n, cards=node_gpus) for n in known)
    return supposed_nodes(workloads, node_gpus, resource)


def read_nodes(path: Path, resource: str) -> tuple[Node, ...]:
    """Nodes from a file: Node objects (``kubectl get nodes -o yaml``), or parameters::

        nodes:
          - name: gpu-1
            gpus: 3
            labels: {kubernetes.io/hostname: gpu-1}

    Raises UsageError, with file and line, for anything else.
    """
    documents, findings = read_file(path)
    if findings:
        raise UsageError(f"{findings[0].file}:{findings[0].line}: {findings[0].message}", hint=findings[0].remedy)
    out = []
    for field in expand(documents):
        if field.at("kind").text == "Node":
            out.append(read_node(read_object(field), resource))
        for entry in field.at("nodes").items:
            name, cards = entry.at("name").text, quantity(entry.at("gpus").value)
            if not name or cards is None:
                raise UsageError(
                    f"{entry.file}:{entry.line}: a node needs name and gpus", hint="gpus is a whole number"
                )
            labels = (
                {"kubernetes.io/hostname": name} | entry.at("labels").strings if entry.at("labels").present else None
            )
            out.append(Node(name=name, cards=cards, labels=labels))
    if not out:
        raise UsageError(f"{path} has no Node object and no list of nodes")
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    documents: list[Document]
    findings: list[Finding]
    files: list[str]


_CHART = "Chart.yaml"
"""What makes a folder a Helm chart ("Charts", Helm's documentation)."""


def _units(path: Path) -> Iterator[Path]:
    """What is read as one: a file, a folder with a kustomization, or the ``Chart.yaml`` of a chart. Bases of another
    kustomization stand back. Raises UsageError for a path that is not there, or cannot be read."""
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{one_line(str(path), 200)} is no path: {getattr(error, 'strerror', error)}") from error
    if not there:
        raise UsageError(f"{path} does not exist", hint="name a file or a folder of manifests")
    if not path.is_dir() or find_kustomization(path):
        yield path
        return
    folders = [Path(root) for root, names, _ in os.walk(path, onerror=_refuse_folder) if _not_hidden(names)]
    charts = [f for f in folders if (f / _CHART).is_file()]
    folders = [f for f in folders if not any(f.is_relative_to(chart) for chart in charts)]
    yield from (chart / _CHART for chart in charts if not any(c in chart.parents for c in charts))
    overlays = [f for f in folders if find_kustomization(f)]
    taken = {file.resolve() for f in overlays for file in source_files(f)}
    bases = {file.parent for f in overlays for file in source_files(f) if file.parent != f.resolve()}
    for folder in folders:
        if folder in overlays:
            if folder.resolve() not in bases:
                yield folder
            continue
        for file in sorted(folder.iterdir()):
            # A link that leads nowhere is told: what it should lead to is not checked.
            if file.suffix in _SUFFIXES and (file.is_file() or file.is_symlink()) and _real(file) not in taken:
                yield file


def _real(file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, RuntimeError):  # links in a circle; reading it says so
        return file


def _refuse_folder(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}", hint="check its rights") from error


def _chart(file: Path) -> Finding:
    return Finding(
        rule="template",
        severity=Severity.ERROR,
        file=_show(file),
        line=1,
        message="a Helm chart: its templates are no manifests until they are rendered, so nothing in it was checked",
        remedy="helm template NAME FOLDER | invoke deploy.check -",
    )


def _nothing(file: str) -> Finding:
    return Finding(
        rule="nothing-to-check",
        severity=Severity.ERROR,
        file=file,
        line=1,
        message="there is no Kubernetes object in it",
        remedy="name the file or folder that has the manifests; for a pipe, see whether the command before it failed",
    )


def _not_hidden(names: list[str]) -> bool:
    """Keeps os.walk out of hidden folders, in a fixed order."""
    names[:] = sorted(n for n in names if not n.startswith("."))
    return True


def _render(folder: Path, renderer: Renderer) -> tuple[_Rendered, str]:
    program = _program(renderer)
    sources = [(file, *read_file(file, _show(file))) for file in source_files(folder)]
    files = [_show(file) for file, _, _ in sources]
    # A source that does not parse is told with its own line; the rendering would only say that it failed.
    broken = [f for _, _, found in sources for f in found]
    if any(f.severity is Severity.ERROR and f.rule != "yaml-duplicate-key" for f in broken):
        documents = [d for file, docs, _ in sources if file.name not in _KUSTOMIZATIONS for d in docs]
        return _Rendered(documents=documents, findings=broken, files=files), "not rendered"
    missing = [_elsewhere(place) for place in elsewhere(folder)]
    if missing:
        documents = [d for file, docs, _ in sources if file.name not in _KUSTOMIZATIONS for d in docs]
        return _Rendered(documents=documents, findings=[*broken, *missing], files=files), "not rendered"
    try:
        text = render_subset(folder) if program is None else _run(program, folder)
    except BuildkitError as error:
        file = find_kustomization(folder)
        place = _show(file) if file else _show(folder)
        finding = Finding(
            rule="kustomize",
            severity=Severity.ERROR,
            file=place,
            line=_line_in(error.message, place),
            message=f"does not render: {error.message}",
            remedy=error.hint or "correct the kustomization",
        )
        documents = [d for file, docs, _ in sources if file.name not in _KUSTOMIZATIONS for d in docs]
        return _Rendered(documents=documents, findings=[*broken, finding], files=files), "not rendered"
    documents, findings = read_documents(text, _show(folder))
    origins = _Origins.of([d for _, docs, _ in sources for d in docs])
    placed = [_relocate(d, origins) for d in documents]
    local = [d for file, docs, _ in sources if file.name not in _KUSTOMIZATIONS for d in docs if _is_node(d)]
    return _Rendered(documents=placed + local, findings=[*broken, *findings], files=files), program[
        0
    ] if program else "own"


def _elsewhere(place: Field) -> Finding:
    return Finding(
        rule="kustomize",
        severity=Severity.ERROR,
        file=_show(Path(place.file)),
        line=place.line,
        message=f"does not render: there is no file or folder {place.text!r} here, and a check fetches nothing",
        remedy="correct the path; for a remote base, pipe in what kustomize build prints",
    )


_KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")


def _is_node(document: Document) -> bool:
    return document.root.at("kind").text == "Node"


def _program(renderer: Renderer) -> list[str] | None:
    """The command that renders, without its folder; None for our own subset."""
    if renderer == "own":
        return None
    for name, command in (("kustomize", ["kustomize", "build"]), ("kubectl", ["kubectl", "kustomize"])):
        found = shutil.which(name)
        if renderer in ("auto", name) and found:
            return [name, found, *command[1:]]
    if renderer != "auto":
        raise UsageError(f"{renderer} is not on PATH", hint="install it, or render with --renderer own")
    return None


def _run(program: Sequence[str], folder: Path) -> str:
    name, *command = program
    try:
        done = subprocess.run(
            [*command, str(folder)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_RENDER_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"{name} took longer than {_RENDER_SECONDS:.0f} s", hint="does it fetch remote bases?"
        ) from error
    if done.returncode:
        raise UsageError(f"{name}: {one_line(done.stderr or 'failed without a word')}")
    return done.stdout


def _line_in(message: str, file: str) -> int:
    """The line that an error of our own subset begins with, ``file:line: …``; else 1."""
    head = message.rpartition(": ")[0] if message.startswith(file) else ""
    part = head[len(file) + 1 :].partition(":")[0]
    return int(part) if part.isdigit() else 1


@dataclass(frozen=True, slots=True)
class _Origins:
    """Where rendered objects were written, by kind and name: rendering keeps no lines."""

    objects: tuple[tuple[str, str, Field], ...]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> _Origins:
        out = []
        for field in expand(documents):
            kind, name = field.at("kind").text, field.at("metadata", "name").text
            if kind and name:
                out.append((kind, name, field))
            for generator, made in (("configMapGenerator", "ConfigMap"), ("secretGenerator", "Secret")):
                for entry in field.at(generator).items:
                    if entry.at("name").text:
                        out.append((made, entry.at("name").value, entry))
        return cls(tuple(out))

    def find(self, kind: str, name: str) -> Field | None:
        """The source of a rendered object: of its name, or of the longest part of it (prefix, suffix, hash)."""
        plain = SUFFIX.sub("", name)
        fitting = [(n, f) for k, n, f in self.objects if k == kind and (n == name or n in plain)]
        return max(fitting, key=lambda e: (e[0] == name, len(e[0])))[1] if fitting else None


def _relocate(document: Document, origins: _Origins) -> Document:
    """The rendered document with the file and lines of its source; paths that rendering added get the nearest line."""
    root = document.root
    source = origins.find(root.at("kind").text or "", root.at("metadata", "name").text or "")
    if source is None:
        return document
    lines: dict[tuple[str | int, ...], int] = {(): source.line}
    prefix = len(source.path)
    for path, line in source.document.lines.items():
        if path[:prefix] == source.path and path[prefix:]:
            lines[path[prefix:]] = line
    _follow(document.value, source, (), lines)
    return Document(file=source.file, value=document.value, lines=lines)


def _follow(value: Any, source: Field, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> None:
    """Rendering may reorder lists: find each named element of a list where it stands in the source."""
    if isinstance(value, dict):
        for key, child in value.items():
            _follow(child, source.at(key), (*path, key), lines)
    elif isinstance(value, list):
        originals = {e.at("name").text: e for e in source.items if e.at("name").text}
        for index, child in enumerate(value):
            name = child.get("name") if isinstance(child, dict) else None
            found = originals.get(name) if isinstance(name, str) else source.at(index)
            if found is not None and found.present:
                lines[(*path, index)] = found.line
                for below, line in found.document.lines.items():
                    if below[: len(found.path)] == found.path and len(below) > len(found.path):
                        lines[(*path, index, *below[len(found.path) :])] = line
                _follow(child, found, (*path, index), lines)


def _show(path: Path) -> str:
    """Relative to where we are, when it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError, RuntimeError):  # not below; links in a circle
        return str(path)


def _beside(file: str) -> dict[str, str]:
    """Small text files in the folder of a manifest, by name: what a ConfigMap may have been made of."""
    path = Path(file)
    if file == "<stdin>" or not path.is_file():
        return {}
    out = {}
    for entry in sorted(path.parent.iterdir()):
        try:
            if entry.is_file() and entry.suffix not in _SUFFIXES and entry.stat().st_size <= _MAX_BESIDE:
                out[entry.name] = entry.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # not a text that a ConfigMap's data could hold
    return out


# Checks with an edge to the outside -----------------------------------------------------------------------------------


def _workloads(manifests: Manifests) -> tuple[Workload, ...]:
    known = {(o.kind, o.namespace, o.name) for o in manifests.objects}
    owners = [o for o in manifests.objects if not is_owned(o, known)]
    return tuple(w for o in owners if (w := read_workload(o)) is not None)


def _schemas(objects: Sequence[Object], version: str) -> Iterator[Finding]:
    if not schema.available():
        if objects:
            first = objects[0]
            yield Finding(
                rule="schema",
                severity=Severity.UNKNOWN,
                file=first.field.file,
                line=first.field.line,
                message="objects were not held against Kubernetes' schemas: the package with them is not installed",
                remedy=f"{Path(sys.executable).name} -m pip install kubernetes-validate",
            )
        return
    for thing in objects:
        yield from schema.check_schema(thing, version)


def _evidence(workloads: Sequence[Workload], settings: Settings, reader: EvidenceReader | None) -> Iterator[Finding]:
    """Evidence for the images that use a card; each image is asked for once."""
    asked: dict[str, list[Finding]] = {}
    for workload in workloads:
        for container in workload.containers:
            image, place = container.image, container.field.at("image")
            if image is None or not container.cards(settings.resource):
                continue
            try:
                name, _, digest = parse_image(image)
            except BuildkitError:
                continue  # reported by the rule on images
            if digest is None or digest.hex == PLACEHOLDER:
                continue  # likewise: evidence is for a digest
            base = Finding(
                rule="evidence-unread",
                severity=Severity.UNKNOWN,
                file=place.file,
                line=place.line,
                subject=workload.title,
                message=f"the evidence for {name} was not read",
                remedy="check with --evidence, where the registry can be reached",
            )
            if reader is None:
                yield base
                continue
            if image not in asked:
                asked[image] = list(_judge(image, base, settings, reader))
            for finding in asked[image]:
                yield replace(finding, file=place.file, line=place.line, subject=workload.title)


def _judge(image: str, base: Finding, settings: Settings, reader: EvidenceReader) -> Iterator[Finding]:
    try:
        reference = Reference.parse(image, default_tag=None)
        found = reader.read(reference)
    except RegistryError as error:
        yield replace(base, message=f"the evidence could not be read: {error.message}", severity=Severity.ERROR)
        return
    except BuildkitError as error:
        yield replace(base, message=f"the evidence makes no sense: {error.message}", severity=Severity.ERROR)
        return
    for objection in judge(found, reference.digest, settings.evidence):
        yield replace(
            base, rule=objection.rule, message=objection.message, remedy=objection.remedy, severity=Severity.ERROR
        )
