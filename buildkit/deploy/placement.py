"""Who gets which card: pods onto nodes by whole cards, the way the scheduler must (pure).

A pod's cards all come from one node, nothing is overcommitted, and a pod that fits nowhere stays Pending until someone
frees cards: Kubernetes does not evict a neighbour of equal priority for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from buildkit.deploy.objects import Node, Workload

_STEPS = 20_000
MAX_PODS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod that wants ``cards``; ``index`` counts the pods of its workload from 0."""

    workload: Workload
    index: int
    cards: int

    @property
    def title(self) -> str:
        return f"{self.workload.name or self.workload.title}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node with the pods on it, each with the numbers of its cards (illustrative: the device plugin deals them)."""

    node: Node
    pods: tuple[tuple[Pod, tuple[int, ...]], ...]

    @property
    def free(self) -> int:
        return self.node.cards - sum(len(cards) for _, cards in self.pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Nodes with their pods, and the pods that stay Pending; ``parked`` would want cards if they had replicas."""

    places: tuple[Place, ...]
    pending: tuple[Pod, ...]
    parked: tuple[Workload, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.pending

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [
                {
                    "name": p.node.name,
                    "cards": p.node.cards,
                    "free": p.free,
                    "pods": [{"pod": pod.title, "workload": pod.workload.title, "cards": list(c)} for pod, c in p.pods],
                }
                for p in self.places
            ],
            "pending": [{"pod": pod.title, "workload": pod.workload.title, "cards": pod.cards} for pod in self.pending],
            "parked": [w.title for w in self.parked],
        }

    def render(self) -> str:
        """A few lines for people."""
        lines = []
        for place in self.places:
            lines.append(f"{place.node.name}: {place.node.cards} cards, {place.free} free")
            for pod, cards in place.pods:
                word = "card" if len(cards) == 1 else "cards"
                lines.append(f"  {word} {', '.join(map(str, cards))}: {pod.workload.title} (pod {pod.index})")
        lines += self._waiting()
        lines += [f"parked at 0 replicas: {w.title}" for w in self.parked]
        return "\n".join(lines)

    def _waiting(self) -> Iterator[str]:
        """A line for each workload with pods that are Pending, also those beyond ``MAX_PODS``."""
        for _, group in groupby(self.pending, key=lambda p: id(p.workload)):
            pods = list(group)
            workload = pods[0].workload
            last = pods[-1].index if workload.replicas is None else workload.replicas - 1
            each = " each" if last > pods[0].index else ""
            yield f"Pending: {workload.title} ({_span(pods[0].index, last)}) wants {pods[0].cards}{each}"


def _span(first: int, last: int) -> str:
    return f"pod {first}" if first == last else f"pods {first} to {last}"


def place_pods(workloads: Sequence[Workload], nodes: Sequence[Node], resource: str) -> Plan:
    """A plan in which every pod has its cards, if there is one; else the hardest to place come first, the rest Pending.

    DaemonSets take their cards on each node that they may run on. Hardest are pods with the fewest nodes, then those
    with the most cards, then the earlier ones. The search for a complete plan is bounded; where it gives up, the
    greedy plan decides.
    """
    pods = _pods(workloads, nodes, resource)
    allowed = {id(w): [i for i, n in enumerate(nodes) if n.takes(w)] for w in {id(w): w for w in workloads}.values()}
    hardest = sorted(range(len(pods)), key=lambda i: (len(_options(pods[i], allowed)), -pods[i].cards))
    chosen = _search(pods, hardest, nodes, allowed)
    if chosen is None:
        chosen = _greedy(pods, hardest, nodes, allowed)
    places = []
    for number, node in enumerate(nodes):
        dealt, start = [], 0
        for index, pod in enumerate(pods):
            if chosen.get(index) == number:
                dealt.append((pod, tuple(range(start, start + pod.cards))))
                start += pod.cards
        places.append(Place(node=node, pods=tuple(dealt)))
    return Plan(
        places=tuple(places),
        pending=tuple(pod for index, pod in enumerate(pods) if index not in chosen),
        parked=tuple(w for w in workloads if not w.runs and w.cards(resource)),
    )


def can_surge(plan: Plan, workload: Workload, resource: str) -> bool:
    """Whether one more pod of ``workload`` fits beside everything that is placed."""
    wish = workload.cards(resource)
    return any(p.free >= wish and p.node.takes(workload) for p in plan.places)


@dataclass(frozen=True, slots=True)
class _PinnedPod(Pod):
    """A DaemonSet's pod: it belongs to one node."""

    node: int = 0


def _pods(workloads: Sequence[Workload], nodes: Sequence[Node], resource: str) -> list[Pod]:
    pods: list[Pod] = []
    for workload in workloads:
        cards = workload.cards(resource)
        if not cards:
            continue
        if workload.replicas is None:
            takers = [i for i, n in enumerate(nodes) if n.cards and n.takes(workload)]
            pods[:0] = [_PinnedPod(workload=workload, index=k, cards=cards, node=i) for k, i in enumerate(takers)]
        else:
            count = min(workload.replicas, MAX_PODS - len(pods))
            pods += [Pod(workload=workload, index=i, cards=cards) for i in range(count)]
    return pods


def _options(pod: Pod, allowed: dict[int, list[int]]) -> list[int]:
    return [pod.node] if isinstance(pod, _PinnedPod) else allowed[id(pod.workload)]


def _search(
    pods: Sequence[Pod], order: Sequence[int], nodes: Sequence[Node], allowed: dict[int, list[int]]
) -> dict[int, int] | None:
    """A complete assignment by depth-first search, or None where there is none or the steps are used up."""
    if sum(p.cards for p in pods) > sum(n.cards for n in nodes):
        return None
    free = [n.cards for n in nodes]
    chosen: dict[int, int] = {}
    tried: list[list[int]] = []
    steps = 0
    while len(chosen) < len(order):
        pod = pods[order[len(chosen)]]
        if len(tried) == len(chosen):
            # Nodes with equal room are alike only where every pod may use them: try the fullest that fits first.
            fits = [i for i in _options(pod, allowed) if free[i] >= pod.cards]
            tried.append(sorted(fits, key=lambda i: -free[i]))
        steps += 1
        if steps > _STEPS:
            return None
        if tried[-1]:
            node = tried[-1].pop()
            free[node] -= pod.cards
            chosen[order[len(chosen)]] = node
            continue
        tried.pop()
        if not chosen:
            return None
        index, node = chosen.popitem()
        free[node] += pods[index].cards
    return chosen


def _greedy(
    pods: Sequence[Pod], order: Sequence[int], nodes: Sequence[Node], allowed: dict[int, list[int]]
) -> dict[int, int]:
    free = [n.cards for n in nodes]
    chosen: dict[int, int] = {}
    for index in order:
        pod = pods[index]
        fits = [i for i in _options(pod, allowed) if free[i] >= pod.cards]
        if fits:
            node = min(fits, key=lambda i: free[i])
            free[node] -= pod.cards
            chosen[index] = node
    return chosen
