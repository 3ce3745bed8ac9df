"""The case ``hdf5``: its options, its rows, its result."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.console import positive
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.hdf5.check import RowCheck, check_rows
from fastpipe.bench.hdf5.data import (
    BITSHUFFLE,
    CELLS,
    FEW,
    Sizes,
    Table,
    described,
    look,
    made_cells,
    made_chunks,
    made_tables,
)
from fastpipe.bench.hdf5.evaluate import FileByFile, Grouped, evaluation_infos, section_of
from fastpipe.bench.hdf5.first import first_batches
from fastpipe.bench.hdf5.memory import memory_of_trees
from fastpipe.bench.hdf5.peers import TABLE_PEERS, TablePeerRow, peers_of, row_info
from fastpipe.bench.hdf5.rows import TableRow, TableSpec, best_workers, specs_of, table_dataset
from fastpipe.bench.hdf5.sources import InOrder
from fastpipe.bench.hdf5.targets import first_batch_targets, memory_target, rate_targets
from fastpipe.bench.peers import interpreter
from fastpipe.bench.results import RowInfo, entries, verdict
from fastpipe.bench.runner import Contender, ContenderError
from fastpipe.console import Progress
from fastpipe.errors import OptionError

__all__ = ["WORKER_COUNTS", "add_arguments", "run"]

WORKER_COUNTS = (0, 1, 2, 4)
CELLS_BATCH = 5632
MEMORY_BUDGET = 256 << 20
_QUICK = Sizes(rows=256, files=8, few=32, chunks=2000)
_CHOICE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FILE.h5", type=Path, help="your own file, instead of made-up log-mels; with --key")
    add("--key", metavar="PATH", help="the dataset in it; samples are its rows")
    add("--wav", metavar="FOLDER", type=Path, help="cut the log-mels from the WAV files of a folder")
    add("--folder", metavar="FOLDER", type=Path,
        help="where made data is kept, 2 GB (default: the user's cache folder)")  # fmt: skip
    add("--samples", type=positive(int), metavar="N", help=f"rows to make (default: {Sizes.rows:,})")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="samples in a batch (default: 64)")
    add_run_arguments(parser, " and ".join(peer.label for peer in TABLE_PEERS))


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when batches are not what h5py reads.

    Raises:
        OptionError: there is nothing to measure.
    """
    if (args.data is None) != (args.key is None):
        raise OptionError("--data and --key go together: a file and the dataset in it")
    tables, judged = _tables(args, progress)
    bench = _Bench(args, machine.cores_allowed(), progress, tables=tables, judged=judged)
    return bench.run(console)


def _sizes(args: argparse.Namespace) -> Sizes:
    sizes = _QUICK if args.quick else Sizes()
    return replace(sizes, rows=args.samples) if args.samples else sizes


def _tables(args: argparse.Namespace, progress: Progress) -> tuple[list[Table], list[Table]]:
    """What is read; and what is judged by file."""
    if args.data is not None:
        return [look(args.data, args.key, "file")], []
    sizes = _sizes(args)
    tables = made_tables(sizes, args.folder, progress.done, args.wav)
    if importlib.util.find_spec("hdf5plugin"):
        tables += made_tables(sizes, args.folder, progress.done, args.wav, [BITSHUFFLE])
    cells = made_cells(sizes.files, CELLS, "cells", args.folder, progress.done)
    few = made_cells(sizes.few, FEW, "few", args.folder, progress.done)
    return [*tables, made_chunks(sizes, args.folder, progress.done), cells], [few, cells]


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "hdf5"
    quick_s: ClassVar[float] = 0.05
    tables: list[Table] = field(kw_only=True)
    judged: list[Table] = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        for table in (*self.tables, *self.judged):
            table.warm()
        specs = [(table, self._chosen(table, spec)) for table, spec in self._specs()]
        check = self._check(specs)
        if not check.ok:
            return None
        with ExitStack() as stack:
            contenders = self._open(specs, stack)
            main = next(one for one in contenders if one.key == self._main)
            assert isinstance(main, TableRow)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            after = main.stage_seconds()
        first, memory = self._first_batch(), self._memory()
        rows = entries(list(self.infos.values()), session)
        is_made = self.args.data is None
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": self._main,
            "rows": rows,
            "best": {entry["section"]: entry["key"] for entry in rows if entry["group"] == "replaced"},
            "missing": self.missing,
            "stages": {
                "seconds": {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after},
                "images": sum(sample.count for sample in session.samples[self._main]),
            },
            "floor_share": None,
            "plan": str(table_dataset(self.tables[0], "off").plan),
            "targets": [
                *rate_targets(session.samples), *first_batch_targets(first), *memory_target(memory)
            ] if is_made else [],
            "first_batch": first or {},
            "memory": memory or {},
        }  # fmt: skip
        result["verdict"] = verdict(result)
        return result

    @property
    def _main(self) -> str:
        """The row that the verdict is about."""
        table = self.tables[0]
        return f"{table.key}-{'window' if table.is_packed else 'uniform'}"

    def _specs(self) -> Iterator[tuple[Table, TableSpec]]:
        """Tables and the loaders measured on them."""
        for table in self.tables:
            size = self.args.batch_size
            if table.key == "cells":
                size = 512 if self.args.quick else CELLS_BATCH
            for spec in specs_of(table, min(size, table.samples)):
                yield table, spec

    def _chosen(self, table: Table, spec: TableSpec) -> TableSpec:
        """A script's own loader with the number of workers that suits it best."""
        if spec.group not in ("replaced", "peer"):
            return spec
        counts, seconds = ((0, 1), 0.05) if self.args.quick else (WORKER_COUNTS, _CHOICE_S)
        return best_workers(spec, table, counts, seconds, self.progress.done)

    def _check(self, specs: list[tuple[Table, TableSpec]]) -> RowCheck:
        """Compare all rows of fastpipe's with h5py, and the two evaluations, and say so."""
        ours = [(table, spec) for table, spec in specs if spec.group in ("stock", "fastpipe")]
        check = check_rows(ours, self.progress.now)
        for table in self.judged:
            one, grouped = FileByFile(table), Grouped(table)
            one.measure(table.shape[0])
            grouped.measure(table.shape[0])
            if other := int((one.votes != grouped.votes).sum()):
                check.problems += (f"{other} files get other votes in groups",)
            grouped.close()
        self.progress.done(f"check: {check.sentence()}")
        return check

    def _open(self, specs: list[tuple[Table, TableSpec]], stack: ExitStack) -> list[Contender]:
        """Build every row; a peer that is not there is noted."""
        found: list[Contender | None] = []
        for table in self.tables:
            for spec in (spec for its, spec in specs if its is table):
                found.append(self.open(stack, spec.info(table), lambda s=spec, t=table: TableRow(s, t)))  # type: ignore[misc]
                if spec.kind == "rows" and table.key != "cells":
                    found.append(self._in_order(table, stack))
                    found += [self._peer(table, peer, stack) for peer in peers_of(table)]
        for table in self.judged:
            one, grouped = evaluation_infos(table)
            found.append(self.open(stack, one, lambda t=table: FileByFile(t)))  # type: ignore[misc]
            found.append(self.open(stack, grouped, lambda t=table: Grouped(t)))  # type: ignore[misc]
        return [contender for contender in found if contender is not None]

    def _in_order(self, table: Table, stack: ExitStack) -> Contender | None:
        info = RowInfo(
            f"{table.key}-order", "h5py, whole chunks in order", "peer", None, table.dtype,
            "one thread; nothing shuffled, no batches", section=table.key, unit="samples",
        )  # fmt: skip
        return self.open(stack, info, lambda: InOrder(table, info.key))

    def _peer(self, table: Table, peer: Any, stack: ExitStack) -> Contender | None:
        if not self.args.peers:
            return None
        info, python = row_info(peer, table), interpreter(peer)
        if python is None:
            self.miss(peer.key, f"{table.key}: {peer.label}", f"not installed: {peer.install}")
            return None
        self.progress.now(f"starting {peer.label}")
        size = min(self.args.batch_size, table.samples)
        row = self.open(stack, info, lambda: TablePeerRow(peer, python, table, size, self.cores))
        if isinstance(row, TablePeerRow):
            self.infos[info.key] = replace(info, versions=row.versions)
        return row

    def _first_batch(self) -> dict[str, Any] | None:
        """Time to the first batch; None where it is not measured."""
        if self.args.quick or self.args.data is not None:
            return None
        try:
            table = made_chunks(_sizes(self.args), self.args.folder, self.progress.done)
            return first_batches(table, self.args.batch_size, say=self.progress.step)
        except ContenderError as error:
            # The rates, which took far longer to measure, stay valid.
            self.warnings.append(f"no time to the first batch: {error}")
            return None

    def _memory(self) -> dict[str, Any] | None:
        """Memory; None where it is not measured."""
        if self.args.quick:
            return None
        try:
            return memory_of_trees(
                self.tables[0], self.args.batch_size, MEMORY_BUDGET, say=self.progress.step
            )
        except ContenderError as error:
            self.warnings.append(f"no memory: {error}")
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, first = self.args, self.tables[0]
        words = [f"--data {args.data.name} --key {args.key}"] if args.data else []
        words += [f"--wav {args.wav.resolve().name}"] if args.wav else []
        words += [f"--samples {args.samples}"] if args.samples else []
        words += [f"--batch-size {args.batch_size}"] if args.batch_size != 64 else []
        made = "made-up log-mels" if args.wav is None else f"log-mels of {args.wav.resolve().name}"
        files = {
            section_of(table): {"label": f"evaluation by file, {math.prod(table.shape[1:3])} segments each"}
            for table in self.judged
        }
        shape = "×".join(map(str, first.shape[1:])) or "1"
        return self.facts(words, busy) | {
            "data": {"name": args.data.name if args.data else made, **described(first)},
            "sections": {**{table.key: described(table) for table in self.tables}, **files},
            "job": {
                "text": f"HDF5: rows of {shape} {first.dtype}, shuffled, batches of {args.batch_size}",
                "short": f"HDF5 rows of {shape}, batch {args.batch_size}",
                "batch_size": args.batch_size,
            },
        }
