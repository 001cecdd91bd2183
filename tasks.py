"""The tasks of this repository: ``invoke --list``. The same ones are installed as the command ``buildkit``."""

from buildkit.tasks import namespace

ns = namespace
