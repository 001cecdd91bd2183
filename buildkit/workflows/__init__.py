"""Workflows for Gitea and GitHub: one source, its copies, the rules that it heeds, and new ones for other recipes."""

from __future__ import annotations

from buildkit.workflows.files import Written, check, create, forges, hidden, install, repository
from buildkit.workflows.rules import RULES, Finding, lint
from buildkit.workflows.settings import Settings, read_settings
from buildkit.workflows.template import SELF, Wish, pinned, render

__all__ = [
    "RULES",
    "SELF",
    "Finding",
    "Settings",
    "Wish",
    "Written",
    "check",
    "create",
    "forges",
    "hidden",
    "install",
    "lint",
    "pinned",
    "read_settings",
    "render",
    "repository",
]
