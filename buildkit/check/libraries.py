"""CUDA's shared libraries: which a program needs, which of them the image lacks, and which CUDA it carries. Pure.

Sources: the names of the packages in NVIDIA's CUDA Toolkit release notes (component table), and the NVIDIA Container
Toolkit's documentation for what it mounts from the host's driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from buildkit.check.tree import Tree

_TOOLKIT = (
    "cudart|cublas|cublasLt|cufft|cufftw|curand|cusolver|cusolverMg|cusparse|cusparseLt|nvrtc|nvrtc-builtins|nvJitLink|"
    r"nvfatbin|nvToolsExt|cupti|cufile|cudnn\w*|nccl|nvshmem\w*|npp\w*|nvjpeg|nvinfer\w*|cutensor\w*|OpenCL"
)
_TOOLKIT_LIBRARY = re.compile(rf"lib(?:{_TOOLKIT})\.so(?:\.[0-9.]+)?|libnvrtc-builtins\.so[0-9.]*")
_DRIVER_LIBRARY = re.compile(r"lib(?:cuda|nvidia-[\w-]+|nvcuvid|cudadebugger|nvoptix)\.so(?:\.[0-9.]+)?")
_RUNTIME_FILE = re.compile(r"lib(cudart|nvrtc|nvJitLink)\.so\.(\d+(?:\.\d+)*)")
_RUNTIME_PACKAGE = re.compile(
    r"/nvidia[_-]cuda[_-](runtime|nvrtc)(?:[_-]cu\d+)?-(\d+(?:\.\d+)*)\.dist-info/METADATA", re.IGNORECASE
)
_JSON_VERSION = re.compile(rb'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+(?:\.\d+)*)')


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaVersion:
    """A version of CUDA that the image names: what names it, and where."""

    component: str
    version: tuple[int, ...]
    where: str

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The CUDA libraries of one file's DT_NEEDED: found here, coming with the driver, and found nowhere."""

    present: tuple[str, ...] = ()
    driver: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def cuda_needs(needed: Iterable[str], names: frozenset[str]) -> Needs:
    """``names`` are the base names of all files and links of the tree that lead somewhere: see ``library_names``.

    A library counts as present wherever it lies: search paths (RUNPATH, ``ld.so.conf``, LD_LIBRARY_PATH, a Python
    module that loads it first) are not followed.
    """
    toolkit = [name for name in needed if _TOOLKIT_LIBRARY.fullmatch(name)]
    return Needs(
        present=tuple(name for name in toolkit if name in names),
        driver=tuple(name for name in needed if _DRIVER_LIBRARY.fullmatch(name)),
        missing=tuple(name for name in toolkit if name not in names),
    )


def needed_runtimes(needed: Iterable[str]) -> tuple[CudaVersion, ...]:
    """The versions of the CUDA runtime that DT_NEEDED asks for: ``libcudart.so.12`` is CUDA 12."""
    found = []
    for name in needed:
        match = _RUNTIME_FILE.fullmatch(name)
        if match:
            found.append(CudaVersion(component=f"lib{match[1]}", version=_version(match[2]), where=name))
    return tuple(found)


def library_names(tree: Tree) -> frozenset[str]:
    """Base names under which a library is there, dangling links left out."""
    names: set[str] = set()
    for path in tree.paths:
        name = path.rpartition("/")[2]
        if ".so" in name and (
            path not in tree.files or tree.files[path].link is None or tree.resolve(path) is not None
        ):
            names.add(name)
    return frozenset(names)


def cuda_versions(tree: Tree, environment: Mapping[str, str], labels: Mapping[str, str]) -> tuple[CudaVersion, ...]:
    """Every version of the CUDA runtime and its compilers that the image names, by component and place."""
    found: set[tuple[str, tuple[int, ...], str]] = set()
    for path in tree.paths:
        name = path.rpartition("/")[2]
        match = _RUNTIME_FILE.fullmatch(name)
        entry = tree.files.get(path)
        if match and (entry is None or entry.link is None):
            found.add((f"lib{match[1]}", _version(match[2]), path))
        elif (package := _RUNTIME_PACKAGE.search(path)) is not None:
            found.add((f"package nvidia-cuda-{package[1].lower()}", _version(package[2]), path))
        elif name == "version.json" and "cuda" in path and entry is not None and entry.text is not None:
            said = _JSON_VERSION.search(entry.text)
            if said:
                found.add(("version.json", _version(said[1].decode()), path))
    for key in ("CUDA_VERSION", "NV_CUDA_CUDART_VERSION"):
        value = re.match(r"\d+(?:\.\d+)*", environment.get(key, ""))
        if value:
            found.add(("environment", _version(value[0]), key))
    label = re.fullmatch(r"\d+(?:\.\d+)*", labels.get("buildkit.cuda", ""))
    if label:
        found.add(("label", _version(label[0]), "buildkit.cuda"))
    return tuple(CudaVersion(component=c, version=v, where=w) for c, v, w in sorted(found))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part[:6]) for part in text.split("."))
