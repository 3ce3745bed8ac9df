"""The rows of the case, and what goes through their epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.stall import Timeline, timeline_of
from fastpipe.bench.tf import arrays, augmenting, own, scripts
from fastpipe.bench.tf.data import Lengths, Setting
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.errors import CacheError

__all__ = ["SECTIONS", "EpochRow", "Make", "Spec", "specs"]

# Section → its name in tables.
SECTIONS = {
    "crop": "a box of each photo at 128×128",
    "folder": "a folder of photos at 256×256",
    "modalities": "four boxes of each photo at 128×128, and numbers",
    "augment": "batches in memory: flip, rotation, brightness, contrast",
    "hdf5": "rows of 64×128 floats of an HDF5 file, gzip",
    "patches": "patches of 32×64×64 of a Zarr volume",
}
_KEPT = "from the second epoch on"


class Make(Protocol):
    """Makes a dataset of a setting, in the order of its samples or in another in each epoch."""

    def __call__(self, setting: Setting, *, is_shuffled: bool) -> Any: ...


@dataclass(frozen=True)
class Spec:
    """One dataset to measure.

    Attributes:
        section: a key of ``SECTIONS``.
        kind: the end of the row's key.
        label: its name in tables.
        group: as of `RowInfo`; peers are measured where they are asked for, unless `is_always`.
        make: makes it.
        note: what a reader should know about the row.
        most_apart: of fastpipe's, how far values may be from the replaced dataset's; None of others.
        is_always: whether a peer is measured in any case.
    """

    section: str
    kind: str
    label: str
    group: Literal["replaced", "fastpipe", "peer"]
    make: Make
    note: str = ""
    most_apart: int | None = None
    is_always: bool = False

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return f"{self.section}-{self.kind}"

    @property
    def info(self) -> RowInfo:
        """What the report calls it."""
        unit = {"modalities": "samples", "hdf5": "rows", "patches": "patches"}.get(self.section, "images")
        kind = "uint16" if self.section == "patches" else "float32"
        return RowInfo(
            self.key, self.label, self.group, None, kind, self.note, section=self.section, unit=unit
        )

    @property
    def is_generator(self) -> bool:
        """Whether a script's own dataset is one of a Python generator."""
        return self.section in ("hdf5", "patches")

    def samples(self, lengths: Lengths, batch_size: int) -> int:
        """Samples of an epoch."""
        by_section = {
            "crop": lengths.crops, "folder": lengths.folder, "modalities": lengths.modalities,
            "augment": lengths.batches * batch_size, "hdf5": lengths.rows, "patches": lengths.patches,
        }  # fmt: skip
        return by_section[self.section]


def specs() -> list[Spec]:
    """The datasets that are measured; that of scripts without fastpipe comes first in each section."""
    return [*_crops(), *_others(), *_augmented(), *_arrays()]


def _crops() -> list[Spec]:
    pillow, fast = "tf.py_function + Pillow", "image_dataset"

    def script(make: Callable[..., Any]) -> Make:
        return lambda setting, is_shuffled: make(setting.crops, setting.batch_size, is_shuffled=is_shuffled)

    def kept_by_tensorflow(in_file: bool) -> Make:
        return lambda setting, is_shuffled: scripts.by_pillow(
            setting.crops, setting.batch_size, is_shuffled=is_shuffled,
            kept=str(setting.scratch / "tf-cache") if in_file else "",
        )  # fmt: skip

    return [
        Spec("crop", "replaced", pillow, "replaced", script(scripts.by_pillow)),
        Spec("crop", "threads", fast, "fastpipe", own.crops, most_apart=0),
        Spec("crop", "graph", f'{fast}, engine="graph"', "fastpipe", partial(own.crops, engine="graph"),
             "TensorFlow's operations, within 1 of 255", most_apart=1),
        Spec("crop", "ram", f'{fast}, cache="ram"', "fastpipe", partial(own.crops, cache="ram"), _KEPT,
             most_apart=0),
        Spec("crop", "disk", f'{fast}, cache="disk"', "fastpipe", partial(own.crops, cache="disk"), _KEPT,
             most_apart=0),
        Spec("crop", "hand", "tf.io.decode_and_crop_jpeg + tf.image.resize", "peer", script(scripts.by_hand),
             "other pixels: another decoding, no antialiasing", is_always=True),
        Spec("crop", "antialiased", "tf.io.decode_jpeg + crop + resize(antialias=True)", "peer",
             script(scripts.by_hand_antialiased), "nearer to Pillow's pixels"),
        Spec("crop", "tf-ram", f"{pillow}, Dataset.cache()", "peer", kept_by_tensorflow(False),
             f"float32, {_KEPT}"),
        Spec("crop", "tf-disk", f"{pillow}, Dataset.cache(file)", "peer", kept_by_tensorflow(True),
             f"float32, {_KEPT}"),
    ]  # fmt: skip


def _others() -> list[Spec]:
    fast, several = "image_dataset", "image_dataset(modalities=…)"

    def merged(setting: Setting, *, is_shuffled: bool) -> Any:
        return scripts.by_pillow(setting.several, setting.batch_size, is_shuffled=is_shuffled)

    return [
        Spec("folder", "replaced", "keras image_dataset_from_directory", "replaced", scripts.from_directory),
        Spec("folder", "threads", fast, "fastpipe", own.folder, most_apart=0),
        Spec("folder", "ram", f'{fast}, cache="ram"', "fastpipe", partial(own.folder, cache="ram"),
             f"float32, {_KEPT}", most_apart=0),
        Spec("modalities", "replaced", "four tf.py_function + Pillow in one map", "replaced", merged),
        Spec("modalities", "threads", several, "fastpipe", own.modalities, most_apart=0),
        Spec("modalities", "ram", f'{several}, cache="ram"', "fastpipe", partial(own.modalities, cache="ram"),
             _KEPT, most_apart=0),
    ]  # fmt: skip


def _augmented() -> list[Spec]:
    def of(make: Callable[[Setting], Any]) -> Make:
        return lambda setting, is_shuffled: make(setting)

    each = "image by image; rotated as by TensorFlow Addons"
    return [
        Spec("augment", "replaced", "keras.layers, Sequential", "replaced", of(augmenting.by_keras),
             "brightness is added"),
        Spec("augment", "images", "tf.image.random_…", "replaced", of(augmenting.by_operations), each),
        Spec("augment", "stateless", "tf.image.stateless_random_…", "replaced",
             of(augmenting.by_stateless_operations), each),
        Spec("augment", "layer", "fastpipe.tf.Augment", "fastpipe", of(augmenting.by_augment),
             "brightness is a factor"),
    ]  # fmt: skip


def _arrays() -> list[Spec]:
    rows, patches = "hdf5_dataset", "patch_dataset"
    return [
        Spec("hdf5", "replaced", "generator over h5py, row by row", "replaced", arrays.rows_by_h5py),
        Spec("hdf5", "window", f'{rows}, shuffle=Shuffle(16, "group")', "fastpipe",
             partial(arrays.rows, unit="group"), "chunks, then rows of 16 chunks at a time", most_apart=0),
        Spec("hdf5", "ram", f'{rows}, cache="ram"', "fastpipe", partial(arrays.rows, cache="ram"), _KEPT,
             most_apart=0),
        Spec("patches", "replaced", "generator that slices a zarr array", "replaced", arrays.patches_by_zarr),
        Spec("patches", "uniform", patches, "fastpipe", arrays.patches, "a third of the volume fits",
             most_apart=0),
        Spec("patches", "tour", f'{patches}, shuffle=Shuffle(unit="group")', "fastpipe",
             partial(arrays.patches, unit="group"), "the same room; neighbours come together", most_apart=0),
    ]  # fmt: skip


class EpochRow:
    """A `Contender` that goes through whole epochs of a dataset.

    An iterator is made when the clock runs and is at its end when it stops: nothing is prefetched before, and
    no thread goes on working afterwards.

    Args:
        spec: which dataset.
        setting: what it is made of.

    Attributes:
        dataset: the dataset.

    Raises:
        ContenderError: it cannot be made.
    """

    workers = 0

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.spec, self.key = spec, spec.key
        self.chunk = spec.samples(setting.lengths, setting.batch_size)
        try:
            self.dataset = spec.make(setting, is_shuffled=True)
        except CacheError as error:
            raise ContenderError(str(error)) from error

    def measure(self, count: int) -> float:
        """Consume so many samples; return the seconds it took."""
        errors, seconds = tensorflow().errors, 0.0
        for _ in range(count // self.chunk):
            seen = 0
            start = time.perf_counter()
            try:
                for batch in self.dataset:
                    seen += _samples(batch)
            except errors.OpError as error:
                raise ContenderError(f"it failed: {str(error).splitlines()[0]}") from error
            seconds += time.perf_counter() - start
            if seen != self.chunk:
                raise RuntimeError(f"{self.spec.label} gave {seen} samples of {self.chunk}")
        return seconds

    def timeline(self, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each."""
        return timeline_of(self.dataset, lambda _: busy_s, steps)

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that a dataset of fastpipe's has counted so far."""
        return dict(self.dataset.stage_seconds)

    def close(self) -> None:
        """Let go of the dataset: its threads end when garbage is collected, and its memory is freed."""
        self.dataset = None


def _samples(batch: Any) -> int:
    """How many samples a batch has."""
    inputs = batch[0] if isinstance(batch, tuple) else batch
    return int((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs).shape[0])
