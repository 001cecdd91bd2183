"""The report as Markdown, for a job's summary page. Pure. (First form: verdict, stages, how to pull.)"""

from __future__ import annotations

from buildkit.report.model import Report


def to_markdown(report: Report) -> str:
    """The verdict on top, a row for each stage, the digest and how to pull it."""
    lines = [f"## {_cell(report.name)}: {report.verdict}", "", _cell(report.reason), ""]
    lines += ["| stage | result | seconds | |", "| --- | --- | ---: | --- |"]
    lines += [
        f"| {_cell(stage.name)} | {stage.verdict} | {stage.seconds:.1f} | {_cell(stage.reason[:300])} |"
        for stage in report.stages
    ]
    if report.pull:
        lines += ["", f"`docker pull {_cell(report.pull)}`"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
