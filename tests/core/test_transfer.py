"""Batches to a device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from fastpipe.core.transfer import Transfer, checked_device, map_tensors
from fastpipe.errors import OptionError

Pair = namedtuple("Pair", "first second")


class _Batch:
    """A batch class of the user's, with a ``to`` of its own."""

    def __init__(self, device: Any = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: Any) -> _Batch:
        return _Batch(device)


def test_tensors_are_mapped_in_any_structure() -> None:
    batch = {
        "x": torch.ones(2), "names": ["a", b"b"], "pair": Pair(torch.zeros(1), (torch.ones(1), 3)),
        "ordered": OrderedDict(a=torch.ones(1)), "none": None, "own": _Batch(),
    }  # fmt: skip
    made = map_tensors(
        batch, lambda tensor: tensor.to("meta"), lambda value: getattr(value, "to", lambda _: value)("meta")
    )
    kinds = [type(one) for one in (made, made["pair"], made["pair"].second, made["ordered"])]
    assert kinds == [dict, Pair, tuple, OrderedDict]
    assert {made[name].device.type for name in ("x", "own")} == {"meta"}
    assert made["pair"].second[0].device.type == made["ordered"]["a"].device.type == "meta"
    assert (made["names"], made["none"], made["pair"].second[1]) == (["a", b"b"], None, 3)
    assert batch["x"].device.type == "cpu", "the batch given is as it was"


def test_batches_that_move_themselves_stay_there() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"x": torch.ones(1), "own": [_Batch()], "name": "a", "packed": packed}
    moved = Transfer(torch.device("meta")).start(batch, lambda moved: moved)()
    assert moved["own"][0].device.type == moved["x"].device.type == "meta"
    assert moved["name"] == "a"
    # As where the batch is used: what is no tensor is left alone.
    assert map_tensors(moved, lambda tensor: tensor)["own"][0] is moved["own"][0]
    assert type(moved["packed"]) is type(packed) and moved["packed"].data.device.type == "meta"
    sizes = moved["packed"].batch_sizes
    assert sizes.device.type == "cpu" and torch.equal(sizes, packed.batch_sizes)


def test_a_missing_device_is_an_error() -> None:
    assert checked_device("cpu") == torch.device("cpu")
    with pytest.raises(OptionError, match="must be a torch device, got 'gpu'"):
        checked_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="finds no CUDA device: leave device= out"):
            checked_device("cuda")


def test_on_the_cpu_nothing_is_copied() -> None:
    batch = [torch.ones(2), "a"]
    transfer = Transfer(torch.device("cpu"))
    assert not transfer.is_asynchronous
    moved = transfer.start(batch, lambda moved: [*moved, "finished"])()
    assert moved[0] is batch[0]
    assert moved[1:] == ["a", "finished"]


@pytest.mark.gpu
def test_copies_run_on_a_stream_of_their_own_and_are_not_overwritten() -> None:
    transfer = Transfer(torch.device("cuda"))
    assert transfer.is_asynchronous
    for number in range(50):
        given = transfer.start([torch.full((1 << 20,), number)], lambda moved: [moved[0] + 1])
        (tensor,) = given()
        assert tensor.device.type == "cuda"
        total = (tensor * 2).sum()
        del tensor, given  # its memory may be used for the next copy, once the sum is done
        assert total.item() == 2 * (number + 1) * (1 << 20)
