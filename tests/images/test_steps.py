"""Steps: what is recognised, when a plan is stale, and parameters that act as torchvision's."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe.core.types import Size
from fastpipe.images.pixels import fold
from fastpipe.images.steps import (
    flatten,
    is_pristine,
    random_resized_crop_box,
    recognise,
    state_of,
)

BOTH = pytest.mark.parametrize("tv", [v1, v2], ids=["v1", "v2"])


def picture(height: int, width: int, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


KNOWN: list[Callable[[Any], Any]] = [
    lambda tv: tv.RandomResizedCrop(8), lambda tv: tv.Resize(8), lambda tv: tv.CenterCrop(8), lambda tv: tv.RandomCrop(8),
    lambda tv: tv.RandomHorizontalFlip(), lambda tv: tv.RandomVerticalFlip(), lambda tv: tv.Grayscale(),
    lambda tv: tv.PILToTensor(), lambda tv: tv.ConvertImageDtype(torch.float32), lambda tv: tv.Normalize([0.5], [0.5]),
]  # fmt: skip
UNKNOWN = [
    len, lambda image: image, v1.ColorJitter(0.1), v1.Pad(2), v1.RandomRotation(3), v2.RandomInvert(),
    v1.Lambda(len), nn.Identity(), v1.RandomApply([v1.Resize(4)]), v1.RandomErasing(), v2.AutoAugment(),
    v2.RandomCrop(8, padding=2, fill={Image.Image: 9, "others": 4}),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("make", KNOWN)
def test_known_transforms_are_recognised_by_exact_class(tv: Any, make: Callable[[Any], Any]) -> None:
    transform = make(tv)
    step = recognise(transform)
    assert step is not None and step.transform is transform and step.name == type(transform).__name__
    twin = copy.copy(transform)
    twin.__class__ = type(type(transform).__name__, (type(transform),), {})
    assert recognise(twin) is None
    twin.__class__.__module__ = "script"
    assert recognise(twin) is None


def test_what_is_unknown_or_has_a_hook_or_method_of_its_own_is_not_recognised() -> None:
    known = v2.ToImage(), v2.ToPureTensor(), v2.ToDtype(torch.float32, scale=True), v2.RGB(), v1.ToTensor()
    assert all(recognise(transform) is not None for transform in known)
    assert not any(recognise(transform) for transform in UNKNOWN)
    hooked = v2.CenterCrop(4)
    handle = hooked.register_forward_hook(lambda module, given_images, output: output)
    assert recognise(hooked) is None
    handle.remove()
    assert recognise(hooked) is not None
    transform, drawing = v1.RandomCrop(4), v1.RandomResizedCrop(4)
    transform.forward = lambda image: image
    drawing.get_params = lambda image, scale, ratio: (0, 0, 1, 1)
    assert recognise(transform) is recognise(drawing) is None


@pytest.mark.parametrize("kind", [v1.RandomResizedCrop, v2.RandomResizedCrop])
def test_a_method_replaced_on_the_class_is_not_recognised(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = kind(4)
    name = "get_params" if kind is v1.RandomResizedCrop else "make_params"
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, staticmethod(lambda *given: (0, 0, 1, 1)))
        assert recognise(transform) is None
        assert not is_pristine(kind(5))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda self, *given: self.forward(*given))  # as profilers do
        assert recognise(transform) is not None


def test_containers_are_flattened_by_exact_class() -> None:
    class Mine(v1.Compose):  # type: ignore[misc]
        """May do anything with its transforms."""

    a, b, c, d = v1.Resize(4), v1.CenterCrop(4), v2.Resize(4), len
    mine = Mine([a, b])
    assert [flatten(one) for one in (None, a, len, v1.Compose([]), mine)] == [[], [a], [len], [], [mine]]
    assert flatten(v1.Compose([a, v1.Compose([b]), nn.Sequential(c, v2.Compose([a])), d])) == [a, b, c, a, d]


def set_to(**values: Any) -> Callable[[Any], None]:
    return lambda transform: transform.__dict__.update(values)


@BOTH
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda tv: tv.RandomResizedCrop(8), set_to(size=(9, 9))),
        (lambda tv: tv.RandomResizedCrop(8), set_to(scale=(0.5, 1.0))),
        (lambda tv: tv.RandomResizedCrop(8), set_to(ratio=(1.0, 1.0))),
        (lambda tv: tv.RandomResizedCrop(8), set_to(interpolation=v1.InterpolationMode.BICUBIC)),
        (lambda tv: tv.RandomHorizontalFlip(), set_to(p=0.25)),
        (lambda tv: tv.Resize(8), set_to(max_size=12)),
        (lambda tv: tv.RandomCrop(8), set_to(fill=3)),
        (lambda tv: tv.RandomCrop(8), set_to(pad_if_needed=True)),
        (lambda tv: tv.Normalize([0.5], [0.5]), set_to(mean=[0.25])),
        (lambda tv: tv.Normalize([0.5], [0.5]), set_to(forward=len)),
        (lambda tv: tv.Normalize([0.5], [0.5]), lambda t: t.std.__setitem__(0, 0.25)),
        (lambda tv: tv.Normalize(torch.tensor([0.5]), [0.5]), lambda t: t.mean.__setitem__(0, 0.5000001)),
        (lambda tv: tv.Normalize(np.full(3000, 0.5), [0.5]), lambda t: t.mean.__setitem__(1500, 0.25)),
    ],
)
def test_states_follow_changes(tv: Any, make: Callable[[Any], Any], change: Callable[[Any], None]) -> None:
    transform = make(tv)
    before = state_of(transform)
    assert state_of(transform) == before
    change(transform)
    assert state_of(transform) != before


def test_the_state_is_that_of_one_object() -> None:
    one, other = v1.Resize(8), v1.Resize(8)
    assert state_of(one) != state_of(other)
    assert state_of(len) != state_of(abs)
    transform = v2.RandomCrop(8)
    before = state_of(transform)
    transform(picture(9, 9))
    transform.eval()
    assert state_of(transform) == before, "a call or eval() changes nothing"


class Drawn:
    """Use given uniform numbers instead of those of ``torch.randint`` and ``torch.empty(1).uniform_``."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = iter(numbers)

    def randint(self, low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, low + int(next(self.numbers) * (high - low)), dtype=torch.int64)

    def empty(self, size: int) -> Drawn:
        assert size == 1
        return self

    def uniform_(self, low: Any, high: Any) -> torch.Tensor:
        low, high = float(low), float(high)
        return torch.tensor([low + next(self.numbers) * (high - low)], dtype=torch.float64)


def run_random_crop(transform: Any, image: Any, u: tuple[float, float]) -> Any:
    """The transform itself, drawing its two positions from ``u``."""
    if isinstance(transform, v2.RandomCrop):
        real = type(transform).make_params

        def make_params(flat_inputs: list[Any]) -> dict[str, Any]:
            made: dict[str, Any] = real(transform, flat_inputs)
            left, top, right, bottom = made["padding"]
            height = image.height + top + bottom - made["height"] + 1
            width = image.width + left + right - made["width"] + 1
            return {**made, "top": int(u[0] * height), "left": int(u[1] * width)}

        twin = copy.copy(transform)
        twin.make_params = make_params
        return twin(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", Drawn(u).randint)
        return transform(image)


PADDINGS: list[Any] = [None, 0, 3, [4], (2, 5), (1, 2, 3, 4), [0, 7, 0, 0]]
FILLS: list[Any] = [0, 77, (10, 20, 200), [1, 2, 3]]


@BOTH
@pytest.mark.parametrize("needed", [False, True], ids=["", "pad_if_needed"])
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_a_random_crop_is_torchvisions(tv: Any, needed: bool, mode: str) -> None:
    sizes = [(20, 30), (12, 16)] if not needed else [(20, 30), (11, 30), (30, 9), (10, 12)]
    fills = FILLS if mode == "constant" else [0]
    for (height, width), fill, padding in itertools.product(sizes, fills, PADDINGS):
        transform = tv.RandomCrop((12, 16), padding, needed, fill, mode)
        step = recognise(transform)
        assert step is not None and step.draws == 2
        image = picture(height, width)
        for u in ((0.0, 0.0), (0.3, 0.8), (0.999999, 0.5)):
            expected = run_random_crop(transform, image, u)
            made = step.reference(image, u)
            assert made.size == expected.size
            assert made.tobytes() == expected.tobytes(), (height, width, fill, padding, u)


@BOTH
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("size", [(11, 30), (30, 15), (3, 3)])
def test_a_too_small_image_is_torchvisions_error(tv: Any, size: tuple[int, int], padding: Any) -> None:
    transform = tv.RandomCrop((18, 20), padding)
    image, step = picture(*size), recognise(transform)
    with pytest.raises(ValueError) as theirs:
        transform(image)
    with pytest.raises(ValueError) as ours:
        step.reference(image, (0.5, 0.5))  # type: ignore[union-attr]
    assert type(ours.value) is type(theirs.value)
    assert "larger than" in str(ours.value) and "(18, 20)" in str(ours.value)
    described = step.described("pil")  # type: ignore[union-attr, misc]
    assert described is None or fold([described], Size(*size), (0.5, 0.5)) is None


def box_by_torchvision(transform: Any, image: Any, u: list[float]) -> tuple[int, int, int, int]:
    """torchvision's own choice of a box, drawing from ``u``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", Drawn(u[:20]).empty)
        patch.setattr(torch, "randint", Drawn(u[20:]).randint)
        if isinstance(transform, v2.RandomResizedCrop):
            made = transform.make_params([image])
            return made["top"], made["left"], made["height"], made["width"]
        return tuple(transform.get_params(image, transform.scale, transform.ratio))


RANGES = st.tuples(st.floats(0.05, 4), st.floats(0.05, 4)).map(sorted)


@BOTH
@settings(max_examples=100)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)), scale=st.just([0.08, 1.0]) | RANGES,
    ratio=st.just([3 / 4, 4 / 3]) | RANGES,
    u=st.lists(st.integers(0, 2**20 - 1).map(lambda n: n / 2**20), min_size=22, max_size=22),
)  # fmt: skip
def test_the_box_of_a_random_resized_crop_is_torchvisions(
    tv: Any, shape: tuple[int, int], scale: list[float], ratio: list[float], u: list[float]
) -> None:
    transform = tv.RandomResizedCrop(8, tuple(scale), tuple(ratio))
    expected = box_by_torchvision(transform, picture(*shape), u)
    made = random_resized_crop_box(Size(*shape), scale, ratio, u)
    if tuple(made) != expected:
        # torchvision's logarithm is single precision: a side exactly between two pixels may
        # be rounded to the other one, and the position with it.
        nudges = itertools.product((1 - 1e-6, 1, 1 + 1e-6), repeat=2)
        nudged = [[side * nudge for side, nudge in zip(ratio, both, strict=True)] for both in nudges]
        assert expected in [tuple(random_resized_crop_box(Size(*shape), scale, one, u)) for one in nudged]


@BOTH
def test_odd_random_resized_crops_are_torchvisions(tv: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upside_down = tv.RandomResizedCrop(8, (1.0, 0.2), (2.0, 0.5))
    falls_back = tv.RandomResizedCrop(8, scale=(2.0, 3.0))  # to the centre
    rng = np.random.default_rng(0)
    cases = [(upside_down, (60, 70), rng.random(22).tolist()) for _ in range(20)]
    shapes = (10, 300), (300, 10), (1, 1), (2, 1), (40, 50)
    cases += [(falls_back, shape, [0.999999, 0.5] * 11) for shape in shapes]
    for transform, shape, u in cases:
        expected = box_by_torchvision(transform, picture(*shape), u)
        assert tuple(random_resized_crop_box(Size(*shape), transform.scale, transform.ratio, u)) == expected
