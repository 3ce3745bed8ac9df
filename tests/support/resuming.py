"""Loaders that go on where another one was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch


def check_goes_on(make: Callable[[], Any], see: Callable[[Any], Any], is_seeded: bool, cuts: slice) -> Any:
    """Check that loaders go on at these batches of an epoch, and with the next one if they have a seed.

    Returns:
        the state after the first batch.
    """
    first = make()
    list(first)  # an epoch before
    states, seen = [], []
    for batch in first:
        seen.append(see(batch))
        states.append(json.loads(json.dumps(first.state_dict())))
    following = list(map(see, first)) if is_seeded else None
    for cut in range(len(states))[cuts]:
        torch.manual_seed(99)  # whatever the script draws meanwhile
        again = make()
        again.load_state_dict(states[cut])
        assert list(map(see, again)) == seen[cut + 1 :]
        assert following is None or list(map(see, again)) == following
    return states[0]
