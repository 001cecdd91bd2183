"""What displays print, as a runner reads it."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buildkit.progress import Lines
from buildkit.registry.events import Retrying

_COMMAND = re.compile(r"^\s*::|##\[", re.MULTILINE)
"""What actions/runner (the second anywhere in a line) and act (both at a line's beginning) take for a command."""


@given(text=st.text(alphabet=":#[ \t\r\n\x1b\u2028\ufeffset-env name=X|", max_size=60))
@example(text="::set-env name=PATH::/evil")
@example(text="fine\r\n::add-path::/evil")
@example(text="####[add-path]/evil")
@example(text="\x1b[0m\t::stop-commands::x")
def test_no_line_that_others_wrote_is_a_command_to_the_runner(text: str) -> None:
    """A build prints what the programs print that it has fetched: the classic builder without anything before it."""
    out = io.StringIO()
    with Lines(out, heartbeat=3600) as shown:
        shown.say(text)
        shown.beat()
        shown.notify(Retrying(blob=text, reason=text, wait=1.0, left=2))
    assert not _COMMAND.search(out.getvalue())


@pytest.mark.parametrize("text", ["a::b", "# [x]", "Step 1/2 : FROM std::string", "12:30: done"])
def test_other_lines_stay_as_they_are(text: str) -> None:
    out = io.StringIO()
    with Lines(out, heartbeat=3600) as shown:
        shown.say(text)
    assert out.getvalue() == f"{text}\n"
