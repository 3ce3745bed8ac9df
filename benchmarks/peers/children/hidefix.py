"""hidefix: an index of the chunks in Rust, which reads and decodes the chunks of one slice side by side."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import Batches, PeerError, Stream, TableJob
from benchmarks.peers.children.windows import batched, endless_windows

__all__ = ["stream"]


def stream(job: TableJob) -> Stream:
    """Batches of rows, shuffled within runs of neighbouring chunks: a slice is what it reads fast.

    Raises:
        PeerError: it cannot read this file.
    """
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    os.environ.setdefault("RUST_BACKTRACE", "0")
    import hidefix

    try:
        dataset = hidefix.Index(job.path).dataset(job.dataset)
        dataset[(slice(0, 1),)]
    except Exception as error:  # whatever it stumbles over
        raise PeerError(f"cannot read the file: {str(error).splitlines()[0]}") from None
    return Stream(_batches(job, dataset), 0, ("hidefix",))


def _batches(job: TableJob, dataset: Any) -> Batches:
    """A window at a time."""
    rng = np.random.default_rng(0)
    order = endless_windows(job.shape[0], job.group, job.window, rng, adjacent=True)
    firsts = ((groups[0] * job.group, rows) for groups, rows in order)
    read = ((dataset[(slice(first, first + len(rows)),)], rows - first, rows) for first, rows in firsts)
    yield from batched(read, job.batch_size)
