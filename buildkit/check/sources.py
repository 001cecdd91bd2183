"""What SOURCE means: a path (folder, wheel, file), else an image in any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from buildkit.check.tree import Tree, Want
from buildkit.check.walk import Progress, walk_file, walk_folder, walk_image, walk_wheel
from buildkit.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from buildkit.image.source import ImageSource
    from buildkit.model import ImageConfig

OpenImage = Callable[[str], "ImageSource"]
Kind = Literal["image", "folder", "wheel", "file"]

_WHEELS = (".whl", ".zip")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A source and all that was found in it; ``config`` of an image."""

    name: str
    kind: Kind
    tree: Tree
    config: ImageConfig | None = None


def walk(
    source: str | Path | ImageSource,
    want: Want,
    *,
    open_image: OpenImage | None = None,
    progress: Progress = lambda _: None,
) -> Walked:
    """Look at every file of ``source``. An image given as text is opened by ``open_image`` and closed again; one that
    is open already stays open.

    Raises NotFoundError or UsageError for what is no source, ImageError and the transport's own errors for an image
    that cannot be read.
    """
    if not isinstance(source, (str, Path)):
        return _walk_open(source, want, progress)
    path = as_path(source)
    if path is None:
        if open_image is None:
            from buildkit.image.transports import open_source  # deferred: a check of a file needs no engine

            open_image = open_source
        with open_image(str(source)) as image:
            return _walk_open(image, want, progress)
    if path.is_dir():
        return Walked(name=str(path), kind="folder", tree=walk_folder(path, want, progress=progress))
    if path.name.endswith(_WHEELS):
        return Walked(name=str(path), kind="wheel", tree=walk_wheel(path, want, progress=progress))
    return Walked(name=str(path), kind="file", tree=walk_file(path, want, progress=progress))


def as_path(source: str | Path) -> Path | None:
    """The path that is meant, or None where it can only be an image. Raises NotFoundError or UsageError."""
    path = Path(source)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(source)!r} is not a path: {error}") from error
    text = str(source)
    if not exists:
        if isinstance(source, Path) or text.startswith(("/", "./", "../", "~")) or text.endswith(_WHEELS):
            raise NotFoundError(f"{text} does not exist", hint="name a path, or an image as TRANSPORT:NAME")
        return None
    if path.name.endswith(_ARCHIVES):
        raise UsageError(
            f"{path} may be an image's archive or any other tar",
            hint=f"write docker-archive:{path} or oci-archive:{path}, or unpack it",
        )
    if not path.is_dir() and not path.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    return path


def _walk_open(image: ImageSource, want: Want, progress: Progress) -> Walked:
    tree = walk_image(image, want, progress=progress)
    # A stream source has its config only after its last layer.
    return Walked(name=image.name, kind="image", tree=tree, config=image.config())
