"""Checks Kubernetes manifests before they starve or lie: cards, Services, images, evidence; and pins what passed."""

from buildkit.deploy.check import DeployReport, check_manifests, plan_cards
from buildkit.deploy.evidence import Evidence, EvidencePolicy, EvidenceReader
from buildkit.deploy.findings import Finding, Severity
from buildkit.deploy.objects import Node
from buildkit.deploy.placement import Plan
from buildkit.deploy.rules import RULES, Settings

__all__ = [
    "RULES",
    "DeployReport",
    "Evidence",
    "EvidencePolicy",
    "EvidenceReader",
    "Finding",
    "Node",
    "Plan",
    "Settings",
    "Severity",
    "check_manifests",
    "plan_cards",
]
