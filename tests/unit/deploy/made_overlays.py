"""Overlays from a seed: a base and an overlay of it with a random choice of what plain kustomizations use."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
IMAGES = (
    "app",
    "app:1",
    f"app@{DIGEST}",
    "reg.example:5000/x/app:2",
    "localhost:5000/tools",
    f"git.example.org/team/web:v1@{DIGEST}",
)
KINDS = ("Deployment", "Deployment", "Deployment", "Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob", "Pod")

Object = dict[str, Any]


def make(folder: Path, seed: int) -> None:
    """Write ``base/`` and an overlay of it into ``folder``. About half of them are wrong: a patch without its target,
    a name that is generated twice, a replacement of nothing."""
    chance = random.Random(seed)
    names = ["web", "api"][: chance.randint(1, 2)]
    objects = [_pods(chance, name, chance.choice(KINDS)) for name in names]
    others = _others(chance)
    objects += chance.sample(others, chance.randint(2, len(others)))
    chance.shuffle(objects)
    (folder / "base").mkdir(parents=True)
    (folder / "base" / "all.yaml").write_text(yaml.safe_dump_all(objects, sort_keys=False))
    base = {"resources": ["all.yaml"]} | (_kustomization(chance, names) if chance.random() < 0.6 else {})
    (folder / "base" / "kustomization.yaml").write_text(yaml.safe_dump(base))
    extra = _pods(chance, "extra", "Deployment")
    if chance.random() < 0.5:
        extra["metadata"]["namespace"] = "other"
    (folder / "extra.yaml").write_text(yaml.safe_dump(extra))
    resources = ["base", "extra.yaml"][: chance.randint(1, 2)]
    overlay = {"resources": resources} | _kustomization(chance, [*names, "extra"])
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))


def _pods(chance: random.Random, name: str, kind: str) -> Object:
    pick = chance.choice
    containers = [
        {
            "name": "app",
            "image": pick(IMAGES),
            "args": ["a", "b"],
            "env": [
                {"name": "A", "value": "1"},
                {"name": "C", "valueFrom": {"configMapKeyRef": {"name": pick(["gen", "lit", "plain"]), "key": "k"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "gen"}}, {"secretRef": {"name": "sec"}}],
            "ports": [{"name": "http", "containerPort": 8000}, {"containerPort": 9000}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
        {"name": "side", "image": "side:1"},
    ]
    volumes = [
        {"name": "v", "configMap": {"name": "gen"}},
        {"name": "s", "secret": {"secretName": "sec"}},
        {"name": "p", "projected": {"sources": [{"configMap": {"name": "lit"}}, {"secret": {"name": "sec"}}]}},
        {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}},
    ]
    pod = {
        "serviceAccountName": pick(["sa", "other"]),
        "initContainers": [{"name": "init", "image": "app:0"}],
        "containers": containers,
        "volumes": volumes,
        "imagePullSecrets": [{"name": "sec"}],
    }
    template: Object = {"metadata": {"labels": {"app": name}}, "spec": pod}
    if chance.random() < 0.3:
        del template["metadata"]
    metadata: Object = {"name": name}
    if chance.random() < 0.5:
        metadata["labels"] = {"x": "z"}
    if chance.random() < 0.3:
        metadata["annotations"] = {"n": "m"}
    spec: Object = {"selector": {"matchLabels": {"app": name}}, "template": template}
    match kind:
        case "Pod":
            return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": pod}
        case "Job":
            return {"apiVersion": "batch/v1", "kind": kind, "metadata": metadata, "spec": {"template": template}}
        case "CronJob":
            spec = {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": template}}}
            return {"apiVersion": "batch/v1", "kind": kind, "metadata": metadata, "spec": spec}
        case "StatefulSet":
            spec |= {"serviceName": "svc", "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {}}]}
    if kind != "DaemonSet" and chance.random() < 0.7:
        spec["replicas"] = pick([1, 2])
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _others(chance: random.Random) -> list[Object]:
    """Objects that refer to others, that are selected, that belong to the cluster, or that nobody knows."""
    text = f"""
{{apiVersion: v1, kind: Service, metadata: {{name: svc}}, spec: {{selector: {{app: web}}, ports: [{{port: 80}}]}}}}
---
{{apiVersion: v1, kind: Service, metadata: {{name: ext}}, spec: {{type: ExternalName, externalName: a.b}}}}
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: sa}}}}
---
{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: claim}}, spec: {{}}}}
---
{{apiVersion: v1, kind: ConfigMap, metadata: {{name: plain}}, data: {{k: v, quoted: "n"}}}}
---
{{apiVersion: v1, kind: Namespace, metadata: {{name: team}}}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {{name: ing}}
spec:
  tls: [{{secretName: sec}}]
  defaultBackend: {{service: {{name: svc, port: {{number: 80}}}}}}
  rules:
    - http: {{paths: [{{path: /, pathType: Prefix, backend: {{service: {{name: svc, port: {{number: 80}}}}}}}}]}}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{name: hpa}}
spec: {{maxReplicas: 3, scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: web}}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: rb}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: role}}
subjects: [{{kind: ServiceAccount, name: {chance.choice(["sa", "default"])}, namespace: x}}]
---
{{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {{name: role}}, rules: []}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{name: pdb}}
spec: {{selector: {{matchLabels: {{app: web}}}}, minAvailable: 1}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: np}}
spec: {{podSelector: {{matchLabels: {{app: web}}}}, ingress: [{{from: [{{podSelector: {{matchLabels: {{a: b}}}}}}]}}]}}
---
apiVersion: example.org/v1
kind: Widget
metadata: {{name: w}}
spec: {{replicas: 1, template: {{spec: {{containers: [{{name: z, image: "app:9"}}]}}}}}}
---
{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: sc}}, provisioner: x}}
---
apiVersion: v1
kind: Node
metadata: {{name: n1, annotations: {{config.kubernetes.io/local-config: "{chance.choice(["true", "false"])}"}}}}
"""
    return list(yaml.safe_load_all(text))


def _kustomization(chance: random.Random, names: list[str]) -> Object:
    pick = chance.choice
    parts: dict[str, tuple[float, Callable[[], Any]]] = {
        "namespace": (0.5, lambda: pick(["team", "ns2"])),
        "namePrefix": (0.4, lambda: pick(["p-", "q-"])),
        "nameSuffix": (0.3, lambda: pick(["-s", "-t"])),
        "labels": (
            0.3,
            lambda: [{"pairs": {"l": "1"}} | pick([{}, {"includeSelectors": True}, {"includeTemplates": True}])],
        ),
        "commonLabels": (0.2, lambda: {"cl": "1"}),
        "commonAnnotations": (0.3, lambda: {"ca": "1"}),
        "images": (0.5, lambda: [pick(_REPLACED)]),
        "replicas": (0.3, lambda: [{"name": pick(names), "count": pick([0, 3])}]),
        "configMapGenerator": (
            0.5,
            lambda: [{"name": pick(["gen", "lit"]), "literals": ["k=v", pick(["x=1", "u='q'"])]} | pick(_OPTIONS)],
        ),
        "secretGenerator": (0.3, lambda: [{"name": "sec", "literals": ["a=b"]} | pick([{}, {"type": "t"}])]),
        "generatorOptions": (
            0.2,
            lambda: pick([{"labels": {"go": "1"}}, {"disableNameSuffixHash": True}, {"immutable": True}]),
        ),
        "patches": (0.7, lambda: _patches(chance, names)),
        "replacements": (0.2, lambda: [_replacement(chance)]),
    }
    return {key: value() for key, (share, value) in parts.items() if chance.random() < share}


_REPLACED: tuple[Mapping[str, str], ...] = (
    {"name": "app", "newTag": "9"},
    {"name": "app", "newName": "z.example/app", "digest": DIGEST},
    {"name": "app", "newName": "z", "newTag": "1", "digest": DIGEST},
    {"name": "localhost:5000/tools", "newTag": "3"},
    {"name": "reg.example:5000/x/app", "newName": "k"},
    {"name": "git.example.org/team/web", "newTag": "5"},
    {"name": "git.example.org/team/web", "digest": OTHER},
)
_OPTIONS: tuple[Object, ...] = (
    {},
    {"options": {"disableNameSuffixHash": True}},
    {"options": {"labels": {"g": "h"}}},
    {"namespace": "other"},
)
_TARGETS: tuple[Object, ...] = (
    {},
    {"name": "w.*"},
    {"labelSelector": "x=z"},
    {"annotationSelector": "n=m"},
    {"namespace": "team"},
    {"group": "apps"},
    {"version": "v1"},
)
_OPERATIONS: tuple[Object, ...] = (
    {"op": "replace", "path": "/spec/replicas", "value": 7},
    {"op": "add", "path": "/metadata/labels", "value": {"j": "k"}},
    {"op": "add", "path": "/spec/template/spec/containers/-", "value": {"name": "new", "image": "added"}},
    {"op": "add", "path": "/spec/template/spec/containers/0/args/1", "value": "inserted"},
    {"op": "remove", "path": "/spec/template/spec/initContainers/0"},
    {"op": "test", "path": "/kind", "value": "Deployment"},
    {"op": "copy", "from": "/metadata/name", "path": "/spec/template/spec/hostname"},
    {"op": "move", "from": "/spec/template/spec/volumes/0", "path": "/spec/template/spec/volumes/2"},
)
_SPECS: tuple[Object, ...] = (
    {"replicas": None},
    {"strategy": {"type": "Recreate"}},
    {"template": {"spec": {"containers": [{"name": "app", "env": [{"name": "A", "value": "2"}], "args": ["z"]}]}}},
    {"template": {"spec": {"containers": [{"name": "side", "$patch": "delete"}]}}},
    {"template": {"spec": {"volumes": [{"name": "v", "emptyDir": {}, "configMap": None}, {"name": "w"}]}}},
    {"template": {"spec": {"$patch": "replace", "containers": [{"name": "only", "image": "o"}]}}},
    {"template": {"spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}]}}},
    {"template": {"spec": {"initContainers": [{"name": "init", "image": "q"}, {"name": "init2", "image": "r"}]}}},
    {"template": {"spec": {"containers": [{"name": "app", "ports": [{"containerPort": 8000, "name": "web"}]}]}}},
    {"template": {"spec": {"imagePullSecrets": [{"name": "x"}]}}},
    {"template": {"spec": {"containers": [{"name": "app", "volumeMounts": [{"mountPath": "/w", "name": "v"}]}]}}},
)


def _patches(chance: random.Random, names: list[str]) -> list[Object]:
    pick: Callable[..., Any] = chance.choice
    out: list[Object] = []
    if chance.random() < 0.6:
        target = {"kind": pick(["Deployment", "StatefulSet"])} | pick(_TARGETS)
        out.append({"target": target, "patch": yaml.safe_dump([pick(_OPERATIONS)])})
    if chance.random() < 0.6:
        metadata: Object = {"name": pick(names)} | pick([{}, {"labels": {"sm": "1"}}, {"annotations": {"n": None}}])
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": pick(_SPECS)}
        out.append({"patch": yaml.safe_dump(body)})
    changes: tuple[tuple[float, str, Object], ...] = (
        (0.2, "Service", {"spec": {"ports": [{"port": 80, "nodePort": 30000}, {"port": 81}]}}),
        (0.1, "ConfigMap", {"$patch": "delete"}),
    )
    for share, kind, change in changes:
        if chance.random() < share:
            patch = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "any"}, **change}
            out.append({"target": {"kind": kind}, "patch": yaml.safe_dump(patch)})
    return out


def _replacement(chance: random.Random) -> Object:
    pick = chance.choice
    source = {"kind": "Service", "name": "svc"}
    source |= pick([{}, {"fieldPath": "spec.ports.0.port"}, {"fieldPath": "spec.selector.app"}])
    path = pick(
        [
            "metadata.annotations.r",
            "spec.template.spec.containers.[name=app].env.[name=A].value",
            "spec.template.spec.containers.*.image",
            "spec.template.spec.containers.0.name",
        ]
    )
    target = {"select": {"kind": "Deployment"}, "fieldPaths": [path]} | pick([{}, {"options": {"create": True}}])
    return {"source": source, "targets": [target]}
