from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def scripts(example: Any, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The scripts of the module's ``EXAMPLE``."""
    with example(request.module.EXAMPLE) as found:
        yield found


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other, which takes long where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
