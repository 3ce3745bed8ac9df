"""A model that sees segments and is judged by file: a file at a time, and some at a time."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.hdf5 import Table, table_dataset
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender
from fastpipe.core.extras import require

FILES_AT_ONCE = 16
_CLASSES = 4


def evaluation_infos(table: Table) -> list[RowInfo]:
    """The rows of a table."""
    section = section_of(table)
    name = f"group_batches(k={FILES_AT_ONCE}) + segment_reduce"
    one, some = "h5py and the model", "reading and the model"
    told: dict[str, Any] = {"section": section, "unit": "files"}
    return [
        RowInfo(f"{section}-replaced", "one file at a time", "replaced", 0, "votes", one, **told),
        RowInfo(f"{section}-grouped", name, "fastpipe", 0, "votes", some, **told),
    ]


def section_of(table: Table) -> str:
    """The section of the result in which a table's rows are."""
    return f"files-{math.prod(table.shape[1:3])}"


def small_net(seed: int = 0) -> Any:
    """A small convolutional net for segments (N, 1, bands, frames)."""
    torch = require("torch", extra="torch")
    layers = torch.nn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = layers.Sequential(
            layers.Conv2d(1, 8, 3, stride=2, padding=1), layers.ReLU(),
            layers.Conv2d(8, 16, 3, stride=2, padding=1), layers.ReLU(), layers.AdaptiveAvgPool2d(1),
            layers.Flatten(), layers.Linear(16, _CLASSES),
        )  # fmt: skip
    return net.eval()


class _Votes(Contender):
    """Files that a small net judges.

    Args:
        table: (files, long, short, bands, frames).

    Attributes:
        votes: what the last measurement found for each file.
    """

    kind: str

    def __init__(self, table: Table) -> None:
        self.key = f"{section_of(table)}-{self.kind}"
        self.chunk = table.shape[0]
        self.votes: npt.NDArray[np.int64] = np.full(table.shape[0], -1)
        self._table, self._net = table, small_net()


class FileByFile(_Votes):
    """A `Contender`: each file's segments are read with h5py, judged, and vote."""

    kind = "replaced"

    def measure(self, count: int) -> float:
        """Judge so many files; return the seconds it took."""
        torch = require("torch", extra="torch")
        h5py = require("h5py", extra="hdf5")
        shape = self._table.shape
        start = time.perf_counter()
        with torch.inference_mode(), h5py.File(self._table.path, "r") as file:
            dataset = file[self._table.dataset]
            for number in range(count):
                segments = torch.from_numpy(dataset[number % shape[0]]).reshape(-1, 1, *shape[-2:])
                chosen = self._net(segments).argmax(1)
                self.votes[number % shape[0]] = torch.bincount(chosen, minlength=_CLASSES).argmax().item()
        return time.perf_counter() - start


class Grouped(_Votes):
    """A `Contender`: the same, some files at a time."""

    kind = "grouped"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._batches: Any = fastpipe.group_batches(table_dataset(table, "off"), FILES_AT_ONCE)

    def measure(self, count: int) -> float:
        """Judge so many files; return the seconds it took."""
        torch = require("torch", extra="torch")
        seen = 0
        start = time.perf_counter()
        with torch.inference_mode():
            while seen < count:
                for (segments, _), files in self._batches:
                    found = fastpipe.segment_reduce(self._net(segments.unsqueeze(1)), files, "vote")
                    self.votes[found.groups.numpy()] = found.values.numpy()
                    seen += len(found.groups)
        return time.perf_counter() - start

    def close(self) -> None:
        """Let go of the loader."""
        self._batches = None
