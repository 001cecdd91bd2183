"""Reports as the pipeline makes them: what the tests of their pages are fed with.

The kernels' figures are those of real runs on a GPU, from ``docs/evidence``; sizes and times of the push are made up by
a small model of a line with a fixed rate, without chance in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from buildkit.gdn.cases import all_cases
from buildkit.gdn.compare import tolerance
from buildkit.model import Digest
from buildkit.report import Layer, Report, RunInfo, Stage, TimelineEvent

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "gdn-kernels.json"
STARTED = datetime(2026, 11, 30, 8, 31, 5, tzinfo=UTC)
TARGET = "git.example.org/models/candle-vllm"
DIGEST = Digest.of(b"manifest")
LIMIT = 100_000_000
CHUNK = 95_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u0007\ud800`|&\"'{{7*7}}"
"""A name that tries all of it: markup, text that runs backwards, a bell, a lone surrogate, Markdown, a template."""


def begun(**changes: Any) -> Report:
    """A report in which nothing has happened yet."""
    values: dict[str, Any] = {
        "tool": "buildkit 0.1.0",
        "name": "candle-vllm",
        "started": STARTED,
        "finished": STARTED + timedelta(minutes=71, seconds=12),
        "revision": "ab12cd34ef5600112233445566778899aabbccdd",
        "target": TARGET,
        "limit": LIMIT,
    }
    return Report(**values | changes)


def good() -> Report:
    """All stages passed: divided, pushed in the face of a limit, retries and a restart."""
    timeline, uploads = push(part_sizes())
    report = begun(
        tags=("sm70-ab12cd34ef56", "sm70"),
        digest=DIGEST,
        before=before(),
        after=after(),
        timeline=timeline,
        runs=(
            RunInfo(
                started=STARTED,
                host="builder-1",
                stages=("preflight", "build", "check", "split", "push", "verify", "attach"),
                url="https://git.example.org/models/images/actions/runs/214/jobs/1",
            ),
            RunInfo(started=STARTED + timedelta(minutes=64), host="v100-box", stages=("smoke",)),
        ),
    )
    sent = sum(upload["bytes_sent"] for upload in uploads)
    stages = (
        Stage(name="preflight", verdict="pass", reason="9 of 9 ok", seconds=4.2),
        Stage(name="build", verdict="pass", reason="buildx, 11 labels", seconds=2410, data=build()),
        Stage(name="check", verdict="pass", reason="31 of 954 files have CUDA code; ok", seconds=26, data=check()),
        Stage(
            name="smoke", verdict="pass", reason="40 of 40 cases within tolerance; 6 answers", seconds=41, data=smoke()
        ),
        Stage(name="split", verdict="pass", reason="7 layers before, 41 after", seconds=512, data=split()),
        Stage(
            name="push",
            verdict="pass",
            reason=f"{sent / 1e9:.2f} GB sent",
            seconds=timeline[-1].at,
            data=pushed(uploads, timeline[-1].at),
        ),
        Stage(name="verify", verdict="pass", reason="43 blobs, by size", seconds=6.1, data=verified()),
        Stage(name="attach", verdict="pass", reason="4 artifacts", seconds=1.4),
        Stage(name="promote", verdict="pass", reason="sm70 moved from 0011aabbccdd", seconds=0.6),
    )
    for number, stage in enumerate(stages):
        report = report.with_stage(timed(stage, number))
    return report


def failed() -> Report:
    """The smoke test found the key band zeroed, the check a library without code; nothing was pushed."""
    report = begun(before=before())
    for number, stage in enumerate(
        (
            Stage(name="preflight", verdict="pass", reason="9 of 9 ok", seconds=4.2),
            Stage(name="build", verdict="pass", reason="buildx, 11 labels", seconds=2410, data=build()),
            Stage(
                name="check",
                verdict="fail",
                reason="31 of 954 files have CUDA code; 2 violations",
                seconds=26,
                data=check(bad=True),
            ),
            Stage(
                name="smoke",
                verdict="fail",
                reason="10 of 40 cases fail, first in conv_prefill",
                seconds=38,
                data=smoke("key-band-zeroed"),
            ),
            *(
                Stage(name=name, verdict="skipped", reason="check failed")
                for name in ("split", "push", "verify", "attach", "promote")
            ),
        )
    ):
        report = report.with_stage(timed(stage, number))
    return report


def untested() -> Report:
    """No GPU in CI: pushed under the commit's own tag, and not run is what the page must say."""
    report = good()
    reason = "no NVIDIA GPU here: libcuda.so.1 is not installed"
    level = {"level": "kernel", "verdict": "NOT RUN", "reason": reason, "seconds": 0.1, "same": "", "kernel": None}
    data = {
        "name": "candle-vllm",
        "verdict": "NOT RUN",
        "ok": False,
        "missing_gpu_allowed": True,
        "levels": [level | {"server": None, "diagnosis": []}],
    }
    return report.with_stage(Stage(name="smoke", verdict="not-run", reason=reason, seconds=0.1, data=data))


def broken_at_once() -> Report:
    """The first stage failed; there is nothing else."""
    return begun(revision=None).with_stage(
        Stage(name="preflight", verdict="fail", reason="no engine answers at unix:///var/run/docker.sock")
    )


def hostile() -> Report:
    """Every text is an attack."""
    report = good()
    text = HOSTILE
    document = json.loads(report.dump())
    for stage in document["stages"]:
        stage["reason"] = text
        stage["data"] = poisoned(stage["data"])
    for event in document["timeline"]:
        event["text"] = text
        event["blob"] = event["blob"] + text
    for layer in document["layers"]["before"] + document["layers"]["after"]:
        layer["label"], layer["created_by"] = text, "x/" * 4000 + text
    document |= {"name": text, "tool": text, "tags": [text], "target": text, "revision": text}
    document["runs"] = [
        {"started": document["started"], "host": text, "stages": [text], "url": url}
        for url in (
            "javascript:alert(1)",
            'https://x.example/"onmouseover="alert(1)',
            "data:text/html,<script>alert(1)</script>",
            "//x.example/",
            "https://[",
        )
    ]
    return Report.parse(json.dumps(document).encode(), where="hostile")


def huge() -> Report:
    """10,000 files, 500 layers, 5,000 events, thousands of findings, paths of 4,000 characters."""
    data = check(bad=True)
    data["files"] = [code_file(f"/opt/{'deep/' * 700}lib{n}.so", native=n % 5, total=4 + n % 7) for n in range(10_000)]
    finding = data["findings"][0]
    data["findings"] = [finding | {"path": f"/opt/{'x' * 3000}/lib{n}.so"} for n in range(10_000)]
    layers = tuple(
        Layer(
            label=f"layer {n}", digest=Digest.of(str(n).encode()), size=(n * 7919) % 97 * 10**6, created_by="RUN " * 900
        )
        for n in range(500)
    )
    timeline = tuple(
        TimelineEvent(at=n / 7, blob=f"layer {n % 500}", event="retrying", seconds=1, text="reset by peer " * 200)
        for n in range(5_000)
    )
    return (
        begun(before=layers, after=layers, timeline=timeline, digest=DIGEST)
        .with_stage(Stage(name="check", verdict="fail", reason="long " * 5000, data=data))
        .with_stage(Stage(name="smoke", verdict="fail", data=smoke("key-band-zeroed")))
    )


def wide() -> Report:
    """Thousands of what there are a few of: stages, levels, dtypes, architectures, tags, labels, questions, runs."""
    report = begun(
        tags=tuple(f"tag-{n}" for n in range(5_000)),
        runs=tuple(RunInfo(started=STARTED, stages=("build",) * 3_000) for _ in range(3_000)),
    )
    names = [f"sm_{n}" for n in range(500)]
    data = check(bad=True)
    data["policy"]["require"] = names
    judgement = data["files"][0]["judgements"][0]
    data["files"] = [
        file | {"judgements": [judgement | {"arch": name} for name in names]} for file in data["files"][:5]
    ]
    data["revisions"] *= 3_000
    level = smoke("key-band-zeroed")["levels"][0]
    case = level["kernel"]["cases"][0]
    level["kernel"]["cases"] = [case | {"dtype": f"f{n}", "outputs": case["outputs"] * 20} for n in range(100)]
    level["kernel"]["absent"] = level["diagnosis"] = ["word " * 90] * 300
    server = smoke("key-band-zeroed")["levels"][1]
    server["server"]["questions"] *= 100
    smoked = smoke() | {"levels": [level, server] * 20}
    built = build() | {"labels": {f"label-{n}": "x" * 900 for n in range(5_000)}}
    sent = pushed(push(part_sizes())[1] * 50, 100.0)
    sent["uploads"] = [upload | {"retries": ["again"] * 100, "quirks": ["odd"] * 100} for upload in sent["uploads"]]
    for name, value in (("check", data), ("smoke", smoked), ("build", built), ("push", sent)):
        report = report.with_stage(Stage(name=name, verdict="fail", data=value))
    for number in range(3_000):
        report = replace(
            report, stages=(*report.stages, Stage(name=f"stage {number}", verdict="fail", reason="|" * 999))
        )
    return report


# The parts -----------------------------------------------------------------------------------------------------------


def timed(stage: Stage, number: int) -> Stage:
    return Stage(
        name=stage.name,
        verdict=stage.verdict,
        reason=stage.reason,
        started=STARTED + timedelta(minutes=7 * number) if stage.verdict != "skipped" else None,
        seconds=stage.seconds,
        data=stage.data,
    )


def before() -> tuple[Layer, ...]:
    sizes = (
        (43_100_000, "/bin/sh -c #(nop) ADD file:5d1b in /"),
        (1_240_000_000, "RUN apt-get install cuda-toolkit-12-9 libcudnn9-cuda-12"),
        (2_310_000_000, "COPY --from=build /opt/venv /opt/venv"),
        (412_000_000, "COPY --from=build /src/target/release /opt/candle-vllm"),
        (88_400_000, "RUN install -m 755 kernels/*.so /opt/candle-vllm/lib"),
        (14_200, "COPY entrypoint.sh /usr/local/bin/"),
        (None, "RUN ldconfig"),
    )
    return tuple(
        Layer(
            label=f"layer {number}",
            digest=Digest.of(f"before {number}".encode()) if size else None,
            size=size,
            tar_size=int((size or 31_000) * 2.1),
            created_by=by,
        )
        for number, (size, by) in enumerate(sizes, 1)
    )


def part_sizes() -> tuple[int, ...]:
    """Of a divided image: 41 layers, most of them near the limit, one above it (one file, indivisible)."""
    parts = [94_700_000 - (n * 7_919_123) % 9_000_000 for n in range(34)]
    return (43_100_000, *parts[:12], 412_000_000, *parts[12:], 88_400_000, 41_300_000, 9_100_000, 1_200_000, 14_200)


def after() -> tuple[Layer, ...]:
    return tuple(
        Layer(
            label=f"layer {number}",
            digest=Digest.of(f"after {number}".encode()),
            size=size,
            tar_size=int(size * 2.1),
            created_by="/opt/candle-vllm/candle-vllm (one file)" if size > LIMIT else None,
        )
        for number, size in enumerate(part_sizes(), 1)
    )


def push(sizes: tuple[int, ...]) -> tuple[tuple[TimelineEvent, ...], list[dict[str, Any]]]:
    """Events and upload reports: 4 at a time, 11 MB/s each; blob 3 meets the limit, some are retried, 9 restarts."""
    workers = [0.4, 0.5, 0.6, 0.7]
    events: list[TimelineEvent] = []
    uploads = []
    for number, size in enumerate(sizes, 1):
        label = f"layer {number}"
        if number == 1:
            events.append(TimelineEvent(at=0.3, blob=label, event="skipped", size=size, text="already there (43.1 MB)"))
            continue
        slot = min(range(4), key=lambda n: workers[n])
        story = list(_story(label, number, size, workers[slot]))
        events += story
        sent = size + sum(e.sent or 0 for e in story if e.event == "restarted")
        took = story[-1].at - story[0].at
        uploads.append(
            {
                "label": label,
                "digest": str(Digest.of(label.encode())),
                "size": size,
                "outcome": "uploaded",
                "requests": 3 + size // CHUNK,
                "chunks": 1 + size // CHUNK,
                "chunk_size": CHUNK,
                "bytes_sent": sent,
                "bytes_resent": sent - size,
                "resumed_at": 0,
                "retries": [e.text for e in story if e.event == "retrying"],
                "restarts": [e.text for e in story if e.event == "restarted"],
                "resumes": sum(e.event == "resumed" for e in story),
                "limit_learned": LIMIT if number == 3 else None,
                "quirks": [],
                "seconds": round(took, 3),
            }
        )
        workers[slot] = story[-1].at + 0.3
    return tuple(sorted(events, key=lambda e: e.at)), uploads


def _story(label: str, number: int, size: int, at: float) -> Iterator[TimelineEvent]:
    def event(kind: Any, **values: Any) -> TimelineEvent:
        return TimelineEvent(at=round(at, 3), blob=label, event=kind, **values)

    yield event("started", size=size)
    if number == 3:
        at += 2.5
        yield event("limit", size=180_000_000, text="cloudflare refused 180.0 MB; going on with chunks of 95.0 MB")
    offset, troubled = 0, number % 8 == 6 or number == 14
    while offset < size:
        sent = min(CHUNK if size > LIMIT else 31_700_000, size - offset)
        took = sent / 11e6 * (1 + (number * 13 + offset // 10**6) % 7 / 20)
        if troubled and offset:
            troubled = False
            at += 3.1
            yield event("retrying", seconds=4.0, text="reset by peer; trying again in 4.0 s (4 left)")
            at += 4.0
            if number == 22:
                yield event(
                    "restarted", offset=0, sent=offset, text="starts again: the session is gone (31.7 MB to send again)"
                )
                offset = 0
                continue
            yield event("resumed", offset=offset, text=f"goes on at {offset / 1e6:.1f} MB")
        at += took
        offset += sent
        yield event("acknowledged", offset=offset, size=size, sent=sent, seconds=round(took, 3))
    at += 0.4
    yield event("finished", offset=size, size=size, seconds=1.0, text="done")


def pushed(uploads: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    return {
        "ok": True,
        "schema": 1,
        "source": "oci:/var/tmp/split",
        "method": "direct",
        "reason": "",
        "repository": TARGET,
        "tags": ["sm70-ab12cd34ef56"],
        "digest": str(DIGEST),
        "pull": f"{TARGET}@{DIGEST}",
        "up_to_date": False,
        "verified": "manifest and blobs",
        "seconds": round(seconds, 3),
        "bytes_compressed": 0,
        "bytes_sent": sum(upload["bytes_sent"] for upload in uploads),
        "bytes_resent": sum(upload["bytes_resent"] for upload in uploads),
        "present": ["layer 1"],
        "uploads": uploads,
        "warnings": ["the registry ignores Content-Range; whole chunks are sent again after a failure"],
    }


def verified() -> dict[str, Any]:
    blobs = [
        {"label": f"layer {n}", "digest": str(DIGEST), "size": size, "found": size, "ok": True, "detail": "ok"}
        for n, size in enumerate(part_sizes(), 1)
    ]
    return {"ok": True, "schema": 1, "deep": False, "size": sum(part_sizes()), "seconds": 6.1, "blobs": blobs}


def build() -> dict[str, Any]:
    return {
        "ok": True,
        "recipe": "candle-vllm",
        "image_id": str(Digest.of(b"config")),
        "names": ["candle-vllm:sm70"],
        "labels": {
            "buildkit.recipe": "candle-vllm",
            "org.opencontainers.image.created": "2026-11-30T08:31:05Z",
            "org.opencontainers.image.revision": "ab12cd34ef5600112233445566778899aabbccdd",
            "org.opencontainers.image.source": "https://git.example.org/models/images",
            "org.opencontainers.image.title": "candle-vllm",
        },
        "backend": "buildx",
        "reason": "the recipe uses secrets",
        "builder": "default",
        "seconds": 2410.2,
        "revision": "ab12cd34ef5600112233445566778899aabbccdd",
        "dirty": False,
        "base": "docker.io/nvidia/cuda:12.9.1-devel-ubuntu24.04",
        "output": None,
    }


def split() -> dict[str, Any]:
    return {
        "source": "docker-daemon:candle-vllm:sm70",
        "method": "direct",
        "limit": CHUNK,
        "codec": "gzip:1",
        "layers_before": 7,
        "layers_after": 41,
        "chunked_upload": [
            {"what": "layer 4: opt/candle-vllm/candle-vllm", "size": 412_000_000, "requests": 5},
        ],
        "warnings": [],
        "invalidated": ["the signature of the base image"],
    }


def code_file(path: str, *, native: int, total: int, accepted: str | None = None) -> dict[str, Any]:
    verdict = "native" if native >= total else "partial" if native else "missing"
    others = ("sm_60", "sm_75", "sm_80", "sm_86", "sm_90")
    architectures = [{"target": name, "kind": "elf", "units": total} for name in others]
    architectures.append({"target": "compute_90", "kind": "ptx", "units": max(total - 1, 1)})
    if native:
        architectures.append({"target": "sm_70", "kind": "elf", "units": min(native, total)})
    return {
        "path": path,
        "size": 1_509_528 + 7_000_000 * total,
        "layer": 3,
        "kind": "elf",
        "machine": "x86_64",
        "type": "shared object",
        "members": 0,
        "verdict": verdict,
        "units": {"fatbin": total, "cubin": 0, "ptx": 0, "counted": total, "linkable": 0, "empty": 0},
        "architectures": architectures,
        "compressed": ["zstd"],
        "places": [".nv_fatbin"],
        "judgements": [
            {
                "arch": "sm_70",
                "verdict": verdict,
                "native": min(native, total),
                "jit": 0,
                "total": total,
                "lacking": [],
                "lackingTotal": total - min(native, total),
                "accepted": accepted,
            }
        ],
        "needs": {"present": ["libcudart.so.12"], "driver": ["libcuda.so.1"], "missing": []},
        "kernels": [],
        "problems": [],
    }


def check(*, bad: bool = False) -> dict[str, Any]:
    why = "an NVIDIA library that chooses its kernels by device"
    base = "/opt/venv/lib/python3.12/site-packages"
    files = [
        code_file("/usr/lib/x86_64-linux-gnu/libcublasLt.so.12.9.1.4", native=112, total=498, accepted=why),
        code_file("/usr/lib/x86_64-linux-gnu/libcudnn_engines_precompiled.so.9", native=31, total=77, accepted=why),
        code_file("/opt/candle-vllm/candle-vllm", native=18, total=18),
        code_file("/opt/candle-vllm/lib/libattention.so", native=12, total=12),
        *(code_file(f"{base}/torch/lib/libtorch_cuda_{n}.so", native=41 + n, total=41 + n) for n in range(27)),
    ]
    findings = [
        {
            "level": "warning",
            "rule": "offline start",
            "path": "/usr/local/bin/entrypoint.sh",
            "message": "line 12 downloads where no network may be: hf download",
        }
    ]
    if bad:
        files[2] = code_file("/opt/candle-vllm/candle-vllm", native=0, total=18)
        files[3] = code_file("/opt/candle-vllm/lib/libattention.so", native=9, total=12)
        findings = [
            {
                "level": "violation",
                "rule": "cuda.require",
                "path": "/opt/candle-vllm/candle-vllm",
                "message": "18 of 18 units of code have nothing for sm_70. Calls fail with 'no kernel image is "
                "available'",
            },
            {
                "level": "violation",
                "rule": "cuda.require",
                "path": "/opt/candle-vllm/lib/libattention.so",
                "message": "3 of 12 units of code have nothing for sm_70: fatbin at byte 64 of .nv_fatbin (sm_80)",
            },
            *findings,
        ]
    return {
        "schema": 1,
        "ok": not bad,
        "source": "docker-daemon:candle-vllm:sm70",
        "kind": "image",
        "imageId": str(Digest.of(b"config")),
        "seconds": 25.8,
        "policy": {"require": ["sm_70"], "runtime": ">=12,<13", "allowJit": True, "exceptions": []},
        "lookedAt": 954,
        "paths": 12_683,
        "findings": findings,
        "files": files,
        "cudaVersions": [{"component": "cudart", "version": "12.9", "where": "/usr/lib/x86_64-linux-gnu"}],
        "revisions": [
            {
                "project": "attention.rs",
                "state": "good",
                "revision": "9f1c2a7b",
                "where": "/opt/candle-vllm/candle-vllm",
                "message": "has the fix of the GDN convolution",
            }
        ],
        "start": None,
        "proof": None,
        "kernelPatterns": [],
    }


@cache
def _evidence() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(EVIDENCE.read_text())
    return document


def smoke(name: str = "none") -> dict[str, Any]:
    """The smoke test's JSON with the kernel level of a real run and a server level beside it."""
    tolerances = {
        (case.stage, case.name, case.dtype): tolerance(case) for dtype in ("f32", "f16") for case in all_cases(dtype)
    }
    run = dict(_evidence()["builds"][name])
    kernel = {key: run[key] for key in ("library", "digest", "verdict", "reason", "device", "contract", "absent")}
    kernel["library"] = "libattention.so"
    kernel["cases"] = [
        {"tolerance": tolerances.get((case["stage"], case["case"], case["dtype"]), 1e-3), **case}
        for case in run["cases"]
    ]
    passed = run["verdict"] == "PASS"
    questions = [
        {
            "name": f"{kind}, {size} tokens",
            "prompt": "",
            "text": "a b c d e f" if passed else "a b x x x x",
            "verdict": "PASS" if passed else "FAIL",
            "wanted": "a b c d e f",
            "tokens": 32,
            "identical": 32 if passed else 2 + 3 * number,
            "ties": 0,
            "first_wrong": None if passed else 2 + 3 * number,
            "logprob_error": 0.011 + number / 500,
            "note": "" if passed else f"first divergence at token {2 + 3 * number}: 'x' instead of 'c'",
        }
        for number, (kind, size) in enumerate(
            (
                ("short", 4),
                ("one chunk", 64),
                ("across chunks", 65),
                ("long", 513),
                ("repeated", 64),
                ("two at once", 96),
            )
        )
    ]
    server = {
        "url": "http://127.0.0.1:8000",
        "dtype": "f16",
        "verdict": run["verdict"],
        "reason": "6 of 6 answers are right" if passed else "6 of 6 answers are wrong",
        "model": "probe",
        "questions": questions,
        "explanations": [],
        "diagnosis": [],
    }
    levels = [
        {
            "level": "kernel",
            "verdict": run["verdict"],
            "reason": run["reason"],
            "seconds": run["seconds"],
            "same": "libattention.so holds the kernels of /opt/candle-vllm/candle-vllm, byte for byte",
            "kernel": kernel,
            "server": None,
            "diagnosis": list(run["diagnosis"]),
        },
        {
            "level": "server",
            "verdict": server["verdict"],
            "reason": server["reason"],
            "seconds": 36.2,
            "same": "",
            "kernel": None,
            "server": server,
            "diagnosis": [] if passed else ["the tokens are those of a model whose key band is zeroed in prefill"],
        },
    ]
    return {
        "name": "candle-vllm",
        "verdict": run["verdict"],
        "ok": passed,
        "exit_code": 0 if passed else 1,
        "missing_gpu_allowed": False,
        "levels": levels,
    }


def poisoned(value: Any) -> Any:
    """The same with ``HOSTILE`` in every text that is no verdict, digest or name of an architecture."""
    if isinstance(value, dict):
        return {key: item if key in _MEANT else poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


_MEANT = {"verdict", "level", "digest", "outcome", "require", "arch", "target", "dtype"}
