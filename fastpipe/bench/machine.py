"""The conditions of a measurement: the machine, the packages, and the revision of fastpipe.

The descriptions contain no host names and no paths, so that they identify no person and no host.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe.core.machine import ControlGroups, available_cpus

PACKAGES = (
    "numpy", "torch", "torchvision", "pillow", "pillow-simd", "simplejpeg", "nvidia-nvimgcodec-cu13",
    "nvidia-nvimgcodec-cu12", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "triton", "torchcodec",
    "tensorflow", "tensorflow-cpu", "spdl-io", "litdata", "h5py", "numcodecs", "deflate", "pyfive",
    "hidefix", "tensorstore", "zarr", "zarrs", "monai", "kornia", "albumentations",
    "opencv-python-headless", "torchaudio", "keras", "cloudpickle", "joblib", "datasets",
)  # fmt: skip


def memory_bytes(groups: ControlGroups | None = None) -> int | None:
    """Return the memory that this process may use, in bytes; ``None`` if it is unknown."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    limit = (groups or ControlGroups()).least("memory", "memory.max", "memory.limit_in_bytes")
    return min(installed, limit or installed)


def describe() -> dict[str, Any]:
    memory = memory_bytes()
    return {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "os": _system(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def load() -> float | None:
    """Return the mean number of runnable processes in the last minute; None if it is unknown."""
    with suppress(AttributeError, OSError):
        return round(os.getloadavg()[0], 2)
    return None


def versions() -> dict[str, str]:
    """Return the versions of fastpipe and of the installed packages in ``PACKAGES``."""
    found = {"fastpipe": fastpipe.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def revision() -> dict[str, Any] | None:
    """Return the Git ``commit`` from which fastpipe runs, and whether tracked files are ``modified``.

    Return None if fastpipe does not run from a clone of its repository.
    """
    source = Path(fastpipe.__file__)
    git = ["git", "--no-optional-locks", "-C", str(source.parent)]
    try:
        # The file must be tracked: an installation inside another repository is not a checkout.
        _output(*git, "ls-files", "--error-unmatch", source.name)
        changes = _output(*git, "status", "--porcelain", "--untracked-files=no")
        return {"commit": _output(*git, "rev-parse", "HEAD"), "modified": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _cpu_model() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            return _output("sysctl", "-n", "machdep.cpu.brand_string")
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    release = ".".join(platform.release().split(".")[:2])
    kernel = f"{platform.system()} {release} {platform.machine()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (AttributeError, KeyError, OSError):
        return kernel
