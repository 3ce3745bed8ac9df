"""The device: is it there, what it is, and the part of a window in which it computes.

The part is measured by CUDA events on the stream of the steps, so it needs nothing beside torch.  It was
written after torch's documentation, and is tested with events that imitate torch's; on a GPU it has not
measured steps yet.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["DeviceUse", "check_device", "described", "wait_for"]

_DRIVER = Path("/proc/driver/nvidia/version")


def check_device(device: str) -> None:
    """Refuse at the beginning what cannot run.

    Raises:
        OptionError: the device is ``"cuda"``, and torch finds none.
    """
    torch = require("torch", extra="torch")
    if device != "cuda" or torch.cuda.is_available():
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    raise OptionError(
        f"bench gpu measures a GPU, and {why}: run it on a machine with one, or with --device cpu, which"
        " shows on little data that the command runs"
    )


def described(device: str) -> dict[str, Any] | None:
    """The GPU for the JSON file: its name, memory and driver, the CUDA of torch's build; None for the CPU."""
    if device != "cuda":
        return None
    torch = require("torch", extra="torch")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def wait_for(device: str) -> None:
    """Wait until the device has done what it was asked for."""
    if device == "cuda":
        require("torch", extra="torch").cuda.synchronize()


class DeviceUse:
    """The part of a window in which a CUDA device computes steps; nobody waits for it.

    A step's two events are noted by the device, before its first kernel and after its last, once all that was
    asked before them is done.  The window lasts from the first event to the last.  What is decoded or
    augmented on other streams meanwhile does not count: it is not what the device is there for.

    Args:
        device: ``"cuda"``; any other has no events, and then there is no such part.
    """

    def __init__(self, device: str) -> None:
        self._cuda = require("torch", extra="torch").cuda if device == "cuda" else None
        self._events: list[Any] = []

    def begin(self) -> None:
        """A window begins."""
        self._events = []
        self.mark()

    def mark(self) -> None:
        """A step begins, or ends."""
        if self._cuda is not None:
            event = self._cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def share(self) -> float | None:
        """The part, 0 to 1, of a window whose work is done; None where there is none."""
        if len(self._events) < 3:
            return None
        first, *steps = self._events
        total = first.elapsed_time(steps[-1])
        busy = sum(begun.elapsed_time(ended) for begun, ended in zip(steps[::2], steps[1::2], strict=True))
        return float(busy / total) if total > 0 else None


def _driver() -> str:
    """The driver's version, which torch does not tell; "unknown" where nobody does."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
