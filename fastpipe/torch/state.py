"""Conversion of a loader's state to a small JSON-compatible dict, and back."""

from __future__ import annotations

import reprlib
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastpipe.errors import OptionError
from fastpipe.torch.order import EpochOrder, ResumePoint
from fastpipe.torch.samplers import REPLAYED, innermost, sampler_state, tensor_of, text_of

if TYPE_CHECKING:
    from fastpipe.torch.indices import IndexBatches

VERSION = 1
# Trainers that save the state of every loader with a ``state_dict``, even if the script does not need it.
_TRAINERS = {"lightning", "pytorch_lightning", "accelerate"}
# Trainers that do not request another batch after the last batch of an epoch, because they count batches.
_COUNTERS = {"lightning", "pytorch_lightning"}
_has_warned: weakref.WeakSet[EpochOrder] = weakref.WeakSet()


def state_of(
    order: EpochOrder, samples: int | None, seed: int | None, kept: IndexBatches | None
) -> dict[str, Any]:
    state: dict[str, Any] = {"version": VERSION, "seed": seed, "samples": samples}
    progress, pending = order.progress, order.pending
    sampler = sampler_state(order.index_sampler)
    if pending is not None:
        point = pending
    elif progress is None or progress.is_over or (_is_received(order) and _a_trainer_asks(_COUNTERS)):
        if kept is None and order.waiting is not None:
            kept = order.waiting()
        point = order.between(None, 0) if kept is None else order.between(kept.base_seed, kept.begun)
    else:
        point, sampler = order.here(), progress.sampler
    state |= {"epoch": point.epoch, "batches": point.batches}
    if order.ours() is not None:
        state["position"] = point.position
    else:
        state |= {"taken": point.taken, "offset": point.offset, "sampler": sampler}
        state |= {"generator": text_of(point.generator), "asked": point.asked}
        state["global" if order.generator is torch.default_generator else "now"] = text_of(point.now)
    if seed is None:
        state |= {"base_seed": point.base_seed, "begun": point.begun}
    if (seeds := order.seeds) is not None:
        state["seeds"] = text_of(seeds.get_state() if point.seeds is None else point.seeds)
    if (groups := _groups_of(order)) is not None:
        state["groups"] = groups
    return state


def _groups_of(order: EpochOrder) -> str | None:
    """Return a text that describes the groups of samples in the order.  Return None if there are no
    groups."""
    arrangement = getattr(innermost(order.index_sampler), "arrangement", None)
    return None if arrangement is None else str(arrangement.about)


def point_of(state: Any, order: EpochOrder, samples: int | None, seed: int | None) -> ResumePoint:
    _check(state, order, samples, seed)
    return ResumePoint(
        epoch=state["epoch"], begun=state.get("begun", 0), batches=state["batches"],
        taken=state.get("taken", 0), offset=state.get("offset", 0), position=state.get("position", 0),
        base_seed=state.get("base_seed"), generator=tensor_of(state.get("generator")),
        asked=state.get("asked"), now=tensor_of(state.get("global", state.get("now"))),
        seeds=tensor_of(state.get("seeds")),
    )  # fmt: skip


def _check(state: Any, order: EpochOrder, samples: int | None, seed: int | None) -> None:
    if not isinstance(state, dict) or not {"version", "seed", "samples", "epoch", "batches"} <= state.keys():
        raise OptionError(f"load_state_dict() takes the result of state_dict(), got {reprlib.repr(state)}")
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
            f"this state belongs to a dataset of {state['samples']} samples, the loader's has {samples}: "
            "the rest of the epoch would differ"
        )
    groups = _groups_of(order)
    if state.get("groups") != groups:
        raise OptionError(
            f"this state was saved with the order {state.get('groups') or 'of samples'}, the loader has the "
            f"order {groups or 'of samples'}: make the loader with the same shuffle=, over the same files"
        )
    if ("position" in state) != (order.ours() is not None):
        raise OptionError(
            "this state belongs to a loader whose order came from "
            + ("shuffle= or no sampler" if "position" in state else "a sampler")
            + ", unlike this one's: make the loader with the same sampler, shuffle, seed and shard"
        )
    if "position" not in state:
        _check_generator(state, order.generator)


def _check_generator(state: Any, generator: torch.Generator | None) -> None:
    is_global = generator is torch.default_generator
    if "global" not in state and "now" not in state:  # an older fastpipe saved only the state at epoch start
        if state.get("generator") is None and generator is not None:
            raise OptionError(
                "this state was saved between two epochs by an older fastpipe, which left out the generator "
                "that the next order is drawn from: go on from a state taken within an epoch, or set the "
                "generator yourself and call set_epoch(epoch) instead of load_state_dict()"
            )
    elif ("global" in state) != is_global or (state.get("now") is None) != (generator is None or is_global):
        drawn_from = "no generator" if state.get("now") is None else "a generator= of its own"
        if "global" in state:
            drawn_from = "torch's global generator"
        raise OptionError(
            f"this state belongs to a loader whose order was drawn from {drawn_from}, unlike this one's: "
            "make the "
            "loader with the same sampler and generator="
        )


def unsaved_state(why: OptionError, order: EpochOrder) -> dict[str, Any]:
    """Return a placeholder state if the caller is a trainer that saves all loaders.  Otherwise raise
    ``why``."""
    if not _a_trainer_asks(_TRAINERS):
        raise why
    if order not in _has_warned:
        _has_warned.add(order)
        warnings.warn(
            f"the checkpoint does not say where in its epoch the loader is: {why}.  Training can go on from "
            "a checkpoint of an epoch's end only",
            stacklevel=3,
        )
    progress = order.progress
    if progress is None or _is_received(order):
        epoch, batches = order.next_epoch, 0
    else:
        epoch, batches = progress.point.epoch, progress.point.batches + progress.received
    return {"version": VERSION, "unsaved": str(why), "epoch": epoch, "batches": batches}


def is_unsaved(state: Any, order: EpochOrder) -> bool:
    """Return whether ``state`` comes from ``unsaved_state``.  If so, set the next epoch's number from it."""
    if not isinstance(state, dict) or "unsaved" not in state:
        return False
    if state.get("batches"):
        raise OptionError(
            f"this state was taken after {state['batches']} batches of an epoch and does not say which, "
            f"since: {state['unsaved']}.  Go on from a checkpoint of an epoch's end"
        )
    order.set_epoch(state.get("epoch", 0))
    return True


def _is_received(order: EpochOrder) -> bool:
    """Return whether all batches of the epoch were received, even if the iterator is not exhausted yet."""
    progress = order.progress
    if progress is None or progress.is_over:
        return True
    try:
        return progress.point.batches + progress.received >= len(order)
    except TypeError:  # a sampler without a length
        return False


def _a_trainer_asks(trainers: set[str]) -> bool:
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] in trainers for frame in frames)


def check_stateful(method: str, order: EpochOrder, is_map_style: bool, comes_in_order: bool) -> None:
    if not is_map_style:
        raise OptionError(
            f"{method}() saves a position in an order of indices, and an IterableDataset has none: use "
            "torchdata's StatefulDataLoader, whose workers ask the dataset for its state"
        )
    if not comes_in_order:
        raise OptionError(
            f"{method}() counts batches in their order, but in_order=False gives them as they come: "
            "leave in_order=True"
        )
    sampler = innermost(order.index_sampler)
    if type(sampler) not in REPLAYED and not hasattr(sampler, "state_dict"):
        raise OptionError(
            f"the order comes from a {type(sampler).__name__}, which has no state_dict() and "
            "load_state_dict(), so that its epoch cannot be resumed: add these methods to it, or use "
            "shuffle=True and a seed"
        )
