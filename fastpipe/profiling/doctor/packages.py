"""Which packages there are, and whether they fit each other and the machine."""

from __future__ import annotations

import glob
import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import fastpipe
from fastpipe.profiling.doctor.asking import Answer, Question
from fastpipe.profiling.doctor.cuda import distributions, of_torch
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, problem, warning

__all__ = ["check", "of_tensorflow", "of_torchvision"]

_TOPIC = "packages"
_INSTALL = "pip install 'fastpipe[torch]'"
_PATIENCE_S = 60.0
_SLOW_S = 10.0

_TORCH = """
import ctypes
found = {}
try:
    driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["driver"] = version.value
except OSError:
    pass
answer(found)
import time
begun = time.perf_counter(), time.process_time()
import torch
found.update(import_s=time.perf_counter() - begun[0], import_cpu_s=time.process_time() - begun[1])
found.update(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
found.update(threads=torch.get_num_threads())
answer(found)
try:
    torch.zeros(1).numpy()
except Exception as error:
    found["numpy"] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    found["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
except Exception as error:
    found["gpus"] = []
    found["why_no_gpu"] = str(error).splitlines()[0]
answer(found)
try:
    import torchvision
    found["torchvision"] = torchvision.__version__
except ModuleNotFoundError as error:
    found["why_no_torchvision"] = "it is not installed" if error.name == "torchvision" else str(error)
except Exception as error:
    found["why_no_torchvision"] = f"{type(error).__name__}: {error}".splitlines()[0]
answer(found)
"""
_IMPORT = """
import importlib
module = importlib.import_module(_asked)
answer(getattr(module, "__version__", ""))
"""


def check(examined: Examined) -> Iterator[Finding]:
    """Import the frameworks, each in a process of its own, all at once."""
    installed = _installed()
    versions = f"Python {platform.python_version()}, NumPy {installed.get('numpy', '?')}"
    yield ok(_TOPIC, f"fastpipe {fastpipe.__version__}, {versions}")
    has_torch, has_tensorflow = _is_there("torch"), _is_there("tensorflow")
    dali = "nvidia.dali" if any(name.startswith("nvidia-dali-cuda") for name in installed) else ""
    with (
        Question(_TORCH if has_torch else "answer({})") as torch,
        Question(_IMPORT if has_tensorflow else "answer('')", "tensorflow") as tensorflow,
        Question(_IMPORT if dali else "answer('')", dali) as nvidia,
    ):
        found = torch.answer(_PATIENCE_S)
        examined.torch = found.value if has_torch else None
        facts: Mapping[str, Any] = found.value or {}
        gpus = len(glob.glob("/proc/driver/nvidia/gpus/*")) or len(glob.glob("/dev/nvidia[0-9]*"))
        if has_torch:
            yield from of_torch(facts, found.why, gpus)
            yield from of_torchvision(facts, found.why, installed)
        elif has_tensorflow:
            yield ok(_TOPIC, "torch is not installed: fastpipe.tf alone can be used")
        else:
            yield problem(_TOPIC, "neither torch nor TensorFlow is installed", _INSTALL)
        if has_tensorflow:
            yield from of_tensorflow(tensorflow.answer(_PATIENCE_S), installed)
        cuda = str(facts.get("cuda") or "")
        yield from distributions(installed, cuda, gpus, nvidia.answer(_PATIENCE_S) if dali else None)
        yield from of_time(facts)


def of_time(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether importing torch waits.

    Args:
        facts: what torch's process said.
    """
    wall, cpu = facts.get("import_s", 0.0), facts.get("import_cpu_s", 0.0)
    if wall > _SLOW_S and wall > 2 * cpu:
        yield warning(
            _TOPIC, f"importing torch took {wall:.0f} s, {cpu:.0f} s of them of processor, and each worker "
            "that is spawned imports it again",
            "run this again when its files are in memory and cores are free; if it stays slow, install torch "
            "on a local disk",
        )  # fmt: skip


def of_torchvision(facts: Mapping[str, Any], crashed: str, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Whether torchvision goes with torch.

    Args:
        facts: what torch's process said.
        crashed: why that ended early; empty if it did not.
        installed: versions of distributions.
    """
    if "version" not in facts:
        return  # torch itself cannot be imported
    why = facts.get("why_no_torchvision", crashed if "torchvision" not in facts else "")
    if why and "torchvision" not in installed:
        yield warning(_TOPIC, "torchvision is not installed: fastpipe's image datasets need it",
                      _INSTALL)  # fmt: skip
        return
    if why:
        version = installed.get("torchvision", "?")
        if "No module named" in why:
            yield problem(_TOPIC, f"torchvision {version} cannot be imported: {why}", _INSTALL)
            return
        index = f"cu{facts['cuda'].replace('.', '')}" if facts.get("cuda") else "cpu"
        yield problem(
            _TOPIC,
            f"torchvision {version} cannot be imported beside torch {facts['version']}: {why}",
            "install both from one place, whose builds fit:  pip install --force-reinstall torch torchvision "
            f"--index-url https://download.pytorch.org/whl/{index}",
        )
        return
    text = f"torchvision {facts['torchvision']}"
    wanted = _wants("torchvision", "torch")
    if wanted and wanted != facts["version"].partition("+")[0]:
        yield warning(
            _TOPIC, f"{text} was built for torch {wanted}, and torch is {facts['version']}",
            f"pip install torch=={wanted}, or the torchvision of this torch",
        )  # fmt: skip
    else:
        yield ok(_TOPIC, f"{text} goes with torch")


def of_tensorflow(answer: Answer, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Whether TensorFlow can be used.

    Args:
        answer: of the process that imported it.
        installed: versions of distributions.
    """
    names = [name for name in ("tensorflow", "tensorflow-cpu", "tf-nightly") if name in installed]
    text = ", ".join(f"{name} {installed[name]}" for name in names) or "TensorFlow"
    if len(names) > 1:
        yield warning(
            _TOPIC, f"{text} are both installed, and one lies over the other's files",
            f"pip uninstall {' '.join(names)}, then install one of them",
        )  # fmt: skip
    if answer.why:
        yield problem(
            _TOPIC, f"{text} cannot be imported with NumPy {installed.get('numpy', '?')}: {answer.why}",
            "pip install -U tensorflow, or the NumPy that it names",
        )  # fmt: skip
    else:
        yield ok(_TOPIC, f"{text} can be imported")


def _installed() -> dict[str, str]:
    """Versions by names."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:  # half of an uninstalled one may be left
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), one.version)
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _wants(package: str, other: str) -> str:
    """The one version of another package that a package says it needs; empty without one."""
    try:
        requirements = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return ""
    for one in requirements:
        if exact := re.match(rf"{other}\s*\(?==\s*([\w.]+)", one):
            return exact[1]
    return ""
