"""Exit code 0 where the server in this container answers its health path; used by the image's HEALTHCHECK."""

import os
import sys
from urllib.request import urlopen


def main() -> int:
    port = int(os.environ.get("CLEF_PORT", "8000"))
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
