"""One BLAS thread: the matrices are small, and waiting threads cost ten times as much on a busy machine."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
