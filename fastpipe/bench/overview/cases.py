"""The five pipelines: rows of the cases that measure each of them at length, over small data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fastpipe.bench import check as images_check
from fastpipe.bench.data import generated_folder, scan
from fastpipe.bench.generate import check as generate_check
from fastpipe.bench.generate import rows as generate
from fastpipe.bench.hdf5 import check as hdf5_check
from fastpipe.bench.hdf5 import data as hdf5_data
from fastpipe.bench.hdf5 import rows as hdf5
from fastpipe.bench.loaders import LoaderRow, LoaderSpec
from fastpipe.bench.results import MAIN_ROW, RowInfo
from fastpipe.bench.runner import Contender
from fastpipe.bench.stall import Timeline, timeline_of
from fastpipe.bench.tf import check as tf_check
from fastpipe.bench.tf import data as tf_data
from fastpipe.bench.tf import rows as tf
from fastpipe.bench.tf.apart import Apart, ApartRow
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.bench.volume import check as volume_check
from fastpipe.bench.volume import data as volume_data
from fastpipe.bench.volume import rows as volume
from fastpipe.core.extras import require

__all__ = ["CASES", "Case", "Ground", "Outcome"]

Rows = list[tuple[RowInfo, Contender]]


class Outcome(Protocol):
    """What a check has found."""

    @property
    def ok(self) -> bool:
        """Whether outputs are those of what is replaced."""

    def sentence(self) -> str:
        """That in words."""

    def as_json(self) -> dict[str, Any]:
        """That for the JSON file."""


@dataclass(frozen=True)
class Ground:
    """Where a case is measured.

    Attributes:
        folder: for data that is made; whoever made the folder removes it.
        cores: processors that may be used.
        quick: whether so little data is enough that only shows that all runs.
        say: told what takes long.
    """

    folder: Path
    cores: int
    quick: bool
    say: Callable[[str], None]


class Case(ABC):
    """One pipeline, before and after.

    Attributes:
        key: its name: that of its folder in ``examples/``, where it has one of its own.
        label: its name in tables.
        alone: the case of ``fastpipe bench`` that measures more of it.
        unit: what is counted.
        batch_size: of that, in a batch.
        seconds: that a measurement takes.
        most_steps: of which a stall is seen; 0 where there is no loader.
        data: what is read, in words; known when there are rows.
    """

    key: ClassVar[str]
    label: ClassVar[str]
    alone: ClassVar[str]
    unit: ClassVar[str]
    batch_size: int = 1
    seconds: ClassVar[float] = 1.2
    data = ""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.most_steps = 6 if ground.quick else 40

    @abstractmethod
    def rows(self, stack: ExitStack) -> Rows:
        """Make the data and the rows: first what is replaced, then what replaces it, then others.

        Args:
            stack: closes what is not a row.
        """

    @abstractmethod
    def check(self, rows: Rows) -> Outcome:
        """Whether fastpipe's rows give what they should."""

    @abstractmethod
    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each, with a row's batches."""


class KerasMultimodal(Case):
    """``tf.py_function`` and Pillow, for four images of each sample."""

    key, alone, unit = "keras_multimodal", "tf", "samples"
    label = "keras_multimodal, four images a sample, tf.data"
    batch_size = 16

    def rows(self, stack: ExitStack) -> Rows:
        """One row in another process, as the case ``tf`` has it."""
        tensorflow()
        if self.ground.quick:
            self.batch_size = 8
        count = 12 * self.batch_size
        photos = tf_data.Photos.of(_photos(self.ground), "made-up photographs", count)
        lengths = replace(tf_data.QUICK, modalities=count)
        scratch = self.ground.folder / self.key
        scratch.mkdir()
        setting = tf_data.Setting(photos, lengths, self.batch_size, scratch)
        self.data, self.most_steps = f"{count} samples of {photos.text}", count // self.batch_size
        self._setting, self._own = setting, list[tf.EpochRow]()
        apart = Apart(setting)
        stack.callback(apart.close)
        found: Rows = []
        for spec in tf.specs():
            if spec.section != "modalities" or spec.kind == "ram":  # which says nothing of a first epoch
                continue
            if spec.group == "fastpipe":
                self._own.append(tf.EpochRow(spec, setting))
                found.append((spec.info, self._own[-1]))
            else:
                found.append((spec.info, ApartRow(spec, setting, apart)))
        return found

    def check(self, rows: Rows) -> Outcome:
        """Number by number, and sample by sample."""
        return tf_check.check_rows(self._setting, self._own, self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Where the row is."""
        found: Timeline = row.timeline(steps, busy_s)
        return found


class HDF5Mel(Case):
    """A file that each worker opens, read row by row in random order."""

    key, alone, unit = "hdf5_mel", "hdf5", "samples"
    label = "hdf5_mel, shuffled log-mels of an HDF5 file, gzip"
    batch_size = 64

    def rows(self, stack: ExitStack) -> Rows:
        """Of the rows of the case ``hdf5`` those on its first table."""
        ground = self.ground
        sizes = hdf5_data.Sizes(rows=512 if ground.quick else 2048)
        (table,) = hdf5_data.made_tables(sizes, ground.folder, ground.say, layouts=["gzip"])
        table.warm()
        self._table = table
        self.data = f"{table.samples:,} log-mels of {table.sample_bytes / 1000:.0f} kB, {table.label}"
        found: Rows = []
        for spec in hdf5.specs_of(table, self.batch_size):
            if spec.kind == "rows":
                counts = (0, min(2, ground.cores))
                spec = hdf5.best_workers(spec, table, counts, 0.05 if ground.quick else 0.3, ground.say)
            if spec.kind in ("rows", "window", "uniform"):
                found.append((spec.info(table), hdf5.TableRow(spec, table)))
        return found

    def check(self, rows: Rows) -> Outcome:
        """Bit for bit, and each sample once."""
        own = [row.spec for _, row in rows if isinstance(row, hdf5.TableRow) and row.spec.group == "fastpipe"]
        return hdf5_check.check_rows([(self._table, spec) for spec in own], self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Of an epoch's beginning."""
        with hdf5.quiet():
            return timeline_of(row.batches(steps * self.batch_size), lambda _: busy_s, steps)


class MotionGeneration(Case):
    """A loop that makes one sample after the other."""

    key, alone, unit = "motion_generation", "generate", "rows"
    label = "motion_generation, rows of a function that takes 5 ms, stored"
    seconds = 2.5  # as processes have to start

    def rows(self, stack: ExitStack) -> Rows:
        """The first section of the case ``generate``."""
        require("h5py", extra="generation")
        section, scratch = generate.SECTIONS[0], self.ground.folder / self.key
        scratch.mkdir()
        self.data = f"{section.label}; they are stored before training begins, so no step of it waits"
        self.most_steps = 0
        return [
            (spec.info, make(spec, scratch))
            for spec, make in generate.specs(section, self.ground.cores)
            if spec.kind in ("replaced", "workers")
        ]

    def check(self, rows: Rows) -> Outcome:
        """What is read from the files."""
        made = [row for _, row in rows if isinstance(row, generate.MadeRow)]
        return generate_check.check_stored(made, self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """There is none.

        Raises:
            TypeError: always.
        """
        raise TypeError("no step waits for rows that are stored")


class VolumePatches(Case):
    """Slices of Zarr arrays in one worker process."""

    key, alone, unit = "volume_patches", "volume", "patches"
    label = "volume_patches, anywhere in a Zarr volume"
    batch_size = 2

    def rows(self, stack: ExitStack) -> Rows:
        """Of the case ``volume`` the first epochs."""
        require("zarr", extra="bench")
        full = volume_data.FULL
        sizes = volume_data.QUICK if self.ground.quick else replace(full, shape=(128, 512, 512))
        scroll = volume_data.made_scroll(sizes, self.ground.folder, self.ground.say)
        scroll.warm()
        room = f"fastpipe remembers {scroll.nbytes / volume.QUARTER / 1e6:,.0f} MB, a quarter of it"
        self._scroll, self.data = scroll, f"{volume_data.described(scroll)['text']}; {room}"
        self.most_steps = min(self.most_steps, scroll.epoch // self.batch_size)
        found: Rows = []
        for spec in volume.specs():
            if spec.section == volume.COLD and spec.group == "replaced":
                loader = volume.sliced_loader(spec, scroll, self.batch_size)
                found.append((spec.info, volume.SlicedRow(spec, loader)))
            elif spec.section == volume.COLD:
                found.append((spec.info, volume.WholeEpochs(spec, scroll, self.batch_size)))
        return found

    def check(self, rows: Rows) -> Outcome:
        """Voxel by voxel, and each patch once."""
        own = [row for _, row in rows if isinstance(row, (volume.WholeEpochs, volume.SlicedRow))]
        return volume_check.check_patches(self._scroll, own, self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Of fastpipe's a first epoch's beginning."""
        is_sliced = isinstance(row, volume.SlicedRow)
        batches = row.batches(steps * self.batch_size) if is_sliced else row.batches()
        return timeline_of(batches, lambda _: busy_s, steps)


class ImageFolder(Case):
    """torchvision's ``ImageFolder`` with two workers, over a local folder."""

    key, alone, unit = "imagefolder", "images", "images"
    label = "imagefolder, photos on the local disk (in S3: bench s3)"
    batch_size = 32

    def rows(self, stack: ExitStack) -> Rows:
        """Of the case ``images`` the two that matter, and the stock loader over fastpipe's dataset."""
        photos = scan(_photos(self.ground), "made-up photographs")
        photos.warm()
        self._photos = photos
        each = photos.bytes / len(photos.files) / 1000
        self.data = (
            f"{len(photos.files)} {photos.name} of {each:.0f} kB on the local disk, in the page cache; not in"
            " S3, whose server takes long to start: python -m fastpipe.bench s3"
        )
        workers = min(2, self.ground.cores)
        specs = [
            LoaderSpec("replaced", f"ImageFolder + DataLoader(num_workers={workers})", "replaced", workers),
            LoaderSpec(MAIN_ROW, "FastImageFolder + FastLoader", "fastpipe"),
            LoaderSpec("stock", f"FastImageFolder + DataLoader(num_workers={workers})", "stock", workers),
        ]
        found: Rows = []
        for spec in specs:
            info = RowInfo(
                spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note, unit=self.unit
            )
            found.append((info, LoaderRow(spec, photos.folder, photos.indices, self.batch_size)))
        return found

    def check(self, rows: Rows) -> Outcome:
        """Pixels, labels, classes and order."""
        workers = 0 if self.ground.quick else min(2, self.ground.cores)
        return images_check.run_check(self._photos, workers, lambda _: None)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Of an epoch of so many batches."""
        return timeline_of(row.batches(steps * self.batch_size), lambda _: busy_s, steps)


CASES: dict[str, type[Case]] = {
    case.key: case for case in (KerasMultimodal, HDF5Mel, MotionGeneration, VolumePatches, ImageFolder)
}


def _photos(ground: Ground) -> Path:
    """Photographs, made by the first case that needs them."""
    return generated_folder(ground.folder, say=ground.say, per_class=3 if ground.quick else 8)
