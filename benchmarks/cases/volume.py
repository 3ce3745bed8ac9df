"""The case ``volume`` with other readers, memory, the first batch, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lines import Studied
from benchmarks.peers.rows import ChildRow, Peer
from benchmarks.studies.volume_amplification import amplifications
from benchmarks.studies.volume_first import first_batches
from benchmarks.studies.volume_memory import memory_of_topologies
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench import volume
from fastpipe.bench.check import digests_of_samples
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError, Sample, Session
from fastpipe.bench.samples import box_at, start_of
from fastpipe.bench.volume import (
    COLD,
    FULL,
    WARM,
    PatchSpec,
    Scroll,
    Sizes,
    SlicedRow,
    made_scroll,
    sliced_loader,
)

# Of the volumes on which the time to the first batch is measured; it does not depend on their size.
FIRST = Sizes((128, 256, 256), FULL.chunk, FULL.patch)


_SLICES = PatchSpec(
    "warm-slices", "slices of NumPy arrays + DataLoader(num_workers=0)", "peer", section=WARM, kind="slices"
)

# ---- The rows of the case that are other readers of volumes, each in a process of its own -----------

_ANEW = "decodes each chunk anew for each patch"
_ZARRS = {"pipeline": "zarrs.ZarrsCodecPipeline"}

COLD_PEERS = (
    Peer(
        "cold-process", "zarr-python + DataLoader(num_workers=0)", "zarr", "pip install zarr", "zarr",
        note=_ANEW,
    ),
    Peer(
        "cold-zarrs", "zarrs in zarr-python + DataLoader(num_workers=0)", "zarr",
        "pip install zarrs", "zarrs", note=f"decodes in threads of Rust; {_ANEW}", options=_ZARRS,
    ),
    Peer(
        "cold-tensorstore", "TensorStore, cache_pool of the same size", "tensorstore",
        "pip install tensorstore", "tensorstore", note="the next batches ahead, into the batch's memory",
    ),
    Peer(
        "cold-monai", "MONAI ThreadDataLoader over zarr-python", "monai", "pip install monai", "monai",
        note=f"use_thread_workers=True, a worker for each core; {_ANEW}",
    ),
)  # fmt: skip
WARM_PEERS = (
    Peer(
        "warm-tensorstore", "TensorStore, cache_pool for everything", "tensorstore",
        "pip install tensorstore", "tensorstore", note="the next batches ahead, into the batch's memory",
    ),
    Peer(
        "warm-monai", "MONAI CacheDataset, RandSpatialCropd", "monai", "pip install monai", "monai",
        note="both arrays in memory",
    ),
)  # fmt: skip
VOLUME_PEERS = (*COLD_PEERS, *WARM_PEERS)


def row_info(peer: Peer) -> RowInfo:
    """The row's label in the report."""
    section = COLD if peer in COLD_PEERS else WARM
    return RowInfo(
        peer.key, peer.label, "peer", None, "uint16 and uint8", peer.note, section=section, unit="patches"
    )


def differing(scroll: Scroll, told: Sequence[Mapping[str, Any]]) -> int:
    """Count the patches reported by a peer that differ from those of the volume.

    Args:
        scroll: the volume.
        told: of each its ``start``, and ``digests`` of its values and its labels.
    """
    strange = 0
    for one in told:
        box = box_at(one["start"], scroll.sizes.patch)
        expected = [next(digests_of_samples(array[box][np.newaxis], None)).hex() for array in scroll.arrays]
        strange += expected != one["digests"]
    return strange


class VolumePeerRow(ChildRow):
    """A peer that cuts patches.

    Args:
        peer: which library.
        python: the interpreter that has it.
        scroll: what it reads.
        batch_size: patches in a batch.
        threads: how many threads the library may use.

    Attributes:
        info: the row, with what the child told.

    Raises:
        ContenderError: the child does not start, or its first patches are not what they should be.
    """

    def __init__(self, peer: Peer, python: str, scroll: Scroll, batch_size: int, threads: int) -> None:
        values, labels = scroll.paths
        keeps_all = peer in WARM_PEERS
        job: dict[str, Any] = {
            "values": values,
            "labels": labels,
            "shape": scroll.sizes.shape,
            "patch": scroll.sizes.patch,
            "batch_size": batch_size,
            "threads": threads,
            "epoch": scroll.epoch,
            "memory_bytes": 2 * scroll.nbytes if keeps_all else scroll.room,
            "keeps_all": keeps_all,
            "options": dict(peer.options),
        }
        super().__init__(peer, python, job, batch_size, threads)
        told = self.first_batch
        if strange := differing(scroll, told["patches"]):
            self.close()
            count = len(told["patches"])
            raise ContenderError(f"{strange} of its first {count} patches are not those of the volume")
        notes = "; ".join(note for note in (peer.note, told["note"]) if note)
        self.info = replace(row_info(peer), versions=told["versions"], note=notes)
        if peer.source == "tensorstore" and not keeps_all:
            # It starts with nothing and remembers more from patch to patch: whole epochs are alike.
            self.chunk = scroll.epoch // batch_size * batch_size


class MemoryPatches:
    """Slices of arrays in memory."""

    def __init__(self, scroll: Scroll) -> None:
        self._arrays, self._sizes, self._count = scroll.arrays, scroll.sizes, scroll.epoch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        start = start_of(self._sizes.shape, self._sizes.patch, index)
        box = box_at(start, self._sizes.patch)
        return tuple(array[box] for array in self._arrays)


def specs() -> list[PatchSpec]:
    """Return the loaders that are measured in this process."""
    return [*volume.specs(), _SLICES]


# ---- What was asked of fastpipe for volumes, as figures, and whether it is met ----------------------

AMPLIFICATION = 2.0
MEMORY_ABOVE_MB = 300.0

ASKED = (
    Asked("cold, tour, × one worker with zarr-python", "cold-tour", "cold-replaced", 8),
    Asked("cold, any order, × one worker with zarr-python", "cold-uniform", "cold-replaced", 5),
    Asked("warm, × one worker with zarr-python", "warm-uniform", "warm-replaced", 60),
    Asked(
        "cold, tour, × the best peer in the same memory",
        "cold-tour",
        tuple(peer.key for peer in COLD_PEERS),
        2,
    ),
    Asked("warm, × slices of arrays in memory", "warm-uniform", "warm-slices", 0.9),
)


def targets(
    samples: Mapping[str, Sequence[Sample]],
    amplification: Mapping[str, Any] | None,
    memory: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return all targets with the measured figures.

    Args:
        samples: of a finished run, by row.
        amplification: from `volume_amplification.amplifications`; None where it was not measured.
        memory: from `volume_memory.memory_of_topologies`; None where it was not measured.
    """
    raw = [] if amplification is None else amplification["tour"]["raw"]
    rows = [] if memory is None else memory["rows"]
    above = [max(entry["above_mb"] - entry["budget_mb"] for entry in rows)] if rows else []
    decoded = "bytes decoded for each that is used, tour, a tenth of the volume remembered"
    text = "memory above that of loading nothing, less the budget, most of all"
    return [
        *judged_rates(samples, ASKED),
        judged(decoded, AMPLIFICATION, "×", raw, is_most=True),
        judged(text, MEMORY_ABOVE_MB, "MB", above, is_most=True),
    ]


# ---- The case ---------------------------------------------------------------------------------------


class Bench(Studied, volume.Bench):
    """One run of the case, with everything."""

    def rows(self) -> Sequence[Contender]:
        """Build the rows that run in this process, and slices of arrays in memory."""
        loader = sliced_loader(_SLICES, self.scroll, self.args.batch_size, MemoryPatches(self.scroll))
        return [*super().rows(), self.added(_SLICES, SlicedRow(_SLICES, loader))]

    def others(self) -> list[Contender]:
        """Start the peers; one that is not there is noted."""
        found: list[Contender] = []
        for peer in VOLUME_PEERS if self.args.peers else ():
            found += self.peer(peer, row_info(peer), partial(self._started, peer))
        return found

    def _started(self, peer: Peer, python: str) -> VolumePeerRow:
        return VolumePeerRow(peer, python, self.scroll, self.args.batch_size, self.cores)

    def studies(self, session: Session) -> dict[str, Any]:
        """Measure what is decoded, the first batch and memory, and judge the figures that were asked for."""
        seeds, size = 1 if self.args.quick else 3, self.args.batch_size
        amplification = amplifications(self.scroll, size, seeds, self.progress.step)
        first, memory = (None, None) if self.args.quick else (self._first_batch(), self._memory())
        return {
            "targets": targets(session.samples, amplification, memory),
            "amplification": amplification,
            "first_batch": first or {},
            "memory": memory or {},
        }

    def _first_batch(self) -> dict[str, Any] | None:
        folder, say = self.args.folder, self.progress
        packed = made_scroll(FIRST, folder, say.done)
        plain = made_scroll(FIRST, folder, say.done, compressed=False)
        study = partial(first_batches, packed, plain, self.args.batch_size, say=say.step)
        return self.tried("time to the first batch", study)

    def _memory(self) -> dict[str, Any] | None:
        study = partial(memory_of_topologies, self.scroll, self.args.batch_size, say=self.progress.step)
        return self.tried("memory", study)
