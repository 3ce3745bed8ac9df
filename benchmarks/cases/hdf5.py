"""The case ``hdf5`` with other readers, memory, the first batch, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.peers.rows import ChildRow, Peer
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench.hdf5 import WINDOW, Table
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Sample

__all__ = [
    "ASKED",
    "TABLE_PEERS",
    "Asked",
    "TablePeerRow",
    "first_batch_targets",
    "memory_target",
    "peers_of",
    "rate_targets",
    "row_info",
]


# ----------------------------------------------------------------------------------------------------
# The rows of the case that are other readers of HDF5 files, each in a process of its own.

_MIXED = f"{WINDOW} chunks mixed at a time"

TABLE_PEERS = (
    Peer(
        "pyfive", "pyfive, threads", "pyfive", "pip install pyfive", "pyfive",
        note=f"the format in Python, a chunk to a thread; {_MIXED}",
    ),
    Peer(
        "hidefix", "hidefix", "hidefix", "pip install hidefix", "hidefix",
        note=f"chunks of a slice side by side; {_MIXED}, which lie next to each other",
    ),
)  # fmt: skip


def peers_of(table: Table) -> list[Peer]:
    """The peers, with keys of the table's section."""
    return [replace(peer, key=f"{table.key}-{peer.key}") for peer in TABLE_PEERS]


def row_info(peer: Peer, table: Table) -> RowInfo:
    """What the report calls it."""
    return RowInfo(
        peer.key, peer.label, "peer", None, table.dtype, peer.note, section=table.key, unit="samples"
    )


class TablePeerRow(ChildRow):
    """A peer that reads a table.

    Args:
        peer: which library.
        python: the interpreter that has it.
        table: what it reads.
        batch_size: rows in a batch.
        threads: how many threads the library may use.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    def __init__(self, peer: Peer, python: str, table: Table, batch_size: int, threads: int) -> None:
        job: dict[str, Any] = {
            "path": str(table.path),
            "dataset": table.dataset,
            "shape": table.shape,
            "dtype": table.dtype,
            "group": table.group,
            "window": WINDOW,
            "batch_size": batch_size,
            "threads": threads,
        }
        super().__init__(peer, python, job, batch_size, threads)
        # Rows come in bursts, a window at a time.
        window = -(-WINDOW * table.group // batch_size) * batch_size
        self.chunk = max(batch_size, min(window, table.samples // batch_size * batch_size))

    @property
    def versions(self) -> dict[str, str]:
        """Package → version, where it runs."""
        told: dict[str, str] = self.first_batch["versions"]
        return told


# ---- What was asked of fastpipe for HDF5 files, as figures, and whether it is met -------------------

FIRST_COLD_S, FIRST_KEPT_S = 1.0, 0.3
MEMORY_ABOVE_MB = 150.0


ASKED = (
    Asked("gzip, windows, × the replaced loader", "gzip-window", "gzip-replaced", 26),
    Asked("gzip, windows, × hidefix", "gzip-window", "gzip-hidefix", 1.2),
    Asked("gzip, windows, × h5py in order", "gzip-window", "gzip-order", 1.8),
    Asked("LZF, windows, × the replaced loader", "lzf-window", "lzf-replaced", 20),
    Asked("LZF, windows, × h5py in order", "lzf-window", "lzf-order", 2),
    # One thread of h5py's, of which fastpipe has one for each of two cores.
    Asked("bitshuffle + LZ4, windows, × h5py in order", "bitshuffle-window", "bitshuffle-order", 2),
    Asked("gzip, any order, × the replaced loader", "gzip-uniform", "gzip-replaced", 4),
    Asked("LZF, any order, × the replaced loader", "lzf-uniform", "lzf-replaced", 4),
    Asked("a chunk for each row, × hidefix", "rows-uniform", "rows-hidefix", 1),
    Asked("uncompressed, all rows shuffled, × the replaced loader", "plain-uniform", "plain-replaced", 6),
    Asked(
        "contiguous, all rows shuffled, × the replaced loader", "contiguous-uniform", "contiguous-replaced", 6
    ),
    Asked("uncompressed, × the loader that looks rows up by name", "plain-uniform", "plain-named", 15),
    Asked(
        "contiguous, × the loader that looks rows up by name", "contiguous-uniform", "contiguous-named", 15
    ),
    Asked("gzip kept in memory, all rows shuffled, × the replaced loader", "gzip-ram", "gzip-replaced", 80),
    Asked("segments of 1 KiB kept in memory, samples/s", "cells-ram", None, 350_000),
    Asked("evaluation, files of 12 segments, × one at a time", "files-12-grouped", "files-12-replaced", 2),
    Asked("evaluation, files of 200 segments, × one at a time", "files-200-grouped", "files-200-replaced", 2),
)


def rate_targets(
    samples: Mapping[str, Sequence[Sample]], asked: Sequence[Asked] = ASKED
) -> list[dict[str, Any]]:
    """What came of the figures that are rates, as `judged_rates` says."""
    return judged_rates(samples, asked)


def first_batch_targets(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What came of the time to the first batch.

    Args:
        measured: from `first.first_batches`; None where it was not measured.
    """
    return [
        judged(text, most, "s", [] if measured is None else measured[name]["raw_s"], is_most=True)
        for text, most, name in (
            ("first batch of a file of many chunks", FIRST_COLD_S, "cold"),
            ("first batch, where the chunks are is kept", FIRST_KEPT_S, "kept"),
        )
    ]


def memory_target(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What came of the memory.

    Args:
        measured: from `memory.memory_of_trees`; None where it was not measured.
    """
    figures = (
        [] if measured is None else [entry["above_mb"] - entry["budget_mb"] for entry in measured["rows"]]
    )
    text = "memory above that of loading nothing, less the cache's budget, most of all"
    return [judged(text, MEMORY_ABOVE_MB, "MB", [max(figures)] if figures else [], is_most=True)]
