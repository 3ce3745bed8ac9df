"""A report as scalars and a text of TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastpipe.core.processes import load_triton_apart
from fastpipe.errors import MissingDependencyError
from fastpipe.profiling.findings import Findings

__all__ = ["scalars_of", "write_board"]

_PREFIX = "fastpipe/profile"


def scalars_of(findings: Findings) -> dict[str, float]:
    """Numbers of a profile, by the names that TensorBoard shows.

    >>> scalars_of(Findings(None, steps=3, step_s=0.5, wait_s=0.1, busy_s=0.4))
    {'fastpipe/profile/step_seconds': 0.5, 'fastpipe/profile/wait_seconds': 0.1,
     'fastpipe/profile/busy_seconds': 0.4, 'fastpipe/profile/stall_share': 0.2}
    """
    if not findings.steps:
        return {}
    found = {"step_seconds": findings.step_s}
    if not findings.is_opaque:
        found |= {"wait_seconds": findings.wait_s, "busy_seconds": findings.busy_s}
    if findings.device_wait_s is not None and findings.device_busy_s is not None:
        found["device_wait_seconds"] = findings.device_wait_s
        found["device_busy_seconds"] = findings.device_busy_s
    found["stall_share"] = findings.stall_share
    if findings.alone is not None:
        found["loader_alone/batch_seconds"] = findings.alone.batch_s
    found |= {f"stall_seconds/{part.name}": part.seconds for part in findings.stall}
    found |= {f"batch_seconds/{stage}": spent.wall / 1e9 for stage, spent in findings.costs.stages.items()}
    found |= {f"case_seconds/{case.name}": case.seconds for case in findings.cases}
    for number, advice in enumerate(findings.advice, start=1):  # as they are numbered in the text
        for name, seconds in (("predicted", advice.predicted_s), ("tried", advice.tried_s)):
            if seconds is not None:
                found[f"{name}_seconds/{number}"] = seconds
    return {f"{_PREFIX}/{name.replace(' ', '_')}": value for name, value in found.items()}


def write_board(log_dir: str | os.PathLike[str], scalars: Mapping[str, float], text: str, step: int) -> None:
    """Write a file of events.

    Args:
        log_dir: the folder that TensorBoard is started with, or one below it.
        scalars: by name.
        text: of the report.
        step: at which they stand.

    Raises:
        MissingDependencyError: there is nothing to write it with.
    """
    write = _writer()
    write(os.fspath(log_dir), scalars, f"    {text}".replace("\n", "\n    "), step)  # as code: in columns
    load_triton_apart()  # TensorBoard's writer, too, may have loaded TensorFlow


def _writer() -> Callable[[str, Mapping[str, float], str, int], None]:
    """What writes: preferably with what is loaded already."""
    if _is_loaded("tensorflow"):
        return _write_with_tensorflow
    if all(_is_installed(name) for name in ("torch", "tensorboard")):
        return _write_with_torch
    if _is_installed("tensorflow"):
        return _write_with_tensorflow
    raise MissingDependencyError(
        "a report goes to TensorBoard by torch and the package tensorboard, or by TensorFlow, and neither is "
        "installed. Install it with:  pip install tensorboard torch"
    )


def _is_loaded(name: str) -> bool:
    return sys.modules.get(name) is not None


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ValueError, ImportError):  # of a module without a spec, or one that is hidden
        return importlib.util.find_spec(name) is not None
    return _is_loaded(name)


def _write_with_torch(log_dir: str, scalars: Mapping[str, float], text: str, step: int) -> None:
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir) as writer:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.add_text(_PREFIX, text, step)


def _write_with_tensorflow(log_dir: str, scalars: Mapping[str, float], text: str, step: int) -> None:
    tf = importlib.import_module("tensorflow")

    def metadata(plugin: str) -> Any:
        # tf.summary.scalar would need the package tensorboard.
        made = tf.compat.v1.SummaryMetadata()
        made.plugin_data.plugin_name = plugin
        return made

    writer = tf.summary.create_file_writer(log_dir)
    try:
        with writer.as_default():
            for name, value in scalars.items():
                tf.summary.write(name, np.float32(value), step, metadata("scalars"))
            tf.summary.write(f"{_PREFIX}/text_summary", text, step, metadata("text"))
    finally:
        writer.close()
