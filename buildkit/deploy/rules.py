"""What makes manifests starve, or lie: one function per rule, from a scene of objects to findings (pure).

Each rule stands for a failure that was met: two deployments that wait for one card, a Service in front of a parked
pod, a tag that moved, a ConfigMap applied by hand that no pod noticed, a start that needed the network, a model spread
over two cards that computes on one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from buildkit.check.offline import scan_text
from buildkit.deploy.documents import Field
from buildkit.deploy.evidence import EvidencePolicy
from buildkit.deploy.findings import Finding, Severity
from buildkit.deploy.namehash import SUFFIX, generated
from buildkit.deploy.objects import Container, Node, Object, Workload, quantity, selects
from buildkit.deploy.placement import Plan, can_surge, place_pods
from buildkit.errors import BuildkitError
from buildkit.model import Digest, split_name

MAX_CARDS_ANNOTATION = "buildkit/max-gpus"
"""On a pod template: how many cards one replica may be given, where its model is not recognised by name."""

DEFAULT_ONE_CARD = ("clef-", "qwen3_5", "qwen3.5", "qwen3-next", "qwen3_next")
"""Model names (parts of image, arguments, names and labels) whose GDN state is kept on one card and is not sharded."""

PLACEHOLDER = "0" * 64
"""The digest of a manifest that was written before there was an image to pin."""

RULES: Mapping[str, str] = MappingProxyType(
    {
        "nothing-to-check": "a file, folder or pipe without any Kubernetes object",
        "yaml": "a file or document that cannot be read",
        "yaml-key": "a mapping with a key that is no scalar",
        "yaml-duplicate-key": "a key that is given twice",
        "template": "a template that was not rendered",
        "schema": "an object that Kubernetes would refuse",
        "kustomize": "a kustomization that does not render",
        "duplicate-object": "the same object twice",
        "selector-mismatch": "a controller whose selector does not match its own pods",
        "gpu-quantity": "an amount of cards that Kubernetes would refuse",
        "gpu-budget": "pods that would stay Pending for want of cards",
        "gpu-rollout": "a rolling update that waits for a card that its own old pod holds",
        "gpus-per-model": "more cards than the model can use",
        "device-mismatch": "a command line that names other devices than the pod is given",
        "service-no-endpoints": "a Service that selects no running pod",
        "service-port": "a Service port that no container has",
        "ingress-backend": "an Ingress that points at no Service or port",
        "probe-port": "a probe on a port that the container does not have",
        "probe-missing": "a GPU server behind a Service without a readiness probe",
        "port-argument": "a server told to listen on another port than is declared",
        "image-by-tag": "an image that is not pinned by its digest",
        "image-placeholder": "an image whose digest was never filled in",
        "installs-at-start": "a container that fetches software when it starts",
        "configmap-handmade": "a ConfigMap with code or settings whose change rolls no pod",
        "configmap-stale": "a ConfigMap that differs from the file it was made of, or from its own hash",
        "configmap-missing": "a ConfigMap that nothing here defines",
        "evidence-missing": "an image without evidence",
        "evidence-failed": "an image whose checks failed, or were not run",
        "evidence-stale": "evidence older than the list of known-bad revisions",
        "evidence-architecture": "evidence for another platform or GPU",
        "evidence-unread": "evidence that could not be read",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the check holds manifests against.

    ``resource`` is the extended resource that stands for a card; ``one_card`` are parts of model names that must have
    one card; ``kubernetes`` is the version whose schemas apply.
    """

    resource: str = "nvidia.com/gpu"
    one_card: tuple[str, ...] = DEFAULT_ONE_CARD
    kubernetes: str = "1.32"
    evidence: EvidencePolicy = field(default_factory=EvidencePolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that the rules see. ``beside`` maps a manifest file to the text files in its folder, by name."""

    objects: Sequence[Object]
    workloads: Sequence[Workload]
    nodes: Sequence[Node]
    plan: Plan | None
    settings: Settings
    beside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of_kind(self, kind: str) -> Iterator[Object]:
        return (o for o in self.objects if o.kind == kind)


Rule = Callable[[Scene], Iterator[Finding]]


def run_rules(scene: Scene) -> Iterator[Finding]:
    """Every rule's findings, in the order of ``RULES``' sections."""
    for rule in _RULES:
        yield from rule(scene)


def _at(
    rule: str, place: Field, subject: str, message: str, remedy: str, severity: Severity = Severity.ERROR
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        file=place.file,
        line=place.line,
        subject=subject,
        message=message,
        remedy=remedy,
    )


# Objects -------------------------------------------------------------------------------------------------------------


def duplicates(scene: Scene) -> Iterator[Finding]:
    seen: dict[tuple[str, str, str, str], Object] = {}
    for thing in scene.objects:
        group = thing.api_version.rpartition("/")[0]
        key = (group, thing.kind, thing.namespace, thing.name)
        first = seen.setdefault(key, thing)
        if first is not thing and thing.kind and thing.name:
            where = f"{first.field.file}:{first.field.line}"
            yield _at(
                "duplicate-object",
                thing.field,
                thing.title,
                f"is also defined at {where}; the one applied last wins",
                "keep one of them",
            )


_TEMPLATE = re.compile(r"\{\{.*\}\}|<%.*%>|\$\{[A-Za-z_]", re.DOTALL)
"""Go templates and Jinja, ERB, and envsubst, where none of them can be meant."""


def templates(scene: Scene) -> Iterator[Finding]:
    """Placeholders where Kubernetes takes a name: the document parses, and still nobody rendered it."""
    images = {id(w.object): [c.field.at("image") for c in w.containers] for w in scene.workloads}
    for thing in scene.objects:
        metadata = thing.field.at("metadata")
        places = [thing.field.at("kind"), metadata.at("name"), metadata.at("namespace"), *images.get(id(thing), ())]
        found = next((p for p in places if p.text and _TEMPLATE.search(p.text)), None)
        if found is not None:
            yield _at(
                "template",
                found,
                thing.title,
                f"{found.text!r} is the placeholder of a template that was not rendered",
                "render the template first (helm template, envsubst) and check its output",
            )


def selectors(scene: Scene) -> Iterator[Finding]:
    for workload in scene.workloads:
        selector = workload.object.field.at("spec", "selector")
        wanted = selector.at("matchLabels").strings
        if workload.object.kind == "ReplicationController":
            wanted = selector.strings
        if workload.object.kind in ("Job", "CronJob", "Pod") or not wanted or selects(wanted, workload.labels):
            continue
        yield _at(
            "selector-mismatch",
            selector,
            workload.title,
            f"selects {_pairs(wanted)}, its own pods have {_pairs(workload.labels)}",
            "give the pod template the labels that the selector asks for",
        )


# Cards ---------------------------------------------------------------------------------------------------------------


def card_quantities(scene: Scene) -> Iterator[Finding]:
    resource = scene.settings.resource
    for workload, container in _containers(scene):
        limit = container.field.at("resources", "limits", resource)
        request = container.field.at("resources", "requests", resource)
        for place in (limit, request):
            if place.present and quantity(place.value) is None:
                yield _at(
                    "gpu-quantity",
                    place,
                    workload.title,
                    f"{place.value!r} of {resource} in {container.name or 'a container'} is no whole number of cards",
                    "write a whole number; a card cannot be divided like this",
                )
        if request.present and not limit.present:
            message, remedy = (
                f"asks for {resource} in requests but not in limits",
                "set limits; requests follow from it",
            )
        elif request.present and quantity(request.value) != quantity(limit.value):
            message, remedy = f"requests {request.value} and limits {limit.value} of {resource}", "make them equal"
        else:
            continue
        yield _at("gpu-quantity", request, workload.title, f"{message}: the API refuses it", remedy)


_NAMED = 6
"""Rivals for a card that a message names."""


def card_budget(scene: Scene) -> Iterator[Finding]:
    resource = scene.settings.resource
    wanting = [w for w in scene.workloads if w.runs and w.cards(resource)]
    if scene.plan is None:
        if wanting:
            yield _at(
                "gpu-budget",
                wanting[0].replicas_field,
                wanting[0].title,
                "how many cards the nodes have is not known, so the budget was not checked",
                "give --node-gpus, or a Node object",
                Severity.UNKNOWN,
            )
        return
    takers_of = {id(w): [n for n in scene.nodes if n.takes(w)] for w in scene.workloads}
    names_of = {key: {n.name for n in nodes} for key, nodes in takers_of.items()}
    counts = Counter(id(p.workload) for place in scene.plan.places for p, _ in place.pods)
    seen = set()
    for pod in scene.plan.pending:
        workload = pod.workload
        if id(workload) in seen:
            continue
        seen.add(id(workload))
        placed = counts[id(workload)]
        waiting = (workload.replicas or placed) - placed
        takers = takers_of[id(workload)]
        largest = max((n.cards for n in takers), default=0)
        if not takers:
            message, remedy = (
                "no node matches its selector, affinity and tolerations",
                "correct them, or label the node",
            )
        elif pod.cards > largest:
            message = f"one pod wants {pod.cards} cards, no node that it may use has more than {largest}"
            remedy = "ask for no more than one node has"
        else:
            have = sum(n.cards for n in takers)
            near = (w for w in wanting if w is not workload and names_of[id(w)] & names_of[id(workload)])
            rivals = list(islice(near, _NAMED + 1))
            holders = [f"{w.title} wants {_demand(w, resource)}" for w in rivals[:_NAMED]]
            holders += ["others want more"] if len(rivals) > _NAMED else []
            wish = f"{workload.title} wants {_demand(workload, resource)}"
            message = (
                f"{waiting} of its pods would stay Pending: {', '.join([wish, *holders])}, "
                f"but there {'is' if have == 1 else 'are'} {have} ({', '.join(n.name for n in takers)})"
                f"{'; whichever starts last waits' if rivals else ''}"
            )
            remedy = "set one of them to 0 replicas, or take away cards that it does not need"
        yield _at("gpu-budget", workload.replicas_field, workload.title, message, remedy)
    yield from _autoscalers(scene)
    for workload in scene.workloads:
        takers = takers_of[id(workload)]
        if workload.replicas is None and workload.cards(resource) and not any(n.cards for n in takers):
            yield _at(
                "gpu-budget",
                workload.object.field,
                workload.title,
                "wants cards on each of its nodes, but none of them has any",
                "give it a nodeSelector for the nodes with cards",
            )


def _autoscalers(scene: Scene) -> Iterator[Finding]:
    """How far an autoscaler may go, against the room beside the others. At 0 replicas it is off (autoscaling/v2)."""
    resource = scene.settings.resource
    assert scene.plan is not None
    for scaler in scene.of_kind("HorizontalPodAutoscaler"):
        spec = scaler.field.at("spec")
        most = spec.at("maxReplicas").integer
        target = (spec.at("scaleTargetRef", "kind").text, spec.at("scaleTargetRef", "name").text)
        for workload in scene.workloads:
            if (workload.object.kind, workload.name) != target or workload.namespace != scaler.namespace:
                continue
            cards, now = workload.cards(resource), workload.replicas
            if not cards or not now or not most:
                continue
            others = [w for w in scene.workloads if w is not workload]
            room = next(
                (n for n in range(min(most, _SCALE), 0, -1) if _fits(scene, [replace(workload, replicas=n), *others])),
                0,
            )
            if room < min(most, _SCALE) and scene.plan.complete:
                yield _at(
                    "gpu-budget",
                    spec.at("maxReplicas"),
                    scaler.title,
                    f"may scale {workload.title} to {most} × {cards} cards, but beside the others there is room for "
                    f"{room}",
                    f"set maxReplicas to at most {room}",
                )


_SCALE = 200
"""Replicas that are tried."""


def _fits(scene: Scene, workloads: Sequence[Workload]) -> bool:
    return place_pods(workloads, scene.nodes, scene.settings.resource).complete


def rollouts(scene: Scene) -> Iterator[Finding]:
    """A RollingUpdate starts new pods first: with all cards taken, and no old pod allowed to go, it never ends."""
    if scene.plan is None or not scene.plan.complete:
        return
    resource = scene.settings.resource
    for workload in scene.workloads:
        strategy = workload.object.field.at("spec", "strategy")
        if workload.object.kind != "Deployment" or not workload.replicas or not workload.cards(resource):
            continue
        if strategy.at("type").text not in (None, "RollingUpdate"):
            continue
        rolling = strategy.at("rollingUpdate")
        gone = _share(rolling.at("maxUnavailable").value, workload.replicas, up=False)
        if gone == 0 and not can_surge(scene.plan, workload, resource):
            yield _at(
                "gpu-rollout",
                strategy if strategy.present else workload.object.field.at("spec"),
                workload.title,
                "a rolling update starts the new pod before the old one ends, but no card is free: it stays Pending",
                "set strategy.type to Recreate",
            )


def _share(value: object, replicas: int, *, up: bool) -> int:
    """maxSurge or maxUnavailable in pods; a percentage is rounded up or down, 25 % is the default (apps/v1)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(0, value)
    match = re.fullmatch(r"([0-9]{1,4})%", value if isinstance(value, str) else "25%")
    percent = int(match[1]) if match else 25
    exact = replicas * percent / 100
    return math.ceil(exact) if up else math.floor(exact)


_DEVICES = ("--d", "--device-ids", "--devices", "--gpus")
_DEVICE_LIST = re.compile(r"[0-9]{1,4}(?:,[0-9]{1,4}){0,200}")
_PARALLEL = (
    "--tensor-parallel-size",
    "--tp",
    "--tp-size",
    "--num-shard",
    "--num-gpus",
    "-tp",
    "--pipeline-parallel-size",
)


def cards_per_model(scene: Scene) -> Iterator[Finding]:
    """Cards of one pod against what its model can use, and against the devices that its command line names."""
    resource = scene.settings.resource
    for workload in scene.workloads:
        allowed = workload.annotations.get(MAX_CARDS_ANNOTATION)
        for container in workload.main:
            cards = container.cards(resource) or 0
            place = container.field.at("resources", "limits", resource)
            named, source = _named_devices(container)
            model = _one_card_model(workload, container, scene.settings.one_card)
            limit = int(allowed) if allowed and re.fullmatch(r"[0-9]{1,4}", allowed) else 1 if model else None
            reason = f"{MAX_CARDS_ANNOTATION} says {allowed}" if allowed else f"{model!r} keeps its state on one card"
            if limit is not None and cards > limit:
                yield _at(
                    "gpus-per-model",
                    place if place.present else container.field,
                    workload.title,
                    f"takes {cards} cards, but {reason}",
                    f"set {resource} to {limit}",
                )
            if limit is not None and named > limit:
                yield _at(
                    "gpus-per-model",
                    source,
                    workload.title,
                    f"is told to use {named} devices, but {reason}",
                    "name one device",
                )
            elif named > cards > 0:
                yield _at(
                    "device-mismatch",
                    source,
                    workload.title,
                    f"is told to use {named} devices, the pod is given {cards}",
                    "make them equal",
                )


def _one_card_model(workload: Workload, container: Container, patterns: Sequence[str]) -> str | None:
    """The part of a model's name that says: one card only. Names, image, arguments and variables are searched."""
    words = [workload.name, *workload.labels.values(), container.image or "", *container.words]
    words += container.environment.values()
    haystack = "\n".join(words).lower()
    return next((p for p in patterns if p.lower() in haystack), None)


def _named_devices(container: Container) -> tuple[int, Field]:
    """How many devices the command line or CUDA_VISIBLE_DEVICES names; 0 where none are named."""
    words = [
        (w, f) for part in ("command", "args") for f in container.field.at(part).items for w in (f.text or "").split()
    ]
    product, where = 1, container.field
    for index, (word, place) in enumerate(words):
        option, equals, value = word.partition("=")
        value = value if equals else words[index + 1][0] if index + 1 < len(words) else ""
        if option in _DEVICES and _DEVICE_LIST.fullmatch(value):
            return len(value.split(",")), place
        if option in _PARALLEL and re.fullmatch(r"[0-9]{1,4}", value):
            product, where = product * int(value), place
    if product > 1:
        return product, where
    for entry in container.field.at("env").items:
        value = entry.at("value").text or ""
        if entry.at("name").text == "CUDA_VISIBLE_DEVICES" and _DEVICE_LIST.fullmatch(value):
            return len(value.split(",")), entry
    return 0, container.field


# Services and ports --------------------------------------------------------------------------------------------------


def services(scene: Scene) -> Iterator[Finding]:
    by_label: dict[tuple[str, str, str], list[Workload]] = {}
    for workload in scene.workloads:
        for key, value in workload.labels.items():
            by_label.setdefault((workload.namespace, key, value), []).append(workload)
    for service in scene.of_kind("Service"):
        spec = service.field.at("spec")
        selector = spec.at("selector")
        if spec.at("type").text == "ExternalName":
            continue
        if not selector.strings:
            if not any(_backs(o, service) for o in scene.objects):
                yield _at(
                    "service-no-endpoints",
                    spec,
                    service.title,
                    "has no selector, and nothing here gives it endpoints",
                    "add a selector, or an EndpointSlice with its name",
                    Severity.WARNING,
                )
            continue
        wanted = selector.strings
        candidates = by_label.get((service.namespace, *next(iter(wanted.items()))), ())
        matched = [w for w in candidates if selects(wanted, w.labels)]
        running = [w for w in matched if w.runs]
        if not running:
            yield _at("service-no-endpoints", selector, service.title, *_no_endpoints(scene, service, matched))
            continue
        for port in spec.at("ports").items:
            yield from _service_port(service, port, running)
        yield from _readiness(scene, service, running)


def _no_endpoints(scene: Scene, service: Object, matched: Sequence[Workload]) -> tuple[str, str]:
    wanted = service.field.at("spec", "selector").strings
    if matched:
        titles = ", ".join(w.title for w in matched)
        verb = "has" if len(matched) == 1 else "have"
        message = f"selects only {titles}, which {verb} 0 replicas: no endpoints, every connection is refused"
        running = [w for w in scene.workloads if w.runs and w.namespace == service.namespace and w not in matched]
        hint = f", for example {_pairs(running[0].labels)} of {running[0].title}" if running else ""
        return message, f"select pods that run{hint}"
    near = [w for w in scene.workloads if w.namespace == service.namespace and w.labels.keys() & wanted.keys()]
    elsewhere = [w for w in scene.workloads if selects(wanted, w.labels)]
    hint = ""
    if elsewhere:
        hint = f"; {elsewhere[0].title} has these labels in namespace {elsewhere[0].namespace}"
    elif near:
        hint = f"; the nearest, {near[0].title}, has {_pairs(near[0].labels)}"
    return (
        f"selects {_pairs(wanted)} in namespace {service.namespace}, which no pod here has: no endpoints{hint}",
        "make selector and pod labels equal",
    )


def _backs(thing: Object, service: Object) -> bool:
    if thing.namespace != service.namespace:
        return False
    if thing.kind == "Endpoints":
        return thing.name == service.name
    return thing.kind == "EndpointSlice" and thing.labels.get("kubernetes.io/service-name") == service.name


def _service_port(service: Object, port: Field, running: Sequence[Workload]) -> Iterator[Finding]:
    target = port.at("targetPort")
    wanted = target.value if target.present else port.at("port").value
    for workload in running:
        names = {n for c in workload.main for n in c.port_names()}
        numbers = {n for c in workload.main for n in c.port_numbers()}
        place = target if target.present else port
        number = _port(wanted)
        if isinstance(wanted, str) and number is None:
            if wanted not in names:
                have = ", ".join(sorted(names)) or "none"
                yield _at(
                    "service-port",
                    place,
                    service.title,
                    f"targetPort {wanted!r} is no port name of {workload.title} (it has {have})",
                    "name the container's port, or use its number",
                )
        elif number is not None and numbers and number not in numbers:
            yield _at(
                "service-port",
                place,
                service.title,
                f"sends to port {wanted} of {workload.title}, which declares {_numbers(numbers)}",
                f"set targetPort to {min(numbers)}",
            )


def _readiness(scene: Scene, service: Object, running: Sequence[Workload]) -> Iterator[Finding]:
    for workload in running:
        serving = [c for c in workload.main if c.cards(scene.settings.resource)]
        for container in serving:
            if not container.field.at("readinessProbe").present:
                yield _at(
                    "probe-missing",
                    container.field,
                    workload.title,
                    f"{service.title} sends it requests before its model is loaded: it has no readinessProbe",
                    "add a readinessProbe on its health path, and a startupProbe for the time that loading takes",
                    Severity.WARNING,
                )


def ingresses(scene: Scene) -> Iterator[Finding]:
    known = {(s.namespace, s.name): s for s in scene.of_kind("Service")}
    for ingress in scene.of_kind("Ingress"):
        spec = ingress.field.at("spec")
        backends = [p.at("backend", "service") for r in spec.at("rules").items for p in r.at("http", "paths").items]
        backends.append(spec.at("defaultBackend", "service"))
        for backend in backends:
            name = backend.at("name").text
            if name is None:
                continue
            service = known.get((ingress.namespace, name))
            if service is None:
                yield _at(
                    "ingress-backend",
                    backend,
                    ingress.title,
                    f"sends to Service {name!r}, which nothing here defines in namespace {ingress.namespace}",
                    "correct the name, or add the Service",
                    Severity.WARNING if not known else Severity.ERROR,
                )
                continue
            ports = service.field.at("spec", "ports").items
            number, label = backend.at("port", "number").value, backend.at("port", "name").text
            if not any(
                (label and p.at("name").text == label) or (number and p.at("port").value == number) for p in ports
            ):
                yield _at(
                    "ingress-backend",
                    backend.at("port"),
                    ingress.title,
                    f"sends to port {label or number} of {service.title}, which it does not have",
                    "use one of the Service's ports",
                )


def probes(scene: Scene) -> Iterator[Finding]:
    for workload, container in _containers(scene):
        names, numbers = container.port_names(), container.port_numbers()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for action in ("httpGet", "tcpSocket", "grpc"):
                port = container.field.at(probe, action, "port")
                if container.field.at(probe, action, "host").present:
                    continue  # it asks someone else
                value = port.value
                number = _port(value)
                if isinstance(value, str) and number is None:
                    if value not in names:
                        have = ", ".join(names) or "none"
                        yield _at(
                            "probe-port",
                            port,
                            workload.title,
                            f"{probe} asks port {value!r}; {container.name or 'the container'} names {have}",
                            "name a port of the container",
                        )
                elif number is not None and numbers and number not in numbers:
                    who = container.name or "the container"
                    yield _at(
                        "probe-port",
                        port,
                        workload.title,
                        f"{probe} asks port {value}; {who} declares {_numbers(numbers)}",
                        "ask the port that the server listens on",
                    )


def port_arguments(scene: Scene) -> Iterator[Finding]:
    for workload, container in _containers(scene):
        numbers = container.port_numbers()
        words = [
            (w, f)
            for part in ("command", "args")
            for f in container.field.at(part).items
            for w in (f.text or "").split()
        ]
        for index, (word, place) in enumerate(words):
            option, equals, value = word.partition("=")
            value = value if equals else words[index + 1][0] if index + 1 < len(words) else ""
            if (
                option in ("--port", "--p")
                and re.fullmatch(r"[0-9]{1,5}", value)
                and numbers
                and int(value) not in numbers
            ):
                yield _at(
                    "port-argument",
                    place,
                    workload.title,
                    f"is told to listen on {value}, but declares {_numbers(numbers)}",
                    "make the argument and containerPort equal",
                )


# Images and starts ---------------------------------------------------------------------------------------------------


def images(scene: Scene) -> Iterator[Finding]:
    for workload, container in _containers(scene):
        place, image = container.field.at("image"), container.image
        if image is None or _TEMPLATE.search(image):
            continue  # the schema, or the rule on templates, tells of it
        try:
            name, tag, digest = parse_image(image)
        except BuildkitError as error:
            yield _at("image-by-tag", place, workload.title, error.message, "write NAME@sha256:…")
            continue
        if digest is None:
            moving = f"the tag {tag!r}, which can move" if tag else "no tag, which means latest"
            yield _at(
                "image-by-tag",
                place,
                workload.title,
                f"runs {image!r} by {moving}: two pods can run two images, and no evidence holds for it",
                f"pin it: invoke deploy.pin {name.rpartition('/')[2]} --from {image}",
            )
        elif digest.hex == PLACEHOLDER:
            yield _at(
                "image-placeholder",
                place,
                workload.title,
                f"the digest of {name!r} is still the placeholder",
                f"pin it: invoke deploy.pin {name.rpartition('/')[2]} --from REF",
            )


def parse_image(image: str) -> tuple[str, str | None, Digest | None]:
    """``[host[:port]/]repository[:tag][@digest]`` as (host and repository, tag, digest); a host is not needed here."""
    first, slash, rest = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        repository, tag, digest = split_name(rest, image)
        return f"{first}/{repository}", tag, digest
    return split_name(image, image)


def starts(scene: Scene) -> Iterator[Finding]:
    """Commands, hooks and mounted scripts, held against the same list as an image's own start (buildkit.check)."""
    scripts = {(o.namespace, o.name): o for o in scene.of_kind("ConfigMap")}
    told: set[tuple[str, str, str]] = set()
    for workload, container in _containers(scene):
        environment = container.environment
        command, hook = container.field.at("command"), container.field.at("lifecycle", "postStart", "exec", "command")
        for _, level, what, _ in scan_text(" ".join(container.words), environment):
            places = command.items + container.field.at("args").items
            place = next((f for f in places if any(scan_text(f.text or "", environment))), command)
            yield from _start_finding(workload, place if place.present else container.field, level, what)
        for _, level, what, _ in scan_text(" ".join(hook.texts), environment):
            yield from _start_finding(workload, hook, level, f"{what} after its start")
        for entry in container.field.at("env").items:
            # A command in a variable, for a shell that expands it.
            for _, level, what, _ in scan_text(entry.at("value").text or "", environment):
                yield from _start_finding(workload, entry, level, f"{what} by the variable {entry.at('name').text}")
        for _, name, _ in _config_maps(workload):
            script = scripts.get((workload.namespace, name))
            if script is None:
                continue
            for key, entry in script.field.at("data").fields:
                text = entry.text or ""
                if (name, workload.namespace, key) in told or not _is_script(key, text, container):
                    continue
                told.add((name, workload.namespace, key))
                for line, level, what, _ in scan_text(text, environment):
                    yield from _start_finding(workload, entry, level, f"line {line} of {key} {what}")


def _is_script(key: str, text: str, container: Container) -> bool:
    """Whether an entry of a ConfigMap is run: by its name, its first line, or because the command names it."""
    named = any(re.search(rf"(?:^|/){re.escape(key)}$", word) for w in container.words for word in w.split())
    return key.endswith(_SCRIPT) or text.startswith("#!") or named


def _start_finding(workload: Workload, place: Field, level: str, what: str) -> Iterator[Finding]:
    if level == "note":
        return
    yield _at(
        "installs-at-start",
        place,
        workload.title,
        f"its start needs the network ({what}): it fails when the other side does, and may bring other versions",
        "build an image with everything in it (images/clef-serve shows how) and start that",
        Severity.ERROR if level == "violation" else Severity.WARNING,
    )


# ConfigMaps ----------------------------------------------------------------------------------------------------------

_SCRIPT = (".sh", ".bash", ".py")
_CODE = (".py", ".sh", ".bash", ".js", ".lua", ".rb", ".pl", ".jinja", ".j2")


def config_maps(scene: Scene) -> Iterator[Finding]:
    """A pod does not notice when a ConfigMap of the same name changes; one whose name carries its hash rolls it."""
    known = {(o.namespace, o.name): o for o in scene.of_kind("ConfigMap")}
    users: dict[tuple[str, str], list[Workload]] = {}
    for workload in scene.workloads:
        for _, name, _ in _config_maps(workload):
            key = (workload.namespace, name)
            if key in known:
                users.setdefault(key, []).append(workload)
    yield from _missing_config_maps(scene, known)
    for key, thing in known.items():
        body = thing.field.value if isinstance(thing.field.value, dict) else {}
        has_hash = generated("ConfigMap", thing.name, body)
        yield from _stale(scene, thing)
        if has_hash is False:
            yield _at(
                "configmap-stale",
                thing.field.at("metadata", "name"),
                thing.title,
                "its name ends like a content hash, but not the hash of these contents: it was edited by hand",
                "change the generator's file and render again",
            )
        if has_hash is not None:
            continue
        for workload in {id(w): w for w in users.get(key, ())}.values():
            if any("checksum" in a or "hash" in a for a in workload.annotations):
                continue
            code = [k for part in ("data", "binaryData") for k, _ in thing.field.at(part).fields if k.endswith(_CODE)]
            what = f"the code in it ({', '.join(sorted(code)[:3])})" if code else "its contents"
            yield _at(
                "configmap-handmade",
                thing.field,
                thing.title,
                f"{workload.title} uses it by a fixed name: a change of {what} does not roll the pod",
                "make it with a configMapGenerator, so that its name carries a hash",
                Severity.ERROR if code else Severity.WARNING,
            )


def _missing_config_maps(scene: Scene, known: Mapping[tuple[str, str], Object]) -> Iterator[Finding]:
    seen: set[tuple[str, str]] = set()
    for workload in scene.workloads:
        for place, name, optional in _config_maps(workload):
            key = (workload.namespace, name)
            if key in known or optional or key in seen or name == "kube-root-ca.crt":
                continue
            seen.add(key)
            nearest = next((n for ns, n in known if ns == workload.namespace and SUFFIX.sub("", n) == name), None)
            hint = f"; {nearest!r} is here, under the generator's name" if nearest else ""
            yield _at(
                "configmap-missing",
                place,
                workload.title,
                f"uses ConfigMap {name!r}, which nothing here defines{hint}: applied by hand, or never there",
                "generate it from its files with a configMapGenerator in the kustomization",
            )


def _stale(scene: Scene, thing: Object) -> Iterator[Finding]:
    """Entries that differ from the file of their name beside the manifest."""
    beside = scene.beside.get(thing.field.file, {})
    for name, entry in thing.field.at("data").fields:
        text = beside.get(name)
        if text is not None and entry.text is not None and text.rstrip() != entry.text.rstrip():
            yield _at(
                "configmap-stale",
                entry,
                thing.title,
                f"{name} in it differs from the file {name} in the same folder: what runs is not what is kept here",
                "make it with a configMapGenerator from that file",
            )


def _config_maps(workload: Workload) -> Iterator[tuple[Field, str, bool]]:
    """Every ConfigMap that the pods use: where, its name, and whether they start without it."""
    sources: list[Field] = []
    for volume in workload.spec.at("volumes").items:
        sources.append(volume.at("configMap"))
        sources += [s.at("configMap") for s in volume.at("projected", "sources").items]
    for container in workload.containers:
        sources += [e.at("configMapRef") for e in container.field.at("envFrom").items]
        sources += [e.at("valueFrom", "configMapKeyRef") for e in container.field.at("env").items]
    for source in sources:
        name = source.at("name")
        if name.text:
            yield name, name.text, bool(source.at("optional").boolean)


# Small helpers -------------------------------------------------------------------------------------------------------


def _port(value: object) -> int | None:
    """A port given as a number, or as a string of digits (which Kubernetes reads as one); None for a name."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,5}", value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _containers(scene: Scene) -> Iterator[tuple[Workload, Container]]:
    return ((w, c) for w in scene.workloads for c in w.containers)


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(labels.items())) or "no labels"


def _numbers(numbers: Mapping[int, object] | set[int]) -> str:
    return ", ".join(str(n) for n in sorted(numbers))


def _demand(workload: Workload, resource: str) -> str:
    cards, replicas = workload.cards(resource), workload.replicas
    if replicas is None:
        return f"{cards} on each node"
    return str(cards) if replicas == 1 else f"{replicas} × {cards}"


_RULES: tuple[Rule, ...] = (
    duplicates,
    templates,
    selectors,
    card_quantities,
    card_budget,
    rollouts,
    cards_per_model,
    services,
    ingresses,
    probes,
    port_arguments,
    images,
    starts,
    config_maps,
)
