"""The labels that a build writes and that checks, pushes and reports read.

Source: OCI image-spec 1.1, annotations.md ("Pre-Defined Annotation Keys"); the rest is ours.
"""

from __future__ import annotations

TITLE = "org.opencontainers.image.title"
DESCRIPTION = "org.opencontainers.image.description"
LICENSES = "org.opencontainers.image.licenses"
CREATED = "org.opencontainers.image.created"
"""Time of the commit that was built (RFC 3339, UTC), not of the build: the same commit gives the same label."""
SOURCE = "org.opencontainers.image.source"
REVISION = "org.opencontainers.image.revision"
"""The commit of the repository that holds the recipe. Which of two images is newer is decided by it."""
VERSION = "org.opencontainers.image.version"
BASE_NAME = "org.opencontainers.image.base.name"
BASE_DIGEST = "org.opencontainers.image.base.digest"

RECIPE = "buildkit.recipe"
SM = "buildkit.sm"
"""The GPU architecture that the image was built for, like ``70``."""
CUDA = "buildkit.cuda"
"""The CUDA version that the image was built with, like ``12.9``."""
SOURCE_URL = "buildkit.source.url"
SOURCE_REVISION = "buildkit.source.revision"
"""The revision of the packaged software, which known faults are listed by."""
DIRTY = "buildkit.dirty"
"""``true`` where the recipe's files differed from the commit."""
BASE_KEY = "buildkit.base.key"
"""On bases that a build made by itself: what they were made from."""
