"""One augmentation of each kind and way, chains of them, and batches for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.chains import on_device
from fastpipe.augment.motion import on_motion
from fastpipe.augment.volumes.base import on_volumes
from fastpipe.core.slots import SlotPool

DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
NORMALIZE = augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
PAIRS = ((0, 1), (2, 4))

IMAGES: dict[str, Any] = {
    "flip": augment.RandomHorizontalFlip(),
    "vertical flip": augment.RandomVerticalFlip(),
    "grey": augment.RandomGrayscale(0.5),
    "jitter": augment.ColorJitter(0.8, 0.8, 0.8, 0.2),
    "blur": augment.GaussianBlur((7, 5)),
    "wide blur": augment.GaussianBlur(23),
    "narrow blur": augment.GaussianBlur((3, 1), (0.1, 3.0)),
    "crop": augment.RandomResizedCrop((17, 23)),
    "crop to a pixel": augment.RandomResizedCrop(1, scale=(0.2, 1.0)),
    "bicubic crop": augment.RandomResizedCrop((17, 23), interpolation="bicubic"),
    "nearest crop": augment.RandomResizedCrop((17, 23), interpolation="nearest"),
    "larger crop": augment.RandomResizedCrop((60, 57), scale=(0.3, 1.0)),
    "normalise": NORMALIZE,
    "affine": augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), (-20, 20, -10, 10), "bilinear", 0.5),
    "affine without a fill": augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), 20, "bilinear", None, (10, 30)),
    "affine that fills in no byte": augment.RandomAffine(45, fill=-1.75),
    "nearest affine": augment.RandomAffine(180, (0.3, 0.2), (0.6, 1.5), 20, fill=1.0),
    "rotation": augment.RandomRotation(90, "bilinear"),
    "nearest rotation": augment.RandomRotation((-20, 60), fill=1),
    "rotation about a corner": augment.RandomRotation(20, center=(0, 0)),
    "erasing": augment.RandomErasing(0.7, value=0.7),
    "erasing with no byte": augment.RandomErasing(0.7, value=300.5),
    "policy": augment.RandAugment(3, 20),
    "smooth policy": augment.RandAugment(2, 9, 11, interpolation="bilinear", fill=0.5),
    "trivial policy": augment.TrivialAugmentWide(),
    "smooth trivial policy": augment.TrivialAugmentWide(8, interpolation="bilinear", fill=0.5),
    "sometimes": augment.RandomApply(
        [augment.GaussianBlur(5), augment.RandomRotation(20), augment.GaussianBlur(3)]
    ),
    "floats": augment.ToDtype(torch.float32),
    "bytes": augment.ToDtype(torch.uint8),
    "cut": augment.CutMix(num_classes=2, per_sample=True),
    "mixed": augment.MixUp(num_classes=2, per_sample=True),
}
SPECTROGRAMS: dict[str, Any] = {
    "masks": augment.SpecAugment(2, 30, 3, 20),
    "masks of zeros": augment.SpecAugment(1, 3, 2, 2, p=0.9, zero_masking=True),
    "small masks": augment.SpecAugment(2, 500, 2, 500, p=0.3),
    "gain": augment.RandomGain(12.0),
    "gain of powers": augment.RandomGain((-3.0, 12.0), "power"),
    "gain of decibels": augment.RandomGain(12.0, "decibel"),
    "shift": augment.TimeShift(0.5),
    "shift of frames": augment.TimeShift(0.5, rolls=False, fill=-1.0),
}
VOLUMES: dict[str, Any] = {
    "flip of volumes": augment.RandomFlip3D(),
    "flip of width": augment.RandomFlip3D(2, p=0.7),
    "turn": augment.RandomRotate90(p=0.8),
    "turn about height": augment.RandomRotate90((0, 2), p=0.8),
    "rotation of volumes": augment.RandomAffine3D(30),
    "rotation of planes": augment.RandomAffine3D(((-180, 180), 0, 0)),
    "scale of volumes": augment.RandomAffine3D(0, (0.7, 1.4)),
    "scale of planes": augment.RandomAffine3D(0, (0.7, 1.4), scale_axes=(1, 2)),
    "shift of volumes": augment.RandomAffine3D(0, translate=(0.2, 0.3, 0.1), fill=0.5),
    "affine of volumes": augment.RandomAffine3D(30, (0.7, 1.4), 0.1, p_rotation=0.5, p_scale=0.5),
    "affine, spaced": augment.RandomAffine3D(40, (0.7, 1.4), spacing=(3.0, 1.0, 0.5), fill=-1.0),
    "affine, cut": augment.RandomAffine3D(30, (0.7, 1.4), size=(7, 10, 11), p_rotation=0.5, p_scale=0.5),
    "affine, edge": augment.RandomAffine3D(60, (0.7, 1.6), 0.3, fill="edge"),
    "elastic": augment.RandomElastic3D((3, 4, 5), 1.5, 0.7),
    "elastic, turned": augment.RandomElastic3D(
        3, (0.5, 1.0, 2.0), 0.7, 30, (0.7, 1.4), 0.1, fill=0.5, p_scale=0.5
    ),
    "elastic, cut": augment.RandomElastic3D(2, 1.0, size=(7, 10, 11), fill="edge", degrees=20),
    "noise": augment.GaussianNoise3D((0.0, 0.5)),
    "blur of volumes": augment.GaussianBlur3D((0.3, 2.5), p_channel=0.8),
    "blur of planes": augment.GaussianBlur3D(1.0, axes=(1, 2)),
    "wide blur of volumes": augment.GaussianBlur3D(9.0),
    "brightness": augment.Brightness3D((0.5, 1.5), p_channel=0.7),
    "contrast": augment.Contrast3D((0.5, 2.0)),
    "contrast, beyond": augment.Contrast3D((0.5, 2.0), keep_range=False, p_channel=0.5),
    "gamma": augment.Gamma3D((0.5, 2.0)),
    "gamma, inverted": augment.Gamma3D((0.5, 2.0), inverted=True, p_channel=0.7),
    "gamma alone": augment.Gamma3D((0.5, 2.0), keep_stats=False),
    "low resolution": augment.LowResolution3D((0.3, 1.0), p_channel=0.8),
    "low resolution of planes": augment.LowResolution3D((0.5, 1.0), axes=(1, 2)),
    "some volumes": augment.RandomApply([augment.Gamma3D(), augment.RandomFlip3D()], 0.5),
}
MOTION: dict[str, Any] = {
    "speed": augment.MotionSpeed((0.4, 2.5)),
    "slower": augment.MotionSpeed((0.3, 0.5)),
    "speed of one": augment.MotionSpeed((1.0, 1.0)),
    "translation": augment.MotionTranslation(0.3),
    "translation of each": augment.MotionTranslation((0.0, 0.5, 2.0)),
    "scale": augment.MotionScale((0.5, 2.0)),
    "scale about a joint": augment.MotionScale((0.5, 2.0), about=3),
    "mirror": augment.MotionMirror(PAIRS),
    "mirror of another": augment.MotionMirror({2: 0, 0: 2, 1: 4}, axis=2, p=0.8, about=0.7),
    "some motion": augment.RandomApply([augment.MotionSpeed((0.5, 2.0)), augment.MotionMirror(PAIRS)], 0.5),
}
OPS = IMAGES | SPECTROGRAMS | VOLUMES | MOTION


def _deit(interpolation: str) -> augment.Compose:
    return augment.Compose([
        augment.RandomResizedCrop((31, 37), interpolation=interpolation), augment.RandomHorizontalFlip(),
        augment.RandAugment(3, 9, interpolation="bilinear", fill=0.4), augment.ToDtype(torch.float32), NORMALIZE,
        augment.RandomErasing(0.5, value="random"), augment.MixUp(num_classes=2, per_sample=True),
    ])  # fmt: skip


def _simclr(fuse: bool = False, rotates: bool = False) -> augment.Compose:
    return augment.Compose([
        augment.RandomResizedCrop((31, 37)), augment.RandomHorizontalFlip(),
        *[augment.RandomAffine(20, (0.1, 0.1), (0.9, 1.4), 5, fill=0.5)] * rotates,
        augment.RandomApply(augment.ColorJitter(0.8, 0.8, 0.8, 0.2), 0.8), augment.RandomGrayscale(0.2),
        augment.RandomApply(augment.GaussianBlur(5)), augment.ToDtype(torch.float32), NORMALIZE,
    ], fuse=fuse)  # fmt: skip


CHAINS: dict[str, augment.Compose] = {
    "nothing": augment.Compose([]), "SimCLR": _simclr(), "DeiT": _deit("bicubic"), "DeiT, nearest": _deit("nearest"),
    "fused": _simclr(fuse=True), "fused, rotated": _simclr(fuse=True, rotates=True),
    "SpecAugment": augment.Compose(
        [augment.TimeShift(0.2), augment.RandomGain(6.0), augment.SpecAugment(2, 20, 2, 10)]
    ),
    "nnU-Net": augment.nnunet_default(),
    "other volumes": augment.Compose([
        augment.RandomElastic3D(3, 1.0, 1.0, 20), augment.GaussianNoise3D(0.1), augment.GaussianBlur3D((0.5, 2.0)),
        augment.LowResolution3D((0.4, 0.9)), augment.Contrast3D(), augment.Gamma3D(inverted=True),
        augment.Gamma3D(keep_stats=False), augment.RandomFlip3D(),
    ]),
    "motion": augment.Compose([
        augment.RandomApply(augment.MotionSpeed((0.5, 2.0)), 0.7), augment.MotionTranslation(0.5),
        augment.MotionScale((0.8, 1.25), about=0), augment.MotionMirror(PAIRS),
    ], lengths=1),
}  # fmt: skip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_images(dtype: torch.dtype = torch.float32, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth images (12, C, 40, 52): some dark, bright, grey, of one colour, and of noise."""
    generator = seeded(seed)
    small = torch.rand(12, channels, 6, 7, generator=generator)
    images = torch.nn.functional.interpolate(small, (40, 52), mode="bicubic").clamp(0, 1)
    images[1] *= 0.02
    images[2] = 1 - images[2] * 0.02
    images[3] = images[3].mean(0)
    images[4] = images[4, :, :1, :1]
    images[5] = torch.rand(images[5].shape, generator=generator)
    return (images * 255).round().to(dtype) if dtype == torch.uint8 else images.to(dtype)


def volumes_of(dtype: torch.dtype, channels: int, is_cube: bool) -> Tensor:
    """Volumes (6, C, 12, 15, 15), or (6, C, 15, 15, 15): smooth, noisy, and of one value."""
    size = (15 if is_cube else 12, 15, 15)
    small = torch.randn(6, channels, 4, 5, 5, generator=seeded())
    volumes = torch.nn.functional.interpolate(small, size, mode="trilinear")
    volumes[1] = torch.randn(volumes[1].shape, generator=seeded(1))
    volumes[2] = 0.25
    volumes[3] = volumes[3] * 100 + 1000
    return volumes.to(dtype)


def batch_for(op: Any, dtype: torch.dtype = torch.float32, channels: int = 3, seed: int = 0) -> Tensor:
    """A batch that an augmentation, or a chain, takes."""
    first = op.ops[0] if isinstance(op, augment.Compose) and op.ops else op
    if isinstance(first, augment.Compose) or first.kind == "images":
        return smooth_images(dtype, channels, seed)
    if first.kind == "volumes":
        return volumes_of(dtype, channels, is_cube=isinstance(first, augment.RandomRotate90))
    return (torch.randn((40, 30, 5, 3), generator=seeded(seed)).cumsum(1) / 5).to(dtype)


def lengths_of(motion: Tensor) -> Tensor:
    count, frames = motion.shape[:2]
    found = torch.randint(1, frames + 1, (count,), generator=seeded(1))
    found[:3] = torch.tensor([1, 2, frames])[:count]
    return found


def by_torch(ops: Any, batch: Tensor, parameters: Any) -> Tensor:
    """The result by torch's operations, which other devices take, on the processor."""
    given = [parameters] if isinstance(parameters, augment.Parameters) else parameters
    tables = np.concatenate([np.zeros((len(batch), 0)), *(one.table for one in given)], axis=1)
    planes = batch.unsqueeze(1) if batch.ndim == 3 else batch
    applied = applied_table(ops, tables, tuple(planes.shape[1:]))
    if ops and ops[0].kind == "volumes":
        return on_volumes(ops, planes, applied, SlotPool(0), is_host=False)
    if ops and ops[0].kind == "motion":
        return on_motion(ops, planes, applied, None, SlotPool(0), is_host=False)[0]
    found = on_device(ops, planes, torch.from_numpy(applied).float())
    return found.squeeze(1) if batch.ndim == 3 else found
