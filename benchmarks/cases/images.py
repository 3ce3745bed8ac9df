"""The case ``images`` with other libraries."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rich.console import Console

from benchmarks.peers.rows import PEERS, Peer, PeerRow, interpreter
from fastpipe.bench import images
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender
from fastpipe.console import Progress

__all__ = ["Bench", "run"]


def run(args: Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's."""
    return images.run(args, console, progress, Bench)


@dataclass
class Bench(images.Bench):
    """One run of the case, with peers."""

    program: ClassVar[str] = "python benchmarks/run.py"

    def others(self, stack: ExitStack) -> list[Contender]:
        """Start the peers; one that is not there is noted."""
        found = [self._peer(peer, stack) for peer in PEERS if self.args.peers]
        return [contender for contender in found if contender is not None]

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
