"""Build a recipe's image: by BuildKit wherever it can be found, else by the engine's classic builder."""

from __future__ import annotations

from buildkit.build.clients import Chosen, Client, choose, find_clients
from buildkit.build.git import GitFacts, facts, public_url
from buildkit.build.plan import Backend, BaseImage, BuildOptions, BuildPlan, plan
from buildkit.build.run import BuildResult, build, check_disk, free_disk

__all__ = [
    "Backend",
    "BaseImage",
    "BuildOptions",
    "BuildPlan",
    "BuildResult",
    "Chosen",
    "Client",
    "GitFacts",
    "build",
    "check_disk",
    "choose",
    "facts",
    "find_clients",
    "free_disk",
    "plan",
    "public_url",
]
