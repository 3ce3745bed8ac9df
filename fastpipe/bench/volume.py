"""The case ``volume`` compares zarr-python with ``FastPatchDataset``, for random patches of a Zarr volume."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.check import Outcome, RowCheck, digests_of_samples
from fastpipe.bench.data import Say, made_once, unheard
from fastpipe.bench.driver import Case, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, DrawnRow, Draws, Session, consume
from fastpipe.bench.samples import ZarrPatches, box_at, start_of
from fastpipe.bench.synthetic import scroll_slabs, write_zarr
from fastpipe.console import positive
from fastpipe.core.extras import require

# ---- Volumes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes of the volume, its chunks and its patches, in voxels along each dimension."""

    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    patch: tuple[int, int, int]


FULL = Sizes((384, 768, 768), (64, 128, 128), (72, 136, 136))
QUICK = Sizes((64, 128, 128), (16, 32, 32), (18, 34, 34))


@dataclass(frozen=True)
class Scroll:
    folder: Path
    sizes: Sizes

    @property
    def paths(self) -> tuple[str, str]:
        """The paths of two Zarr arrays: the values, uint16, and the labels, uint8."""
        return str(self.folder / "values.zarr"), str(self.folder / "labels.zarr")

    @property
    def nbytes(self) -> int:
        return 3 * math.prod(self.sizes.shape)

    @property
    def patch_nbytes(self) -> int:
        return 3 * math.prod(self.sizes.patch)

    @property
    def epoch(self) -> int:
        """Number of patches in an epoch.  It is even; together they are about as large as the volume."""
        return self.nbytes // self.patch_nbytes // 2 * 2

    @property
    def room(self) -> int:
        return self.nbytes // QUARTER

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The values and the labels in memory, read by tensorstore, which also wrote them."""
        tensorstore = require("tensorstore", extra="volume")
        stores = [{"driver": "file", "path": path} for path in self.paths]
        opened = [tensorstore.open({"driver": "zarr3", "kvstore": store}).result() for store in stores]
        values, labels = (np.asarray(one.read().result()) for one in opened)
        return values, labels

    @property
    def described(self) -> dict[str, Any]:
        sizes = self.sizes
        stored = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        shape, chunk, patch = ("×".join(map(str, one)) for one in (sizes.shape, sizes.chunk, sizes.patch))
        return {
            "text": f"a volume of {shape} uint16 with labels of uint8, {self.nbytes / 1e6:,.0f} MB, Zarr"
            f" of chunks of {chunk} in {stored / 1e6:,.0f} MB (blosc, zstd 5, bytes shuffled);"
            f" patches of {patch}",
            "name": "made-up scroll",
            **asdict(sizes),
            "samples": self.epoch,
            "sample_bytes": self.patch_nbytes,
            "volume_bytes": self.nbytes,
            "bytes": stored,
        }

    def warm(self) -> None:
        """Read every file once, so that all files are in the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()


def made_scroll(
    sizes: Sizes, cache: Path | None = None, say: Say = unheard, *, compressed: bool = True
) -> Scroll:
    def fill(folder: Path) -> None:
        folder.mkdir()
        for place, name in enumerate(("values", "labels")):
            # The slabs are generated twice, because values and labels may not fit into memory together.
            parts = (slab[place] for slab in scroll_slabs(sizes.shape, sizes.chunk[0]))
            write_zarr(folder / f"{name}.zarr", parts, sizes.shape, sizes.chunk, compressed=compressed)

    shape, chunk = ("x".join(map(str, one)) for one in (sizes.shape, sizes.chunk))
    name = f"scroll-1-{shape}-{chunk}" + ("" if compressed else "-uncompressed")
    folder = made_once(name, fill, "a volume like a rolled scroll", cache, say)
    return Scroll(folder, sizes)


# ---- Rows ------------------------------------------------------------------------------------------

QUARTER = 4  # in the section "cold" the cache may hold the volume's size divided by this number
COLD, WARM = "cold", "warm"

Kind = Literal["zarr", "slices", "tour", "uniform"]
_FAST = "FastPatchDataset + FastLoader"


@dataclass(frozen=True)
class PatchSpec(RowInfo):
    """Describes one loader to measure.

    In the section ``"cold"`` the cache of decoded chunks is empty at first and may hold a quarter of the
    volume.  In the section ``"warm"`` the cache holds the whole volume.  Loaders of the kinds ``"zarr"`` and
    ``"slices"`` slice arrays.  Loaders of the kinds ``"tour"`` and ``"uniform"`` are fastpipe's.  ``"tour"``
    orders the patches so that few chunks are decoded twice, and ``"uniform"`` uses a random order.
    """

    num_workers: int = 0
    output: str = "uint16 and uint8"
    unit: str = "patches"
    section: str = COLD
    kind: Kind = "zarr"
    threads: int | Literal["auto"] = "auto"


def specs() -> list[PatchSpec]:
    """Describe the loaders to measure; in each section, the loader that fastpipe replaces is first."""
    stock, note = "zarr-python + DataLoader(num_workers=1)", "spawned; decodes each chunk anew for each patch"
    tour, uniform = f'{_FAST}, Shuffle(unit="group")', f"{_FAST}, shuffle=True"
    anywhere, later = "all orders equally likely", "from the second epoch on"
    return [
        PatchSpec("cold-replaced", stock, "replaced", 1, note=note),
        PatchSpec("cold-tour", tour, "fastpipe", note="places drawn uniformly", kind="tour"),
        PatchSpec("cold-uniform", uniform, "fastpipe", note=anywhere, kind="uniform"),
        PatchSpec("warm-replaced", stock, "replaced", 1, note=note, section=WARM),
        PatchSpec("warm-uniform", uniform, "fastpipe", note=later, section=WARM, kind="uniform"),
    ]


def patch_dataset(
    scroll: Scroll, budget: int, seed: int = 0, threads: int | Literal["auto"] = "auto"
) -> fastpipe.FastPatchDataset:
    values, labels = scroll.paths
    return fastpipe.FastPatchDataset(
        values, scroll.sizes.patch, labels=labels, sampling=fastpipe.sampling.Uniform(scroll.epoch),
        cache=fastpipe.Cache("ram", max_bytes=budget), seed=seed, threads=threads,
    )  # fmt: skip


def patch_loader(dataset: Any, batch_size: int, kind: str) -> Any:
    """Return a `FastLoader` of a dataset; ``kind`` is the order: ``"tour"``, or ``"uniform"`` (random)."""
    shuffle = fastpipe.Shuffle(unit="group") if kind == "tour" else True
    return fastpipe.FastLoader(dataset, batch_size, shuffle)


class WholeEpochs(Contender):
    """Measures whole epochs of a `FastPatchDataset` (a `Contender`).

    In the section ``"cold"`` each epoch is the first epoch of a new dataset.  The dataset is created before
    the clock starts.  The loader, which plans the order of the patches, is created while the clock runs.
    """

    def __init__(self, spec: PatchSpec, scroll: Scroll, batch_size: int) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, scroll.epoch
        self.made_s: list[float] = []  # seconds to create each dataset
        self._scroll, self._batch_size = scroll, batch_size
        self._loader: Any = None
        self._stages: Counter[str] = Counter()

    @property
    def budget(self) -> int:
        """Largest size of the cache in bytes: a quarter of the volume, or in ``"warm"`` twice the volume."""
        return self._scroll.room if self.spec.section == COLD else 2 * self._scroll.nbytes

    def dataset(self, seed: int = 0) -> fastpipe.FastPatchDataset:
        return patch_dataset(self._scroll, self.budget, seed, self.spec.threads)

    def loader(self, dataset: fastpipe.FastPatchDataset) -> Any:
        return patch_loader(dataset, self._batch_size, self.spec.kind)

    def measure(self, count: int) -> float:
        return sum(self._epoch() for _ in range(count // self.chunk))

    def batches(self, count: int) -> Iterator[Any]:
        """Yield the first epoch of a new dataset; the first request opens the dataset and plans the order."""
        yield from self.loader(self.dataset(seed=len(self.made_s)))

    def stage_seconds(self) -> Mapping[str, float]:
        return dict(self._stages)

    def plan(self) -> str:
        return str(self.dataset().plan).replace(str(self._scroll.folder), self._scroll.folder.name)

    def close(self) -> None:
        self._loader = None
        gc.collect()  # frees the memory of the loader

    def _epoch(self) -> float:
        dataset = None
        if self._loader is None or self.spec.section == COLD:
            self.close()
            start = time.perf_counter()
            dataset = self.dataset(seed=len(self.made_s))
            self.made_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        if dataset is not None:  # the time to plan the order is a part of the epoch
            self._loader = self.loader(dataset)
        planned, before = time.perf_counter() - start, Counter(self._loader.clock.totals())
        seconds = planned + consume(self._loader, self.chunk)
        self._stages.update({name: s - before[name] for name, s in self._loader.clock.totals().items()})
        return seconds


class SlicedRow(DrawnRow):
    """Measures torch's ``DataLoader``, which slices arrays patch by patch (a `Contender`)."""

    def __init__(self, spec: PatchSpec, loader: Any) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        self.chunk = loader.batch_size * max(1, spec.num_workers)
        self.loader, self.draws = loader, loader.sampler


def sliced_loader(spec: PatchSpec, scroll: Scroll, batch_size: int, source: Any = None) -> Any:
    """Return torch's ``DataLoader`` for slices of Zarr arrays or ``source``, with epochs of any length."""
    data = require("torch.utils.data", extra="torch")
    if source is None:
        source = ZarrPatches(scroll.paths, scroll.sizes.shape, scroll.sizes.patch, scroll.epoch)
    return data.DataLoader(
        source, batch_size, sampler=Draws(range(scroll.epoch), scroll.epoch), num_workers=spec.num_workers,
        persistent_workers=spec.num_workers > 0,
        # Zarr has its own threads.  A forked process would lack these threads and wait forever.
        multiprocessing_context="spawn" if spec.num_workers else None,
    )  # fmt: skip


# ---- Are the patches equal to those of the volume? -------------------------------------------------


def check_patches(scroll: Scroll, rows: Iterable[WholeEpochs | SlicedRow], say: Say = unheard) -> RowCheck:
    """Compare the patches of each loader with slices of the volume in memory.

    Two epochs of each loader of fastpipe are compared, and one epoch of each other loader.
    """
    check = RowCheck("the source's slices")
    sizes = scroll.sizes
    drawn = [start_of(sizes.shape, sizes.patch, index) for index in range(scroll.epoch)]
    by_number = expected_patches(scroll, drawn)
    for row in rows:
        what = f"{row.spec.section}: {row.spec.label}"
        say(f"comparing: {what}")
        if isinstance(row, SlicedRow):
            check.add(what, by_number, row.batches(scroll.epoch))
            continue
        dataset = row.dataset()
        loader = row.loader(dataset)
        for epoch in range(2):
            _, starts = dataset.places(epoch)
            check.add(f"{what}, epoch {epoch}", expected_patches(scroll, starts), loader)
    return check


def expected_patches(scroll: Scroll, starts: Iterable[Any]) -> Counter[bytes]:
    """Count the digests of the patches at ``starts``, which are sliced from the arrays in memory."""
    found: Counter[bytes] = Counter()
    for start in starts:
        box = box_at(start, scroll.sizes.patch)
        values, labels = (array[box][np.newaxis] for array in scroll.arrays)
        found.update(digests_of_samples(values, labels))
    return found


# ---- The case --------------------------------------------------------------------------------------

BATCH = 2


class Bench(Case):
    case = "volume"
    about = "patches of a Zarr volume: zarr-python + DataLoader against FastPatchDataset + FastLoader"
    quick_s = 0.05
    main = "cold-tour"
    scroll: Scroll

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--folder", metavar="FOLDER", type=Path,
            help="where the made-up volume is kept, 0.3 GB (default: the user's cache folder)")  # fmt: skip
        add("--batch-size", type=positive(int), default=BATCH, metavar="N",
            help=f"patches in a batch (default: {BATCH})")  # fmt: skip
        add_run_arguments(parser)

    def prepare(self) -> None:
        require("zarr", extra="bench")
        sizes = QUICK if self.args.quick else FULL
        self.scroll = made_scroll(sizes, self.args.folder, self.progress.done)
        self.scroll.warm()

    def specs(self) -> list[PatchSpec]:
        return specs()

    def rows(self) -> Sequence[Contender]:
        size, every = self.args.batch_size, self.specs()
        stock = sliced_loader(every[0], self.scroll, size)  # both sections have the same worker process
        rows = [
            WholeEpochs(spec, self.scroll, size) if spec.group == "fastpipe" else SlicedRow(spec, stock)
            for spec in every
        ]
        self.fast = [row for row in rows if isinstance(row, WholeEpochs)]
        return [self.added(spec, row) for spec, row in zip(every, rows, strict=True)]

    def compared(self, rows: Sequence[Any]) -> Outcome:
        return check_patches(self.scroll, rows, self.progress.now)

    def described(self, session: Session) -> dict[str, Any]:
        scroll, size = self.scroll, self.args.batch_size
        patch = "×".join(map(str, scroll.sizes.patch))
        cold = f"cold, a first epoch with room for {scroll.room / 1e6:,.0f} MB, a quarter of the volume"
        for row in self.fast:  # the creation of datasets is not part of the rates
            if row.spec.section == COLD:
                note = f"{row.spec.note}; opened in {statistics.median(row.made_s):.3f} s before"
                self.infos[row.key] = replace(row.spec, note=note)
        return {
            "data": scroll.described,
            "sections": {COLD: {"label": cold}, WARM: {"label": "warm, room for the whole volume"}},
            "job": {"text": f"Volume: patches of {patch} uint16 with labels, anywhere, batches of {size}",
                    "short": f"patches of {patch}, batch {size}", "batch_size": size},
            "plan": self.fast[0].plan(),
        }  # fmt: skip
