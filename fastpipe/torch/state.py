"""A loader's state as a small dict that JSON can hold, and the way back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastpipe.errors import OptionError
from fastpipe.torch.order import EpochOrder, ResumePoint, ShardSampler

__all__ = ["point_of", "sampler_state", "set_sampler_state", "state_of"]

VERSION = 1
# Their order comes from a generator alone, so that it can be drawn again.
_REPLAYED = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
    ShardSampler, list, tuple, range, np.ndarray, torch.Tensor,
)  # fmt: skip


def state_of(order: EpochOrder, samples: int | None, seed: int | None) -> dict[str, Any]:
    """The state of a loader, counted at what the user has received.

    Args:
        order: the loader's order.
        samples: length of its dataset.
        seed: its seed.

    Raises:
        OptionError: the order comes from a sampler that has no state.
    """
    check_sampler(order)
    state: dict[str, Any] = {"version": VERSION, "seed": seed, "samples": samples}
    progress, pending = order.progress, order.pending
    if pending is not None:
        point, generator, sampler = (
            pending,
            pending.generator,
            sampler_state(order.sampler, order.index_sampler),
        )
    elif progress is None or progress.is_over:
        point, generator = ResumePoint(order.next_epoch), None
        sampler = sampler_state(order.sampler, order.index_sampler)
    else:
        point, generator, sampler = order.here(), progress.generator, progress.sampler
    state |= {"epoch": point.epoch, "batches": point.batches}
    ours = order.ours(seed)
    if ours is not None:
        state["position"] = point.position
    else:
        state |= {"taken": point.taken, "offset": point.offset, "sampler": sampler}
        state["generator"] = None if generator is None else _text_of(generator)
    if seed is None:
        state |= {"base_seed": point.base_seed, "begun": point.begun}
    return state


def point_of(state: Any, order: EpochOrder, samples: int | None, seed: int | None) -> ResumePoint:
    """The point that a state describes, for a loader to go on there.

    Raises:
        OptionError: it is no state of such a loader.
    """
    _check(state, order, samples, seed)
    check_sampler(order)
    generator = state.get("generator")
    return ResumePoint(
        epoch=state["epoch"], begun=state.get("begun", 0), batches=state["batches"],
        taken=state.get("taken", 0), offset=state.get("offset", 0), position=state.get("position", 0),
        base_seed=state.get("base_seed"), generator=None if generator is None else _tensor_of(generator),
    )  # fmt: skip


def _check(state: Any, order: EpochOrder, samples: int | None, seed: int | None) -> None:
    if not isinstance(state, dict) or not {"version", "seed", "samples", "epoch", "batches"} <= state.keys():
        raise OptionError(f"load_state_dict() takes what state_dict() gave, got {_short(state)}")
    if state["version"] != VERSION:
        raise OptionError(
            f"this state has version {state['version']!r}, this fastpipe reads version {VERSION}: resume "
            "with the fastpipe that saved it"
        )
    if state["seed"] != seed:
        raise OptionError(
            f"this state was saved with seed={state['seed']!r}, the loader has seed={seed!r}, which gives "
            "another order: make the loader with the seed of the state"
        )
    if state["samples"] != samples:
        raise OptionError(
            f"this state is of a dataset of {state['samples']} samples, the loader's has {samples}: the "
            "rest of the epoch would be another one"
        )
    if ("position" in state) != (order.ours(seed) is not None):
        raise OptionError(
            "this state is of a loader whose order came from "
            + ("shuffle= or no sampler" if "position" in state else "a sampler")
            + ", unlike this one's: make the loader with the same sampler, shuffle, seed and shard"
        )


def check_sampler(order: EpochOrder) -> None:
    """Raise an error if the order comes from a sampler of the user's that has no state."""
    sampler = _innermost(order.index_sampler)
    if type(sampler) not in _REPLAYED and not hasattr(sampler, "state_dict"):
        raise OptionError(
            f"the order comes from a {type(sampler).__name__}, which has no state_dict() and "
            "load_state_dict(), so that nobody knows how to go on in the middle of its epoch: add these "
            "methods to it, or use shuffle=True and a seed"
        )


def sampler_state(sampler: Any, index_sampler: Any) -> Any:
    """What a sampler says of itself before an epoch; None of samplers that have nothing to say."""
    inner = _innermost(index_sampler)
    if hasattr(inner, "state_dict"):
        return inner.state_dict()
    return {"epoch": inner.epoch} if type(inner) is DistributedSampler else None


def set_sampler_state(order: EpochOrder, state: Any) -> None:
    """Give a sampler back what it said of itself."""
    inner = _innermost(order.index_sampler)
    if state is None:
        return
    if type(inner) is DistributedSampler:
        inner.set_epoch(state["epoch"])
    elif hasattr(inner, "load_state_dict"):
        inner.load_state_dict(state)


def _innermost(sampler: Any) -> Any:
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def _text_of(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor_of(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:99] + "…"
