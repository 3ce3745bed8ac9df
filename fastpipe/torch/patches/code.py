"""What a script does to the values of a patch, together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastpipe.core.array_samples import Form
from fastpipe.torch.generators import run_keyed
from fastpipe.torch.stock import is_thread_safe

__all__ = ["JointCode"]


class JointCode:
    """A transform that is called with all of a sample's values, ``transform(volume, labels, mask)``.

    Args:
        form: what a sample is made of.
        transform: the script's; or None.
        is_safe: whether it may be called from several threads at once, whatever it is.
    """

    def __init__(self, form: Form, transform: Callable[..., Any] | None, is_safe: bool) -> None:
        self._form, self._transform = form, transform
        self.is_safe = is_safe or transform is None or is_thread_safe([transform])

    def __bool__(self) -> bool:
        return self._transform is not None

    @property
    def runs_here(self) -> bool:
        """Whether it runs in the consumer's thread only."""
        return not self.is_safe

    def transformed(self, values: list[Any], seed: Callable[[], int] | None) -> list[Any]:
        """The sample after the transform, its draws through torch from the seed that a function gives, if
        there is one."""
        transform = self._transform
        if transform is None:
            return values
        if seed is None:
            return [transform(*values)]
        return [run_keyed([lambda several: transform(*several)], values, seed)]

    def sample(self, values: list[Any]) -> Any:
        """The sample of such values."""
        return values[0] if self._transform is not None else self._form.sample(values)
