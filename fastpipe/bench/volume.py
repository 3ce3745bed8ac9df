"""The case ``volume``: random patches of a Zarr volume, by zarr-python, against ``FastPatchDataset``."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

import fastpipe
from fastpipe.bench.check import RowCheck, digests_of_samples
from fastpipe.bench.data import made_once
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Draws, consume
from fastpipe.bench.samples import ZarrPatches, box_at, start_of
from fastpipe.bench.synthetic import scroll_slabs, write_zarr
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus

# ---- Volumes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of the volume, its chunks and its patches: voxels along each dimension.

    Attributes:
        shape, chunk, patch: as named.
    """

    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    patch: tuple[int, int, int]


FULL = Sizes((384, 768, 768), (64, 128, 128), (72, 136, 136))
QUICK = Sizes((64, 128, 128), (16, 32, 32), (18, 34, 34))


@dataclass(frozen=True)
class Scroll:
    """A volume and its labels on disk.

    Attributes:
        folder: in which they are.
        sizes: their sizes.
    """

    folder: Path
    sizes: Sizes

    @property
    def paths(self) -> tuple[str, str]:
        """The Zarr arrays of the values, uint16, and of the labels, uint8."""
        return str(self.folder / "values.zarr"), str(self.folder / "labels.zarr")

    @property
    def nbytes(self) -> int:
        """Bytes of both, decoded."""
        return 3 * math.prod(self.sizes.shape)

    @property
    def patch_nbytes(self) -> int:
        """Bytes of a patch and its labels."""
        return 3 * math.prod(self.sizes.patch)

    @property
    def epoch(self) -> int:
        """As many patches as have the volume's size; an even number."""
        return self.nbytes // self.patch_nbytes // 2 * 2

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Both in memory, read by the library that wrote them."""
        tensorstore = require("tensorstore", extra="volume")
        stores = [{"driver": "file", "path": path} for path in self.paths]
        opened = [tensorstore.open({"driver": "zarr3", "kvstore": store}).result() for store in stores]
        values, labels = (np.asarray(one.read().result()) for one in opened)
        return values, labels

    def warm(self) -> None:
        """Read every file once, so that the page cache has them all."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()


def made_scroll(
    sizes: Sizes,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    *,
    compressed: bool = True,
) -> Scroll:
    """A made-up scroll, made once."""

    def fill(folder: Path) -> None:
        folder.mkdir()
        for place, name in enumerate(("values", "labels")):
            # Made twice, as both at once may be more than there is memory.
            parts = (slab[place] for slab in scroll_slabs(sizes.shape, sizes.chunk[0]))
            write_zarr(folder / f"{name}.zarr", parts, sizes.shape, sizes.chunk, compressed=compressed)

    shape, chunk = ("x".join(map(str, one)) for one in (sizes.shape, sizes.chunk))
    name = f"scroll-1-{shape}-{chunk}" + ("" if compressed else "-uncompressed")
    folder = made_once(name, fill, "a volume like a rolled scroll", cache, say)
    return Scroll(folder, sizes)


def described(scroll: Scroll) -> dict[str, Any]:
    """A volume for the JSON file."""
    sizes = scroll.sizes
    stored = sum(path.stat().st_size for path in scroll.folder.rglob("*") if path.is_file())
    shape, chunk, patch = ("×".join(map(str, one)) for one in (sizes.shape, sizes.chunk, sizes.patch))
    return {
        "text": f"a volume of {shape} uint16 with labels of uint8, {scroll.nbytes / 1e6:,.0f} MB, Zarr of"
        f" chunks of {chunk} in {stored / 1e6:,.0f} MB (blosc, zstd 5, bytes shuffled); patches of {patch}",
        "name": "made-up scroll",
        "shape": list(sizes.shape),
        "chunk": list(sizes.chunk),
        "patch": list(sizes.patch),
        "samples": scroll.epoch,
        "sample_bytes": scroll.patch_nbytes,
        "volume_bytes": scroll.nbytes,
        "bytes": stored,
    }


# ---- Rows ------------------------------------------------------------------------------------------

# Parts of the volume that may be remembered.
QUARTER, TENTH = 4, 10
COLD, WARM = "cold", "warm"

Kind = Literal["zarr", "slices", "tour", "uniform"]
_FAST = "FastPatchDataset + FastLoader"


@dataclass(frozen=True)
class PatchSpec:
    """One loader to measure.

    Attributes:
        section: ``"cold"``, where nothing that was decoded is remembered at first and then a quarter, or
            ``"warm"``, where everything is.
        kind: ``"zarr"`` slices Zarr arrays; the others are fastpipe's:
            ``"tour"`` visits patches so that little is decoded twice, ``"uniform"`` in any order.
        threads: of ``fastpipe.FastPatchDataset``.
        name: its name in the JSON file, if not that of its section and kind.
    """

    section: str
    kind: Kind
    label: str
    group: Literal["replaced", "fastpipe", "peer"]
    num_workers: int = 0
    note: str = ""
    threads: int | Literal["auto"] = "auto"
    name: str = ""

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return self.name or f"{self.section}-{'replaced' if self.group == 'replaced' else self.kind}"

    @property
    def info(self) -> RowInfo:
        """What the report calls it."""
        return RowInfo(
            self.key, self.label, self.group, self.num_workers, "uint16 and uint8", self.note,
            section=self.section, unit="patches",
        )  # fmt: skip


def specs() -> list[PatchSpec]:
    """The loaders that are measured; that of scripts without fastpipe comes first in each section."""
    stock = "zarr-python + DataLoader(num_workers=1)"
    spawned, each_time = "spawned", "decodes each chunk anew for each patch"
    return [
        PatchSpec(COLD, "zarr", stock, "replaced", 1, f"{spawned}; {each_time}"),
        PatchSpec(COLD, "tour", f'{_FAST}, Shuffle(unit="group")', "fastpipe", note="places drawn uniformly"),
        PatchSpec(COLD, "uniform", f"{_FAST}, shuffle=True", "fastpipe", note="all orders equally likely"),
        PatchSpec(WARM, "zarr", stock, "replaced", 1, f"{spawned}; {each_time}"),
        PatchSpec(WARM, "uniform", f"{_FAST}, shuffle=True", "fastpipe", note="from the second epoch on"),
    ]  # fmt: skip


def patch_dataset(
    scroll: Scroll, budget: int, seed: int = 0, threads: int | Literal["auto"] = "auto"
) -> fastpipe.FastPatchDataset:
    """An epoch of patches of a volume and its labels."""
    values, labels = scroll.paths
    return fastpipe.FastPatchDataset(
        values, scroll.sizes.patch, labels=labels, sampling=fastpipe.sampling.Uniform(scroll.epoch),
        cache=fastpipe.Cache("ram", max_bytes=budget), seed=seed, threads=threads,
    )  # fmt: skip


def patch_loader(dataset: Any, batch_size: int, kind: str) -> Any:
    """A `FastLoader` of a dataset, on a ``"tour"`` or in ``"uniform"`` order."""
    shuffle = fastpipe.Shuffle(unit="group") if kind == "tour" else True
    return fastpipe.FastLoader(dataset, batch_size, shuffle)


class WholeEpochs:
    """A `Contender` of fastpipe's that goes through whole epochs.

    In the section ``"cold"`` each is the first of a new dataset, which is made before the clock starts; its
    loader, which plans a tour, is made after that.

    Attributes:
        made_s: seconds that making each dataset took.
    """

    workers = 0

    def __init__(self, spec: PatchSpec, scroll: Scroll, batch_size: int) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, scroll.epoch
        self.made_s: list[float] = []
        self._scroll, self._batch_size = scroll, batch_size
        self._loader: Any = None
        self._stages: Counter[str] = Counter()

    @property
    def budget(self) -> int:
        """Bytes that may be remembered: a part, or with room to spare all."""
        return self._scroll.nbytes // QUARTER if self.spec.section == COLD else 2 * self._scroll.nbytes

    def measure(self, count: int) -> float:
        """Consume so many patches; return the seconds it took."""
        return sum(self._epoch() for _ in range(count // self.chunk))

    def made(self, seed: int) -> tuple[fastpipe.FastPatchDataset, Any]:
        """A dataset that has remembered nothing, and its loader."""
        dataset = patch_dataset(self._scroll, self.budget, seed, self.spec.threads)
        return dataset, patch_loader(dataset, self._batch_size, self.spec.kind)

    def batches(self, count: int) -> Iterator[Any]:
        """The first epoch of a new dataset, which is opened and planned when a batch is asked for."""
        yield from self.made(seed=len(self.made_s))[1]

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that the loaders' clocks have counted so far."""
        return dict(self._stages)

    def plan(self) -> str:
        """What is read how."""
        plan = str(patch_dataset(self._scroll, self.budget).plan)
        return plan.replace(str(self._scroll.folder), self._scroll.folder.name)

    def close(self) -> None:
        """Let go of the loader, which ends its threads and frees its memory."""
        self._loader = None
        gc.collect()

    def _epoch(self) -> float:
        is_new = self._loader is None or self.spec.section == COLD
        if is_new:
            self.close()
            start = time.perf_counter()
            dataset = patch_dataset(self._scroll, self.budget, len(self.made_s), self.spec.threads)
            self.made_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        if is_new:  # an order that has to be planned is a part of the epoch
            self._loader = patch_loader(dataset, self._batch_size, self.spec.kind)
        planned = time.perf_counter() - start
        before = dict(self._loader.clock.totals())
        seconds = planned + consume(self._loader, self.chunk, self.spec.label)
        for stage, total in self._loader.clock.totals().items():
            self._stages[stage] += total - before.get(stage, 0.0)
        return seconds


class SlicedRow:
    """A `Contender` that slices arrays patch by patch, in torch's ``DataLoader``."""

    def __init__(self, spec: PatchSpec, loader: Any) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        self.chunk = loader.batch_size * max(1, spec.num_workers)
        self._loader = loader

    def measure(self, count: int) -> float:
        """Consume so many patches; return the seconds it took."""
        return consume(self.batches(count), count, self.spec.label)

    def batches(self, count: int) -> Any:
        """An epoch of so many patches."""
        self._loader.sampler.length = count
        return self._loader

    def close(self) -> None:
        """Let go of the loader, which ends its workers."""
        self._loader = None
        gc.collect()


def sliced_loader(spec: PatchSpec, scroll: Scroll, batch_size: int, source: Any = None) -> Any:
    """The loader of a row that slices Zarr arrays, or a source, with a sampler whose length may be set."""
    data = require("torch.utils.data", extra="torch")
    if source is None:
        source = ZarrPatches(scroll.paths, scroll.sizes.shape, scroll.sizes.patch, scroll.epoch)
    # Zarr has threads of its own, of which a forked process has none: it would wait for ever.
    workers: dict[str, Any] = {"num_workers": spec.num_workers, "persistent_workers": spec.num_workers > 0}
    context = "spawn" if spec.num_workers else None
    draws = Draws(range(scroll.epoch), scroll.epoch)
    return data.DataLoader(source, batch_size, sampler=draws, multiprocessing_context=context, **workers)


# ---- Are the patches those of the volume? ----------------------------------------------------------

_EPOCHS = 2


def check_patches(
    scroll: Scroll,
    rows: Iterable[WholeEpochs | SlicedRow],
    say: Callable[[str], None] = lambda text: None,
) -> RowCheck:
    """Compare each row with slices of the volume in memory: two epochs of fastpipe's rows, one of others."""
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
        dataset, loader = row.made(seed=0)
        for epoch in range(_EPOCHS):
            _, starts = dataset.places(epoch)
            check.add(f"{what}, epoch {epoch}", expected_patches(scroll, starts), loader)
    return check


def expected_patches(scroll: Scroll, starts: Iterable[Any]) -> Counter[bytes]:
    """Digests of patches of the arrays in memory, and how often each comes."""
    found: Counter[bytes] = Counter()
    for start in starts:
        box = box_at(start, scroll.sizes.patch)
        values, labels = (array[box][np.newaxis] for array in scroll.arrays)
        found.update(digests_of_samples(values, labels))
    return found


# ---- The case --------------------------------------------------------------------------------------

BATCH = 2
_MAIN = "cold-tour"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--folder", metavar="FOLDER", type=Path,
        help="where the made-up volume is kept, 0.3 GB (default: the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), default=BATCH, metavar="N",
        help=f"patches in a batch (default: {BATCH})")  # fmt: skip
    add_run_arguments(parser)


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for; return 1 when patches are not those of the volume.

    Raises:
        MissingDependencyError: zarr-python, which the replaced loader needs, is not installed.
    """
    require("zarr", extra="bench")
    scroll = made_scroll(QUICK if args.quick else FULL, args.folder, progress.done)
    return (kind or Bench)(args, available_cpus(), progress, scroll=scroll).run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "volume"
    quick_s: ClassVar[float] = 0.05
    scroll: Scroll = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        self.begin()
        scroll, size = self.scroll, self.args.batch_size
        scroll.warm()
        with ExitStack() as stack:
            own = self.own_rows(stack)
            if not self.passed(check := check_patches(scroll, own, self.progress.now)):
                return None
            contenders = [*own, *self.all_others(stack)]
            main = next(one for one in own if one.key == _MAIN)
            assert isinstance(main, WholeEpochs)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            stages = self.stages(before, main.stage_seconds(), session.samples[_MAIN])
            self._tell_made(contenders)
            plan = main.plan()
        patch = "×".join(map(str, scroll.sizes.patch))
        quarter = scroll.nbytes / QUARTER / 1e6
        cold = f"cold, a first epoch with room for {quarter:,.0f} MB, a quarter of the volume"
        return self.content(
            session, check, [f"--batch-size {size}"] if size != BATCH else [],
            data=described(scroll),
            sections={COLD: {"label": cold}, WARM: {"label": "warm, room for the whole volume"}},
            job={"text": f"Volume: patches of {patch} uint16 with labels, anywhere, batches of {size}",
                 "short": f"patches of {patch}, batch {size}", "batch_size": size},
            main=_MAIN,
            stages=stages,
            plan=plan,
        )  # fmt: skip

    def own_rows(self, stack: ExitStack) -> list[WholeEpochs | SlicedRow]:
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

    def _tell_made(self, rows: Sequence[Contender]) -> None:
        """Note what making datasets took, which is not part of the rates."""
        for row in rows:
            if isinstance(row, WholeEpochs) and row.spec.section == COLD:
                info, seconds = self.infos[row.key], statistics.median(row.made_s)
                note = f"{info.note}; opened in {seconds:.3f} s before"
                self.infos[row.key] = replace(info, note=note)
