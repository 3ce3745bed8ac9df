"""Compare the outputs of loaders before all measurements.

The fast loader must return the same output as the loader that it replaces.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

# The attributes of an ImageFolder that determine its samples and their order.
INDEX = ("classes", "class_to_idx", "samples", "targets")

# Resampling in other arithmetic may change values by one level of 255.  If a larger share of the values
# differs by two levels, the cause is systematic.
MOST_SHARE_OF_TWO = 1e-4

MOST_NAMED = 5

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True)
class Differing:
    """A sample of a dataset that differs from the expected sample."""

    index: int
    path: str
    largest: float | None  # largest difference; infinite if a value is NaN, None without a comparison
    note: str = ""  # the reason why the samples cannot be compared

    @property
    def badness(self) -> float:
        return math.inf if self.largest is None else self.largest


class Outcome(ABC):
    """The result of a comparison of outputs, with the problems that were found."""

    problems: tuple[str, ...]  # descriptions of errors
    whose: str  # text for the reference, such as "torchvision's"
    told: ClassVar[tuple[str, ...]]  # names of the fields for the JSON file

    @property
    def ok(self) -> bool:
        return not self.problems

    def sentence(self) -> str:
        return (
            self.agreement() if self.ok else f"outputs differ from {self.whose}: {'; '.join(self.problems)}"
        )

    @abstractmethod
    def agreement(self) -> str:
        """Return a sentence about the comparison, for the case that there are no problems."""

    def as_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in self.told}
        return {**figures, "problems": list(self.problems), "ok": self.ok, "text": self.sentence()}


@dataclass
class Compared(Outcome):
    """Counts the numbers that were compared one by one, and those that differ."""

    values: int = 0
    differing: int = 0
    over_one: int = 0  # number of values that differ by more than 1; for uint8, by more than 1 of 255
    largest: float = 0  # largest difference

    def count(self, expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
        """Compare arrays of the same shape and count their values; return their largest difference."""
        self.values += expected.size
        if np.array_equal(expected, got):
            return 0
        gap = _gap(expected, got)
        self.differing += int(np.count_nonzero(gap))
        self.over_one += int(np.count_nonzero(gap > 1))
        largest: float = gap.max().item()
        self.largest = max(self.largest, largest)
        return largest


@dataclass
class Check(Compared):
    """Compares two loaders' outputs for the same photos."""

    whose = "torchvision's"
    told: ClassVar[tuple[str, ...]] = ("photos", "values", "differing", "over_one", "largest")

    photos: int = 0
    photos_differing: int = 0
    worst: list[Differing] = field(default_factory=list)  # in order of difference, the largest first
    bytes_only: bool = True  # True if all values are uint8, so that differences are levels of 255
    problems: tuple[str, ...] = ()

    def add(self, pairs: Iterable[Arrays], index: int, path: str) -> None:
        self.photos += 1
        largest: float = 0
        for expected, got in pairs:
            self.bytes_only = self.bytes_only and expected.dtype == np.uint8
            largest = max(largest, self.count(expected, got))
        if largest > 0:
            self._name(Differing(index, path, largest))

    def add_unlike(self, note: str, index: int, path: str) -> None:
        """Count a photo whose values cannot be compared; ``note`` says why."""
        self.photos += 1
        self._name(Differing(index, path, None, note))

    def judge(self) -> None:
        """Add a problem if pixels differ by more than the tolerance."""
        if self.largest > 2:
            where = f", most in {self.worst[0].path!r}" if self.worst[0].path else ""
            self.problems += (f"pixels differ by up to {self.largest} of 255{where}",)
        elif self.over_one > MOST_SHARE_OF_TWO * self.values:
            share = self.over_one / self.values
            self.problems += (f"{share:.3%} of the pixel values differ by 2 of 255",)

    def agreement(self) -> str:
        equal = 1 - self.differing / self.values
        return (
            f"outputs agree with torchvision's on {self.photos:,} photos: largest difference {self.largest}"
            f" of 255, {equal:.4%} of the values equal, {self.over_one / self.values:.5%} off by more than 1;"
            " labels and order identical"
        )

    def _name(self, sample: Differing) -> None:
        """Count a photo whose values differ, and keep it if its difference is one of the largest."""
        self.photos_differing += 1
        self.worst = sorted([*self.worst, sample], key=lambda one: -one.badness)[:MOST_NAMED]


def _gap(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distance of each pair of numbers; infinite if only one number of the pair is NaN."""
    if expected.dtype.kind == "u":  # compute in this dtype to save memory, because photographs are large
        unsigned: npt.NDArray[Any] = np.maximum(expected, got) - np.minimum(expected, got)
        return unsigned
    wide = np.promote_types(expected.dtype, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(expected.astype(wide) - got.astype(wide))
    same = (expected == got) | ((expected != expected) & (got != got))
    # Different integers above 2**53 may be equal in float64: their distance must not be 0.
    return np.where(same, 0.0, np.where(np.isnan(gap), np.inf, np.maximum(gap, np.finfo(np.float64).tiny)))


def index_problems(expected: Any, got: Any) -> dict[str, str]:
    """Return a sentence for each attribute in which a ``FastImageFolder`` differs from an ``ImageFolder``."""
    return {
        name: f"FastImageFolder.{name} is not that of ImageFolder: {_first_difference(*pair)}"
        for name in INDEX
        if (pair := (getattr(expected, name), getattr(got, name)))[0] != pair[1]
    }


def _first_difference(expected: Any, got: Any) -> str:
    left, right = (list(side.items() if isinstance(side, dict) else side) for side in (expected, got))
    for position, (wanted, found) in enumerate(zip(left, right, strict=False)):
        if wanted != found:
            return f"entry {position} is {found!r}, expected {wanted!r}"
    return f"{len(right):,} entries, expected {len(left):,}"


def compare(
    expected: Any,
    got: Any,
    on_batch: Callable[[int], None] = lambda images: None,
    photos: Sequence[tuple[int, str]] = (),
) -> Check:
    """Compare two loaders' batches of ``(uint8 tensor (N, C, H, W), int64 labels (N,))``.

    ``photos`` has the index and the path of each photo.
    """
    check = Check()
    wrong: list[str] = []
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        images, labels = left
        other_images, other_labels = right
        if images.dtype != other_images.dtype or images.shape != other_images.shape:
            seen = f"{other_images.dtype} {tuple(other_images.shape)}"
            wrong.append(f"batch {number} is {seen}, expected {images.dtype} {tuple(images.shape)}")
            break
        if labels.dtype != other_labels.dtype or not bool((labels == other_labels).all()):
            wrong.append(f"labels of batch {number} differ")
        for pair in zip(images.numpy(), other_images.numpy(), strict=True):
            index, path = photos[check.photos] if photos else (check.photos, "")
            check.add([pair], index, path)
        on_batch(check.photos)
    check.problems = tuple(wrong)
    check.judge()
    return check


@dataclass
class RowCheck(Outcome):
    """Compares epochs of loaders with the samples that another library, such as h5py, reads."""

    told: ClassVar[tuple[str, ...]] = ("epochs", "samples")

    whose: str = "h5py's"
    epochs: int = 0
    samples: int = 0
    problems: tuple[str, ...] = ()

    def agreement(self) -> str:
        return (
            f"{self.samples:,} samples in {self.epochs} epochs equal {self.whose} bit for bit, labels too,"
            " and each sample comes once in an epoch"
        )

    def add(self, what: str, expected: Counter[bytes], batches: Iterable[Any]) -> None:
        found: Counter[bytes] = Counter()
        for batch in batches:
            values, labels = batch if isinstance(batch, (list, tuple)) else (batch, None)
            found.update(digests_of_samples(values.numpy(), None if labels is None else labels.numpy()))
        self.add_epoch(what, expected, found)

    def add_epoch(
        self, what: str, expected: Counter[bytes], found: Counter[bytes], strange: str = "are not in the file"
    ) -> None:
        self.epochs, self.samples = self.epochs + 1, self.samples + found.total()
        more, missing = (found - expected).total(), (expected - found).total()
        if more or missing:
            text = f"{what}: {more} samples {strange} or come too often, {missing} do not come"
            self.problems += (text,)


def digests_of_samples(*parts: Any) -> Iterator[bytes]:
    """Yield a digest for each sample of a batch.

    ``parts`` are the arrays of the batch, such as values and labels; a part may be None.  The digest covers
    the sample in all parts.  If a part has one integer for each sample (labels), its dtype does not count.
    """
    arrays = [
        np.ascontiguousarray(part, np.int64 if part.ndim == 1 and part.dtype.kind in "iu" else None)
        for part in parts
        if part is not None
    ]
    for sample in zip(*arrays, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for part in sample:
            digest.update(np.ascontiguousarray(part).data)
        yield digest.digest()
