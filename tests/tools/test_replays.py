"""One batch again and again, for steps that change what they get."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from fastpipe.tools.batches import Replay, rebuilt

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    words: list[str]


class Odd(dict):  # type: ignore[type-arg]
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)


class Stubborn(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise KeyError(key)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [1, {"y": 2}]},
        UserDict({"x": [1]}),
        OrderedDict(x=[1]),
        defaultdict(list, x=[1]),
        Odd([1], 2),
        [[1], (2, [3])],
        Pair([1], 2),
        Sample(torch.ones(2), ["a"]),
        MappingProxyType({"x": 1}),
        Stubborn(x=1),
        list(range(1000)),
        None,
        "words",
        3,
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_batch_of_any_kind_is_the_same_again(batch: Any) -> None:
    again = rebuilt(batch)
    assert type(again) is type(batch)
    assert again == batch or isinstance(batch, Sample)
    if isinstance(batch, (list, UserDict)) or (isinstance(batch, dict) and not isinstance(batch, Stubborn)):
        assert again is not batch
        again.clear()
        assert batch


def test_what_a_step_takes_out_is_there_again() -> None:
    batches = Replay(
        {"x": torch.zeros(2), "more": {"labels": [1, 2]}, "sample": Sample(torch.ones(1), ["a"])}
    )
    for _ in range(3):
        batch = next(batches)
        assert batch.pop("x").shape == (2,)
        assert batch["more"].pop("labels").pop() == 2
        batch["sample"].words.clear()


def test_what_is_done_to_a_tensor_in_place_is_not_done_again_and_again() -> None:
    batches = Replay([torch.full((3,), 8.0), np.ones(2), torch.ones(2)])
    values, kept = [], []
    for _ in range(6):
        x, _, y = next(batches)
        x.div_(2)
        values.append(float(x[0]))
        kept.append(y)
    assert values == [4, *[2] * 5]  # the first change is seen when it was made
    assert all(one is kept[0] for one in kept), "what nobody changes is not copied"


def test_tensors_whose_changes_nobody_counts_are_handed_out_as_they_are() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    batches = Replay((tensor,))
    assert next(batches)[0] is next(batches)[0]
