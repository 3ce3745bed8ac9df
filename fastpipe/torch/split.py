"""``augment="auto"`` and ``"split"``: splitting a transform, and choosing where the second part runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from fastpipe.core.machine import default_threads
from fastpipe.core.pool import ThreadPool
from fastpipe.core.text import in_duration
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError, OptionError
from fastpipe.images.plan import Plan, compile_plan, shortened
from fastpipe.images.pointwise import Layout, of_kind, rows_of
from fastpipe.images.steps import flatten
from fastpipe.torch.randomness import run_keyed
from fastpipe.torch.source import Source, SplitError
from fastpipe.torch.threads import do_without_helpers, is_thread_safe

if TYPE_CHECKING:
    from fastpipe.augment.chains import ImageChain


class SampleSpec(NamedTuple):
    """The class, shape and dtype of samples that are tensors."""

    kind: type[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, tensor: torch.Tensor) -> list[Any]:
        return rows_of(tensor, self.kind)


@dataclass(frozen=True)
class Split:
    """A transform in two parts.

    Attributes:
        given: the arguments of ``split_of``, from which a copy is made.
        head: the first part as a plan (a compiled transform).  Its results are uint8 images.
        shape: the common shape of these images, (C, H, W).
        chain, rest: the second part twice: done by ``fastpipe.augment``, and as the user's own transforms.
        like: the class, shape and dtype of the resulting samples.
        example: an image of noise as input for ``rest``.
        values: the pixels of ``example``, uint8 (C, H, W).
        notes: a description of the first part, in lines.
    """

    given: tuple[Any, ...]
    head: Plan
    shape: tuple[int, ...]
    chain: ImageChain
    like: SampleSpec
    rest: tuple[Any, ...]
    example: Any
    values: torch.Tensor
    notes: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return split_of, self.given

    def describe(self, where: str) -> list[str]:
        return [*self.notes, *(f"{shortened(item)}  →  fastpipe.augment, {where}" for item in self.rest)]


def split_of(transform: Any, layout: Layout = "contiguous", decode_note: str = "") -> Split:
    """Split a transform into two parts.  The first part ends with the last step after which the decoding
    kernel can still make uint8 images of one size."""
    items = flatten(transform)
    plan = compile_plan(transform)
    if plan.output is not None:
        raise SplitError("all of the transform is in the decoding kernel")
    head, size, count, is_pil = _head(items, layout)
    rest = tuple(items[count:])

    from torchvision import transforms as v1

    from fastpipe import augment  # only needed here
    from fastpipe.augment.chains import ImageChain

    try:
        chain = ImageChain(augment.from_torchvision(rest).ops, "the rest of the transform")
        values = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8))
        example = v1.ToPILImage()(values) if is_pil else of_kind(values, head.kind)
        like = _like(rest, example)
        chain.checked(values[None])
    except AugmentError as error:
        raise SplitError(str(error)) from None
    shape, dtype = chain.form_after(values.shape, torch.uint8)
    if (like.shape, like.dtype) != (shape, dtype):
        raise SplitError(
            f"augmentations would make images of {dtype}, {shape}, and it makes {like.dtype}, {like.shape}"
        )
    notes = repr(compile_plan(v1.Compose(items[:count]), decode_note=decode_note)).splitlines()[1:-1]
    given = transform, layout, decode_note
    return Split(given, head, size, chain, like, rest, example, values, tuple(note.strip() for note in notes))


def _head(items: Sequence[Any], layout: Layout) -> tuple[Plan, tuple[int, ...], int, bool]:
    """Return four things: the plan of the first part, the shape of its images, its number of transforms, and
    whether the next transform receives PIL images."""
    from torchvision import transforms as v1

    for count in range(len(items), 0, -1):
        for ends in ([v1.PILToTensor()], []):
            head = compile_plan(v1.Compose([*items[:count], *ends]), layout=layout)
            if head.output is not None and head.output.dtype == "uint8":
                return head, head.output.shape, count, bool(ends)
    raise SplitError("its images have no single size before the first transform that is not part of decoding")


def _like(rest: Sequence[Any], example: Any) -> SampleSpec:
    if not is_thread_safe(rest):
        raise SplitError("fastpipe does not know all of its transforms")
    try:
        value = run_keyed(rest, example, 0)
    except Exception as error:  # the user's samples would raise the error as well
        raise SplitError(f"it fails on an image ({type(error).__name__}: {error})") from error
    if not isinstance(value, torch.Tensor):
        raise SplitError("it does not end in tensors")
    return SampleSpec(type(value), tuple(value.shape), value.dtype)


# ---- the choice --------------------------------------------------------------------------------------

Place = Literal["whole", "threads", "device"]

_MEASURE_S = 0.5
_MOST_ROUNDS = 200
_ROUNDS_THERE = 5
# A smaller gain does not justify other random numbers than torchvision's, and the risk of being slower.
_WORTH = 0.97
# If the device needs less than this share of the threads' time for the second part, the device does it from
# the start: a training step becomes only slightly slower.
_UNSEEN = 0.03

_log = logging.getLogger("fastpipe")


class Costs(NamedTuple):
    """Seconds per batch for the second part of a split transform.  ``whole`` is the time by torchvision,
    ``threads`` by fastpipe.augment in the decoding threads, and ``device`` on the device (None without a
    device)."""

    whole: float
    threads: float
    device: float | None = None

    def describe(self) -> str:
        there = "" if self.device is None else f", {in_duration(self.device)} on the device"
        return (
            f"what follows the split takes {in_duration(self.threads)} a batch by fastpipe.augment{there}, "
            f"{in_duration(self.whole)} by torchvision"
        )


class Placing:
    """Chooses where the second part of a split transform runs.  The choice depends on the measured costs.  If
    the device could do this part, the choice also depends on the measured times of epochs, because the
    training needs the same device."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._periods: dict[Place, float] = {}
        is_faster = costs.threads < _WORTH * costs.whole
        self._here: Place = "threads" if is_faster else "whole"
        least = min(costs.threads, costs.whole)
        is_unseen = costs.device is not None and costs.device < _UNSEEN * least
        self.place: Place = "device" if is_unseen else self._here

    def seen(self, period: float, waited: float) -> None:
        """Use the measurements of an epoch.  ``period`` is the number of seconds per batch, and ``waited`` is
        the number of seconds of waiting per batch."""
        if self.costs.device is None or len(self._periods) == 2:
            return
        self._periods[self.place] = period
        if len(self._periods) == 2:  # both places were measured: choose the faster place for all later epochs
            self.place = "device" if self._periods["device"] < self._periods[self._here] else self._here
        elif self.place != "device" and waited > self.costs.device:  # the device has enough idle time
            self.place = "device"


class SplitChoice:
    """Decides for a loader whether to split the transform, and where the second part runs.  The decision is
    made before the first batch, and again after the transform has changed."""

    def __init__(self, wanted: Any, device: Any) -> None:
        if wanted is not None and wanted not in ("auto", "split") and not callable(wanted):
            raise OptionError(f"augment= must be 'auto', 'split' or a function of batches, got {wanted!r}")
        self._wanted = wanted if isinstance(wanted, str) else None
        self._function = wanted if callable(wanted) else None
        self._device = device
        self._known: tuple[object, Split | SplitError, Placing | None] | None = None

    def use(self, source: Source | None, batch_size: int, is_plain: bool) -> tuple[Split | None, bool]:
        """Apply the decision to ``source``.  Return the split transform (None if it is not split), and
        whether the device does the second part."""
        if self._wanted is None:
            return None, False
        split, placing = self._choice(source, batch_size, is_plain)
        if isinstance(split, SplitError):
            if self._wanted == "split":
                raise OptionError(f"augment='split': {split}. augment='auto' splits where it can")
            return None, False
        place = self._place(placing)
        if place == "whole":
            return None, False
        assert source is not None
        source.by_split = split
        return split, place == "device"

    def note(self) -> list[str]:
        if self._function is not None:
            return [f"augment: {shortened(self._function)}, of batches in the loop's thread"]
        if self._wanted is None or self._known is None:
            return []
        _, split, placing = self._known
        if isinstance(split, SplitError):
            return [f"augment={self._wanted!r}: the transform is not split: {split}"]
        is_split = "is not split" if self._place(placing) == "whole" else "is split"
        costs = "" if placing is None else f": {placing.costs.describe()}"
        return [f"augment={self._wanted!r}: the transform {is_split}{costs}"]

    def seen(self, period: float, waited: float) -> None:
        if self._known is not None and self._known[2] is not None:
            self._known[2].seen(period, waited)

    def _place(self, placing: Placing | None) -> Place:
        if placing is not None:
            return placing.place
        return "threads" if self._device is None or self._device.type == "cpu" else "device"

    def _choice(
        self, source: Source | None, batch_size: int, is_plain: bool
    ) -> tuple[Split | SplitError, Placing | None]:
        state = None if source is None else source.transform_state()
        if self._known is None or self._known[0] != state:
            split = _split(source, is_plain)
            placing = None
            if self._wanted == "auto" and not isinstance(split, SplitError):
                placing = Placing(measured(split, batch_size, self._device))
            self._known = state, split, placing
            for line in self.note():
                _log.info("%s", line)
        return self._known[1:]


def _split(source: Source | None, is_plain: bool) -> Split | SplitError:
    if source is None:
        return SplitError("fastpipe does not make the batches of this dataset")
    if not is_plain:
        return SplitError("samples are not collated by torch's default_collate")
    try:
        split: Split = source.split()
        return split
    except SplitError as error:
        why = str(error)
    return SplitError(why)  # a new error, because it is stored and must not keep the original error's frames


# ---- measuring -----------------------------------------------------------------------------------


def measured(split: Split, batch_size: int, device: Any) -> Costs:
    """Measure, for about half a second, how long the second part of a ``Split`` takes on an image of noise:
    as the user's own transforms, and as ``fastpipe.augment`` does it, also on the device if there is one."""
    threads = default_threads()
    rows = torch.empty((threads, *split.like.shape), dtype=split.like.dtype)
    key = Key(0, 0, np.arange(threads))
    change, values = split.chain.native_batch((threads, *split.shape), key, rows).change, split.values.numpy()

    def whole(number: int) -> None:
        run_keyed(split.rest, split.example, number)

    def augmented(number: int) -> None:
        change(number % threads, values)

    pool = ThreadPool(threads, "fastpipe-measure", do_without_helpers)  # like the decoding threads
    try:
        each = _seconds([whole, augmented], pool, threads)
    finally:
        pool.close()
    there = None if device is None or device.type == "cpu" else _seconds_there(split, batch_size, device)
    return Costs(batch_size * each[0], batch_size * each[1], there)


def _seconds(tasks: Sequence[Callable[[int], None]], pool: ThreadPool, threads: int) -> list[float]:
    """Return the seconds of each task while all threads run it, as medians of alternating rounds."""
    rounds: list[list[float]] = [[] for _ in tasks]
    start = perf_counter()
    while len(rounds[0]) < 2 or (len(rounds[0]) < _MOST_ROUNDS and perf_counter() - start < _MEASURE_S):
        for found, task in zip(rounds, tasks, strict=True):
            begun = perf_counter()
            pool.submit(task, threads).wait()
            found.append((perf_counter() - begun) / threads)
    return [median(found[1:]) for found in rounds]  # the first calls warm up


def _seconds_there(split: Split, batch_size: int, device: torch.device) -> float:
    images = split.values.to(device).expand(batch_size, *split.shape).contiguous()
    found, key = [], Key(0, 0, np.arange(batch_size))
    for _ in range(2 + _ROUNDS_THERE):  # the first two warm up
        _wait_for(device)
        start = perf_counter()
        split.chain(images, (), None, key)
        _wait_for(device)
        found.append(perf_counter() - start)
    return median(found[2:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
