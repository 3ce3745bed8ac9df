"""``transform.keys`` in TensorFlow's operations: the same numbers, in or outside a graph, also under XLA."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["STREAM", "uniforms"]

# As ``augment.draws`` has it: of batches' augmentations, another stream than that of a dataset's transform.
STREAM = 0x6175676D656E74

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB


def uniforms(seed: Any, epoch: Any, draws: Any, count: int) -> Any:
    """Uniform random numbers for a batch; a row depends on its own key only.

    The generator and its source are those of ``transform.keys.uniforms``, whose numbers these are.

    Args:
        seed, epoch: int64 scalars, taken modulo 2**64.
        draws: int64 (N,): each sample's position in the epoch's order.
        count: how many numbers a sample needs.

    Returns:
        float64 (N, count), in [0, 1).
    """
    golden = _word(_GOLDEN)
    one = _word(1)
    state = _mix(_mix(_bits(seed) + golden) + (_bits(epoch) + one) * golden)
    states = _mix(state + (_bits(draws) + one) * golden)
    steps = tf.range(1, count + 1, dtype=tf.int64)
    words = _mix(states[:, None] + (_bits(steps) * golden)[None, :])
    # Of 53 bits, which are exact as float64; through int64, as no device converts unsigned words.
    whole = tf.cast(tf.bitcast(_shifted(words, 11), tf.int64), tf.float64)
    return whole * tf.constant(2.0**-53, tf.float64)


def _mix(value: Any) -> Any:
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 30)) * _word(_MIX_1)
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 27)) * _word(_MIX_2)
    return tf.bitwise.bitwise_xor(value, _shifted(value, 31))


def _shifted(value: Any, by: int) -> Any:
    return tf.bitwise.right_shift(value, tf.fill(tf.shape(value), _word(by)))


def _bits(value: Any) -> Any:
    return tf.bitcast(tf.cast(value, tf.int64), tf.uint64)


def _word(value: int) -> Any:
    return tf.constant(value, tf.uint64)
