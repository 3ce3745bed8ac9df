"""What the GPU does meanwhile: utilisation and PCIe traffic as NVIDIA's management library (NVML) tells.

It was written after NVML's documentation and is tested with a module that imitates it; the measurements
themselves have not been seen on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from statistics import fmean
from typing import Any, NamedTuple

from fastpipe.profiling.looking import LookingThread

__all__ = ["GPUSampler", "GPUUse"]

_INTERVAL_S = 0.5


class GPUUse(NamedTuple):
    """Means over the time of sampling; as ``EpochTimes`` has them.

    Attributes:
        gpu_utilisation: the part of the time in which a kernel ran, 0 to 1.
        gpu_memory_utilisation: the part in which the device's memory was read or written, 0 to 1.
        pcie_bytes_per_second: that the device received; None where it does not tell.
    """

    gpu_utilisation: float
    gpu_memory_utilisation: float
    pcie_bytes_per_second: float | None


class GPUSampler:
    """Asks NVML about one device, twice a second, in a thread.

    Args:
        nvml: the module ``pynvml`` of the package nvidia-ml-py, initialised.
        handle: of the device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._rates: list[tuple[float, float]] = []
        self._received: list[float] = []
        self._thread = LookingThread("fastpipe-gpu", _INTERVAL_S, self._look, self._close)

    @classmethod
    def begin(cls) -> GPUSampler | None:
        """Begin to sample the device that this process uses; None where that is not possible."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver
            return None
        try:
            sampler = cls(nvml, _handle(nvml))
            sampler._thread.start()
        except BaseException as error:
            nvml.nvmlShutdown()
            if isinstance(error, nvml.NVMLError):
                return None
            raise
        return sampler

    def stop(self) -> GPUUse | None:
        """End, and tell what was seen; None if nothing was.  Further calls tell the same."""
        self._thread.stop()
        if not self._rates:
            return None
        gpu, memory = (fmean(values) for values in zip(*self._rates, strict=True))
        return GPUUse(gpu, memory, fmean(self._received) if self._received else None)

    def _close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _look(self, is_last: bool) -> None:
        # With a last one at the end: what NVML tells is of the moments before.
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):  # of what this device does not support
            rates = nvml.nvmlDeviceGetUtilizationRates(self._handle)
            self._rates.append((rates.gpu / 100, rates.memory / 100))
        with contextlib.suppress(nvml.NVMLError):
            # KB/s over 20 ms, which the call takes.
            received = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            self._received.append(received * 1024.0)


def _handle(nvml: Any) -> Any:
    """Of the device that torch computes on, or the first that this process may use.

    NVML counts all devices of the machine; CUDA those that ``CUDA_VISIBLE_DEVICES`` leaves.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    current = 0
    if cuda is not None and cuda.is_initialized():
        current = cuda.current_device()
        identity = getattr(cuda.get_device_properties(current), "uuid", None)
        if identity is not None:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[current] if current < len(visible) and visible[current] else str(current)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
