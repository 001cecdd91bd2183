"""Proves that a split lost nothing: trees equal, config equal but for what must differ, sizes within the limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from buildkit.image.source import ImageSource
from buildkit.model import Digest, ImageConfig
from buildkit.split.config import COMMENT
from buildkit.split.flatten import Comparison, compare, flatten
from buildkit.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """``config``: differences of the configs, in words. ``too_large``: layers above the limit that nobody reported."""

    tree: Comparison
    config: tuple[str, ...]
    too_large: tuple[str, ...]
    layers_before: int
    layers_after: int

    @property
    def passed(self) -> bool:
        return self.tree.equal and not self.config and not self.too_large

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "passed": self.passed,
            "paths": self.tree.paths,
            "differences": self.tree.count,
            "tree": [
                {"path": d.path, "what": d.what, "before": d.before, "after": d.after} for d in self.tree.differences
            ],
            "config": list(self.config),
            "too_large": list(self.too_large),
            "layers_before": self.layers_before,
            "layers_after": self.layers_after,
        }

    def lines(self) -> tuple[str, ...]:
        """One line for each finding, the verdict first."""
        verdict = "verified: the same" if self.passed else "NOT the same:"
        out = [
            f"{verdict} {self.tree.paths} paths over {self.layers_before} and {self.layers_after} layers "
            "(type, mode, owner, time in ns, xattrs, links, devices, content)"
        ]
        out += [f"tree: {difference}" for difference in self.tree.differences]
        if self.tree.count > len(self.tree.differences):
            out.append(f"tree: {self.tree.count - len(self.tree.differences)} more differences")
        out += [f"config: {text}" for text in self.config]
        out += [f"limit: {text}" for text in self.too_large]
        return tuple(out)

    def __rich__(self) -> RenderableType:
        return Group(*map(Text, self.lines()))


def verify(
    before: ImageSource,
    after: ImageSource,
    *,
    limit: int | None = None,
    reported: Collection[Digest] = (),
    threads: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Verification:
    """Read both images to their ends and compare them. Needs no root and unpacks nothing to disk.

    Layers of ``after`` above ``limit`` (compressed bytes) must be among ``reported``, the digests of what cannot be
    divided. A source that streams can be read once only: give a fresh one.
    """
    old = flatten(before, threads=threads, progress=lambda n: progress(f"read layer {n} of the source"))
    new = flatten(after, threads=threads, progress=lambda n: progress(f"read layer {n} of the result"))
    large = [
        f"layer {number} {layer.blob.digest} has {format_size(layer.blob.size)}"
        for number, layer in enumerate(after.layers, 1)
        if limit is not None and layer.blob and layer.blob.size > limit and layer.blob.digest not in reported
    ]
    return Verification(
        tree=compare(old, new),
        config=compare_configs(before.config(), after.config()),
        too_large=tuple(large),
        layers_before=len(before.layers),
        layers_after=len(after.layers),
    )


def compare_configs(before: ImageConfig, after: ImageConfig) -> tuple[str, ...]:
    """Differences but for ``rootfs.diff_ids`` and the history entries that a split adds; empty if there are none."""
    old, new = _comparable(before), _comparable(after)
    return tuple(
        f"{key} differs" if key in old and key in new else f"{key} is {'gone' if key in old else 'new'}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _NOTHING) != new.get(key, _NOTHING)
    )


_NOTHING = object()


def _comparable(config: ImageConfig) -> Mapping[str, Any]:
    document = dict(config.document)
    document["rootfs"] = {key: value for key, value in document["rootfs"].items() if key != "diff_ids"}
    if isinstance(document.get("history"), list):
        document["history"] = [
            entry for entry in document["history"] if not (isinstance(entry, dict) and entry.get("comment") == COMMENT)
        ]
    return document
