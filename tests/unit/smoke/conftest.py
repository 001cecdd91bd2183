"""One BLAS thread: the matrices are small, and threads that wait for each other on a busy machine cost ten times more."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
