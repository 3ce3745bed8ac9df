"""Check that the installed packages match each other, the GPU and its driver."""

from __future__ import annotations

import glob
import os
import platform
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import fastpipe
from fastpipe.core.text import counted
from fastpipe.tools.doctor.child import Answer, ask
from fastpipe.tools.doctor.report import Examined, Finding, ok, problem, warning

_TOPIC = "packages"
_HIDDEN = "CUDA_VISIBLE_DEVICES"
_INSTALL = "pip install torch torchvision"
_PATIENCE_S = 60.0

_TORCH = """
import ctypes
found = {}
def look(name, make):
    try:
        found[name] = make()
    except Exception as error:
        found["why_no_" + name] = f"{type(error).__name__}: {error}".splitlines()[0]
    answer(found)
def driver():
    library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        raise OSError("no version")
    return version.value
look("driver", driver)
import torch
found.update(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
found.update(threads=torch.get_num_threads())
answer(found)
look("numpy", lambda: torch.zeros(1).numpy().size)
look("gpus", lambda: [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])
look("torchvision", lambda: __import__("torchvision").__version__)
"""
_IMPORT = """
import importlib
module = importlib.import_module(_asked)
answer(getattr(module, "__version__", ""))
"""


def check(examined: Examined) -> Iterator[Finding]:
    installed = _installed()
    versions = f"Python {platform.python_version()}, NumPy {installed.get('numpy', '?')}"
    yield ok(_TOPIC, f"fastpipe {fastpipe.__version__}, {versions}")
    has_torch, has_tensorflow = (find_spec(name) is not None for name in ("torch", "tensorflow"))
    has_dali = any(name.startswith("nvidia-dali-cuda") for name in installed)
    ask_now = partial(ask, seconds=_PATIENCE_S)
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(ask_now, _TORCH) if has_torch else None
        tensorflow = pool.submit(ask_now, _IMPORT, "tensorflow") if has_tensorflow else None
        nvidia = pool.submit(ask_now, _IMPORT, "nvidia.dali") if has_dali else None
    found = Answer({}) if torch is None else torch.result()
    examined.torch = found.value if has_torch else None
    facts: Mapping[str, Any] = found.value or {}
    gpus = len(glob.glob("/proc/driver/nvidia/gpus/*")) or len(glob.glob("/dev/nvidia[0-9]*"))
    if has_torch:
        yield from _torch(facts, found.why, gpus)
        yield from _torchvision(facts, found.why, installed)
    elif has_tensorflow:
        yield ok(_TOPIC, "torch is not installed: fastpipe.tf alone can be used")
    else:
        yield problem(_TOPIC, "neither torch nor TensorFlow is installed", _INSTALL)
    if tensorflow is not None:
        yield from _tensorflow(tensorflow.result(), installed)
    cuda = str(facts.get("cuda") or "")
    yield from _distributions(installed, cuda, gpus, None if nvidia is None else nvidia.result())


def _torch(facts: Mapping[str, Any], crashed: str, gpus: int) -> Iterator[Finding]:
    if "version" not in facts:
        yield problem(_TOPIC, f"torch cannot be imported: {crashed}", "pip install --force-reinstall torch")
        return
    built = f"for CUDA {facts['cuda']}" if facts.get("cuda") else "without CUDA"
    built = f"for ROCm {facts['hip']}" if facts.get("hip") else built
    yield ok(_TOPIC, f"torch {facts['version']}, built {built}")
    if "why_no_numpy" in facts:
        yield problem(
            _TOPIC, f"torch cannot convert tensors to NumPy: {facts['why_no_numpy']}",
            'pip install "numpy<2", or a torch that was built for NumPy 2',
        )  # fmt: skip
    if facts.get("gpus"):
        names = ", ".join(sorted(set(facts["gpus"])))
        driver = f"; the driver supports CUDA {_dotted(facts['driver'])}" if "driver" in facts else ""
        yield ok(_TOPIC, f"torch sees {counted(len(facts['gpus']), 'GPU')}: {names}{driver}")
    elif gpus:
        yield _unseen(facts, gpus)
    elif not facts.get("hip"):
        yield ok(_TOPIC, "no NVIDIA GPU was found: batches stay on the CPU, which needs no further package")


def _unseen(facts: Mapping[str, Any], gpus: int) -> Finding:
    text, cuda, driver = f"GPUs here: {gpus}; torch sees none", facts.get("cuda"), facts.get("driver")
    hidden = os.environ.get(_HIDDEN)
    if not cuda:
        index = f"cu{driver // 1000}x" if driver else "cuXXX"
        return problem(
            _TOPIC, f"{text}: it is a build without CUDA",
            f"pip install --force-reinstall torch torchvision, from https://pytorch.org for {index}",
        )  # fmt: skip
    if driver is None:
        return problem(
            _TOPIC, f"{text}: there is no driver that programs can use (libcuda.so.1)",
            "install NVIDIA's driver; start a container with its runtime: docker run --gpus all",
        )  # fmt: skip
    if driver // 1000 < int(cuda.split(".")[0]):
        return problem(
            _TOPIC, f"{text}: it is built for CUDA {cuda}, and the driver supports {_dotted(driver)} at most",
            f"a newer driver, or torch for CUDA {driver // 1000}.x from https://pytorch.org",
        )  # fmt: skip
    if hidden is not None and hidden.strip() in ("", "-1"):
        return warning(_TOPIC, f"{text}: {_HIDDEN}={hidden!r} hides them", f"unset {_HIDDEN}")
    why = facts.get("why_no_gpus") or f"driver {_dotted(driver)} and CUDA {cuda} should go together"
    return problem(_TOPIC, f"{text}: {why}", "python -c 'import torch; torch.zeros(1).cuda()' shows details")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _distributions(
    installed: Mapping[str, str], cuda: str, gpus: int, dali: Answer | None
) -> Iterator[Finding]:
    for what, pattern in (
        ("DALI", r"nvidia-dali-cuda(\d{2})0"),
        ("nvImageCodec", r"nvidia-nvimgcodec-cu(\d+)"),
    ):
        names = {name: found[1] for name in sorted(installed) if (found := re.fullmatch(pattern, name))}
        text = ", ".join(f"{name} {installed[name]}" for name in names)
        if len(names) > 1:
            yield warning(
                _TOPIC, f"{text} are all installed, and one overwrites files of the other",
                f"pip uninstall {' '.join(names)}, then install one of them",
            )  # fmt: skip
        elif names and cuda and gpus and set(names.values()) != {cuda.split(".")[0]}:
            other = next(iter(names)).replace(next(iter(names.values())), cuda.split(".")[0])
            yield warning(
                _TOPIC, f"{text} is for another CUDA than torch's, {cuda}, and would load its libraries too",
                f"pip uninstall {' '.join(names)}; pip install {other}",
            )  # fmt: skip
        elif names:
            yield ok(_TOPIC, f"{what}: {text}{'' if gpus else ', on the CPU'}")
    if dali is not None and dali.why:
        yield problem(_TOPIC, f"DALI cannot be imported: {dali.why}", "pip install -U the DALI of this CUDA")


def _torchvision(facts: Mapping[str, Any], crashed: str, installed: Mapping[str, str]) -> Iterator[Finding]:
    if "version" not in facts:
        return  # torch cannot be imported, which is another finding
    why = facts.get("why_no_torchvision", crashed if "torchvision" not in facts else "")
    if why and "torchvision" not in installed:
        yield warning(_TOPIC, "torchvision is not installed: fastpipe's image datasets need it", _INSTALL)
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


def _tensorflow(answer: Answer, installed: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for name in ("tensorflow", "tensorflow-cpu", "tf-nightly") if name in installed]
    text = ", ".join(f"{name} {installed[name]}" for name in names) or "TensorFlow"
    if len(names) > 1:
        yield warning(
            _TOPIC, f"{text} are both installed, and one overwrites files of the other",
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
    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:  # an incomplete uninstall leaves a distribution without a name
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), one.version)
    return found


def _wants(package: str, other: str) -> str:
    try:
        requirements = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return ""
    for one in requirements:
        if exact := re.match(rf"{other}\s*\(?==\s*([\w.]+)", one):
            return exact[1]
    return ""
