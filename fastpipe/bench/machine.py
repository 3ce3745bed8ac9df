"""What a figure was measured on: the machine, the packages, the revision.

Nothing here identifies a person or a host: no host names, no paths.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
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
    """Memory this process may use, in bytes; ``None`` where the system does not say."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    limit = (groups or ControlGroups()).least("memory", "memory.max", "memory.limit_in_bytes")
    return installed if limit is None else min(installed, limit)


def describe() -> dict[str, Any]:
    """Processor, cores, memory and system, as they go into the JSON file."""
    memory = memory_bytes()
    return {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "os": _system(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def load() -> float | None:
    """Mean number of runnable processes of the last minute, where the system knows it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def versions() -> dict[str, str]:
    """Versions of fastpipe and of every package that takes part, where installed."""
    found = {"fastpipe": fastpipe.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> dict[str, Any] | None:
    """The commit that fastpipe runs from and whether files differ from it.

    Returns:
        ``{"commit": str, "modified": bool}``, or ``None`` outside a checkout of fastpipe.
    """
    source = Path(fastpipe.__file__)
    try:
        # Tracked: an installation inside somebody else's repository is not a checkout.
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        return {
            "commit": _git(source.parent, "rev-parse", "HEAD"),
            "modified": bool(_git(source.parent, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command that only reads."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _cpu_model() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        try:
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()


def _system() -> str:
    """Distribution, kernel (major and minor version only) and architecture."""
    release = ".".join(platform.release().split(".")[:2])
    kernel = f"{platform.system()} {release} {platform.machine()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (AttributeError, KeyError, OSError):
        return kernel
