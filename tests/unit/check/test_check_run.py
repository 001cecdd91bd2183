"""The whole check over sources in memory and on disk: verdicts, policy, findings, outputs."""

from __future__ import annotations

import io
import json
import zipfile
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import cudafiles as make
import jsonschema
import pytest
from cudafiles import Part
from cudafiles.image import Item, MemoryImage, symlink
from rich.console import Console

from buildkit.check import CheckReport, run_check, same_fatbins
from buildkit.check.knownbad import load_known_bad, parse_known_bad
from buildkit.check.start import StartProof
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException, Policy, Verdict, VersionRange
from buildkit.errors import FormatError, NotFoundError, UsageError

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cuda"
SCHEMA = json.loads(resources.files("buildkit").joinpath("check/schema.json").read_text())
V100 = Policy(require=(Arch(70),))


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def checked(files: dict[str, bytes | Item], policy: Policy = V100, **options: Any) -> CheckReport:
    """Check an image of one layer, and hold every output against its form."""
    runtime = options.pop("runtime", {})
    report = run_check(MemoryImage(files, runtime=runtime), policy, **options)
    jsonschema.validate(json.loads(json.dumps(report.to_json())), SCHEMA)
    report.render(Console(file=io.StringIO(), width=200))
    assert report.to_markdown()
    return report


def said(report: CheckReport, rule: str) -> list[tuple[str, str, str]]:
    return [(f.level, f.path, f.message) for f in report.findings if f.rule == rule]


def test_an_image_that_serves_a_v100_passes() -> None:
    report = checked({"usr/lib/a.so": golden("cuda11-sm70.so"), "usr/lib/b.so": golden("cuda11-ptx-text.so")})
    assert report.ok
    assert [(f.path, f.verdict) for f in report.files] == [
        ("/usr/lib/b.so", Verdict.JIT),
        ("/usr/lib/a.so", Verdict.NATIVE),
    ]
    assert report.image_id is not None
    assert report.image_id.startswith("sha256:")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda11-sm80-only.so", "has no code for sm_70 (sm_80)"),
        ("cuda11-partial.so", "1 of 2 units of code have nothing for sm_70"),
        ("cuda13-sm90a.so", "has no code for sm_70"),
    ],
)
def test_what_lacks_the_architecture_is_a_violation_that_says_where(name: str, words: str) -> None:
    report = checked({"opt/x.so": golden(name)})
    assert not report.ok
    ((level, path, message),) = said(report, "cuda.require")
    assert (level, path) == ("violation", "/opt/x.so")
    assert words in message


def test_without_requirements_everything_is_reported_and_nothing_violated() -> None:
    report = checked({"x.so": golden("cuda11-sm80-only.so")}, Policy())
    assert report.ok
    assert "sm_80" in report.to_markdown()


def test_an_exception_needs_a_path_that_fits_and_its_reason_is_shown() -> None:
    policy = Policy(require=(Arch(70),), exceptions=(PathException(path="/opt/*", reason="an optional plugin"),))
    report = checked({"opt/x.so": golden("cuda11-sm80-only.so"), "usr/y.so": golden("cuda11-sm80-only.so")}, policy)
    assert [f.path for f in report.violations] == ["/usr/y.so"]
    assert ("note", "/opt/x.so", "sm_70: missing, accepted: an optional plugin") in said(report, "cuda.require")
    assert [f.path for f in report.files] == ["/usr/y.so", "/opt/x.so"]


def test_partial_is_accepted_of_libraries_that_choose_their_kernels_and_missing_is_not() -> None:
    report = checked(
        {
            "usr/lib/libcublasLt.so.12": golden("cuda11-partial.so"),
            "usr/lib/libcudnn_ops.so.9": golden("cuda11-sm80-only.so"),
        }
    )
    assert [f.path for f in report.violations] == ["/usr/lib/libcudnn_ops.so.9"]


def test_machine_code_may_be_demanded() -> None:
    report = checked({"x.so": golden("cuda11-ptx-only.so")}, Policy(require=(Arch(70),), allow_jit=False))
    assert "asks for machine code" in report.violations[0].message


def test_several_architectures_are_judged_each() -> None:
    report = checked({"x.so": golden("cuda11-sm70.so")}, Policy(require=(Arch(60), Arch(70))))
    assert [f.message.split()[4] for f in report.violations] == ["sm_60"]
    assert report.files[0].verdict is Verdict.MISSING


def test_a_file_that_is_not_understood_is_never_passed_silently() -> None:
    broken = golden("cuda11-sm70.so")[:-3000]
    report = checked({"x.so": broken})
    assert report.violations[0].rule == "not understood"
    assert "at byte" in report.violations[0].message
    assert [f.level for f in checked({"x.so": broken}, Policy()).findings] == ["warning"]


def test_runtime_versions_come_from_files_packages_environment_and_needs() -> None:
    plain = make.elf(Part(name=".data", data=b"x"))
    files: dict[str, bytes | Item] = {
        "usr/lib/libcudart.so.12.9.79": plain,
        "usr/lib/libcudart.so.12": symlink("libcudart.so.12.9.79"),
        "usr/lib/python3/site-packages/nvidia_cuda_runtime-13.0.88.dist-info/METADATA": b"Name: x\n",
    }
    report = checked(files, Policy(runtime=VersionRange.parse("<13")), runtime={"Env": ["CUDA_VERSION=12.9.1"]})
    assert {(v.component, v.text) for v in report.versions} == {
        ("libcudart", "12.9.79"),
        ("package nvidia-cuda-runtime", "13.0.88"),
        ("environment", "12.9.1"),
    }
    assert [v.rule for v in report.violations] == ["cuda.runtime"]
    assert "13.0.88" in report.violations[0].message


def test_a_program_that_needs_another_runtime_violates_the_range() -> None:
    report = checked({"x.so": golden("cuda11-rdc.so")}, Policy(runtime=VersionRange.parse(">=12")))
    ((_, path, message),) = said(report, "cuda.runtime")
    assert path == "/x.so"
    assert "libcudart.so.11.0" in message


def test_missing_cuda_libraries_are_named_and_the_drivers_are_not_missed() -> None:
    report = checked({"x.so": golden("cuda11-rdc.so")})
    assert said(report, "libraries") == [("warning", "/x.so", "needs libcudart.so.11.0, which the image lacks")]
    there = checked({"x.so": golden("cuda11-rdc.so"), "l/libcudart.so.11.0": symlink("real"), "l/real": b"x"})
    assert said(there, "libraries") == []
    dangling = checked({"x.so": golden("cuda11-rdc.so"), "l/libcudart.so.11.0": symlink("gone")})
    assert len(said(dangling, "libraries")) == 1


def test_kernels_are_listed_by_identifier() -> None:
    report = checked(
        {"a.so": golden("cuda13-size.so"), "b.so": golden("cuda11-gencode.so"), "c.so": golden("host-only.so")},
        Policy(),
        kernels=["causal_conv1d*"],
    )
    assert {(path, k.targets) for path, k in report.found_kernels()} == {
        ("/a.so", ("compute_80", "sm_80")),
        ("/b.so", ("compute_80", "sm_70", "sm_80")),
    }
    none = checked({"a.so": golden("cuda13-size.so")}, Policy(), kernels=["nothing*"])
    assert said(none, "kernels") == [("warning", "", "no kernel matches nothing*")]


def test_kernels_of_ptx_text_and_raw_cubins() -> None:
    report = checked(
        {"a.so": golden("cuda11-ptx-text.so"), "b.so": golden("cuda11-raw-cubins.so")}, Policy(), kernels=["scale"]
    )
    assert {(path, k.targets) for path, k in report.found_kernels()} == {
        ("/a.so", ("compute_70",)),
        ("/b.so", ("sm_70", "sm_75")),
    }


def test_a_payload_that_does_not_unpack_is_a_problem_of_its_file() -> None:
    raw = bytearray(make.fatbin(make.entry(make.CUBIN, 70, make.cubin(), flags=0x11 | make.LZ4)))
    raw[80:100] = b"\xff" * 20
    report = checked({"a.so": make.elf(Part(name=".nv_fatbin", data=bytes(raw)))}, V100, kernels=["*"])
    assert "kernels of sm_70" in report.violations[0].message


def test_offline_findings_are_violations_with_their_line() -> None:
    files: dict[str, bytes | Item] = {"run.sh": b"#!/bin/sh\npip install torch\n"}
    report = checked(files, Policy(), runtime={"Cmd": ["/run.sh"]})
    assert said(report, "offline start") == [("violation", "/run.sh:2", "installs Python packages: pip install torch")]
    accepted = Policy(start_exceptions=(PathException(path="/run.sh", reason="a development image"),))
    assert checked(files, accepted, runtime={"Cmd": ["/run.sh"]}).ok
    assert checked(files, Policy(offline=False), runtime={"Cmd": ["/run.sh"]}).ok


BAD = "bd3c890ba3919a589a70562e88ca703a3b10e6d0"


@pytest.mark.parametrize(
    ("labels", "files", "level"),
    [
        ({"org.example.attention.revision": BAD}, {}, "violation"),
        ({"buildkit.note": f"attention.rs@{BAD[:12]}"}, {}, "violation"),
        ({"org.opencontainers.image.source": "https://github.com/x/candle-vllm"}, {}, "warning"),
        ({}, {"usr/local/bin/candle-vllm": b"\x7fELF"}, "warning"),
        ({"a": BAD[:8]}, {}, None),
        ({}, {}, None),
        (
            {},
            {
                "s/Cargo.lock": b'[[package]]\nname = "attention-rs"\nversion = "0.1"\nsource = "git+https://github.com/'
                b"guoqingbao/attention.rs.git?rev=x#" + BAD.encode() + b'"\n'
            },
            "violation",
        ),
    ],
)
def test_revisions_are_bad_or_unknown_or_not_concerned(
    labels: dict[str, str], files: dict[str, bytes | Item], level: str | None
) -> None:
    report = checked(files, Policy(), runtime={"Labels": labels})
    assert [found for found, *_ in said(report, "known-bad")] == ([level] if level else [])


def test_an_unknown_revision_is_not_good() -> None:
    lock = b'name = "attention-rs"\nsource = "git+https://github.com/guoqingbao/attention.rs#' + b"a" * 40 + b'"\n'
    report = checked({"usr/bin/candle-vllm": b"\x7fELF", "Cargo.lock": lock}, Policy())
    ((level, path, message),) = said(report, "known-bad")
    assert (level, path) == ("warning", "/Cargo.lock")
    assert "unknown" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: 2\nprojects: []", "version"),
        ("[]", "not a table"),
        ("version: 1\nprojects: 3", "projects: is not a list"),
        (
            "version: 1\nprojects: [{name: x, url: y, applies: {}, bad: [{revisions: [abc], fault: z}]}]",
            "full commit hash",
        ),
        ("version: 1\nprojects: [{name: x, url: y, applies: {}, bda: []}]", "'bda' is not a key"),
        ("version: 1\nprojects: [{name: x, url: y, applies: {}, bad: [{revisions: [], fault: z}]}]", "is empty"),
        ("a: [", "is not YAML"),
        ("version: 1\nlisted: 2026-06-31\nprojects: []", "is not YAML"),
        ("version: 1\nprojects: []", "listed: None is not a day"),
        ("version: 1\nlisted: soon\nprojects: []", "listed: 'soon' is not a day"),
        ("version: 1\nlisted: 2026-07-22T10:00:00Z\nprojects: []", "is not a day"),
    ],
)
def test_the_list_of_known_bad_revisions_is_read_strictly(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_known_bad(text, where="list.yaml")


def test_the_packages_own_list_parses() -> None:
    known = load_known_bad()
    (project,) = known.projects
    assert len(project.bad[0].revisions) == 6
    assert known.listed >= datetime(2026, 7, 22, tzinfo=UTC)


def test_a_failed_start_is_a_violation() -> None:
    proof = StartProof(ok=False, message="ended with 1: boom", exit_code=1, seconds=1.0, output="boom\n")
    report = checked({}, Policy(), prove=lambda: proof)
    assert [f.message for f in report.violations] == ["does not start: ended with 1: boom"]


# Sources on disk -----------------------------------------------------------------------------------------------------


def test_folders_wheels_and_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.so").write_bytes(golden("cuda11-sm70.so"))
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("p/a.so", golden("cuda11-sm80-only.so"))
    kinds = {}
    for source in (tmp_path / "d", tmp_path / "w.whl", tmp_path / "d" / "a.so"):
        report = run_check(source, V100)
        jsonschema.validate(report.to_json(), SCHEMA)
        kinds[report.kind] = report.ok
    assert kinds == {"folder": True, "wheel": False, "file": True}


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        run_check(tmp_path / "gone")
    with pytest.raises(NotFoundError):
        run_check("./gone.whl")
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="docker-archive:"):
        run_check(tmp_path / "x.tar")
    with pytest.raises(UsageError):
        run_check("a\0b")
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    with pytest.raises(FormatError, match="readable wheel"):
        run_check(tmp_path / "x.whl")


def test_a_text_that_is_no_path_is_opened_as_an_image() -> None:
    asked: list[str] = []

    def open_image(text: str) -> MemoryImage:
        asked.append(text)
        return MemoryImage({"a.so": golden("cuda11-sm70.so")})

    assert run_check("registry.example/x:1", V100, open_image=open_image).ok
    assert asked == ["registry.example/x:1"]


# The same kernels ----------------------------------------------------------------------------------------------------


def test_fatbins_are_found_again_byte_for_byte(tmp_path: Path) -> None:
    library = tmp_path / "libgdn.so"
    library.write_bytes(golden("cuda11-sm70.so"))
    image = MemoryImage({"bin/server": golden("cuda11-partial.so"), "lib/other.so": golden("cuda11-sm80-only.so")})
    report = same_fatbins(library, image)
    assert report.ok
    assert report.holders == ("/bin/server",)
    assert "byte for byte" in report.summary()


def test_other_bytes_are_not_the_same(tmp_path: Path) -> None:
    library = tmp_path / "libgdn.so"
    library.write_bytes(golden("cuda11-partial.so"))
    report = same_fatbins(library, MemoryImage({"bin/server": golden("cuda11-sm70.so")}))
    assert not report.ok
    assert len(report.absent) == 1
    assert "1 of 2 fatbins" in report.summary()
    halves = MemoryImage({"bin/a": golden("cuda11-sm70.so"), "bin/b": make.elf(Part(name=".nv_fatbin", data=b""))})
    assert not same_fatbins(library, halves).ok


def test_the_library_may_lie_in_the_source_itself() -> None:
    image = MemoryImage({"lib/libgdn.so": golden("cuda11-sm70.so"), "bin/server": golden("cuda11-partial.so")})
    assert same_fatbins("/lib/libgdn.so", image).holders == ("/bin/server",)
    alone = MemoryImage({"lib/libgdn.so": golden("cuda11-sm70.so")})
    assert not same_fatbins("/lib/libgdn.so", alone).ok


def test_comparing_needs_a_library_with_fatbins(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="neither a file here"):
        same_fatbins("/lib/none.so", MemoryImage({}))
    plain = tmp_path / "host.so"
    plain.write_bytes(golden("host-only.so"))
    with pytest.raises(UsageError, match="has no fatbin"):
        same_fatbins(plain, MemoryImage({}))


# Outputs -------------------------------------------------------------------------------------------------------------


def test_names_from_the_image_are_neither_markup_nor_control_codes() -> None:
    name = "opt/`x`|<b>\x1b[31m*.so"
    report = checked({name: golden("cuda11-sm80-only.so")})
    markdown = report.to_markdown()
    assert "\x1b" not in markdown
    assert "<b>" not in markdown.replace("`/opt/'x'\\|<b>", "")
    out = io.StringIO()
    report.render(Console(file=out, width=200))
    assert "\x1b" not in out.getvalue()
    assert "\x1b" not in json.dumps(report.to_json(), ensure_ascii=False)


def test_the_table_is_worst_first() -> None:
    report = checked(
        {
            "a.so": golden("cuda11-sm70.so"),
            "b.so": golden("cuda11-ptx-only.so"),
            "c.so": golden("cuda11-partial.so"),
            "d.so": golden("cuda11-sm80-only.so"),
            "e.so": golden("cuda11-sm70.so")[:-2000],
        }
    )
    assert [f.path for f in report.files] == ["/d.so", "/e.so", "/c.so", "/b.so", "/a.so"]
