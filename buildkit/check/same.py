"""Are the kernels of one file in another? Byte for byte, by their fatbins; no GPU is asked.

The library that a smoke test loads and the server that is deployed are linked from the same archive. This proves it:
whoever has the same fatbins runs the same machine code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildkit.check.sources import OpenImage, walk
from buildkit.check.tree import Want
from buildkit.check.walk import Progress, walk_file
from buildkit.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from buildkit.image.source import ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SameReport:
    """For each fatbin of ``library`` (sha256, in its order): the paths in ``source`` that have the very same bytes."""

    library: str
    source: str
    fatbins: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def ok(self) -> bool:
        """Whether some one file of the source has all of them."""
        return bool(self.holders)

    @property
    def holders(self) -> tuple[str, ...]:
        """The files that have all fatbins of the library."""
        if not self.fatbins:
            return ()
        common = set.intersection(*(set(paths) for _, paths in self.fatbins))
        return tuple(sorted(common))

    @property
    def absent(self) -> tuple[str, ...]:
        """Digests of the fatbins that no file of the source has."""
        return tuple(digest for digest, paths in self.fatbins if not paths)

    def summary(self) -> str:
        """One line."""
        count = len(self.fatbins)
        if self.ok:
            return f"all {count} fatbins of {self.library} are, byte for byte, in {', '.join(self.holders)}"
        if not self.absent:
            return f"the {count} fatbins of {self.library} are in {self.source}, but not all in one file"
        return f"{len(self.absent)} of {count} fatbins of {self.library} are nowhere in {self.source}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "library": self.library,
            "source": self.source,
            "holders": list(self.holders),
            "fatbins": [{"sha256": digest, "in": list(paths)} for digest, paths in self.fatbins],
        }


def same_fatbins(
    library: str | Path,
    source: str | Path | ImageSource,
    *,
    open_image: OpenImage | None = None,
    progress: Progress = lambda _: None,
) -> SameReport:
    """Whether the fatbins of ``library`` are in a file of ``source`` (an image, a folder, a wheel or a file).

    ``library`` is a file on this machine, or a path *in* ``source``, absolute there: then other files are compared
    with it. Raises NotFoundError where it is neither, UsageError where it has no fatbin.
    """
    want = Want(fatbins=True)
    walked = walk(source, want, open_image=open_image, progress=progress)
    tree, inside = walked.tree, None
    if Path(library).is_file():
        digests = next(iter(walk_file(Path(library), want).files.values())).fatbins
    else:
        inside = tree.resolve(str(library))
        if inside is None or inside not in tree.files:
            raise NotFoundError(f"{library} is neither a file here nor one in {walked.name}")
        digests = tree.files[inside].fatbins
    if not digests:
        raise UsageError(f"{library} has no fatbin", hint="name a shared library, object or archive with CUDA code")
    holders: dict[str, list[str]] = {digest: [] for digest in digests}
    for entry in tree.scanned():
        if entry.path == inside:
            continue
        for digest in set(entry.fatbins) & holders.keys():
            holders[digest].append(entry.path)
    return SameReport(
        library=str(library), source=walked.name, fatbins=tuple((d, tuple(holders[d])) for d in dict.fromkeys(digests))
    )
