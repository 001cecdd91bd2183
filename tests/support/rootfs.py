"""A root file system of this machine's own programs: images that start, without a base to download."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def root_tar(
    programs: Sequence[str],
    files: Mapping[str, tuple[bytes, int]],
    *,
    folders: Iterable[Path] = (),
) -> bytes:
    """A tar with ``programs``, every library that ldd names for them, ``folders``, and ``files`` (content and mode)."""
    paths: set[Path] = set(folders)
    for program in programs:
        found = next(p for p in (Path("/bin") / program, Path("/usr/bin") / program) if p.exists())
        paths.add(found)
        listed = subprocess.run(["ldd", str(found)], capture_output=True, text=True, check=True).stdout
        paths.update(Path(library) for library in re.findall(r"(/[^\s:]+\.so[^\s:]*) \(", listed))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        for path in sorted(paths):
            archive.add(path, arcname=str(path).lstrip("/"))
        for name, (data, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
