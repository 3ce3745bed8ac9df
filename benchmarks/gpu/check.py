"""Before anything is timed: are the pixels of each of fastpipe's decoders those of Pillow?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar

from fastpipe.bench.data import Photos, listed
from fastpipe.bench.images import LoaderSpec, build, check_transform, make_dataset
from fastpipe.bench.runner import Contender, ContenderError
from fastpipe.core.extras import require

# ---- Rows that leave when they fail -----------------------------------------------------------------

_T = TypeVar("_T")


def guarded(make: Callable[[], _T]) -> Callable[[], _T]:
    """A function whose errors are those of a `Contender` that cannot go on.

    Drivers, memory and decoders of a machine that nobody knows fail in ways that nobody knows: whatever it
    is, the figures of the other rows are to stay.

    Args:
        make: the function.
    """

    def call() -> _T:
        try:
            return make()
        except ContenderError:
            raise
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "no message")
            raise ContenderError(f"{type(error).__name__}: {first}") from error

    return call


def apart(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a process of its own, which may crash without taking this one along.

    Args:
        function: of a module.
        arguments: that can be pickled, as what it returns can.

    Raises:
        ContenderError: the process has ended before it returned.
        Exception: what the function raised.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ContenderError("the process in which it was tried has crashed") from None


class Guarded(Contender):
    """A `Contender` that leaves the run when it fails, whatever with.

    Args:
        row: which.
    """

    def __init__(self, row: Contender) -> None:
        self.row = row
        self.key, self.chunk, self.workers = row.key, row.chunk, row.workers

    def measure(self, count: int) -> float:
        """Handle so many samples; return the seconds it took."""
        return guarded(lambda: self.row.measure(count))()

    def close(self) -> None:
        """End every thread and process."""
        self.row.close()


# ----------------------------------------------------------------------------------------------------
# Before anything is timed: are the pixels of each of fastpipe's decoders those of Pillow?

# Of 255, on average: a GPU's decoder rounds in other places.  The processor's are Pillow's to the last bit.
MOST_APART = 0.5

# Where fastpipe says who decodes on a device, or why nobody does.
_LOG = logging.getLogger("fastpipe.torch")


@dataclass
class PixelCheck:
    """The comparison of the decoders' batches with those of torchvision's ``ImageFolder``.

    Attributes:
        photos: how many were compared, for each decoder.
        apart: of each row that was compared, by its key: ``label``, and of 255 the ``mean`` and the
            ``largest`` difference of its values.
        problems: of each row that is not what it should be, what is wrong.
    """

    photos: int = 0
    apart: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return True if nothing is wrong."""
        return not self.problems

    def add(self, spec: LoaderSpec, differences: Sequence[Any]) -> None:
        """Take a row into account.

        Args:
            spec: which.
            differences: of each batch, how far its values are from what they should be.
        """
        count = sum(one.numel() for one in differences)
        mean = sum(float(one.sum()) for one in differences) / count
        largest = max(float(one.max()) for one in differences)
        self.apart[spec.key] = {"label": spec.label, "mean": round(mean, 4), "largest": largest}
        most = 0.0 if spec.decode.backend == "auto" else MOST_APART
        if not mean <= most:
            self.problems[spec.key] = f"pixels are {mean:.3g} of 255 apart on average, at most {most:g} asked"

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            told = (f"{key}: {problem}" for key, problem in self.problems.items())
            return f"decoders differ from Pillow's: {'; '.join(told)}"
        words = ", ".join(
            f"{one['label']} {one['mean']:g} of 255 on average, {one['largest']:g} at most"
            for one in self.apart.values()
        )
        return f"pixels of {self.photos} photos, how far from Pillow's: {words}; labels are the same"

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        told = {"photos": self.photos, "most_apart": MOST_APART, "apart": self.apart}
        problems = [f"{key}: {problem}" for key, problem in self.problems.items()]
        return {**told, "problems": problems, "ok": self.ok, "text": self.sentence()}


def check_pixels(
    specs: Sequence[LoaderSpec],
    photos: Photos,
    count: int,
    batch_size: int,
    say: Callable[[str], None] = lambda text: None,
) -> PixelCheck:
    """Compare what fastpipe's rows decode with torchvision's samples, without random augmentation.

    Args:
        specs: the rows.
        photos: what is decoded.
        count: how many photos, spread over all.
        batch_size: images in a batch.
        say: told what is compared.
    """
    torch = require("torch", extra="torch")
    count = min(count, len(photos.indices))
    chosen = [photos.indices[at * len(photos.indices) // count] for at in range(count)]
    say("comparing pixels: Pillow's")
    dataset = listed(photos.folder, check_transform())
    parts = [chosen[first : first + batch_size] for first in range(0, count, batch_size)]
    wanted = [[dataset[index] for index in part] for part in parts]
    images = [torch.stack([image for image, _ in part]).float() for part in wanted]
    labels = [[label for _, label in part] for part in wanted]
    check = PixelCheck(count)
    for spec in specs:
        say(f"comparing pixels: {spec.label}")
        try:
            found = guarded(lambda spec=spec: _tried(spec, photos, chosen, batch_size))()  # type: ignore[misc]
        except ContenderError as error:
            check.problems[spec.key] = str(error)
            continue
        if [made.tolist() for _, made in found] != labels:
            check.problems[spec.key] = "labels or order differ"
            continue
        pairs = zip(found, images, strict=True)
        check.add(spec, [(torch.from_numpy(made).float() - right).abs() for (made, _), right in pairs])
    return check


def _tried(spec: LoaderSpec, photos: Photos, chosen: Sequence[int], size: int) -> list[tuple[Any, Any]]:
    """The batches of a row; a GPU's decoder is tried where a crash of its does no harm."""
    if spec.decode.backend != "auto" and spec.device == "cuda":
        return apart(_decoded, spec, photos, chosen, size)
    return _decoded(spec, photos, chosen, size)


def _decoded(spec: LoaderSpec, photos: Photos, chosen: Sequence[int], size: int) -> list[tuple[Any, Any]]:
    """The batches of a row, as arrays; an error where another decoder than its own makes them."""
    dataset = make_dataset(spec, photos.folder, check_transform())
    with _heard() as said:
        loader = build(spec, dataset, size, list(chosen))
        found = [tuple(part.cpu().numpy() for part in batch) for batch in loader]
    there = f"images are decoded on {spec.device}"
    here = [text for text in said if text.startswith("images are decoded on the CPU")]
    if spec.decode.backend != "auto" and (here or not any(text.startswith(there) for text in said)):
        raise ContenderError(next(iter(here), "images are not decoded on the GPU"))
    return [(images, labels) for images, labels in found]


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Return fastpipe's log messages about decoding on a device."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("images are decoded"):
                said.append(text)

    listener, level = Listener(), _LOG.level
    _LOG.addHandler(listener)
    _LOG.setLevel(logging.INFO)
    try:
        yield said
    finally:
        _LOG.setLevel(level)
        _LOG.removeHandler(listener)
