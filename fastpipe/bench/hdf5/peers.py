"""The rows of the case that are other readers of HDF5 files, each in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.hdf5.rows import WINDOW
from fastpipe.bench.peers import ChildRow, Peer
from fastpipe.bench.results import RowInfo

__all__ = ["TABLE_PEERS", "TablePeerRow", "peers_of", "row_info"]

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
