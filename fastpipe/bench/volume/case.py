"""The case ``volume``: its options, its rows, its result."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe._extras import require
from fastpipe.bench import machine
from fastpipe.console import positive
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.peers import Peer, interpreter
from fastpipe.bench.results import entries, verdict
from fastpipe.bench.runner import Contender, ContenderError
from fastpipe.bench.volume.amplification import amplifications
from fastpipe.bench.volume.check import check_patches
from fastpipe.bench.volume.data import FIRST, FULL, QUICK, Scroll, described, made_scroll
from fastpipe.bench.volume.first import first_batches
from fastpipe.bench.volume.memory import memory_of_topologies
from fastpipe.bench.volume.peers import VOLUME_PEERS, VolumePeerRow, row_info
from fastpipe.bench.volume.rows import COLD, QUARTER, WARM, SlicedRow, WholeEpochs, sliced_loader, specs
from fastpipe.bench.volume.targets import targets
from fastpipe.console import Progress

__all__ = ["add_arguments", "run"]

BATCH = 2
_MAIN = "cold-tour"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--folder", metavar="FOLDER", type=Path,
        help="where the made-up volume is kept, 0.3 GB (default: the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), default=BATCH, metavar="N",
        help=f"patches in a batch (default: {BATCH})")  # fmt: skip
    add_run_arguments(parser, "zarr-python in the process, zarrs, TensorStore and MONAI")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when patches are not those of the volume.

    Raises:
        MissingPackageError: zarr-python, which the replaced loader needs, is not installed.
    """
    require("zarr", extra="bench")
    scroll = made_scroll(QUICK if args.quick else FULL, args.folder, progress.done)
    return _Bench(args, machine.cores_allowed(), progress, scroll=scroll).run(console)


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "volume"
    quick_s: ClassVar[float] = 0.05
    scroll: Scroll = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        scroll, size = self.scroll, self.args.batch_size
        scroll.warm()
        with ExitStack() as stack:
            own = self._own(stack)
            check = check_patches(scroll, own, self.progress.now)
            self.progress.done(f"check: {check.sentence()}")
            if not check.ok:
                return None
            contenders = [*own, *self._others(stack)]
            main = next(one for one in contenders if one.key == _MAIN)
            assert isinstance(main, WholeEpochs)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            after = main.stage_seconds()
            self._tell_made(contenders)
            plan = main.plan()
        amplification = amplifications(scroll, size, 1 if self.args.quick else 3, self.progress.step)
        first, memory = self._first_batch(), self._memory()
        rows = entries(list(self.infos.values()), session)
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": _MAIN,
            "rows": rows,
            "best": {entry["section"]: entry["key"] for entry in rows if entry["group"] == "replaced"},
            "missing": self.missing,
            "stages": {
                "seconds": {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after},
                "images": sum(sample.count for sample in session.samples[_MAIN]),
            },
            "floor_share": None,
            "plan": plan,
            "targets": targets(session.samples, amplification, memory),
            "amplification": amplification,
            "first_batch": first or {},
            "memory": memory or {},
        }
        result["verdict"] = verdict(result)
        return result

    def _own(self, stack: ExitStack) -> list[WholeEpochs | SlicedRow]:
        """Build the rows that run in this process."""
        found: list[WholeEpochs | SlicedRow] = []
        loaders: dict[str, Any] = {}
        for spec in specs():
            if spec.group == "fastpipe":
                row: WholeEpochs | SlicedRow = WholeEpochs(spec, self.scroll, self.args.batch_size)
            else:
                # A row that is in both sections has the same worker process there.
                if spec.kind not in loaders:
                    loaders[spec.kind] = sliced_loader(spec, self.scroll, self.args.batch_size)
                row = SlicedRow(spec, loaders[spec.kind])
            stack.callback(row.close)
            self.infos[row.key] = spec.info
            found.append(row)
        return found

    def _others(self, stack: ExitStack) -> list[Contender]:
        """Start the peers; one that is not there is noted."""
        found = [self._peer(peer, stack) for peer in VOLUME_PEERS if self.args.peers]
        # Tables have a section's rows together.
        self.infos = dict(sorted(self.infos.items(), key=lambda pair: pair[1].section != COLD))
        return [contender for contender in found if contender is not None]

    def _peer(self, peer: Peer, stack: ExitStack) -> Contender | None:
        python, info = interpreter(peer), row_info(peer)
        if python is None:
            self.miss(peer.key, f"{info.section}: {peer.label}", f"not installed: {peer.install}")
            return None
        self.progress.now(f"starting {peer.label}")
        size = self.args.batch_size
        row = self.open(stack, info, lambda: VolumePeerRow(peer, python, self.scroll, size, self.cores))
        if isinstance(row, VolumePeerRow):
            self.infos[info.key] = row.info
        return row

    def _tell_made(self, rows: Sequence[Contender]) -> None:
        """Note what making datasets took, which is not part of the rates."""
        for row in rows:
            if isinstance(row, WholeEpochs) and row.spec.section == COLD:
                info, seconds = self.infos[row.key], statistics.median(row.made_s)
                note = f"{info.note}; opened in {seconds:.3f} s before"
                self.infos[row.key] = replace(info, note=note)

    def _first_batch(self) -> dict[str, Any] | None:
        """Time to the first batch; None where it is not measured."""
        if self.args.quick:
            return None
        try:
            folder, say = self.args.folder, self.progress.done
            packed = made_scroll(FIRST, folder, say)
            plain = made_scroll(FIRST, folder, say, compressed=False)
            return first_batches(packed, plain, self.args.batch_size, say=self.progress.step)
        except ContenderError as error:
            # The rates, which took far longer to measure, stay valid.
            self.warnings.append(f"no time to the first batch: {error}")
            return None

    def _memory(self) -> dict[str, Any] | None:
        """Memory; None where it is not measured."""
        if self.args.quick:
            return None
        try:
            return memory_of_topologies(self.scroll, self.args.batch_size, say=self.progress.step)
        except ContenderError as error:
            # The rates, which took far longer to measure, stay valid.
            self.warnings.append(f"no memory: {error}")
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        size, sizes = self.args.batch_size, self.scroll.sizes
        words = [f"--batch-size {size}"] if size != BATCH else []
        patch = "×".join(map(str, sizes.patch))
        quarter = self.scroll.nbytes / QUARTER / 1e6
        cold = f"cold, a first epoch with room for {quarter:,.0f} MB, a quarter of the volume"
        return self.facts(words, busy) | {
            "data": described(self.scroll),
            "sections": {COLD: {"label": cold}, WARM: {"label": "warm, room for the whole volume"}},
            "job": {
                "text": f"Volume: patches of {patch} uint16 with labels, anywhere, batches of {size}",
                "short": f"patches of {patch}, batch {size}",
                "batch_size": size,
            },
        }
