"""Whether GPU, driver, torch and NVIDIA's packages go together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastpipe.core.text import counted
from fastpipe.profiling.doctor.asking import Answer
from fastpipe.profiling.doctor.findings import Finding, ok, problem, warning

__all__ = ["distributions", "of_torch"]

_TOPIC = "packages"
_HIDDEN = "CUDA_VISIBLE_DEVICES"


def of_torch(facts: Mapping[str, Any], crashed: str, gpus: int) -> Iterator[Finding]:
    """Whether torch can be used, and with it the GPUs that there are.

    Args:
        facts: what torch's process said: version, CUDA, driver, GPUs.
        crashed: why that ended early; empty if it did not.
        gpus: NVIDIA's GPUs that the system shows.
    """
    if "version" not in facts:
        yield problem(_TOPIC, f"torch cannot be imported: {crashed}", "pip install --force-reinstall torch")
        return
    built = f"for CUDA {facts['cuda']}" if facts.get("cuda") else "without CUDA"
    built = f"for ROCm {facts['hip']}" if facts.get("hip") else built
    yield ok(_TOPIC, f"torch {facts['version']}, built {built}")
    if "numpy" in facts:
        yield problem(
            _TOPIC, f"torch cannot hand arrays to NumPy: {facts['numpy']}",
            'pip install "numpy<2", or a torch that was built for NumPy 2',
        )  # fmt: skip
    if facts.get("gpus"):
        names = ", ".join(sorted(set(facts["gpus"])))
        driver = f"; the driver supports CUDA {_dotted(facts['driver'])}" if "driver" in facts else ""
        yield ok(_TOPIC, f"torch sees {counted(len(facts['gpus']), 'GPU')}: {names}{driver}")
    elif gpus:
        yield _unseen(facts, gpus)
    elif not facts.get("hip"):
        yield ok(_TOPIC, "no NVIDIA GPU is here: batches stay on the CPU, and nothing is missing for that")


def _unseen(facts: Mapping[str, Any], gpus: int) -> Finding:
    """Why torch does not see a GPU that is there."""
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
    why = facts.get("why_no_gpu") or f"driver {_dotted(driver)} and CUDA {cuda} should go together"
    return problem(_TOPIC, f"{text}: {why}", "python -c 'import torch; torch.zeros(1).cuda()' says more")


def _dotted(version: int) -> str:
    """CUDA's number of a version: 12040 is 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def distributions(
    installed: Mapping[str, str], cuda: str, gpus: int, dali: Answer | None
) -> Iterator[Finding]:
    """NVIDIA's packages for decoding, which there are for each CUDA.

    Args:
        installed: versions of distributions.
        cuda: that torch is built for; empty without.
        gpus: how many there are.
        dali: of the process that imported DALI; None where it is not installed.
    """
    for what, pattern in (
        ("DALI", r"nvidia-dali-cuda(\d{2})0"),
        ("nvImageCodec", r"nvidia-nvimgcodec-cu(\d+)"),
    ):
        names = {name: found[1] for name in sorted(installed) if (found := re.fullmatch(pattern, name))}
        text = ", ".join(f"{name} {installed[name]}" for name in names)
        if len(names) > 1:
            yield warning(
                _TOPIC, f"{text} are all installed, and one lies over the other's files",
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
