"""Chains of augmentations of volumes: labels, keys, threads, memory, dtypes, errors, what was drawn."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpipe import FastLoader, augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.volumes.base import on_volumes
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

SIZE = (8, 12, 12)
LABELS = (
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float16,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    small = torch.randn(shape[0], shape[1], 3, 4, 4, generator=seeded(9))
    return torch.nn.functional.interpolate(small, shape[2:], mode="trilinear").to(dtype)


# ---- labels ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    size=st.tuples(*[st.integers(1, 9)] * 3), axes=st.sets(st.integers(0, 2), min_size=1), seed=st.integers(0, 99),
    is_host=st.booleans(),
)  # fmt: skip
def test_labels_are_moved_as_volumes_are(size: Any, axes: Any, seed: int, is_host: bool) -> None:
    """Labels that are the values: after anything that only moves voxels they still are."""
    volumes = torch.randint(0, 200, (3, 1, *size), generator=seeded(seed))
    ops = [augment.RandomFlip3D(sorted(axes))]
    for plane in ((0, 1), (0, 2), (1, 2)):
        if size[plane[0]] == size[plane[1]]:
            ops.append(augment.RandomRotate90(plane))
    chain = augment.Compose(ops)
    key = Key(seed, 0, np.arange(3))
    if is_host:
        images, flat, whole = chain(volumes.float(), volumes[:, 0].byte(), volumes, key=key)
        assert torch.equal(images[:, 0].byte(), flat) and torch.equal(images.long(), whole)
        assert flat.dtype == torch.uint8 and whole.dtype == torch.int64
        assert sorted(images.flatten().tolist()) == sorted(volumes.flatten().tolist())
        return
    table = chain._chain.table(volumes.shape, None, key)
    applied = applied_table(chain.ops, table, (1, *size))
    given_host = on_volumes(chain.ops, volumes, applied, SlotPool(0), is_host=True)
    assert torch.equal(on_volumes(chain.ops, volumes, applied, SlotPool(0), is_host=False), given_host)


@pytest.mark.parametrize("axes", [0, 1, 2, (0, 1, 2)], ids=str)
def test_mirrored_twice_is_what_it_was(axes: Any) -> None:
    volumes, op = smooth((2, 2, 7, 5, 6)), augment.RandomFlip3D(axes, p=1.0)
    once = op(volumes)
    assert not torch.equal(once, volumes)
    assert torch.equal(op(once), volumes)


def test_four_quarter_turns_are_none() -> None:
    volumes = smooth((4, 1, 6, 6, 6))
    for plane in ((0, 1), (0, 2), (1, 2)):
        op, turned = augment.RandomRotate90(plane, p=1.0), volumes
        quarter = augment.Parameters(turns=np.ones(4))
        for _ in range(4):
            turned = op.apply(turned, quarter)
        assert torch.equal(turned, volumes)
        assert torch.equal(op.apply(volumes, quarter), torch.rot90(volumes, 1, [axis + 2 for axis in plane]))


@pytest.mark.parametrize("dtype", LABELS, ids=str)
@pytest.mark.parametrize("is_host", [True, False])
def test_labels_are_the_voxels_that_are_nearest(dtype: torch.dtype, is_host: bool) -> None:
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


def test_what_has_no_voxels_is_handed_through() -> None:
    views = augment.nnunet_default()
    volumes, classes = smooth((2, 1, *SIZE)), torch.tensor([3, 4])
    spacing, images = torch.rand(2, 3), torch.rand(2, 3, 6, 6)
    found = views(volumes, classes, {"labels": volumes[:, 0].byte(), "spacing": spacing}, "name", images)
    assert found[1] is classes and found[3] == "name" and found[4] is images
    assert found[2]["spacing"] is spacing and found[2]["labels"].shape == (2, *SIZE)
    coarse = torch.rand(2, 1, 4, 6, 6)
    with pytest.raises(AugmentError, match="make labels of other sizes after the augmentation"):
        views(volumes, coarse)
    assert augment.Gamma3D()(volumes, coarse)[1] is coarse  # which moves nothing


def test_labels_in_lists_are_moved_too() -> None:
    volumes, op = smooth((2, 1, *SIZE)), augment.RandomFlip3D(p=1.0)
    labels = (volumes[:, 0] > 0).byte()
    wanted = labels.flip((1, 2, 3))
    _, in_list, in_dict = op(volumes, [labels, (labels, 3)], {"a": [labels]})
    assert torch.equal(in_list[0], wanted) and torch.equal(in_list[1][0], wanted) and in_list[1][1] == 3
    assert torch.equal(in_dict["a"][0], wanted)


@pytest.mark.parametrize(
    ("fill", "dtype", "message"),
    [
        (-1.0, torch.uint8, "label_fill=-1 is no label of torch.uint8"),
        (0.5, torch.int64, "label_fill=0.5 is no label of torch.int64"),
        (2.0, torch.bool, "label_fill=2 is no label of torch.bool"),
        (0.0, torch.complex64, "labels are whole numbers or floats, got torch.complex64"),
    ],
)
def test_labels_that_cannot_be_filled_up(fill: float, dtype: torch.dtype, message: str) -> None:
    op = augment.RandomAffine3D(30, label_fill=fill)
    with pytest.raises(AugmentError, match=message):
        op(smooth((2, 1, *SIZE)), torch.ones(2, *SIZE).to(dtype))
    largest = augment.RandomAffine3D(0, translate=1.0, label_fill=65535)
    for is_host in (True, False):
        labels = torch.zeros(1, 1, *SIZE, dtype=torch.uint16)
        applied = applied_table([largest], np.array([[0, 0, 0, 1, 8.0, 0, 0]]), (1, *SIZE))
        found = on_volumes([largest.for_masks()], labels, applied, SlotPool(0), is_host=is_host)
        assert (found.to(torch.int64) == 65535).all()


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


def test_maps_that_lead_far_away() -> None:
    for most in (1e6, 1e20, 1e300):
        found = augment.RandomAffine3D(10, translate=most, fill=7.0)(
            torch.ones(2, 1, 8, 8, 8), generator=seeded()
        )
        assert (found == 7).all()


@pytest.mark.parametrize("fill", [np.nan, np.inf, -1e5])
def test_fills_change_nothing_within(fill: float) -> None:
    volumes, op = smooth((2, 1, *SIZE)), augment.RandomAffine3D(30, fill=fill)
    parameters = op.draw(volumes.shape, generator=seeded())
    applied = applied_table([op], parameters.table, (1, *SIZE))
    host, device = (on_volumes([op], volumes, applied, SlotPool(0), is_host=one) for one in (True, False))
    rimmed = torch.zeros_like(volumes)
    rimmed[:, :, 1:-1, 1:-1, 1:-1] = 1
    plain = augment.RandomAffine3D(30)
    is_inside = plain.apply(rimmed, parameters) == 1
    assert is_inside.float().mean() > 0.2
    assert torch.allclose(host[is_inside], device[is_inside], atol=1e-5)
    assert torch.equal(host[is_inside], plain.apply(volumes, parameters)[is_inside])


def test_arguments_may_be_arrays() -> None:
    given = augment.RandomAffine3D(
        np.array([10.0, 20.0]), np.array([0.7, 1.4]), spacing=np.array([3.0, 1.0, 1.0]), size=np.array([4, 4, 4]),
        scale_axes=np.array([1, 2]),
    )  # fmt: skip
    assert repr(given) == repr(
        augment.RandomAffine3D((10.0, 20.0), (0.7, 1.4), spacing=(3, 1, 1), size=(4, 4, 4), scale_axes=(1, 2))
    )
    assert augment.RandomFlip3D(np.int64(1)).axes == (1,)
    assert augment.Brightness3D(np.array([0.5, 1.5])).limits == (0.5, 1.5)


def test_margins() -> None:
    assert augment.nnunet_default((72, 136, 136)).margin((72, 136, 136)) == (41, 42, 42)
    assert augment.RandomAffine3D(translate=0.25, size=(8, 8, 8)).margin((8, 8, 8)) == (2, 2, 2)
    assert augment.RandomElastic3D(3, (0.5, 1.0, 2.0), size=(8, 8, 8)).margin((8, 8, 8)) == (1, 2, 4)
    assert augment.Compose([augment.Gamma3D(), augment.RandomFlip3D()]).margin((8, 8, 8)) == (0, 0, 0)
    with pytest.raises(AugmentError, match="cuts nothing off: give size="):
        augment.nnunet_default().margin((8, 8, 8))
    with pytest.raises(AugmentError, match=r"makes volumes of \(8, 8, 8\), asked for \(4, 8, 8\)"):
        augment.nnunet_default((8, 8, 8)).margin((4, 8, 8))


# ---- the batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE, (40, 40, 40)], ids=str)
def test_a_volume_is_augmented_the_same_whatever_is_beside_it(size: Any, monkeypatch: Any) -> None:
    views, volumes = augment.nnunet_default(), smooth((6, 2, *size))
    labels = (volumes[:, 0] > 0).byte()
    whole, whole_labels = views(volumes, labels, key=Key(7, 2, np.arange(6)))
    for rows in ([0, 1, 2], [5, 3], [4]):
        part, part_labels = views(volumes[rows], labels[rows], key=Key(7, 2, np.array(rows)))
        assert torch.equal(part, whole[rows]) and torch.equal(part_labels, whole_labels[rows])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            again, _ = views(volumes, labels, key=Key(7, 2, np.arange(6)))
            assert torch.equal(again, whole)
    finally:
        torch.set_num_threads(threads)
    other = views(volumes, key=Key(7, 3, np.arange(6)))
    assert not torch.equal(other, whole)


def test_every_instruction_set_gives_the_same_bits() -> None:
    best, found = native.level(), []
    sizes = [SIZE, (1, 7, 13), (33, 35, 37)]
    chains = [
        augment.nnunet_default(),
        augment.Compose(
            [
                augment.RandomElastic3D(3, 1.0, 1.0, 20), augment.GaussianNoise3D(0.1), augment.GaussianBlur3D((0.5, 2.0)),
                augment.LowResolution3D((0.4, 0.9)), augment.Contrast3D(), augment.Gamma3D(inverted=True),
                augment.Gamma3D(keep_stats=False), augment.RandomFlip3D(),
            ]
        ),
    ]  # fmt: skip
    try:
        for level in range(best + 1):
            assert native.force_level(level)
            for size in sizes:
                volumes = smooth((5, 2, *size))
                labels = (volumes[:, 0] > 0).byte()
                for chain in chains:
                    for dtype in (torch.float32, torch.float16, torch.bfloat16):
                        found += [level, *chain(volumes.to(dtype), labels, key=Key(4, 1, np.arange(5)))]
    finally:
        native.force_level(best)
    count = len(found) // (best + 1)
    for at, one in enumerate(found[count:]):
        wanted = found[at % count]
        assert isinstance(one, int) or torch.equal(one, wanted)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.7, 5.0, 63.0, 100.0])
def test_powers_are_as_exact_as_torchs(exponent: float) -> None:
    values = torch.cat([torch.logspace(-30, 0, 4095), torch.linspace(0, 1, 4097)]).view(1, 1, 16, 16, 32)
    op = augment.Gamma3D((exponent, exponent), keep_stats=False)
    wanted = values.double() ** float(np.float32(exponent))
    assert ((op(values) - wanted).abs() <= 1e-6 * max(1, exponent / 10) * wanted + 1e-37).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_what_torch_makes_of_it(value: float) -> None:
    volumes = smooth((2, 1, 33, 34, 35))
    volumes[0, 0, 3, 4, 5] = value
    for op in (
        augment.Contrast3D(), augment.Gamma3D(), augment.Gamma3D(inverted=True), augment.Brightness3D(),
        augment.GaussianBlur3D(1.0), augment.GaussianNoise3D(0.1), augment.RandomFlip3D(p=1.0),
    ):  # fmt: skip
        table = op.draw(volumes.shape, generator=seeded(2)).table
        applied = applied_table([op], table, tuple(volumes.shape[1:]))
        host, device = (
            on_volumes([op], volumes, applied, SlotPool(0), is_host=is_host) for is_host in (True, False)
        )
        assert torch.allclose(host, device, atol=1e-4, equal_nan=True), op


def test_both_ways_are_the_same() -> None:
    views, volumes = augment.nnunet_default((6, 8, 10)), smooth((16, 2, *SIZE))
    table = views._chain.table(volumes.shape, None, Key(3, 0, np.arange(16)))
    applied = applied_table(views.ops, table, (2, *SIZE))
    found, other = (
        on_volumes(views.ops, volumes, applied, SlotPool(0), is_host=is_host) for is_host in (True, False)
    )
    assert torch.allclose(found, other, atol=2e-5)


def test_volumes_without_channels_and_of_other_layouts() -> None:
    views, volumes = augment.nnunet_default(), smooth((3, 1, *SIZE))
    wanted = views(volumes, generator=seeded())
    assert torch.equal(views(volumes[:, 0], generator=seeded()), wanted[:, 0])
    turned = volumes.transpose(3, 4).contiguous().transpose(3, 4)
    assert not turned.is_contiguous()
    found = views(turned, generator=seeded())
    assert torch.equal(found, wanted) and found.is_contiguous()
    with torch.inference_mode():
        assert torch.equal(views(volumes, generator=seeded()), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_integers_become_floats_where_they_have_to(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (2, 1, *SIZE), generator=seeded()).to(dtype)
    flipped = augment.RandomFlip3D(p=1.0)(values)
    assert flipped.dtype == dtype
    assert torch.equal(flipped.to(torch.int64), values.to(torch.int64).flip((2, 3, 4)))
    chain = augment.Compose([augment.RandomFlip3D(2, p=1.0), augment.Brightness3D((0.5, 0.5))])
    found = chain(values)
    assert found.dtype == torch.float32
    assert torch.equal(found, values.float().flip(4) * 0.5)


def test_given_volumes_are_left_as_they_are() -> None:
    volumes = smooth((4, 1, *SIZE))
    labels, kept = (volumes[:, 0] > 0).byte(), volumes.clone()
    kept_labels = labels.clone()
    for seed in range(10):
        found, moved = augment.nnunet_default()(volumes, labels, generator=seeded(seed))
        assert torch.equal(volumes, kept) and torch.equal(labels, kept_labels)
        assert not np.shares_memory(found.numpy(), volumes.numpy())
        assert not np.shares_memory(moved.numpy(), labels.numpy())


class _Peak(TorchDispatchMode):
    """Counts the memory of tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
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
        if at in self._seen:
            return
        self._seen.add(at)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, at, storage.nbytes())

    def _gone(self, at: int, nbytes: int) -> None:
        self._seen.discard(at)
        self.now -= nbytes


OPS = [
    augment.RandomAffine3D(30, (0.7, 1.4)), augment.RandomElastic3D(), augment.RandomFlip3D(p=1.0), augment.RandomRotate90(p=1.0),
    augment.GaussianNoise3D(0.1), augment.GaussianBlur3D(1.0), augment.LowResolution3D(0.5),
    augment.Brightness3D(), augment.Contrast3D(), augment.Gamma3D(), augment.Gamma3D(inverted=True),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("is_host", [True, False])
def test_it_takes_little_memory(op: Any, is_host: bool) -> None:
    """Of a batch of two, with what was given, at most three times the batch."""
    volumes = smooth((2, 1, 72, 136, 136))
    table = op.draw(volumes.shape, generator=seeded()).table
    applied = applied_table([op], table, tuple(volumes.shape[1:]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the mode sees its own thread
        with _Peak() as peak:
            found = on_volumes([op], volumes, applied, SlotPool(0), is_host=is_host)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(found, volumes)
    assert 2 * volumes.nbytes <= peak.most <= 3 * volumes.nbytes


def test_compiled_it_is_the_same() -> None:
    views, volumes = augment.nnunet_default(), smooth((3, 1, *SIZE))
    labels = (volumes[:, 0] > 0).byte()
    torch.manual_seed(5)
    wanted, wanted_labels = views(volumes, labels)
    compiled = torch.compile(lambda volumes, labels: views(volumes, labels), backend="eager")
    torch.manual_seed(5)
    found, found_labels = compiled(volumes, labels)
    assert torch.equal(found, wanted) and torch.equal(found_labels, wanted_labels)


def test_in_a_loader() -> None:
    dataset = [(smooth((1, 1, *SIZE))[0], torch.ones(SIZE, dtype=torch.uint8), at) for at in range(6)]
    views = augment.nnunet_default((6, 8, 8))
    loader = FastLoader(dataset, batch_size=3, augment=views, seed=4)
    first = [(images.clone(), labels.clone(), numbers) for images, labels, numbers in loader]
    assert [tuple(part.shape for part in batch) for batch in first] == [
        ((3, 1, 6, 8, 8), (3, 6, 8, 8), (3,))
    ] * 2
    loader.set_epoch(0)
    for one, other in zip(first, loader, strict=True):
        assert all(map(torch.equal, one, other))


def test_it_can_be_sent() -> None:
    views, volumes = augment.nnunet_default(), smooth((2, 1, *SIZE))
    sent = pickle.loads(pickle.dumps(views))
    assert torch.equal(sent(volumes, generator=seeded()), views(volumes, generator=seeded()))
    assert repr(sent) == repr(views)


# ---- what is drawn ---------------------------------------------------------------------------------


def test_noise_is_normal_and_has_no_pattern() -> None:
    op, size = augment.GaussianNoise3D((1.0, 1.0)), (32, 33, 35)
    noise = op(torch.zeros(8, 2, *size), generator=seeded())
    assert abs(noise.mean()) < 0.005 and abs(noise.std() - 1) < 0.005 and abs((noise**4).mean() - 3) < 0.05
    assert abs((noise**3).mean()) < 0.02 and 4.3 < noise.abs().max() < 6.5
    for dim in range(5):  # volumes, channels and neighbours have nothing in common
        assert abs((noise * noise.roll(1, dim)).mean()) < 0.006
    again = op(torch.zeros(8, 2, *size), generator=seeded(1))
    assert abs((noise * again).mean()) < 0.006


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: augment.RandomFlip3D(3), "axes= is some of 0, 1 and 2, depth, height and width, got 3"),
        (lambda: augment.RandomFlip3D((1, 1)), "axes= is some of 0, 1 and 2"),
        (lambda: augment.RandomFlip3D(p=1.5), "p= is a probability"),
        (lambda: augment.RandomRotate90(0), "axes= is a plane, two of 0, 1 and 2"),
        (lambda: augment.RandomAffine3D((30, 10)), "degrees= is a number of at least 0, or two"),
        (lambda: augment.RandomAffine3D(0, (1.2, 0.8)), "scale= is a number of at least 0.001, or two"),
        (lambda: augment.RandomAffine3D(0, spacing=(1, 0, 1)), "spacing= is three numbers"),
        (lambda: augment.RandomAffine3D(0, size=(4, 4)), "size= is depth, height and width in voxels"),
        (lambda: augment.RandomAffine3D(0, translate=(0.1, 0.1)), "translate= is three numbers"),
        (lambda: augment.RandomAffine3D(0, fill="border"), "fill= is a number, or fill='edge'"),
        (lambda: augment.RandomElastic3D(1), "points= is three numbers of at least 2"),
        (lambda: augment.RandomElastic3D(sigma=(1, -1, 1)), "sigma= is three numbers"),
        (lambda: augment.GaussianNoise3D((0.1, float("nan"))), "std= is a number of at least 0"),
        (lambda: augment.GaussianBlur3D(-1.0), "sigma= is a number of at least 0"),
        (lambda: augment.LowResolution3D((0.5, 1.5)), "scale= is a part of the voxels"),
        (lambda: augment.Gamma3D((2.0, 1.0)), "gamma= is a number of at least 0, or two that increase"),
        (lambda: augment.Brightness3D(p_channel=2), "p_channel= is a probability"),
        (lambda: augment.nnunet_default(planes=True, spacing=(1, 1, 2)), "turns height into width"),
        (
            lambda: augment.Compose([augment.RandomFlip3D(), augment.RandomHorizontalFlip()]),
            "one kind, got RandomFlip3D of volumes, RandomHorizontalFlip of images",
        ),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work(make: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        make()


@pytest.mark.parametrize(
    ("op", "volumes", "message"),
    [
        (augment.RandomFlip3D(), torch.zeros(8, 8, 8), r"batch \(N, D, H, W\) or \(N, C, D, H, W\).*volume\[None\]"),
        (augment.RandomFlip3D(), torch.zeros(8, 8), r"takes a batch \(N, D, H, W\) or"),
        (augment.RandomFlip3D(), torch.zeros(0, 1, 8, 8, 8), "empty batch"),
        (augment.RandomFlip3D(), np.zeros((1, 1, 8, 8, 8)), "takes a tensor"),
        (augment.Gamma3D(), torch.zeros(1, 1, 8, 8, 8, dtype=torch.float64), "got torch.float64"),
        (augment.Gamma3D(), torch.zeros(1, 1, 8, 8, 8, requires_grad=True), r"give volumes.detach\(\)"),
        (augment.RandomRotate90((0, 1)), torch.zeros(1, 1, 7, 8, 8), "turns depth and height, which are 7 and 8"),
        (augment.RandomAffine3D(0, size=(9, 8, 8)), torch.zeros(1, 1, 8, 8, 8), "larger than the volumes"),
        (
            augment.RandomApply(augment.RandomAffine3D(0, size=(4, 4, 4))), torch.zeros(1, 1, 8, 8, 8),
            "leaves some volumes as they are, and .* resizes",
        ),
    ],
)  # fmt: skip
def test_volumes_that_are_none(op: Any, volumes: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        op(volumes)


def test_there_is_nothing_to_fuse() -> None:
    with pytest.raises(AugmentError, match="fuse=True is for images, got augmentations of volumes"):
        augment.Compose([augment.RandomFlip3D()], fuse=True)


# ---- preview ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [0, 1, 2])
def test_preview_shows_the_middle_plane(channels: int) -> None:
    volumes = 1 + smooth((3, max(channels, 1), *SIZE)).abs()
    volumes = volumes if channels else volumes[:, 0]
    size = augment.preview(augment.nnunet_default((6, 8, 8)), volumes, tile=40).size
    bright = augment.preview(augment.Brightness3D(0.0), volumes, tile=40)
    assert size[1] > bright.size[1] > 80
    # What was drawn for each is beneath: black planes beside none that are.
    pixels = np.asarray(bright)
    assert (pixels == 0).all(axis=-1).sum() > 3 * 30 * 15


def test_captions_say_what_was_drawn() -> None:
    from fastpipe.augment.pictures import caption, title

    views = augment.nnunet_default()
    drawn = [dict.fromkeys(op.names_for(1), 1.0) for op in views.ops]
    words = [caption(op, row) for op, row in zip(views.ops, drawn, strict=True)]
    assert words == [
        ["+1.0°, +1.0°, +1.0°", "moved +1, +1, +1"], ["std 1.000"], ["sigma 1.0, 1.0, 1.0"], ["x1.00"], ["x1.00"],
        ["100% of voxels"], ["power 1.00"], ["power 1.00"], ["depth height width"],
    ]  # fmt: skip
    assert caption(
        augment.RandomFlip3D(), dict.fromkeys(("flips_depth", "flips_height", "flips_width"), 0.0)
    ) == ["-"]
    assert caption(
        augment.Gamma3D(), {"0.is_changed": 0, "0.factor": 2, "1.is_changed": 1, "1.factor": 2}
    ) == ["1: power 2.00"]
    assert title(views.ops[1]) == ["GaussianNoise3D", "p = 0.1"]
