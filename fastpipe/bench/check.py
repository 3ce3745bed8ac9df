"""Before anything is timed: does the fast loader give what the replaced one gives?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fastpipe._extras import require
from fastpipe.bench.data import Photos
from fastpipe.bench.loaders import LoaderSpec, build, check_transform, make_dataset

__all__ = ["Check", "compare", "run_check"]

# A level of 255 is what resampling in other arithmetic may differ by; two levels only
# in so few values that it cannot be anything systematic.
MOST_SHARE_OF_TWO = 1e-4


@dataclass
class Check:
    """How two loaders' uint8 outputs over the same photos compare.

    Attributes:
        photos: how many photos were compared.
        values: how many numbers (pixels × channels).
        differing: how many of them differ.
        over_one: how many differ by more than 1 of 255.
        largest: the largest difference, of 255.
        problems: what is wrong beyond the tolerance; empty when all is well.
    """

    photos: int = 0
    values: int = 0
    differing: int = 0
    over_one: int = 0
    largest: int = 0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return not self.problems

    def add(self, expected: Any, got: Any) -> None:
        """Take one batch of uint8 tensors of equal shape into account."""
        gap = (expected.short() - got.short()).abs()
        self.photos += len(expected)
        self.values += gap.numel()
        self.differing += int((gap > 0).sum())
        self.over_one += int((gap > 1).sum())
        self.largest = max(self.largest, int(gap.max()))

    def judge(self) -> None:
        """Say what of the pixels is beyond the tolerance."""
        if self.largest > 2:
            self.problems += (f"pixels differ by up to {self.largest} of 255",)
        elif self.over_one > MOST_SHARE_OF_TWO * self.values:
            share = self.over_one / self.values
            self.problems += (f"{share:.3%} of the pixel values differ by 2 of 255",)

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return f"outputs differ from torchvision's: {'; '.join(self.problems)}"
        equal = 1 - self.differing / self.values
        return (
            f"outputs agree with torchvision's on {self.photos:,} photos: largest difference {self.largest}"
            f" of 255, {equal:.4%} of the values equal, {self.over_one / self.values:.5%} off by more than 1;"
            " labels and order identical"
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        return {**asdict(self), "problems": list(self.problems), "ok": self.ok}


def compare(expected: Any, got: Any, on_batch: Callable[[int], None] = lambda images: None) -> Check:
    """Compare two loaders' batches of ``(uint8 tensor (N, C, H, W), int64 labels (N,))``.

    Args:
        expected: the replaced loader.
        got: the one to check.
        on_batch: called with the number of photos of each batch.
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
        check.add(images, other_images)
        on_batch(len(labels))
    check.problems = tuple(wrong)
    check.judge()
    return check


def run_check(photos: Photos, workers: int, on_batch: Callable[[int], None]) -> Check:
    """Compare ``FastImageFolder`` + ``FastLoader`` with torchvision's and torch's.

    Args:
        photos: the photos to go through, in order.
        workers: worker processes for the replaced loader.
        on_batch: called with the number of photos of each batch.
    """
    loaders = []
    datasets = []
    for group, count in (("replaced", workers), ("fastpipe", 0)):
        spec = LoaderSpec("check", "check", group, count)  # type: ignore[arg-type]
        dataset = make_dataset(group, photos.folder, check_transform())
        datasets.append(dataset)
        loaders.append(build(spec, dataset, 32, list(photos.indices)))
    for name in ("classes", "class_to_idx", "samples", "targets"):
        if getattr(datasets[0], name) != getattr(datasets[1], name):
            return Check(problems=(f"FastImageFolder.{name} is not that of ImageFolder",))
    torch = require("torch", extra="torch")
    with torch.no_grad():
        return compare(loaders[0], loaders[1], on_batch)
