"""Which part of each epoch a worker of ``tf.distribute`` makes."""

from __future__ import annotations

import logging

import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.options import Shard

__all__ = ["shard_of", "workers"]

_log = logging.getLogger("fastpipe.tf")


def workers(*, strict: bool = True) -> tuple[int, int]:
    """This worker's number and how many there are, of ``TF_CONFIG``; (0, 1) without.

    Args:
        strict: whether a process that is none of them is an error.

    Raises:
        OptionError: this process is none of the cluster's workers.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec().as_dict()
    jobs = [(job, len(spec[job])) for job in ("chief", "worker") if job in spec]
    world = sum(count for _, count in jobs)
    if world < 2:
        return 0, 1
    before = 0
    for job, count in jobs:
        if resolver.task_type == job:
            return before + resolver.task_id, world
        before += count
    if not strict:
        return 0, world
    raise OptionError(
        f"shard='auto' is for the chief and workers of TF_CONFIG; its task is {resolver.task_type!r}"
    )


def shard_of(shard: object, *, is_shuffled: bool, seed: int | None) -> Shard | None:
    """The shard that an argument means.

    Args:
        shard: a ``Shard``, ``"auto"``, a ``tf.distribute.InputContext``, or None.
        is_shuffled: whether epochs have orders.
        seed: of these, or None.

    Raises:
        OptionError: it is none of these; or workers would have different orders.
    """
    if shard is None:
        if is_shuffled and seed is None and workers(strict=False)[1] > 1:
            _log.warning(
                "TF_CONFIG names several workers, and without seed= each has another order: pass the same to "
                "all, or samples come twice and others not at all"
            )
        return None
    if isinstance(shard, str) and shard == "auto":
        rank, world = workers()
        shard = Shard(rank, world, "eval")
    elif isinstance(shard, tf.distribute.InputContext):
        shard = Shard(shard.input_pipeline_id, shard.num_input_pipelines, "eval")
    elif not isinstance(shard, Shard):
        raise OptionError(
            f"shard= is a fastpipe.Shard, 'auto', a tf.distribute.InputContext or None, got {shard!r}"
        )
    if shard.world == 1:
        return None
    if is_shuffled and seed is None:
        raise OptionError(
            f"one of {shard.world} shards of a shuffled dataset needs seed=, the same for all: without it "
            "each has another order, and samples come twice"
        )
    return shard
