"""A small part of kustomize, for machines that have neither ``kustomize`` nor ``kubectl``.

It renders what plain overlays use: resources and bases, namespace, name prefix and suffix, labels and annotations,
images, replicas, generated ConfigMaps and Secrets with their hash, patches (strategic merge and JSON 6902) and
replacements. A field or form beyond that is an error that names it, never a silent omission; the tests hold its output
equal to kustomize's. Nothing outside the file system is read: a remote resource is an error.

Sources: kustomization reference (Kubernetes SIG CLI), "Declarative management using kustomize", RFC 6902 and RFC 6901
for patches, and kustomize 5.8's output.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from buildkit.deploy.documents import MAX_FILE, Document, Field, read_documents, read_file, resolve_kustomize
from buildkit.deploy.namehash import name_hash
from buildkit.errors import UsageError

FILE_NAMES = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_KNOWN = frozenset(
    [
        "apiVersion",
        "kind",
        "metadata",
        "resources",
        "bases",
        "namespace",
        "namePrefix",
        "nameSuffix",
        "labels",
        "commonLabels",
        "commonAnnotations",
        "images",
        "replicas",
        "configMapGenerator",
        "secretGenerator",
        "generatorOptions",
        "patches",
        "patchesStrategicMerge",
        "patchesJson6902",
        "replacements",
        "buildMetadata",
        "sortOptions",
    ]
)
_LISTS = _KNOWN - {"apiVersion", "kind", "metadata", "namespace", "namePrefix", "nameSuffix"}
_LISTS -= {"commonLabels", "commonAnnotations", "generatorOptions", "sortOptions"}
_TEXTS = ("namespace", "namePrefix", "nameSuffix")
_MAX_DEPTH = 100
_MAX_BASES = 500
"""Bases that are taken in, counted as often as they are: a few that name each other twice would double each time."""
_PATH_FIELDS = ("resources", "bases", "components")
_CLUSTER_KINDS = frozenset(
    [
        "Namespace",
        "Node",
        "PersistentVolume",
        "ClusterRole",
        "ClusterRoleBinding",
        "StorageClass",
        "CustomResourceDefinition",
        "PriorityClass",
        "RuntimeClass",
        "IngressClass",
        "APIService",
        "CSIDriver",
        "CSINode",
        "MutatingWebhookConfiguration",
        "ValidatingWebhookConfiguration",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "VolumeAttachment",
        "CertificateSigningRequest",
        "DeviceClass",
        "ResourceSlice",
    ]
)
_ORDER = [
    "Namespace",
    "ResourceQuota",
    "StorageClass",
    "CustomResourceDefinition",
    "ServiceAccount",
    "PodSecurityPolicy",
    "Role",
    "ClusterRole",
    "RoleBinding",
    "ClusterRoleBinding",
    "ConfigMap",
    "Secret",
    "Endpoints",
    "Service",
    "LimitRange",
    "PriorityClass",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Deployment",
    "StatefulSet",
    "CronJob",
    "PodDisruptionBudget",
]
_LAST = ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"]
_LOCAL_CONFIG = "config.kubernetes.io/local-config"
_TEMPLATES = ("spec.template", "spec.jobTemplate.spec.template")
_WITH_TEMPLATE = frozenset(
    {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "Job", "CronJob"}
)
_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}

Value = dict[str, Any]


@dataclass(slots=True)
class Resource:
    """An object under way. ``original`` is its name before prefixes, by which others refer to it; ``before`` are the
    names and namespaces that it had on the way, by which patches and generators still know it."""

    value: Value
    original: str
    hashed: bool = False
    before: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.value.get("kind") or "")

    @property
    def metadata(self) -> Value:
        found = self.value.setdefault("metadata", {})
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or "")

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "default")

    @property
    def annotations(self) -> Value:
        found = self.metadata.get("annotations")
        return found if isinstance(found, dict) else {}

    @property
    def group(self) -> str:
        return str(self.value.get("apiVersion") or "").rpartition("/")[0]

    @property
    def ids(self) -> set[tuple[str, str]]:
        """Every name and namespace that it has and had."""
        return {*self.before, (self.name, self.namespace)}

    def rename(self, name: str) -> None:
        self.before.append((self.name, self.namespace))
        self.metadata["name"] = name

    def move(self, namespace: str) -> None:
        self.before.append((self.name, self.namespace))
        self.metadata["namespace"] = namespace


def find_kustomization(folder: Path) -> Path | None:
    """The kustomization file of a folder; None where it has none."""
    return next((p for n in FILE_NAMES if (p := folder / n).is_file()), None)


def render_subset(folder: Path) -> str:
    """The YAML that ``kustomize build FOLDER`` would print, up to layout. Raises UsageError, with file and line."""
    resources = _accumulate(folder.resolve(), _Bases())
    for resource in resources:
        if resource.hashed:
            resource.rename(f"{resource.name}-{name_hash(resource.kind, resource.value)}")
    _fix_references(resources, str(find_kustomization(folder)))
    kept = [r.value for r in resources if str(r.annotations.get(_LOCAL_CONFIG, "")).lower() != "true"]
    ordered = sorted(kept, key=_order)
    return yaml.dump_all(ordered, Dumper=_PlainDumper, sort_keys=True, allow_unicode=True, width=2**30)


def source_files(folder: Path) -> Iterator[Path]:
    """The kustomization and every manifest file under it that it takes in, bases included; unreadable parts are left
    out (rendering reports them)."""
    yield from _sources(folder.resolve())


def read_kustomization(folder: Path) -> Field:
    """The kustomization of a folder. Raises UsageError where there is none or it does not parse."""
    file = find_kustomization(folder)
    if file is None:
        raise UsageError(f"{folder} has no kustomization.yaml")
    documents, findings = read_file(file)
    if findings:
        raise UsageError(f"{findings[0].file}:{findings[0].line}: {findings[0].message}", hint=findings[0].remedy)
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        raise UsageError(f"{file} is not one YAML mapping")
    return documents[0].root


class _PlainDumper(yaml.SafeDumper):
    """Writes shared values out instead of as aliases, and puts quotes around a y and an n."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_PlainDumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]"), list("yYnN"))


def _sources(folder: Path) -> Iterator[Path]:
    """Depth first, in the order in which they are named; each once, so that circles end."""
    seen: set[Path] = set()
    pending = [folder]
    while pending:
        target = pending.pop()
        file = find_kustomization(target) if target.is_dir() else target
        if file is None or file in seen or not file.is_file():
            continue
        seen.add(file)
        yield file
        if not target.is_dir():
            continue
        try:
            root = read_kustomization(target)
        except UsageError:
            continue
        entries = [e for key in _PATH_FIELDS for e in root.at(key).texts]
        pending += reversed([found for e in entries if (found := _existing(target, e)) is not None])


def elsewhere(folder: Path) -> Iterator[Field]:
    """Entries of a kustomization and its bases that are not here: remote ones, which kustomize would fetch, and
    misspelt ones, which it takes for remote ones."""
    for file in source_files(folder):
        if file.name not in FILE_NAMES:
            continue
        try:
            root = read_kustomization(file.parent)
        except UsageError:
            continue  # rendering reports it
        for entry in (e for key in _PATH_FIELDS for e in root.at(key).items):
            if entry.text and _existing(file.parent, entry.text) is None:
                yield entry


def _existing(folder: Path, name: str) -> Path | None:
    """Where a path in a kustomization leads; None for what is not there, or cannot be a path."""
    if not name or "://" in name:
        return None
    try:
        target = (folder / name).resolve()
        target.stat()
    except (OSError, ValueError, RuntimeError):  # a name too long, with a NUL in it; links in a circle
        return None
    return target


def _refuse(place: Field, message: str, hint: str | None = None) -> UsageError:
    return UsageError(
        f"{place.file}:{place.line}: {message}",
        hint=hint or "install kustomize or kubectl, which render everything, or write it in a simpler way",
    )


@dataclass(frozen=True, slots=True)
class _Bases:
    """Where rendering is: the kustomizations around this one, and how many were taken in (shared by all)."""

    around: tuple[Path, ...] = ()
    taken: list[Path] = field(default_factory=list)

    def enter(self, folder: Path, place: Field) -> _Bases:
        """The same for a base. Raises UsageError for a circle, and for too many."""
        if folder in self.around:
            raise _refuse(place, f"{place.text!r} leads back to a kustomization around it", "break the circle")
        if len(self.around) > _MAX_DEPTH:
            raise _refuse(place, f"bases nest deeper than {_MAX_DEPTH}", "take them in side by side")
        self.taken.append(folder)
        if len(self.taken) > _MAX_BASES:
            raise _refuse(place, f"more than {_MAX_BASES} bases", "take each base in once")
        return self.inside(folder)

    def inside(self, folder: Path) -> _Bases:
        return _Bases((*self.around, folder), self.taken)


def _accumulate(folder: Path, bases: _Bases) -> list[Resource]:
    root = read_kustomization(folder)
    here = bases.inside(folder) if not bases.around else bases
    for key, place in root.fields:
        if key not in _KNOWN:
            raise _refuse(place, f"{key!r} is not among the fields that are rendered without kustomize")
        if place.present and not _fits(key, place):
            raise _refuse(place, f"{key} must be {'a list' if key in _LISTS else 'a text'}", "correct the field")
    resources = [r for entry in root.at("resources").items + root.at("bases").items for r in _load(entry, folder, here)]
    made = _generate(root, folder)
    for new in made:
        if any(r.kind == new.kind and r.ids & new.ids for r in resources):
            raise _refuse(root, f"{new.kind}/{new.name} is generated, and there already", "generate it once")
    resources += made
    _refuse_twins(root, resources)
    _patch(root, folder, resources)
    _namespace(root, resources)
    _refuse_twins(root, resources)  # two namespaces may have become one
    _affixes(root, resources)
    _labels(root, resources)
    _annotations(root, resources)
    _replicas(root, resources)
    _images(root, resources)
    _replacements(root, resources)
    return resources


def _pairs(place: Field) -> dict[str, str]:
    """Labels or annotations. Raises UsageError for values that are no text, as kustomize does."""
    if place.present and not (isinstance(place.value, dict) and len(place.strings) == len(place.value)):
        raise _refuse(place, "must be texts, each with a name", "put values in quotes")
    return place.strings


def _fits(key: str, place: Field) -> bool:
    """Whether a field of the kustomization has its type, as far as it matters here."""
    if key in _LISTS:
        return isinstance(place.value, list)
    return place.text is not None if key in _TEXTS else True


def _refuse_twins(root: Field, resources: Sequence[Resource]) -> None:
    seen: set[tuple[str, str, str, str]] = set()
    for resource in resources:
        identity = (str(resource.value.get("apiVersion")), resource.kind, resource.namespace, resource.name)
        if identity in seen:
            raise _refuse(root.at("resources"), f"{resource.kind}/{resource.name} comes twice", "take one of them out")
        seen.add(identity)


def _load(entry: Field, folder: Path, bases: _Bases) -> list[Resource]:
    text = entry.text
    if not text:
        raise _refuse(entry, "a resource must be the path of a file or folder", "correct the entry")
    target = _existing(folder, text)
    if target is None:
        raise _refuse(entry, f"no file or folder {text!r}", "remote resources need kustomize itself")
    if target.is_dir():
        return _accumulate(target, bases.enter(target, entry))
    if not target.is_relative_to(folder):
        raise _refuse(
            entry, f"{text!r} is outside of the folder", "move it into the folder, or make it a base of its own"
        )
    if not target.is_file():
        raise _refuse(entry, f"{text!r} is no regular file", "correct the entry")
    documents, findings = read_file(target, resolver=resolve_kustomize)
    if findings:
        raise UsageError(f"{findings[0].file}:{findings[0].line}: {findings[0].message}", hint=findings[0].remedy)
    out = []
    for document in documents:
        root = document.root
        listed = (root.at("kind").text or "").endswith("List") and isinstance(root.at("items").value, list)
        for place in root.at("items").items if listed else (root,):
            name = _check_object(place)
            out.append(Resource(value=copy.deepcopy(place.value), original=name))
    return out


def _check_object(place: Field) -> str:
    """The name of the object at ``place``. Raises UsageError where kind, metadata, name, labels or annotations are not
    what the transformers (and kustomize) take them for."""
    metadata = place.at("metadata")
    name = metadata.at("name").text
    if not place.at("kind").text or not name:
        raise _refuse(place, "is not a Kubernetes object with kind and metadata.name", "correct it")
    if place.at("apiVersion").present and place.at("apiVersion").text is None:
        raise _refuse(place.at("apiVersion"), "apiVersion is no text", "correct it")
    for part in ("labels", "annotations"):
        _pairs(metadata.at(part))
    if metadata.at("namespace").present and metadata.at("namespace").text is None:
        raise _refuse(metadata.at("namespace"), "the namespace is no text", "put it in quotes")
    return name


# Generators ----------------------------------------------------------------------------------------------------------


def _generate(root: Field, folder: Path) -> list[Resource]:
    out = []
    common = root.at("generatorOptions")
    for kind, key in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for entry in root.at(key).items:
            allowed = {"name", "namespace", "files", "literals", "envs", "env", "options", "type", "behavior"}
            for name, place in entry.fields:
                if name not in allowed or (name == "behavior" and place.text != "create"):
                    raise _refuse(place, f"{key}: {name} is not rendered without kustomize")
            out.append(_generated(kind, entry, common, folder))
    return out


def _generated(kind: str, entry: Field, common: Field, folder: Path) -> Resource:
    name = entry.at("name").text
    if not name:
        raise _refuse(entry, "a generator needs a name", "name it")
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    for item, content in _contents(entry, folder):
        if item in data or item in binary:
            raise _refuse(entry, f"key {item!r} comes twice", "name it once")
        if kind == "Secret":
            data[item] = _base64(content)
            continue
        try:
            data[item] = content.decode("utf-8")
        except UnicodeDecodeError:
            binary[item] = _base64(content)
    value: Value = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
    if data:
        value["data"] = data
    if binary:
        value["binaryData"] = binary
    if kind == "Secret":
        value["type"] = entry.at("type").text or "Opaque"
    if entry.at("namespace").text:
        value["metadata"]["namespace"] = entry.at("namespace").text
    for part in ("labels", "annotations"):
        merged = _pairs(common.at(part)) | _pairs(entry.at("options", part))
        if merged:
            value["metadata"][part] = merged
    if any(o.at("immutable").boolean for o in (common, entry.at("options"))):
        value["immutable"] = True
    plain = any(o.at("disableNameSuffixHash").boolean for o in (common, entry.at("options")))
    return Resource(value=value, original=name, hashed=not plain)


def _base64(content: bytes) -> str:
    """base64 as kustomize writes it: above 70 characters in lines of 70, each with its line break."""
    text = base64.b64encode(content).decode("ascii")
    return text if len(text) <= 70 else "".join(text[i : i + 70] + "\n" for i in range(0, len(text), 70))


def _contents(entry: Field, folder: Path) -> Iterator[tuple[str, bytes]]:
    for item in entry.at("literals").items:
        key, equals, value = (item.text or "").partition("=")
        if not equals:
            raise _refuse(item, "a literal is written KEY=VALUE", "correct it")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        yield key, value.encode()
    for item in entry.at("files").items:
        left, equals, right = (item.text or "").partition("=")
        yield (left if equals else Path(left).name), _inside(item, folder, right if equals else left)
    single = (entry.at("env"),) if entry.at("env").present else ()
    for item in entry.at("envs").items + single:
        for line in _inside(item, folder, item.text or "").decode("utf-8", "replace").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                key, equals, value = line.partition("=")
                if not equals:
                    raise _refuse(item, f"{item.text}: a line without =", "write KEY=VALUE")
                yield key.lstrip(), value.encode()


def _inside(place: Field, folder: Path, name: str) -> bytes:
    target = _existing(folder, name)
    if target is None or not (target.is_file() or target.is_dir()):
        raise _refuse(place, f"{name!r} cannot be read: there is no such file", "correct the path")
    if not target.is_relative_to(folder):
        raise _refuse(place, f"{name!r} is outside of the folder", "kustomize reads files from its own folder only")
    try:
        with target.open("rb") as handle:
            content = handle.read(MAX_FILE + 1)
    except OSError as error:
        raise _refuse(place, f"{name!r} cannot be read: {error.strerror or error}", "correct the path") from error
    if len(content) > MAX_FILE:
        raise _refuse(place, f"{name!r} is larger than {MAX_FILE} bytes", "an object holds at most 1 MiB")
    return content


# Transformers --------------------------------------------------------------------------------------------------------


def _namespace(root: Field, resources: Sequence[Resource]) -> None:
    namespace = root.at("namespace").text
    if not namespace:
        return
    for resource in resources:
        if resource.kind == "Namespace":
            resource.rename(namespace)
        elif resource.kind not in _CLUSTER_KINDS:
            resource.move(namespace)
        if resource.kind in ("RoleBinding", "ClusterRoleBinding"):
            for subject in resource.value.get("subjects") or []:
                if (
                    isinstance(subject, dict)
                    and subject.get("kind") == "ServiceAccount"
                    and subject.get("name") == "default"
                ):
                    subject["namespace"] = namespace


def _affixes(root: Field, resources: Sequence[Resource]) -> None:
    prefix, suffix = root.at("namePrefix").text or "", root.at("nameSuffix").text or ""
    if prefix or suffix:
        for resource in resources:
            if resource.kind not in ("Namespace", "CustomResourceDefinition", "APIService"):
                resource.rename(f"{prefix}{resource.name}{suffix}")


def _labels(root: Field, resources: Sequence[Resource]) -> None:
    common = _pairs(root.at("commonLabels"))
    if common:
        for resource in resources:
            _label(resource, common, selectors=True, templates=True)
    for entry in root.at("labels").items:
        if entry.at("fields").present:
            raise _refuse(entry.at("fields"), "labels: fields is not rendered without kustomize")
        selectors = bool(entry.at("includeSelectors").boolean)
        for resource in resources:
            templates = selectors or bool(entry.at("includeTemplates").boolean)
            _label(resource, _pairs(entry.at("pairs")), selectors=selectors, templates=templates)


def _label(resource: Resource, pairs: Mapping[str, str], *, selectors: bool, templates: bool) -> None:
    _child(resource.metadata, "labels").update(pairs)
    spec = resource.value.get("spec")
    if not isinstance(spec, dict):
        return
    if templates and resource.kind in _WITH_TEMPLATE:
        for path in _TEMPLATES:
            template = _dig(resource.value, path)
            if isinstance(template, dict):
                _child(_child(template, "metadata"), "labels").update(pairs)
        if resource.kind == "CronJob" and isinstance(spec.get("jobTemplate"), dict):
            _child(_child(spec["jobTemplate"], "metadata"), "labels").update(pairs)
    if templates and resource.kind == "StatefulSet" and isinstance(spec.get("volumeClaimTemplates"), list):
        for claim in (c for c in spec["volumeClaimTemplates"] if isinstance(c, dict)):
            _child(_child(claim, "metadata"), "labels").update(pairs)
    if selectors:
        if resource.kind in ("Service", "ReplicationController"):
            _child(spec, "selector").update(pairs)
        elif resource.kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
            _child(_child(spec, "selector"), "matchLabels").update(pairs)
        for path in _SELECTORS:
            for found in _found(resource.value, path):
                found.update(pairs)


_POD_SELECTORS = (
    "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution.*.podAffinityTerm.labelSelector.matchLabels",
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution.*.labelSelector.matchLabels",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution.*.podAffinityTerm.labelSelector.matchLabels",
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.*.labelSelector.matchLabels",
    "topologySpreadConstraints.*.labelSelector.matchLabels",
)
_SELECTORS = (
    "spec.podSelector.matchLabels",
    "spec.ingress.*.from.*.podSelector.matchLabels",
    "spec.egress.*.to.*.podSelector.matchLabels",
    "spec.selector.matchLabels",
    *(f"spec.template.spec.{path}" for path in _POD_SELECTORS),
)
"""Selectors that get a common label where they are there (kustomize's commonLabels field specs)."""


def _found(value: Any, path: str) -> Iterator[Value]:
    """The mappings at a dotted path; ``*`` is every element of a list."""
    step, _, rest = path.partition(".")
    if step == "*":
        children = value if isinstance(value, list) else []
    else:
        children = [value[step]] if isinstance(value, dict) and step in value else []
    for child in children:
        if rest:
            yield from _found(child, rest)
        elif isinstance(child, dict):
            yield child


def _annotations(root: Field, resources: Sequence[Resource]) -> None:
    pairs = _pairs(root.at("commonAnnotations"))
    if not pairs:
        return
    for resource in resources:
        _child(resource.metadata, "annotations").update(pairs)
        for path in _TEMPLATES if resource.kind in _WITH_TEMPLATE else ():
            template = _dig(resource.value, path)
            if isinstance(template, dict):
                _child(_child(template, "metadata"), "annotations").update(pairs)
        job = _dig(resource.value, "spec.jobTemplate")
        if resource.kind == "CronJob" and isinstance(job, dict):
            _child(_child(job, "metadata"), "annotations").update(pairs)


def _replicas(root: Field, resources: Sequence[Resource]) -> None:
    for entry in root.at("replicas").items:
        name, count = entry.at("name").text, entry.at("count").integer
        hits = [r for r in resources if r.original == name and r.kind in _SCALABLE]
        if count is None or not hits:
            raise _refuse(entry, f"replicas: nothing of the name {name!r} to scale", "correct name and count")
        for resource in hits:
            _child(resource.value, "spec")["replicas"] = count


def _images(root: Field, resources: Sequence[Resource]) -> None:
    for entry in root.at("images").items:
        name = entry.at("name").text
        if not name:
            raise _refuse(entry, "images: an entry needs a name", "name the image to replace")
        for resource in resources:
            for container in _image_holders(resource.value):
                container["image"] = replace_image(container["image"], entry)


def replace_image(image: str, entry: Field) -> str:
    """``image`` after one entry of ``images:`` (name, newName, newTag, digest)."""
    head, at, digest = image.partition("@")
    name, colon, tag = head.rpartition(":")
    if not colon or "/" in tag:
        name, tag = head, ""
    if name != entry.at("name").text:
        return image
    name = entry.at("newName").text or name
    new_tag, new_digest = entry.at("newTag").text, entry.at("digest").text
    if new_tag and new_digest:
        return f"{name}:{new_tag}@{new_digest}"
    if new_tag:
        return f"{name}:{new_tag}"
    if new_digest:
        return f"{name}@{new_digest}"
    return name + (f":{tag}" if tag else "") + (f"@{digest}" if at else "")


def _image_holders(value: Any) -> Iterator[Value]:
    if isinstance(value, dict):
        for key, child in value.items():
            if key in ("containers", "initContainers") and isinstance(child, list):
                yield from (c for c in child if isinstance(c, dict) and isinstance(c.get("image"), str))
            else:
                yield from _image_holders(child)
    elif isinstance(value, list):
        for child in value:
            yield from _image_holders(child)


# Patches -------------------------------------------------------------------------------------------------------------


def _patch(root: Field, folder: Path, resources: list[Resource]) -> None:
    for item in root.at("patchesStrategicMerge").items:
        _apply_patch(item, folder, item.text or "", None, resources)
    for key in ("patches", "patchesJson6902"):
        for item in root.at(key).items:
            for name, place in item.fields:
                if name not in ("path", "patch", "target"):
                    raise _refuse(place, f"patches: {name} is not rendered without kustomize")
            path = item.at("path").text
            target = item.at("target")
            _apply_patch(
                item, folder, path or item.at("patch").text or "", target if target.present else None, resources
            )


def _apply_patch(item: Field, folder: Path, text: str, target: Field | None, resources: list[Resource]) -> None:
    inline = "\n" in text or ":" in text
    body = text if inline else _inside(item, folder, text).decode("utf-8", "replace")
    # JSON 6902 patches are read as the kustomization is, strategic ones as resources are.
    documents, findings = read_documents(body, item.file)
    if not any(isinstance(d.value, list) for d in documents):
        documents, findings = read_documents(body, item.file, resolve_kustomize)
    if findings:
        raise _refuse(item, f"the patch does not parse: {findings[0].message}", "correct the patch")
    for document in documents:
        patch = document.value
        hits = _targets(item, patch, target, resources)
        if not hits and target is None:
            raise _refuse(item, "the patch matches no resource", "correct its kind and name")
        for resource in hits:
            if isinstance(patch, list):
                for operation in patch:
                    _json_patch(item, resource.value, operation)
            elif isinstance(patch, dict):
                if patch.get("$patch") == "delete":
                    resources.remove(resource)
                    continue
                body_only = {k: v for k, v in patch.items() if k not in ("apiVersion", "kind")}
                if isinstance(body_only.get("metadata"), dict):
                    body_only["metadata"] = {
                        k: v for k, v in body_only["metadata"].items() if k not in ("name", "namespace")
                    }
                resource.value = _merge(resource.value, body_only, resource.kind)
            else:
                raise _refuse(item, "a patch is a mapping or a list of operations", "correct the patch")
            _check_patched(item, resource)


def _check_patched(item: Field, resource: Resource) -> None:
    """What a patch has made must still be an object. Raises UsageError, at the patch."""
    try:
        _check_object(Document(file=item.file, value=resource.value, lines={}).root)
    except UsageError as error:
        raise _refuse(item, f"what it makes {error.message.partition(': ')[2]}", "correct the patch") from error


def _targets(item: Field, patch: Any, target: Field | None, resources: Sequence[Resource]) -> list[Resource]:
    if target is None:
        if not isinstance(patch, dict):
            raise _refuse(item, "a JSON 6902 patch needs a target", "add target: with kind and name")
        metadata = patch["metadata"] if isinstance(patch.get("metadata"), dict) else {}
        wanted = (metadata.get("name"), str(metadata.get("namespace") or "default"))
        group = str(patch.get("apiVersion") or "").rpartition("/")[0]
        return [r for r in resources if (r.group, r.kind) == (group, patch.get("kind")) and wanted in r.ids]
    return [r for r in resources if _selected(target, r)]


def _selected(target: Field, resource: Resource) -> bool:
    """kustomize's selector: anchored regular expressions for names, exact group, version and kind."""
    group, _, version = str(resource.value.get("apiVersion") or "").rpartition("/")
    for key, actual in (("group", group), ("version", version)):
        wanted = target.at(key).text
        if wanted and wanted != actual:
            return False
    for key, names in (
        ("kind", [resource.kind]),
        ("name", [resource.name, resource.original]),
        ("namespace", [resource.namespace]),
    ):
        wanted = target.at(key).text
        if wanted:
            try:
                if not any(re.fullmatch(wanted, name) for name in names):
                    return False
            except re.error as error:
                raise _refuse(target, f"{wanted!r} is not a regular expression", "correct it") from error
    for key, part in (("labelSelector", "labels"), ("annotationSelector", "annotations")):
        wanted = target.at(key).text
        if wanted:
            have = resource.metadata.get(part) or {}
            for term in wanted.split(","):
                name, equals, value = term.partition("=")
                if not equals or name.endswith("!"):
                    raise _refuse(target.at(key), f"{wanted!r} is not rendered without kustomize")
                if have.get(name.strip()) != value.removeprefix("=").strip():
                    return False
    return True


def _merge(old: Any, patch: Any, kind: str, key: str = "") -> Any:
    """Strategic merge (Kubernetes, "Update API objects in place using kubectl patch")."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace":
            return {k: copy.deepcopy(v) for k, v in patch.items() if k != "$patch"}
        out = dict(old) if isinstance(old, dict) else {}
        for name, value in patch.items():
            if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
                out.pop(name, None)
                continue
            merged = _merge(out.get(name), value, kind, name)
            if merged == {} and value:
                out.pop(name, None)  # what a patch has emptied goes
            else:
                out[name] = merged
        return out
    if isinstance(patch, list) and isinstance(old, list):
        port = "port" if kind == "Service" else "containerPort"
        keys = (port,) if key == "ports" else _MERGE_KEYS.get(key)
        if keys is not None and all(isinstance(e, dict) for e in [*old, *patch]):
            if keys == ("containerPort",) and any("protocol" in e for e in [*old, *patch]):
                raise UsageError(
                    "a patch of container ports with a protocol is not rendered without kustomize",
                    hint="install kustomize or kubectl, or leave the protocol out",
                )
            return _merge_lists(old, patch, keys, kind)
    return copy.deepcopy(patch)


def _merge_lists(old: list[Value], patch: list[Value], keys: Sequence[str], kind: str) -> list[Value]:
    def identity(entry: Value) -> tuple[Any, ...]:
        return tuple(entry.get(k) for k in keys)

    if any(e.get("$patch") == "replace" for e in patch):
        return [copy.deepcopy(e) for e in patch if e.get("$patch") != "replace"]
    # kustomize puts the patch's elements first, in the patch's order, whether they are new or not.
    known = {identity(e): e for e in old}
    changes = {identity(e) for e in patch}
    merged = [_merge(known.get(identity(e)), e, kind) for e in patch if e.get("$patch") != "delete"]
    return merged + [e for e in old if identity(e) not in changes]


def _json_patch(item: Field, value: Value, operation: Any) -> None:
    """One operation of RFC 6902. Raises UsageError where there is nothing at its path."""
    given = operation if isinstance(operation, dict) else {}
    op, pointer, source = given.get("op"), given.get("path"), given.get("from")
    if op not in ("add", "remove", "replace", "test", "copy", "move"):
        raise _refuse(item, f"operation {op!r} is none of RFC 6902", "correct the patch")
    wanted = copy.deepcopy(given.get("value"))
    try:
        if op in ("copy", "move"):
            parent, key = _pointed(value, source)
            wanted = copy.deepcopy(parent[key])
            if op == "move":
                del parent[key]
        here, key = _pointed(value, pointer, new=op in ("add", "copy", "move"))
        if op in ("add", "copy", "move"):
            if isinstance(here, list):
                here.insert(key, wanted)
            else:
                here[key] = wanted
        elif op == "test" and here[key] != wanted:
            raise _refuse(item, f"the test of {pointer} fails", "correct the patch")
        elif op == "remove":
            del here[key]
        elif op == "replace":
            if isinstance(here, list):
                here[key]  # RFC 6902, 4.3: the target must exist; kustomize does not ask that of a mapping's member
            here[key] = wanted
    except (LookupError, TypeError, ValueError) as error:
        raise _refuse(item, f"{op} {pointer}: there is nothing at this path", "correct the patch") from error


def _pointed(value: Any, pointer: object, *, new: bool = False) -> tuple[Any, Any]:
    """What holds the value that a pointer (RFC 6901) names, and its key there. Raises LookupError, TypeError or
    ValueError; ``new``: the place may be one that is not there yet."""
    if not isinstance(pointer, str) or not pointer.startswith("/"):
        raise ValueError("no pointer")
    *steps, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]
    for step in steps:
        value = value[_index(step)] if isinstance(value, list) else value[step]
    if not isinstance(value, list):
        if not isinstance(value, dict):
            raise TypeError("neither list nor mapping")
        return value, last
    if last == "-":
        return value, len(value)
    index = _index(last)
    if index >= len(value) + new:
        raise IndexError(index)
    return value, index


def _index(text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        raise ValueError(text)
    return int(text)


# Replacements --------------------------------------------------------------------------------------------------------


def _replacements(root: Field, resources: Sequence[Resource]) -> None:
    for entry in root.at("replacements").items:
        if entry.at("path").present:
            raise _refuse(
                entry, "replacements: path is not rendered without kustomize", "write the replacement in place"
            )
        source = entry.at("source")
        hits = [r for r in resources if _exactly(source, r)]
        if len(hits) != 1:
            raise _refuse(source, f"the source matches {len(hits)} resources", "it must match exactly one")
        if source.at("options").present:
            raise _refuse(source.at("options"), "replacements: source options are not rendered without kustomize")
        value: Any = hits[0].value
        for step in split_path(source.at("fieldPath").text or "metadata.name"):
            value = next(iter(_step(value, step)), None)
        if value is None or isinstance(value, dict):
            raise _refuse(source, "the source has no such field", "correct fieldPath")
        for target in entry.at("targets").items:
            _replace_in(target, value, resources)


def _exactly(selector: Field, resource: Resource) -> bool:
    group, _, version = str(resource.value.get("apiVersion") or "").rpartition("/")
    wanted = {
        "group": (group,),
        "version": (version,),
        "kind": (resource.kind,),
        "name": (resource.name, resource.original),
        "namespace": (resource.namespace,),
    }
    return all(selector.at(k).text in (None, *actual) for k, actual in wanted.items())


def _replace_in(target: Field, value: Any, resources: Sequence[Resource]) -> None:
    for option, place in target.at("options").fields:
        if option != "create":
            raise _refuse(place, f"replacements: option {option} is not rendered without kustomize")
    create = bool(target.at("options", "create").boolean)
    rejected = target.at("reject").items
    for resource in resources:
        if not _selected(target.at("select"), resource) or any(_selected(r, resource) for r in rejected):
            continue
        for path in target.at("fieldPaths").items or (target.at("fieldPaths"),):
            _set_path(path, resource.value, split_path(path.text or "metadata.name"), value, create)


def _step(here: Any, step: str) -> list[Any]:
    """What a step of a field path leads to: a key, an index, ``[name=value]``, or ``*`` for every element."""
    if isinstance(here, dict):
        return [here[step]] if step in here else []
    if not isinstance(here, list):
        return []
    if step.startswith("[") and step.endswith("]"):
        name, _, wanted = step[1:-1].partition("=")
        return [e for e in here if isinstance(e, dict) and str(e.get(name)) == wanted]
    if step == "*":
        return here
    return [here[int(step)]] if re.fullmatch(r"[0-9]{1,9}", step) and int(step) < len(here) else []


def _like(old: Any, value: Any, key: str, place: Field) -> Any:
    """``value`` for the place of ``old``: a text stays a text, and labels and annotations are texts."""
    texts = any(f".{part}.{key}" in f".{place.text}" for part in ("labels", "annotations"))
    if (isinstance(old, str) or texts) and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return copy.deepcopy(value)


def _set_path(place: Field, here: Any, steps: Sequence[str], value: Any, create: bool) -> None:
    if len(steps) == 1 and isinstance(here, dict):
        if steps[0] not in here and not create:
            raise _refuse(place, f"the target has no field {steps[0]!r}", "correct fieldPaths, or set options.create")
        here[steps[0]] = _like(here.get(steps[0]), value, steps[0], place)
        return
    if isinstance(here, list):
        step = steps[0]
        chosen = _step(here, step)
        if not chosen:
            raise _refuse(place, f"the target has nothing at {step!r}", "correct fieldPaths")
        for element in chosen:
            _set_path(place, element, steps[1:], value, create)
        return
    child = here.get(steps[0]) if isinstance(here, dict) else None
    if child is None and create and isinstance(here, dict):
        child = here[steps[0]] = {}
    if child is None:
        raise _refuse(place, f"the target has no field {steps[0]!r}", "correct fieldPaths, or set options.create")
    _set_path(place, child, steps[1:], value, create)


def split_path(path: str) -> list[str]:
    """A field path of a replacement: dots divide, ``\\.`` is a dot in a key, ``[k=v]`` picks from a list."""
    steps = re.findall(r"\[[^\]]*\]|(?:\\.|[^.\[\\])+", path)
    return [re.sub(r"\\(.)", r"\1", s) for s in steps]


# References ----------------------------------------------------------------------------------------------------------


def _fix_references(resources: Sequence[Resource], resources_of: str) -> None:
    """Point the names in one object to another that a prefix, suffix or hash has renamed. Raises UsageError for a name
    that more than one of them had."""
    renamed: dict[tuple[str, str], list[Resource]] = {}
    for resource in resources:
        for old in {resource.original, *(name for name, _ in resource.before)} - {resource.name}:
            renamed.setdefault((resource.kind, old), []).append(resource)
    if not renamed:
        return

    def lookup_in(namespace: str) -> Lookup:
        def lookup(kind: str, name: Any) -> Any:
            known = renamed.get((kind, name), []) if isinstance(name, str) else []
            hits = [r for r in known if r.namespace == namespace or r.kind in _CLUSTER_KINDS]
            if len({r.name for r in hits}) > 1:
                raise UsageError(
                    f"{resources_of}: {kind} {name!r} can mean {' or '.join(repr(r.name) for r in hits)}",
                    hint="install kustomize or kubectl, or give them different names",
                )
            return hits[0].name if hits else name

        return lookup

    for resource in resources:
        _rename_in(resource.value, resource, lookup_in(resource.namespace))


Lookup = Callable[[str, Any], Any]
_REFERENCES = {
    "configMap": ("ConfigMap", "name"),
    "configMapRef": ("ConfigMap", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "secretRef": ("Secret", "name"),
    "secretKeyRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


_SCALABLE = ("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController")


def _rename_in(value: Any, resource: Resource, lookup: Lookup, key: str = "") -> None:
    if isinstance(value, list):
        for child in value:
            if key == "subjects" and isinstance(child, dict) and child.get("kind") == "ServiceAccount":
                new = lookup("ServiceAccount", child.get("name"))
                if new != child.get("name") and child.get("namespace") in (None, resource.namespace):
                    child["name"], child["namespace"] = new, resource.namespace
            if key == "imagePullSecrets" and isinstance(child, dict):
                child["name"] = lookup("Secret", child.get("name"))
            if key == "tls" and isinstance(child, dict) and "secretName" in child:
                child["secretName"] = lookup("Secret", child["secretName"])
            _rename_in(child, resource, lookup, key)
        return
    if not isinstance(value, dict):
        return
    if key in _REFERENCES:
        kind, name = _REFERENCES[key]
        for field_name in {name, "name"} & set(value):
            value[field_name] = lookup(kind, value[field_name])
    if key == "scaleTargetRef" and "name" in value:
        # kustomize looks the name up among all kinds that can be scaled.
        for kind in dict.fromkeys([str(value.get("kind")), *_SCALABLE]):
            new = lookup(kind, value["name"])
            if new != value["name"]:
                value["name"] = new
                break
    if key == "service" and resource.kind == "Ingress" and "name" in value:
        value["name"] = lookup("Service", value["name"])
    if key == "roleRef" and "name" in value:
        value["name"] = lookup(str(value.get("kind")), value["name"])
    if "serviceAccountName" in value:
        value["serviceAccountName"] = lookup("ServiceAccount", value["serviceAccountName"])
    if resource.kind == "StatefulSet" and key == "spec" and "serviceName" in value:
        value["serviceName"] = lookup("Service", value["serviceName"])
    for name, child in value.items():
        if not (key == "" and name == "metadata"):
            _rename_in(child, resource, lookup, name)


# Small helpers -------------------------------------------------------------------------------------------------------


def _child(parent: Value, key: str) -> Value:
    found = parent.get(key)
    if not isinstance(found, dict):
        found = parent[key] = {}
    return found


def _dig(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _order(value: Value) -> tuple[int, str, str, str]:
    """kustomize's order: the kinds that others need first, then by group, version, kind, namespace and name."""
    kind = str(value.get("kind"))
    rank = _ORDER.index(kind) if kind in _ORDER else 1000 + _LAST.index(kind) if kind in _LAST else 500
    group, _, version = str(value.get("apiVersion") or "").rpartition("/")
    metadata = value.get("metadata") or {}
    namespace, name = str(metadata.get("namespace") or "~X"), str(metadata.get("name") or "")
    return rank, f"{group or '~G'}_{version}_{kind}", namespace, name
