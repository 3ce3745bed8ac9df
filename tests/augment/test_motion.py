"""Augmentation of motion: lengths, speed, and frames beyond the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from augmentations import CHAINS, MOTION, batch_for, lengths_of, seeded

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.motion import on_motion
from fastpipe.core.slots import SlotPool

MOVED = batch_for(CHAINS["motion"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MOTION)
def test_lengths_are_the_references_by_both_ways(case: str, dtype: torch.dtype) -> None:
    op, motion = MOTION[case], MOVED.to(dtype)
    lengths = lengths_of(motion)
    parameters = op.draw(motion.shape, generator=seeded(1))
    wanted, wanted_lengths = op.reference(motion, parameters, lengths)
    applied = applied_table([op], parameters.table, tuple(motion.shape[1:]))
    for is_host in (True, False):
        found, now = on_motion([op], motion, applied, lengths, SlotPool(0), is_host=is_host)
        assert now is not None and now.dtype == torch.int64 and torch.equal(now, wanted_lengths)
        apart = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)
        assert apart.max() < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def test_speed_keeps_the_path() -> None:
    """A joint that moves evenly moves evenly at any speed, from where it was to where it was."""
    motion = torch.linspace(0, 1, 30).view(1, 30, 1, 1).repeat(50, 1, 1, 1)
    chain = augment.Compose([augment.MotionSpeed((0.5, 3.0))], lengths=1)
    found, lengths = chain(motion, torch.full((50,), 30, dtype=torch.int32))
    assert lengths.dtype == torch.int32 and lengths.unique().numel() > 10
    for row, length in zip(found[..., 0, 0], lengths.tolist(), strict=True):
        steps = row[:length].diff()
        assert row[0] == 0 and torch.allclose(steps, steps[:1].expand_as(steps), atol=1e-5)
        assert (row[length:] == 0).all()
    held = augment.MotionSpeed((2.0, 2.0))(motion)
    assert (held[:, 15:] == held[:, 14:15]).all() and torch.allclose(held[:, 14], motion[:, 28])


def test_a_missing_joint_is_missing_where_it_is_and_unchecked_lengths_do_no_harm() -> None:
    """On a device to look at lengths would be to wait."""
    motion = torch.arange(6.0).view(1, 6, 1, 1).clone()
    motion[0, 3] = torch.nan
    faster, slower = augment.MotionSpeed((2.0, 2.0)), augment.MotionSpeed((0.7, 0.9))
    applied = applied_table([faster], augment.Parameters(speed=np.array([2.0])).table, (6, 1, 1))
    others, lengths = MOVED[:3, :12], torch.tensor([40, -3, 12])
    of_others = applied_table([slower], slower.draw(others.shape).table, (12, 5, 3))
    for is_host in (True, False):
        found, _ = on_motion([faster], motion, applied, None, SlotPool(0), is_host=is_host)
        assert found.flatten().tolist() == [0, 2, 4, 4, 4, 4]
        found, now = on_motion([slower], others, of_others, lengths, SlotPool(0), is_host=is_host)
        assert found.isfinite().all() and now is not None and now.min() >= 1 and now.max() <= 12


def test_two_speeds_are_rounded_once() -> None:
    motion, lengths = MOVED.half(), lengths_of(MOVED)
    chain = augment.Compose([augment.MotionSpeed((0.5, 2.0)), augment.MotionSpeed((0.5, 2.0))], lengths=1)
    parameters = chain.draw(motion.shape)
    found, now = chain.apply(motion, parameters, lengths)
    whole, wanted_now = chain.apply(motion.float(), parameters, lengths)
    assert torch.equal(found, whole.half()) and torch.equal(now, wanted_now)
