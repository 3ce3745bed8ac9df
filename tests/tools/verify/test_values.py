"""Whatever a transform gives can be compared, or is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from fastpipe.errors import OptionError
from fastpipe.tools.comparison import UnlikeError, array_pairs

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


def pairs(expected: Any, got: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(array_pairs(expected, got))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.full((2, 3), n),
        lambda n: torch.full((2, 3), n, dtype=torch.bfloat16),
        lambda n: torch.full((2, 3), float(n), requires_grad=True),
        lambda n: tv_tensors.Image(torch.full((3, 2, 2), n, dtype=torch.uint8)),
        lambda n: Image.fromarray(PIXELS + np.uint8(n)),
        lambda n: np.full(3, n, np.float16),
        lambda n: np.float32(n),
        lambda n: n,
        lambda n: float(n),
        lambda n: bool(n),
        lambda n: {"image": torch.full((2,), n), "name": "text", "nothing": None},
        lambda n: ([torch.zeros(1)], (n,)),
    ],
)
def test_every_kind_shows_its_difference(make: Any) -> None:
    assert all(np.array_equal(*pair) for pair in pairs(make(0), make(0)))
    assert not all(np.array_equal(*pair) for pair in pairs(make(0), make(1)))


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.zeros(2), torch.zeros(3), r"tensor torch.float32 \(3,\) instead of torch.float32 \(2,\)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.uint8), "uint8"),
        (torch.zeros(2), np.zeros(2), "a ndarray instead of a Tensor"),
        (torch.zeros(3, 2, 2), tv_tensors.Image(torch.zeros(3, 2, 2)), "a Image instead of a Tensor"),
        (np.zeros(2), np.zeros(2, np.float32), "array float32"),
        (Image.new("RGB", (2, 3)), Image.new("L", (2, 3)), "PIL image L"),
        (Image.new("L", (2, 3)), Image.new("L", (3, 2)), r"\(3, 2\)"),
        ([1], [1, 2], "length 2 instead of 1"),
        ({"a": 1}, {"b": 1}, "keys"),
        ("a", "b", "'b' instead of 'a'"),
        (None, 1, "a int instead of a NoneType"),
    ],
)
def test_what_differs_in_more_than_numbers(expected: Any, got: Any, words: str) -> None:
    with pytest.raises(UnlikeError, match=words):
        pairs(expected, got)


@pytest.mark.parametrize(
    "value", [object(), np.array(["text"]), np.array([object()])], ids=["object", "text", "objects"]
)
def test_what_cannot_be_compared_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="cannot be compared; let it give"):
        pairs(value, value)
