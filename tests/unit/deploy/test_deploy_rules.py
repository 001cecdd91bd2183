"""Each rule finds the manifest that it stands for, where it stands, and leaves its sound neighbour alone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.deploy import RULES, DeployReport, Finding, Severity, check_manifests
from buildkit.deploy.rules import Settings
from buildkit.errors import UsageError

DIGEST = "sha256:" + "a" * 64
SOUND = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  strategy: {type: Recreate}
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: web
          image: git.example.org/team/web@DIGEST
          command: [serve, --port, "8000"]
          ports:
            - {name: http, containerPort: 8000}
          readinessProbe: {httpGet: {path: /, port: http}}
          resources: {limits: {nvidia.com/gpu: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports:
    - {port: 80, targetPort: http}
""".replace("DIGEST", DIGEST)


def check(text: str, *, node_gpus: int | None = 1) -> DeployReport:
    return check_manifests([], text=text, node_gpus=node_gpus)


def found(text: str, *, node_gpus: int | None = 1) -> list[Finding]:
    return [f for f in check(text, node_gpus=node_gpus).findings if f.rule != "evidence-unread"]


def only(text: str, *, node_gpus: int | None = 1) -> Finding:
    findings = found(text, node_gpus=node_gpus)
    assert len(findings) == 1, "\n".join(f.render() for f in findings)
    assert findings[0].rule in RULES
    assert findings[0].remedy
    return findings[0]


def line_of(text: str, needle: str) -> int:
    return text[: text.index(needle)].count("\n") + 1


def test_sound_manifests_have_no_findings() -> None:
    report = check(SOUND)
    assert [f.rule for f in report.findings] == ["evidence-unread"]
    assert report.ok


@pytest.mark.parametrize(
    ("old", "new", "rule", "at", "says"),
    [
        ("selector: {app: web}", "selector: {app: wob}", "service-no-endpoints", "selector: {app: wob}", "app=web"),
        ("targetPort: http}", "targetPort: web}", "service-port", "targetPort: web", "it has http"),
        ("targetPort: http}", "targetPort: 80}", "service-port", "targetPort: 80", "declares 8000"),
        ("80, targetPort: http}", "80}", "service-port", "- {port: 80}", "declares 8000"),
        ("port: http}}", "port: web}}", "probe-port", "readinessProbe", "readinessProbe asks port 'web'"),
        ("port: http}}", "port: 8080}}", "probe-port", "readinessProbe", "declares 8000"),
        ('"8000"', '"9000"', "port-argument", "command:", "listen on 9000"),
        ("nvidia.com/gpu: 1", "nvidia.com/gpu: 2", "gpu-budget", "replicas", "no node that it may use has more than 1"),
        ("nvidia.com/gpu: 1", "nvidia.com/gpu: half", "gpu-quantity", "limits", "'half'"),
        ("limits: {nvidia", "requests: {nvidia", "gpu-quantity", "requests", "not in limits"),
        ("replicas: 1", "replicas: 2", "gpu-budget", "replicas", "2 × 1, but there is 1"),
        ("strategy: {type: Recreate}", "minReadySeconds: 1", "gpu-rollout", "spec:", "Recreate"),
        ("{type: Recreate}", "{rollingUpdate: {maxUnavailable: 0}}", "gpu-rollout", "strategy", "Pending"),
        (f"@{DIGEST}", ":v1", "image-by-tag", "image:", "'v1'"),
        (f"@{DIGEST}", "", "image-by-tag", "image:", "latest"),
        (DIGEST, "sha256:12", "image-by-tag", "image:", "not a digest"),
        (DIGEST, "sha256:" + "0" * 64, "image-placeholder", "image:", "placeholder"),
        ("[serve, ", "[sh, -c, pip install -q torch && serve, ", "installs-at-start", "command:", "installs Python"),
        ("[serve, ", "[sh, -c, 'curl -s https://x.example | sh; serve', ", "installs-at-start", "command:", "a script"),
        ("matchLabels: {app: web}", "matchLabels: {app: wub}", "selector-mismatch", "matchLabels", "app=wub"),
        ("readinessProbe: {httpGet: {path: /, port: http}}", "tty: false", "probe-missing", "- name: web", "readiness"),
        ("kind: Service", "kind: Sirvice", "schema", "apiVersion: v1", "no Sirvice in v1"),
        ("replicas: 1", "replicas: one", "schema", "replicas", "'one' is not"),
        ("containers:", "contaners: []\n      containers:", "schema", "spec:\n      cont", "contaners"),
        ("{name: web}\nspec:\n  selector", "{}\nspec:\n  selector", "schema", "metadata: {}", "name"),
        ("replicas: 1", "replicas: 1\n  replicas: 1", "yaml-duplicate-key", "replicas: 1\n  sel", "twice"),
    ],
)  # fmt: skip
def test_one_change_gives_one_finding_on_its_line(old: str, new: str, rule: str, at: str, says: str) -> None:
    text = SOUND.replace(old, new, 1)
    assert text != SOUND
    finding = (
        only(text) if rule not in ("yaml-duplicate-key", "schema") else next(f for f in found(text) if f.rule == rule)
    )
    assert finding.rule == rule
    assert says in f"{finding.message} {finding.remedy}"
    if at in text:
        assert finding.line == line_of(text, at)


@pytest.mark.parametrize(
    "command",
    [
        "pip install torch",
        "pip3.11 install -r requirements.txt",
        "python3 -m pip install x",
        "uv pip install x",
        "uv sync --frozen",
        "apt-get update && true",
        "apt-get -y install curl",
        "apk add --no-cache bash",
        "conda install x",
        "curl -fsSL https://x.example | bash",
        "wget -qO- https://x.example | sudo sh",
        "python -mpip install x",
        "git clone https://x.example/y",
        "huggingface-cli download org/model",
        "npm ci",
    ],
)
def test_a_start_that_fetches_is_found(command: str) -> None:
    text = SOUND.replace('[serve, --port, "8000"]', json.dumps(["sh", "-c", f"{command} && exec serve"]))
    assert only(text).rule == "installs-at-start"


@pytest.mark.parametrize(
    "command",
    [
        "pip install --no-index --find-links /wheels x",
        "pip --version",
        "serve --help-install",
        "curl -f localhost:8000/health",
        "echo done # pip install nothing",
        "git status",
    ],
)
def test_a_start_that_stays_at_home_is_not(command: str) -> None:
    text = SOUND.replace('[serve, --port, "8000"]', json.dumps(["sh", "-c", command]))
    assert not found(text)


def test_a_probe_of_another_host_is_left_alone() -> None:
    assert not found(SOUND.replace("{path: /, port: http}", "{path: /, port: 9000, host: 10.0.0.1}"))


def test_pip_no_index_is_believed() -> None:
    text = SOUND.replace(
        '[serve, --port, "8000"]', '[sh, -c, pip install x]\n          env: [{name: PIP_NO_INDEX, value: "1"}]'
    )
    assert not found(text)


def test_a_parked_workload_is_no_endpoint() -> None:
    finding = only(SOUND.replace("replicas: 1", "replicas: 0"))
    assert finding.rule == "service-no-endpoints"
    assert "selects only Deployment/web, which has 0 replicas" in finding.message


def test_a_service_of_another_namespace_has_no_endpoints() -> None:
    finding = only(
        SOUND.replace("{name: web}\nspec:\n  selector: {app", "{name: web, namespace: b}\nspec:\n  selector: {app")
    )
    assert "has these labels in namespace default" in finding.message


def test_services_without_selector() -> None:
    bare = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: [{port: 80}]}\n"
    assert only(bare).rule == "service-no-endpoints"
    slice_ = (
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nendpoints: []\n"
        "metadata: {name: s-1, labels: {kubernetes.io/service-name: s}}\n"
    )
    assert not found(bare + slice_)
    assert not found(bare.replace("{ports: [{port: 80}]}", "{type: ExternalName, externalName: x.example}"))


def test_the_model_that_keeps_its_state_on_one_card() -> None:
    two = SOUND.replace("gpu: 1", "gpu: 2").replace("[serve,", "[serve, --w, /models/clef-flash,")
    assert only(two, node_gpus=2).rule == "gpus-per-model"
    devices = SOUND.replace("[serve,", '[serve, --w, /models/clef-flash, --d, "0,1",')
    assert "2 devices" in only(devices).message
    annotated = SOUND.replace("gpu: 1", "gpu: 2").replace(
        "labels: {app: web}}", 'labels: {app: web}, annotations: {buildkit/max-gpus: "1"}}'
    )
    assert "says 1" in only(annotated, node_gpus=2).message
    other = SOUND.replace("gpu: 1", "gpu: 2").replace("[serve,", '[serve, --d, "0,1",')
    assert not found(other, node_gpus=2)


@pytest.mark.parametrize(
    "words", ['--d, "0,1"', "--tensor-parallel-size=2", '--tp, "2"', '--tp, "1", --pipeline-parallel-size, "2"']
)
def test_devices_on_the_command_line_are_the_cards_of_the_pod(words: str) -> None:
    finding = only(SOUND.replace("[serve,", f"[serve, {words},"))
    assert (finding.rule, "2 devices" in finding.message) == ("device-mismatch", True)


def test_the_budget_is_not_known_without_nodes() -> None:
    finding = only(SOUND, node_gpus=None)
    assert (finding.rule, finding.severity) == ("gpu-budget", Severity.UNKNOWN)


def test_a_node_object_says_how_many_cards_there_are() -> None:
    node = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n}\nstatus: {allocatable: {nvidia.com/gpu: '0'}}\n"
    assert "no node that it may use has more than 0" in only(SOUND + node, node_gpus=None).message
    assert not found(SOUND + node.replace("'0'", "'1'"), node_gpus=None)
    listed = yaml.safe_dump(
        {"apiVersion": "v1", "kind": "List", "items": [yaml.safe_load(node[4:].replace("'0'", "'1'"))]}
    )
    assert not found(SOUND + "---\n" + listed, node_gpus=None)
    wrong = SOUND.replace("      containers:", "      nodeSelector: {gpu: a100}\n      containers:")
    assert "no node matches" in only(wrong + node, node_gpus=None).message


def test_a_parameter_file_says_how_many_cards_there_are(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes:\n  - {name: a, gpus: 1}\n")
    assert check_manifests([], text=SOUND, nodes=file).plan is not None
    file.write_text("nodes:\n  - {name: a}\n")
    with pytest.raises(UsageError, match=r"nodes.yaml:2: a node needs name and gpus"):
        check_manifests([], text=SOUND, nodes=file)
    file.write_text("a: 1\n")
    with pytest.raises(UsageError, match="no Node object"):
        check_manifests([], text=SOUND, nodes=file)


def test_an_autoscaler_must_not_promise_more_than_there_is() -> None:
    scaler = (
        "---\napiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {name: h}\n"
        "spec: {maxReplicas: 3, scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: web}}\n"
    )
    assert "3 × 1 cards, but beside the others there is room for 1" in only(SOUND + scaler).message
    assert not found(SOUND + scaler, node_gpus=3)
    other = SOUND.partition("---")[0].replace("name: web", "name: other").replace("app: web", "app: other")
    assert "room for 2" in only(SOUND + scaler + "---\n" + other, node_gpus=3).message
    parked = SOUND.replace("replicas: 1", "replicas: 0")
    assert [f.rule for f in found(parked + scaler)] == ["service-no-endpoints"]
    assert not found(SOUND + scaler.replace("maxReplicas: 3", "maxReplicas: 900"), node_gpus=2000)


def test_an_ingress_needs_its_service_and_port() -> None:
    ingress = (
        "---\napiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: i}\nspec: {defaultBackend: "
        "{service: {name: web, port: {number: 80}}}}\n"
    )
    assert not found(SOUND + ingress)
    assert only(SOUND + ingress.replace("number: 80", "number: 81")).rule == "ingress-backend"
    assert only(SOUND + ingress.replace("name: web,", "name: wub,")).rule == "ingress-backend"


def mounted(name: str) -> str:
    return SOUND.replace(
        "      containers:", f"      volumes: [{{name: code, configMap: {{name: {name}}}}}]\n      containers:"
    )


def config_map(name: str, data: str) -> str:
    return f"---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {data}\n"


def test_config_maps_that_roll_no_pod() -> None:
    hand = only(mounted("code") + config_map("code", "{app.py: x}"))
    assert (hand.rule, hand.severity) == ("configmap-handmade", Severity.ERROR)
    plain = only(mounted("code") + config_map("code", "{COLOUR: x}"))
    assert (plain.rule, plain.severity) == ("configmap-handmade", Severity.WARNING)
    assert not found(config_map("code", "{app.py: x}")[4:])
    rolled = mounted("code").replace("labels: {app: web}}", "labels: {app: web}, annotations: {checksum/config: x}}")
    assert not found(rolled + config_map("code", "{app.py: x}"))


def test_a_config_map_with_its_own_hash_is_generated_and_one_with_another_was_edited() -> None:
    assert not found(mounted("lit-28g5bt9kh6") + config_map("lit-28g5bt9kh6", '{A: "1", B: x=y}'))
    edited = only(mounted("lit-28g5bt9kh6") + config_map("lit-28g5bt9kh6", '{A: "2", B: x=y}'))
    assert edited.rule == "configmap-stale"


def test_a_config_map_that_is_not_there_was_applied_by_hand() -> None:
    assert only(mounted("code")).rule == "configmap-missing"
    optional = mounted("code").replace("{name: code}}", "{name: code, optional: true}}")
    assert not found(optional)


def test_a_script_in_a_config_map_is_read_too() -> None:
    text = mounted("s-x") + config_map("s-x", '{start.sh: "#!/bin/sh\\npip install x\\n"}')
    assert [f.rule for f in found(text)] == ["configmap-handmade", "installs-at-start"]
    assert "line 2" in found(text)[1].message


@pytest.mark.parametrize(
    ("key", "command", "read"),
    [
        ("start", "[sh, /code/start]", True),
        ("start", "[sh, -c, exec /code/start]", True),
        ("start", "[serve]", False),
        ("main.py", "[serve]", True),
        ("notes.md", "[serve]", False),
    ],
)
def test_a_script_is_known_by_its_name_or_because_it_is_run(key: str, command: str, read: bool) -> None:
    text = mounted("s-x").replace('[serve, --port, "8000"]', command)
    text += config_map("s-x", f"{{{key}: 'import os; os.system(\"pip install x\")'}}")
    rules = [f.rule for f in found(text)]
    assert ("installs-at-start" in rules) == read


def test_a_command_in_a_variable_is_read_too() -> None:
    text = SOUND.replace(
        '[serve, --port, "8000"]', '[sh, -c, "$(START)"]\n          env: [{name: START, value: pip install x}]'
    )
    finding = only(text)
    assert (finding.rule, "by the variable START" in finding.message) == ("installs-at-start", True)
    assert finding.line == line_of(text, "env: [")


@pytest.mark.parametrize("placeholder", ["{{ .Values.x }}", "{{ x }}-y", "<%= x %>", "${X}/y"])
def test_a_placeholder_that_parses_is_told_as_a_template(placeholder: str) -> None:
    for old, new in (
        (f"git.example.org/team/web@{DIGEST}", f'"{placeholder}"'),
        ("metadata: {name: web}\nspec:\n  selector", f'metadata: {{name: "{placeholder}"}}\nspec:\n  selector'),
    ):
        text = SOUND.replace(old, new)
        finding = only(text)
        assert finding.rule == "template"
        assert finding.line == line_of(text, placeholder)


def test_what_a_controller_made_is_not_counted_beside_it() -> None:
    pod = (
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: web-1, labels: {app: web}, ownerReferences: ["
        "{apiVersion: apps/v1, kind: ReplicaSet, name: web-x, uid: u, controller: true}]}\n"
        f"spec: {{containers: [{{name: a, image: 'x@{DIGEST}', readinessProbe: {{tcpSocket: {{port: 1}}}},"
        " resources: {limits: {nvidia.com/gpu: 1}}}]}\n"
    )
    replica_set = (
        SOUND.partition("---")[0]
        .replace("kind: Deployment", "kind: ReplicaSet")
        .replace("  strategy: {type: Recreate}\n", "")
        .replace(
            "metadata: {name: web}\nspec:\n  replicas",
            "metadata: {name: web-x, ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: web, uid: v,"
            " controller: true}]}\nspec:\n  replicas",
        )
    )
    assert not found(SOUND + "---\n" + replica_set + pod)
    assert "gpu-budget" in {f.rule for f in found(SOUND + pod)}, "without its owner it counts"


def test_nothing_to_check_is_no_pass(tmp_path: Path) -> None:
    for text in ("", "---\n", "# only a comment\n", b"\n"):
        report = check_manifests([], text=text)
        assert [f.rule for f in report.findings] == ["nothing-to-check"]
        assert not report.ok
    assert [f.rule for f in check_manifests([tmp_path]).findings] == ["nothing-to-check"]
    (tmp_path / "a.yaml").symlink_to("nowhere.yaml")
    (tmp_path / "b.yaml").symlink_to("b.yaml")
    (tmp_path / "sub.yaml").mkdir()
    findings = check_manifests([tmp_path]).findings
    assert [(f.rule, Path(f.file).name) for f in findings] == [("yaml", "a.yaml"), ("yaml", "b.yaml")]


def test_a_chart_is_no_folder_of_manifests(tmp_path: Path) -> None:
    (tmp_path / "chart" / "templates").mkdir(parents=True)
    (tmp_path / "chart" / "Chart.yaml").write_text("apiVersion: v2\nname: x\nversion: 1.0.0\n")
    (tmp_path / "chart" / "values.yaml").write_text("replicas: 1\n")
    (tmp_path / "chart" / "templates" / "a.yaml").write_text("replicas: {{ .Values.replicas }}\n")
    (tmp_path / "web.yaml").write_text(SOUND)
    for folder in (tmp_path, tmp_path / "chart"):
        findings = [f for f in check_manifests([folder], node_gpus=1).findings if f.rule != "evidence-unread"]
        assert [(f.rule, Path(f.file).name, f.line) for f in findings] == [("template", "Chart.yaml", 1)]


def test_bytes_that_are_no_text_are_told_with_their_line() -> None:
    report = check_manifests([], text=SOUND.encode() + b"# \xe9t\xe9\n", node_gpus=1)
    assert [(f.rule, f.line, f.file) for f in report.findings] == [("yaml", SOUND.count("\n") + 1, "<stdin>")]
    assert check_manifests([], text="\ufeff".encode() + SOUND.encode(), node_gpus=1).ok
    assert not check_manifests([], text=SOUND.encode("utf-16"), node_gpus=1).ok


def test_a_file_with_an_odd_name_is_told_on_one_line(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\n\xff.yaml")).write_text("a: [\n")
    report = check_manifests([tmp_path])
    assert report.render().encode().count(b"\n") == 2
    assert json.dumps(report.to_json()).encode()
    with pytest.raises(UsageError):
        check_manifests(["a\0b"])
    with pytest.raises(UsageError):
        check_manifests(["9" * 5000])


def test_the_same_object_twice() -> None:
    assert only(SOUND + "---\n" + SOUND.partition("---\n")[2]).rule == "duplicate-object"


def test_custom_resources_are_told_as_not_checked_and_their_pods_are() -> None:
    text = (
        "apiVersion: argoproj.io/v1alpha1\nkind: Rollout\nmetadata: {name: r}\nspec:\n  template:\n    spec:\n"
        "      containers: [{name: a, image: x}]\n"
    )
    assert [(f.rule, f.severity) for f in found(text)] == [
        ("image-by-tag", Severity.ERROR),
        ("schema", Severity.UNKNOWN),
    ]


def test_objects_that_are_none() -> None:
    for text in ("a: 1\n", "- 1\n", "x\n", "kind: Pod\n", "apiVersion: ../../v1\nkind: ../x\nmetadata: {name: a}\n"):
        assert {f.rule for f in found(text)} == {"schema"}, text


def test_another_resource_name_for_cards() -> None:
    text = SOUND.replace("nvidia.com/gpu", "amd.com/gpu")
    report = check_manifests([], text=text, node_gpus=0, settings=Settings(resource="amd.com/gpu"))
    assert "gpu-budget" in {f.rule for f in report.findings}


def test_wrong_settings_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_manifests([tmp_path / "none"])
    with pytest.raises(UsageError, match="node-gpus"):
        check(SOUND, node_gpus=-1)
    with pytest.raises(UsageError, match="no schemas"):
        check_manifests([], text=SOUND, settings=Settings(kubernetes="0.1"))


def test_the_report_says_what_is_wrong_where() -> None:
    report = check(SOUND.replace("replicas: 1", "replicas: 0"))
    assert re.search(
        r"^<stdin>:24: error \[service-no-endpoints\] Service/web: .*\n    -> ", report.render(), re.MULTILINE
    )
    assert report.render().splitlines()[-1].startswith("FAIL: 2 objects in 1 files, 1 errors")
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is False
    assert document["findings"][0]["line"] == 24
    assert document["plan"]["parked"] == ["Deployment/web"]


JUNK: st.SearchStrategy[object] = st.sampled_from(
    [None, True, 0, -1, 2**70, 1.5, float("nan"), "", "²", "9" * 5000, "x", [], {}, [None], {"": None}, [[[]]], "50%"]
)
EVERYTHING = list(yaml.safe_load_all(SOUND)) + [
    yaml.safe_load(t)
    for t in (
        "{apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {name: i}, spec: {rules: [{http: {paths:"
        " [{backend: {service: {name: x, port: {number: 3}}}}]}}]}}",
        "{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: h, namespace: default},"
        " spec: {maxReplicas: 9, scaleTargetRef: {kind: Deployment, name: web}}}",
        "{apiVersion: batch/v1, kind: CronJob, metadata: {name: c}, spec: {jobTemplate: {spec: {parallelism: 3,"
        " template: {spec: {initContainers: [{name: i}], containers: [{name: a, image: 'x:1',"
        " command: [pip, install, x], envFrom: [{configMapRef: {name: cm}}], env: [{name: A, value: b}]}]}}}}}}",
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: cm-2456789bcd}, data: {a.sh: 'pip install x'}}",
        "{apiVersion: v1, kind: Node, metadata: {name: n}, spec: {taints: [{key: a, effect: NoSchedule}]},"
        " status: {capacity: {nvidia.com/gpu: 2}}}",
    )
]


def paths(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix] + [p for key, child in children for p in paths(child, (*prefix, key))]


@given(st.lists(st.tuples(st.sampled_from(paths(EVERYTHING)[1:]), JUNK), max_size=6), st.sampled_from([None, 0, 2]))
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_a_manifest_there_is_a_report(
    changes: list[tuple[tuple[str | int, ...], object]], cards: int | None
) -> None:
    documents = json.loads(json.dumps(EVERYTHING))
    for path, junk in changes:
        here = documents
        try:
            for step in path[:-1]:
                here = here[step]
            here[path[-1]] = junk
        except (LookupError, TypeError):
            continue  # an earlier change took the place away
    report = check(yaml.safe_dump_all(documents), node_gpus=cards)
    assert json.dumps(report.to_json())
    assert "\n" not in "".join(f.message for f in report.findings if len(f.render().splitlines()) != 2)
