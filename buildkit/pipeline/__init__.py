"""Everything in one go: preflight, build, check, smoke, split, push, verify, attach, promote; and the report."""

from __future__ import annotations

from buildkit.pipeline.plan import Tags, divide_tags, parse_stages
from buildkit.pipeline.run import PipelineResult, run_pipeline
from buildkit.pipeline.stages import Job, Outcome, Stages, World
from buildkit.pipeline.timeline import Recorder
from buildkit.report import STAGES

__all__ = [
    "STAGES",
    "Job",
    "Outcome",
    "PipelineResult",
    "Recorder",
    "Stages",
    "Tags",
    "World",
    "divide_tags",
    "parse_stages",
    "run_pipeline",
]
