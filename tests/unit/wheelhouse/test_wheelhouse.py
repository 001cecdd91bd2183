"""The wheelhouse: a lock that is one, wheels that are those of the lock, and what is in them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from cudafiles.image import MemoryImage
from hypothesis import given
from hypothesis import strategies as st

from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import PathException, Verdict
from buildkit.errors import BuildkitError, UsageError
from buildkit.wheelhouse import (
    SITE_PACKAGES,
    Target,
    baked_packages,
    check_baked,
    check_inputs,
    examine,
    fetch_missing,
    read_lock,
    verify,
    wheelhouse,
)

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPE = REPOSITORY / "images" / "clef-serve"
GOLDEN = REPOSITORY / "tests" / "golden" / "cuda"
SM_70 = Arch.parse("sm_70")
SHA = "0" * 64


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, needs: str = "", files: Mapping[str, bytes] = {}
) -> Path:
    """A wheel that pip installs: PEP 427, with metadata and RECORD."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    content = {
        f"{name}.py": b"x = 1\n",
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for member, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{member},sha256={digest},{len(data)}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_of(path: Path, *wheels: Path) -> Path:
    rows = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        rows.append(
            f"{name}=={version} \\\n    --hash=sha256:{SHA} \\\n    --hash=sha256:{sha256(wheel)}\n    # via x\n"
        )
    path.write_text("# made by hand\n" + "".join(rows))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else: no index, no configuration of this machine."""
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


# Locks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["cuda", "cpu"])
def test_the_locks_of_the_recipe_are_locks_and_satisfy_their_inputs(variant: str) -> None:
    lock = read_lock(RECIPE / f"requirements-{variant}.txt")
    assert len(lock.packages) > 30
    assert check_inputs(lock) == []
    assert {"torch", "transformers", "fastapi", "uvicorn", "tokenizers", "safetensors"} <= {
        p.name for p in lock.packages
    }
    assert ("nvidia-cudnn-cu12" in {p.name for p in lock.packages}) == (variant == "cuda")


def test_torch_for_the_gpu_is_one_that_was_proven_to_have_sm_70() -> None:
    """An upgrade fails here until its wheels were scanned; test_wheelhouse_real (slow) does it for what is locked."""
    proven = json.loads((Path(__file__).parent / "proven.json").read_text())
    lock = read_lock(RECIPE / "requirements-cuda.txt")
    for entry in proven["wheels"]:
        package = lock[entry["name"]]
        assert package.version == entry["version"], f"{entry['name']} {package.version} was not scanned for sm_70"
        assert entry["sha256"] in package.hashes
        assert entry["covered"] == entry["total"] > 0 or entry["excuse"]
    assert {e["name"] for e in proven["wheels"]} >= {"torch", "nvidia-cudnn-cu12", "nvidia-cublas-cu12"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a==1\n", ":1: a has no sha256 hash"),
        ("# c\n\na>=1 --hash=sha256:" + SHA, ":3: a is not locked to one version"),
        ("a==1.* --hash=sha256:" + SHA, "not locked to one version"),
        ("a --hash=sha256:" + SHA, "not locked to one version"),
        ("a @ https://x.example/a.whl --hash=sha256:" + SHA, "not locked to one version"),
        ("--index-url https://x.example/simple\n", "option '--index-url' in a lock"),
        ("-r other.txt\n", "option '-r' in a lock"),
        (f"a==1 --hash=sha256:{SHA}\nA==1 --hash=sha256:{SHA}\n", ":2: a is there twice"),
        ("a==1 --hash=md5:123\n", "no sha256 hash"),
        ("a==1 --hash=sha256:xyz\n", "no sha256 hash"),
        ("???\n", "is no requirement"),
        ("", "locks no package"),
        (f"a==1 ; sys_platform == 'win32' --hash=sha256:{SHA}\n", "locks no package"),
    ],
)
def test_what_is_no_lock_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "lock.txt"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_lock(file)
    assert says in caught.value.message
    with pytest.raises(UsageError, match="cannot be read"):
        read_lock(tmp_path / "none.txt")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_lock_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.txt"
    file.write_bytes(data)
    try:
        read_lock(file)
    except UsageError:
        return


def test_a_lock_that_no_longer_satisfies_its_inputs(tmp_path: Path) -> None:
    (tmp_path / "base.in").write_text("b>=2  # why\nmissing\nwindows-only; sys_platform == 'win32'\n")
    (tmp_path / "lock.in").write_text("-r base.in\n-r lock.in\na<2\n")
    (tmp_path / "lock.txt").write_text(f"a==1 --hash=sha256:{SHA}\nb==1 --hash=sha256:{SHA}\n")
    findings = check_inputs(read_lock(tmp_path / "lock.txt"))
    assert [(f.subject, f.message) for f in findings] == [
        ("base.in:1: b", "is locked to 1, which >=2 excludes"),
        ("base.in:2: missing", "is asked for, but not locked"),
    ]
    (tmp_path / "lock.in").write_text("???\n")
    with pytest.raises(UsageError, match=r"lock.in:1"):
        check_inputs(read_lock(tmp_path / "lock.txt"))


def test_an_image_that_has_other_packages_than_the_lock(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text(f"a==1.0 --hash=sha256:{SHA}\nb_x==2 --hash=sha256:{SHA}\n")
    lock = read_lock(tmp_path / "lock.txt")
    assert check_baked(lock, {"A": "1.0.0", "B-x": "2"}) == []
    findings = check_baked(lock, {"a": "1.1", "c": "3"})
    assert [f.subject for f in findings] == ["a", "b-x", "c"]


# Wheels --------------------------------------------------------------------------------------------------------------


def test_wheels_are_fetched_once_and_then_need_no_index(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = [make_wheel(index, "alpha", needs="beta>=1"), make_wheel(index, "beta")]
    lock = lock_of(tmp_path / "lock.txt", *wheels)
    house = tmp_path / "house"
    first = wheelhouse(lock, house)
    assert (first.ok, first.fetched) == (True, ("alpha==1.0", "beta==1.0"))
    assert sorted(p.name for p in house.iterdir()) == sorted(w.name for w in wheels)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    again = wheelhouse(lock, house)
    assert (again.ok, again.fetched) == (True, ())
    checked = wheelhouse(lock, house, check=True)
    assert checked.ok, checked.render()
    assert json.loads(json.dumps(checked.to_json()))["ok"] is True
    assert checked.render().splitlines()[-1] == "PASS"


def test_only_what_is_missing_or_wrong_is_fetched_again(tmp_path: Path, index: Path) -> None:
    wheels = [make_wheel(index, "alpha"), make_wheel(index, "beta")]
    lock = read_lock(lock_of(tmp_path / "lock.txt", *wheels))
    house = tmp_path / "house"
    fetch_missing(lock, house, target=Target())
    damaged = house / wheels[1].name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert [(f.kind, f.subject) for f in verify(lock, house)[1]] == [
        ("hash", damaged.name),
        ("missing", "beta==1.0"),
    ]
    assert fetch_missing(lock, house, target=Target()) == ("beta==1.0",)
    assert verify(lock, house)[1] == []


def test_a_wheel_that_is_not_the_locked_one_never_gets_in(tmp_path: Path, index: Path) -> None:
    lock = lock_of(tmp_path / "lock.txt", make_wheel(index, "alpha"))
    make_wheel(index, "alpha", files={"evil.py": b"import os\n"})
    house = tmp_path / "house"
    with pytest.raises(BuildkitError, match=r"pip download failed: .*DO NOT MATCH"):
        wheelhouse(lock, house)
    assert list(house.iterdir()) == []


def test_an_index_that_has_not_what_is_locked_is_one_line_without_secrets(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(index, "alpha")
    lock = lock_of(tmp_path / "lock.txt", wheel)
    wheel.unlink()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:hunter2@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(BuildkitError) as caught:
        wheelhouse(lock, tmp_path / "house")
    assert "alpha" in caught.value.message
    assert "hunter2" not in str(caught.value)


def test_the_check_tells_of_every_difference_and_changes_nothing(tmp_path: Path, index: Path) -> None:
    wheels = [make_wheel(index, "alpha", needs="gamma"), make_wheel(index, "beta")]
    lock = lock_of(tmp_path / "lock.txt", *wheels)
    house = tmp_path / "house"
    report = wheelhouse(lock, house, check=True)
    assert [f.kind for f in report.findings] == ["missing", "missing"]
    assert not house.exists()
    wheelhouse(lock, house)
    incomplete = wheelhouse(lock, house, check=True)
    assert [f.kind for f in incomplete.findings] == ["resolve"], "alpha needs gamma, which is not locked"
    assert "gamma" in incomplete.findings[0].message
    make_wheel(house, "stray")
    make_wheel(house, "beta", "0.9")
    (house / "odd.whl").write_bytes(b"")
    found = {(f.kind, f.subject) for f in wheelhouse(lock, house, check=True).findings}
    assert found == {
        ("wheel", "odd.whl"),
        ("extra", "stray-1.0-py3-none-any.whl"),
        ("extra", "beta-0.9-py3-none-any.whl"),
    }


def test_what_is_named_as_a_wheel_and_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    house = tmp_path / "house"
    lock = lock_of(tmp_path / "lock.txt", make_wheel(house, "alpha"))
    (house / "beta-1.0-py3-none-any.whl").mkdir()
    (house / "gamma-1.0-py3-none-any.whl").symlink_to("nowhere")
    good, findings = verify(read_lock(lock), house)
    assert [w.name for w in good] == ["alpha"]
    assert [(f.kind, f.subject[:5]) for f in findings] == [("wheel", "beta-"), ("wheel", "gamma")]


def test_the_packages_of_an_image_are_held_against_the_lock(tmp_path: Path) -> None:
    house = tmp_path / "house"
    lock = lock_of(tmp_path / "lock.txt", make_wheel(house, "alpha"), make_wheel(house, "beta", "2.0"))
    site = SITE_PACKAGES.lstrip("/")
    image = MemoryImage(
        {f"{site}/alpha-1.0.dist-info/METADATA": b"", f"{site}/Extra_Thing-3.dist-info/METADATA": b""},
        {f"{site}/alpha/_vendor/tomli-2.dist-info/METADATA": b""},
        {f"{site}/beta-1.0+cpu.dist-info/METADATA": b"", "usr/lib/python3/dist-packages/six-1.dist-info/METADATA": b""},
    )
    report = wheelhouse(lock, house, check=True, baked=baked_packages(image))
    assert [(f.kind, f.subject, f.message) for f in report.findings] == [
        ("baked", "beta", "1.0+cpu is installed, the lock names 2.0"),
        ("baked", "extra-thing", "3 is installed, but not in the lock"),
    ]
    with pytest.raises(UsageError, match="has no Python packages"):
        baked_packages(MemoryImage({"etc/passwd": b""}))


def test_sizes_are_held_against_the_edge(tmp_path: Path) -> None:
    noise = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(4000))
    wheel = make_wheel(tmp_path / "house", "big", files={"big/data.bin": noise, "big/zeros.bin": bytes(10**6)})
    report = wheelhouse(lock_of(tmp_path / "lock.txt", wheel), tmp_path / "house", fetch=False, limit=100_000)
    (only,) = report.wheels
    assert only.over_limit
    assert [(f.path, f.size) for f in only.large_files] == [("big/data.bin", len(noise))]
    assert only.installed > 10**6 + len(noise)
    assert re.search(r"above the limit; big/data.bin alone is 12\d\.\d kB compressed", report.render())
    assert report.ok, "size is told, not refused: a chunked upload carries it"


def test_what_lacks_the_architecture_fails_unless_it_is_excused(tmp_path: Path) -> None:
    code = {p.name: p.read_bytes() for p in sorted(GOLDEN.glob("*.so"))}
    assert code, "the golden binaries of the architecture check"
    wheel = make_wheel(tmp_path / "house", "cuda", files={f"cuda/{n}": d for n, d in code.items()})
    lock = lock_of(tmp_path / "lock.txt", wheel)
    (found,) = verify(read_lock(lock), tmp_path / "house")[0]
    report = examine(found, limit=10**9, arch=SM_70)
    assert report.cuda_files
    old = examine(found, limit=10**9, arch=Arch.parse("sm_30"))
    assert {f.verdict for f in old.lacking} == {Verdict.MISSING}
    assert not wheelhouse(lock, tmp_path / "house", fetch=False, arch=Arch.parse("sm_30")).ok
    excused = PathException(path=f"{SITE_PACKAGES}/cuda/*", reason="a test")
    assert examine(found, limit=10**9, arch=Arch.parse("sm_30"), exceptions=[excused]).lacking == ()
    assert examine(found, limit=10**9, arch=None).cuda_files == ()
