"""Random chains of torchvision's transforms, of those that a plan knows."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

EDGE = st.integers(1, 40)
SIZE = EDGE | st.tuples(EDGE, EDGE)
MODES = st.sampled_from(list(InterpolationMode))
ANTIALIAS = st.sampled_from([True, False, None])
FILL = st.integers(0, 255) | st.tuples(*[st.integers(0, 255)] * 3) | st.just(None)
CHANCE = st.sampled_from([0.0, 0.5, 1.0])
RANGE = st.sampled_from([(0.08, 1.0), (0.5, 0.9), (1.0, 1.0), (1.5, 3.0)])
RATIO = st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.2, 0.4), (2.0, 5.0)])
PADDING = st.sampled_from([None, 0, 3, (2, 4), (1, 2, 3, 4)])
PADDING_MODE = st.sampled_from(["constant"] * 4 + ["edge", "reflect", "symmetric"])
DTYPE = st.sampled_from([torch.float32] * 3 + [torch.float16, torch.bfloat16, torch.uint8, torch.float64,
                                               torch.int16, torch.int8, torch.int64])  # fmt: skip
MEAN = st.sampled_from([[0.485, 0.456, 0.406], [0.5, 0.5, 0.5], [0.0, 0.1, 123.0], [0.5]])
STD = st.sampled_from([[0.229, 0.224, 0.225], [0.5, 0.5, 0.5], [1.0, 57.0, 0.001], [0.5]])


def geometric(tv: Any) -> st.SearchStrategy[Any]:
    size = SIZE | st.just((24, 31))
    return st.one_of(
        st.builds(tv.Resize, SIZE, MODES, antialias=ANTIALIAS),
        st.builds(lambda edge, more: tv.Resize(edge, max_size=edge + more), EDGE, EDGE),
        st.builds(tv.CenterCrop, size),
        st.builds(tv.RandomCrop, size, PADDING, st.booleans(), FILL, PADDING_MODE),
        st.builds(tv.RandomResizedCrop, size, RANGE, RATIO, MODES, ANTIALIAS),
        st.builds(tv.RandomHorizontalFlip, CHANCE),
        st.builds(tv.RandomVerticalFlip, CHANCE),
        st.builds(tv.Grayscale, st.sampled_from([1, 3])),
    )


def to_tensor(tv: Any) -> st.SearchStrategy[list[Any]]:
    if tv is v1:
        return st.sampled_from([[v1.ToTensor()], [v1.PILToTensor()], []])
    return st.sampled_from([[v2.ToImage()], [v2.PILToTensor()], [v1.ToTensor()],
                            [v2.ToImage(), v2.ToPureTensor()], []])  # fmt: skip


def pointwise(tv: Any) -> st.SearchStrategy[Any]:
    kinds = [st.builds(tv.ConvertImageDtype, DTYPE), st.builds(tv.Normalize, MEAN, STD)]
    if tv is v2:
        kinds.append(st.builds(lambda dtype, scale: v2.ToDtype(dtype, scale=scale), DTYPE, st.booleans()))
    return st.one_of(kinds)


@st.composite
def chains(draw: st.DrawFn, tv: Any) -> list[Any]:
    """Images, then usually tensors; things that torchvision refuses are among them."""
    before = draw(st.lists(geometric(tv), max_size=3))
    middle = draw(to_tensor(tv))
    after = draw(st.lists(geometric(tv) | pointwise(tv), max_size=3)) if middle else []
    return [*before, *middle, *after] or [tv.Resize(9)]
