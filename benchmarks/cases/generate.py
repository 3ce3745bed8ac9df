"""The case ``generate`` with other libraries, predictions, memory, and what was asked for."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.targets import Asked, judged, judged_rates
from fastpipe._extras import require
from fastpipe.bench.functions import made, made_of
from fastpipe.bench.generate import Columns, Section, Spec, StoringRow, write_rows
from fastpipe.bench.runner import ContenderError, Sample, rates_by_round

__all__ = ["PEERS", "DatasetsRow", "JoblibRow", "Peer", "PeerRow", "PoolRow", "asked", "targets"]


# ----------------------------------------------------------------------------------------------------
# The rows of the case that are other libraries: they make rows in processes of theirs, started anew for
# each measurement, and this process stores them where they do not.

# About how long the rows of a task take, of those that are tried.
_TASKS_S = (0.005, 0.02, 0.08)

Size = int | Literal["auto"]


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        kind: the end of its rows' keys.
        label: its name in tables, with ``{cores}``.
        row: measures it.
        note: what a reader should know about the row.
        packages: that it needs, as they are imported; their versions are told.
    """

    kind: str
    label: str
    row: type[PeerRow]
    note: str
    packages: Sequence[str] = ()

    def spec(self, section: Section, cores: int) -> Spec:
        """Its row in a section."""
        return Spec(section, self.kind, self.label.format(cores=cores), "peer", cores, note=self.note)

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured: what is not installed, and how to install it."""
        lacking = [one for one in self.packages if importlib.util.find_spec(one) is None]
        return f"not installed: pip install {lacking[0]}" if lacking else None

    @property
    def versions(self) -> Mapping[str, str] | None:
        """Package → version; None for the standard library."""
        return {name: metadata.version(name) for name in self.packages} or None


class PeerRow(StoringRow):
    """A `Contender` that is another library."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows.

        Raises:
            ContenderError: it cannot.
        """
        # Else BLAS has as many threads in each process as there are cores; forks have what their parent has.
        later.enter_context(require("threadpoolctl", extra="generation").threadpool_limits(1))
        try:
            self._make(count, out, later)
        except Exception as error:
            raise ContenderError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows."""

    def tune(self, count: int) -> str:
        """Try what may be chosen, and keep the fastest; what that is.

        Args:
            count: so many rows each time.
        """
        return ""


class _TaskedRow(PeerRow):
    """One that is told how many rows make a task."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        super().__init__(spec, folder)
        row_s = spec.section.row_s
        self.sizes: list[Size] = [max(1, round(seconds / row_s)) for seconds in _TASKS_S]
        self.size: Size = self.sizes[1]

    def tune(self, count: int) -> str:
        """Try how many rows make a task, twice; what was the fastest."""
        seconds = dict.fromkeys(self.sizes, float("inf"))
        for _ in range(2):
            for self.size in seconds:
                seconds[self.size] = min(seconds[self.size], self.measure(count))
        self.size = min(seconds, key=seconds.__getitem__)
        *others, last = map(str, seconds)
        return f"rows a task: {self.size}, the fastest of {', '.join(others)} and {last}"


class JoblibRow(_TaskedRow):
    """``joblib.Parallel`` with its own processes."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        super().__init__(spec, folder)
        self.size = "auto"
        self.sizes = ["auto", *self.sizes]

    def _make(self, count: int, out: Path, later: ExitStack) -> None:
        joblib = require("joblib", extra="peers")
        loky = require("joblib.externals.loky", extra="peers")
        # Its processes would wait for the next call, for five minutes.
        later.callback(lambda: loky.get_reusable_executor(reuse=True).shutdown())
        make = joblib.delayed(made)
        with joblib.parallel_config("loky", n_jobs=self.workers, inner_max_num_threads=1):
            parallel = joblib.Parallel(batch_size=self.size, return_as="generator")
            write_rows(out, count, parallel(make(self._function, index) for index in range(count)))


class PoolRow(_TaskedRow):
    """``multiprocessing.Pool.imap``."""

    def _make(self, count: int, out: Path, later: ExitStack) -> None:
        pool = multiprocessing.Pool(self.workers)
        later.callback(pool.join)
        later.callback(pool.terminate)
        assert self.size != "auto"
        write_rows(out, count, pool.imap(partial(made, self._function), range(count), self.size))


class DatasetsRow(PeerRow):
    """``datasets.Dataset.from_generator``, which writes files of its own."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        super().__init__(spec, folder)
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # looked at when it is imported
        try:
            self._datasets = require("datasets", extra="peers")
        except Exception as error:  # some of what it needs is of another version
            raise ContenderError(f"{type(error).__name__}: {error}") from error
        self._datasets.disable_progress_bars()
        self._datasets.disable_caching()
        self._features = self._features_of(made(self._function, 0))

    def _make(self, count: int, out: Path, later: ExitStack) -> None:
        cuts = [count * part // self.workers for part in range(self.workers + 1)]
        shards = [range(first, last) for first, last in pairwise(cuts)]
        self._datasets.Dataset.from_generator(
            made_of, features=self._features, cache_dir=str(out.parent), num_proc=self.workers,
            gen_kwargs={"function": self._function, "shards": shards},
        )  # fmt: skip

    def read(self, out: Path) -> Columns:
        """What its files hold."""
        parts = [self._columns(file) for file in sorted(out.parent.rglob("*.arrow"))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _columns(self, file: Path) -> Columns:
        found: Columns = self._datasets.Dataset.from_file(str(file)).with_format("numpy")[:]
        return found

    def _features_of(self, row: Mapping[str, Any]) -> Any:
        """Types of columns, where some have several dimensions; else None, which is faster there."""
        if all(np.ndim(value) < 2 for value in row.values()):
            return None
        return self._datasets.Features(
            {name: self._type_of(np.asarray(value)) for name, value in row.items()}
        )

    def _type_of(self, value: npt.NDArray[Any]) -> Any:
        if not value.ndim:
            return self._datasets.Value(value.dtype.name)
        return getattr(self._datasets, f"Array{value.ndim}D")(value.shape, value.dtype.name)


_BY_PARENT = "the parent stores rows with h5py, a megabyte at a time"

PEERS = (
    Peer("joblib", "joblib.Parallel(n_jobs={cores}), loky", JoblibRow,
         f'return_as="generator"; {_BY_PARENT}', ("joblib",)),
    Peer("pool", "multiprocessing.Pool({cores}).imap", PoolRow, _BY_PARENT),
    Peer("datasets", "datasets.Dataset.from_generator(num_proc={cores})", DatasetsRow,
         "a shard for each process; stores Arrow files, one for each", ("datasets", "pyarrow")),
)  # fmt: skip


# ---- What was asked of making rows, as figures, and whether it is met -------------------------------

OVERHEAD_US, ERROR_PERCENT, MORE_MB = 20.0, 15.0, 20.0
PREDICTED = ("slow", "quick")
_OF_CORES = 0.925  # of the cores is what workers bring at least: 1.85 with two


def asked(cores: int) -> tuple[Asked, ...]:
    """The figures that are rates.

    Args:
        cores: how many workers there are.
    """
    slow, quick = (tuple(f"{key}-{peer.kind}" for peer in PEERS) for key in ("slow", "quick"))
    wide = tuple(f"wide-{peer.kind}" for peer in PEERS)
    return (
        Asked(
            f"5 ms a row, {cores} workers, × the faster of the loop and workers=0",
            "slow-workers", ("slow-replaced", "slow-alone"), round(_OF_CORES * cores, 3),
        ),
        Asked("5 ms a row, × the best peer", "slow-workers", slow, 0.97),
        Asked("100 µs a row, × the best peer", "quick-workers", quick, 1.5),
        Asked("100 µs a row of 16 kB, × the best peer", "wide-workers", wide, 1.5),
    )  # fmt: skip


def targets(
    samples: Mapping[str, Sequence[Sample]],
    cores: int,
    predicted: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any] | None,
    sections: Sequence[str],
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        cores: how many workers there were.
        predicted: of sections ``section`` and ``error``, as `Prediction.as_json` gives them.
        memory: from `memory.peaks`; None where it was not measured.
        sections: those that were run.
    """
    found = judged_rates(samples, [one for one in asked(cores) if one.row.split("-")[0] in sections])
    if "batch" in sections:
        text = "fn.batch, workers=0: time above fn.batch alone, a row"
        found.append(judged(text, OVERHEAD_US, "µs", _overheads(samples), is_most=True))
    for key in PREDICTED:
        if key in sections:
            errors = [abs(one) for row in predicted if row["section"] == key for one in row["error"]]
            label = {"slow": "5 ms a row", "quick": "100 µs a row"}[key]
            text = f"{label}: the predicted duration is off by"
            found.append(judged(text, ERROR_PERCENT, "%", errors, is_most=True))
    few, many = ([], []) if memory is None else (row["mb"] for row in memory["rows"])
    more = [high - low for low, high in zip(few, many, strict=True)]
    return [*found, judged("memory, 10⁶ rows against 10⁴, more", MORE_MB, "MB", more, is_most=True)]


def _overheads(samples: Mapping[str, Sequence[Sample]]) -> list[float]:
    """Microseconds of a row, round by round."""
    stored, bare = (rates_by_round(samples.get(f"batch-{kind}", ())) for kind in ("alone", "bare"))
    return [1e6 * (1 / rate - 1 / bare[number]) for number, rate in stored.items() if number in bare]
