"""For all tests."""

from __future__ import annotations

import signal

# A shell's background job ignores SIGINT, and hands that down: programs that tests start must see an interruption.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
