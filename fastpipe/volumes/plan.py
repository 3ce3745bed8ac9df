"""What is read how, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastpipe._natural import natural_sorted
from fastpipe._sizes import in_bytes
from fastpipe.volumes.sources import Role

__all__ = ["PatchPlan"]


class PatchPlan:
    """What a dataset of patches does with its volumes.  ``print`` it.

    Attributes:
        lines: one for each array, and one for what is remembered.

    Args:
        roles: the arrays.
        patch_size: of the patches.
        remembered: how much is remembered, in words.
        amplification: bytes that were decoded so far for each that was used; None before the first.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        patch_size: Sequence[int],
        remembered: str,
        amplification: float | None,
    ) -> None:
        self.lines = [_line(role, patch_size) for role in roles]
        self.lines.append(f"decoded parts  →  {remembered}")
        if amplification is not None:
            self.lines.append(f"so far  →  {amplification:.2f} bytes were decoded for each that was used")

    def __repr__(self) -> str:
        return "PatchPlan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _order(role: Role) -> str:
    names = [volume.name for volume in role.volumes]
    is_natural = names == natural_sorted(set(names))  # arrays in memory have all the same name
    return "natural order" if is_natural else "the given order"


def _line(role: Role, patch_size: Sequence[int]) -> str:
    first, count = role.volumes[0], len(role.volumes)
    patch = (*role.lead, *patch_size)
    nbytes = math.prod(patch) * role.dtype.itemsize
    where = first.name if count == 1 else f"{count} volumes in {_order(role)}, from {first.name}"
    shape = "×".join(map(str, first.shape))
    hows = list(dict.fromkeys(volume.how for volume in role.volumes))
    more = f", and {len(hows) - 1} other ways" if len(hows) > 1 else ""
    return (
        f"{role.name}: {where}, {shape} {role.dtype}  →  patches of {'×'.join(map(str, patch))} "
        f"({in_bytes(nbytes)}) from {hows[0]}{more}"
    )
