"""The case ``images`` with decoding alone, first batches, and other libraries."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.floor import DecodeRow, floor_share
from benchmarks.lines import Studied
from benchmarks.peers.rows import PEERS, Peer, PeerRow
from benchmarks.studies.first import first_batch_seconds
from fastpipe.bench import images
from fastpipe.bench.results import MAIN_ROW, RowInfo, row
from fastpipe.bench.runner import Contender, ContenderError, Session


class Bench(Studied, images.Bench):
    """One run of the case, with peers."""

    def others(self) -> list[Contender]:
        """Build decoding alone, and start the peers; one that is not there is noted."""
        info = RowInfo("floor", "decode only, the floor", "floor", output="crops", note="from memory")
        found: list[Contender] = []
        floor = self.open(info, partial(DecodeRow, self.photos.files, self.cores, self.args.batch_size))
        if floor is not None:  # what decodes is known once it is built
            self.infos[info.key] = replace(info, note=floor.note)
            found.append(floor)
        for peer in PEERS if self.args.peers else ():
            info = RowInfo(peer.key, peer.label, "peer", output=peer.output, note=peer.note)
            found += self.peer(peer, info, partial(self._started, peer))
        return found

    def _started(self, peer: Peer, python: str) -> PeerRow:
        return PeerRow(peer, python, self.photos, self.args.batch_size, self.cores)

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
