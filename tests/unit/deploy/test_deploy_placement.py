"""Who gets which card: never more than there are, and nobody waits who could be placed."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.deploy.documents import read_documents
from buildkit.deploy.objects import Node, Workload, quantity, read_object, read_workload, supposed_nodes
from buildkit.deploy.placement import can_surge, place_pods

GPU = "nvidia.com/gpu"


def workload(text: str) -> Workload:
    found = read_workload(read_object(read_documents(text, "m.yaml")[0][0].root))
    assert found is not None
    return found


def deployment(cards: int, replicas: int = 1, extra: str = "{}", kind: str = "Deployment") -> Workload:
    return workload(
        f"{{kind: {kind}, metadata: {{name: d{cards}}}, spec: {{replicas: {replicas}, template: {{spec: {{"
        f"nodeSelector: {extra}, containers: [{{resources: {{limits: {{{GPU}: {cards}}}}}}}]}}}}}}}}"
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_a_plan_is_complete_exactly_when_one_exists(wishes: list[tuple[int, int]], sizes: list[int]) -> None:
    workloads = [deployment(cards, replicas) for cards, replicas in wishes]
    nodes = [Node(name=f"n{i}", cards=n) for i, n in enumerate(sizes)]
    plan = place_pods(workloads, nodes, GPU)
    pods = [cards for cards, replicas in wishes for _ in range(replicas)]
    possible = any(
        all(sum(c for c, n in zip(pods, chosen, strict=True) if n == i) <= size for i, size in enumerate(sizes))
        for chosen in product(range(len(sizes)), repeat=len(pods))
    )
    assert plan.complete == possible
    placed = 0
    for place in plan.places:
        numbers = [n for _, cards in place.pods for n in cards]
        assert sorted(numbers) == list(range(len(numbers)))
        assert place.free == place.node.cards - len(numbers) >= 0
        placed += len(place.pods)
    assert placed + len(plan.pending) == len(pods)
    for pod in plan.pending:
        assert all(place.free < pod.cards for place in plan.places)


def test_labels_taints_affinity_and_names_decide_where_a_pod_may_go() -> None:
    labelled = Node(name="a", cards=1, labels={"gpu": "v100", "rank": "3"})
    tainted = Node(name="b", cards=1, labels={}, taints=({"key": "gpu", "value": "yes", "effect": "NoSchedule"},))
    affinity = "{nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [%s]}}}"

    def takes(node: Node, spec: str) -> bool:
        return node.takes(workload(f"{{kind: Pod, spec: {{containers: [{{}}], {spec}}}}}"))

    assert takes(labelled, "nodeSelector: {gpu: v100}")
    assert not takes(labelled, "nodeSelector: {gpu: h200}")
    assert takes(labelled, "nodeName: a")
    assert not takes(labelled, "nodeName: b")
    assert not takes(tainted, "nodeSelector: {}")
    assert takes(tainted, "tolerations: [{key: gpu, operator: Exists}]")
    assert takes(tainted, "tolerations: [{key: gpu, value: 'yes', effect: NoSchedule}]")
    assert not takes(tainted, "tolerations: [{key: gpu, value: 'no'}]")
    assert takes(tainted, "tolerations: [{operator: Exists}]")
    for expression, expected in {
        "{key: gpu, operator: In, values: [v100, p100]}": True,
        "{key: gpu, operator: NotIn, values: [v100]}": False,
        "{key: gpu, operator: Exists}": True,
        "{key: gpu, operator: DoesNotExist}": False,
        "{key: rank, operator: Gt, values: ['2']}": True,
        "{key: rank, operator: Lt, values: ['2']}": False,
        "{key: gpu, operator: Gt, values: ['2']}": False,
        "{key: gpu, operator: Maybe}": False,
    }.items():
        assert takes(labelled, "affinity: " + affinity % f"{{matchExpressions: [{expression}]}}") is expected, (
            expression
        )
    fields = "{matchFields: [{key: metadata.name, operator: In, values: [a]}]}"
    assert takes(labelled, "affinity: " + affinity % fields)
    assert Node(name="x", cards=1).takes(deployment(1, extra="{gpu: any}"))


def test_cards_given_for_each_node_are_counted_for_each_node_that_the_selectors_tell_apart() -> None:
    def nodes(*selectors: str) -> list[str]:
        return [n.name for n in supposed_nodes([deployment(1, extra=s) for s in selectors], 2, GPU)]

    assert nodes("{}", "{}") == ["node"]
    assert nodes("{gpu: v100}", "{}") == ["node"]
    assert nodes("{gpu: v100}", "{zone: a}", "{gpu: v100, zone: a}") == ["node"]
    assert nodes("{gpu: v100}", "{gpu: h200}", "{gpu: h200, zone: b}") == ["gpu=v100", "gpu=h200,zone=b"]
    assert nodes("{kubernetes.io/hostname: a}", "{kubernetes.io/hostname: b}") == ["a", "b"]
    assert [n.name for n in supposed_nodes([deployment(0, extra="{gpu: x}"), deployment(1)], 2, GPU)] == ["node"]

    workloads = [
        deployment(2, extra="{gpu: v100}"),
        deployment(2, extra="{gpu: h200}"),
        deployment(1),
        workload(
            "{kind: Pod, metadata: {name: p}, spec: {affinity: {nodeAffinity: {requiredDuringSchedulingIgnored"
            "DuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [v100]}]}]}}},"
            f" containers: [{{resources: {{limits: {{{GPU}: 1}}}}}}]}}}}"
        ),
    ]
    plan = place_pods(workloads, supposed_nodes(workloads, 2, GPU), GPU)
    assert [[p.title for p, _ in place.pods] for place in plan.places] == [["d2-0"], ["d2-0"]]
    assert [p.title for p in plan.pending] == ["d1-0", "p-0"]


def test_a_daemonset_takes_cards_on_each_of_its_nodes() -> None:
    nodes = [Node(name="a", cards=2, labels={}), Node(name="b", cards=2, labels={}), Node(name="c", cards=0, labels={})]
    plan = place_pods([deployment(2), deployment(1, kind="DaemonSet")], nodes, GPU)
    assert [len(p.pods) for p in plan.places] == [1, 1, 0]
    assert [p.title for p in plan.pending] == ["d2-0"]


def test_pods_that_wait_are_told_in_a_line_for_each_workload() -> None:
    nodes = [Node(name="a", cards=2)]
    for replicas, says in (
        (3, ["Pending: Deployment/d1 (pod 2) wants 1"]),
        (5, ["Pending: Deployment/d1 (pods 2 to 4) wants 1 each"]),
        (10**9, ["Pending: Deployment/d1 (pods 2 to 999999999) wants 1 each"]),
    ):
        plan = place_pods([deployment(1, replicas)], nodes, GPU)
        assert [row for row in plan.render().splitlines() if row.startswith("Pending")] == says


def test_a_surge_needs_a_free_card() -> None:
    one = deployment(1)
    assert can_surge(place_pods([one], [Node(name="a", cards=2)], GPU), one, GPU)
    assert not can_surge(place_pods([one], [Node(name="a", cards=1)], GPU), one, GPU)


def test_init_containers_count_where_they_want_more_than_the_rest() -> None:
    pod = "{kind: Pod, spec: {initContainers: [%s], containers: [%s]}}"

    def container(cards: int, extra: str = "") -> str:
        return f"{{{extra}resources: {{limits: {{{GPU}: '{cards}'}}}}}}"

    assert workload(pod % (container(3), container(1))).cards(GPU) == 3
    assert workload(pod % (container(1), container(2) + ", " + container(1))).cards(GPU) == 3
    sidecar = container(1, "restartPolicy: Always, ")
    assert workload(pod % (sidecar, container(1))).cards(GPU) == 2
    assert workload(pod % (sidecar + ", " + container(2), container(1))).cards(GPU) == 3


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("{kind: Deployment, spec: {template: {}}}", 1),
        ("{kind: Deployment, spec: {replicas: 0}}", 0),
        ("{kind: StatefulSet, spec: {replicas: 3}}", 3),
        ("{kind: DaemonSet}", None),
        ("{kind: Pod}", 1),
        ("{kind: Job, spec: {parallelism: 4, completions: 2}}", 2),
        ("{kind: Job, spec: {suspend: true}}", 0),
        ("{kind: CronJob, spec: {jobTemplate: {spec: {parallelism: 2}}}}", 2),
        ("{kind: CronJob, spec: {suspend: true}}", 0),
        ("{kind: Rollout, spec: {replicas: 2, template: {spec: {containers: [{name: a}]}}}}", 2),
    ],
)
def test_every_kind_that_makes_pods_says_how_many(text: str, replicas: int | None) -> None:
    assert workload(text).replicas == replicas


def test_other_kinds_make_no_pods() -> None:
    for text in ("{kind: Service}", "{kind: Widget, spec: {template: {}}}", "x: 1", "[1, 2]"):
        assert read_workload(read_object(read_documents(text, "m")[0][0].root)) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("2", 2),
        ("2k", 2000),
        ("2000m", 2),
        ("1e1", 10),
        ("1.5", None),
        ("500m", None),
        (-1, None),
        (True, None),
        ("", None),
        ("²", None),
        ("9" * 40, None),
        (1.0, 1),
        (1.5, None),
        (float("nan"), None),
        (float("inf"), None),
        ("1.", 1),
        (".5", None),
        ("1.5k", 1500),
        ("1Ki", 1024),
        ("1E", 10**18),
        ("9E", 9 * 10**18),
        ("10E", None),
        ("1e-0", 1),
        ("1e999", None),
        ("10e-1", 1),
        ("3000000n", None),
        (None, None),
    ],
)
def test_quantities_of_cards_are_whole(value: object, expected: int | None) -> None:
    assert quantity(value) == expected
