"""``python -m buildkit``: the same as the installed command."""

from buildkit.cli import main

main()
