"""The case ``generate`` with other libraries, predictions, memory, and what was asked for."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.lines import Studied
from benchmarks.studies.generate_memory import peaks
from benchmarks.studies.generate_predicted import Prediction, predictions
from benchmarks.studies.made_rows import Generators, made_of, motion, wide
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench import generate
from fastpipe.bench.generate import Columns, MadeRow, Section, Spec, problem_of, spec_of
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError, Sample, Session, rates_by_round, summarise
from fastpipe.bench.samples import BATCH_ROWS, made
from fastpipe.core.extras import require

# What is tried of peers that may be told how many rows make a task, and what is predicted.
TUNED_S, PREDICTED_S, PREDICTED_TIMES = 1.5, 10.0, 5
SECTIONS = (
    *generate.SECTIONS[:2],
    Section("wide", "100 µs a row, rows of 16 kB", wide, 1e-4, 200, 300),
    *generate.SECTIONS[2:],
    Section("motion", "about 1 ms a row, rows of 75 kB", motion, 1e-3, 20, 60),
)


def specs(section: Section, cores: int) -> list[Spec]:
    """Return a section's rows without peers."""
    found = generate.specs(section, cores)
    if section.key == "motion":  # a function that lets go of the interpreter's lock
        label = f'fastpipe.generate(workers={cores}, executor="threads")'
        found.append(spec_of(section, "threads", label, "fastpipe", cores, executor="threads"))
    return found


# Sections whose rows only fastpipe makes at once.
_WITHOUT_PEERS = ("batch",)
_AT_ONCE = 1 << 20  # bytes that are written at a time


def write_rows(out: Path, count: int, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with h5py as they come, about a megabyte at a time.

    Args:
        out: the file.
        count: how many rows come.
        rows: they.
    """
    rows = iter(rows)
    first = next(rows)
    step = max(1, _AT_ONCE // sum(np.asarray(value).nbytes for value in first.values()))
    some, at = [first, *islice(rows, step - 1)], 0
    with require("h5py", extra="generation").File(out, "w") as file:
        for name, value in first.items():
            file.create_dataset(name, (count, *np.shape(value)), np.asarray(value).dtype)
        while some:
            for name in first:
                file[name][at : at + len(some)] = np.stack([row[name] for row in some])
            at, some = at + len(some), list(islice(rows, step))


class BareRow(MadeRow):
    """``fn.batch`` alone: generators are made before the clock starts, and nothing is stored."""

    def measure(self, count: int) -> float:
        return sum(seconds for seconds, _ in self._batches(count))

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Store nothing."""

    def stored(self, count: int) -> Columns:
        """So many rows."""
        parts = [part for _, part in self._batches(count)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _batches(self, count: int) -> Iterator[tuple[float, Columns]]:
        batch: Any = getattr(self._function, "batch")  # noqa: B009  # of a function, which has no such name
        for first in range(0, count, BATCH_ROWS):
            indices = np.arange(first, min(first + BATCH_ROWS, count))
            rngs = Generators(indices.tolist())
            start = time.perf_counter()
            found = batch(indices, rngs)
            yield time.perf_counter() - start, found


# ---- Other libraries: processes of theirs, started anew for each measurement; this one stores the rows ---

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
        return spec_of(section, self.kind, self.label.format(cores=cores), "peer", cores, note=self.note)

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured: what is not installed, and how to install it."""
        lacking = [one for one in self.packages if importlib.util.find_spec(one) is None]
        return f"not installed: pip install {lacking[0]}" if lacking else None

    @property
    def versions(self) -> Mapping[str, str] | None:
        """Package → version; None for the standard library."""
        return {name: metadata.version(name) for name in self.packages} or None


class PeerRow(MadeRow):
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
        row_s = spec.of.row_s
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
        """Return the content of its files."""
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
    """Return all targets with the measured figures.

    Args:
        samples: of a finished run, by row.
        cores: how many workers there were.
        predicted: of sections ``section`` and ``error``, as `Prediction.as_json` gives them.
        memory: from `generate_memory.peaks`; None where it was not measured.
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


# ---- The case ---------------------------------------------------------------------------------------


class Bench(Studied, generate.Bench):
    """One run of the case, with everything."""

    every: ClassVar[Sequence[Section]] = SECTIONS

    def specs(self, section: Section) -> list[Spec]:
        """Return a section's rows, and one that makes rows in threads."""
        return specs(section, self.cores)

    def others(self) -> list[Contender]:
        """Build ``fn.batch`` alone and the peers; one that is not there, or makes other rows, is noted."""
        found: list[MadeRow] = []
        for section in self.sections:
            if section.key == "batch":
                note = f"{BATCH_ROWS} rows a call; generators are made before, and nothing is stored"
                spec = spec_of(section, "bare", "fn.batch alone", "peer", note=note)
                found += self._built(spec, partial(BareRow, spec, self.scratch))
            for peer in PEERS if self.args.peers and section.key not in _WITHOUT_PEERS else ():
                found += self._peer(peer, section)
        return list(found)

    def studies(self, session: Session) -> dict[str, Any]:
        """Measure predictions and memory, and judge the figures that were asked for."""
        told, memory = self._predictions(session), None if self.args.quick else self._memory()
        predicted, keys = [one.as_json() for one in told], [one.key for one in self.sections]
        return {
            "plan": str(told[0].reports[0]) if told else "",
            "predicted": {"rows": predicted},
            "peak": memory or {},
            "targets": targets(session.samples, self.cores, predicted, memory, keys),
        }

    def _peer(self, peer: Peer, section: Section) -> list[MadeRow]:
        spec = peer.spec(section, self.cores)
        if (why := peer.missing) is not None:
            self.miss(spec.key, f"{section.key}: {spec.label}", why)
            return []
        return self._built(replace(spec, versions=peer.versions), partial(peer.row, spec, self.scratch))

    def _built(self, info: RowInfo, make: Callable[[], MadeRow]) -> list[MadeRow]:
        row = self.open(info, make)
        if row is None:
            return []
        label, chosen = self.label_of(row.key), ""
        self.progress.now(f"comparing and trying: {label}")
        try:
            problem = problem_of(row)
            if problem is None and isinstance(row, PeerRow) and not self.args.quick:
                chosen = row.tune(round(TUNED_S * self.cores / row.spec.of.row_s))
        except ContenderError as error:
            problem = str(error)
        else:
            problem = problem and f"rows differ from what the function returns: {problem}"
        if problem is not None:
            del self.infos[row.key]
            self.miss(row.key, label, problem)
            return []
        notes = "; ".join(note for note in (chosen, info.note) if note)
        self.infos[row.key] = replace(info, note=notes)
        return [row]

    def _predictions(self, session: Session) -> list[Prediction]:
        """Measure how well it is said how long rows will take."""
        seconds, times = (self.quick_s, 1) if self.args.quick else (PREDICTED_S, PREDICTED_TIMES)
        sections = []
        for one in self.sections:
            if one.key in PREDICTED:
                rate = summarise(sample.rate for sample in session.samples[f"{one.key}-workers"]).median
                sections.append((one, max(1, round(rate * seconds))))
        return predictions(sections, self.scratch, self.cores, times, self.progress.step)

    def _memory(self) -> dict[str, Any] | None:
        return self.tried("memory", partial(peaks, self.scratch, self.cores, say=self.progress.step))
