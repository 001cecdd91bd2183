"""Build, check, smoke-test, split and push container images for one's own GPUs.

The story, in the order of the data: recipe → image → checks → smoke → split → push → report. ``docs/architecture.md``
draws it; ``buildkit.errors`` has the tree of exceptions.
"""

__version__ = "0.1.0"
