"""The Kubernetes objects that the rules look at, read leniently out of documents.

Sources: Kubernetes API reference v1.3x (core/v1 PodSpec, Service, Node; apps/v1; batch/v1), "Assign pods to nodes",
"Taints and tolerations", "Sidecar containers".
"""

from __future__ import annotations

import re
from collections.abc import Container as Collection_
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from buildkit.deploy.documents import Document, Field

DEFAULT_NAMESPACE = "default"
_CONTROLLERS = {
    "Deployment",
    "StatefulSet",
    "ReplicaSet",
    "ReplicationController",
    "DaemonSet",
    "Job",
    "CronJob",
    "Pod",
}
_QUANTITY = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?", re.ASCII)
_SUFFIX = {suffix: Fraction(10) ** power for suffix, power in zip("num", (-9, -6, -3), strict=True)}
_SUFFIX |= {suffix: Fraction(10) ** (3 * power) for power, suffix in enumerate("kMGTPE", 1)}
_SUFFIX |= {f"{suffix}i": Fraction(2) ** (10 * power) for power, suffix in enumerate("KMGTPE", 1)}
_LIST_DEPTH = 3

Role = Literal["main", "init", "sidecar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """Any object: what kind it says it is, its name and where it stands."""

    api_version: str
    kind: str
    name: str
    namespace: str
    field: Field

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name or '(no name)'}"

    @property
    def labels(self) -> dict[str, str]:
        return self.field.at("metadata", "labels").strings

    @property
    def annotations(self) -> dict[str, str]:
        return self.field.at("metadata", "annotations").strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a pod template. ``sidecar`` is an init container that keeps running (restartPolicy Always)."""

    name: str
    role: Role
    field: Field

    @property
    def image(self) -> str | None:
        return self.field.at("image").text

    @property
    def words(self) -> tuple[str, ...]:
        """Command and arguments, in order."""
        return self.field.at("command").texts + self.field.at("args").texts

    @property
    def environment(self) -> dict[str, str]:
        """Variables with a literal value; booleans and numbers (which Kubernetes refuses) are left to the schema."""
        return {
            name: value
            for entry in self.field.at("env").items
            if (name := entry.at("name").text) and (value := entry.at("value").text) is not None
        }

    @property
    def ports(self) -> tuple[Field, ...]:
        return self.field.at("ports").items

    def port_numbers(self) -> dict[int, str | None]:
        """Declared container ports with their names."""
        return {n: p.at("name").text for p in self.ports if (n := p.at("containerPort").integer) is not None}

    def port_names(self) -> dict[str, int]:
        return {name: number for number, name in self.port_numbers().items() if name}

    def cards(self, resource: str) -> int | None:
        """Cards it asks for; None where the amount is not a whole number. Limits count where requests are not given.

        Extended resources are not overcommitted: a request without a limit, or another one, is refused by the API.
        """
        limit, request = (
            self.field.at("resources", "limits", resource),
            self.field.at("resources", "requests", resource),
        )
        chosen = request if request.present else limit
        return quantity(chosen.value) if chosen.present else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An object that makes pods. ``replicas`` is how many at once; None for one on every node (DaemonSet). ``labels``
    are those of the pods."""

    object: Object
    replicas: int | None
    replicas_field: Field
    template: Field
    containers: tuple[Container, ...]
    labels: Mapping[str, str]

    @property
    def title(self) -> str:
        return self.object.title

    @property
    def namespace(self) -> str:
        return self.object.namespace

    @property
    def name(self) -> str:
        return self.object.name

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the pods."""
        return self.template.at("metadata", "annotations").strings

    @property
    def spec(self) -> Field:
        return self.template.at("spec")

    @property
    def runs(self) -> bool:
        return self.replicas != 0

    @property
    def main(self) -> tuple[Container, ...]:
        """The containers that serve: the main ones and sidecars."""
        return tuple(c for c in self.containers if c.role != "init")

    def cards(self, resource: str) -> int:
        """Cards of one pod: the sum over what runs together, or an init container's wish where that is more.

        Kubernetes, "Resource sharing within containers": init containers run one after another, before the rest.
        """
        together = sum(c.cards(resource) or 0 for c in self.main)
        sidecars, peak = 0, 0
        for container in self.containers:
            wish = container.cards(resource) or 0
            if container.role == "sidecar":
                sidecars += wish
                peak = max(peak, sidecars)
            elif container.role == "init":
                peak = max(peak, sidecars + wish)
        return max(together, peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with ``cards``.

    ``labels`` are None where only the number of cards is known: then any pod may land there that does not ask for
    something else than ``pool``, the labels that the node must have so that others can.
    """

    name: str
    cards: int
    labels: Mapping[str, str] | None = None
    taints: tuple[Mapping[str, str], ...] = ()
    pool: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def takes(self, workload: Workload) -> bool:
        """Whether the scheduler may place the pods here, cards aside: name, selector, required affinity, taints."""
        spec = workload.spec
        wanted_name = spec.at("nodeName").text
        if wanted_name and self.labels is not None and wanted_name != self.name:
            return False
        if not all(_tolerates(spec.at("tolerations"), taint) for taint in self.taints):
            return False
        if self.labels is None:
            return all(self.pool.get(key, value) == value for key, value in required_labels(workload).items())
        if any(self.labels.get(k) != v for k, v in spec.at("nodeSelector").strings.items()):
            return False
        terms = spec.at(
            "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
        )
        return not terms.items or any(self._matches(term) for term in terms.items)

    def _matches(self, term: Field) -> bool:
        assert self.labels is not None
        fields = {"metadata.name": self.name}
        return all(_requirement(e, self.labels) for e in term.at("matchExpressions").items) and all(
            _requirement(e, fields) for e in term.at("matchFields").items
        )


def required_labels(workload: Workload) -> dict[str, str]:
    """The labels that a node surely has which runs the pods: from the node's name, the selector, and an affinity that
    leaves one value."""
    spec = workload.spec
    wanted = dict(spec.at("nodeSelector").strings)
    terms = spec.at(
        "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
    ).items
    for expression in terms[0].at("matchExpressions").items if len(terms) == 1 else ():
        key, values = expression.at("key").text, expression.at("values").texts
        if key and expression.at("operator").text == "In" and len(values) == 1:
            wanted.setdefault(key, values[0])
    if spec.at("nodeName").text:
        wanted["kubernetes.io/hostname"] = spec.at("nodeName").value
    return wanted


def supposed_nodes(workloads: Sequence[Workload], cards: int, resource: str) -> tuple[Node, ...]:
    """Nodes with ``cards`` each where nothing names the nodes: no more of them than the pods' own selectors tell apart.

    Two selectors that contradict each other need two nodes; those that do not are taken to mean one.
    """
    pools: list[dict[str, str]] = []
    for workload in workloads:
        wanted = required_labels(workload)
        if not wanted or not workload.cards(resource):
            continue
        fitting = next((p for p in pools if all(p.get(k, v) == v for k, v in wanted.items())), None)
        if fitting is None:
            pools.append(wanted)
        else:
            fitting.update(wanted)
    if len(pools) < 2:
        return (Node(name="node", cards=cards, pool=MappingProxyType({})),)
    return tuple(
        Node(
            name=pool.get("kubernetes.io/hostname") or ",".join(f"{k}={v}" for k, v in sorted(pool.items())),
            cards=cards,
            pool=MappingProxyType(pool),
        )
        for pool in pools
    )


def quantity(value: object) -> int | None:
    """Whole cards out of a resource quantity (``2``, ``"2"``, ``2k``, ``2000m``); None for anything else.

    Source: Kubernetes API reference, "Quantity". YAML's 1.0 is JSON's 1.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**63 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 <= value < 2**63 else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= 40 else None
    if match is None:
        return None
    number, suffix = match.groups()
    factor = _SUFFIX.get(suffix or "")
    if factor is None:
        factor = Fraction(10) ** int(suffix[1:]) if suffix else Fraction(1)
    exact = Fraction(number if number[-1] != "." else number[:-1]) * factor
    return int(exact) if exact.denominator == 1 and exact < 2**63 else None


def expand(documents: Sequence[Document]) -> Iterator[Field]:
    """The objects in documents; ``List`` kinds are opened."""
    for document in documents:
        yield from _expand(document.root, 0)


def _expand(field: Field, depth: int) -> Iterator[Field]:
    kind = field.at("kind").text or ""
    if kind.endswith("List") and isinstance(field.at("items").value, list) and depth < _LIST_DEPTH:
        for item in field.at("items").items:
            yield from _expand(item, depth + 1)
    else:
        yield field


def read_object(field: Field) -> Object:
    metadata = field.at("metadata")
    return Object(
        api_version=field.at("apiVersion").text or "",
        kind=field.at("kind").text or "",
        name=metadata.at("name").text or metadata.at("generateName").text or "",
        namespace=metadata.at("namespace").text or DEFAULT_NAMESPACE,
        field=field,
    )


def is_owned(thing: Object, known: Collection_[tuple[str, str, str]]) -> bool:
    """Whether a controller among ``known`` (kind, namespace, name) made the object: ``kubectl get`` lists both, and the
    pods of a Deployment are not there twice."""
    for owner in thing.field.at("metadata", "ownerReferences").items:
        key = (owner.at("kind").text or "", thing.namespace, owner.at("name").text or "")
        if owner.at("controller").boolean and key in known:
            return True
    return False


def read_workload(thing: Object) -> Workload | None:
    """A workload, if the object makes pods: the built-in kinds, and any custom kind with a pod template in its spec."""
    spec = thing.field.at("spec")
    if thing.kind == "Pod":
        template = thing.field
    elif thing.kind == "CronJob":
        template = spec.at("jobTemplate", "spec", "template")
    else:
        template = spec.at("template")
    if thing.kind not in _CONTROLLERS and not template.at("spec", "containers").items:
        return None
    replicas, field = _replicas(thing, spec)
    return Workload(
        object=thing,
        replicas=replicas,
        replicas_field=field if field.present else thing.field,
        template=template,
        containers=tuple(_containers(template.at("spec"))),
        labels=template.at("metadata", "labels").strings,
    )


def _replicas(thing: Object, spec: Field) -> tuple[int | None, Field]:
    if thing.kind == "DaemonSet":
        return None, spec
    if thing.kind == "Pod":
        return 1, thing.field
    if thing.kind in ("Job", "CronJob"):
        job = spec if thing.kind == "Job" else spec.at("jobTemplate", "spec")
        if spec.at("suspend").boolean:
            return 0, spec.at("suspend")
        parallel, completions = job.at("parallelism"), job.at("completions").integer
        wanted = 1 if parallel.integer is None else parallel.integer
        return max(0, wanted if completions is None else min(wanted, completions)), parallel
    field = spec.at("replicas")
    return 1 if field.integer is None else max(0, field.integer), field


def _containers(pod: Field) -> Iterator[Container]:
    for entry in pod.at("initContainers").items:
        role: Role = "sidecar" if entry.at("restartPolicy").text == "Always" else "init"
        yield Container(name=entry.at("name").text or "", role=role, field=entry)
    for entry in pod.at("containers").items:
        yield Container(name=entry.at("name").text or "", role="main", field=entry)


def read_node(thing: Object, resource: str) -> Node:
    """What a Node object says it has: allocatable cards (capacity where that is not given), labels and taints."""
    status = thing.field.at("status")
    amount = status.at("allocatable", resource)
    if not amount.present:
        amount = status.at("capacity", resource)
    spec = thing.field.at("spec")
    taints = [t.strings for t in spec.at("taints").items if t.at("effect").text in ("NoSchedule", "NoExecute")]
    if spec.at("unschedulable").boolean:
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    labels = {"kubernetes.io/hostname": thing.name} | thing.labels
    return Node(name=thing.name, cards=quantity(amount.value) or 0, labels=labels, taints=tuple(taints))


def _tolerates(tolerations: Field, taint: Mapping[str, str]) -> bool:
    for toleration in tolerations.items:
        effect, key = toleration.at("effect").text, toleration.at("key").text
        if effect and effect != taint.get("effect"):
            continue
        exists = toleration.at("operator").text == "Exists"
        if key is None and exists:
            return True
        if key == taint.get("key") and (exists or (toleration.at("value").text or "") == taint.get("value", "")):
            return True
    return False


def _requirement(expression: Field, labels: Mapping[str, str]) -> bool:
    """One node selector requirement (core/v1 NodeSelectorRequirement)."""
    value = labels.get(expression.at("key").text or "")
    values = expression.at("values").texts
    match expression.at("operator").text:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                left, right = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return left > right if operator == "Gt" else left < right
        case _:
            return False


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether an equality selector matches; an empty one matches nothing (a Service without one has no endpoints)."""
    return bool(selector) and all(labels.get(k) == v for k, v in selector.items())
