"""Behaviours of every augmentation: what it computes, of which batches, and which it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import CHAINS, DTYPES, IMAGES, MOTION, OPS, SPECTROGRAMS, batch_for, by_torch, seeded
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from same import same
from torch import Tensor
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.core.native import native
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError, OptionError

UINT8, FLOATS = DTYPES[0], DTYPES[1:]
NO_BYTE = ("affine that fills in no byte", "erasing with no byte")
OF_FLOATS = ("normalise", "bytes", "mixed", *SPECTROGRAMS)
# For uint8: the levels by which values may differ, and for which fraction; all other cases are equal.
NEAR_BYTES = {
    "jitter": (3, 0.0005), "policy": (2, 0.005), "smooth policy": (2, 0.01), "trivial policy": (2, 0.005),
    "smooth trivial policy": (2, 0.01), **dict.fromkeys(
        ("blur", "wide blur", "narrow blur", "sometimes", "affine", "rotation", "affine without a fill"), (1, 0.001)
    ),
}  # fmt: skip
# Half of the last place of numbers below 2, and what float32 adds.
NEAR_FLOATS = {torch.float32: 4e-6, torch.float16: 2.0**-11 + 4e-6, torch.bfloat16: 2.0**-8 + 4e-6}
NEAR_OTHERS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPSILON = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_near(found: Tensor, wanted: Tensor, batch: Tensor, case: str, has_steps: bool = False) -> None:
    dtype = wanted.dtype
    assert found.dtype == dtype and found.shape == wanted.shape
    apart = (found.double() - wanted.double()).abs()
    if dtype == UINT8:
        # Without the processor's exact sums colours beside a step of bytes fall on either side, and a policy may
        # go on to invert one of two.
        levels, part = (255, 0.1) if has_steps else NEAR_BYTES.get(case, (0, 0.0))
        assert apart.max() <= levels and (apart > 0).double().mean() <= part
    elif batch.ndim == 5:
        dims = (1, 2, 3, 4)
        extent, size = batch.amax(dims).double() - batch.amin(dims).double(), batch.abs().amax(dims).double()
        scale = (extent if dtype == torch.float32 else size).clamp(min=1).view(-1, 1, 1, 1, 1)
        assert (apart / scale).max() < 8 * NEAR_OTHERS[dtype] / (1 if dtype == torch.float32 else 2)
    elif case in IMAGES:
        # Two roundings of halves, and numbers up to 3 of what is normalised.
        times = (1 if dtype == torch.float32 else 2) * (2 if case == "normalise" else 1)
        assert apart.max() <= NEAR_FLOATS[dtype] * times
    else:
        assert (apart / wanted.double().abs().clamp(min=1)).max() < NEAR_OTHERS[dtype]


def dtypes_of(case: str) -> tuple[torch.dtype, ...]:
    return DTYPES if case in IMAGES and case not in OF_FLOATS else FLOATS


# One dtype of each daily, and all of them nightly.
PAIRS = [
    pytest.param(case, dtype, id=f"{case}, {str(dtype)[6:]}", marks=[pytest.mark.slow] * (at != number % len(dtypes_of(case))))
    for number, case in enumerate(case for case in OPS if case not in NO_BYTE)
    for at, dtype in enumerate(dtypes_of(case))
]  # fmt: skip


@pytest.mark.few(30)
@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_results_are_the_references(case: str, dtype: torch.dtype) -> None:
    """By the kernels, and by torch's operations: torchvision's, SciPy's, or those of a loop in NumPy."""
    op = OPS[case]
    if case == "bytes" and dtype != torch.float32:  # of halves torchvision makes bytes by a product of halves
        return
    for channels in (3, 1):
        if case == "normalise" and channels == 1:
            continue
        batch = batch_for(op, dtype, channels)
        batch = batch[:, 0] if case in SPECTROGRAMS and channels == 1 else batch
        kept = batch.clone()
        for seed in range(1 if case in IMAGES else 2):
            parameters = op.draw(batch.shape, generator=seeded(seed))
            wanted = op.reference(batch, parameters)
            assert_near(op.apply(batch, parameters), wanted, batch, case)
            found = by_torch([op], batch, parameters)
            if "crop" in case and dtype == UINT8:
                # On other devices torchvision resizes bytes as floats, which are rounded once.
                apart = (found.float() - op.reference(batch.float(), parameters).round().clamp(0, 255)).abs()
                assert apart.max() <= 1 and (apart > 0).float().mean() < 0.001
            else:
                assert_near(found, wanted, batch, case, case == "jitter" or "policy" in case)
        assert torch.equal(batch, kept)


def uniforms(draws: int, count: int) -> st.SearchStrategy[list[float]]:
    """Uniform numbers, of which many are the least or the greatest there is."""
    ends = st.sampled_from([0.0, float(np.nextafter(1, 0)), 0.5])
    return st.lists(
        ends | st.floats(0, 1, exclude_max=True, width=32), min_size=draws * count, max_size=draws * count
    )


@pytest.mark.few(17)
@settings(max_examples=15)
@pytest.mark.parametrize(
    "case", [case for case in IMAGES | SPECTROGRAMS if "policy" not in case and "wide" not in case]
)
@given(data=st.data())
def test_images_of_any_shape_are_the_references(case: str, data: st.DataObject) -> None:
    op: Any = {"normalise": augment.Normalize([0.4], [0.25]), "masks": augment.SpecAugment(2, 3, 1, 2, p=0.9),
               "blur": augment.GaussianBlur((3, 5))}.get(case, OPS[case])  # fmt: skip
    dtype = data.draw(st.sampled_from(DTYPES[case in OF_FLOATS : 2 if case == "bytes" else 4]))
    channels = data.draw(st.sampled_from(op.channels or (1, 2, 3, 4, 13)))
    least = {"narrow blur": 2, "blur": 3, "sometimes": 3}.get(case, 1)  # of torch's padding
    side = st.sampled_from([side for side in (1, 2, 3, 4, 7, 16, 33) if side >= least])
    shape = (data.draw(st.integers(1, 3)), channels, data.draw(side), data.draw(side))
    values = torch.rand(shape, generator=seeded(data.draw(st.integers(0, 99))))
    images = (values * 255).round().to(UINT8) if dtype == UINT8 else values.to(dtype)
    draws = op.draws_for(channels)
    u = np.array(data.draw(uniforms(draws, shape[0]))).reshape(shape[0], draws)
    parameters = augment.Parameters.of_table(op.names_for(channels), op.table(u, shape[1:]))
    try:
        wanted = op.reference(images, parameters)
    except RuntimeError as wrong:  # torch, of bytes of some images one pixel wide
        assume("INTERNAL ASSERT FAILED" not in str(wrong))
        raise
    found = op.apply(images, parameters)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if wanted.dtype == UINT8:
        apart = (found.int() - wanted.int()).abs()
        apart = torch.minimum(apart, 256 - apart) if case in NO_BYTE else apart
        assert apart.max() <= NEAR_BYTES.get(case, (0, 0))[0]
    else:
        limit = (1e-5 + EPSILON[wanted.dtype]) * (1 + wanted.float().abs())
        assert ((found.float() - wanted.float()).abs() <= limit).all()


@settings(max_examples=40)
@given(
    frames=st.integers(1, 12), joints=st.integers(5, 7), coordinates=st.integers(1, 3), count=st.integers(1, 5),
    seed=st.integers(0, 99), case=st.sampled_from([*MOTION, "recipe"]),
)  # fmt: skip
def test_motion_of_any_shape_and_lengths_is_the_references(
    frames: int, joints: int, coordinates: int, count: int, seed: int, case: str
) -> None:
    op: Any = CHAINS["motion"] if case == "recipe" else MOTION[case]
    assume(coordinates == 3 or case not in ("translation of each", "mirror of another"))
    motion = torch.randn((count, frames, joints, coordinates), generator=seeded(seed))
    lengths = torch.randint(1, frames + 1, (count,), generator=seeded(seed))
    parameters = op.draw(motion.shape, generator=seeded(seed))
    found, now = op.apply(motion, parameters, lengths)
    wanted, wanted_now = op.reference(motion, parameters, lengths)
    assert torch.allclose(found, wanted, atol=1e-5) and torch.equal(now, wanted_now)
    assert now.dtype == torch.int64 and (now >= 1).all() and (now <= frames).all()
    for row, length, before in zip(found, now, lengths, strict=True):
        end = max(int(length), int(before))
        assert torch.equal(row[end:], row[end:] * 0) or not (row[end:] == 0).all()


# What is not finite spreads as in the reference, but for these, which do not multiply by what counts for nothing, or
# multiply by it where torch does not: weights of 0 beside a filter's, and those below 2**-30 of the sum.
SPREADS_OTHERWISE = {
    *[case for case in IMAGES if "crop" in case and "nearest" not in case], "blur", "wide blur", "narrow blur", "bytes",
    "sometimes", "normalise",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in IMAGES | SPECTROGRAMS if "policy" not in case]
)  # of tables
def test_numbers_that_are_not_finite_spread_as_in_the_reference(case: str) -> None:
    op = OPS[case]
    for dtype in (torch.float32, torch.bfloat16) if case not in SPREADS_OTHERWISE else (torch.float32,):
        images = batch_for(op, dtype)
        parameters = op.draw(images.shape, generator=seeded())
        before = op.apply(images, parameters)
        for at, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            images[at::3, 0, 11, 13] = value
            images[3 + at :: 3, 1, 20:22, 30:33] = value
        found = op.apply(images, parameters)
        if case in SPREADS_OTHERWISE:
            changed = (found != before).float().mean((1, 2, 3))  # no number far from it changes
            assert changed.max() <= (1 if case == "crop to a pixel" else 0.6)
            continue
        wanted = op.reference(images, parameters)
        for look in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(look(found), look(wanted))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_motion_that_is_not_finite_is_so_in_the_same_places(dtype: torch.dtype) -> None:
    motion = batch_for(MOTION["speed"], dtype)
    chosen = torch.rand(motion.shape, generator=seeded(2))
    for value, low in ((torch.nan, 0.0), (torch.inf, 0.98), (-torch.inf, 0.5)):
        motion[(chosen >= low) & (chosen < low + 0.02)] = value
    for speeds in ((0.5, 0.5), (2.0, 2.0), (1.0, 1.0), (0.7, 1.5)):
        ops = [augment.MotionSpeed(speeds), augment.MotionTranslation(0.5), augment.MotionMirror(((0, 1),))]
        chain = augment.Compose(ops)
        parameters = chain.draw(motion.shape, generator=seeded(3))
        found, wanted = chain.apply(motion, parameters), chain.reference(motion, parameters)
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
        near = NEAR_OTHERS[dtype]
        assert torch.allclose(found.float(), wanted.float(), rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize(
    "case", [case for case in OPS if case not in SPREADS_OTHERWISE and case not in MOTION]
)
def test_copies_do_the_same(case: str) -> None:
    op = OPS[case]
    given = [batch_for(op)[:3], *[torch.arange(3) % 2] * getattr(op, "mixes", False)]
    wanted = op(*given, generator=seeded())
    for made in (pickle.loads(pickle.dumps(op)), copy.copy(op), copy.deepcopy(op)):
        assert same(made(*given, generator=seeded()), wanted) and repr(made) == repr(op)


WILD = st.sampled_from([np.nan, np.inf, -np.inf, -1, -0.5, 0, 0.5, 1, 2.5, 7, 13, 40, 52, 1e9, -1e18, 1e300])


@settings(max_examples=10)
@pytest.mark.parametrize("case", [case for case in IMAGES | SPECTROGRAMS if "wide" not in case])
@given(data=st.data())
def test_no_parameters_do_harm(case: str, data: st.DataObject) -> None:
    """They give images, the same at each instruction set, or an error."""
    op = OPS[case]
    shape = (2, 3, *data.draw(st.sampled_from([(40, 52), (25, 64), (24, 32)])))
    images = torch.rand(shape, generator=seeded())
    if case not in OF_FLOATS and data.draw(st.booleans()):
        images = (images * 255).to(UINT8)
    parameters = op.draw(shape, generator=seeded(data.draw(st.integers(0, 9))))
    for at in np.ndindex(parameters.table.shape):
        if data.draw(st.integers(0, 2)) == 0:
            parameters.table[at] = data.draw(WILD)
    best, found = native.level(), []
    try:
        for level in range(best + 1):
            assert native.force_level(level)
            with np.errstate(all="ignore"):
                found.append(op.apply(images, parameters))
    except (AugmentError, np.linalg.LinAlgError, IndexError):
        assert not found
        return
    finally:
        native.force_level(best)
    assert all(one.numpy(force=True).tobytes() == found[0].numpy(force=True).tobytes() for one in found)


@pytest.mark.parametrize("speed", [np.nan, np.inf, -np.inf, 0.0, -2.0, 1e-300, 1e300])
def test_no_speed_does_harm(speed: float) -> None:
    motion, op = batch_for(MOTION["speed"])[:6, :12], augment.MotionSpeed()
    parameters = augment.Parameters(speed=np.full(6, speed))
    _, now = op.apply(motion, parameters, torch.tensor([1, 2, 12, 5, 7, 9]))
    assert now.min() >= 1 and now.max() <= 12
    assert op.apply(motion, parameters).shape == motion.shape


# ---- what is refused -------------------------------------------------------------------------------------------------

FLIP, JITTER, GREY = augment.RandomHorizontalFlip(), augment.ColorJitter(0.4), augment.RandomGrayscale()
PIXELS, BYTES = torch.zeros(1, 3, 9, 9), torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
# Each is an error that says this.
ARGUMENTS = {
    "RandomHorizontalFlip(1.5)": "p must", "RandomHorizontalFlip(float('nan'))": "p must",
    "RandomApply([], 2.0)": "p must", "RandomErasing(-1)": "p must",
    "RandomErasing(value='noise')": "value must", "RandomErasing(scale=(0.5, 2.0))": "scale must",
    "RandomResizedCrop(0)": "size must", "RandomResizedCrop((1, 2, 3))": "size must",
    "RandomResizedCrop(8, scale=(0.5, 0.1))": "scale must",
    "RandomResizedCrop(8, ratio=(0, 1))": "ratio must",
    "RandomResizedCrop(8, interpolation='lanczos')": "interpolation must",
    "RandomRotation(10, 'bicubic')": "interpolation must", "RandomRotation(-10)": "degrees must",
    "RandomRotation((10, -10))": "degrees must", "RandomAffine(0, (0.1, 1.1))": "translate must",
    "RandomAffine(0, fill='black')": "fill must", "RandomAffine(0, center=(1,))": "center must",
    "ColorJitter(-1)": "brightness must", "ColorJitter(hue=0.6)": "hue must",
    "ColorJitter(contrast=(2, 1))": "contrast must", "GaussianBlur(4)": "kernel_size must",
    "GaussianBlur(3, 0.0)": "sigma must", "Normalize([0.5], [0.0])": "std",
    "Normalize([0.5, 0.5], [1.0])": "std", "Normalize([float('nan')], [1.0])": "mean",
    "ToDtype(torch.int64)": "dtype must", "RandAugment(magnitude=31)": "magnitude must",
    "RandAugment(-1)": "num_ops must", "TrivialAugmentWide(1)": "num_magnitude_bins must",
    "TrivialAugmentWide(interpolation='bicubic')": "interpolation must", "MixUp(alpha=0)": "alpha",
    "CutMix(alpha=0)": "alpha", "RandomApply(MixUp(num_classes=3))": "mixes all",
    "Compose([v2.RandomHorizontalFlip()])": "takes augmentations from fastpipe.augment",
    "Compose([RandomFlip3D(), RandomHorizontalFlip()])": "RandomFlip3D of volumes, RandomHorizontalFlip of images",
    "Compose([RandomFlip3D()], fuse=True)": "fuse=True applies to images only, got augmentations of volumes",
    "Compose([MotionSpeed()], lengths=0)": "lengths applies to motion batches only",
    "Compose([RandomFlip3D()], lengths=1)": "for augmentations of volumes",
    "SpecAugment(-1, 5, 1, 5)": "n_time_masks", "SpecAugment(1, 5, 1, 5, p=1.5)": "p must",
    "TimeShift(1.5)": "most must", "RandomGain(-1.0)": "gain_db must",
    "RandomGain(1.0, 'loud')": "scale must",
    "RandomFlip3D(3)": "axes must be a selection of 0, 1 and 2 .*, got 3",
    "RandomFlip3D((1, 1))": "axes must", "RandomRotate90((0,))": "axes must be a plane, two of 0, 1 and 2",
    "RandomAffine3D((30, 10))": "degrees must be a number of at least 0, or two",
    "RandomAffine3D(0, (1.2, 0.8))": "scale must be a number of at least 0.001, or two",
    "RandomAffine3D(0, spacing=(1, 0, 1))": "spacing must",
    "RandomAffine3D(0, size=(4, 4))": "size must be .depth, height, width. in voxels",
    "RandomAffine3D(0, translate=(0.1, 0.1))": "translate must",
    "RandomAffine3D(0, fill='border')": "fill must be a number, or fill='edge'",
    "RandomElastic3D(1)": "points must be three numbers of at least 2",
    "RandomElastic3D(sigma=(1, -1, 1))": "sigma must",
    "GaussianNoise3D((0.1, float('nan')))": "std must be a number of at least 0",
    "GaussianBlur3D(-1.0)": "sigma must be a number of at least 0",
    "LowResolution3D((0.5, 1.5))": "scale must be a fraction of the voxels",
    "Gamma3D((2.0, 1.0))": "gamma must be a number of at least 0, or two in increasing order",
    "Brightness3D(p_channel=2)": "p_channel must",
    "nnunet_default(planes=True, spacing=(1, 1, 2))": "turns height into width",
    "MotionSpeed((0.0, 1.0))": "speed must be two positive numbers",
    "MotionScale((2.0, 1.0))": "factor must be two positive numbers",
    "MotionScale(about=-1)": "about must be the index of a joint, or None, got -1",
    "MotionTranslation(-0.1)": "most must be a number of at least 0",
    "MotionTranslation(())": "most must be a number of at least 0",
    "MotionMirror([(0, 1), (1, 2)])": "pairs must be pairs of joint indices",
    "MotionMirror([(0, 1, 2)])": "pairs must be pairs of joint indices",
    "MotionMirror([(3, 3)])": "pairs must be pairs of joint indices",
    "MotionMirror({0: 1, 1: 2})": "pairs must be pairs of joint indices",
    "MotionMirror(axis=-1)": "axis must be the index of a coordinate",
}  # fmt: skip


@pytest.mark.parametrize("call", ARGUMENTS)
def test_arguments_that_cannot_work_are_named(call: str) -> None:
    names = {name: getattr(augment, name) for name in augment.__all__} | {"torch": torch, "v2": v2}
    with pytest.raises(AugmentError, match=ARGUMENTS[call]):
        eval(call, names)


SPEC, MIX, VOLUME = augment.SpecAugment(1, 5, 1, 5), augment.MixUp(num_classes=5), torch.zeros(1, 1, 8, 8, 8)
SOUNDS, MOVED = torch.zeros(4, 40, 70), torch.zeros(4, 5, 5, 3)
ONES = torch.ones(4, dtype=torch.int64)
BATCHES: list[tuple[Any, tuple[Any, ...], str]] = [
    (JITTER, (PIXELS[0],), r"got shape \(3, 9, 9\): give one image as image\[None\]"),
    (JITTER, (PIXELS[None],), r"got shape \(1, 1, 3, 9, 9\)"),
    (JITTER, (PIXELS[:0],), r"empty batch, of shape \(0, 3, 9, 9\)"),
    (JITTER, (PIXELS[..., :0],), "empty batch"),
    (JITTER, (PIXELS.movedim(1, -1),), r"3 or 1 channels, got shape \(1, 9, 9, 3\): it looks like \(N, H, W, C\)"),
    (JITTER, (PIXELS[:, :2],), "3 or 1 channels"), (JITTER, (PIXELS.double(),), "float64"),
    (JITTER, (PIXELS.long(),), "int64"), (JITTER, (PIXELS.numpy(),), "takes a tensor .* got ndarray"),
    (JITTER, ([PIXELS],), "got list"),
    (augment.RandomApply(augment.RandomResizedCrop(8)), (PIXELS,), "changes their size"),
    (augment.RandomApply(augment.ToDtype()), (BYTES,), "changes their dtype"),
    (augment.GaussianBlur(23), (torch.zeros(1, 3, 9, 90),), "kernel_size|9"),
    (augment.RandomAffine(0, fill=(1, 2)), (PIXELS,), "fill= has 2"),
    (augment.RandomErasing(value=(1, 2)), (PIXELS,), "value= has 2"),
    (augment.RandomErasing(value="random"), (BYTES,), "uint8 cannot hold"),
    (augment.Normalize([0.5], [0.2]), (BYTES,), "got uint8"), (MIX, (BYTES, ONES[:1]), "MixUp takes floats"),
    (MIX, (MOVED,), "takes labels"), (MIX, (MOVED, None), "got NoneType"),
    (MIX, (MOVED, ONES[:3]), r"got \(3,\)"), (MIX, (MOVED, [0] * 4), "got list"),
    (MIX, (MOVED, torch.zeros(4, 4)), "num_classes=5, got labels of 4"),
    (MIX, (MOVED, torch.arange(4) + 2), "got labels of 2 … 5"),
    (MIX, (MOVED, torch.arange(4) - 1), "got labels of -1 … 2"),
    (MIX, (MOVED, torch.zeros(4)), "whole numbers"), (augment.CutMix(), (MOVED, ONES), "num_classes"),
    (augment.SpecAugment(1, 71, 0, 0), (SOUNDS,), "time_mask_param=71 is more than there is: 70"),
    (augment.SpecAugment(0, 0, 1, 41), (SOUNDS,), "freq_mask_param=41 is more than there is: 40"),
    (SPEC, (SOUNDS.to(torch.uint8),), "takes floats, got uint8"),
    (SPEC, (SOUNDS[0],), r"\(N, F, T\) or \(N, C, F, T\), got shape \(40, 70\)"),
    (augment.TimeShift(71), (SOUNDS,), "more than there are"),
    (augment.Compose([augment.RandomGain(), JITTER]), (SOUNDS,), r"\(N, C, H, W\)"),
    (augment.RandomFlip3D(), (VOLUME[0, 0],), r"batch \(N, D, H, W\) or \(N, C, D, H, W\).*volume\[None\]"),
    (augment.Gamma3D(), (VOLUME.double(),), "got torch.float64"),
    (augment.Gamma3D(), (VOLUME.clone().requires_grad_(),), r"pass volumes.detach\(\)"),
    (augment.RandomRotate90((0, 1)), (VOLUME[:, :, 1:],), "turns depth and height, which are 7 and 8"),
    (augment.RandomAffine3D(0, size=(9, 8, 8)), (VOLUME,), "larger than the volumes"),
    (augment.RandomApply(augment.RandomAffine3D(0, size=(4, 4, 4))), (VOLUME,), "to some of the volumes only: it changes their size"),
    (CHAINS["nnU-Net"], (VOLUME, torch.zeros(1, 1, 4, 6, 6)), "make labels of other sizes after the augmentation"),
    (augment.RandomAffine3D(30, label_fill=-1), (VOLUME, VOLUME[0].byte()), "label_fill=-1 is no label of torch.uint8"),
    (augment.RandomAffine3D(30, label_fill=0.5), (VOLUME, VOLUME[0].long()), "label_fill=0.5 is no label of torch.int64"),
    (augment.RandomAffine3D(30, label_fill=2), (VOLUME, VOLUME[0].bool()), "label_fill=2 is no label of torch.bool"),
    (augment.RandomAffine3D(30), (VOLUME, VOLUME[0].to(torch.complex64)), "labels must be integers or floats, got torch.complex64"),
    (CHAINS["motion"], (MOVED[0], ONES), r"takes a batch \(N, T, J, C\), got shape .*sequence\[None\]"),
    (CHAINS["motion"], (MOVED.long(), ONES), "got torch.int64"),
    (CHAINS["motion"], (MOVED,), "lengths=1 must be the index of the part of a batch that holds the lengths of the sequences, got 1 parts"),
    (CHAINS["motion"], (MOVED, ONES[:3]), r"whole numbers \(4,\), got torch.int64 \(3,\) there"),
    (CHAINS["motion"], (MOVED, torch.ones(4)), r"got torch.float32 \(4,\) there"),
    (CHAINS["motion"], (MOVED, [5, 5, 5, 5]), "got list there"),
    (CHAINS["motion"], (MOVED, ONES.bool()), r"got torch.bool \(4,\) there"),
    (CHAINS["motion"], (MOVED, torch.tensor([5, 6, 5, 5])), "sequence 1 of the batch has length 6"),
    (CHAINS["motion"], (MOVED, torch.tensor([5, 5, 5, 0])), "sequence 3 of the batch has length 0"),
    (CHAINS["motion"], (MOVED[:, :, :4], ONES), "pairs= has joint 4, and there are 4"),
    (CHAINS["motion"], (torch.zeros(4, 5, 5, 4), ONES), "most= has 3 numbers for motion of 4 coordinates"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "batch", "message"), BATCHES, ids=[message for _, _, message in BATCHES])
def test_batches_that_cannot_be_are_named(op: Any, batch: tuple[Any, ...], message: str) -> None:
    chained = [op] if isinstance(op, augment.Compose) else [op, augment.Compose([op])]
    for call in [*chained, augment.RandomApply(op)] if op is JITTER else chained:
        with pytest.raises(AugmentError, match=message):
            call(*batch)


def test_parameters_keys_and_generators_of_something_else_are_refused() -> None:
    images = torch.zeros(12, 3, 9, 9)
    with pytest.raises(AugmentError, match="empty"):
        GREY.draw((0, 3, 8, 8))
    with pytest.raises(AugmentError, match=r"of 12 samples, got Parameters\(3 samples"):
        GREY.apply(images, GREY.draw((3, 3, 8, 8)))
    with pytest.raises(AugmentError, match="is_flipped"):
        GREY.apply(images, FLIP.draw(images.shape))
    with pytest.raises(AugmentError, match="1 operations, got 2"):
        augment.Compose([GREY]).apply(images, [GREY.draw(images.shape)] * 2)
    with pytest.raises(OptionError, match="3 samples, and the batch 12"):
        GREY(images, key=Key(0, 0, np.arange(3)))
    with pytest.raises(OptionError, match="not both"):
        GREY(images, key=Key(0, 0, np.arange(12)), generator=torch.Generator())


def test_pixels_that_an_image_does_not_have_are_an_error() -> None:
    images = batch_for(FLIP)
    for op, name, value in (
        (augment.RandomResizedCrop(8), "left", 52.0), (augment.RandomResizedCrop(8), "height", np.nan),
        (augment.RandomErasing(1.0), "top", -1.0), (augment.RandomErasing(1.0), "width", 53.0),
    ):  # fmt: skip
        parameters = op.draw(images.shape, generator=seeded())
        parameters[name][7] = value
        with pytest.raises(AugmentError, match=r"parameters of sample 7 of the batch are of pixels outside"):
            op.apply(images, parameters)
    wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, (1 << 24) + 1)
    with pytest.raises(AugmentError, match=r"the kernels take images of at most 2\*\*24 pixels a side"):
        augment.RandomResizedCrop(8)(wide)
    assert augment.RandomGain((0.0, 0.0))(wide).shape == wide.shape


def test_lengths_that_their_type_cannot_hold_are_an_error() -> None:
    motion, chain = torch.zeros(2, 300, 1, 1), augment.Compose([augment.MotionSpeed((0.5, 0.5))], lengths=1)
    with pytest.raises(AugmentError, match=r"sequence 1 .* is 300 frames long .* torch.uint8 cannot hold"):
        chain(motion, torch.tensor([3, 200], dtype=torch.uint8))
    found = chain(motion, torch.tensor([3, 100], dtype=torch.uint8))[1]
    assert found.dtype == torch.uint8 and found.tolist() == [5, 199]
