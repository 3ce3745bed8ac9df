"""Memory of a device, or of this process: how much there is, the most that was taken, giving it back."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any, Protocol

from fastpipe.core.machine import free_memory
from fastpipe.profiling.resizing import leaves

__all__ = ["DeviceMemory", "memory_for", "torch_of"]

_PART = 0.9
_SELF = Path("/proc/self")
_SHORTAGES = (
    "out of memory", "can't allocate memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
)  # fmt: skip
_SHORTAGE_OF_TENSORFLOW = "ResourceExhaustedError"


class DeviceMemory(Protocol):
    """Attributes:
    limit: bytes that may be taken; None where nobody knows.
    """

    limit: int | None

    def begin(self) -> None:
        """The most that is taken counts from now on."""

    def most(self) -> int | None:
        """Bytes since then; None where nobody knows."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked for."""

    def give_back(self) -> None:
        """Let go of what a step that failed has left."""

    def is_shortage(self, error: Exception) -> bool:
        """Whether a step failed for want of memory."""


class _ProcessMemory:
    """Of this process, by the kernel's count of its resident memory."""

    def __init__(self, budget: int | None) -> None:
        free, now = free_memory(), _status("VmRSS")
        self.limit = budget
        if budget is None and free is not None and now is not None:
            self.limit = now + int(_PART * free)

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            (_SELF / "clear_refs").write_text("5")  # the peak begins anew

    def most(self) -> int | None:
        return _status("VmHWM")

    def synchronize(self) -> None:
        pass

    def give_back(self) -> None:
        gc.collect()

    def is_shortage(self, error: Exception) -> bool:
        return _is_shortage(error)


class _CudaMemory:
    """Of a CUDA device, by torch's count of what its allocator gave out.

    Args:
        cuda: ``torch.cuda``.
        budget: bytes; None for nine tenths of what is free, or this process has already.
    """

    def __init__(self, cuda: Any, budget: int | None) -> None:
        self._cuda = cuda
        self.limit: int | None = budget
        if budget is None:
            self.limit = int(_PART * (cuda.mem_get_info()[0] + cuda.memory_reserved()))

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def most(self) -> int | None:
        return int(self._cuda.max_memory_reserved())

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def give_back(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def is_shortage(self, error: Exception) -> bool:
        return _is_shortage(error)


def memory_for(batch: Any, budget: int | None) -> DeviceMemory:
    """That which decides about the size of batches: a CUDA device's where torch has one.

    Args:
        batch: one, of whatever framework.
        budget: bytes that may be taken; None for what is free.
    """
    torch = torch_of(batch)
    if torch is not None and torch.cuda.is_available():
        return _CudaMemory(torch.cuda, budget)
    return _ProcessMemory(budget)


def torch_of(batch: Any) -> Any:
    """torch, if a batch has tensors of it; else None."""
    torch = sys.modules.get("torch")  # what a batch is made of is loaded
    has_tensors = torch is not None and any(isinstance(one, torch.Tensor) for one in leaves(batch))
    return torch if has_tensors else None


def _is_shortage(error: Exception) -> bool:
    text = str(error).lower()
    if isinstance(error, MemoryError) or type(error).__name__ == _SHORTAGE_OF_TENSORFLOW:
        return True
    return isinstance(error, RuntimeError) and any(words in text for words in _SHORTAGES)


def _status(name: str) -> int | None:
    """Bytes that the kernel says of this process."""
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)
