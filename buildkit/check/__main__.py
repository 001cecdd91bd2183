"""``python -m buildkit.check SOURCE [ARCH …]``: the check alone, for benchmarks: no task runner is imported."""

from __future__ import annotations

import json
import sys

from buildkit.check.run import run_check
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Policy


def main(arguments: list[str]) -> int:
    report = run_check(arguments[0], Policy(require=tuple(Arch.parse(text) for text in arguments[1:])))
    json.dump(report.to_json(), sys.stdout, indent=1)
    print()
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
