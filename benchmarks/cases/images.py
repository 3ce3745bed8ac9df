"""The case ``images`` with decoding alone, first batches, and other libraries."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.floor import DecodeRow, floor_share
from benchmarks.lines import Studied
from benchmarks.peers.rows import PEERS, Peer, PeerRow, interpreter
from benchmarks.studies.first import first_batch_seconds
from fastpipe.bench import images
from fastpipe.bench.results import MAIN_ROW, RowInfo, row
from fastpipe.bench.runner import Contender, ContenderError, Session
from fastpipe.console import Progress

__all__ = ["Bench", "run"]


def run(args: Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's."""
    return images.run(args, console, progress, Bench)


@dataclass
class Bench(Studied, images.Bench):
    """One run of the case, with peers."""

    def others(self, stack: ExitStack) -> list[Contender]:
        """Build decoding alone, and start the peers; one that is not there is noted."""
        info = RowInfo("floor", "decode only, the floor", "floor", None, "crops", "from memory")
        make = partial(DecodeRow, self.photos.files, self.cores, self.args.batch_size)
        floor = self.open(stack, info, make)
        if isinstance(floor, DecodeRow):  # what decodes is known once it is built
            self.infos[info.key] = replace(info, note=floor.note)
        found = [floor, *(self._peer(peer, stack) for peer in PEERS if self.args.peers)]
        return [contender for contender in found if contender is not None]

    def studies(self, session: Session) -> dict[str, Any]:
        """Return how near FastLoader is to decoding alone."""
        return {"floor_share": floor_share(session.samples)}

    def result(self) -> dict[str, Any] | None:
        """Measure, and fill in the time to the first batch of the rows that matter."""
        result = super().result()
        if result is None or self.args.quick:
            return result
        keys = (*result["best"].values(), MAIN_ROW, "fastloader-uint8")
        for spec in self.specs():
            if spec.key not in keys:
                continue
            self.progress.step(f"time to the first batch: {spec.label}")
            try:
                row(result, spec.key)["first_batch_s"] = first_batch_seconds(
                    spec, self.photos.folder, self.args.batch_size
                )
            except ContenderError as error:
                # The rates, which took far longer to measure, stay valid.
                self.warnings.append(f"no time to the first batch of {spec.label}: {error}")
        return result

    def _peer(self, peer: Peer, stack: ExitStack) -> Contender | None:
        python = interpreter(peer)
        if python is None:
            self.miss(peer.key, peer.label, f"not installed; {peer.install}")
            return None
        self.progress.now(f"starting {peer.label}")
        info = RowInfo(peer.key, peer.label, "peer", None, peer.output, peer.note)
        make = partial(PeerRow, peer, python, self.photos, self.args.batch_size, self.cores)
        row = self.open(stack, info, make)
        if isinstance(row, PeerRow):
            self.infos[info.key] = row.info()
        return row
