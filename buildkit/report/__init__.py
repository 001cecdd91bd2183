"""What the pipeline did, as values, and for people: ``report.json``, a step summary, one page of HTML. Pure."""

from buildkit.report.html import to_html
from buildkit.report.markdown import to_markdown
from buildkit.report.model import (
    SCHEMA,
    STAGES,
    Layer,
    Report,
    RunInfo,
    Stage,
    TimelineEvent,
)

__all__ = ["SCHEMA", "STAGES", "Layer", "Report", "RunInfo", "Stage", "TimelineEvent", "to_html", "to_markdown"]
