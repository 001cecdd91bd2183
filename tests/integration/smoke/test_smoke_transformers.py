"""The server level against transformers: good in every dtype, and with each fault patched into its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from smokeworld.server import Behaviour, serving

from buildkit.gdn import probe
from buildkit.gdn.compare import Verdict
from buildkit.gdn.faults import Fault
from buildkit.smoke import Completions, ServerReport, check_server

pytestmark = pytest.mark.slow  # needs the extra `reference`

NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def check(folder: Path, dtype: str, fault: Fault | None) -> ServerReport:
    from smokeworld.patched import Served

    probe.write(folder, dtype)
    with serving(Behaviour(answers=Served(folder, NAMES[dtype], fault).answer)) as server:
        return check_server(Completions(server.url), dtype)


@pytest.mark.parametrize("dtype", list(NAMES))
def test_transformers_loads_the_probe_and_answers_as_the_reference(dtype: str, tmp_path: Path) -> None:
    report = check(tmp_path, dtype, None)
    assert report.verdict is Verdict.PASS, report.reason
    assert report.identical + report.ties == 112
    assert report.ties == 0 or dtype == "bf16"


@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_each_fault_patched_into_transformers_is_named(fault: Fault, dtype: str, tmp_path: Path) -> None:
    report = check(tmp_path, dtype, fault)
    assert report.verdict is Verdict.FAIL
    assert [explanation.fault for explanation in report.explanations] == [fault]


def test_its_tokenizer_reads_and_writes_the_alphabet(tmp_path: Path) -> None:
    from smokeworld.upstream import transformers

    probe.write(tmp_path, "f16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in probe.prompts():
        assert tuple(tokenizer(prompt.text)["input_ids"]) == prompt.tokens
        assert tokenizer.decode(list(prompt.tokens)) == prompt.text
    assert tokenizer.eos_token_id == probe.END
