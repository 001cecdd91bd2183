"""The little of the CUDA driver API that the harness needs, through ctypes on ``libcuda.so.1``.

The kernels under test bring the CUDA runtime linked in; both share the device's primary context, so memory from here
can be passed there (CUDA Driver API, "Interoperability between Runtime and Driver APIs"). ctypes and not
``cuda-bindings``: that package follows the toolkit's major version and would tie this tool to one, while these dozen
functions have been the same since CUDA 7.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import BuildkitError, MissingComponentError

NO_BINARY_FOR_GPU = 209
NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


class CudaError(BuildkitError):
    """A driver call failed. ``code`` is the CUresult, ``name`` its symbol."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code} ({name})")
        self.code = code
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as the driver describes it. ``driver``: the kernel module's version; ``cuda``: the newest CUDA it knows."""

    name: str
    capability: tuple[int, int]
    driver: str
    cuda: str


class Driver:
    """One GPU's primary context. Not thread-safe; allocations live until the process ends.

    Raises MissingComponentError where there is no driver or no GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MissingComponentError(
                "no NVIDIA driver: libcuda.so.1 is not there", hint="run on a host with an NVIDIA GPU and its driver"
            ) from error
        try:
            self._call("cuInit", ctypes.c_uint(0))
            count = ctypes.c_int()
            self._call("cuDeviceGetCount", ctypes.byref(count))
        except CudaError as error:
            raise MissingComponentError(
                f"the NVIDIA driver finds no usable GPU: CUDA error {error.code} ({error.name})",
                hint="check nvidia-smi, and CUDA_VISIBLE_DEVICES",
            ) from error
        if count.value <= ordinal:
            raise MissingComponentError(
                f"there are {count.value} GPUs, number {ordinal} is not one of them", hint="check CUDA_VISIBLE_DEVICES"
            )
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._device = device
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def describe(self) -> Device:
        """Name, capability and versions of the GPU."""
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, ctypes.c_int(256), self._device)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return Device(
            name=name.value.decode("utf-8", "replace"),
            capability=(self._attribute(_MAJOR), self._attribute(_MINOR)),
            driver=kernel_module_version(),
            cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        )

    def upload(self, data: bytes) -> int:
        """A device pointer to a copy of ``data``."""
        pointer = self._allocate(len(data))
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))
        return pointer

    def poisoned(self, size: int) -> int:
        """A device pointer to ``size`` bytes of 0xFF, which no kernel computes: it is a NaN in every type."""
        pointer = self._allocate(size)
        self._call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(0xFF), ctypes.c_size_t(size))
        return pointer

    def download(self, pointer: int, size: int) -> bytes:
        """``size`` bytes from the device."""
        buffer = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return buffer.raw

    def synchronise(self) -> None:
        """Wait for everything launched. Raises CudaError for what any of it did wrong."""
        self._call("cuCtxSynchronize")

    def loads(self, image: bytes) -> None:
        """Load a fatbin, cubin or PTX as a module and drop it. Raises CudaError with the driver's reason."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleUnload", module)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self._device)
        return value.value

    def _allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        return pointer.value

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._lib, name)
        except AttributeError as error:
            raise MissingComponentError(
                f"libcuda.so.1 has no {name}", hint="the NVIDIA driver is too old or a stub"
            ) from error
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"unknown").decode("ascii", "replace"))


def kernel_module_version() -> str:
    """The NVIDIA kernel module's version from /proc, or ``unknown``."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    words = [word for word in first.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else "unknown"
