"""The case ``tf``: pipelines of ``tf.data``, as scripts and Keras make them, against ``fastpipe.tf``."""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench import tf_datasets as data
from fastpipe.bench.check import RowCheck
from fastpipe.bench.data import folder_to_use
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.results import RowInfo, best_by_section, entries, verdict
from fastpipe.bench.runner import Contender, ContenderError, Session, Timeline, timeline_of
from fastpipe.bench.tf_datasets import FULL, QUICK, Lengths, Photos, Setting, tensorflow
from fastpipe.console import Progress, positive
from fastpipe.errors import CacheError, FastpipeError

__all__ = [
    "SECTIONS",
    "Apart",
    "ApartRow",
    "EpochRow",
    "Make",
    "SampleCheck",
    "Spec",
    "add_arguments",
    "check_rows",
    "run",
    "specs",
]


# ---- Rows ------------------------------------------------------------------------------------------

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
        group: as of `RowInfo`.
        make: makes it.
        note: what a reader should know about the row.
        most_apart: of fastpipe's, how far values may be from the replaced dataset's; None of others.
    """

    section: str
    kind: str
    label: str
    group: Literal["replaced", "fastpipe", "peer"]
    make: Make
    note: str = ""
    most_apart: int | None = None

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

    return [
        Spec("crop", "replaced", pillow, "replaced", script(data.by_pillow)),
        Spec("crop", "threads", fast, "fastpipe", data.crops, most_apart=0),
        Spec("crop", "graph", f'{fast}, engine="graph"', "fastpipe", partial(data.crops, engine="graph"),
             "TensorFlow's operations, within 1 of 255", most_apart=1),
        Spec("crop", "ram", f'{fast}, cache="ram"', "fastpipe", partial(data.crops, cache="ram"), _KEPT,
             most_apart=0),
        Spec("crop", "disk", f'{fast}, cache="disk"', "fastpipe", partial(data.crops, cache="disk"), _KEPT,
             most_apart=0),
        Spec("crop", "hand", "tf.io.decode_and_crop_jpeg + tf.image.resize", "peer", script(data.by_hand),
             "other pixels: another decoding, no antialiasing"),
    ]  # fmt: skip


def _others() -> list[Spec]:
    fast, several = "image_dataset", "image_dataset(modalities=…)"

    def merged(setting: Setting, *, is_shuffled: bool) -> Any:
        return data.by_pillow(setting.several, setting.batch_size, is_shuffled=is_shuffled)

    return [
        Spec("folder", "replaced", "keras image_dataset_from_directory", "replaced", data.from_directory),
        Spec("folder", "threads", fast, "fastpipe", data.folder, most_apart=0),
        Spec("folder", "ram", f'{fast}, cache="ram"', "fastpipe", partial(data.folder, cache="ram"),
             f"float32, {_KEPT}", most_apart=0),
        Spec("modalities", "replaced", "four tf.py_function + Pillow in one map", "replaced", merged),
        Spec("modalities", "threads", several, "fastpipe", data.modalities, most_apart=0),
        Spec("modalities", "ram", f'{several}, cache="ram"', "fastpipe",
             partial(data.modalities, cache="ram"),
             _KEPT, most_apart=0),
    ]  # fmt: skip


def _augmented() -> list[Spec]:
    def of(make: Callable[[Setting], Any]) -> Make:
        return lambda setting, is_shuffled: make(setting)

    each = "image by image; rotated as by TensorFlow Addons"
    return [
        Spec("augment", "replaced", "keras.layers, Sequential", "replaced", of(data.by_keras),
             "brightness is added"),
        Spec("augment", "images", "tf.image.random_…", "replaced", of(data.by_operations), each),
        Spec("augment", "stateless", "tf.image.stateless_random_…", "replaced",
             of(data.by_stateless_operations), each),
        Spec("augment", "layer", "fastpipe.tf.Augment", "fastpipe", of(data.by_augment),
             "brightness is a factor"),
    ]  # fmt: skip


def _arrays() -> list[Spec]:
    rows, patches = "hdf5_dataset", "patch_dataset"
    return [
        Spec("hdf5", "replaced", "generator over h5py, row by row", "replaced", data.rows_by_h5py),
        Spec("hdf5", "window", f'{rows}, shuffle=Shuffle(16, "group")', "fastpipe",
             partial(data.rows, unit="group"), "chunks, then rows of 16 chunks at a time", most_apart=0),
        Spec("hdf5", "ram", f'{rows}, cache="ram"', "fastpipe", partial(data.rows, cache="ram"), _KEPT,
             most_apart=0),
        Spec("patches", "replaced", "generator that slices a zarr array", "replaced", data.patches_by_zarr),
        Spec("patches", "uniform", patches, "fastpipe", data.patches, "a third of the volume fits",
             most_apart=0),
        Spec("patches", "tour", f'{patches}, shuffle=Shuffle(unit="group")', "fastpipe",
             partial(data.patches, unit="group"), "the same room; neighbours come together", most_apart=0),
    ]  # fmt: skip


class EpochRow:
    """A `Contender` that goes through whole epochs of a dataset.

    An iterator is made when the clock runs and is at its end when it stops: nothing is prefetched before, and
    no thread goes on working afterwards.

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


# ---- Are the samples those of the replaced datasets? -----------------------------------------------

Parts = dict[str, npt.NDArray[Any]]
_LABELS = "labels"


@dataclass
class SampleCheck(RowCheck):
    """How samples compare with those of the datasets that are replaced.

    Attributes:
        values: how many numbers were compared one by one.
        differing: how many of them differ.
        over_one: how many differ by more than 1 of 255.
        largest: the largest difference.
    """

    whose: str = "those of the replaced datasets"
    values: int = 0
    differing: int = 0
    over_one: int = 0
    largest: float = 0.0

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return super().sentence()
        apart = "" if not self.differing else (
            f" but for {self.differing / self.values:.2%} of the values, which differ by at most"
            f" {self.largest:g} of 255"
        )  # fmt: skip
        return (
            f"{self.samples:,} samples in {self.epochs} epochs equal those of the replaced datasets bit for"
            f" bit{apart}; labels too, and each sample comes once in an epoch"
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        names = ("values", "differing", "over_one", "largest")
        return {**super().as_json(), **{name: getattr(self, name) for name in names}}

    def add_batch(self, what: str, wanted: Parts, found: Parts, most_apart: int) -> None:
        """Compare a batch."""
        if list(wanted) != list(found):
            self._say(f"{what}: a batch has {', '.join(found)}, expected {', '.join(wanted)}")
            return
        for name, right in wanted.items():
            got = found[name]
            if (got.dtype, got.shape) != (right.dtype, right.shape):
                self._say(f"{what}: {name} are {got.dtype} {got.shape}, expected {right.dtype} {right.shape}")
            elif right.ndim == 4 and right.dtype == np.float32:
                self._add_images(f"{what}: {name}", right, got, most_apart)
            elif not np.array_equal(right, got):
                self._say(f"{what}: {name} differ")

    def _add_images(
        self, what: str, wanted: npt.NDArray[Any], found: npt.NDArray[Any], most_apart: int
    ) -> None:
        self.values += wanted.size
        if np.array_equal(wanted, found):
            return
        gap = np.abs(wanted - found)
        far = ~(gap <= most_apart)  # what is no number is far from everything
        self.differing += int(np.count_nonzero(wanted != found))
        self.over_one += int(np.count_nonzero(~(gap <= 1)))
        self.largest = max(self.largest, float(gap.max()))
        if far.any():
            self._say(
                f"{what}: values differ by up to {gap.max():g} of 255, where {most_apart} is the most allowed"
            )

    def _say(self, problem: str) -> None:
        """Note a problem; the same of later batches is nothing new."""
        start = problem.rsplit(": ", 1)[0]
        if not any(known.startswith(start) for known in self.problems):
            self.problems += (problem,)


def check_rows(
    setting: Setting, rows: Sequence[EpochRow], say: Callable[[str], None] = lambda text: None
) -> SampleCheck:
    """Compare each row of fastpipe's with the replaced dataset of its section.

    An epoch in the order of the samples is compared number by number; one of what is measured, in whatever
    order, has to have the same samples.  Where samples are kept, the first makes them and the second finds
    them.
    """
    check, errors = SampleCheck(), tensorflow().errors
    compared = [row for row in rows if row.spec.most_apart is not None]
    for section in dict.fromkeys(row.spec.section for row in compared):
        say(f"comparing: {section}")
        replaced = next(spec for spec in specs() if spec.section == section and spec.group == "replaced")
        try:
            _check_section(check, setting, replaced, [row for row in compared if row.spec.section == section])
        except errors.OpError as error:
            check.problems += (f"{section}: {str(error).splitlines()[0]}",)
    return check


def _check_section(check: SampleCheck, setting: Setting, replaced: Spec, rows: Sequence[EpochRow]) -> None:
    """Compare the rows of a section with what they replace."""
    ordered = [row.spec.make(setting, is_shuffled=False) for row in rows]
    found: list[Counter[bytes]] = [Counter() for _ in rows]
    for wanted, *batches in zip_longest(replaced.make(setting, is_shuffled=False), *ordered):
        right = _parts(wanted)
        for row, samples, batch in zip(rows, found, batches, strict=True):
            made = _parts(batch)
            check.add_batch(f"{row.spec.section}: {row.spec.label}", right, made, row.spec.most_apart or 0)
            samples.update(_digests(made))
    for row, samples in zip(rows, found, strict=True):
        check.epochs, check.samples = check.epochs + 1, check.samples + samples.total()
        again: Counter[bytes] = Counter()
        for batch in row.dataset:
            again.update(_digests(_parts(batch)))
        what = f"{row.spec.section}: {row.spec.label}"
        check.add_epoch(what, samples, again, "of a shuffled epoch are none of the others")


def _parts(batch: Any) -> Parts:
    """The arrays of a batch by their names, in the order of these, without a copy; of no batch, none."""
    if batch is None:
        return {}
    inputs, labels = batch
    named = dict(inputs) if isinstance(inputs, dict) else {"images": inputs}
    return {name: np.asarray(value) for name, value in sorted({**named, _LABELS: labels}.items())}


def _digests(parts: Parts) -> Iterator[bytes]:
    """Digests of the samples of a batch, with all that they consist of."""
    arrays = [np.ascontiguousarray(values) for values in parts.values()]
    for sample in zip(*arrays, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for values in sample:
            digest.update(np.ascontiguousarray(values).data)
        yield digest.digest()


# ---- Datasets without fastpipe, in a process of their own ------------------------------------------
#
# The first dataset of a Python generator in a process, as fastpipe's are, lets TensorFlow fix malloc's
# limit above which memory is mapped anew each time: scripts without one, which allocate for each image,
# would be slower beside it than they are.

_PATIENCE_S = 10.0


class Apart:
    """A process that goes through epochs of datasets when it is told to, and rests otherwise."""

    def __init__(self, setting: Setting, specs: Callable[[], list[Spec]] = specs) -> None:
        # Not forked: TensorFlow, whose threads a fork does not have, is used here already.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, setting, specs), daemon=True)
        self._process.start()
        other.close()

    def measure(self, key: str, count: int) -> float:
        """Consume so many samples of a row; return the seconds it took.

        Raises:
            ContenderError: it cannot go on.
        """
        return float(self._asked(key, count, None))

    def timeline(self, key: str, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each, with a row's batches.

        Raises:
            ContenderError: it cannot go on.
        """
        found: Timeline = self._asked(key, steps, busy_s)
        return found

    def _asked(self, *question: Any) -> Any:
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise ContenderError("its process ended") from None
        if isinstance(answer, str):
            raise ContenderError(answer)
        return answer

    def close(self) -> None:
        """End the process.  May be called twice."""
        self._connection.close()
        self._process.join(_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class ApartRow:
    """A `Contender` that goes through whole epochs of a dataset in another process."""

    workers = 0

    def __init__(self, spec: Spec, setting: Setting, apart: Apart) -> None:
        self.key, self.chunk = spec.key, spec.samples(setting.lengths, setting.batch_size)
        self._apart = apart

    def measure(self, count: int) -> float:
        """Consume so many samples; return the seconds it took."""
        return self._apart.measure(self.key, count)

    def timeline(self, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each."""
        return self._apart.timeline(self.key, steps, busy_s)

    def close(self) -> None:
        """Nothing: the process is that of all rows."""


def _serve(connection: Any, setting: Setting, specs: Callable[[], list[Spec]]) -> None:
    """Answer until the other end is closed."""
    by_key, rows = {spec.key: spec for spec in specs()}, dict[str, EpochRow]()
    try:
        while True:
            key, count, busy_s = connection.recv()
            try:
                if key not in rows:
                    rows[key] = EpochRow(by_key[key], setting)
                    gc.collect()
                    gc.freeze()  # as where the other rows are
                row = rows[key]
                connection.send(row.measure(count) if busy_s is None else row.timeline(count, busy_s))
            except ContenderError as error:
                connection.send(str(error))
    except (EOFError, KeyboardInterrupt):  # Ctrl-C comes here too
        return


# ---- The case --------------------------------------------------------------------------------------

BATCH, QUICK_BATCH = 32, 8
_MAIN = "crop-threads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder whose JPEGs are read (default: "
        "$FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), metavar="N",
        help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
    add_run_arguments(parser)


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for; return 1 when samples are not those of what is replaced.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: the photos cannot be used.
    """
    tensorflow()
    lengths = QUICK if args.quick else FULL
    folder, name, _ = folder_to_use(args.data, progress.done)
    photos = Photos.of(folder, name, lengths.crops)
    bench = (kind or Bench)(args, machine.cores_allowed(), progress, photos=photos, lengths=lengths)
    return bench.run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "tf"
    quick_s: ClassVar[float] = 0.05
    photos: Photos = field(kw_only=True)
    lengths: Lengths = field(kw_only=True)

    @staticmethod
    def specs() -> list[Spec]:
        """Return the datasets that are measured."""
        return specs()

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return self.args.batch_size or (QUICK_BATCH if self.args.quick else BATCH)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
            setting = Setting(self.photos, self.lengths, self.batch_size, scratch)
            own = self._own(setting, stack)
            check = check_rows(setting, list(own.values()), self.progress.now)
            self.progress.done(f"check: {check.sentence()}")
            if not check.ok:
                return None
            contenders, main = self._all(setting, own, stack), own[_MAIN]
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            _check_measured(session)
            images = sum(sample.count for sample in session.samples[_MAIN])
            self._tell_stages(before, main.stage_seconds(), images)
            plan = main.dataset.plan
        rows = entries(list(self.infos.values()), session)
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": _MAIN,
            "rows": rows,
            "best": best_by_section(rows),
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": plan,
            **self.studies(session),
        }
        result["verdict"] = verdict(result)
        return result

    def _own(self, setting: Setting, stack: ExitStack) -> dict[str, EpochRow]:
        """Build the rows of fastpipe's."""
        found = {}
        stack.callback(gc.collect)  # once, when all are closed: it takes long beside TensorFlow
        for spec in self.specs():
            if spec.group != "fastpipe":
                continue
            row = self.open(stack, spec.info, partial(EpochRow, spec, setting))
            if isinstance(row, EpochRow):
                found[row.key] = row
        return found

    def _all(self, setting: Setting, own: Mapping[str, EpochRow], stack: ExitStack) -> list[Contender]:
        """All rows in the order of the tables, with those that have a process of their own."""
        _ = setting.folder  # made before another process looks for it
        found = list[Contender]()
        # Those of generators have one for themselves: see `apart`.
        apart = {is_generator: Apart(setting, self.specs) for is_generator in (False, True)}
        for one in apart.values():
            stack.callback(one.close)
        infos = dict(self.infos)
        for spec in self.specs():
            if spec.group == "fastpipe" and spec.key in own:
                found.append(own[spec.key])
            elif spec.group != "fastpipe":
                found.append(ApartRow(spec, setting, apart[spec.is_generator]))
                infos[spec.key] = spec.info
        self.infos = {one.key: infos[one.key] for one in found}
        return found

    def _tell_stages(self, before: Mapping[str, float], after: Mapping[str, float], images: int) -> None:
        """Note where the main row's threads spent their time."""
        spent = ", ".join(
            f"{stage} {1000 * (seconds - before.get(stage, 0.0)) / images:.2f}"
            for stage, seconds in after.items()
        )
        self.infos[_MAIN] = replace(self.infos[_MAIN], note=f"ms an image in its threads: {spent}")

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, size, photos, lengths = self.args, self.batch_size, self.photos, self.lengths
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--batch-size {size}"] if args.batch_size else []
        epochs = (
            f"epochs of {lengths.crops:,} boxes, {lengths.folder:,} photos of a folder and"
            f" {lengths.modalities:,} times four boxes, of these photos again and again"
        )
        return self.facts(words, busy) | {
            "data": {
                "text": f"{photos.text}; {epochs}",
                "name": photos.name,
                "classes": len(photos.classes),
                "total": photos.total,
                "photos": len(photos.files),
                "bytes": photos.nbytes,
                "samples": lengths.crops,
            },
            "sections": {key: {"label": label} for key, label in SECTIONS.items()},
            "job": {
                "text": f"tf.data: shuffled float32 batches of {size}, consumed in Python",
                "short": f"tf.data pipelines, batches of {size}",
                "batch_size": size,
                "replaces": "dataset",
            },
        }


def _check_measured(session: Session) -> None:
    """Refuse a run in which there is nothing to compare with.

    Raises:
        FastpipeError: a section has no row that is replaced.
    """
    for section, label in SECTIONS.items():
        of_it = [spec for spec in specs() if spec.section == section]
        replaced = [spec.key for spec in of_it if spec.group == "replaced"]
        is_measured = any(session.samples.get(spec.key) for spec in of_it)
        if is_measured and not any(session.samples.get(key) for key in replaced):
            why = "; ".join(session.failures.get(key, "not measured") for key in replaced)
            raise FastpipeError(f"{label}: what is replaced could not be measured ({why}): run it again")
