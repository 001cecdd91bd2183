"""What the smoke test's reference costs, and how the known faults show in the probe's answers.

    python benchmarks/smoke.py cost         seconds and memory of the checkpoint and the reference, and of a diagnosis
    python benchmarks/smoke.py signatures   the fault-signature matrix, as Markdown (docs/evidence/fault-signatures.md)

Memory is the peak resident set of this process (Linux, getrusage in KiB).
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from buildkit.gdn import probe
from buildkit.gdn.decoder import Choice, DecoderState, complete
from buildkit.gdn.faults import Fault
from buildkit.gdn.signature import Exchange, Place, diagnose, place


def answers(fault: Fault | None) -> list[tuple[Choice, ...]]:
    """Each prompt in turn and the first once more, as a server with ``fault`` answers them."""
    out: list[tuple[Choice, ...]] = []
    stale: DecoderState | None = None
    for prompt in (*probe.prompts(), probe.prompts()[0]):
        before = stale if fault is Fault.STATE_NOT_RESET else None
        with np.errstate(all="ignore"):
            out.append(complete(probe.model(), prompt.tokens, probe.ANSWER, fault=fault, stale=before))
        stale = out[-1][-1].state
    return out


def signatures(all_answers: dict[Fault | None, list[tuple[Choice, ...]]]) -> Iterator[str]:
    """The matrix: for each fault and prompt the answer, and where it first differs from the right one in float16."""
    good = all_answers[None]
    names = [*(prompt.name for prompt in probe.prompts()), f"{probe.prompts()[0].name}, again"]
    yield "# How the known faults show in the probe's answers"
    yield ""
    yield "Written by `benchmarks/smoke.py signatures`. Each cell is the answer of a server with that fault; the number"
    yield "is the first token that a right server would not choose, with all that rounding in float16 may do."
    yield ""
    yield "| fault | " + " | ".join(names) + " |"
    yield "| --- | " + " | ".join("---" for _ in names) + " |"
    yield "| none | " + " | ".join(f"`{text(answer)}`" for answer in good) + " |"
    for fault in Fault:
        cells = []
        for answer, right in zip(all_answers[fault], good, strict=True):
            at = next((n for n, (a, b) in enumerate(zip(answer, right, strict=True)) if a.token != b.token), None)
            wrong = at is not None and place(right[at], answer[at].token, "f16") is Place.WRONG
            cells.append(f"`{text(answer)}` {at if wrong else '-'}")
        yield f"| {fault.sentence} | " + " | ".join(cells) + " |"


def text(answer: tuple[Choice, ...]) -> str:
    return probe.to_text(tuple(choice.token for choice in answer))


def cost() -> None:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        probe.write(Path(folder), "f16")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    written = time.perf_counter()
    done = answers(None)
    computed = time.perf_counter()
    prompts = (*probe.prompts(), probe.prompts()[0])
    faulty = answers(Fault.KEY_BAND_ZEROED)
    exchanges = [
        Exchange(prompt=prompt.tokens, answer=tuple(choice.token for choice in answer))
        for prompt, answer in zip(prompts, faulty, strict=True)
    ]
    diagnosing = time.perf_counter()
    found = diagnose(probe.model(), exchanges, "f16")
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"checkpoint of {size / 1e6:.1f} MB: {written - begun:.2f} s")
    print(f"reference, {len(done)} answers of {probe.ANSWER} tokens: {computed - written:.2f} s")
    print(f"diagnosis ({', '.join(one.fault.value for one in found)}): {ended - diagnosing:.2f} s")
    print(f"peak memory: {peak / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("cost", "signatures"))
    if parser.parse_args().what == "cost":
        cost()
    else:
        candidates: list[Fault | None] = [None, *Fault]
        print("\n".join(signatures({fault: answers(fault) for fault in candidates})))


if __name__ == "__main__":
    main()
