"""The protocol's child side.

It reads one line of JSON that is the job, answers with the form of the first batch, and then
answers each ``{"batches": n}`` with the seconds that n batches took, once it is at rest again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, NoReturn, TextIO

import numpy as np
import numpy.typing as npt

from benchmarks.peers.children import (
    albumentations,
    batchgenerators,
    dali,
    ffcv,
    hidefix,
    kornia,
    litdata,
    monai,
    monai_augment,
    objects,
    pillow_simd,
    pyfive,
    spdl,
    tensorstore,
    tfdata,
    torch_decode,
    torchaudio,
    zarr,
)
from benchmarks.peers.children.protocol import (
    AnyJob,
    AugmentJob,
    PeerError,
    Stream,
    TableJob,
    VolumeJob,
    augment_problem,
    batch_problem,
    job_of,
    table_problem,
    volume_problem,
)

__all__ = ["SOURCES", "main", "serve"]


SOURCES: dict[str, Callable[[Any], Stream]] = {
    "albumentations": albumentations.stream,
    "batchgenerators": batchgenerators.stream,
    "dali": dali.stream,
    "ffcv": ffcv.stream,
    "hidefix": hidefix.stream,
    "kornia": kornia.stream,
    "litdata": litdata.stream,
    "monai": monai.stream,
    "monai-augment": monai_augment.stream,
    "objects": objects.stream,
    "pillow_simd": pillow_simd.stream,
    "pyfive": pyfive.stream,
    "spdl": spdl.stream,
    "tensorstore": tensorstore.stream,
    "tfdata": tfdata.stream,
    "torch_decode": torch_decode.stream,
    "torchaudio": torchaudio.stream,
    "zarr": zarr.stream,
}

_COMPARED = 4  # batches


def serve(
    source: str, questions: TextIO, answers: TextIO, pause: Callable[[float], None] = time.sleep
) -> None:
    """Answer the parent until it closes the pipe.

    Args:
        source: a key of `SOURCES`.
        questions, answers: the pipes.
        pause: for tests.
    """

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = job_of(json.loads(questions.readline()))
    try:
        stream = SOURCES[source](job)
        images, labels = _next(stream)
    except PeerError as error:
        answer({"error": str(error)})
        return
    problem = _problem(job, stream, images, labels)
    first = {"error": problem} if problem else _first_answer(job, stream, images, labels)
    _end_remembering(stream)
    answer(first)
    for line in questions:
        question = json.loads(line)
        try:
            if stream.choose is not None:
                stream.choose(question["task"])
        except PeerError as error:
            answer({"error": str(error)})
            continue
        if stream.renewed is not None:
            stream = replace(stream, batches=stream.renewed())
        # What was made ready during the pause, and a little more, is not part of the measurement.
        for _ in range(2 * stream.ahead):
            _next(stream)
        wanted = question["batches"]
        seconds = _seconds_of(stream, wanted)
        # Until the next batches are ready and it sleeps, so that whoever is next is alone.
        pause(1.2 * stream.ahead * seconds / wanted)
        _end_remembering(stream)
        answer({"seconds": seconds})
    stream.batches.close()


def _seconds_of(stream: Stream, wanted: int) -> float:
    """Return the time that a number of batches takes."""
    if stream.wait is not None:
        stream.wait()
    start = time.perf_counter()
    for _ in range(wanted):
        if stream.wait is not None:  # to look at a number is to wait for the device
            next(stream.batches)
            continue
        images, _ = _next(stream)
        if images.flat[0] != images.flat[0]:
            raise ValueError("a batch holds a value that is not a number")
    if stream.wait is not None:
        stream.wait()
    return time.perf_counter() - start


def _end_remembering(stream: Stream) -> None:
    """Close the batches of one that is made anew before it is asked again; then nothing of it is at work."""
    if stream.renewed is not None:
        stream.batches.close()


def _problem(job: AnyJob, stream: Stream, values: npt.NDArray[Any], labels: Any) -> str | None:
    """Return what is wrong with the first batch, or ``None``."""
    if isinstance(job, TableJob):
        return table_problem(job, values)
    if isinstance(job, VolumeJob):
        return volume_problem(job, values, np.asarray(labels[0]))
    if isinstance(job, AugmentJob):
        return augment_problem(job, job.tasks[0], values)
    return batch_problem(job, stream.layout, values, labels)


def _next(stream: Stream) -> tuple[npt.NDArray[Any], Any]:
    """The next batch, its images seen as an array."""
    images, labels = next(stream.batches)
    if isinstance(images, (list, tuple)):  # with labels of a task's own
        images, labels = images
    return np.asarray(images if stream.wait is None else images.cpu()), labels


def _first_answer(job: AnyJob, stream: Stream, images: npt.NDArray[Any], labels: Any) -> dict[str, Any]:
    """Return the fields of the parent's row; for patches also the values to compare."""
    return {
        "patches": _some_patches(stream, images, labels) if isinstance(job, VolumeJob) else None,
        "shape": list(images.shape),
        "dtype": str(images.dtype),
        "versions": _versions(stream.packages),
        "note": stream.note,
        "prepared_s": stream.prepared_s,
        "prepared_bytes": stream.prepared_bytes,
    }


def _some_patches(stream: Stream, values: npt.NDArray[Any], others: Any) -> list[dict[str, Any]]:
    """Return the positions of the first patches, and digests of their values and labels."""
    found = []
    for number in range(_COMPARED):
        if number:
            values, others = _next(stream)
        labels, starts = np.asarray(others[0]), np.asarray(others[1])
        for start, *arrays in zip(starts, values, labels, strict=True):
            digests = [hashlib.blake2b(np.ascontiguousarray(one).data, digest_size=16) for one in arrays]
            found.append({"start": start.tolist(), "digests": [one.hexdigest() for one in digests]})
    return found


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def main() -> None:
    """Keep the pipe to the parent for answers; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.argv[1], sys.stdin, answers)
    except (KeyboardInterrupt, BrokenPipeError):
        # The parent decides; thread pools of the libraries must not delay the end.
        _end(130)
    answers.flush()
    sys.stderr.flush()
    _end(0)


def _end(code: int) -> NoReturn:
    """Leave at once, and leave no worker process."""
    for process in multiprocessing.active_children():
        process.terminate()
    # DALI and TensorFlow may hang or abort while interpreters shut down under running threads.
    os._exit(code)
