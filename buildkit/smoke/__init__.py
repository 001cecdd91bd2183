"""The smoke test: does an image compute what it should? Kernels by themselves, and the server end to end."""

from __future__ import annotations

from buildkit.gdn.compare import Verdict
from buildkit.smoke.client import Completions
from buildkit.smoke.report import LevelReport, SmokeReport
from buildkit.smoke.run import SmokeOptions, Subject, run_smoke
from buildkit.smoke.server import Question, ServerReport, check_server

__all__ = [
    "Completions",
    "LevelReport",
    "Question",
    "ServerReport",
    "SmokeOptions",
    "SmokeReport",
    "Subject",
    "Verdict",
    "check_server",
    "run_smoke",
]
