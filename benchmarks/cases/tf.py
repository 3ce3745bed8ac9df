"""The case ``tf`` with more of TensorFlow's own datasets, and what was asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.targets import Asked, judged_rates
from fastpipe.bench import tf
from fastpipe.bench.runner import Sample, Session
from fastpipe.bench.tf import Make, Spec
from fastpipe.bench.tf_datasets import SIDE, Setting, Table, batches_of, by_pillow, tensorflow
from fastpipe.console import Progress

__all__ = ["ASKED", "Bench", "run", "specs", "targets"]

_PILLOW = "× tf.py_function with Pillow"

ASKED = (
    Asked(f"boxes, {_PILLOW}", "crop-threads", "crop-replaced", 2),
    Asked("boxes, × TensorFlow's operations by hand", "crop-threads", "crop-hand", 1.25),
    Asked(f"boxes, kept in memory, {_PILLOW}", "crop-ram", "crop-replaced", 20),
    Asked(f"boxes, kept on disk, {_PILLOW}", "crop-disk", "crop-replaced", 8),
    Asked("folder, × image_dataset_from_directory", "folder-threads", "folder-replaced", 1.5),
)


def targets(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
    """
    return judged_rates(samples, ASKED)


def by_hand_antialiased(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, nearer to Pillow's pixels."""
    library = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = library.unstack(row["image"])
        image = library.io.decode_jpeg(library.io.read_file(row["file"]), channels=3)
        image = library.image.crop_to_bounding_box(image, top, left, bottom - top, right - left)
        return library.image.resize(image, (SIDE, SIDE), antialias=True), row["label"]

    return batches_of(table, sample, batch_size, is_shuffled)


def kept_by_tensorflow(in_file: bool) -> Make:
    """``Dataset.cache`` after Pillow, in memory or in a file."""
    return lambda setting, is_shuffled: by_pillow(
        setting.crops, setting.batch_size, is_shuffled=is_shuffled,
        kept=str(setting.scratch / "tf-cache") if in_file else "",
    )  # fmt: skip


def specs() -> list[Spec]:
    """The datasets that are measured with ``--peers``; a section's come together."""
    pillow, kept = "tf.py_function + Pillow", "float32, from the second epoch on"

    def antialiased(setting: Setting, *, is_shuffled: bool) -> Any:
        return by_hand_antialiased(setting.crops, setting.batch_size, is_shuffled=is_shuffled)

    more = [
        Spec("crop", "antialiased", "tf.io.decode_jpeg + crop + resize(antialias=True)", "peer",
             antialiased, "nearer to Pillow's pixels"),
        Spec("crop", "tf-ram", f"{pillow}, Dataset.cache()", "peer", kept_by_tensorflow(False), kept),
        Spec("crop", "tf-disk", f"{pillow}, Dataset.cache(file)", "peer", kept_by_tensorflow(True), kept),
    ]  # fmt: skip
    return sorted([*tf.specs(), *more], key=lambda spec: list(tf.SECTIONS).index(spec.section))


def run(args: Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for; return 1 when samples differ from what is replaced."""
    return tf.run(args, console, progress, WithPeers if args.peers else Bench)


class Bench(tf.Bench):
    """One run of the case, with the figures that were asked for."""

    program: ClassVar[str] = "python benchmarks/run.py"

    def studies(self, session: Session) -> dict[str, Any]:
        """Judge the figures that were asked for."""
        return {"targets": targets(session.samples)}


class WithPeers(Bench):
    """One run of the case, with everything."""

    @staticmethod
    def specs() -> list[Spec]:
        """Return the datasets that are measured."""
        return specs()
