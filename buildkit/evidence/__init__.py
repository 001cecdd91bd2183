"""Evidence travels with the image: reports, checks and an SBOM as OCI referrers of what they are about."""

from buildkit.evidence.artifact import (
    CHECK_TYPE,
    KINDS,
    REPORT_TYPE,
    SBOM_TYPE,
    Artifact,
    ArtifactFile,
    Attached,
    Fetched,
    check_artifact,
    evidence_artifact,
    report_artifact,
    sbom_artifact,
)
from buildkit.evidence.overview import Overview, overview
from buildkit.evidence.sbom import make_sbom
from buildkit.evidence.store import (
    attach,
    attach_all,
    fetch,
    fetch_report,
    list_artifacts,
    newest,
    read,
    read_evidence,
)

__all__ = [
    "CHECK_TYPE",
    "KINDS",
    "REPORT_TYPE",
    "SBOM_TYPE",
    "Artifact",
    "ArtifactFile",
    "Attached",
    "Fetched",
    "Overview",
    "attach",
    "attach_all",
    "check_artifact",
    "evidence_artifact",
    "fetch",
    "fetch_report",
    "list_artifacts",
    "make_sbom",
    "newest",
    "overview",
    "read",
    "read_evidence",
    "report_artifact",
    "sbom_artifact",
]
