"""Batches whose images are decoded by one call: its errors; tests/torch/test_on_device.py has the batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core.batches import decoded_together
from fastpipe.core.pool import ThreadPool
from fastpipe.core.types import Box


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(("where", "error"), [("decoder", MemoryError), ("asked", KeyboardInterrupt)])
def test_an_error_is_raised_and_nothing_is_made(threads: int, where: str, error: Any) -> None:
    def fail(_: Any) -> Any:
        raise error("of the device")

    def asked(numbers: Any) -> Any:
        image = SimpleNamespace(encoded=lambda: b"an image")
        return fail(numbers) if where == "asked" else [[(image, Box(0, 0, 1, 1))] for _ in numbers]

    pool, made = ThreadPool(threads) if threads else None, list[int]()
    decoder: Any = SimpleNamespace(decode=fail)
    with pytest.raises(error, match="of the device"):
        for job in decoded_together(pool, decoder, 2, asked, made.append, lambda nanoseconds: None):
            job.wait()
    assert not made
    if pool is not None:
        pool.close()
