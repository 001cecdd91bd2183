"""Why would a push from here fail? The engine, the way to the registry, the credential, and the limits on it."""

from buildkit.doctor.findings import Area, Finding, Level, of_error
from buildkit.doctor.report import DoctorReport
from buildkit.doctor.run import DEFAULT_BUDGET, DoctorOptions, diagnose, plan

__all__ = [
    "DEFAULT_BUDGET",
    "Area",
    "DoctorOptions",
    "DoctorReport",
    "Finding",
    "Level",
    "diagnose",
    "of_error",
    "plan",
]
