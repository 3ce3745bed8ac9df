"""Chains of augmentations of volumes: labels, fills, memory, integers, noise."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.volumes.base import on_volumes
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

SIZE = (8, 12, 12)
NAMES = ["uint8", "bool", "int16", "uint16", "int32", "int64", "float32", "float16"]
LABELS = [getattr(torch, name) for name in NAMES]


def smooth(shape: tuple[int, ...]) -> Tensor:
    small = torch.randn(shape[0], shape[1], 3, 4, 4, generator=seeded(9))
    return torch.nn.functional.interpolate(small, shape[2:], mode="trilinear")


def both_ways(ops: Any, volumes: Tensor, table: Any) -> tuple[Tensor, Tensor]:
    """The result by the kernels, and by torch's operations."""
    applied = applied_table(ops, table, tuple(volumes.shape[1:]))
    host, device = (
        on_volumes(ops, volumes, applied, SlotPool(0), is_host=is_host) for is_host in (True, False)
    )
    return host, device


# ---- labels ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    size=st.tuples(*[st.integers(1, 9)] * 3),
    axes=st.sets(st.integers(0, 2), min_size=1),
    seed=st.integers(0, 99),
)
def test_labels_are_moved_as_volumes_are(size: Any, axes: Any, seed: int) -> None:
    """Labels that are the values: after anything that only moves voxels they still are."""
    volumes = torch.randint(0, 200, (3, 1, *size), generator=seeded(seed))
    planes = [plane for plane in ((0, 1), (0, 2), (1, 2)) if size[plane[0]] == size[plane[1]]]
    chain = augment.Compose([augment.RandomFlip3D(sorted(axes)), *map(augment.RandomRotate90, planes)])
    key = Key(seed, 0, np.arange(3))
    images, flat, whole = chain(volumes.float(), volumes[:, 0].byte(), volumes, key=key)
    assert torch.equal(images[:, 0].byte(), flat) and torch.equal(images.long(), whole)
    assert flat.dtype == torch.uint8 and whole.dtype == torch.int64
    assert sorted(images.flatten().tolist()) == sorted(volumes.flatten().tolist())
    host, device = both_ways(chain.ops, volumes, chain._chain.table(volumes.shape, None, key))
    assert torch.equal(host, device) and torch.equal(host, whole)


@pytest.mark.parametrize("dtype", LABELS, ids=str)
@pytest.mark.parametrize("is_host", [True, False])
def test_labels_are_those_of_the_nearest_voxel(dtype: torch.dtype, is_host: bool) -> None:
    """A volume whose values are where its voxels are, and labels that number them."""
    size = (9, 11, 13)
    places = torch.stack(torch.meshgrid(*(torch.arange(one) for one in size), indexing="ij")).float()
    volumes = torch.cat([places, torch.ones(1, *size)])[None].repeat(4, 1, 1, 1, 1)
    most = 2 if dtype == torch.bool else 200
    labels = (torch.arange(int(np.prod(size))).view(size) % most).to(dtype)[None].repeat(4, 1, 1, 1)
    op = augment.RandomAffine3D(40, (0.7, 1.2), fill=-9.0, label_fill=1.0)
    table = op.draw(volumes.shape, generator=seeded(1)).table
    applied = applied_table([op], table, tuple(volumes.shape[1:]))
    moved = on_volumes([op], volumes, applied, SlotPool(0), is_host=is_host)
    twin = op.for_masks()
    found = on_volumes([twin], labels[:, None], applied, SlotPool(0), 4, is_host=is_host)[:, 0]
    assert found.dtype == dtype
    # Where nothing of the fill is in them, a voxel's values say where it comes from.
    inside, moved = moved[:, 3] > 0.9999, moved[:, :3]
    sure = inside & ((moved - moved.round()).abs().amax(dim=1) < 0.499)
    assert sure.float().mean() > 0.3
    at = moved.round().long().clamp(min=0)
    index = ((at[:, 0] * size[1] + at[:, 1]) * size[2] + at[:, 2]).clamp(max=labels[0].numel() - 1)
    wanted = labels[0].double().flatten()[index]
    assert torch.equal(found.double()[sure], wanted[sure])
    outside = (moved == -9).all(dim=1)
    assert outside.any() and (found.double()[outside] == 1).all()


def test_the_largest_label_fills() -> None:
    op = augment.RandomAffine3D(0, translate=1.0, label_fill=65535)
    applied = applied_table([op], np.array([[0, 0, 0, 1, 8.0, 0, 0]]), (1, *SIZE))
    for is_host in (True, False):
        labels = torch.zeros(1, 1, *SIZE, dtype=torch.uint16)
        found = on_volumes([op.for_masks()], labels, applied, SlotPool(0), is_host=is_host)
        assert (found.to(torch.int64) == 65535).all()


def test_parts_without_voxels_are_handed_through_and_labels_in_lists_are_moved() -> None:
    views = augment.nnunet_default()
    volumes, classes = smooth((2, 1, *SIZE)), torch.tensor([3, 4])
    spacing, images = torch.rand(2, 3), torch.rand(2, 3, 6, 6)
    labels = (volumes[:, 0] > 0).byte()
    found = views(volumes, classes, {"labels": labels, "spacing": spacing}, "name", images)
    assert found[1] is classes and found[3] == "name" and found[4] is images
    assert found[2]["spacing"] is spacing and found[2]["labels"].shape == (2, *SIZE)
    coarse = torch.rand(2, 1, 4, 6, 6)
    assert augment.Gamma3D()(volumes, coarse)[1] is coarse  # which moves nothing
    wanted = labels.flip((1, 2, 3))
    _, in_list, in_dict = augment.RandomFlip3D(p=1.0)(volumes, [labels, (labels, 3)], {"a": [labels]})
    assert torch.equal(in_list[0], wanted) and torch.equal(in_list[1][0], wanted) and in_list[1][1] == 3
    assert torch.equal(in_dict["a"][0], wanted)


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 9, 9), (8, 8, 1), (1, 1, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("fill", [0.0, "edge"])
def test_nothing_is_read_from_beside_a_volume(shape: Any, fill: Any) -> None:
    """Where an axis has one voxel, there are no eight around a place."""
    count = int(np.prod(shape))
    memory = torch.full((3 * 300,), torch.nan)
    volume = memory[300 : 300 + count].view(1, 1, *shape)
    volume[:] = 1
    for op in (
        augment.RandomAffine3D(((-30, 30), (20, 25), 0), fill=fill), augment.RandomAffine3D(0, (0.7, 1.4), fill=fill),
        augment.RandomElastic3D(2, 1.0, fill=fill),
    ):  # fmt: skip
        for seed in range(20):
            found = op(volume, generator=seeded(seed))
            assert found.isfinite().all() and found.max() <= 1.0001


def test_a_map_that_leads_far_away_fills() -> None:
    for most in (1e6, 1e20, 1e300):
        op = augment.RandomAffine3D(10, translate=most, fill=7.0)
        assert (op(torch.ones(2, 1, 8, 8, 8), generator=seeded()) == 7).all()


@pytest.mark.parametrize("fill", [np.nan, np.inf, -1e5])
def test_a_fill_changes_nothing_within(fill: float) -> None:
    volumes, op = smooth((2, 1, *SIZE)), augment.RandomAffine3D(30, fill=fill)
    parameters = op.draw(volumes.shape, generator=seeded())
    host, device = both_ways([op], volumes, parameters.table)
    rimmed = torch.zeros_like(volumes)
    rimmed[:, :, 1:-1, 1:-1, 1:-1] = 1
    plain = augment.RandomAffine3D(30)
    is_inside = plain.apply(rimmed, parameters) == 1
    assert is_inside.float().mean() > 0.2
    assert torch.allclose(host[is_inside], device[is_inside], atol=1e-5)
    assert torch.equal(host[is_inside], plain.apply(volumes, parameters)[is_inside])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_stay_what_torch_makes_of_them(value: float) -> None:
    volumes = smooth((2, 1, 33, 34, 35))
    volumes[0, 0, 3, 4, 5] = value
    for op in (
        augment.Contrast3D(), augment.Gamma3D(), augment.Gamma3D(inverted=True), augment.Brightness3D(),
        augment.GaussianBlur3D(1.0), augment.GaussianNoise3D(0.1), augment.RandomFlip3D(p=1.0),
    ):  # fmt: skip
        host, device = both_ways([op], volumes, op.draw(volumes.shape, generator=seeded(2)).table)
        assert torch.allclose(host, device, atol=1e-4, equal_nan=True), op


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.7, 5.0, 63.0, 100.0])
def test_powers_are_as_exact_as_torchs(exponent: float) -> None:
    values = torch.cat([torch.logspace(-30, 0, 4095), torch.linspace(0, 1, 4097)]).view(1, 1, 16, 16, 32)
    op = augment.Gamma3D((exponent, exponent), keep_stats=False)
    wanted = values.double() ** float(np.float32(exponent))
    assert ((op(values) - wanted).abs() <= 1e-6 * max(1, exponent / 10) * wanted + 1e-37).all()


def test_volumes_may_have_no_channels() -> None:
    views, volumes = augment.nnunet_default(), smooth((3, 1, *SIZE))
    assert torch.equal(views(volumes[:, 0], generator=seeded()), views(volumes, generator=seeded())[:, 0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_integers_become_floats_where_they_have_to(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (2, 1, *SIZE), generator=seeded()).to(dtype)
    flipped = augment.RandomFlip3D(p=1.0)(values)
    assert flipped.dtype == dtype
    assert torch.equal(flipped.to(torch.int64), values.to(torch.int64).flip((2, 3, 4)))
    chain = augment.Compose([augment.RandomFlip3D(2, p=1.0), augment.Brightness3D((0.5, 0.5))])
    found = chain(values)
    assert found.dtype == torch.float32 and torch.equal(found, values.float().flip(4) * 0.5)


def test_noise_is_normal_and_has_no_pattern() -> None:
    op, blank = augment.GaussianNoise3D((1.0, 1.0)), torch.zeros(8, 2, 32, 33, 35)
    noise, again = op(blank, generator=seeded()), op(blank, generator=seeded(1))
    assert abs(noise.mean()) < 0.005 and abs(noise.std() - 1) < 0.005 and abs((noise**4).mean() - 3) < 0.05
    assert abs((noise**3).mean()) < 0.02 and 4.3 < noise.abs().max() < 6.5
    for other in (again, *(noise.roll(1, dim) for dim in range(5))):  # volumes, channels and neighbours
        assert abs((noise * other).mean()) < 0.006


# ---- memory and arguments ----------------------------------------------------------------------------


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]  # counts the memory of what operations make
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        made = function(*given, **(options or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        at = storage._cdata
        if at not in self._seen:
            self._seen.add(at)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, at, storage.nbytes())

    def _gone(self, at: int, nbytes: int) -> None:
        self._seen.discard(at)
        self.now -= nbytes


OPS = [
    augment.RandomAffine3D(30, (0.7, 1.4)), augment.RandomElastic3D(), augment.RandomFlip3D(p=1.0),
    augment.RandomRotate90(p=1.0), augment.GaussianNoise3D(0.1), augment.GaussianBlur3D(1.0),
    augment.LowResolution3D(0.5), augment.Brightness3D(), augment.Contrast3D(), augment.Gamma3D(),
    augment.Gamma3D(inverted=True),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("is_host", [True, False])
def test_an_operation_takes_three_batches_of_memory_at_most(op: Any, is_host: bool) -> None:
    """Parameters for two volumes, with the given ones replaced."""
    volumes = smooth((2, 1, 72, 136, 136))  # of which devices take a part at a time
    applied = applied_table([op], op.draw(volumes.shape, generator=seeded()).table, tuple(volumes.shape[1:]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the mode sees its own thread
        with Peak() as peak:
            found = on_volumes([op], volumes, applied, SlotPool(0), is_host=is_host)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(found, volumes)
    assert 2 * volumes.nbytes <= peak.most <= 3 * volumes.nbytes


def test_arguments_may_be_arrays() -> None:
    kind: Any = augment.RandomAffine3D
    given = kind(
        np.array([10.0, 20.0]), np.array([0.7, 1.4]), spacing=np.array([3.0, 1.0, 1.0]),
        size=np.array([4, 4, 4]), scale_axes=np.array([1, 2]),
    )  # fmt: skip
    plain = kind((10.0, 20.0), (0.7, 1.4), spacing=(3, 1, 1), size=(4, 4, 4), scale_axes=(1, 2))
    assert repr(given) == repr(plain)
    kind = augment.RandomFlip3D
    assert kind(np.int64(1)).axes == (1,)
    assert augment.Brightness3D(np.array([0.5, 1.5])).limits == (0.5, 1.5)


def test_margins_are_what_a_cut_needs() -> None:
    assert augment.nnunet_default((72, 136, 136)).margin((72, 136, 136)) == (41, 42, 42)
    assert augment.RandomAffine3D(translate=0.25, size=(8, 8, 8)).margin((8, 8, 8)) == (2, 2, 2)
    assert augment.RandomElastic3D(3, (0.5, 1.0, 2.0), size=(8, 8, 8)).margin((8, 8, 8)) == (1, 2, 4)
    assert augment.Compose([augment.Gamma3D(), augment.RandomFlip3D()]).margin((8, 8, 8)) == (0, 0, 0)
    with pytest.raises(AugmentError, match="cuts nothing off: give size="):
        augment.nnunet_default().margin((8, 8, 8))
    with pytest.raises(AugmentError, match=r"makes volumes of \(8, 8, 8\), asked for \(4, 8, 8\)"):
        augment.nnunet_default((8, 8, 8)).margin((4, 8, 8))
