"""Before anything is timed: are the samples those of the replaced datasets, each once in an epoch?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.bench.samples import RowCheck
from fastpipe.bench.tf.data import Setting
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.bench.tf.rows import EpochRow, Spec, specs

__all__ = ["SampleCheck", "check_rows"]

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
        """Compare a batch.

        Args:
            what: whose.
            wanted: what it should be: arrays by name.
            found: what it is.
            most_apart: how far two values of images may be apart; all others are to be the same.
        """
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

    Args:
        setting: what datasets are made of.
        rows: the rows; of those whose values are others than the replaced dataset's, none is compared.
        say: told what is compared.
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
