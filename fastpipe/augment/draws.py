"""Where the uniform numbers of a batch come from: a key, a generator of torch's, or torch's global one."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe.augment.parameters import Float64Array
from fastpipe.core.extras import require
from fastpipe.core.keys import uniforms
from fastpipe.core.types import Key
from fastpipe.errors import OptionError

__all__ = ["uniform_rows"]

# Keyed numbers of batches are another stream than those of samples, which the same key gives to a transform.
_STREAM = 0x6175676D656E74


def uniform_rows(count: int, columns: int, generator: Any = None, key: Key | None = None) -> Float64Array:
    """Uniform numbers in [0, 1), a row for each sample of a batch.

    Args:
        count: samples.
        columns: numbers for each.
        generator: a ``torch.Generator`` of the CPU, which gives one 64-bit number to a batch; None takes
            torch's global one.
        key: takes the place of a generator.

    Returns:
        (count, columns).

    Raises:
        OptionError: the key has another number of samples, or the generator is not of the CPU.
    """
    if key is not None:
        if generator is not None:
            raise OptionError("give generator= or key=, not both: each says where random numbers come from")
        if len(key.draws) != count:
            raise OptionError(f"key= has {len(key.draws)} samples, and the batch {count}")
        return uniforms(key.seed ^ _STREAM, key.epoch, np.asarray(key.draws), columns)
    torch = require("torch", extra="torch")
    if generator is not None and generator.device.type != "cpu":
        raise OptionError(
            f"generator= must be of the CPU, got one of {generator.device}: parameters are drawn on the "
            "host, and asking a device would wait for it. Use torch.Generator().manual_seed(…)"
        )
    base = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return uniforms(int(base), 0, np.arange(count), columns)
